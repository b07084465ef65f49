"""Last used 2026-11-23, for docs/results/speed.md.

Two commands one after the other, and both at once: what a neighbour costs.

    python scripts/research/at_once.py "locret-infer ... a.txt" "locret-infer ... b.txt" --rounds 3

Two processes that share the cores fairly end, at once, no later than one after the other. Threads that spin while they wait
take cores from the other process: the ratio is then far above 1.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence


def seconds(commands: Sequence[str]) -> float:
    """Seconds until the last of the commands, started together, has ended.

    Raises:
        SystemExit: one of them failed; with its last words.
    """
    began = time.perf_counter()
    with tempfile.TemporaryFile("w+") as said:
        running = [subprocess.Popen(shlex.split(command), stdout=said, stderr=said) for command in commands]
        statuses = [process.wait() for process in running]
        if any(statuses):
            said.seek(0)
            raise SystemExit(f"{commands} ended with {statuses}:\n{said.read()[-2000:]}")
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commands", nargs=2, metavar="COMMAND")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    ratios = []
    for _ in range(args.rounds):
        alone = [seconds([command]) for command in args.commands]
        together = seconds(args.commands)
        ratios.append(together / sum(alone))
        print(
            f"alone {alone[0]:.1f} s and {alone[1]:.1f} s, at once {together:.1f} s: {ratios[-1]:.2f} of their sum",
            flush=True,
        )
    print(f"median {statistics.median(ratios):.2f}, largest {max(ratios):.2f}")


if __name__ == "__main__":
    main()
