"""A headless Chromium, driven over a pipe by its DevTools protocol."""

import fcntl
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next((path for name in BROWSERS if (path := shutil.which(name))), None)


class Tab:
    """A tab of the browser.

    Attributes:
        said: errors and warnings of the console, and exceptions that nobody caught.
    """

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, os.fdopen(answers, "rb")
        self._rest, self._count, self._session = b"", 0, {}
        self._loaded = set[str]()
        self.said: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "DOM"):
            self.call(f"{domain}.enable")
        self.call("Page.setLifecycleEventsEnabled", enabled=True)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a command."""
        self._count += 1
        os.write(
            self._commands,
            json.dumps({"id": self._count, "method": method, "params": params, **self._session}).encode() + b"\0",
        )
        while (message := self._message()).get("id") != self._count:
            self._note(message)
        if "error" in message:
            raise RuntimeError(f"{method}: {message['error']['message']}")
        return message["result"]

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            piece = self._answers.read1()
            if not piece:
                raise RuntimeError("the browser has ended")
            self._rest += piece
        message, self._rest = self._rest.split(b"\0", 1)
        return json.loads(message)

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        if message["method"] == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.said.append(details.get("exception", {}).get("description", details["text"]))
        elif message["method"] == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.said.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif message["method"] == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.said.append(str(params["args"]))
        elif message["method"] == "Page.lifecycleEvent" and params["name"] == "load":
            self._loaded.add(params["loaderId"])

    def open(self, url: str) -> None:
        """A page in place of the one before, which may be of the same address, until all of it is loaded."""
        loader = self.call("Page.navigate", url=url)["loaderId"]
        while loader not in self._loaded:
            self._note(self._message())

    def evaluate(self, script: str) -> Any:
        """The value of an expression; of a promise, what it comes to."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"]["exception"]["description"])
        return answer["result"].get("value")

    def wait(self, script: str, seconds: float = 300) -> Any:
        """The value of an expression, once it is true."""
        end = time.monotonic() + seconds
        while not (value := self.evaluate(script)):
            assert time.monotonic() < end, (
                f"not within {seconds} s: {script}\n{self.evaluate('document.body.innerText')}"
            )
            time.sleep(0.03)
        return value

    def text(self, selector: str) -> str:
        return self.evaluate(f"document.querySelector({json.dumps(selector)}).textContent")

    def click(self, selector: str) -> None:
        """A click of the mouse on the middle of an element."""
        x, y = self.evaluate(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.scrollIntoView({{ block: 'center' }});"
            "const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, text: str) -> None:
        """Text into what has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        """Enter, Escape or Tab."""
        code, more = {"Enter": (13, {"text": "\r"}), "Escape": (27, {}), "Tab": (9, {})}[key]
        for kind in ("keyDown", "keyUp"):
            given = more if kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **given)

    def choose(self, selector: str, *files: Path) -> None:
        """Files into a file input, as a person chooses them."""
        found = self.call("Runtime.evaluate", expression=f"document.querySelector({json.dumps(selector)})")["result"]
        self.call("DOM.setFileInputFiles", files=[str(file) for file in files], objectId=found["objectId"])


@contextmanager
def browsing(folder: Path) -> Iterator[Tab]:
    """A tab of a browser of its own, whose profile lies in a folder."""
    assert BROWSER is not None
    pipes = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for pipe in (os.pipe(), os.pipe()) for end in pipe]
    theirs_in, ours_out, ours_in, theirs_out = pipes
    words = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        "--remote-debugging-pipe", f"--user-data-dir={folder}/profile",
    ]  # fmt: skip
    command = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out} >/dev/null 2>&1'  # it reads from 3 and writes to 4
    running = subprocess.Popen(["bash", "-c", command, "-", *words], pass_fds=(theirs_in, theirs_out))
    os.close(theirs_in)
    os.close(theirs_out)
    tab = Tab(ours_out, ours_in)
    try:
        yield tab
    finally:
        running.terminate()
        running.wait(300)
        os.close(ours_out)
