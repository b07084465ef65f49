"""Changes of a backbone's modules while it is attached, each with its way back.

They are elementwise work in fewer launches, no rotation by zero, MLPs in slices, products of bfloat16 on a CPU without
it, and hidden states of the last layer as rows.
"""

import platform
import sys
import threading
from collections.abc import Callable
from functools import cache, partial, wraps
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from locret_kernels.fused import rms_norm, swiglu

from .decoder_attention import Choice, LayerOperations
from .spec import DecoderStack, GatedMlp, Layer, RmsNorm, decoder_of, is_gated, is_rms_norm, is_silu
from .undo import Undo, has_own_forward, replace_forward

# ---- a backbone's elementwise work in fewer launches ----------------------------------------------------------------

# Norms with the residual before them, gated activations, and no rotation by zero.
# Only where the handler of a forward has operations for it; elsewhere, and once it is undone, every module is as it was.
#
# ``probe`` tries both on every decoder and compares: they are for those that give the same hidden states.


REFERENCE = LayerOperations(rms_norm, swiglu, F.linear)
Forward = Callable[..., Tensor]
"""A module's own."""


def skip_rotations(undo: Undo, decoder: DecoderStack, choice: Choice) -> None:
    """Let rotary modules answer None, and rotations pass queries and keys through then, where ``choice`` gives operations,
    until ``undo``."""
    attentions = (layer.self_attn for layer in decoder.layers if hasattr(layer, "self_attn"))
    for module in {sys.modules[type(attention).__module__] for attention in attentions}:
        _skip_identity(undo, module)
    replace_forward(undo, decoder.rotary_emb, partial(_no_rotation, choice))


def _no_rotation(choice: Choice, forward: Callable[..., object], x: Tensor, *args: object, **named: object) -> object:
    """The answer (None, None) of a rotary module for hidden states [B, T, C], if ``choice`` gives operations for them."""
    return forward(x, *args, **named) if choice(x) is None else (None, None)


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


# ---- rotation by zero --------------------------------------------------------------------------------------------------

Pair = tuple[Tensor, Tensor]
"""Queries and keys."""
_LOCK = threading.Lock()
_WRAPPED: dict[ModuleType, tuple[Callable[..., Pair], set[Undo]]] = {}
"""Modelling modules whose rotation is wrapped: their own rotation, and the attachments that use the wrapped one."""
ROTATION = "apply_rotary_pos_emb"


def _skip_identity(undo: Undo, module: ModuleType) -> None:
    """Let a modelling module's rotation pass q and k through where it is given no cos, until ``undo``."""

    def restore() -> None:
        with _LOCK:
            own, users = _WRAPPED.get(module, (None, set()))
            users.discard(undo)
            if own is not None and not users:
                setattr(module, ROTATION, own)
                del _WRAPPED[module]

    undo.add(restore)
    with _LOCK:
        own, users = _WRAPPED.setdefault(module, (getattr(module, ROTATION), set()))
        users.add(undo)
        if getattr(module, ROTATION) is own:
            setattr(module, ROTATION, wraps(own)(partial(_rotated, own)))


def _rotated(
    rotate: Callable[..., Pair], q: Tensor, k: Tensor, cos: Tensor | None, *rest: object, **named: object
) -> Pair:
    """q [B, Q, T, D] and k [B, H, T, D], rotated unless cos is None."""
    return (q, k) if cos is None else rotate(q, k, cos, *rest, **named)


# ---- MLPs in slices of rows --------------------------------------------------------------------------------------------

# What is between an MLP's two matrix products is the widest thing in a layer, and no token of it needs another's. A slice is
# large enough to lose nothing: with ``SLICE`` rows a matrix product does as many multiplications for each weight that it
# reads, ten times what a card needs to be busy computing (an H100: about 300 operations in bfloat16 a byte). Chunks up to
# that length, and decoding, run as ever.


SLICE = 4096
"""Rows (tokens of all samples) that an MLP sees at most at a time."""


def slice_mlps(undo: Undo, model: PreTrainedModel) -> None:
    """Let every gated MLP of a decoder see at most ``SLICE`` rows at a time until ``undo``."""
    for mlp in filter(is_gated, decoder_of(model).modules()):
        replace_forward(undo, mlp, partial(_sliced, mlp))


def _sliced(mlp: nn.Module, forward: Forward, x: Tensor, *args: object, **named: object) -> Tensor:
    """``forward(x)`` for ``x`` [..., C], in slices of rows if that saves memory. A call with further arguments is not sliced."""
    rows = x.numel() // x.shape[-1]
    if rows <= SLICE or args or named or not _gains(mlp, x):
        return forward(x, *args, **named)
    x_NF, out_NF = x.reshape(rows, -1), x.new_empty(0)
    for start in range(0, rows, SLICE):
        part = forward(x_NF[start : start + SLICE])
        out_NF = out_NF if start else part.new_empty(rows, part.shape[-1])
        out_NF[start : start + SLICE] = part
        del part  # or it would outlive the next slice's products
    return out_NF.view(*x.shape[:-1], -1)


def _gains(mlp: nn.Module, x: Tensor) -> bool:
    """Whether slicing the MLP of ``x``, of shape [..., C], saves memory.

    In a graph it does not, since the graph keeps all tensors between the products. It is also avoided if weights are fetched
    per call. ZeRO-3 gathers them, and its processes must call equally often. accelerate moves in weights from another device
    than ``x``.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        return False
    return all(weight.device == x.device and not hasattr(weight, "ds_id") for weight in mlp.parameters())


# ---- products in bfloat16 on a CPU without it ----------------------------------------------------------------------------

# Of many rows: weights are widened to float32 for the product, which is rounded once. PyTorch's own takes several times as
# long there, and sums in float32 too.


FEWEST = 64
"""Fewest rows of a product that make widening its weights faster."""
AT_ONCE = 1 << 22
"""Weights that are widened at a time."""


@cache
def lacks_bfloat16() -> bool:
    """Whether this processor must widen numbers of bfloat16 to compute with them, as x86 without AVX512_BF16 and AMX."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return not any(getattr(torch.cpu, name, bool)() for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))


def widen(undo: Undo, model: PreTrainedModel, choice: Choice) -> None:
    """Run a decoder's bfloat16 products by the operations of ``choice``, until ``undo``, on a processor without fast ones."""
    if model.dtype == torch.bfloat16 and lacks_bfloat16():
        for linear in decoder_of(model).modules():
            # No codes of another library.
            if type(linear) is nn.Linear and has_own_forward(linear) and type(linear.weight.data) is Tensor:
                replace_forward(undo, linear, partial(_widened, linear, choice))


def _widened(linear: nn.Linear, choice: Choice, forward: Forward, x: Tensor) -> Tensor:
    """The linear map of ``x``, of shape [..., C], by the operations of ``choice`` if there are any."""
    operations = choice(x, linear.weight)
    return forward(x) if operations is None else operations.linear(x, linear.weight, linear.bias)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear`` of ``x`` [..., C] and ``weight`` [N, C], with widened weights if that is faster."""
    alike = x.dtype == weight.dtype == torch.bfloat16 and x.device.type == "cpu"
    graph = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    if not alike or graph or x.numel() < FEWEST * x.shape[-1] or not lacks_bfloat16():
        return F.linear(x, weight, bias)
    wide, step = x.float(), max(1, AT_ONCE // weight.shape[1])
    out = x.new_empty(*x.shape[:-1], len(weight))
    for start in range(0, len(weight), step):
        some = slice(start, start + step)
        out[..., some] = F.linear(wide, weight[some].float(), None if bias is None else bias[some].float())
    return out


# ---- hidden states of the last layer as rows of one matrix -----------------------------------------------------------------


def _as_rows(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The hidden states [B, T, C] as rows of one matrix. For the last token alone, a slice, PyTorch makes a batch of matrices.
    In bfloat16 on a CPU it copies the vocabulary's weights for that at every call."""
    hidden, *rest = args
    return hidden.reshape(-1, hidden.shape[-1]).contiguous().view(hidden.shape), *rest


def is_own_hook(hook: Callable[..., object]) -> bool:
    """Whether a module's hook is one that ``attach`` has put there."""
    return hook is _as_rows


def give_rows(undo: Undo, words: nn.Module) -> None:
    """Let the last layer see its hidden states ``_as_rows`` until ``undo``."""

    def restore() -> None:
        for key in [key for key, hook in words._forward_pre_hooks.items() if is_own_hook(hook)]:
            del words._forward_pre_hooks[key]

    undo.add(restore)
    words.register_forward_pre_hook(_as_rows)
