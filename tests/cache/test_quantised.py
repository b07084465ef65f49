"""Quantised rows against plain arithmetic: read-back bounds over random evictions, bytes, and runs of a tiny backbone."""

import pytest
import torch
from few_bits import rotated
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_runs import held, logits_of, make, tokens, turn

from locret_kit.cache.storage.codec import Scratch
from locret_kit.cache.storage.layouts import Layout
from locret_kit.cache.storage.quantised import GroupedBits, RowBits, decode, encode, levels, pack, unpack
from locret_kit.cache.storage.rows import BoundedLayer
from locret_kit.config.infer_options import INFER
from locret_kit.config.schema import given_by

pytestmark = pytest.mark.usefixtures("poisoned")

SOME = settings(max_examples=12)
BITS = pytest.mark.parametrize("bits", [4, 2])


# ---- packing ----------------------------------------------------------------------------------------------------


@BITS
def test_codes_pack_into_bytes_and_back(bits):
    codes = torch.randint(0, 2**bits, (3, 5, 24), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    packed = pack(codes, bits)
    assert packed.dtype == torch.uint8 and packed.shape == (3, 5, 24 * bits // 8)
    assert torch.equal(unpack(packed, bits), codes)
    flat, per_byte = codes.flatten().tolist(), 8 // bits
    for i, byte in enumerate(packed.flatten().tolist()):
        assert byte == sum(code << (bits * j) for j, code in enumerate(flat[i * per_byte : (i + 1) * per_byte]))


@SOME
@given(
    st.lists(st.floats(-300, 300, width=32), min_size=1, max_size=12), st.sampled_from([4, 2]),
    st.sampled_from([0.0, 1e-6, 1.0, 150.0]),
)  # fmt: skip
def test_numbers_come_back_within_half_a_step(numbers, bits, scale):
    x = torch.tensor(numbers) * scale
    step, zero = levels(x.amin(), x.amax(), bits)
    back = decode(encode(x, step, zero, bits), step, zero)
    ulp = 2**-22 * float(x.abs().max())
    assert float((back - x).abs().max()) <= float(step) / 2 + ulp
    spread, low = float(x.double().amax() - x.double().amin()), abs(float(x.amin()))
    assert float(step) <= (spread + low / 500) / (2**bits - 1) * 1.002 + 3e-7


# ---- a layer ----------------------------------------------------------------------------------------------------


def layer_of(bits: int, capacity: int = 40, **rest) -> BoundedLayer:
    return BoundedLayer(Layout(capacity), GroupedBits(bits, Scratch(), **{"group": 4, "residual": 3, **rest}))


def feed(layer, k, v, settle: bool = True) -> None:
    layer.update(k, v)
    layer.append(k, v, torch.zeros(()).expand(k.shape[:3]))
    if settle:
        layer.codec.finish_block()


def rows_drawn(draw: torch.Generator, T: int, H: int = 4, D: int = 8) -> torch.Tensor:
    offset = torch.linspace(-20, 20, D)  # channels with means of their own, as keys have
    return torch.randn(1, H, T, D, generator=draw) * torch.rand(D, generator=draw) * 3 + offset


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@SOME
@given(seed=st.integers(0, 10**6), bits=st.sampled_from([4, 2]), steps=st.integers(5, 30))
def test_survivors_stay_within_half_a_step_a_merge(dtype, seed, bits, steps):
    """Every row read back after every block, its error against the sum of the half steps of the grids it has been on."""
    draw = torch.Generator().manual_seed(seed)
    layer, H, D, capacity = layer_of(bits), 4, 8, 40
    original = {name: torch.empty(1, H, 0, D, dtype=torch.float64) for name in ("keys", "values")}
    bound = torch.zeros(1, H, 0, D, dtype=torch.float64)
    grid = torch.zeros(1, H, 0, 1 + 2 * D, dtype=torch.float64)  # group, steps, zero points
    entered = merged = 0
    for _ in range(steps):
        T = int(torch.randint(1, 12, (), generator=draw))
        if layer.rows > 1 and (layer.rows + T > capacity or float(torch.rand((), generator=draw)) < 0.5):
            keep = int(torch.randint(1, min(layer.rows, capacity - 11) + 1, (), generator=draw))
            stay = torch.rand(1, H, layer.rows, generator=draw).argsort(-1).argsort(-1) < keep
            layer.keep(stay, keep)
            index = stay.int().argsort(dim=-1, descending=True, stable=True)[..., :keep, None]
            original = {name: x.gather(2, index.expand(-1, -1, -1, D)) for name, x in original.items()}
            bound = bound.gather(2, index.expand(-1, -1, -1, D))
            grid = grid.gather(2, index.expand(-1, -1, -1, grid.shape[-1]))
        k, v = rows_drawn(draw, T).to(dtype), rows_drawn(draw, T).to(dtype)
        before = layer.codec.group[None, :, : layer.rows].clone() if layer.is_initialized else None
        feed(layer, k, v)
        n, entered = layer.rows, entered + T * H
        original = {name: torch.cat([original[name], x.double()], 2) for name, x in (("keys", k), ("values", v))}
        bound = torch.cat([bound, bound.new_zeros(1, H, T, D)], 2)
        grid = torch.cat([grid, grid.new_full((1, H, T, grid.shape[-1]), -1)], 2)

        group = layer.codec.group[None, :, :n].long()
        index = group.clamp(min=0)[..., None].expand(-1, -1, -1, D)
        step, zero = (table[None].gather(2, index).double() for table in (layer.codec.key_step, layer.codec.key_zero))
        now = torch.cat([group[..., None].double(), step, zero], -1)
        fresh = (now != grid).any(-1) & (group >= 0)
        bound += torch.where(fresh[..., None], step / 2, 0.0)
        grid = torch.where(fresh[..., None], now, grid)
        if before is not None:
            merged += int((fresh[:, :, : before.shape[2]] & (before >= 0)).sum())

        ulp = 2**-18 * 40
        keys, values = layer.slots("keys").double(), layer.slots("values").double()
        assert bool(((keys - original["keys"]).abs() <= bound + ulp).all())
        came = min(T, layer.codec.residual)
        assert bool((group[:, :, n - came :] < 0).all())
        alone = torch.where(group[..., None] < 0, 0.0, layer.codec.value_step[None, :, :n].double() / 2)
        missed = values - original["values"]
        assert bool((rotated(missed).abs() <= alone + ulp).all())
        assert bool((missed.norm(dim=-1) <= alone[..., 0] * D**0.5 + ulp).all())
        raw = (group < 0)[..., None].expand_as(keys)
        assert torch.equal(keys[raw], original["keys"][raw]) and torch.equal(values[raw], original["values"][raw])
        assert all(int(c) <= 4 for row in group.flatten(0, 1) for c in row[row >= 0].bincount())
        layer.codec.scratch.owner = None
    assert merged <= 2 * entered + 4 * steps * H


def test_rows_that_are_alike_share_their_steps():
    """Rows of two kinds in turn: a group that has both would have steps of a fifteenth of what parts them."""
    draw = torch.Generator().manual_seed(3)
    layer = layer_of(4, 128, group=8, residual=8)
    kind = torch.tensor([0.0, 60.0]).repeat(36)[:, None] * torch.tensor([1.0, -1.0, 0.5, 0.0] * 2)
    k = torch.randn(1, 2, 72, 8, generator=draw) + kind
    feed(layer, k, k)
    worst_HS = (layer.slots("keys") - k).abs().amax(-1)[0].sort(-1).values
    assert float(worst_HS[:, :-8].max()) < 0.5 < 60 / 15 / 2, "but for one group that has what is left of both"


@BITS
def test_rows_that_stand_out_come_back_as_they_were(bits):
    """Four of 64 rows are far from the others: they are stored in pairs, to float16's precision, and do not coarsen the
    others' steps; through further evictions too."""
    draw = torch.Generator().manual_seed(5)
    layer = layer_of(bits, 128, group=8, residual=8)
    k = torch.randn(1, 2, 72, 8, generator=draw)
    k[:, :, 10:50:10] = 40 * torch.randn(1, 2, 4, 8, generator=draw)
    feed(layer, k, k)
    far = torch.zeros(72, dtype=torch.bool)
    far[10:50:10] = True
    spread = float(k[:, :, ~far].abs().max()) * 2
    for _ in range(5):
        error = (layer.slots("keys") - k).abs()[0]
        torch.testing.assert_close(
            layer.slots("keys")[:, :, far], k[:, :, far], rtol=0, atol=2**-10 * float(k.abs().max())
        )
        assert float(error[:, ~far].max()) < 1.01 * spread / (2**bits - 1) / 2
        more = torch.randn(1, 2, 16, 8, generator=draw)
        feed(layer, more, more)
        stay = torch.ones(1, 2, 88, dtype=torch.bool)
        stay[:, :, 72:] = False
        layer.keep(stay, 72)


def test_a_large_channel_of_values_is_spread():
    """One channel fifty times as large as the others: by steps of its own group these would come back as nothing."""
    draw = torch.Generator().manual_seed(4)
    layer = layer_of(4, 128, group=8, residual=8)
    v = torch.randn(1, 2, 64, 64, generator=draw)
    v[..., 5] += 50
    feed(layer, v, v)
    missed = (layer.slots("values") - v)[:, :, :56]
    coarse = (v.amax() - v.amin()) / 15 / 12**0.5
    assert float(missed.square().mean().sqrt()) < 0.5 * float(coarse)


def test_growing_changes_nothing():
    draw = torch.Generator().manual_seed(6)
    layer = layer_of(2, capacity=0, spare=0.0)
    rows = torch.empty(1, 4, 0, 8)
    for T in (5, 1, 30, 2, 64):
        k = rows_drawn(draw, T)
        layer.update(k, k)
        if layer.rows + T > layer.capacity:
            before = layer.slots("keys").clone()
            layer.codec.finish_block()
            layer.grow(layer.rows + T)
            assert torch.equal(layer.slots("keys"), before)
            layer.codec.finish_block()
        feed(layer, k, k)
        rows = torch.cat([rows, k], 2)
    assert layer.rows == 102 and float((layer.slots("keys") - rows).abs().max()) < 15 / 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eight_bits_are_read_back(dtype):
    """Within half a step of each group of 32 channels, whatever is beside it; constant groups exactly."""
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(1, 6, 9, 64, generator=generator).mul(8**n).to(dtype) for n in (1, -4))
    k[0, 0, :, 40], k[0, 1, :, :32] = 3e4, 0.5
    rows = BoundedLayer(Layout(64), RowBits())
    feed(rows, k, v)
    for name, x in (("keys", k), ("values", v)):
        read, groups = rows.slots(name), x.double().unflatten(-1, (2, 32))
        bound = 0.502 * (groups.amax(-1) - groups.amin(-1) + groups.amin(-1).abs() / 500) / 255 + 1e-7
        rounding = read.double().abs() * torch.finfo(dtype).eps
        error = (read.double() - x.double()).abs()
        assert (error <= bound.repeat_interleave(32, -1) + rounding).all()
        assert read.dtype == dtype
    assert torch.equal(rows.slots("keys")[0, 1, :, :32], k[0, 1, :, :32])


# ---- a cache ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy", ["full", "h2o", "snapkv(6,3)", "locret", "sirllm", "keydiff", "pyramidkv(6,3,beta=3)"]
)
def test_a_prompt_as_short_as_the_tail_is_exact(policy):
    """Nothing leaves the tail, so every policy keeps the same slots and the logits are the same."""
    positions = turn(policy, "compact", "original")
    caches = [make(policy, length=60, positions=positions, kv_bits=bits) for bits in (None, 4)]
    plain, stored = (logits_of(cache, tokens(60)) for cache in caches)
    assert held(caches[0]) == held(caches[1])
    torch.testing.assert_close(stored, plain, rtol=1e-9, atol=1e-9)


@BITS
@pytest.mark.parametrize("policy", ["full", "streaming", "random"])
def test_logits_stay_near(policy, bits):
    """Policies that look at no keys hold the same slots; what is read differs by the rounding of 4 or 2 bits."""
    caches = [make(policy, 100, length=260, chunk=50, kv_bits=kv_bits) for kv_bits in (None, bits)]
    plain, stored = (logits_of(cache, tokens(260)) for cache in caches)
    assert held(caches[0]) == held(caches[1])
    assert float((stored - plain).norm() / plain.norm()) < (0.15 if bits == 4 else 0.8)


def test_what_does_not_go_is_said():
    for policy, bits, said in (
        ("h2o", 3, "kv_bits=3 must be one of: 8, 4, 2"),
        ("merge-locret", 4, "kv_bits=4 stores a slot once; policy='merge-locret' merges evicted slots"),
        *(
            ("ada-snapkv", n, f"kv_bits={n} is for heads of one length; those of policy='ada-snapkv'")
            for n in (8, 4, 2)
        ),
    ):
        with pytest.raises(ValueError, match=said):
            make(policy, kv_bits=bits)
    with pytest.raises(ValueError, match="kv_bits=2 needs a head size that is a multiple of 4, not 6"):
        layer_of(2).update(torch.zeros(1, 1, 1, 6), torch.zeros(1, 1, 1, 6))
    with pytest.raises(ValueError, match="kv_bits=3 must be one of: 8, 4, 2"):
        given_by(INFER, ["--kv-bits", "3"])
