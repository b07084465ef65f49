"""CPU threads of a command: as many as the process may use, and asleep while they wait. No torch.

The number does not follow what else runs on the machine: it decides how sums are split, so a run that is resumed beside
another process would follow another curve in its last bits.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

QUOTA = Path("/sys/fs/cgroup/cpu.max")


def choose() -> None:
    """Set OpenMP's variables, but for those that the user has set; it reads them once, when torch is imported.

    By default OpenMP's threads spin while they wait for one another. Two commands of two threads each on two cores then
    take one another's time and become many times slower; threads that sleep leave each its share.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    quota = cores_allowed(QUOTA)
    if quota is not None and quota < (os.cpu_count() or 1):
        os.environ.setdefault("OMP_NUM_THREADS", str(quota))


def cores_allowed(quota: Path) -> int | None:
    """Cores that a container's quota allows, rounded up; None where there is no quota. OpenMP counts the machine's."""
    try:
        limit, period = quota.read_text(encoding="ascii").split()
        return max(1, math.ceil(int(limit) / int(period)))
    except (OSError, ValueError):  # no cgroup v2, or "max"
        return None
