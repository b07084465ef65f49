"""``locret-serve`` in a process of its own, and a port for one."""

import socket
import subprocess
import sys
import time
from pathlib import Path


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class Command:
    """The command at a free port."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.log = folder / "stderr.txt"
        with self.log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "locret_kit.cli.serve", "--port", "0", *words],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr,
            )  # fmt: skip

    def ready(self) -> str:
        """Its address, when it has said that the model is loaded."""
        while "ready: " not in (said := self.log.read_text()):
            assert self.process.poll() is None, said
            time.sleep(0.05)
        return next(line for line in said.splitlines() if line.startswith("http://"))
