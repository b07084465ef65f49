"""Last used 2026-11-25, for checkpoints/smollm2-135m-locret/LOG.md.

Measure what recall can reach: the needle's blocks are brought back by an oracle, and the question attends to them.

    python scripts/research/recall_ceiling.py --ckpt checkpoints/smollm2-135m-locret --length 4096 --budget 256 --samples 0,1,2,8

The text is read by ``--policy`` up to the prompt's tail, and every key and value is recorded as it was computed then. The tail
and the answer attend to some of these rows:

    kept      the slots that the policy kept
    +needle   and the needle's blocks
    only      the first 4 tokens, the needle's blocks and the newest ``--local`` ones
    all       every row of the text
    again     none: the first ``--local`` / 4 tokens, the needle's blocks and the tail are a prompt of their own

Keys are rotated by their rank among what is seen; in ``again`` the policy has no part. A figure is the mean
log-probability (nats) of the answer's tokens; * marks a right answer.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from locret_kit import RetainingHeads, attach
from locret_kit.backbones.handler import Handler, Softmax
from locret_kit.backbones.intercept import Attachment
from locret_kit.backbones.load import load_backbone, resolve_model
from locret_kit.backbones.rope import rotate
from locret_kit.cache.bounded import BoundedCache
from locret_kit.evals.tasks import haystack_name
from locret_kit.evals.tasks.task import spread_depth
from locret_kit.samples.haystack import load_text
from locret_kit.samples.needles import TASKS, make_needle
from locret_kit.settings import FIRST

COLUMNS = ("kept", "+needle", "only", "all", "again")


class Recorder(Handler):
    """Handler of the reading: the cache's own attention; keys (before RoPE) and values of every token stay at hand."""

    wants_unrotated = True

    def __init__(self, cache: BoundedCache) -> None:
        self.cache = cache
        self.rows: list[list[tuple[Tensor, Tensor]]] = [[] for _ in cache.bounded]

    def attend(self, layer: int, q_BQTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, softmax: Softmax) -> Tensor:
        self.rows[layer].append((k_BHTD[0].clone(), v_BHTD[0].clone()))
        self.cache.bounded[layer].update(k_BHTD, v_BHTD)
        return self.cache.attend(layer, q_BQTD, k_BHTD, v_BHTD, softmax)

    def text(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values ``[H, N, D]`` of the text so far."""
        keys, values = zip(*self.rows[layer], strict=True)
        return torch.cat(keys, 1), torch.cat(values, 1)


class Asked(Handler):
    """Handler of the tail and the answer: attention to the rows that ``seen [H, N]`` of a layer marks, and to the new tokens."""

    wants_unrotated = True

    def __init__(self, recorder: Recorder, seen: list[Tensor]) -> None:
        self.recorder, self.seen = recorder, seen
        self.held: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        """Of each layer: keys (rotated) and values ``[H, S, D]``, and which rows are no padding ``[H, S]``."""

    def attend(self, layer: int, q_BQTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, softmax: Softmax) -> Tensor:
        rope, T = self.recorder.cache.context.rope(layer), q_BQTD.shape[2]
        if layer not in self.held:
            self.held[layer] = self._rows(layer)
        keys, values, valid_HS = self.held[layer]
        H, rows = valid_HS.shape
        place_HT = valid_HS.sum(-1, keepdim=True) + torch.arange(T)
        cos, sin = (table.view(H, T, -1) for table in rope.tables(place_HT.flatten(), q_BQTD.dtype))
        keys = torch.cat((keys, rotate(k_BHTD[0], cos, sin)), 1)
        values = torch.cat((values, v_BHTD[0]), 1)
        valid_HS = torch.cat((valid_HS, valid_HS.new_ones(H, T)), 1)
        self.held[layer] = keys, values, valid_HS
        q_HGTD = rotate(q_BQTD[0].unflatten(0, (H, -1)), cos[:, None], sin[:, None])
        logits = q_HGTD @ keys[:, None].transpose(-1, -2) * softmax.scaling
        later_TS = torch.arange(rows + T) > torch.arange(rows, rows + T)[:, None]
        logits = logits.masked_fill(later_TS | ~valid_HS[:, None, None], float("-inf"))
        return (logits.softmax(-1) @ values[:, None]).flatten(0, 1)[None]

    def _rows(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        keys, values = self.recorder.text(layer)
        seen_HN = self.seen[layer]
        most = int(seen_HN.sum(-1).max())
        index_HS = (~seen_HN).long().argsort(dim=-1, stable=True)[:, :most]  # those that are seen first, in their order
        valid_HS = seen_HN.gather(1, index_HS)
        keys, values = (x.gather(1, index_HS[..., None].expand(-1, -1, x.shape[-1])) for x in (keys, values))
        cos, sin = self.recorder.cache.context.rope(layer).tables(torch.arange(most), keys.dtype)
        return rotate(keys, cos, sin), values, valid_HS


def blocks_of(at_N: Tensor, size: int) -> Tensor:
    """The rows of every block of ``size`` rows in which one is marked."""
    padded = torch.nn.functional.pad(at_N, (0, -len(at_N) % size)).view(-1, size)
    return padded.any(1, keepdim=True).expand_as(padded).flatten()[: len(at_N)]


def prompt_of(args: argparse.Namespace, tokenizer: Any, text: str, sample: int) -> tuple[list[int], Tensor, str]:
    """Ids of the prompt that `locret-eval` makes, which of its tokens are the needle's, and the answer."""
    seed = f"{haystack_name(args.haystack)}:{args.length}:{sample}:0"
    needle = make_needle(
        args.task, tokenizer, n_tokens=args.length, depth=spread_depth(sample), seed=seed, haystack=text,
    )  # fmt: skip
    encoded = tokenizer(needle.prompt, return_offsets_mapping=True)
    line = TASKS[args.task].needle.format(key=needle.answer).strip()
    start, spans = needle.prompt.index(line), torch.tensor(encoded.offset_mapping)
    return encoded.input_ids, (spans[:, 1] > start) & (spans[:, 0] < start + len(line)), needle.answer


def read(model: Any, attached: Attachment, cache: BoundedCache, ids: list[int], body: int) -> Recorder:
    """Read the prompt up to its tail."""
    recorder = Recorder(cache)
    with attached.handled_by(recorder):
        while (done := cache.get_seq_length()) < body:
            piece = torch.tensor([ids[done : done + cache.schedule.piece(done)]])
            place = torch.arange(done, done + piece.shape[1])[None]
            model(piece, position_ids=place, use_cache=False, logits_to_keep=1)
    return recorder


@torch.inference_mode()
def measure(args: argparse.Namespace) -> None:
    heads = RetainingHeads.from_pretrained(args.ckpt)
    model, tokenizer = load_backbone(resolve_model(heads.config.backbone))
    text, right = load_text(args.haystack), dict.fromkeys(COLUMNS, 0)
    for sample in args.samples:
        ids, told_N, key = prompt_of(args, tokenizer, text, sample)
        cache = BoundedCache(args.budget, args.policy, heads, prompt_length=len(ids))
        cache.bind(model)
        body, H = cache.schedule.body or 0, cache.context.spec.n_kv_heads
        row: dict[str, object] = {"sample": sample}
        with attach(model) as attached:
            recorder = read(model, attached, cache, ids, body)
            needle_N, at_N = blocks_of(told_N[:body], args.size), torch.arange(body)
            ends_N = (at_N < FIRST) | (at_N >= body - args.local)
            kept = [torch.zeros(H, body, dtype=torch.bool) for _ in cache.bounded]
            for layer, found_HN in enumerate(kept):
                found_HN.scatter_(1, cache.kept_positions(layer)[0].long(), True)
            shares = [float(found_HN[:, told_N[:body]].float().mean()) for found_HN in kept]
            row["needle kept"] = round(sum(shares) / len(shares), 2)
            sees: list[list[Tensor]] = [
                kept,
                [found_HN | needle_N for found_HN in kept],
                [(ends_N | needle_N).expand(H, -1)] * len(kept),
                [torch.ones(H, body, dtype=torch.bool)] * len(kept),
            ]
            answers = []
            for seen in sees:
                with attached.handled_by(Asked(recorder, seen)):
                    answers.append(answer(model, tokenizer, ids[body:], key, body))
        opening_N = at_N < args.local // 4
        short = [ids[at] for at in (opening_N | needle_N).nonzero().flatten().tolist()] + ids[body:]
        for name, (lp, said) in zip(COLUMNS, [*answers, answer_alone(model, tokenizer, short, key)], strict=True):
            right[name] += said.strip().startswith(key)
            row[name] = f"{lp:.2f}{'*' if said.strip().startswith(key) else ''}"
        print(json.dumps(row), flush=True)
    print(json.dumps({"right": right, "of": len(args.samples)}))


def answer(model: Any, tokenizer: Any, tail: list[int], key: str, body: int) -> tuple[float, str]:
    """Mean log-probability of the key's tokens after the ``tail``, and the likeliest token at each of them and behind."""
    told, logits, start = ids_of(tokenizer, key), [], body
    for piece in (tail, told):  # in two forwards: the rows are chosen by the tail alone
        place = torch.arange(start, start + len(piece))[None]
        keep = 1 if piece is tail else len(piece)
        logits.append(model(torch.tensor([piece]), position_ids=place, use_cache=False, logits_to_keep=keep).logits[0])
        start += len(piece)
    return scored(tokenizer, torch.cat(logits), told)


def answer_alone(model: Any, tokenizer: Any, prompt: list[int], key: str) -> tuple[float, str]:
    """The same after a whole prompt, read with full attention."""
    told = ids_of(tokenizer, key)
    return scored(tokenizer, model(torch.tensor([prompt + told]), logits_to_keep=len(told) + 1).logits[0], told)


def ids_of(tokenizer: Any, key: str) -> list[int]:
    return tokenizer(f" {key}", add_special_tokens=False).input_ids


def scored(tokenizer: Any, logits_TV: Tensor, told: list[int]) -> tuple[float, str]:
    """Mean log-probability of the tokens that were ``told``, and the likeliest token at each of them and behind."""
    lp = logits_TV[:-1].log_softmax(-1).gather(-1, torch.tensor(told)[:, None]).mean()
    return float(lp), tokenizer.decode(logits_TV.argmax(-1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ckpt", required=True, type=Path)
    parser.add_argument("--task", default="R.PassKey", choices=TASKS)
    parser.add_argument("--haystack", default="jargon")
    parser.add_argument("--policy", default="locret")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--budget", type=int, default=256)
    parser.add_argument("--samples", type=lambda text: [int(one) for one in text.split(",")], default=[0])
    parser.add_argument("--size", type=int, default=32, help="rows of a block")
    parser.add_argument(
        "--local", type=int, default=128, help="newest rows of `only`; `again` begins with a quarter of it"
    )
    measure(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
