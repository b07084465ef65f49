"""Attention of a block of new tokens over cached rows and themselves."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.backends import cuda
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from locret_kernels.attend import MARGIN, attend_and_count
from locret_kernels.backend import capability, choose, function
from locret_kernels.ragged_decode import Angles, Rotation, Rows, Spans

from ..backbones.handlers import Softmax
from ..backbones.spec import AttentionLayer
from ..naming import first_line
from .graphs import capture, quickest

logger = logging.getLogger(__name__)


NEWER = {9: {"FA4": "flash_attn.cute", "FA3": "flash_attn_interface"}, 10: {"FA4": "flash_attn.cute"}}
"""Major compute capability -> FlashAttention's implementations for it, the better one first, as PyTorch names them, and their
modules. FlashAttention-2's package has the parent of one."""
INSTALL = "pip install --upgrade --pre flash-attn-4"
"""Line that installs FlashAttention-4: all of its releases are pre-releases."""
CUDNN = 91500
"""Version of cuDNN above which PyTorch trusts its attention on Hopper (pytorch#169849)."""
PROBE, TRIAL = (64, 192), (1024, 8192)
"""Queries and rows of a first call, and of a timed one where something does not run."""
LEAST_GAIN = {96: 1.2}
"""Head size -> rate of cuDNN, as a multiple of FlashAttention's, from which it is taken; 1 for other sizes. It pads 96 channels
to 128, and its parts are rounded before they are joined."""

ChunkAttention = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
"""Queries, keys, values and scaling -> output ``[B, Q, T, D]`` and log-sum-exp ``[B, Q, T]`` over the rows up to each query."""
Forms = dict[str, ChunkAttention]


def activate_newer(name: str) -> None:
    """Let PyTorch's operator of FlashAttention run another implementation, in the whole process. The operator's meaning stays."""
    attention = torch.nn.attention
    if name == "FA4":
        register = import_module("torch.nn.attention._fa4").register_flash_attention_fa4
        attention.register_flash_attention_impl(name, register_fn=partial(register, f"{__package__}.flash4"))
    attention.activate_flash_attention_impl(name)


def _active() -> str | None:
    """PyTorch's name of the implementation that is active; None is FlashAttention-2."""
    return getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)()


@cache
def _running(device: torch.device, dtype: torch.dtype, head_size: int, heads: tuple[int, int]) -> Forms:
    """Attentions of PyTorch that run for such heads, by name: the newest FlashAttention that is installed, unless another is
    active, and on Hopper cuDNN in two parts. Each is called once; what raises is left out, and a line of the log says so."""
    if device.type == "cpu" or dtype.itemsize != 2:
        return {}
    (Q, H), (T, S), major, active = heads, PROBE, capability(device)[0], _active()
    q, k, v = (torch.zeros(1, n, rows, head_size, dtype=dtype, device=device) for n, rows in ((Q, T), (H, S), (H, S)))
    runs, failed = Forms(), dict[str, Exception]()

    def probe(name: str, form: ChunkAttention, newer: str | None = None) -> bool:
        try:
            if newer != _active():
                activate_newer(str(newer))
            form(q, k, v, 1.0)
        except Exception as error:  # of a package's other release, of the card, of these heads
            failed[name] = error
            if newer is not None and _active() is not None:
                torch.nn.attention.restore_flash_attention_impl()
            return False
        runs[name] = form
        return True

    # Its parent first: a module of a package that is missing raises.
    packages = NEWER.get(major, {}).items()
    installed = [name for name, module in packages if find_spec(module.split(".")[0]) and find_spec(module)]
    for newer in (*([active] if active else installed), None):
        if probe(f"flash ({newer or 'FA2'})", _flash, newer):
            break
    if major == 9 and (torch.backends.cudnn.version() or 0) > CUDNN:
        probe("cudnn", _two_parts, _active())
    if failed:
        _rates(runs, failed, device, dtype, head_size, heads, TRIAL)
    return runs


@cache
def chunk_attention(
    device: torch.device, dtype: torch.dtype, head_size: int, heads: tuple[int, int] = (32, 8)
) -> tuple[str, ChunkAttention] | None:
    """PyTorch's FlashAttention for a chunk over rows before it, and its name; None where none runs.

    Args:
        heads: of queries, and of keys and values.
    """
    runs = _running(device, dtype, head_size, heads)
    return next((one for one in runs.items() if one[0] != "cudnn"), None)


@cache
def steady_attention(
    device: torch.device, dtype: torch.dtype, head_size: int, heads: tuple[int, int], shape: tuple[int, int]
) -> tuple[str, ChunkAttention] | None:
    """The fastest attention of chunks of one ``shape`` (queries, rows), by a timed trial, and its name; None without a card.

    cuDNN is for such chunks alone, which most of a long prompt's are: for every shape it makes plans anew, on the host.
    """
    runs = _running(device, dtype, head_size, heads)
    if device.type != "cuda" or not runs:
        return None
    rates = _rates(runs, {}, device, dtype, head_size, heads, shape)
    if len(rates) > 1:
        rates["cudnn"] /= LEAST_GAIN.get(head_size, 1)
    best = max(rates, key=rates.__getitem__, default=None)
    return None if best is None else (best, runs[best])


def _rates(
    runs: Forms, failed: dict[str, Exception], device: torch.device, dtype: torch.dtype, head_size: int,
    heads: tuple[int, int], shape: tuple[int, int],
) -> dict[str, float]:  # fmt: skip
    """Operations a second of attentions at a ``shape``. The log says them in one line, with what ``failed``, here too."""
    rates = dict[str, float]()
    for name, form in runs.items() if device.type == "cuda" else ():
        try:
            rates[name] = _rate(form, device, dtype, head_size, heads, shape)
        except Exception as error:
            failed[name] = error
    said = [f"{name} runs" for name in runs if name not in rates | failed]
    said += [f"{name} {rate / 1e12:.0f} TFLOP/s" for name, rate in rates.items()]
    said += [f"{name} does not run ({type(error).__name__}: {first_line(error)})" for name, error in failed.items()]
    newer = "" if _active() or capability(device)[0] not in NEWER else f"; for FlashAttention-4: {INSTALL}"
    logger.log(
        logging.WARNING if failed else logging.INFO,
        "attention of %d tokens over %d rows, %d heads over %d of %d in %s on %s: %s%s",
        *shape, *heads, head_size, dtype, device, ", ".join(said), newer,
    )  # fmt: skip
    return rates


def _rate(
    form: ChunkAttention, device: torch.device, dtype: torch.dtype, head_size: int, heads: tuple[int, int],
    shape: tuple[int, int],
) -> float:  # fmt: skip
    """Operations a second of an attention at a ``shape``, as chunks run: replayed from a graph, on their device."""
    (Q, H), (T, S) = heads, shape
    q, k, v = (torch.randn(1, n, rows, head_size, dtype=dtype, device=device) for n, rows in ((Q, T), (H, S), (H, S)))

    def run() -> Tensor:
        return form(q, k, v, head_size**-0.5)[0]

    run()  # kernels are compiled and plans made
    seconds = quickest(capture(device, (), run)[0].replay, device)
    return 4 * Q * head_size * (T * (S - T) + T * (T + 1) / 2) / seconds


def _flash(q_BQTD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp. The operator's "causal" is aligned to the lower right, as ``torch.nn.attention.bias`` uses it,
    and it takes grouped queries as they are."""
    made = torch.ops.aten._scaled_dot_product_flash_attention(
        q_BQTD, k_BHSD, v_BHSD, 0.0, is_causal=True, return_debug_mask=False, scale=scaling
    )
    return made[0], made[1]


def _cudnn(q_BQTD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, scaling: float, causal: bool) -> tuple[Tensor, Tensor]:
    made = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q_BQTD, k_BHSD, v_BHSD, None, True, 0.0, is_causal=causal, scale=scaling
    )
    return made[0], made[1].view(q_BQTD.shape[:3])


def _two_parts(q_BQTD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Attention ``[B, Q, T, D]`` of a causal chunk and its log-sum-exp ``[B, Q, T]``, by an operator without a
    lower-right mask.

    It attends to the rows before the chunk without a mask, and to the chunk itself with a square causal mask.
    """
    before = k_BHSD.shape[2] - q_BQTD.shape[2]
    own, own_lse = _cudnn(q_BQTD, k_BHSD[:, :, before:], v_BHSD[:, :, before:], scaling, True)
    if not before:
        return own, own_lse
    old, old_lse = _cudnn(q_BQTD, k_BHSD[:, :, :before], v_BHSD[:, :, :before], scaling, False)
    join = function("join_parts", choose(None, own.device, own.shape[-1], own.dtype))
    return join(own, own_lse, old, old_lse)


@cache
def varlen_operator(device: torch.device, dtype: torch.dtype, head_size: int) -> Callable[..., Tensor] | None:
    """PyTorch's attention over sequences of different lengths (``torch.nn.attention.varlen``), on rows of shape
    ``[N, heads, D]``.

    It is called once, as the kit calls it, to find out. Returns None where it does not run, with a warning except on
    CPUs and in full precision.
    """
    if device.type == "cpu" or dtype.itemsize != 2:
        return None
    try:
        attend: Callable[..., Tensor] = import_module("torch.nn.attention.varlen").varlen_attn
        row = torch.zeros(1, 1, head_size, dtype=dtype, device=device)
        ends = torch.arange(2, dtype=torch.int32, device=device)
        attend(row, row, row, ends, ends, 1, 1, scale=1.0, window_size=(-1, 0), enable_gqa=True, seqused_k=ends[1:])
    except (ImportError, AttributeError, TypeError, RuntimeError) as error:
        logger.warning(
            "attention over sequences of different lengths does not run for heads of %d in %s on %s, so each head is a call of "
            "its own and a window is a mask: %s", head_size, dtype, device, first_line(error),
        )  # fmt: skip
        return None
    return attend


def attend_heads(
    q_1QTD: Tensor,
    keys_ND: Tensor,
    values_ND: Tensor,
    starts_H: Tensor,
    lengths_H: Tensor,
    longest: int,
    scaling: float,
) -> Tensor:
    """Attention ``[1, Q, T, D]`` of the newest rows over heads of different lengths, in one launch of ``varlen_operator``. Rows
    lie end to end: each head begins at its start and has room up to the next one's."""
    (_, _, T, D), H = q_1QTD.shape, len(starts_H)
    attend = varlen_operator(q_1QTD.device, q_1QTD.dtype, D)
    assert attend is not None
    # A key/value head is a sequence of queries [T, G, D] over rows [S, 1, D].
    q_HTGD = q_1QTD[0].unflatten(0, (H, -1)).transpose(1, 2)
    ends = torch.arange(0, H * T + 1, T, dtype=torch.int32, device=q_1QTD.device)
    stretches = torch.cat((starts_H, starts_H.new_full((1,), len(keys_ND)))).int()
    out = attend(
        q_HTGD.flatten(0, 1), keys_ND[:, None], values_ND[:, None], ends, stretches, T, longest, scale=scaling,
        window_size=(-1, 0), enable_gqa=q_HTGD.shape[2] > 1, seqused_k=lengths_H.int(),
    )  # fmt: skip
    return out.view(H, T, -1, D).transpose(1, 2).flatten(0, 1)[None]


def attend_window(q_BQTD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, scaling: float, window: int) -> Tensor:
    """Attention ``[B, Q, T, D]`` of the newest rows over the ``window`` rows up to each, without a mask."""
    (B, Q, T, D), (H, S) = q_BQTD.shape, k_BHSD.shape[1:3]
    attend = varlen_operator(q_BQTD.device, q_BQTD.dtype, D)
    assert attend is not None
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q_BQTD, k_BHSD, v_BHSD))  # [B * T, Q, D], [B * S, H, D]
    ends = (torch.arange(0, B * n + 1, n, dtype=torch.int32, device=q.device) for n in (T, S))
    out = attend(q, k, v, *ends, T, S, scale=scaling, window_size=(window - 1, 0), enable_gqa=Q > H)
    return out.unflatten(0, (B, T)).transpose(1, 2)


@lru_cache(maxsize=2)
def lower_right(T: int, S: int, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Causal mask ``[T, S]`` in the fastest form for ``device``: the last new token sees the last row; with a window, only the
    newest ``window`` rows. All layers share one.

    On CUDA it is PyTorch's own bias, which allows flash attention. A tensor mask, which is additive, rules that out. With
    grouped queries it leaves only the kernel that builds the matrix of logits.
    """
    if device.type == "cuda" and window is None:
        return causal_lower_right(T, S)
    with torch.inference_mode(False):  # it is held for later calls, which may need gradients
        # Query t is row S - T + t: rows above that diagonal are later, rows `window` below it are forgotten.
        every_TS = torch.ones(T, S, dtype=torch.bool, device=device)
        hidden = every_TS.triu(S - T + 1)
        if window is not None:
            hidden |= every_TS.tril(S - T - window)
        return torch.zeros(T, S, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))


def attend_rows(q_BQTD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, scaling: float, window: int | None = None) -> Tensor:
    """Grouped-query attention ``[B, Q, T, D]`` where rows are ordered by age and the last ``T`` rows are the new tokens, by
    PyTorch's own choice of a kernel.

    A window counts rows, so the rows of a windowed layer must be contiguous in the text.
    """
    B, Q, T, D = q_BQTD.shape
    H, S = k_BHSD.shape[1:3]
    G = Q // H
    if T == 1 and (
        window is None or window >= S
    ):  # decoding: fold the group into the query axis, no mask, no copy of k
        q_BHGD = q_BQTD.reshape(B, H, G, D)
        return F.scaled_dot_product_attention(q_BHGD, k_BHSD, v_BHSD, scale=scaling).reshape(B, Q, 1, -1)
    mask = lower_right(T, S, window, q_BQTD.dtype, q_BQTD.device)
    if q_BQTD.device.type == "cuda" and not _is_fused(q_BQTD, k_BHSD, v_BHSD, None if window is None else mask):
        # PyTorch would hold all logits [Q, T, S] in float32. A key/value head at a time takes less than rotating the keys does,
        # which the plan counts.
        pairs = zip(q_BQTD.split(G, 1), k_BHSD.split(1, 1), v_BHSD.split(1, 1), strict=True)
        return torch.cat([attend_and_count(*one, scaling, window=window)[0] for one in pairs], 1).to(v_BHSD.dtype)
    return F.scaled_dot_product_attention(q_BQTD, k_BHSD, v_BHSD, attn_mask=mask, scale=scaling, enable_gqa=G > 1)


def _is_fused(q_BQTD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, mask_TS: Tensor | None) -> bool:
    """Whether a kernel of PyTorch on a card computes attention to the lower right, or by a mask, without all logits in memory."""
    asked = cuda.SDPAParams(q_BQTD, k_BHSD, v_BHSD, mask_TS, 0.0, False, q_BQTD.shape[1] > k_BHSD.shape[1])
    if mask_TS is None:  # cuDNN has no such mask by itself
        return cuda.can_use_flash_attention(asked) or cuda.can_use_efficient_attention(asked)
    return cuda.can_use_efficient_attention(asked) or cuda.can_use_cudnn_attention(asked)


def attend_text(
    q_BQTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, softmax: Softmax, layer: AttentionLayer | None = None
) -> Tensor:
    """Grouped-query attention ``[B, Q, T, D]`` of a whole text in a layer; by default one that sees all."""
    window, T, scaling = None if layer is None else layer.window, q_BQTD.shape[2], softmax.scaling
    if layer is not None and layer.chunked:
        pieces = zip(*(x.split(layer.window, 2) for x in (q_BQTD, k_BHTD, v_BHTD)), strict=True)
        return torch.cat([attend_text(q, k, v, softmax) for q, k, v in pieces], 2)
    if not softmax.is_plain:
        return attend_and_count(q_BQTD, k_BHTD, v_BHTD, **softmax._asdict(), window=window)[0].to(v_BHTD.dtype)
    if window is not None or k_BHTD.shape[2] != T:
        return attend_rows(q_BQTD, k_BHTD, v_BHTD, scaling, window)
    # Square and causal without a mask, which every kernel of PyTorch takes.
    gqa = q_BQTD.shape[1] != k_BHTD.shape[1]
    return F.scaled_dot_product_attention(q_BQTD, k_BHTD, v_BHTD, is_causal=True, scale=scaling, enable_gqa=gqa)


@dataclass(frozen=True)
class VarlenRows:
    """Rows of a layer as the decoding kernels read them, in place: ``N`` of all heads, a stretch each.

    Lengths and positions may be known to the device alone, and nothing is read back from it.
    """

    rows: Rows
    """Keys and values ``[N, D]``."""
    positions_N: Tensor
    stats_XN: Tensor
    spans: Spans
    """Rows of each head."""

    def newest(self, window: int | None) -> VarlenRows:
        """Rows of every head, at most the ``window`` newest ones."""
        if window is None:
            return self
        starts_BH, lengths_BH, longest = self.spans
        seen_BH = lengths_BH.clamp(max=window)
        return replace(self, spans=Spans(starts_BH + (lengths_BH - seen_BH), seen_BH, min(longest, window)))


def decode_rows(
    q_BQ1D: Tensor,
    flat: VarlenRows,
    scaling: float,
    backend: str,
    statistics: Sequence[str] = (),
    rotation: Rotation | Angles | None = None,
    group: int = 0,
) -> Tensor:
    """Attention output ``[B, Q, 1, D]`` of the newest token, which is the last row of every head already.

    Slots gain its ``statistics``, and those of each of the ``group`` query heads per key/value head unless it is 0. With
    a ``rotation`` keys come before RoPE, and with ``Angles`` the query too.
    """
    q_BQD = q_BQ1D.squeeze(2)  # one token: no axis of its own
    decode = function("ragged_decode", backend)
    if not (statistics and group):
        decoded = decode(q_BQD, flat.rows, flat.spans, scaling, rotation, received=bool(statistics))
        if statistics:
            _accumulate_statistics(flat, flat.stats_XN, decoded.received_BHS, statistics)
        return decoded.out_BQD.unsqueeze(2)
    # One call per query head of a group, since a call returns the mean of what its query heads gave.
    heads = [decode(q_BQD[:, g::group], flat.rows, flat.spans, scaling, rotation, received=True) for g in range(group)]
    received = [one.received_BHS for one in heads]
    mean_BHS = torch.stack(received).mean(0)
    for stats_XN, one in zip(flat.stats_XN.unflatten(0, (1 + group, -1)), (mean_BHS, *received), strict=True):
        _accumulate_statistics(flat, stats_XN, one, statistics)
    return torch.stack([one.out_BQD for one in heads], dim=2).flatten(1, 2).unsqueeze(2)


def gain(statistic: str, weights_XS: Tensor, seen_X: Tensor) -> Tensor:
    """Gain of rows ``[..., S]`` in a statistic by a query with such weights, which sees ``seen`` rows; see ``column_stats``."""
    if statistic == "above":
        return weights_XS > (1 + MARGIN) / seen_X[..., None]
    return weights_XS if statistic == "sum" else weights_XS.square()


def _accumulate_statistics(flat: VarlenRows, stats_XN: Tensor, received_BHS: Tensor, statistics: Sequence[str]) -> None:
    """Add the attention ``[B, H, S]`` of one query to the running statistics, which are defined by ``column_stats``."""
    starts_BH, lengths_BH, longest = flat.spans
    rank_S = torch.arange(longest, device=received_BHS.device)
    # Row [B, H, longest] of each rank; ranks past a head's end add zero to its first row.
    index_BHS = starts_BH[..., None] + rank_S.where(rank_S < lengths_BH[..., None], 0)  # 0 is added there
    for stat_N, name in zip(stats_XN, statistics, strict=True):
        stat_N.index_add_(0, index_BHS.flatten(), gain(name, received_BHS, lengths_BH).flatten().to(stat_N.dtype))
