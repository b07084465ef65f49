"""Python processes import nothing from the folder in which they are started; processes that lock one file."""

import json
import os
import subprocess
import sys
import threading

import pytest
from planted_files import plant

from locret_kit.files import locked
from locret_kit.processes import python

PROGRAM = "import json, signal, sys\nprint(json.dumps([__name__, sys.argv, sys.path]))\nsys.exit(3)\n"


@pytest.mark.parametrize("safe", ["", "1"])
def test_the_current_folder_is_no_place_for_modules(tmp_path, safe):
    """With PYTHONSAFEPATH, which Python 3.11 knows, and without."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    ran = plant(here, "runpy", "ctypes", "json", "signal", "importlib", "program", "sitecustomize")
    (there / "program.py").write_text(PROGRAM)
    env = {**os.environ, "PYTHONSAFEPATH": safe, "PYTHONPATH": str(there)}
    command = python("program", "-a", "b c", before="import ctypes, signal")
    done = subprocess.run(command, cwd=here, env=env, capture_output=True, text=True)
    assert done.returncode == 3 and not done.stderr and not ran.exists()
    name, words, path = json.loads(done.stdout)
    assert name == "__main__" and words == [str(there / "program.py"), "-a", "b c"]
    assert path[0] == str(there) and not {"", ".", str(here)} & {*path}
    # The test itself: the usual way runs what was planted.
    subprocess.run([sys.executable, "-m", "program"], cwd=here, env={**env, "PYTHONSAFEPATH": ""}, capture_output=True)
    assert ran.exists()


def test_a_lock_is_one_processes_at_a_time(tmp_path):
    lock, counter, inside = tmp_path / ".lock", tmp_path / "counter", []
    counter.write_text("0")

    def count() -> None:
        for _ in range(20):
            with locked(lock, "busy", wait=-1):
                inside.append(1)
                counter.write_text(str(int(counter.read_text()) + len(inside)))
                inside.pop()

    threads = [threading.Thread(target=count) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counter.read_text() == "100"

    program = "from pathlib import Path; from locret_kit.files import locked\n"
    program += f"with locked(Path({str(lock)!r}), ''):\n print('held', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=-1, stdout=-1) as child:
        assert child.stdout.readline() == b"held\n"
        with pytest.raises(OSError, match="^busy$"), locked(lock, "busy"):
            pass
        child.kill()
    with locked(lock, "busy"):  # of a process that was killed
        pass
