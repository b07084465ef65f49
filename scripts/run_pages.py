"""Run every command and block of the pages for users as printed, in an environment with that page's extras alone.

    python scripts/run_pages.py [PAGE ...] [--work FOLDER]

A page has a clone of the commit, and a new environment with its `pip install` lines, or README's; pages with the same lines share
both, and a page that sets itself up gets nothing. Its commands run in order in one shell, a server until the next one starts.
Status 1 where a command fails; FOLDER has all output. LOCRET_STAND_IN=MODEL stands in for the large model that pages name.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))
PAGES = (
    "README.md", "docs/index.md", "docs/tutorials", "docs/howto", "docs/documents.md", "docs/policies.md", "docs/serving.md",
    "docs/serving",
)  # fmt: skip
VLLM = "needs vLLM: scripts/test_vllm.sh makes its environment, and tests what the page says"
BROWSER = "waits for a browser: tests/site/test_examples.py runs the same"
SKIPPED = {
    "bash scripts/test.sh": "the tests: scripts/fresh.sh runs them on a bare machine",
    "docker run": "needs Docker",
    "pip install open-webui": "2 GB, in an environment of its own",
    "OPENAI_API_BASE_URL=": "needs Open WebUI",
    "pip install -e '.[vllm]'": VLLM,
    "locret-vllm": VLLM,
    "VLLM_USE_V2_MODEL_RUNNER=0 vllm": VLLM,
    "TORCH_COMPILE_DISABLE=1 python -m vllm": VLLM,
    "from vllm import": VLLM,
    "locret-train model=Qwen/Qwen3-4B": "8 GB from the Hub, and a GPU",
    "locret-eval lm_eval": "data from the Hub: scripts/test_clients.sh runs the harness with its own",
    "jupyter lab": BROWSER,
    "python examples/space/app.py": BROWSER,
}
"""Blocks and install lines that are not run, by their beginning, with the reason."""
RECOMMENDED = "Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF:Q4_K_M"
FEW = "optim.steps=2 data.val_samples=2 data.max_tokens="
STAND_INS = {
    "recipe=smollm2-135m ": f"recipe=smollm2-135m {FEW}512 ",
    "recipe=qwen2.5-coder-0.5b ": f"recipe=qwen2.5-coder-0.5b {FEW}1024 data.lengths=[1024] ",
    "self-study(book.txt)": "self-study(book.txt,4)",
    RECOMMENDED: os.environ.get("LOCRET_STAND_IN", RECOMMENDED),
}
"""Words of a page and what runs in their place: trainings take an hour and more as printed."""
BEFORE = {"docs/serving/conversations.md": "locret-serve --budget 1024 --sessions 4 --port 8000"}
"""Page -> the command that its reader has started before."""
DEFAULT = "pip install -e '.[documents]'"
BACKBONE = "checkpoints/SmolLM2-135M-Instruct"
LIMIT = 3600
"""Seconds of a page."""
MARK = "@@ block"
STOP = 'if [ -n "${server:-}" ]; then kill $server; wait $server; fi'
READY = "until curl -sf localhost:8000/health >/dev/null; do kill -0 $server || break; sleep 1; done; kill -0 $server"
TRADES = ("baker", "smith", "tailor", "miller", "weaver", "potter", "cooper", "tanner", "glazier", "roofer")


@dataclass(frozen=True)
class Page:
    """A page: its name, its install lines, and its commands and Python blocks in their order."""

    name: str
    installs: tuple[str, ...]
    blocks: tuple[str, ...]


def skipped(block: str) -> str | None:
    """The reason why a block is not run, if it is not."""
    return next((reason for start, reason in SKIPPED.items() if block.startswith(start)), None)


def read_page(file: Path) -> Page:
    """The page of a file. A command is a line, with those that a backslash joins to it."""
    text = file.read_text(encoding="utf-8")
    blocks: list[str] = []
    for kind, block in re.findall(r"```(bash|python)\n(.*?)```", text, re.S):
        lines = [re.sub(r"\s+#.*$", "", line).strip() for line in re.sub(r"\\\n\s*", "", block).splitlines()]
        blocks += [block] if kind == "python" else filter(None, lines)
    prose = re.sub(r"```.*?```", "", text, flags=re.S)
    installs = tuple(line for line in re.findall(r"`(pip install [^`]+)`", prose) if not skipped(line))
    sets_up = any(re.search(r"scripts/(setup|demo)\.sh", block) for block in blocks)
    return Page(str(file.relative_to(ROOT)), () if sets_up else installs or (DEFAULT,), tuple(blocks))


def pages(names: list[str]) -> list[Page]:
    """The pages that are named, or all of users, which have blocks."""
    places = [ROOT / name for name in names or PAGES]
    files = [file for place in places for file in (sorted(place.glob("*.md")) if place.is_dir() else [place])]
    return [page for page in map(read_page, files) if page.blocks]


def with_stand_ins(block: str) -> str:
    """The block as it is run."""
    for words, others in STAND_INS.items():
        block = block.replace(words, others)
    return block


def do(command: str, folder: Path, env: dict[str, str]) -> None:
    """A step of a preparation. Raises CalledProcessError."""
    subprocess.run(["bash", "-euo", "pipefail", "-c", command], cwd=folder, env=env, check=True)


def prepare(folder: Path, installs: tuple[str, ...]) -> dict[str, str]:
    """Make a clone, and for the install lines an environment; the variables of its shell."""
    env = {key: value for key, value in os.environ.items() if key not in ("VIRTUAL_ENV", "PYTHONPATH")}
    do(f"git clone --quiet {ROOT} clone", folder, env)
    if installs:
        do(f"{sys.executable} -m venv environment", folder, env)
        place = folder / "environment"
        env |= {"VIRTUAL_ENV": str(place), "PATH": f"{place / 'bin'}:{env['PATH']}"}
        do("\n".join(line.replace("pip", "pip --quiet", 1) for line in installs), folder / "clone", env)
    return env


def put_files(clone: Path, env: dict[str, str]) -> None:
    """Make a clone clean, and put a reader's files there: the demo's model, and texts, records and code of their own."""
    do("git clean -fdxq", clone, env)
    if (ROOT / BACKBONE).exists():
        (clone / BACKBONE).symlink_to((ROOT / BACKBONE).resolve())
    if "VIRTUAL_ENV" not in env:
        return
    from made_documents import pdf

    do(
        "python scripts/make_long_text.py --tokens 2048 --document-only > long.txt; mkdir -p path/to/texts src",
        clone,
        env,
    )
    do("for copy in book.txt appendix.txt path/to/texts/one.txt; do cp long.txt $copy; done", clone, env)
    (clone / "manual.pdf").write_bytes(pdf([["The key is in the shed. It is old."]] * 3))
    (clone / "questions.txt").write_text("Who came in?\n")
    asked = '{{"context": "The {0} came in at noon. It was dark.", "question": "Who came in?", "answer": "The {0}."}}\n'
    for name in ("questions.jsonl", "records.jsonl"):
        (clone / name).write_text("".join(map(asked.format, TRADES)))
    for trade in TRADES:
        code = f"class {trade.title()}:\n    def work(self, hours=8):\n        return hours\n"
        (clone / "src" / f"{trade}.py").write_text(code)


def as_script(page: Page, clone: Path) -> str:
    """A page as one script, with a mark after each block that is run."""
    parts = []
    for number, block in enumerate((BEFORE.get(page.name, "true"), *page.blocks)):
        command = with_stand_ins(block)
        if "\n" in block:
            (clone / f".block{number}.py").write_text(command, encoding="utf-8")
            command = f"python .block{number}.py"
        if block.startswith("locret-serve"):
            command = f"{STOP}\n{command} & server=$!\n{READY}"
        if not skipped(block):
            parts.append(f'SECONDS=0\n{command}\nprintf "\\n%s %s %s %s\\n" "{MARK}" {number} $? $SECONDS')
    return "\n".join([*parts, STOP])


def run(page: Page, folder: Path, env: dict[str, str]) -> bool:
    """Run a page and print a line for each block; whether all passed."""
    clone, began = folder / "clone", time.monotonic()
    log = folder.parent / f"{page.name.replace('/', '-')}.log"
    put_files(clone, env)
    with log.open("wb") as said:
        shell = ["timeout", str(LIMIT), "bash", "-c", as_script(page, clone)]
        subprocess.run(shell, cwd=clone, env=env, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT)
    marks = re.findall(rf"^{MARK} (\d+) (\d+) (\d+)$", log.read_text("utf-8", "replace"), re.M)
    ended = {int(number): (status == "0", int(seconds) / 60) for number, status, seconds in marks}
    failed = 0
    for number, block in enumerate(page.blocks, 1):
        shown, (passed, minutes) = with_stand_ins(block).splitlines()[0], ended.get(number, (False, 0.0))
        if reason := skipped(block):
            print(f"  skip  {shown[:60]}: {reason}")
            continue
        failed += not passed
        note = "" if with_stand_ins(block) == block else " (with stand-ins)"
        print(f"  {'PASS' if passed else 'FAIL'}  {minutes:4.1f} min  {shown[:100]}{note}")
    verdict = f"FAILED, see {log}" if failed else "passed"
    print(f"{page.name}: {verdict}, {(time.monotonic() - began) / 60:.1f} min", flush=True)
    return not failed


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("pages", nargs="*", metavar="PAGE", help="files or folders (default: all of users)")
    parser.add_argument("--work", type=Path, help="folder of clones, environments and logs (default: a new one)")
    args = parser.parse_args(argv)
    work = (args.work or Path(tempfile.mkdtemp(prefix="pages-"))).absolute()
    groups: dict[tuple[str, ...], list[Page]] = {}
    for page in pages(args.pages):
        groups.setdefault(page.installs or (page.name,), []).append(page)
    work.mkdir(parents=True, exist_ok=True)
    passed = []
    for group in groups.values():
        folder, began = Path(tempfile.mkdtemp(dir=work)), time.monotonic()
        env = prepare(folder, group[0].installs)
        print(
            f"\n{'; '.join(group[0].installs) or 'no environment'}: {(time.monotonic() - began) / 60:.1f} min",
            flush=True,
        )
        passed += [run(page, folder, env) for page in group]
        shutil.rmtree(folder)
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
