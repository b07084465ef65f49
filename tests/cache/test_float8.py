"""Keys and values in floating point of 8 bits: the numbers, the kernel (interpreted), caches, files and plans."""

from __future__ import annotations

import pytest
import torch
from attention_oracle import turned
from interpreted import BOTH, close, poisoned
from kernel_runs import model  # noqa: F401  (a fixture)
from tiny_models import tiny_model

from locret_kernels.ragged_decode import Float8Rows, Rotation, Spans
from locret_kit import BoundedCache, attach
from locret_kit.backbones.libraries import CACHE
from locret_kit.cache.saved import load_cache, save_cache
from locret_kit.cache.storage.codec import LARGEST, MARGIN, Float8
from locret_kit.cache.storage.layouts import EqualRows
from locret_kit.cache.storage.rows import BoundedLayer
from locret_kit.runtime.drivers.graph import GraphDriver
from locret_kit.runtime.session import prefill


def number(code: int) -> float:
    """A code's number by the format's definition (OCP 8-bit floating point, E4M3)."""
    sign, exponent, fraction = code >> 7, code >> 3 & 15, code & 7
    size = fraction / 8 * 2**-6 if exponent == 0 else (1 + fraction / 8) * 2 ** (exponent - 7)
    return -size if sign else size


FINITE = [code for code in range(256) if code & 0x7F != 0x7F]


def layer_of(k: torch.Tensor, v: torch.Tensor, room: int = 64) -> BoundedLayer:
    rows = BoundedLayer(EqualRows(room), Float8())
    rows.update(k, v)
    rows.append(k, v, torch.zeros(k.shape[:3]))
    return rows


# ---- numbers -----------------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("size", [64, 96])
@pytest.mark.parametrize("rotates", [False, True])
def test_decoding_over_every_code(functions, size, rotates):
    """Heads of different lengths with scales of their own, every finite code among their numbers, against float64."""
    generator, lengths = torch.Generator().manual_seed(0), [5, 90]
    codes = torch.tensor(FINITE)[torch.randint(len(FINITE), (2, 95, size), generator=generator)].to(torch.uint8)
    codes.flatten()[: len(FINITE)] = torch.tensor(FINITE, dtype=torch.uint8)
    exact = torch.tensor([number(code) for code in range(256)], dtype=torch.float64)[codes.long()]
    scales, q = torch.tensor([[0.25, 2.0**-7], [4.0, 0.5]]), torch.randn(1, 4, size, generator=generator)
    spans = Spans(torch.tensor([[0, 5]]), torch.tensor([lengths]), 90)
    angle = 6 * torch.randn(90, size // 2, generator=generator).double()
    turn = Rotation(angle.repeat(1, 2).cos().float(), angle.repeat(1, 2).sin().float()) if rotates else None
    with poisoned():
        mine = functions["ragged_decode"](q, Float8Rows(*codes, *scales), spans, 2.0**-7, turn, received=True)
    for h, (start, n) in enumerate(zip((0, 5), lengths, strict=True)):
        k, v = (exact[i, start : start + n] * float(scales[i, h]) for i in range(2))
        k = turned(k, angle[:n]) if rotates else k
        weights = (q[0, 2 * h : 2 * h + 2].double() @ k.T * 2.0**-7).softmax(-1)
        torch.testing.assert_close(mine.out_BQD[0, 2 * h : 2 * h + 2].double(), weights @ v, rtol=1e-4, atol=1e-3)
        close(mine.received_BHS[0, h, :n], weights.mean(0).float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_read_back(dtype):
    """Within a sixteenth, or half the smallest step; scales are powers of two; what is too large is clipped and counted."""
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(1, 6, 9, 64, generator=generator).mul(8**n).to(dtype) for n in (1, -4))
    k[0, 0, 0, 0], k[0, 5, 3, 4] = 0.0, 1e-4
    rows = layer_of(k, v)
    for name, x in (("keys", k), ("values", v)):
        scale_H = getattr(rows.codec, name[:-1] + "_scale")
        assert (scale_H.log2() % 1 == 0).all()
        assert (x.float().abs().amax((2, 3)) * MARGIN <= LARGEST * scale_H).all()
        step = scale_H[:, None, None] * 2.0**-10
        error = (rows.slots(name).double() - x.double()).abs()
        assert (error <= torch.maximum(x.double().abs() / 16, step)).all()
        assert rows.slots(name).dtype == dtype and getattr(rows.codec, name).dtype == torch.uint8
    assert rows.codec.clipped.tolist() == [0, 0]
    most = (LARGEST * rows.codec.key_scale).to(dtype)
    beyond = torch.zeros(1, 6, 2, 64, dtype=dtype)
    beyond[:, :, 0, :5], beyond[0, 1, 1, 7] = 2 * most[:, None], -3 * most[1]
    rows.append(beyond, beyond * 0, torch.zeros(1, 6, 2))
    assert rows.codec.clipped.tolist() == [6 * 5 + 1, 0]
    assert torch.equal(rows.slots("keys")[0, :, 9, 0], most) and rows.slots("keys")[0, 1, 10, 7] == -most[1]


# ---- caches ------------------------------------------------------------------------------------------------------------

IDS = torch.randint(2, 97, (33,), generator=torch.Generator().manual_seed(0)).tolist()
KEPT = dict(chunk=13, prompt_length=33, stabilizers=4, local_len=5, decode_every=3, kv_bits=8)


def read(backbone, policy: str, backend: str | None, pieces: int = 99, **rest) -> tuple[BoundedCache, torch.Tensor]:
    cache, logits = BoundedCache(16, policy, backend=backend, **KEPT, **rest), []
    with attach(backbone), torch.no_grad():
        for start in range(0, len(IDS), pieces):
            piece = torch.tensor([IDS[start : start + pieces]])
            logits = [backbone(input_ids=piece, **{CACHE: cache}).logits[0, -1]]
        for token in range(4):
            logits.append(backbone(input_ids=torch.tensor([[5 + token]]), **{CACHE: cache}).logits[0, -1])
    return cache, torch.stack(logits)


def test_backends_agree(model):
    (mine, logits), (theirs, exact) = (read(model, "streaming", name) for name in ("triton", "reference"))
    assert all(isinstance(cache.bounded[0].codec, Float8) for cache in (mine, theirs))
    torch.testing.assert_close(
        logits, exact, rtol=5e-2, atol=5e-2
    )  # a number beside a step's middle may round either way
    assert all(torch.equal(mine.kept_positions(layer), theirs.kept_positions(layer)) for layer in range(2))
    assert GraphDriver(model, mine).refusal(mine) is None


def test_pieces_files_and_other_texts(tmp_path):
    """Pieces that begin alike read alike, a file in between changes nothing, and another text counts anew."""
    backbone = tiny_model("llama")
    (whole, first), (pieced, second) = read(backbone, "h2o", None), read(backbone, "h2o", None, pieces=13)
    torch.testing.assert_close(first, second)
    assert all(
        torch.equal(a.slots("keys"), b.slots("keys")) for a, b in zip(whole.bounded, pieced.bounded, strict=True)
    )
    save_cache(whole, tmp_path / "c.locret")
    loaded = load_cache(tmp_path / "c.locret", backbone)
    plain = BoundedCache(16, "h2o", **{**KEPT, "kv_bits": None})
    with attach(backbone), torch.no_grad():
        prefill(backbone, IDS, plain)
        after = [backbone(input_ids=torch.tensor([[9]]), **{CACHE: cache}).logits for cache in (whole, loaded)]
    assert torch.equal(*after)
    assert (
        whole.state.clipped == sum(int(rows.codec.clipped.sum()) for rows in whole.bounded) and plain.state.clipped == 0
    )
    whole.reset(whole.schedule.prompt_length)
    with attach(backbone), torch.no_grad():
        prefill(backbone, IDS, whole)
    assert whole.state.clipped == sum(int(rows.codec.clipped.sum()) for rows in whole.bounded)
