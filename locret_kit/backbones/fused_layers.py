"""A backbone's elementwise work in fewer launches while it is attached: norms with the residual before them, gated activations.

They are fused only where the handler of a forward has operations for them. ``probe`` tries them on every decoder and compares:
they are for those that give the same hidden states.
"""

from functools import partial

from torch import Tensor
from torch.nn import functional as F

from locret_kernels.fused import rms_norm, swiglu

from .decoder_modules import DecoderStack, GatedMlp, Layer, RmsNorm, is_gated, is_rms_norm, is_silu
from .handlers import Choice, LayerOperations
from .undo import Forward, Undo, has_own_forward, replace_forward

REFERENCE = LayerOperations(rms_norm, swiglu, F.linear)


def fuse_layers(undo: Undo, decoder: DecoderStack, choice: Choice) -> None:
    """Run a decoder's elementwise work by the operations of ``choice``, until ``undo``. Unknown modules are left unchanged, and
    so are modules with a replaced forward, as accelerate does."""
    for layer in decoder.layers:
        if is_rms_norm(layer.post_attention_layernorm) and has_own_forward(layer):
            replace_forward(undo, layer, partial(_layer, layer, choice))
        if is_gated(layer.mlp) and has_own_forward(layer.mlp):
            replace_forward(undo, layer.mlp, partial(_mlp, layer.mlp, choice))
    for norm in filter(is_rms_norm, decoder.modules()):
        replace_forward(undo, norm, partial(_norm, norm, choice))


def _norm(norm: RmsNorm, choice: Choice, forward: Forward, x: Tensor) -> Tensor:
    """The norm of ``x``, of shape [..., C], by the operations of ``choice`` if there are any."""
    operations = choice(x, norm.weight)
    if operations is None or norm.weight.dtype != x.dtype:
        return forward(x)
    return operations.rms_norm(x, norm.weight, norm.variance_epsilon)[0]


def _layer(layer: Layer, choice: Choice, forward: Forward, hidden_states: Tensor, **rest: object) -> Tensor:
    """A decoder layer of hidden states [B, T, C]. Its first residual is added in the launch of the second norm."""
    after = layer.post_attention_layernorm
    same = is_rms_norm(after) and not layer.training and after.weight.dtype == hidden_states.dtype
    if not same or choice(hidden_states, after.weight) is None:
        return forward(hidden_states, **rest)
    normed = layer.input_layernorm(hidden_states)
    # Modules hand on what they don't know.
    attended, _ = layer.self_attn(hidden_states=normed, layer_input=normed, **rest)
    operations = choice(attended) or REFERENCE  # a gradient may begin in the attention, as of a pool that is trained
    normed, total = operations.rms_norm(attended, after.weight, after.variance_epsilon, hidden_states)
    return total + layer.mlp(normed)


def _mlp(mlp: GatedMlp, choice: Choice, forward: Forward, x: Tensor) -> Tensor:
    """A gated MLP of ``x``, of shape [..., C]. Its two inward products are separate or in one matrix."""
    if choice(x) is None or not is_silu(mlp):
        return forward(x)
    one = hasattr(mlp, "gate_up_proj")
    gate, up = mlp.gate_up_proj(x).chunk(2, dim=-1) if one else (mlp.gate_proj(x), mlp.up_proj(x))
    operations = choice(gate, up) or REFERENCE  # a gradient may begin in the products before
    out: Tensor = mlp.down_proj(operations.swiglu(gate, up))
    return out
