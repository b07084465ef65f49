"""Last used 2026-11-27, for checkpoints/smollm2-135m-locret/LOG.md.

Measure the ceiling of restored slots: a few learned slots stand in the place of as many kept ones.

    python scripts/research/restored_slots.py --ckpt checkpoints/smollm2-135m-locret
    python scripts/research/restored_slots.py --ckpt checkpoints/smollm2-135m-locret --texts 10 --facts 12 --kinds read \\
        --steps 240 --every 80

Facts are hidden in texts, which are read once with ``--budget`` slots. Some questions train the learned slots: of one text two
thirds, and the others test; of ``--texts`` all, and two more texts test. Three kinds:

    read   ``--slots`` learned token embeddings, the same at every eviction. Their forward reads all rows just before it (what was
           kept, and the chunk), and their keys and values stay.
    blind  the same, but they read nothing of the text: what they teach is how to answer, or nothing.
    free   as many keys and values, optimised themselves: what no forward could do better for the questions that train.

Figures are nats per token of the answers, and answers whose every token is the likeliest: full attention, the heads with all of
the budget, with what the learned slots leave of it, and with each kind of slots in the rest.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from recall_ceiling import Recorder
from torch import Tensor
from transformers import DynamicCache

from locret_kit import BoundedCache, RetainingHeads, attach
from locret_kit.backbones.handler import Handler, Softmax
from locret_kit.backbones.load import load_backbone, resolve_model
from locret_kit.backbones.releases import CACHE
from locret_kit.backbones.rope import rotate
from locret_kit.samples.facts import Fact, make_fact
from locret_kit.samples.haystack import cut, load_text
from locret_kit.samples.synthetic import _hide

Rows = tuple[Tensor, Tensor]
"""Keys before RoPE and values ``[H, n, D]``."""
Question = tuple[list[int], int]
"""Tokens after the document, and how many at their end are the answer's."""


class Reader(Handler):
    """Handler of new tokens after rows of the text: ``seen[layer] [B, H, N]`` marks which, and learned rows follow them."""

    wants_unrotated = True

    def __init__(self, recorder: Recorder, seen: Sequence[Tensor], learned: list[Rows] | None = None) -> None:
        self.recorder, self.seen, self.learned = recorder, seen, learned
        self.made: list[Rows] = []
        """Keys before RoPE and values ``[B, H, T, D]`` of the new tokens, a pair for each layer."""

    def attend(self, layer: int, q_BQTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, softmax: Softmax) -> Tensor:
        self.made.append((k_BHTD, v_BHTD))
        rope, (B, H, T, _) = self.recorder.cache.context.rope(layer), k_BHTD.shape
        keys, values = self.recorder.text(layer)
        seen_BHN = self.seen[layer]
        S = int(seen_BHN.sum(-1).max())
        index = (~seen_BHN).long().argsort(dim=-1, stable=True)[..., :S, None]
        valid_BHS = seen_BHN.gather(2, index[..., 0])
        keys, values = (
            x.expand(len(index), -1, -1, -1).gather(2, index.expand(-1, -1, -1, x.shape[-1])) for x in (keys, values)
        )
        if self.learned is not None:
            keys, values = (
                torch.cat((x, y.expand(len(x), -1, -1, -1)), 2)
                for x, y in zip((keys, values), self.learned[layer], strict=True)
            )
            valid_BHS = torch.cat((valid_BHS, valid_BHS.new_ones(*valid_BHS.shape[:2], keys.shape[2] - S)), 2)
        keys, values = (torch.cat((x.expand(B, -1, -1, -1), y), 2) for x, y in ((keys, k_BHTD), (values, v_BHTD)))
        valid_BHS = torch.cat((valid_BHS.expand(B, -1, -1), valid_BHS.new_ones(B, H, T)), 2)
        place_BHS = (valid_BHS.cumsum(-1) - 1).clamp(min=0)  # compact positions: ranks among what is seen
        cos, sin = (table.view(*place_BHS.shape, -1) for table in rope.tables(place_BHS.flatten(), keys.dtype))
        keys = rotate(keys, cos, sin)
        q_BHGTD = rotate(q_BQTD.unflatten(1, (H, -1)), cos[:, :, None, -T:], sin[:, :, None, -T:])
        logits = q_BHGTD @ keys[:, :, None].transpose(-1, -2) * softmax.scaling
        rows = keys.shape[2]
        later_TS = torch.arange(rows) > torch.arange(rows - T, rows)[:, None]
        logits = logits.masked_fill(later_TS | ~valid_BHS[:, :, None, None], float("-inf"))
        return (logits.softmax(-1) @ values[:, :, None]).flatten(1, 2)


class Text(NamedTuple):
    """A text as it was read: its rows, what stood before each eviction and what is kept, ``[C, H, N]`` and ``[1, H, N]``."""

    recorder: Recorder
    before: list[Tensor]
    kept: list[Tensor]


@torch.no_grad()
def read(args: argparse.Namespace, model: Any, heads: RetainingHeads, ids: list[int], budget: int) -> Text:
    cache = BoundedCache(budget, args.policy, heads, chunk=args.chunk, local_len=64, prompt_length=len(ids) + 64)
    cache.bind(model)
    recorder, N, H = Recorder(cache), len(ids), cache.context.spec.n_kv_heads
    kept = [torch.zeros(H, N, dtype=torch.bool) for _ in cache.bounded]
    before: list[list[Tensor]] = [[] for _ in kept]
    with attach(model) as attached, attached.handled_by(recorder):
        while (done := cache.get_seq_length()) < N:
            piece = torch.tensor([ids[done : done + cache.schedule.piece(done)]])
            model(
                piece, position_ids=torch.arange(done, done + piece.shape[1])[None], use_cache=False, logits_to_keep=1
            )
            for layer, mask_HN in enumerate(kept):
                there_HN = mask_HN.clone()
                there_HN[:, done : done + piece.shape[1]] = True
                now_HN = torch.zeros_like(there_HN)
                now_HN.scatter_(1, cache.kept_positions(layer)[0].long(), True)
                if not torch.equal(now_HN, there_HN):
                    before[layer].append(there_HN)
                kept[layer] = now_HN
    return Text(recorder, [torch.stack(some) for some in before], [mask[None] for mask in kept])


def answers(model: Any, questions: Sequence[Question], handler: Handler, attached: Any, start: int) -> Tensor:
    """Log-probability of each answer's tokens and whether each is the likeliest: ``[2, tokens]`` of all answers, joined."""
    width = max(len(ids) for ids, _ in questions)
    ids = torch.tensor([tokens + [0] * (width - len(tokens)) for tokens, _ in questions])
    with attached.handled_by(handler):
        places = torch.arange(start, start + width).expand(len(ids), -1)
        logits = model(ids, position_ids=places, use_cache=False).logits
    return scored(logits, questions)


def scored(logits_BTV: Tensor, questions: Sequence[Question]) -> Tensor:
    rows = []
    for logits_TV, (tokens, n) in zip(logits_BTV, questions, strict=True):
        told, at = torch.tensor(tokens[-n:]), len(tokens)
        some = logits_TV[at - n - 1 : at - 1]
        lp = some.log_softmax(-1).gather(-1, told[:, None])[:, 0]
        rows.append(torch.stack((lp.mean(), (some.argmax(-1) == told).all().to(lp.dtype))))
    return torch.stack(rows, 1)


class Case(NamedTuple):
    """A text with its questions, read with all of the budget and with what learned slots leave of it."""

    ids: list[int]
    questions: list[Question]
    whole: Text
    less: Text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ckpt", required=True)
    parser.add_argument("--haystack", default="jargon")
    parser.add_argument("--policy", default="lookahead-locret")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--budget", type=int, default=256)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--slots", type=int, default=3, help="learned slots of each eviction")
    parser.add_argument(
        "--texts", type=int, default=1, help="texts that train; with one, a third of its questions test"
    )
    parser.add_argument("--held", type=int, default=2, help="texts that test, where several train")
    parser.add_argument("--facts", type=int, default=24, help="of each text")
    parser.add_argument("--kinds", nargs="+", default=["read", "free"], choices=["read", "blind", "free"])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--every", type=int, default=60, help="steps between figures")
    parser.add_argument("--batch", type=int, default=3, help="questions of a step, all about one text")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    heads = RetainingHeads.from_pretrained(args.ckpt)
    model, tokenizer = load_backbone(resolve_model(heads.config.backbone), dtype="float32", device="cpu")
    model.requires_grad_(False)
    cases = [
        make_case(args, model, tokenizer, heads, rng) for _ in range(args.texts + (args.held if args.texts > 1 else 0))
    ]
    asked = [[(case, question) for question in case.questions] for case in cases]
    if args.texts > 1:
        train, test = (list(chain.from_iterable(some)) for some in (asked[: args.texts], asked[args.texts :]))
    else:
        rng.shuffle(asked[0])
        test, train = asked[0][: args.facts // 3], asked[0][args.facts // 3 :]

    def show(name: str, of: Callable[[Case, Sequence[Question]], Tensor]) -> None:
        began, figures = time.time(), {}
        with torch.no_grad():
            for split, some in (("train", train[: 4 * args.facts]), ("test", test)):
                found = []
                for case in cases:
                    mine = [question for one, question in some if one is case]
                    found += [of(case, mine[i : i + 8]) for i in range(0, len(mine), 8)]
                lp, right = torch.cat(found, 1)
                figures[split] = {"nats": round(-float(lp.mean()), 3), "right": int(right.sum()), "of": len(lp)}
        print(json.dumps({"with": name, **figures, "seconds": round(time.time() - began)}), flush=True)

    show("full attention", lambda case, some: of_full(model, case, some))
    evictions = len(cases[0].less.before[0])
    with attach(model) as attached:

        def with_rows(case: Case, some: Sequence[Question], text: Text, rows: list[Any] | None = None) -> Tensor:
            return answers(model, some, Reader(text.recorder, text.kept, rows), attached, len(case.ids))

        show("heads", lambda case, some: with_rows(case, some, case.whole))
        show(f"heads, {evictions * args.slots} slots fewer", lambda case, some: with_rows(case, some, case.less))
        words = model.get_input_embeddings().weight
        embeds = words[torch.randint(0, len(words), (args.slots,))].clone().requires_grad_()

        def read_rows(case: Case, blind: bool = False) -> list[Rows]:
            before = [mask & (not blind) for mask in case.less.before]
            reader, places = Reader(case.less.recorder, before), torch.arange(args.slots)[None]
            with attached.handled_by(reader):
                model(
                    inputs_embeds=embeds.expand(evictions, -1, -1),
                    position_ids=places,
                    use_cache=False,
                    logits_to_keep=1,
                )
            return [(k.transpose(0, 1).flatten(1, 2), v.transpose(0, 1).flatten(1, 2)) for k, v in reader.made]

        with torch.no_grad():
            free = [tuple(x.clone().requires_grad_() for x in pair) for pair in read_rows(cases[0])]
        kinds: dict[str, tuple[Callable[[Case], list[Any]], list[Tensor]]] = {
            "read": (read_rows, [embeds]),
            "blind": (lambda case: read_rows(case, True), [embeds]),
            "free": (lambda case: free, [x for pair in free for x in pair]),
        }
        for name in args.kinds:
            rows, weights = kinds[name]

            def ask(case: Case, some: Sequence[Question], rows: Callable[[Case], list[Any]] = rows) -> Tensor:
                return with_rows(case, some, case.less, rows(case))

            show(f"{name}, untrained", ask)
            optimizer = torch.optim.Adam(weights, lr=args.lr)
            for step in range(args.steps):
                optimizer.param_groups[0]["lr"] = args.lr * min(1.0, (step + 1) / 10, 2 * (1 - step / args.steps))
                case = rng.choice(cases[: args.texts])
                mine = [question for one, question in train if one is case]
                loss = -ask(case, rng.sample(mine, args.batch))[0].mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if (step + 1) % args.every == 0 or step + 1 == args.steps:
                    show(f"{name}, {step + 1} steps", ask)


def make_case(args: argparse.Namespace, model: Any, tokenizer: Any, heads: RetainingHeads, rng: random.Random) -> Case:
    facts: dict[str, Fact] = {}
    while len(facts) < args.facts:
        fact = make_fact(rng)
        facts.setdefault(fact.question, fact)
    body = cut(load_text(args.haystack), tokenizer, args.length - 24 * args.facts, rng)
    text = _hide([fact.statement for fact in facts.values()], [rng.random() for _ in facts], body, rng)
    ids, questions = prompts(tokenizer, text, list(facts.values()))
    evictions = args.length // args.chunk
    less = read(args, model, heads, ids, args.budget - evictions * args.slots)
    # A text that is a little longer, or a budget that is full earlier, has more evictions: the newest count.
    less = less._replace(before=[some[-evictions + 1 :] for some in less.before])
    return Case(ids, questions, read(args, model, heads, ids, args.budget), less)


def of_full(model: Any, case: Case, some: Sequence[Question]) -> Tensor:
    """The same with full attention."""
    found, full = [], DynamicCache()
    model(torch.tensor([case.ids]), **{CACHE: full}, logits_to_keep=1)
    for tokens, n in some:
        logits = model(torch.tensor([tokens]), **{CACHE: full}).logits
        full.crop(-len(tokens))
        found.append(scored(logits, [(tokens, n)]))
    return torch.cat(found, 1)


def prompts(tokenizer: Any, text: str, facts: Sequence[Fact]) -> tuple[list[int], list[Question]]:
    """Tokens that all prompts begin with (the template's beginning and the text), and what follows for each fact."""
    made = []
    for fact in facts:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": f"{text}\n\n{fact.question}"}], add_generation_prompt=True, tokenize=False
        )
        asked = tokenizer(prompt, add_special_tokens=False).input_ids
        told = tokenizer(f"{fact.prefix} {fact.value}.", add_special_tokens=False).input_ids
        made.append((asked, told))
    same = 0
    while all(asked[same] == made[0][0][same] for asked, _ in made):
        same += 1
    return made[0][0][:same], [(asked[same:] + told, len(told)) for asked, told in made]


if __name__ == "__main__":
    main()
