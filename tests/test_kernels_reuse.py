"""Eviction that moves only what changes place: kernels (interpreted) and references against lists by hand, and a cache whose
rows lie in any order against one that keeps them in order."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from interpreted import KERNELS, REFERENCES, close, poisoned
from test_kernels_cache import model  # noqa: F401  (a fixture)

from locret_kit import BoundedCache, HeadsConfig, RetainingHeads, attach
from locret_kit.backbones.families import spec_of
from locret_kit.cache.storage.reused import ReusedLayer
from locret_kit.runtime.session import prefill
from locret_kit.runtime.static import StaticDecoder

pytestmark = pytest.mark.usefixtures("poisoned")
BOTH = pytest.mark.parametrize("functions", [KERNELS, REFERENCES], ids=["triton", "reference"])


# ---- kernels -----------------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize(("B", "H", "keep", "chunk"), [(2, 3, 11, 5), (1, 2, 4, 30), (1, 1, 1, 1), (2, 1, 40, 40)])
def test_rows_after_many_evictions(functions, B, H, keep, chunk):
    """Slots hold what lists that are cut and extended hold, and what stays below ``keep`` has not moved."""
    C, D, generator = keep + chunk, 6, torch.Generator().manual_seed(0)
    buffers = [torch.randn(B, H, C, D).bfloat16(), torch.zeros(B, H, C, dtype=torch.int32), torch.zeros(B, H, C)]
    count = torch.int32 if keep < 20 else torch.int16
    row, slot = (torch.arange(C, dtype=count).repeat(B, H, 1) for _ in range(2))
    held: dict[tuple[int, int], list[int]] = {at: [] for at in product(range(B), range(H))}
    seen, rows = 0, 0
    for new in (C, chunk, max(1, chunk - 1), chunk):
        buffers[1][:, :, rows : rows + new] = torch.arange(seen, seen + new, dtype=torch.int32)
        buffers[0][:, :, rows : rows + new] = torch.randn(B, H, new, D, generator=generator).bfloat16()
        buffers[2][:, :, rows : rows + new] = torch.randn(B, H, new, generator=generator)
        for tokens in held.values():
            tokens.extend(range(seen, seen + new))
        seen, rows = seen + new, rows + new
        stay = torch.rand(B, H, rows, generator=generator).argsort(-1).argsort(-1) < keep
        before = {
            token: (buffers[0][b, h, r].clone(), buffers[2][b, h, r].clone(), r)
            for b, h in held for r in range(rows) for token in [(b, h, int(buffers[1][b, h, r]))]
        }  # fmt: skip
        with poisoned():
            source, target = functions["reuse_rows"](stay, row, slot, keep)
            functions["move_rows"](buffers, source, target)
        assert source.shape == target.shape == (B, H, min(keep, rows - keep))
        for (b, h), tokens in held.items():
            tokens[:] = [token for s, token in enumerate(tokens) if stay[b, h, s]]
            where = row[b, h, :keep].long()
            assert buffers[1][b, h, where].tolist() == tokens
            for r, token in zip(where.tolist(), tokens, strict=True):
                key, score, old = before[b, h, token]
                assert torch.equal(buffers[0][b, h, r], key) and torch.equal(buffers[2][b, h, r], score)
                assert r == old or old >= keep
            moved = [int(x) for x in source[b, h] if x >= 0]
            assert sorted(moved) == sorted(before[b, h, token][2] for token in tokens if before[b, h, token][2] >= keep)
        assert torch.equal(row.gather(-1, slot.long()), torch.arange(C, dtype=count).expand_as(row))
        assert torch.equal(row[..., keep:], torch.arange(keep, C, dtype=count).expand(B, H, -1))
        rows = keep


@BOTH
def test_what_reuse_rows_refuses(functions):
    stay, row = torch.ones(1, 1, 4, dtype=torch.bool), torch.arange(4, dtype=torch.int32)[None, None]
    with pytest.raises(ValueError, match="keep=5 rows must be at least 1 and at most the 4 slots of stay"):
        functions["reuse_rows"](stay, row, row.clone(), 5)
    with pytest.raises(ValueError, match=r"row \(1, 1, 3\) and slot \(1, 1, 3\) must be alike"):
        functions["reuse_rows"](stay, row[..., :3], row[..., :3], 2)
    with pytest.raises(
        ValueError, match="row is torch.int64 and slot is torch.int64: both must be torch.int16 or torch.int32"
    ):
        functions["reuse_rows"](stay, row.long(), row.long(), 2)


def turned(x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    """Pairs ``(i, i + R / 2)`` of a row as complex numbers, times e^(i angle)."""
    R = 2 * angle.shape[-1]
    pair = torch.complex(x[..., : R // 2], x[..., R // 2 : R]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((pair.real, pair.imag, x[..., R:]), -1)


@BOTH
@pytest.mark.parametrize("R", [64, 20])
def test_rotation_by_place(functions, R):
    generator = torch.Generator().manual_seed(0)
    x, place = (
        torch.randn(2, 3, 9, 64, generator=generator),
        torch.rand(2, 3, 12, generator=generator).argsort(-1).int(),
    )
    angle = 6 * torch.randn(12, R // 2, generator=generator).double()
    tables = angle.repeat(1, 2).cos().float(), angle.repeat(1, 2).sin().float()
    with poisoned():
        mine = functions["rotate_rows"](x, *tables, place[:, :, :9])
    close(mine, turned(x.double(), angle[place[:, :, :9].long()]).float())


@BOTH
@pytest.mark.parametrize("placed", [False, True])
def test_decoding_over_ranks(functions, placed):
    """Heads of different lengths, whose rows lie in any order."""
    from locret_kernels.ragged_decode import Rotation, Spans

    generator, lengths, capacity, R = torch.Generator().manual_seed(0), [7, 70, 1, 33], 80, 64
    q = torch.randn(2, 4, 64, generator=generator)
    k, v = torch.randn(2, 4 * capacity, 64, generator=generator)
    rank = torch.cat([torch.randperm(n, generator=generator) for n in lengths])
    starts = torch.tensor(lengths).cumsum(0) - torch.tensor(lengths)
    place = torch.randint(-3, 100, rank.shape, generator=generator) if placed else None
    angle = 6 * torch.randn(100, R // 2, generator=generator).double()
    tables = angle.repeat(1, 2).cos().float(), angle.repeat(1, 2).sin().float()
    spans = Spans(starts.view(2, 2), torch.tensor(lengths).view(2, 2), max(lengths))
    with poisoned():
        turn = Rotation(*tables, None if place is None else place.int(), rank.int())
        mine = functions["ragged_decode"](q, (k, v), spans, 0.2, turn, received=True)
    for p, (start, n) in enumerate(zip(starts.tolist(), lengths, strict=True)):
        rows, b, h = slice(start, start + n), p // 2, p % 2
        at = rank[rows] if place is None else rank[rows].maximum(place[rows])
        keys = turned(k[rows].double(), angle[at])
        weights = (q[b, 2 * h : 2 * h + 2].double() @ keys.T * 0.2).softmax(-1)
        close(mine.out_BQD[b, 2 * h : 2 * h + 2], (weights @ v[rows].double()).float())
        close(mine.received_BHS[b, h, :n], weights.mean(0).float())


# ---- a cache -----------------------------------------------------------------------------------------------------------

LENGTH = 27


def read(
    backbone, policy: str, backend: str, static: bool = False, tokens: int = 3, **rest
) -> tuple[BoundedCache, torch.Tensor]:
    """A cache after a prompt and so many tokens, the third of which cuts it once more, and its logits."""
    ids = torch.randint(2, 97, (LENGTH,), generator=torch.Generator().manual_seed(0)).tolist()
    torch.manual_seed(0)
    heads = (
        RetainingHeads(HeadsConfig.for_backbone(spec_of(backbone.config), "tiny", 16)) if "locret" in policy else None
    )
    kept = dict(chunk=13, prompt_length=LENGTH, stabilizers=4, local_len=5)
    cache = BoundedCache(16, policy, heads, backend=backend, decode_every=3, **kept, **rest)
    with attach(backbone), torch.no_grad():
        logits = [prefill(backbone, ids, cache)]
        step = StaticDecoder(backbone, cache) if static else None
        for token in range(tokens):
            given = torch.tensor([[5 + token]])
            logits.append(step(5 + token) if step else backbone(input_ids=given, past_key_values=cache).logits[0, -1])
    return cache, torch.stack(logits)


@pytest.mark.parametrize(
    ("policy", "rest"),
    [
        ("locret", {"static": True}),
        ("h2o", {"positions": "clipped(20)"}),
    ],
)
def test_a_cache_in_any_order(model, policy, rest):  # noqa: F811
    """The same slots stay and the same logits come; what is exported lies in order and goes on in the other kind of cache. The
    newest token can be forgotten, and another text in the same buffers is read alike."""
    (mine, logits), (theirs, exact) = (read(model, policy, backend, **rest) for backend in ("triton", "reference"))
    assert all(isinstance(rows, ReusedLayer) for rows in mine.bounded)
    assert not any(isinstance(rows, ReusedLayer) for rows in theirs.bounded)
    torch.testing.assert_close(logits, exact, rtol=1e-3, atol=1e-3)
    scattered = False
    for layer, (own, other) in enumerate(zip(mine.bounded, theirs.bounded, strict=True)):
        assert torch.equal(mine.kept_positions(layer), theirs.kept_positions(layer))
        (counts, tensors), (wanted, expected) = own.export(), other.export()
        assert counts == wanted and tensors.keys() == expected.keys()
        for name, x in tensors.items():
            torch.testing.assert_close(x, expected[name], rtol=1e-3, atol=1e-3)
        scattered |= bool((own.slot_of[:, :, : own.rows].diff() < 0).any())
        other.copy_from(own)
        own.copy_from(other)
        assert (own.slot_of.diff() == 1).all() and all(torch.equal(own.slots(n), other.slots(n)) for n in own.columns())
    assert scattered, "rows lie in order, so the test tests nothing"
    with attach(model), torch.no_grad():
        new = [model(input_ids=torch.tensor([[7, 9]]), past_key_values=cache).logits for cache in (mine, theirs)]
    torch.testing.assert_close(*new, rtol=1e-3, atol=1e-3)
    assert mine.take_back(1) == theirs.take_back(1) == (policy == "locret")
    ids = torch.randint(2, 97, (LENGTH,), generator=torch.Generator().manual_seed(0)).tolist()
    mine.reset()
    with attach(model), torch.no_grad():
        assert torch.equal(prefill(model, ids, mine), logits[0])
