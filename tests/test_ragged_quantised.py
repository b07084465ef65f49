"""Rows in few bits of heads that hold different numbers of slots: read back by hand in float64, against the layer of ragged
heads in full, and in runs of a tiny backbone."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from few_bits import rotated
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_runs import POLICIES, backbone, held, make, tokens, turn

from locret_kit import attach
from locret_kit.backbones.releases import CACHE
from locret_kit.cache.decoding import decode_rows
from locret_kit.cache.storage.codec import Plain
from locret_kit.cache.storage.groups import pairs_of, regroup, table_size
from locret_kit.cache.storage.layouts import EqualRows
from locret_kit.cache.storage.quantised import GroupedBits
from locret_kit.cache.storage.ragged import RaggedRows
from locret_kit.cache.storage.rows import BoundedLayer
from locret_kit.cache.storage.scratch import Scratch
from locret_kit.cache.storage.transfer import copy_rows
from locret_kit.policies.grammar import parse_policy
from locret_kit.policies.methods.random import Random
from locret_kit.runtime.session import prefill

pytestmark = pytest.mark.usefixtures("poisoned")

RAGGED = [name for name in POLICIES if (policy := parse_policy(name)).ragged and not policy.merge]
SOME = settings(max_examples=12)
BITS = pytest.mark.parametrize("bits", [4, 2])
B, H, D, CAPACITY, GROUP = 2, 3, 8, 40, 4


# ---- groups that several heads share ------------------------------------------------------------------------------


def drawn_table(seed: int, size: int, heads: int, capacity: int, density: float, pairs: int):
    """A table as small as it may be: keys, and a group (-1: the row leaves the tail) and a head a row."""
    draw = torch.Generator().manual_seed(seed)
    groups = table_size(capacity, heads, 0.0, size) - heads * pairs_of(capacity) + heads * pairs
    cuts = torch.randint(0, heads * capacity + 1, (heads - 1,), generator=draw).sort().values.tolist()
    group, head, free = [], [], torch.randperm(groups, generator=draw).tolist()
    for h, (a, b) in enumerate(zip([0, *cuts], [*cuts, heads * capacity], strict=True)):
        own = [free.pop() for _ in range(-(-(b - a) // size))]
        survivors = [own[i // size] for i in range(b - a) if float(torch.rand((), generator=draw)) < density]
        group += survivors
        group += [-1] * int((b - a - len(survivors)) * min(1.0, 1.5 * float(torch.rand((), generator=draw))))
        head += [h] * (len(group) - len(head))
    return torch.randn(len(group), 3, generator=draw), group, head, groups


def regrouped(keys, group: list[int], head: list[int], heads: int, groups: int, size: int, pairs: int):
    row_group = torch.tensor(group, dtype=torch.int64)
    rows = (keys, row_group, row_group < 0, torch.tensor(head, dtype=torch.int64))
    target, made = (x[0, 0] for x in regroup(*(x[None, None] for x in rows), heads, groups, size, pairs))
    return target, made


@settings(max_examples=150)
@given(
    st.integers(0, 10**6), st.integers(3, 6), st.integers(1, 4), st.integers(1, 30), st.floats(0, 1), st.integers(1, 3)
)
def test_rows_that_stand_out_are_in_pairs(seed, size, heads, capacity, density, pairs):
    """By the definition: of the rows that leave or are in a group of at most two, those of each head that are furthest from
    its mean, by standard deviations."""
    keys, group, head, groups = drawn_table(seed, size, heads, capacity, density, pairs)
    target, made = regrouped(keys, group, head, heads, groups, size, pairs)
    after = [int(t) if t >= 0 else g for t, g in zip(target, group, strict=True)]
    assert all(g >= 0 for g in after) or -1 not in group
    assert all(after.count(g) <= size for g in set(after))
    assert len(set(zip(after, head, strict=True))) == len(set(after)), "a group has rows of one head"
    assert all(bool(made[g]) for g, t in zip(after, target, strict=True) if t >= 0)
    for h in range(heads):
        own = [i for i, o in enumerate(head) if o == h]
        loose = [i for i in own if group[i] < 0 or group.count(group[i]) <= 2]
        if -1 not in group or not own:
            continue
        y = keys[own] - keys[own].mean(0)
        far = dict(zip(own, (y.square() / y.square().mean(0).clamp(min=1e-12)).sum(1).tolist(), strict=True))
        paired = sorted(loose, key=lambda i: -far[i])[: 2 * pairs]
        moved = [i for i in paired if target[i] >= 0]
        assert all(after.count(after[i]) <= 2 and all(j in paired for j in own if after[j] == after[i]) for i in moved)
        assert all(i in moved for i in paired if group[i] < 0)


@settings(max_examples=150)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 4), st.integers(1, 30), st.floats(0, 1))
def test_heads_share_a_table_and_no_group(seed, size, heads, capacity, density):
    """Against the definition, one number of groups after the other; the table is as small as it may be."""
    keys, group, head, groups = drawn_table(seed, size, heads, capacity, density, 0)
    target, made = regrouped(keys, group, head, heads, groups, size, 0)

    taken = {g for g in range(groups) if made[g]}
    assert [i for i in range(len(group)) if target[i] >= 0] == [i for i, g in enumerate(group) if g in taken or g < 0]
    after = [int(t) if t >= 0 else g for t, g in zip(target, group, strict=True)]
    assert all(g >= 0 for g in after) and all(after.count(g) <= size for g in set(after))
    assert all(g in taken for g, t in zip(after, target, strict=True) if t >= 0)
    assert len(set(zip(after, head, strict=True))) == len(set(after)), "a group has rows of one head"
    if -1 not in group:
        assert not taken
        return
    sparsest = sorted(range(groups), key=group.count)

    def needed(t: int) -> int:
        moved = [
            sum(g < 0 or g in sparsest[:t] for g, o in zip(group, head, strict=True) if o == h) for h in range(heads)
        ]
        return sum(-(-n // size) for n in moved)

    assert taken == set(sparsest[: next(t for t in range(1, groups + 1) if needed(t) <= t)])


@given(st.integers(0, 5000), st.integers(1, 64), st.floats(0, 2), st.integers(1, 40))
@settings(max_examples=200)
def test_a_table_has_room_for_every_split(capacity, heads, spare, size):
    groups = table_size(capacity, heads, spare, size)
    alone, whole = min(heads - 1, heads * capacity), heads * capacity
    worst = alone + -(-(whole - alone) // size) if whole else 0  # one row each, and one head with all others
    spread, left = divmod(max(0, whole - heads), size)  # or as many begun groups as there can be
    assert groups >= worst and (not whole or groups >= heads + spread)
    assert groups >= heads * (-(-int(capacity * (1 + spare)) // size)) and left < size
    pairs = capacity // 16 // 2
    assert groups >= worst + heads * pairs
    assert table_size(capacity, 1, spare, size) == -(-int(capacity * (1 + spare)) // size) + pairs


# ---- a layer ----------------------------------------------------------------------------------------------------


def layer_of(bits: int, capacity: int = CAPACITY, statistics: int = 0, **rest) -> BoundedLayer:
    sizes = {"group": GROUP, "residual": 3, **rest}
    return BoundedLayer(RaggedRows(capacity), GroupedBits(bits, Scratch(), **sizes), statistics=statistics)


def feed(layer, k, v, settle: bool = True) -> None:
    layer.update(k, v)
    layer.append(k, v, torch.arange(k.shape[2]).expand(k.shape[:3]).float())
    if settle:
        layer.codec.finish_block()


def rows_drawn(draw: torch.Generator, T: int, dtype=torch.float32) -> torch.Tensor:
    offset = torch.linspace(-20, 20, D)  # channels with means of their own, as keys have
    return (torch.randn(B, H, T, D, generator=draw) * torch.rand(D, generator=draw) * 3 + offset).to(dtype)


def stay_drawn(draw: torch.Generator, layer, mean: int) -> torch.Tensor:
    """The best ``H * mean`` of each item's slots by random scores that favour some heads, so that lengths differ."""
    valid = layer.layout.valid()
    score = torch.rand(valid.shape, generator=draw) * torch.rand(B, H, 1, generator=draw) + 1e-3
    flat = score.masked_fill(~valid, -1.0).flatten(1)
    return (flat.argsort(-1, descending=True).argsort(-1) < H * mean).view_as(valid)


def by_hand(layer: BoundedLayer) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Keys and values ``[rows, D]`` of each head in float64, number by number from the bytes."""
    per_byte, mask = 8 // layer.codec.bits, 2**layer.codec.bits - 1

    def codes(row: torch.Tensor) -> torch.Tensor:
        return torch.tensor([byte >> (layer.codec.bits * j) & mask for byte in row.tolist() for j in range(per_byte)])

    out: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
    for b in range(layer.layout.B):
        out.append([])
        for h in range(layer.layout.H):
            start, n = (int(x[b * layer.layout.H + h]) for x in (layer.layout.starts, layer.layout.lengths))
            tail, channel = min(layer.codec.tail, n), torch.arange(layer.codec.value_size) // layer.codec.value_group
            keys, values = (
                [torch.empty(0, layer.codec.key_size).double()],
                [torch.empty(0, layer.codec.value_size).double()],
            )
            for row in range(start, start + n - tail):
                step, zero = (
                    x[b, 0, int(layer.codec.group[row])].double() for x in (layer.codec.key_step, layer.codec.key_zero)
                )
                keys.append((zero + codes(layer.codec.key_codes[row]) * step)[None])
                step, zero = (x[row, channel].double() for x in (layer.codec.value_step, layer.codec.value_zero))
                values.append(rotated(zero + codes(layer.codec.value_codes[row]) * step)[None])
            newest = (x[b, h, :tail].double() for x in (layer.codec.tail_keys, layer.codec.tail_values))
            out[b].append(tuple(torch.cat([*old, new]) for old, new in zip((keys, values), newest, strict=True)))
    return out


def heads_of_slots(layer, name: str, b: int, h: int) -> torch.Tensor:
    return layer.slots(name)[b, h][layer.layout.valid()[b, h]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@SOME
@given(
    seed=st.integers(0, 10**6), bits=st.sampled_from([4, 2]), steps=st.integers(5, 20), spare=st.sampled_from([0.0, 0.5])
)  # fmt: skip
def test_survivors_stay_within_half_a_step_a_merge(dtype, seed, bits, steps, spare):
    """Every row after every block: its error against the sum of the half steps of the grids it has been on, what it is by
    hand, and position, score and statistics against the layer that holds rows in full."""
    draw = torch.Generator().manual_seed(seed)
    layer, plain = layer_of(bits, statistics=1, spare=spare), BoundedLayer(RaggedRows(CAPACITY), Plain(), statistics=1)
    heads = [(b, h) for b in range(B) for h in range(H)]
    bound = {head: torch.zeros(0, D, dtype=torch.float64) for head in heads}
    grid = {head: torch.zeros(0, 1 + 2 * D, dtype=torch.float64) for head in heads}
    uneven = False
    for _ in range(steps):
        T = int(torch.randint(1, 12, (), generator=draw))
        if layer.rows > 1 and (layer.rows + T > CAPACITY or float(torch.rand((), generator=draw)) < 0.5):
            mean = int(torch.randint(1, min(layer.rows, CAPACITY - 11) + 1, (), generator=draw))
            stay, valid = stay_drawn(draw, layer, mean), layer.layout.valid()
            for b, h in heads:
                own = stay[b, h][valid[b, h]]
                bound[b, h], grid[b, h] = bound[b, h][own], grid[b, h][own]
            for each in (layer, plain):
                each.keep(stay, mean)
            assert layer.rows == mean and int(layer.layout.lengths.sum()) == B * H * mean
            uneven |= len(set(layer.layout.lengths.tolist())) > 1
        k, v = rows_drawn(draw, T, dtype), rows_drawn(draw, T, dtype)
        for each in (layer, plain):
            feed(each, k, v)
        for name in ("positions", "scores", "stats"):
            assert torch.equal(layer.slots(name), plain.slots(name))
        assert torch.equal(layer.layout.starts, plain.layout.starts) and torch.equal(
            layer.layout.lengths, plain.layout.lengths
        )

        read = by_hand(layer)
        used = [(b, g) for b, h in heads for g in set(layer.head("group", b * H + h).tolist()) if g >= 0]
        assert len(used) == len(set(used)), "a group has rows of one head"
        for b, h in heads:
            group = layer.head("group", b * H + h).long()
            n, tail, came = len(group), min(layer.codec.tail, len(group)), min(T, layer.codec.residual)
            step, zero = (x[b, 0, group.clamp(min=0)].double() for x in (layer.codec.key_step, layer.codec.key_zero))
            now = torch.cat([group[:, None].double(), step, zero], -1)
            old = torch.cat([grid[b, h], now.new_full((T, 1 + 2 * D), -1)])
            fresh = (now != old).any(-1) & (group >= 0)
            bound[b, h] = torch.cat([bound[b, h], now.new_zeros(T, D)]) + torch.where(fresh[:, None], step / 2, 0.0)
            grid[b, h] = torch.where(fresh[:, None], now, old)

            assert bool((group[: n - tail] >= 0).all()) and bool((group[n - came :] < 0).all())
            assert max(group[group >= 0].bincount().tolist(), default=0) <= GROUP
            ulp, raw = 2**-18 * 40, group < 0
            alone = torch.where(raw[:, None], 0.0, layer.head("value_step", b * H + h).double() / 2)
            for name, most, got in zip(("keys", "values"), (bound[b, h], alone), read[b][h], strict=True):
                original, back = plain.head(name, b * H + h).double(), heads_of_slots(layer, name, b, h).double()
                torch.testing.assert_close(back, got, rtol=0, atol=ulp)
                missed = rotated(back - original) if name == "values" else back - original
                assert bool((missed.abs() <= most + ulp).all()) and torch.equal(back[raw], original[raw])
        layer.codec.scratch.owner = None
    assert uneven or layer.evictions == 0


@BITS
def test_one_token_reads_the_codes(bits):
    """Attention of one query a head over the rows by hand, after an eviction that leaves heads of very different lengths; two
    have fewer rows than the tail has."""
    draw = torch.Generator().manual_seed(bits)
    layer = layer_of(bits, capacity=60, residual=8)
    feed(layer, *(rows_drawn(draw, 48) for _ in range(2)))
    stay = torch.zeros(B, H, 48, dtype=torch.bool)
    for b, lengths in enumerate([(2, 11, 47), (40, 19, 1)]):
        for h, length in enumerate(lengths):
            stay[b, h, torch.randperm(48, generator=draw)[:length]] = True
    layer.keep(stay, 20)
    codes = layer.codec.key_codes.clone()
    for _ in range(3):
        feed(layer, *(rows_drawn(draw, 1) for _ in range(2)))
    assert torch.equal(layer.codec.key_codes, codes) and layer.reads_flat and layer.codec.tail == 11
    q = torch.randn(B, 2 * H, 1, D, generator=draw)
    out = decode_rows(q, layer.flat(), 0.2, "reference")
    for b in range(B):
        for h, (keys, values) in enumerate(by_hand(layer)[b]):
            assert len(keys) == int(layer.layout.lengths.view(B, H)[b, h]) == int(stay[b, h].sum()) + 3
            weights = (q[b, 2 * h : 2 * h + 2, 0].double() @ keys.T * 0.2).softmax(-1)
            torch.testing.assert_close(out[b, 2 * h : 2 * h + 2, 0].double(), weights @ values, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("bits", "share"), [(4, 0.39), (2, 0.26)])
def test_buffers_are_smaller_by_the_bits(bits, share):
    """As small as heads of equal length are, but for where each begins and ends."""
    k = torch.zeros(1, 4, 1, 64, dtype=torch.bfloat16)
    plain = BoundedLayer(RaggedRows(4096), Plain())
    even, layer = (BoundedLayer(layout(4096), GroupedBits(bits, Scratch())) for layout in (EqualRows, RaggedRows))
    for each in (plain, even, layer):
        each.update(k, k)
    beside = plain.positions.nbytes + plain.scores.nbytes + plain.layout.starts.nbytes + plain.layout.lengths.nbytes
    assert layer.nbytes == even.nbytes + layer.layout.starts.nbytes + layer.layout.lengths.nbytes
    assert layer.nbytes - beside < share * (plain.nbytes - beside)


def test_what_a_token_reads_is_no_copy():
    layer = layer_of(4)
    feed(layer, *(rows_drawn(torch.Generator().manual_seed(0), 30)[:1] for _ in range(2)))
    rows = layer.flat().rows
    names = (
        "key_codes", "value_codes", "group", "key_step", "key_zero", "value_step", "value_zero", "tail_keys", "tail_values",
    )  # fmt: skip
    for seen, name in zip(rows[: len(names)], names, strict=True):
        assert seen.data_ptr() == getattr(layer.codec, name).data_ptr(), name


def test_a_long_text_requantises_little():
    """Evictions at random over 60 blocks, lengths that wander: what is quantised again stays below twice what enters."""
    draw, layer = torch.Generator().manual_seed(1), layer_of(4, capacity=96, group=8, residual=8)
    rewritten = quantised = 0
    for _ in range(60):
        before = (
            {(b, h): layer.head("group", b * H + h).clone() for b in range(B) for h in range(H)} if layer.rows else {}
        )
        feed(layer, *(rows_drawn(draw, 32) for _ in range(2)), settle=False)
        if layer.rows <= 64:
            layer.codec.finish_block()
            continue
        stay, valid, step = stay_drawn(draw, layer, 64), layer.layout.valid(), layer.codec.key_step.clone()
        layer.keep(stay, 64)
        changed = (layer.codec.key_step != step).any(-1)[:, 0]
        for (b, h), group in before.items():
            old = torch.cat([group, group.new_full((32,), -1)])[stay[b, h][valid[b, h]]]
            new = layer.head("group", b * H + h).long()
            rewritten += int(((old >= 0) & changed[b, new.clamp(min=0)]).sum())
            quantised += int(((old < 0) & (new >= 0)).sum())
    assert 0 < rewritten < 2 * quantised + 8 * 60 * B * H and quantised > 3000


def test_copies_and_reset():
    draw = torch.Generator().manual_seed(5)
    layer, copy = layer_of(4), layer_of(4)
    k, v = rows_drawn(draw, 31), rows_drawn(draw, 31)
    feed(layer, k, v)
    layer.keep(stay_drawn(draw, layer, 20), 20)
    k, v = rows_drawn(draw, 9), rows_drawn(draw, 9)
    feed(layer, k, v)

    def read(of):
        found = [[[heads_of_slots(of, n, b, h) for n in ("keys", "values")] for h in range(H)] for b in range(B)]
        of.codec.finish_block()
        return found

    was = read(layer)
    copy_rows(copy, layer)
    assert copy.codec.scratch is not layer.codec.scratch
    feed(layer, k[:, :, :9], v[:, :, :9])
    flat = [x for item in was for head in item for x in head]
    assert all(torch.equal(a, b) for a, b in zip(flat, [x for i in read(copy) for h in i for x in h], strict=True))
    for T in (3, 8):  # both go on alone
        feed(copy, rows_drawn(draw, T), rows_drawn(draw, T))
        copy.keep(stay_drawn(draw, copy, 18), 18)
    assert len(copy.kept()) == B
    copy.reset()
    feed(copy, k[:, :, :2], v[:, :, :2])
    assert (
        torch.equal(copy.slots("keys"), k[:, :, :2]) and copy.rows == 2 and copy.layout.lengths.tolist() == [2] * B * H
    )


# ---- a cache ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lopsided(Random):
    """Random scores, larger in some heads: they look at no key."""

    def score_new_tokens(self, entry):
        H = entry.k.shape[1]
        return super().score_new_tokens(entry) * (1 + (torch.arange(H) + entry.layer) % H)[:, None]


LOPSIDED = replace(parse_policy("score=random allocation=adaptive(1.0)"), score=Lopsided(), name="lopsided")


@BITS
def test_scores_that_see_no_key_keep_the_same_slots(bits):
    """Through a prompt and decoding, layer by layer and head by head; the logits differ by the rounding."""
    model, caches, logits = backbone(), [], []
    with attach(model), torch.no_grad():
        for kv_bits in (None, bits):
            cache = make(LOPSIDED, 100, length=260, chunk=50, kv_bits=kv_bits, decode_every=7)
            out = [prefill(model, tokens(260), cache)]
            out += [model(input_ids=torch.tensor([[5 + n]]), **{CACHE: cache}).logits[0, -1] for n in range(40)]
            caches.append(cache)
            logits.append(torch.stack(out))
    assert held(caches[0]) == held(caches[1])
    lengths = [[len(head) for head in layer] for layer in held(caches[1])]
    assert all(max(layer) > 1.3 * min(layer) and sum(layer) == 2 * (100 + 40 % 7) for layer in lengths)
    plain, stored = logits
    assert float((stored - plain).norm() / plain.norm()) < (0.15 if bits == 4 else 0.8)


@BITS
def test_predicted_scores_of_the_first_layer_keep_the_same_slots(bits):
    """They come from what enters the layer, which no stored number has touched yet."""
    model = backbone()
    with attach(model), torch.no_grad():
        caches = [make("ada-locret(alpha=1.0)", 80, length=200, chunk=40, kv_bits=kv_bits) for kv_bits in (None, bits)]
        for cache in caches:
            prefill(model, tokens(200), cache)
    assert held(caches[0])[0] == held(caches[1])[0] and caches[1].counters.evictions > 2
    assert caches[1].kept_rows == [80] * 3


@pytest.mark.parametrize("policy", RAGGED)
def test_the_first_eviction_is_that_of_rows_in_full(policy):
    """A prompt in one block is attended to and evicted from before anything is quantised: same slots, same logits."""
    model, ids = backbone(), tokens(150)
    with attach(model), torch.no_grad():
        caches = [make(policy, 90, length=150, one_shot=True, kv_bits=bits) for bits in (None, 4)]
        plain, stored = (prefill(model, ids, cache) for cache in caches)
    assert torch.equal(plain, stored)
    if not caches[0].in_blocks:
        assert held(caches[0]) == held(caches[1]) and caches[1].counters.evictions == 1
    assert [sum(map(len, layer)) for layer in held(caches[1])] == [2 * budget for budget in caches[1].context.budgets]
    assert all(
        bool((layer.codec.group[layer.layout.by_table()] >= 0).any()) for layer in caches[1].layers if layer.rows >= 64
    )


@pytest.mark.parametrize("policy", RAGGED)
def test_a_prompt_as_short_as_the_tail_is_exact(policy):
    model, ids, positions = backbone(), tokens(60), turn(policy, "compact", "original")
    with attach(model), torch.no_grad():
        caches = [make(policy, length=60, positions=positions, kv_bits=bits) for bits in (None, 4)]
        plain, stored = (prefill(model, ids, cache) for cache in caches)
    assert held(caches[0]) == held(caches[1]) and caches[1].counters.evictions > 1
    torch.testing.assert_close(stored, plain, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("policy", ["ada-snapkv(6,3)", "kvcrush(base=ada-snapkv(6,3),level=chunk)", "ada-locret"])
def test_a_fork_goes_on_as_a_fresh_run(policy):
    model, document = backbone(), tokens(182, seed=9)  # whole chunks: other pieces are quantised with other rounding

    def after(cache, ids):
        out = [prefill(model, ids, cache)]
        return torch.stack(
            out + [model(input_ids=torch.tensor([[7]]), **{CACHE: cache}).logits[0, -1].float() for _ in range(3)]
        )

    with attach(model), torch.no_grad():
        common = make(policy, 100, length=None, kv_bits=4)
        prefill(model, document, common)
        before = held(common)
        for seed in (1, 2):
            ids, fresh = document + tokens(18, seed=seed), make(policy, 100, length=200, kv_bits=4)
            fork = common.fork(200)
            assert torch.equal(after(fork, ids), after(fresh, ids))
            assert held(fork) == held(fresh) and held(common) == before


@BITS
def test_generate(bits):
    """Through transformers: the tokens are those of a greedy loop over the cache."""
    model, ids = backbone(), tokens(150)
    caches = [make("ada-snapkv(6,3)", 70, length=150, chunk=30, kv_bits=bits, decode_every=4) for _ in range(2)]
    with attach(model), torch.no_grad():
        out = model.generate(
            torch.tensor([ids]), **{CACHE: caches[0]}, max_new_tokens=12, do_sample=False, pad_token_id=0,
            eos_token_id=None,
        )  # fmt: skip
        mine, logits = [], model(input_ids=torch.tensor([ids]), **{CACHE: caches[1]}).logits[0, -1]
        for _ in range(12):
            mine.append(int(logits.argmax()))
            logits = model(input_ids=torch.tensor([[mine[-1]]]), **{CACHE: caches[1]}).logits[0, -1]
    assert out[0, 150:].tolist() == mine
    assert all(isinstance(layer.codec, GroupedBits) and layer.layout.ragged for layer in caches[0].layers)
    assert all(
        sum(map(len, layer)) == 2 * rows for layer, rows in zip(held(caches[0]), caches[0].kept_rows, strict=True)
    )
