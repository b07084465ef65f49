"""Python processes that this one starts; CPU threads of a command: as many as it may use, and asleep while they wait. No torch.

The number of threads does not depend on the machine's load. It decides how sums are split, so a run that is resumed next to
another process would follow another curve in its last bits.
"""

import math
import os
import sys
from contextlib import suppress
from pathlib import Path

RUN = """import sys
if sys.path[:1] == [""]:
    del sys.path[0]
{before}
import runpy
runpy.run_module({module!r}, run_name="__main__", alter_sys=True)
"""
"""Runs a module. ``-c`` puts the current folder first in ``sys.path`` as ``''``, unless PYTHONSAFEPATH is set; nothing but
``sys``, which is built in, is imported before it is gone."""


def python(module: str, *words: str, before: str = "") -> list[str]:
    """The command that runs a module as ``python -m`` does, but imports nothing from the current folder: a file called
    ``json.py`` in a download folder is not ours. PYTHONPATH holds.

    Args:
        words: ``sys.argv`` behind the module's name. before: statements that run before the module is imported.
    """
    return [sys.executable, "-c", RUN.format(module=module, before=before), *words]


GROUPS, GROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def control_groups() -> list[Path]:
    """Folders of this process's control group and of all above it, whose bounds hold too: a container's, a job's, a user's. Only
    cgroup v2 has such; the folders need not be there."""
    try:
        lines = GROUP.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    own = GROUPS / next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    # A container may name a group outside, as "/../.."; what it sees of its own is at the root then.
    return [GROUPS] if ".." in own.parts else [own, *own.parents][: 1 + len(own.parts) - len(GROUPS.parts)]


def choose_threads() -> None:
    """Set OpenMP's variables, but for those that the user has set; it reads them once, when torch is imported.

    By default OpenMP's threads spin while they wait for one another. Two commands of two threads each on two cores then
    take one another's time and become many times slower; threads that sleep leave each its share.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    quota = cores_allowed()
    if quota is not None and quota < len(os.sched_getaffinity(0)):  # Linux has both
        os.environ.setdefault("OMP_NUM_THREADS", str(quota))


def cores_allowed() -> int | None:
    """Cores that the quotas of control groups allow, rounded up; None where there is no quota. OpenMP counts the machine's."""
    allowed = []
    for group in control_groups():
        with suppress(OSError, ValueError):  # no cgroup v2, or "max"
            limit, period = (group / "cpu.max").read_text(encoding="ascii").split()
            allowed.append(max(1, math.ceil(int(limit) / int(period))))
    return min(allowed, default=None)
