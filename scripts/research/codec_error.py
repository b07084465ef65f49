"""How far keys, values and next tokens are from those in full precision, for some forms of storage.

    python scripts/research/codec_error.py 8 4 2 --text docs/index.md

The demo backbone reads the text in float32 and keeps everything. Error of keys and values: those of that reading are stored and
read back; the root mean square of the difference over that of the numbers, all layers together. Divergence: nats, mean over the
last tokens, which come one by one, of a reading whose rows are stored so.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from locret_kit import BoundedCache, attach
from locret_kit.backbones.libraries import CACHE
from locret_kit.cache.storage.codec import CODECS, Scratch
from locret_kit.cache.storage.layouts import Layout
from locret_kit.cache.storage.rows import BoundedLayer

ROOT = Path(__file__).resolve().parents[2]


def read(
    model: torch.nn.Module, ids: torch.Tensor, last: int, bits: int | None
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Keys and values of all layers, and log-probabilities ``[last, V]`` of the tokens after the last ones."""
    cache, logits = (
        BoundedCache(64, "full", chunk=256, prompt_length=ids.shape[1], kv_bits=bits, backend="reference"),
        [],
    )
    with attach(model), torch.inference_mode():
        for piece in (*ids[:, :-last].split(256, 1), *ids[:, -last:].split(1, 1)):
            logits.append(model(input_ids=piece, **{CACHE: cache}).logits[0, -1])
    rows = [torch.stack([layer.slots(name).clone() for layer in cache.bounded]) for name in ("keys", "values")]
    return rows, torch.stack(logits[-last:]).log_softmax(-1)


def stored(keys: torch.Tensor, values: torch.Tensor, bits: int) -> tuple[torch.Tensor, ...]:
    """Keys and values ``[layers, 1, H, S, D]`` as they are read back."""
    out = []
    for k, v in zip(keys, values, strict=True):
        rows = BoundedLayer(Layout(k.shape[2]), CODECS[str(bits)](bits, Scratch(), False, True))
        rows.update(k, v)
        rows.append(k, v, torch.zeros(k.shape[:3]))
        rows.codec.finish_block()
        out.append([rows.slots(name).clone() for name in ("keys", "values")])
    return tuple(map(torch.stack, zip(*out, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description="Errors of keys, values and next tokens in few bits.")
    parser.add_argument("bits", type=int, nargs="+")
    parser.add_argument("--model", default=ROOT / "checkpoints/SmolLM2-135M-Instruct")
    parser.add_argument("--text", type=Path, default=ROOT / "docs/index.md")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--last", type=int, default=256)
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(args.model)(args.text.read_text(), return_tensors="pt").input_ids[
        :, : args.tokens
    ]
    exact, truth = read(model, ids, args.last, None)
    for bits in args.bits:
        keys, values = ((x - y).norm() / y.norm() for x, y in zip(stored(*exact, bits), exact, strict=True))
        _, found = read(model, ids, args.last, bits)
        divergence = F.kl_div(found, truth, log_target=True, reduction="batchmean")
        print(
            f"{bits} bits: keys {keys:.4f}, values {values:.4f}, divergence {divergence:.2e} nats, of {ids.shape[1]} tokens"
        )


if __name__ == "__main__":
    main()
