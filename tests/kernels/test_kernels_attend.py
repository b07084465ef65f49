"""Attention joined from two parts, and decoding over few bits: the references and Triton (interpreted) against float64."""

from __future__ import annotations

import pytest
import torch
from attention_oracle import attention, logits, turned
from few_bits import rotated
from interpreted import BOTH, KERNELS, REFERENCES, close, poisoned, random
from pairwise import pairs

from locret_kernels.ragged_decode import PackedRows, Rotation, Spans
from locret_kit.cache.storage.codec import Scratch
from locret_kit.cache.storage.layouts import EqualRows
from locret_kit.cache.storage.quantised import GroupedBits, unpack
from locret_kit.cache.storage.rows import BoundedLayer

pytestmark = pytest.mark.usefixtures("poisoned")

GROUPS = {"mha": (3, 3), "gqa": (4, 2), "mqa": (3, 1)}


def rows_of(Q, H, T, S, D, B=1, dtype=torch.float32):
    return tuple(random(B, *size, D, seed=i, dtype=dtype) for i, size in enumerate([(Q, T), (H, S), (H, S)]))


# ---- attention in two parts ---------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("B", "T", "before", "D"), [(1, 1, 40, 64), (2, 40, 7, 96), (1, 33, 200, 128)])
def test_two_parts_are_joined(functions, B, T, before, D, dtype):
    """Rows before a chunk and its own, whose heads of a token lie side by side; logits may be large."""
    q, k, v = rows_of(4, 2, T, before + T, D, B, dtype)
    q[:, 0] *= 30
    keys, values = (x.repeat_interleave(2, 1).double() for x in (k, v))
    parts = []
    for rows, own in ((slice(0, before), False), (slice(before, None), True)):
        x = q.double() @ keys[:, :, rows].mT * 0.1
        x = x.masked_fill(torch.ones(x.shape[-2:], dtype=torch.bool).triu(1), -torch.inf) if own else x
        out = (x.softmax(-1) @ values[:, :, rows]).to(dtype)
        parts += [out.transpose(1, 2).contiguous().transpose(1, 2), x.logsumexp(-1).float()]
    with poisoned():
        made, lse = functions["join_parts"](*parts)
    close(made.float(), attention(q, k, v, 0.1).float(), dtype)
    close(lse, logits(q, k, 0.1).logsumexp(-1).float())
    assert made.dtype == dtype and made.stride() == parts[0].stride()


# ---- decoding over few bits ----------------------------------------------------------------------------------------


def stored(bits: int, H: int, D: int, blocks: tuple[int, ...], dtype=torch.float32, capacity: int = 200):
    """A layer as the cache keeps it after blocks of new rows and an eviction half-way."""
    layer = BoundedLayer(EqualRows(capacity), GroupedBits(bits, Scratch()))
    for i, T in enumerate(blocks):
        k, v = (random(1, H, T, D, seed=10 * i + j, dtype=dtype) for j in range(2))
        k += torch.linspace(-6, 6, D).to(dtype)
        layer.update(k, v)
        layer.append(k, v, torch.zeros(()).expand(1, H, T))
        layer.codec.finish_block()
        if i == len(blocks) // 2 and layer.rows > 8:
            keep = layer.rows * 2 // 3
            layer.keep(random(1, H, layer.rows, seed=i).argsort(-1).argsort(-1) < keep, keep)
    return layer


def packed(layer: BoundedLayer, B: int = 1) -> tuple[PackedRows, torch.Tensor, torch.Tensor]:
    """What the kernel takes, in place: flat views, first rows and lengths; the layer's heads are those of ``B`` texts."""
    codec, starts = layer.codec, torch.arange(len(layer.positions)).view(B, -1) * layer.capacity
    flat = [x.flatten(0, 1) for x in (codec.key_codes, codec.value_codes, codec.group)]
    levels = [codec.key_step, codec.key_zero, *(x.flatten(0, 1) for x in (codec.value_step, codec.value_zero))]
    tail = torch.full_like(starts, codec.tail, dtype=torch.int32)
    return (
        PackedRows(*flat, *levels, codec.tail_keys, codec.tail_values, tail),
        starts,
        torch.full_like(starts, layer.rows),
    )


def dequantised(layer: BoundedLayer, B: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values ``[B, H, rows, D]`` in float64, from the codes by hand."""
    n, h = layer.rows - layer.codec.tail, torch.arange(len(layer.positions))[:, None]
    group = layer.codec.group[:, :n].long()
    key_levels = (x[h, group].double() for x in (layer.codec.key_step, layer.codec.key_zero))
    value_levels = (
        x[:, :n].double().repeat_interleave(layer.codec.value_group, -1)
        for x in (layer.codec.value_step, layer.codec.value_zero)
    )
    out = []
    for codes, (step, zero), tail in (
        (layer.codec.key_codes, key_levels, layer.codec.tail_keys),
        (layer.codec.value_codes, value_levels, layer.codec.tail_values),
    ):
        numbers = zero + unpack(codes[:, :n], layer.codec.bits).double() * step
        numbers = rotated(numbers) if codes is layer.codec.value_codes else numbers
        out.append(torch.cat((numbers, tail[:, : layer.codec.tail].double()), 1).unflatten(0, (B, -1)))
    return out[0], out[1]


@pytest.mark.parametrize(
    ("group", "D", "blocks", "share", "bits"),
    pairs(
        [("gqa", 64, (90, 40, 1)), ("mha", 96, (70, 31)), ("mqa", 128, (5, 1, 1)), ("gqa", 256, (64, 33, 7))],
        [0, 1, 0.75],
        [4, 2],
    ),
)
def test_decoding_over_few_bits(group, D, blocks, share, bits):
    (Q, H), B = GROUPS[group], 2
    layer = stored(bits, B * H, D, blocks)
    n, R = layer.rows, int(share * D)
    rows, starts, lengths = packed(layer, B)
    assert rows.bits == bits
    shift = 5  # where rows that are quantised stand above their rank
    place = (torch.arange(layer.capacity) + shift).repeat(B * H) if R else None
    angle = torch.arange(layer.capacity + shift)[:, None].double() * (0.3 ** torch.arange(R // 2).double()).repeat(2)
    turn = Rotation(angle.cos().float(), angle.sin().float(), place) if R else None
    q, spans = random(B, Q, D, seed=99), Spans(starts, lengths, n)
    with poisoned():
        mine = KERNELS["ragged_decode"](q, rows, spans, 0.1, turn, received=True)
    theirs = REFERENCES["ragged_decode"](q, rows, spans, 0.1, turn, received=True)
    k, v = dequantised(layer, B)
    if R:
        k = turned(k, angle[shift : shift + n, : R // 2])
    oracle = attention(q[:, :, None], k, v, 0.1)[:, :, 0]
    weights = logits(q[:, :, None], k, 0.1).softmax(-1).view(B, H, Q // H, n).mean(2)
    for made in (theirs, mine):
        close(made.out_BQD, oracle.float())
        close(made.received_BHS, weights.float())


def test_decoding_over_few_bits_of_heads_with_rows_and_tails_of_their_own():
    """Heads that stop earlier, one of them in its tail alone: what lies behind a head's rows is never read."""
    layer = stored(4, 3, 64, (90, 20))
    rows, starts, _ = packed(layer)
    k, v = dequantised(layer)
    n, tail = layer.rows, layer.codec.tail
    first = n - tail
    lengths, tails = torch.tensor([[first, n, 4]]), torch.tensor([[0, tail, 4]])
    q = random(1, 3, 64, seed=1)
    for functions in (KERNELS, REFERENCES):
        mine = functions["ragged_decode"](q, rows._replace(tail_BH=tails), Spans(starts, lengths, n), 0.1).out_BQD
        for h, seen in enumerate((slice(0, first), slice(0, n), slice(first, first + 4))):
            oracle = attention(q[:, h : h + 1, None], k[:, h : h + 1, seen], v[:, h : h + 1, seen], 0.1)
            close(mine[:, h], oracle[:, 0, 0].float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_decoding_over_few_bits_in_half_precision(dtype):
    layer = stored(4, 2, 64, (60, 20), dtype)
    rows, starts, lengths = packed(layer)
    q = random(1, 4, 64, seed=1, dtype=dtype)
    mine = KERNELS["ragged_decode"](q, rows, Spans(starts, lengths, layer.rows), 0.1).out_BQD
    oracle = attention(q[:, :, None], *dequantised(layer), 0.1)[:, :, 0]
    assert mine.dtype == dtype
    close(mine.float(), oracle.float(), dtype)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r._replace(tail_keys_PRD=r.tail_keys_PRD.bfloat16()), "the tail is torch.bfloat16"),
        (lambda r: r._replace(key_codes_NX=r.key_codes_NX.short()), "takes 4 or 2 in torch.uint8"),
        (lambda r: r._replace(key_step_PMD=r.key_step_PMD[:1]), "does not belong to"),
    ],
)
def test_what_few_bits_refuse(change, message):
    layer = stored(4, 2, 64, (40,))
    rows, starts, lengths = packed(layer)
    with pytest.raises(ValueError) as caught:
        KERNELS["ragged_decode"](random(1, 4, 64), change(rows), Spans(starts, lengths, layer.rows), 0.1)
    assert message in str(caught.value)
