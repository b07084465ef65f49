"""Compare two commits bit for bit: kept positions, tokens, scores, training losses, heads, and a resumed run.

    python scripts/compare_commits.py OLD [NEW=HEAD] [--seed 0] [--examples 20] [--steps 30] [--work FOLDER]

Both commits are checked out next to each other and run the same published commands on the demo backbone, one thread, in
float32. Examples are drawn by ``--seed``: `locret`, `rereading-locret` and six other policies, three lengths, some with
4-bit keys and values, some with heads of different lengths. The training is killed (SIGKILL) once and resumed. Prints one
line per example, and exits with status 1 where anything differs.

The training validates nothing. With ``data.val_samples`` above 0 its losses differ between commits before "Training:
validation is set aside first" (2026-11-22) and from it on: what is validated on is no longer trained on.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
HEADS = "checkpoints/smollm2-135m-locret"
BACKBONE = "checkpoints/SmolLM2-135M-Instruct"
ALWAYS = ("locret", "rereading-locret", "ada-locret")
OTHERS = (
    "streaming", "h2o", "roco", "tova", "snapkv", "pyramidkv", "ada-snapkv", "ada-pyramid", "nacl", "sirllm", "scissorhands",
    "kvcrush(base=snapkv)", "knorm", "keydiff", "lagkv", "expected-attention", "compactor", "merge-locret", "pyramid-locret",
    "windowed-locret", "locret(sinks=4)", "random",
)  # fmt: skip
UNQUANTISED = ("merge-locret", "ada-locret", "ada-snapkv", "ada-pyramid")
"""Policies that are not stored in 4 bits."""
TASKS = ("passkey", "number", "perplexity", "fidelity.continue")
LENGTHS, BUDGETS = (768, 1536, 3072), (192, 384)
FIGURES = ("prompt_hash", "tokens", "new_tokens", "output", "score", "scores")
MACHINE = ("tok/s", "time", "memory", "peak", "seconds", "_s")
"""Columns of a curve that belong to the machine, by a part of their name."""


def draw(n: int, seed: int) -> list[tuple[str, str, list[str]]]:
    """Examples: name, policy, and the words of ``locret-eval`` that both commits know. The policies that are always there, then
    six others, in turn; lengths, tasks and settings at random."""
    pick = random.Random(seed)
    policies = [*ALWAYS, *pick.sample(OTHERS, 6)]
    found = []
    for i in range(n):
        policy, task = policies[i % len(policies)], pick.choice(TASKS)
        length, budget = LENGTHS[i % len(LENGTHS)] + pick.randrange(100), pick.choice(BUDGETS)
        words = [
            f"tasks=[{task}]", f"policies=[{policy}]", f"lengths=[{length}]", f"budgets=[{budget}]", "haystacks=[jargon]",
            "samples=1", "keep=1", f"seed={pick.randrange(1000)}", f"ckpt=[{HEADS}]", "dtype=float32", f"model={BACKBONE}",
        ]  # fmt: skip
        one_shot = i % 7 == 6 and policy not in ("rereading-locret", "windowed-locret")
        words += ["one_shot=true" if one_shot else "chunk=256"]
        words += ["kv_bits=4"] * (i % 3 == 1 and policy not in UNQUANTISED)
        name = f"{policy:<22} {task:<18} {length:>5} tokens, {budget} slots {' '.join(words[11:])}"
        found.append((name, policy, words))
    return found


@dataclass(frozen=True)
class Checkout:
    """One commit's files, and how its commands are run."""

    commit: str
    folder: Path

    @classmethod
    def of(cls, commit: str, work: Path) -> Checkout:
        """Check a commit out next to this one; the backbone is shared."""
        name = subprocess.check_output(["git", "rev-parse", commit], cwd=ROOT, text=True).strip()
        folder = work / name[:12]
        if not folder.exists():
            subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(folder), name], cwd=ROOT, check=True)
        backbone = folder / BACKBONE
        if not backbone.exists():
            backbone.symlink_to((ROOT / BACKBONE).resolve())
        # The package `locret_recipes` is the folder `recipes`; the installed one belongs to another commit.
        aside = folder / "build" / "names"
        aside.mkdir(parents=True, exist_ok=True)
        if not (aside / "locret_recipes").exists():
            (aside / "locret_recipes").symlink_to(folder / "recipes")
        return cls(name[:12], folder)

    def start(self, command: str, words: list[str], log: Path) -> subprocess.Popen[bytes]:
        """Start ``locret-COMMAND`` of this commit."""
        places = (self.folder, self.folder / "kernels", self.folder / "build" / "names")
        alone = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        env = {**os.environ, **alone, "PYTHONPATH": os.pathsep.join(map(str, places))}
        with log.open("ab") as file:
            return subprocess.Popen(
                [sys.executable, "-m", f"locret_kit.cli.{command}", *words],
                cwd=self.folder, env=env, stdout=file, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def run(self, command: str, words: list[str], log: Path) -> None:
        """Run it to its end.

        Raises:
            SystemExit: it failed; shows the end of its log.
        """
        if self.start(command, words, log).wait():
            sys.exit(f"{self.commit}: locret-{command} {' '.join(words)} failed:\n{log.read_text()[-2000:]}")


def answer(checkout: Checkout, policy: str, words: list[str], out: Path) -> dict[str, str]:
    """One commit's result for an example: every figure, the text, and the positions that each head keeps."""
    checkout.run("eval", [*words, f"out={out}"], out.with_suffix(".log"))
    rows = [json.loads(line) for line in (out / "rows.0.jsonl").read_bytes().splitlines()]
    (row,) = (row for row in rows if row["policy"] == policy)  # fidelity adds full attention's
    if row["error"] is not None:
        sys.exit(f"{checkout.commit}: {policy}: {row['error']}")
    figures = {name: json.dumps(row[name]) for name in FIGURES}
    if row.get("kept"):
        with np.load(next((out / "kept").glob("*.npz"))) as kept:
            figures |= {f"kept {name}": hashlib.sha256(kept[name].tobytes()).hexdigest() for name in sorted(kept.files)}
    return figures


def train(checkout: Checkout, out: Path, steps: int, kill: bool = False) -> dict[str, str]:
    """Losses of every step and the heads of a short training; with ``kill``, killed after a third of it and resumed."""
    third = steps // 3
    words = [
        "recipe=smollm2-135m", f"backbone.model={BACKBONE}", "data.max_tokens=256", "data.val_samples=0",
        f"optim.steps={steps}", "optim.warmup_steps=5", f"trainer.val_every={third}", f"trainer.save_every={third}",
        "trainer.accelerator=cpu", f"out={out}",
    ]  # fmt: skip
    log = out.with_suffix(".log")
    if kill:
        child = checkout.start("train", words, log)
        while child.poll() is None and not list(out.glob(f"**/*step*{third}*")):
            time.sleep(0.2)
        child.send_signal(signal.SIGKILL)
        child.wait()
        words.append("resume=auto")
    checkout.run("train", words, log)
    with (out / "heads" / "curves.csv").open() as file:
        curve = [
            {name: text for name, text in line.items() if not any(part in name for part in MACHINE)}
            for line in csv.DictReader(file)
        ]
    weights = (out / "heads" / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(weights[:8], "little")  # the header may say more than it did
    return {"curve": json.dumps(curve), "heads": hashlib.sha256(weights[start:]).hexdigest()}


def main(argv: list[str] | None = None) -> int:
    """Exit status 0 where all is equal, 1 where not."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("old")
    parser.add_argument("new", nargs="?", default="HEAD")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (default 0)")
    parser.add_argument("--examples", type=int, default=20, help="evaluation examples (default 20)")
    parser.add_argument("--steps", type=int, default=30, help="training steps, 0 for none (default 30)")
    parser.add_argument("--work", type=Path, help="folder for checkouts and runs (default: a temporary one)")
    args = parser.parse_args(argv)
    work = (args.work or Path(tempfile.mkdtemp(prefix="compare-"))).resolve()
    work.mkdir(parents=True, exist_ok=True)
    runs = Path(tempfile.mkdtemp(prefix="run-", dir=work))
    sides = [Checkout.of(commit, work) for commit in (args.old, args.new)]
    print(f"old {sides[0].commit}, new {sides[1].commit}, seed {args.seed}", flush=True)
    wrong = 0

    def compare(name: str, results: Iterable[dict[str, str]]) -> list[dict[str, str]]:
        """Print whether the two commits' results are equal; give them back."""
        nonlocal wrong
        old, new = both = list(results)
        differ = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
        wrong += bool(differ)
        print(f"{'differs: ' + ', '.join(differ) if differ else 'equal':<12} {name}", flush=True)
        return both

    with ThreadPoolExecutor(len(sides)) as pool:
        for i, (name, policy, words) in enumerate(draw(args.examples, args.seed)):
            outs = [runs / f"{i}-{side.commit}" for side in sides]
            compare(name, pool.map(answer, sides, [policy] * 2, [words] * 2, outs))
        if args.steps:
            trained = []
            for kill, name in (
                (False, f"{args.steps} training steps: losses and heads"),
                (True, "the same, killed and resumed"),
            ):
                outs = [runs / f"{'resumed' if kill else 'whole'}-{side.commit}" for side in sides]
                trained.append(compare(name, pool.map(train, sides, outs, [args.steps] * 2, [kill] * 2)))
            compare("the resumed heads and those of the whole run", [{"heads": new["heads"]} for _, new in trained])
    if not args.work:
        for side in sides:
            subprocess.run(["git", "worktree", "remove", "--force", str(side.folder)], cwd=ROOT, check=True)
        shutil.rmtree(work)
    print(f"{wrong} differences" if wrong else "all equal")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
