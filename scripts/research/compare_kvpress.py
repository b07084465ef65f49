"""Last used 2026-11-25, for docs/howto/others.md.

Compare our policies with NVIDIA's kvpress: the share of slots that both keep when a whole prompt is cut once.

    python scripts/research/compare_kvpress.py
    python scripts/research/compare_kvpress.py --model checkpoints/SmolLM2-135M-Instruct --length 1024 --budget 256

Without ``--model`` the backbone is a tiny random Llama in float64, the text random tokens, no two alike. Exit status 1 where
slots differ without a known reason. Left out are KVzip, which needs a tokenizer, merging, and what kvpress does not have.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

from locret_examples.press import INSTALL, LocretPress, arguments_for_kvpress
from locret_kit.backbones.intercept import attach
from locret_kit.backbones.libraries import CACHE
from locret_kit.backbones.load import load_backbone
from locret_kit.backbones.spec import spec_of, text_config
from locret_kit.cache.bounded import BoundedCache
from locret_kit.heads import HeadsConfig, RetainingHeads
from locret_kit.naming import first_line
from locret_kit.runtime.session import prefill
from locret_kit.samples.haystack import load_text
from locret_kit.text.tokens import stream_ids

WINDOW, LAG, BLOCK = 16, 32, 32  # tokens
BOUND = 0.999  # of slots kept by both, where no reason is known


def pairs(length: int, budget: int, heads: RetainingHeads) -> list[tuple[str, Any, str]]:
    """Every policy that kvpress has too, and our heads as a press of its kind: policy, press with the same settings, why the two
    may keep other slots."""
    import kvpress as k

    gone = 1 - (budget + 0.5) / length  # of which kvpress keeps int(length * (1 - gone)) = budget slots
    snap, observed = k.SnapKVPress(gone, WINDOW, 1), k.ObservedAttentionPress(gone)
    padded = "the text's last block: kvpress lets its padding attend" if (length - 12) % BLOCK else ""
    compactor = partial(k.CompactorPress, gone, chunk_size=BLOCK)
    expected = partial(k.ExpectedAttentionPress, gone)
    return [
        ("knorm", k.KnormPress(gone), "equal tokens, equal keys: ours keeps the newer, kvpress any"),
        ("keydiff", k.KeyDiffPress(gone), ""),
        (f"lagkv(lag={LAG})", k.LagKVPress(gone, lag_size=LAG), "equal ranks: ours keeps the newer, kvpress any"),
        ("streaming", k.StreamingLLMPress(gone), ""),
        ("expected-attention", expected(), ""),
        ("expected-attention(epsilon=0.01)", expected(epsilon=0.01), ""),
        ("expected-attention(value_norm=false)", expected(use_vnorm=False), ""),
        (f"compactor({BLOCK},blend=0)", compactor(blending=0.0), padded),
        (f"compactor({BLOCK})", compactor(blending=1 - budget / length), "the same; and another sketch of large heads"),
        (f"snapkv({WINDOW},1)", snap, ""),
        (f"snapkv({WINDOW},7)", k.SnapKVPress(gone, WINDOW, 7), "neighbours: ours their maximum, kvpress their mean"),
        ("tova", k.TOVAPress(gone), "heads: ours each by its group (RoCo), kvpress by the mean of all, and the newest slot"),
        (f"ada-snapkv({WINDOW},1,alpha=1)", k.AdaKVPress(snap, 0.0), ""),
        (f"ada-snapkv({WINDOW},1,alpha=0)", k.AdaKVPress(snap, 1.0), ""),
        (f"ada-snapkv({WINDOW},1)", k.AdaKVPress(snap, 0.5), "alpha: ours mixes two budgets (Ada-KV), kvpress sets a floor"),
        (f"pyramidkv({WINDOW},1,4)", k.PyramidKVPress(gone, WINDOW, 1, 4), "window: ours beside a layer's share, kvpress in it"),
        ("score=mas", observed, ""),
        ("h2o", observed, "ours sums attention and keeps the newest half, kvpress takes the mean"),
        ("random", k.RandomPress(gone, seed=0), "other draws"),
        ("score=cis", LocretPress(gone, heads), ""),
        ("score=cis scope=window(8)", LocretPress(gone, heads, stabilizers=8), ""),
        ("score=cis(lookahead=3)", LocretPress(gone, heads, lookahead=3), ""),
    ]  # fmt: skip


def ours(model: Any, ids: Sequence[int], policy: str, budget: int, heads: RetainingHeads | None = None) -> list[Tensor]:
    """Boolean ``[H, T]`` of every layer: the tokens that our cache holds after the prompt."""
    cache = BoundedCache(budget, policy, heads, prompt_length=len(ids), positions="original", one_shot=True)
    with attach(model):
        prefill(model, ids, cache)
    token_T = torch.arange(len(ids))
    layers = [cache.kept_positions(layer)[0] for layer in range(len(cache.layers))]
    return [torch.stack([torch.isin(token_T, head.long()) for head in heads]) for heads in layers]


@torch.inference_mode()
def theirs(model: Any, ids: Sequence[int], press: Any) -> list[Tensor]:
    """Positions that a press keeps in each layer, by the keys that it leaves. AdaKVPress leaves all keys and masks some."""
    kept, compress = [], press.compress

    def watched(module: Any, hidden: Tensor, keys: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        left = compress(module, hidden, keys, *rest)
        stay = [(k_TD[:, None] == k_SD).all(-1).any(-1) for k_TD, k_SD in zip(keys[0], left[0][0], strict=True)]
        kept.append(torch.stack(stay))
        if hasattr(press, "alpha_safeguard"):
            _, head, token = module.masked_key_indices
            kept[-1][head, token] = False
        return left

    press.compress = watched
    model.set_attn_implementation("eager" if type(press).__name__ == "ObservedAttentionPress" else "sdpa")
    with arguments_for_kvpress(model), press(model):
        model(torch.tensor([ids]), **{CACHE: DynamicCache()}, logits_to_keep=1)
    model.set_attn_implementation("sdpa")
    return kept


def untrained(model: Any) -> RetainingHeads:
    """Random heads for a model: which slots they keep has no meaning, and must be the same here and there."""
    config = HeadsConfig.for_backbone(spec_of(text_config(model)), "random", 16)
    return RetainingHeads(config).to(model.dtype).requires_grad_(False)


def share(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """Slots that both hold, over those of the one that holds more."""
    both = sum(int((a & b).sum()) for a, b in zip(one, other, strict=True))
    return both / max(sum(int(x.sum()) for x in kept) for kept in (one, other))


def backbone(name: str | None, length: int) -> tuple[Any, list[int]]:
    """A model and a text of ``length`` tokens."""
    torch.manual_seed(0)
    if name is not None:
        model, tokenizer = load_backbone(name, device="cpu", dtype="float32")
        return model, list(stream_ids(tokenizer, [load_text("jargon")[: 16 * length]]))[:length]
    config = LlamaConfig(
        vocab_size=length, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    for weight in model.parameters():
        weight.data *= 6 if weight.dim() > 1 else 1  # so that attention is not uniform
    return model, torch.randperm(length).tolist()


def main(argv: list[str] | None = None) -> int:
    """Exit status 0; 1 where slots differ without a known reason, or after an error said in one line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[2], allow_abbrev=False)
    parser.add_argument("--model", help="folder or Hub id of a backbone; read in float32")
    parser.add_argument("--length", type=int, default=460, help="tokens of the text")
    parser.add_argument("--budget", type=int, default=150, help="slots a head")
    args = parser.parse_args(argv)
    try:
        if not 4 * WINDOW <= args.budget < args.length:
            raise ValueError(f"budget={args.budget} must be from {4 * WINDOW} to below length={args.length}")
        import kvpress  # noqa: F401

        model, ids = backbone(args.model, args.length)
        heads = untrained(model)
        chosen = pairs(args.length, args.budget, heads)
    except (ImportError, ValueError, OSError) as error:
        said = f"{error.name} is missing: {INSTALL}" if isinstance(error, ModuleNotFoundError) else first_line(error)
        print(f"compare_kvpress.py: {said}", file=sys.stderr)
        return 1
    print("| policy | press | kept by both | where they differ |\n|---|---|--:|---|")
    far = 0
    for policy, press, note in chosen:
        both = share(ours(model, ids, policy, args.budget, heads), theirs(model, ids, press))
        far += both < BOUND and not note
        print(f"| `{policy}` | {type(press).__name__} | {both:.3f} | {note if both < 1 else ''} |", flush=True)
    return 1 if far else 0


if __name__ == "__main__":
    sys.exit(main())
