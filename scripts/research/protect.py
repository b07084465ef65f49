"""Last used 2026-11-23, for scripts/research/logs/sessions.md.

Measure the run setting ``protect`` against none, on the same prompts: needles, agreement, reading, and long conversations.

    python scripts/research/protect.py --ckpt HEADS --data FOLDER/OF/LEVAL/train --out runs/protect  # measure, then the table
    python scripts/research/protect.py --out runs/protect --table                                    # the table alone

The table goes to scripts/research/logs/sessions.md, between HTML comments. A rerun measures only what is missing. A
conversation is one that the model has held under full attention; each of its answers is then read, in a cache of so many slots,
after the same messages: nats a token, and how many of its tokens greedy decoding would have written."""

from __future__ import annotations

import argparse
import json
import random
import sys
from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from locret_kit import Chat, attach
from locret_kit.backbones.releases import CACHE
from locret_kit.cli.eval import main as evaluate
from locret_kit.evals.cells import mean_and_stderr
from locret_kit.evals.engine.fidelity import nll_of
from locret_kit.evals.engine.result_rows import read_rows
from locret_kit.evals.tables import Table
from locret_kit.runtime.session import prefill
from locret_kit.settings import RunSettings

sys.path.append(str(Path(__file__).parent))
import sessions

PROTECT = ("none", "first", "first+system+markers")
NOUNS = (
    "the sea", "bread", "winter", "trains", "music", "cats", "mountains", "books", "tea", "the moon", "bees", "football",
    "gardens", "clocks", "rain", "cities", "glass", "horses", "paper", "salt",
)  # fmt: skip
ASKED = (
    "Tell me something about {}.",
    "Why do people like {}?",
    "What should a child know about {}?",
    "And what about {}?",
)
MEANING = {
    "R.PassKey": "pass key in real text, chat",
    "agreement": "agreement with full attention",
    "nll": "nats a token of full attention's answer (lower is better)",
    "nll_prefill": "nats a token while reading (lower is better)",
    "chat agreement": "a long conversation: agreement with full attention",
    "chat nll": "a long conversation: nats a token of full attention's answers (lower is better)",
}


@dataclass(frozen=True)
class Found:
    """One figure of one example."""

    figure: str
    length: int
    slots: int
    sample: int
    protect: str
    value: float


def commands(args: argparse.Namespace, protect: str) -> Iterator[tuple[str, list[str]]]:
    """The evaluations of one setting: the folder's name and the words of ``locret-eval``."""
    sizes = [(length, [length // 8, length // 16]) for length in args.lengths]
    words = [f"ckpt=[{args.ckpt}]", f"protect={protect}"]
    for length, budgets in sizes:
        run = [*words, f"lengths=[{length}]", f"budgets=[{','.join(map(str, budgets))}]"]
        yield (
            f"needles-{length}",
            [
                *run,
                "policies=[locret]",
                "tasks=[passkey]",
                "haystacks=[jargon]",
                "chat=always",
                f"samples={args.samples}",
            ],
        )
    length, budgets = sizes[0]
    run = [*words, f"lengths=[{length}]", f"budgets=[{','.join(map(str, budgets))}]", f"samples={args.texts}"]
    yield "reading", [*run, "policies=[locret]", "tasks=[perplexity_prefill]", "haystacks=[jargon]"]
    if args.data:
        task = ["tasks=[agreement:leval.multidoc_qa]", f"data=[{args.data}]", "chat=always"]
        yield "agreement", [*run, "policies=[full,locret]", *task]


def of_rows(folder: Path) -> Iterator[Found]:
    """The figures of a folder of rows, but for full attention's."""
    for row in read_rows(folder):
        if row.score is None or row.policy == "full":
            continue
        kind = row.task.split(":")[0]
        names = {"agreement": "agreement", "nll": "nll"} if kind == "agreement" else {row.metric: row.metric}
        for name, figure in names.items():
            shown = row.task if row.task in MEANING else figure
            yield Found(shown, row.length, row.slots, row.sample, row.protect or "none", row.scores[name])


def conversation(model: Any, tokenizer: Any, path: Path, turns: int, seed: int) -> list[tuple[str, list[int]]]:
    """Messages and the ids of the model's own answers under full attention; made once and stored at ``path``."""
    if path.exists():
        return [(question, ids) for question, ids in json.loads(path.read_text(encoding="utf-8"))]
    rng = random.Random(seed)
    asked = rng.sample([form.format(noun) for form in ASKED for noun in NOUNS], turns)
    chat = Chat(model, tokenizer, settings=model.config.max_position_embeddings, policy="full", max_new_tokens=24)
    made = []
    for question in asked:
        list(chat.say(question))
        assert chat.answer is not None
        made.append((question, list(chat.answer.tokens)))
    sessions.write_text(path, json.dumps(made))
    return made


class Reading(Chat):
    """A conversation whose answers are given."""

    @torch.inference_mode()
    def read(self, question: str, answer: Sequence[int]) -> tuple[float, int]:
        """Summed nats of the answer's tokens, and how many of them greedy decoding would have written."""
        asked = self._prompt(question)
        cache = asked.cache
        assert cache is not None
        cache.bind(self.model)
        logits_TV = prefill(self.model, asked.ids, cache)[None]
        if len(answer) > 1:
            piece = torch.tensor([list(answer[:-1])])
            more = self.model(input_ids=piece, **{CACHE: cache}, use_cache=True).logits[0]
            logits_TV = torch.cat([logits_TV, more.float()])
        given: Any = SimpleNamespace(cache=cache, ids=asked.ids, tokens=array("i", answer))
        self._now = self._ended(asked, question, "", given)
        hits = logits_TV.argmax(-1) == torch.tensor(list(answer))
        return float(nll_of(logits_TV, answer).sum()), int(hits.sum())


def chats(args: argparse.Namespace) -> Iterator[Found]:
    """Long conversations, read with every setting and two budgets."""
    folder = Path(args.out) / "chats"
    folder.mkdir(parents=True, exist_ok=True)
    store = folder / "figures.json"
    done: dict[str, list[float]] = json.loads(store.read_text(encoding="utf-8")) if store.exists() else {}
    model = tokenizer = heads = None
    for seed in range(args.conversations):
        for slots in args.slots:
            for protect in PROTECT:
                key = f"{seed} {slots} {protect} {args.turns}"
                if key not in done and not args.table:
                    if model is None:
                        model, tokenizer, heads = sessions.load(args.ckpt)
                    with attach(model):
                        said = conversation(model, tokenizer, folder / f"{seed}.{args.turns}.json", args.turns, seed)
                        chat = Reading(
                            model, tokenizer, settings=RunSettings(budget=slots, protect=protect), heads=heads
                        )
                        read = [(*chat.read(question, ids), len(ids)) for question, ids in said if ids]
                    tokens = sum(n for _, _, n in read)
                    done[key] = [sum(nll for nll, _, _ in read) / tokens, sum(hits for _, hits, _ in read) / tokens]
                    done[key].append(len(chat.ids))
                    sessions.write_text(store, json.dumps(done))
                    print(key, done[key], flush=True)
                if key in done:
                    nll, agreement, length = done[key]
                    yield Found("chat nll", int(length), slots, seed, protect, nll)
                    yield Found("chat agreement", int(length), slots, seed, protect, agreement)


def table(found: Sequence[Found]) -> str:
    """A line for each figure, size and setting; differences to none are of the same example."""
    cells: dict[tuple[str, int, int], dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for one in found:
        length = 0 if one.figure.startswith("chat") else one.length
        cells[one.figure, length, one.slots][one.protect][one.sample] = one.value
    lines = []
    for figure, length, slots in sorted(cells, key=lambda cell: (list(MEANING).index(cell[0]), *cell[1:])):
        of = cells[figure, length, slots]
        for protect in PROTECT:
            values, base = of.get(protect, {}), of.get("none", {})
            paired = sorted(values.keys() & base.keys())
            if not paired:
                continue
            mean = mean_and_stderr([values[i] for i in paired])[0] or 0.0
            apart, error = mean_and_stderr([values[i] - base[i] for i in paired])
            told = "" if protect == "none" else f"{apart:+.3f}" + ("" if error is None else f" ± {error:.3f}")
            name = [MEANING[figure], str(length or "all"), str(slots)] if protect == "none" else ["", "", ""]
            lines.append([*name, protect, str(len(paired)), f"{mean:.3f}", told])
    return Table(["figure", "tokens", "slots", "`protect`", "n", "mean", "difference to none"], lines).markdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ckpt")
    parser.add_argument("--out", required=True)
    parser.add_argument("--data", help="folder of L-Eval's training files; agreement is left out without it")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096])
    parser.add_argument("--samples", type=int, default=10, help="needles of a length")
    parser.add_argument("--texts", type=int, default=5, help="texts that are read, and questions of L-Eval")
    parser.add_argument("--conversations", type=int, default=4)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--slots", type=int, nargs="+", default=[256, 128], help="of a conversation")
    parser.add_argument("--table", action="store_true", help="measure nothing")
    args = parser.parse_args()
    if not args.table and args.ckpt is None:
        parser.error("--ckpt is missing")
    found = list(chats(args))
    for protect in PROTECT:
        for name, words in commands(args, protect):
            folder = Path(args.out) / f"{name}-{protect}"
            if protect != "none" and protect != "first" and name == "reading":  # plain text has no template
                continue
            if not args.table and evaluate([*words, f"out={folder}"]):
                raise SystemExit(1)
            if folder.is_dir():
                found += of_rows(folder)
    said = "--ckpt HEADS --data FOLDER" + (f" --samples {args.samples} --texts {args.texts}")
    sessions.put(
        "protect", [f"`python scripts/research/protect.py {said}`; {sessions.ground()}.", "", table(found).rstrip("\n")]
    )


if __name__ == "__main__":
    main()
