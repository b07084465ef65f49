"""Last used 2026-11-26, for docs/results/speed.md.

Measure how far the logits of a GGUF file are from exact ones, the kit's and llama.cpp's: print a table of
docs/results/speed.md.

    python scripts/research/gguf_logits.py --model checkpoints/SmolLM2-135M-Instruct --gguf FILE.gguf [FILE.gguf ...]

All read the first tokens of one text, with every token kept. Exact logits are those of the float model, then those of the
file's own numbers, unpacked and multiplied in float32. The first error holds that of the file, the second is the engine's alone.
The kit reads the text as a prompt, and again token by token as it decodes.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from locret_kit import BoundedCache, attach
from locret_kit.backbones.gguf import gguf_model
from locret_kit.backbones.libraries import CACHE
from locret_kit.backbones.load import load_backbone, load_tokenizer
from locret_kit.runtime.drivers.cpu import CpuDriver
from locret_kit.runtime.report import versions
from locret_kit.samples.haystack import load_text


def of_llama(path: str, ids: list[int]) -> np.ndarray:
    """llama.cpp's logits ``[T, V]``, with its cache in float16."""
    import llama_cpp

    model = llama_cpp.Llama(path, n_ctx=len(ids) + 8, n_batch=512, logits_all=True, flash_attn=True, verbose=False)
    model.eval(ids)
    return np.array(model.scores[: len(ids)], dtype=np.float32)


@torch.inference_mode()
def of_prompt(model: torch.nn.Module, ids: list[int]) -> Tensor:
    """The kit's logits ``[T, V]`` of a prompt."""
    with attach(model):
        cache = BoundedCache(2 * len(ids), "streaming", prompt_length=len(ids))
        return model(input_ids=torch.tensor([ids]), **{CACHE: cache}).logits[0]


@torch.inference_mode()
def of_decoding(model: torch.nn.Module, ids: list[int]) -> Tensor:
    """Logits of a text, decoded token by token after the first one."""
    with attach(model):
        cache, step = BoundedCache(2 * len(ids), "streaming", prompt_length=1), CpuDriver(model)
        first = model(input_ids=torch.tensor([ids[:1]]), **{CACHE: cache}).logits[0]
        return torch.cat([first, *(step([cache], [token]) for token in ids[1:])])


def distances(exact_TV: Tensor, other_TV: Tensor) -> str:
    """Mean divergence in nats and largest difference of a logit."""
    exact, other = exact_TV.double(), other_TV.double()
    divergence = (exact.log_softmax(-1).exp() * (exact.log_softmax(-1) - other.log_softmax(-1))).sum(-1).mean()
    return f"{divergence:.2e} | {(exact - other).abs().max():.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="the float model")
    parser.add_argument("--gguf", nargs="+", required=True, help="the same model as GGUF files")
    parser.add_argument("--length", type=int, default=512)
    args = parser.parse_args()
    ids = load_tokenizer(args.model)(load_text("jargon"), verbose=False).input_ids[: args.length]
    model, _ = load_backbone(args.model, dtype="float32", device="cpu")
    exact, rows = of_prompt(model, ids), []
    for path in args.gguf:
        packed, _ = load_backbone(path, dtype="float32", device="cpu")
        with patch.object(gguf_model, "multiplies_integers", lambda form: False):
            own = of_prompt(packed, ids)
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            theirs = torch.from_numpy(process.submit(of_llama, path, ids).result())
        ways = {
            "its numbers in float32": own,
            "the kit, as a prompt": of_prompt(packed, ids),
            "the kit, token by token": of_decoding(packed, ids),
            "llama.cpp": theirs,
        }
        name = path.rsplit("/", 1)[-1]
        rows += [f"| {name} | {way} | {distances(exact, x)} | {distances(own, x)} |" for way, x in ways.items()]
    made = versions()
    print(
        f"`python scripts/research/gguf_logits.py {shlex.join(sys.argv[1:])}`; {time.strftime('%Y-%m-%d')}, commit "
        f"{made.get('commit', made['locret_kit'])}, torch {made['torch']}; the first {len(ids)} tokens of the Jargon File.",
        "",
        "| file | logits | mean divergence from the float model (nats) | largest difference | from the file's own numbers (nats) "
        "| largest |",
        "|---|---|---|---|---|---|",
        *rows,
        sep="\n",
    )


if __name__ == "__main__":
    main()
