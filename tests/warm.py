"""Commands of the kit for a shell, each in a process forked from one that has imported what they import.

To the shell a command is what it always is: a program in the search path with arguments, a folder, an environment, three
streams and an exit status. Imports take seconds of every command, and here they are done once.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

from forked import renew_threads

NAMES = ("read", "info", "ask", "kept", "plan", "eval", "train", "publish")
HEAVY = (
    "locret_kit.backbones.load", "locret_kit.documents.kept_positions", "locret_kit.evals.engine.runner",
    "locret_kit.evals.report.html_report", "locret_kit.evals.figures.results", "locret_kit.training.fit",
    "locret_kit.card", "locret_kit.planning.inference_plan", "transformers.models.llama.modeling_llama",
)  # fmt: skip
CLIENT = """#!{python} -SE
import os, socket, sys
one = socket.socket(socket.AF_UNIX)
one.connect({address!r})
socket.send_fds(one, [b"."], [0, 1, 2])
one.sendall(repr((sys.argv, os.getcwd(), dict(os.environ))).encode())
one.shutdown(socket.SHUT_WR)
sys.exit(int(one.recv(9) or 70))
"""


@contextmanager
def commands(folder: Path, env: dict[str, str]) -> Iterator[Path]:
    """A folder of programs by the commands' names, which work until the block ends. The package is that of ``env``."""
    (folder / "bin").mkdir()
    for name in NAMES:
        program = folder / "bin" / f"locret-{name}"
        program.write_text(CLIENT.format(python=sys.executable, address=str(folder / "door")))
        program.chmod(0o755)
    process = subprocess.Popen([sys.executable, __file__, str(folder / "door")], env=env, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        yield folder / "bin"
    finally:
        process.kill()
        process.wait()


def serve(address: str) -> None:
    """Run what is asked for, one command after another, until this process is killed."""
    for module in HEAVY:
        import_module(module)
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(address)
        door.listen()
        print("ready", flush=True)
        while True:
            one, _ = door.accept()
            _, streams, *_ = socket.recv_fds(one, 1, 3)
            asked = b"".join(iter(lambda one=one: one.recv(1 << 16), b""))
            child = os.fork()
            if not child:
                run(asked.decode(), streams)
            for stream in streams:
                os.close(stream)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            one.sendall(str(status if status >= 0 else 128 - status).encode())
            one.close()


def run(asked: str, streams: list[int]) -> None:
    """A command, in this process, which then ends."""
    status = 70
    renew_threads()
    try:
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        sys.stdin, sys.stdout, sys.stderr = (os.fdopen(i, mode, buffering=1) for i, mode in enumerate("rww"))
        sys.argv, folder, env = eval(asked)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(env)
        module = import_module(f"locret_kit.cli.{Path(sys.argv[0]).name.removeprefix('locret-')}")
        status = module.main()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    serve(sys.argv[1])
