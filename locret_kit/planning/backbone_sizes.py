"""Sizes of a backbone that memory depends on, read off a configuration, and of retaining heads for it."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass

import torch
from transformers import AutoModel, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from ..backbones.decoder_modules import decoder_of
from ..backbones.mlp_slices import SLICE
from ..backbones.probe import outlined
from ..backbones.products import plain_projections
from ..backbones.spec import BackboneSpec, UnsupportedArchitecture, field_of
from ..backbones.weight_bits import scratch_bytes, stored_bytes

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
WIDTHS = (64, 128, 256, 512, 1024)
"""The largest is the paper's for models of 4 and 8 billion parameters."""
SHARE = 0.06
"""Largest part of the model's parameters that heads take: the demo's take 0.055."""


@dataclass(frozen=True)
class BackboneSizes:
    """The sizes of a backbone that memory depends on."""

    spec: BackboneSpec
    vocab: int
    hidden: int
    intermediate: int
    parameters: int
    packed_bytes: int | None = None
    """Bytes of the packed matrices of a GGUF file; None where the model is not out of one."""
    plain_numbers: int = 0
    """Numbers of the GGUF file outside of packed matrices."""
    projects: bool = False
    """Whether retaining heads are folded into its projections on a card (``cache.folded``)."""

    @classmethod
    def of(cls, config: PretrainedConfig) -> BackboneSizes:
        """Read a (text) configuration. The workspace is that of a like model of Llama's form."""
        hidden = field_of(config, "hidden_size", "n_embd", "d_model")
        inter = field_of(config, "intermediate_size", "ffn_dim", "n_inner") or 4 * hidden
        model = without_weights(config)
        weights = sum(weight.numel() for weight in model.parameters())  # tied ones once
        if model.get_output_embeddings() is None:  # a decoder alone: whether they are tied is not said
            weights += config.vocab_size * hidden
        gguf = getattr(config, "gguf", None) or {}
        projections = [getattr(layer, "self_attn", None) for layer in getattr(decoder_of(model), "layers", ())]
        projects = not gguf and bool(projections) and all(map(plain_projections, projections))
        packed, plain = gguf.get("packed_bytes"), gguf.get("plain_numbers", 0)
        return cls(outlined(model), config.vocab_size, hidden, inter, weights, packed, plain, projects)

    @property
    def fused(self) -> bool:
        """Whether q, k, v come from one projection, and gate and up from another (Phi-3)."""
        return self.spec.model_type == "phi3"

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """Inputs and outputs of every matrix of a layer."""
        q, kv = self.spec.n_heads * self.spec.head_dim, self.spec.n_kv_heads * self.spec.head_dim
        inward = [self.spec.qkv_dim, 2 * self.intermediate] if self.fused else [q, kv, kv, *[self.intermediate] * 2]
        return [*((self.hidden, out) for out in inward), (q, self.hidden), (self.intermediate, self.hidden)]

    def weights(self, item: int, bits: int | None) -> int:
        """Bytes of the weights, ``item`` a number; with ``bits`` matrices as bitsandbytes stores them, of a GGUF file as they
        lie there."""
        if self.packed_bytes is not None:
            return self.packed_bytes + self.plain_numbers * item
        if bits is None:
            return self.parameters * item
        layer = sum(item * inputs * out - stored_bytes(inputs, out, bits) for inputs, out in self.matrices)
        return self.parameters * item - self.spec.n_layers * layer

    def mlp(self, T: int, item: int, bits: int | None) -> int:
        """Bytes alive at the MLP's widest moment: the layer's input and the memory of the first slice. From the second slice on,
        the MLP's output counts too."""
        stream = T * self.hidden * item
        first = stream + self._mlp_slice(min(T, SLICE), item, bits)
        return first if T <= SLICE else max(first, 2 * stream + self._mlp_slice(min(T - SLICE, SLICE), item, bits))

    def _mlp_slice(self, rows: int, item: int, bits: int | None) -> int:
        """Bytes between an MLP's two products: activation, up and their product; a fused projection keeps gate too. With few
        bits, if that is more, as up is made: beside the activation, or together with gate."""
        wide = self.intermediate
        product = rows * (4 if self.fused else 3) * wide * item
        if bits is None:
            return product
        scratch = scratch_bytes(rows, self.hidden, 2 * wide if self.fused else wide, bits, item)
        return max(product, rows * 2 * wide * item + scratch)

    def projection(self, T: int, item: int, bits: int, before: int, after: int) -> int:
        """Bytes alive as few-bit matrices make queries, with ``before`` elements beside, or take attention's output, with
        ``after`` elements."""
        hidden, q = self.hidden, self.spec.n_heads * self.spec.head_dim
        made = self.spec.qkv_dim if self.fused else q
        return max(
            (before + T * made) * item + scratch_bytes(T, hidden, made, bits, item),
            (after + T * hidden) * item + scratch_bytes(T, q, hidden, bits, item),
        )


def without_weights(config: PretrainedConfig) -> PreTrainedModel:
    """A language model on the meta device, in float32, whose experts run without numbers; its decoder where transformers has the
    text part of a multimodal model no other way."""
    kind = next((auto for auto in (AutoModelForCausalLM, AutoModel) if type(config) in auto._model_mapping), None)
    if kind is None:
        raise UnsupportedArchitecture(f"model_type={config.model_type!r}: transformers has no model of this part alone")
    with torch.device("meta"):  # of a copy, since transformers writes the type into the configuration
        model: PreTrainedModel = kind.from_config(deepcopy(config), dtype=torch.float32)
    model.set_experts_implementation("batched_mm")
    return model.eval()


def head_parameters(spec: BackboneSpec, d_hidden: int) -> int:
    """Weights of all retaining heads."""
    return d_hidden * sum(layer.qkv_dim + layer.n_kv_heads for layer in spec.layers)


def choose_width(backbone: BackboneSizes) -> int:
    """The largest of ``WIDTHS`` whose heads take at most ``SHARE`` of the parameters; the smallest if none does."""
    widths = [width for width in WIDTHS if head_parameters(backbone.spec, width) <= SHARE * backbone.parameters]
    return max(widths, default=WIDTHS[0])
