"""Last used 2026-11-29, for docs/howto/vllm.md.

Greedy tokens of vLLM with a bounded cache beside those of the kit's own runtime, on a folder of weights with its heads.

    .venv-vllm/bin/python scripts/research/vllm_tokens.py FOLDER HEADS TEXT.txt [--tokens 4096] [--budget 512] [--dtype float32]

FOLDER is what ``convert_gguf.py`` makes. The text is cut into prompts of so many tokens; each row has a prompt's answers and the
first token at which they differ.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "vllm"))

import conftest  # noqa: F401  (the engine in this process)
import tiny

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("heads")
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    settings = {
        "budget": args.budget,
        "chunk": 512,
        "stabilizers": 64,
        "local_len": 64,
        "heads": args.heads,
        "policy": "locret",
    }
    ids = AutoTokenizer.from_pretrained(args.folder)(args.text.read_text()).input_ids
    prompts = [ids[at * args.tokens : (at + 1) * args.tokens] for at in range(args.prompts)]
    size = {"kv_cache_memory_bytes": 400 << 20, "max_num_batched_tokens": 2048, "max_model_len": args.tokens + 1024}
    with tiny.started(args.folder, settings, dtype=args.dtype, **size) as llm:
        theirs = [tiny.generate(llm, [prompt], args.new)[0] for prompt in prompts]
    model = (
        AutoModelForCausalLM.from_pretrained(args.folder, dtype=getattr(torch, args.dtype)).eval().requires_grad_(False)
    )
    for number, (prompt, answer) in enumerate(zip(prompts, theirs, strict=True)):
        own = tiny.kit(model, prompt, args.new, **settings)
        same = next((at for at, pair in enumerate(zip(answer, own, strict=True)) if pair[0] != pair[1]), args.new)
        row = {"prompt": number, "tokens": len(prompt), "dtype": args.dtype, "same": same, "new": args.new}
        print(json.dumps({**row, "vllm": answer, "kit": own}), flush=True)
