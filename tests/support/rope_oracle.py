"""Llama and Phi-3 in float64, with rotary frequencies from the papers and StreamingLLM's slots at both position schemes.

Imports nothing of the kit. Sources: RoFormer, arXiv 2104.09864; linear interpolation, arXiv 2306.15595; YaRN, arXiv 2309.00071
(and dynamic NTK, its section 3); LongRoPE, arXiv 2402.13753; Llama 3's scaling as its reference implementation has it.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tiny_decoders.simulation import SINKS, Plan

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


def rotated(x: np.ndarray, places: np.ndarray, rates: np.ndarray, factor: float) -> np.ndarray:
    """``[heads, T, D]`` at ``places [T]``: channel j of the first half turns with channel j of the second."""
    half = len(rates)
    angle = places[:, None] * rates
    cos, sin = factor * np.cos(angle), factor * np.sin(angle)
    a, b = x[..., :half], x[..., half : 2 * half]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :]], axis=-1)


class Oracle:
    """A decoder from its weights by name (float64) and its configuration."""

    def __init__(self, weights: Mapping[str, np.ndarray], config: Any) -> None:
        self.weights, self.config = weights, config
        self.Q, self.H, self.L = config.num_attention_heads, config.num_key_value_heads, config.num_hidden_layers
        self.D = config.hidden_size // self.Q

    def logits(self, ids: Sequence[int], plan: Plan, positions: str) -> np.ndarray:
        """``[T, V]``, each chunk of the text read with the slots that StreamingLLM left."""
        span = plan.prompt if positions == "original" else min(plan.prompt, plan.budget + plan.chunk)
        rates, factor = frequencies(self.config.rope_parameters, self.D, self.config.max_position_embeddings, span)
        rows: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in range(self.L)]
        held: list[int] = []
        out = []
        for start, end, keep in plan.blocks(len(ids)):
            held += range(start, end)
            places = np.array(held if positions == "original" else range(len(held)))
            x = self.weights["model.embed_tokens.weight"][list(ids[start:end])]
            for layer in range(self.L):
                x = self._layer(layer, x, rows[layer], places, rates, factor)
            out.append(self._norm(x, "model.norm") @ self.weights["lm_head.weight"].T)
            if keep is not None and len(held) > keep:
                stay = [i for i, t in enumerate(held) if t < SINKS or i >= len(held) - (keep - SINKS)]
                held = [held[i] for i in stay]
                rows = [[own[i] for i in stay] for own in rows]
        return np.concatenate(out)

    def _layer(
        self, layer: int, x: np.ndarray, rows: list, places: np.ndarray, rates: np.ndarray, factor: float
    ) -> np.ndarray:
        """Hidden states ``[T, E]`` after a layer, whose ``rows`` gain the new tokens' key and value before RoPE."""
        T, at = len(x), f"model.layers.{layer}"
        q, k, v = self._attention_inputs(self._norm(x, f"{at}.input_layernorm"), f"{at}.self_attn")
        rows += [(k[:, t], v[:, t]) for t in range(T)]
        keys = rotated(np.stack([k for k, _ in rows], axis=1), places, rates, factor)
        values = np.stack([v for _, v in rows], axis=1)
        queries, G, out = rotated(q, places[-T:], rates, factor), self.Q // self.H, np.empty_like(q)
        for head in range(self.Q):
            logits = queries[head] @ keys[head // G].T / math.sqrt(self.D)
            logits[np.triu_indices(T, len(rows) - T + 1, len(rows))] = -np.inf  # tokens that come later
            weights = np.exp(logits - logits.max(axis=1, keepdims=True))
            out[head] = weights / weights.sum(axis=1, keepdims=True) @ values[head // G]
        x = x + out.transpose(1, 0, 2).reshape(T, -1) @ self.weights[f"{at}.self_attn.o_proj.weight"].T
        gate, up = self._mlp_inputs(self._norm(x, f"{at}.post_attention_layernorm"), f"{at}.mlp")
        return x + gate / (1 + np.exp(-gate)) * up @ self.weights[f"{at}.mlp.down_proj.weight"].T

    def _attention_inputs(self, x: np.ndarray, at: str) -> list[np.ndarray]:
        """q ``[Q, T, D]``, k and v ``[H, T, D]`` before RoPE."""
        if f"{at}.qkv_proj.weight" in self.weights:
            parts = np.split(x @ self.weights[f"{at}.qkv_proj.weight"].T, np.cumsum([self.Q, self.H]) * self.D, axis=1)
        else:
            parts = [x @ self.weights[f"{at}.{name}_proj.weight"].T for name in "qkv"]
        return [part.reshape(len(x), -1, self.D).transpose(1, 0, 2) for part in parts]

    def _mlp_inputs(self, x: np.ndarray, at: str) -> list[np.ndarray]:
        if f"{at}.gate_up_proj.weight" in self.weights:
            return np.split(x @ self.weights[f"{at}.gate_up_proj.weight"].T, 2, axis=1)
        return [x @ self.weights[f"{at}.{name}_proj.weight"].T for name in ("gate", "up")]

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        scale = np.sqrt((x**2).mean(-1, keepdims=True) + self.config.rms_norm_eps)
        return x / scale * self.weights[f"{name}.weight"]
