"""Decoders with rotary frequencies from the papers and StreamingLLM's slots at both position schemes.

Imports nothing of the kit. Sources: RoFormer, arXiv 2104.09864; linear interpolation, arXiv 2306.15595; YaRN, arXiv 2309.00071
(and dynamic NTK, its section 3); LongRoPE, arXiv 2402.13753; Llama 3's scaling as its reference implementation has it.
"""

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from attention_oracle import attention, turned
from tiny_decoders.simulation import SINKS, Plan
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

Rope = Mapping[str, Any]


def frequencies(rope: Rope, channels: int, context: int, span: int) -> tuple[np.ndarray, float]:
    """Radians per position of each pair of channels, and the factor on cos and sin.

    Args:
        rope: as transformers' ``rope_parameters``. context: longest text that the model says it takes. span: tokens of the
            text that is rotated, by which LongRoPE and dynamic NTK choose.
    """
    kind, base = rope["rope_type"], float(rope["rope_theta"])
    R = int(channels * rope.get("partial_rotary_factor", 1.0))
    i = np.arange(R // 2)
    plain = base ** (-2 * i / R)
    if kind == "default":
        return plain, 1.0
    if kind == "linear":  # positions divided by the factor
        return plain / rope["factor"], 1.0
    if kind == "dynamic":  # a base that grows with the text beyond the trained length
        s = rope["factor"]
        grown = base * (s * max(span, context) / context - (s - 1)) ** (R / (R - 2))
        return grown ** (-2 * i / R), 1.0
    original = rope["original_max_position_embeddings"]
    if kind == "longrope":
        factors = np.array(rope["long_factor"] if span > original else rope["short_factor"])
        grown = rope.get("factor") or context / original
        return plain / factors, rope.get("attention_factor") or math.sqrt(1 + math.log(grown) / math.log(original))
    if kind == "yarn":
        s = rope["factor"]

        def pair(turns: float) -> float:
            """The pair of channels that turns so often within the original length."""
            return R * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

        low = max(math.floor(pair(rope.get("beta_fast", 32))), 0)
        high = min(math.ceil(pair(rope.get("beta_slow", 1))), R - 1)
        slow = np.clip((i - low) / max(high - low, 1e-3), 0, 1)  # 0: kept, 1: interpolated
        return plain * (1 - slow) + plain / s * slow, rope.get("attention_factor") or 0.1 * math.log(s) + 1
    if kind == "llama3":
        s, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
        turns = original * plain / (2 * math.pi)
        smooth = np.clip((turns - low) / (high - low), 0, 1)  # 1: kept, 0: interpolated
        return plain / s * (1 - smooth) + plain * smooth, 1.0
    raise ValueError(f"rope_type={kind!r} is not written here")


AttentionInterface.register("rotated", lambda module, *given, **_: module.config.oracle(*given[:3]))
AttentionMaskInterface.register("rotated", lambda *_, **__: None)


def logits(model: Any, ids: Sequence[int], plan: Plan, positions: str) -> Tensor:
    """``[T, V]`` of a model whose own rotation stands still, each chunk of the text read with the slots that StreamingLLM
    left."""
    config, span = model.config, plan.prompt if positions == "original" else min(plan.prompt, plan.budget + plan.chunk)
    channels = config.hidden_size // config.num_attention_heads
    rates, factor = frequencies(config.rope_parameters, channels, config.max_position_embeddings, span)

    def rotated(x: Tensor, places: Sequence[int]) -> Tensor:
        turning = turned(x, torch.tensor(places)[:, None] * torch.from_numpy(rates))
        turning[..., : 2 * len(rates)] *= factor
        return turning

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, None]:
        held, out = list[int](), []
        for start, end, keep in plan.blocks(len(ids)):
            held += range(start, end)
            places = held if positions == "original" else range(len(held))
            queries = rotated(q[:, :, start:end], places[start - end :])
            out.append(attention(queries, rotated(k[:, :, held], places), v[:, :, held], channels**-0.5))
            if keep is not None and len(held) > keep:
                held = [t for i, t in enumerate(held) if t < SINKS or i >= len(held) - (keep - SINKS)]
        return torch.cat(out, 2).transpose(1, 2), None

    model, one, zero = deepcopy(model), torch.ones_like, torch.zeros_like
    model.get_decoder().rotary_emb.register_forward_hook(lambda module, given, found: (one(found[0]), zero(found[1])))
    model.set_attn_implementation("rotated")
    model.config.oracle = attend
    return model(torch.tensor([[*ids]]), use_cache=False).logits[0]
