"""Attention of a block of new tokens over cached rows and themselves."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from locret_kernels.attend import attend_and_count
from locret_kernels.backend import function
from locret_kernels.column_stats import MARGIN
from locret_kernels.ragged_decode import Angles, Float8Rows, PackedRows, Rotation, Spans

from ..backbones.decoder_attention import Softmax
from ..backbones.spec import AttentionLayer
from ..naming import first_line

logger = logging.getLogger(__name__)


NEWER = {9: {"FA4": "flash_attn.cute", "FA3": "flash_attn_interface"}, 10: {"FA4": "flash_attn.cute"}}
"""Major compute capability -> FlashAttention's implementations for it, the better one first, as PyTorch names them, and their
modules. FlashAttention-2's package has the parent of one."""
CUDNN = 91500
"""Version of cuDNN above which PyTorch trusts its attention on Hopper (pytorch#169849)."""


@cache
def activate_newer(device: torch.device, dtype: torch.dtype, head_size: int) -> None:
    """Let PyTorch's operator of FlashAttention run the newest implementation for a card, where its package is installed, it
    takes such heads, and no other is active. The operator's meaning stays; the choice holds for the whole process."""
    attention = torch.nn.attention
    if device.type != "cuda" or not hasattr(attention, "activate_flash_attention_impl"):
        return
    probe = torch.zeros(1, 1, 1, head_size, dtype=dtype, device=device)
    for name, module in NEWER.get(torch.cuda.get_device_capability(device)[0], {}).items():
        if attention.current_flash_attention_impl() is not None:
            return
        if find_spec(module.split(".")[0]) is None or find_spec(module) is None:
            continue
        # With one row: an installed package may still not run on this card, or for such heads.
        try:
            attention.activate_flash_attention_impl(name)
            _flash(probe, probe, probe, 1.0)
        except Exception as error:  # whatever a package of another version raises: FlashAttention-2 is there
            attention.restore_flash_attention_impl()
            logger.warning("%s of the package %s does not run for heads of %d: %s", name, module, head_size, error)
        else:
            logger.info("attention runs %s of the package %s", name, module)


ChunkAttention = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
"""Queries, keys, values and scaling -> output ``[B, Q, T, D]`` and log-sum-exp ``[B, Q, T]`` over the rows up to each query."""


TRIAL = 1024, 8192
"""Queries and rows of the timed trial."""
LEAST_RATE = {("cudnn", 96): 380e12}
"""Operations a second that an implementation must reach for a head size: cuDNN pads 96 channels to 128, and its parts are rounded
before they are joined."""


@cache
def chunk_attention(
    device: torch.device, dtype: torch.dtype, head_size: int, heads: tuple[int, int] = (32, 8)
) -> tuple[str, ChunkAttention] | None:
    """PyTorch's fastest attention of a chunk over rows before it, and its name: FlashAttention-4 or 3 where it is installed, else
    FlashAttention-2, or on Hopper cuDNN in two parts. Found out by calling each once, as says the log where one does not run,
    and by a timed trial where several do; None where none does.

    Args:
        heads: of queries, and of keys and values.
    """
    if device.type == "cpu" or dtype.itemsize != 2:
        return None
    activate_newer(device, dtype, head_size)
    active = getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)()
    forms: dict[str, ChunkAttention] = {f"flash ({active or 'FA2'})": _flash}
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    if hopper and (torch.backends.cudnn.version() or 0) > CUDNN:
        forms |= {"cudnn": _two_parts}
    runs, probe = dict[str, ChunkAttention](), torch.zeros(1, 1, 2, head_size, dtype=dtype, device=device)
    for name, form in forms.items():
        try:
            form(probe[:, :, 1:], probe, probe, 1.0)
        except (AttributeError, RuntimeError) as error:  # not in this PyTorch; not on this card, or not for these heads
            logger.warning(
                "attention by %s with its log-sum-exp does not run for heads of %d in %s on %s: %s",
                name, head_size, dtype, device, error,
            )  # fmt: skip
        else:
            runs[name] = form
    if len(runs) > 1:
        rates = {name: _rate(form, device, dtype, head_size, heads) for name, form in runs.items()}
        found = ", ".join(f"{name} {rate / 1e12:.0f} TFLOP/s" for name, rate in rates.items())
        logger.info("attention of %d over %d heads of %d on %s: %s", *heads, head_size, device, found)
        enough = [name for name, rate in rates.items() if rate >= LEAST_RATE.get((name, head_size), 0)]
        best = max(enough or rates, key=rates.__getitem__)
        return best, runs[best]
    return next(iter(runs.items()), None)


def _rate(
    form: ChunkAttention, device: torch.device, dtype: torch.dtype, head_size: int, heads: tuple[int, int]
) -> float:
    """Operations a second of an attention."""
    (Q, H), (T, S) = heads, TRIAL
    q, k, v = (torch.randn(1, n, rows, head_size, dtype=dtype, device=device) for n, rows in ((Q, T), (H, S), (H, S)))
    seconds = quickest(lambda: form(q, k, v, head_size**-0.5), device)
    return 4 * Q * head_size * (T * (S - T) + T * (T + 1) / 2) / seconds


def quickest(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of a call on a card, the best of some: all but the first are warm."""
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(7)]
    for end in ends:
        run()
        end.record()
    torch.cuda.synchronize(device)
    return min(a.elapsed_time(b) for a, b in pairwise(ends)) / 1e3


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
    joined: tuple[Tensor, Tensor] = function("join_parts", "triton" if own.is_cuda else "reference")(
        own, own_lse, old, old_lse
    )
    return joined


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


def _attend_window(q_BQTD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, scaling: float, window: int) -> Tensor:
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


def attend_rows(
    q_BQTD: Tensor,
    k_BHSD: Tensor,
    v_BHSD: Tensor,
    scaling: float,
    window: int | None = None,
    backend: str = "reference",
) -> Tensor:
    """Grouped-query attention ``[B, Q, T, D]`` where rows are ordered by age and the last ``T`` rows are the new tokens.

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
    chosen = None if backend == "reference" else chunk_attention(q_BQTD.device, q_BQTD.dtype, D, (Q, H))
    if window is None and T < S and chosen is not None:
        return chosen[1](q_BQTD, k_BHSD, v_BHSD, scaling)[0]
    if window is not None and backend != "reference" and varlen_operator(q_BQTD.device, q_BQTD.dtype, D) is not None:
        return _attend_window(q_BQTD, k_BHSD, v_BHSD, scaling, window)
    # All else is for PyTorch, which chooses its kernel by the form of the mask.
    mask = lower_right(T, S, window, q_BQTD.dtype, q_BQTD.device)
    return F.scaled_dot_product_attention(q_BQTD, k_BHSD, v_BHSD, attn_mask=mask, scale=scaling, enable_gqa=G > 1)


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


# ---- one token's attention over all heads of a layer in one call, whatever their lengths and the bits of their rows -

# Lengths and positions may be known to the device alone, and nothing is read back from it.


@dataclass(frozen=True)
class VarlenRows:
    """Rows of a layer as the decoding kernels read them, in place: ``N`` of all heads, a stretch each."""

    rows: tuple[Tensor, Tensor] | Float8Rows | PackedRows
    """Keys and values ``[N, D]``."""
    positions_N: Tensor
    stats_XN: Tensor
    starts_BH: Tensor
    """First row of each head, and their number."""
    lengths_BH: Tensor
    longest: int
    """No head has more rows."""

    def newest(self, window: int | None) -> VarlenRows:
        """Rows of every head, at most the ``window`` newest ones."""
        if window is None:
            return self
        seen_BH = self.lengths_BH.clamp(max=window)
        starts_BH = self.starts_BH + (self.lengths_BH - seen_BH)
        return replace(self, starts_BH=starts_BH, lengths_BH=seen_BH, longest=min(self.longest, window))


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
    spans = Spans(flat.starts_BH, flat.lengths_BH, flat.longest)
    if not (statistics and group):
        decoded = decode(q_BQD, flat.rows, spans, scaling, rotation, received=bool(statistics))
        if statistics:
            _accumulate_statistics(flat, flat.stats_XN, decoded.received_BHS, statistics)
        return decoded.out_BQD.unsqueeze(2)
    # One call per query head of a group, since a call returns the mean of what its query heads gave.
    heads = [decode(q_BQD[:, g::group], flat.rows, spans, scaling, rotation, received=True) for g in range(group)]
    received = [one.received_BHS for one in heads]
    mean_BHS = torch.stack(received).mean(0)
    for stats_XN, one in zip(flat.stats_XN.unflatten(0, (1 + group, -1)), (mean_BHS, *received), strict=True):
        _accumulate_statistics(flat, stats_XN, one, statistics)
    return torch.stack([one.out_BQD for one in heads], dim=2).flatten(1, 2).unsqueeze(2)


def _accumulate_statistics(flat: VarlenRows, stats_XN: Tensor, received_BHS: Tensor, statistics: Sequence[str]) -> None:
    """Add the attention ``[B, H, S]`` of one query to the running statistics, which are defined by ``column_stats``."""
    made = {
        "sum": lambda: received_BHS,
        "square": received_BHS.square,
        "above": lambda: received_BHS > (1 + MARGIN) / flat.lengths_BH[..., None].float(),
    }
    rank_S = torch.arange(flat.longest, device=received_BHS.device)
    # Row [B, H, longest] of each rank; ranks past a head's end add zero to its first row.
    index_BHS = flat.starts_BH[..., None] + rank_S.where(rank_S < flat.lengths_BH[..., None], 0)  # 0 is added there
    for stat_N, name in zip(stats_XN, statistics, strict=True):
        stat_N.index_add_(0, index_BHS.flatten(), made[name]().flatten().to(stat_N.dtype))
