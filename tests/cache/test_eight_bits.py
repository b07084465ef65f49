"""Keys and values in 8 bits: the numbers, caches and files."""

import pytest
import torch
from tiny_models import tiny_model

from locret_kit import BoundedCache, attach
from locret_kit.backbones.libraries import CACHE
from locret_kit.cache.saved import CacheFile, load_cache, save_cache
from locret_kit.cache.storage.layouts import EqualRows
from locret_kit.cache.storage.quantised import RowBits
from locret_kit.cache.storage.rows import BoundedLayer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_read_back(dtype):
    """Within half a step of each group of 32 channels, whatever is beside it; constant groups exactly."""
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(1, 6, 9, 64, generator=generator).mul(8**n).to(dtype) for n in (1, -4))
    k[0, 0, :, 40], k[0, 1, :, :32] = 3e4, 0.5
    rows = BoundedLayer(EqualRows(64), RowBits())
    rows.update(k, v)
    rows.append(k, v, torch.zeros(k.shape[:3]))
    for name, x in (("keys", k), ("values", v)):
        read, groups = rows.slots(name), x.double().unflatten(-1, (2, 32))
        bound = 0.502 * (groups.amax(-1) - groups.amin(-1) + groups.amin(-1).abs() / 500) / 255 + 1e-7
        rounding = read.double().abs() * torch.finfo(dtype).eps
        error = (read.double() - x.double()).abs()
        assert (error <= bound.repeat_interleave(32, -1) + rounding).all()
        assert read.dtype == dtype
    assert torch.equal(rows.slots("keys")[0, 1, :, :32], k[0, 1, :, :32])


# ---- caches ------------------------------------------------------------------------------------------------------------

IDS = torch.randint(2, 97, (33,), generator=torch.Generator().manual_seed(0)).tolist()
KEPT = dict(chunk=13, prompt_length=33, stabilizers=4, local_len=5, decode_every=3, kv_bits=8)


def read(backbone, pieces: int = 99) -> tuple[BoundedCache, torch.Tensor]:
    cache, logits = BoundedCache(16, "h2o", **KEPT), []
    with attach(backbone), torch.no_grad():
        for start in range(0, len(IDS), pieces):
            piece = torch.tensor([IDS[start : start + pieces]])
            logits = [backbone(input_ids=piece, **{CACHE: cache}).logits[0, -1]]
        for token in range(4):
            logits.append(backbone(input_ids=torch.tensor([[5 + token]]), **{CACHE: cache}).logits[0, -1])
    return cache, torch.stack(logits)


def test_pieces_and_files(tmp_path):
    """Pieces read alike, and a file in between changes nothing."""
    backbone = tiny_model("llama")
    (whole, first), (pieced, second) = read(backbone), read(backbone, pieces=6)
    torch.testing.assert_close(first, second)
    for a, b in zip(whole.bounded, pieced.bounded, strict=True):
        torch.testing.assert_close(a.slots("keys"), b.slots("keys"), rtol=0, atol=1e-2)
    save_cache(whole, tmp_path / "c.locret")
    loaded = load_cache(tmp_path / "c.locret", backbone)
    with attach(backbone), torch.no_grad():
        after = [backbone(input_ids=torch.tensor([[9]]), **{CACHE: cache}).logits for cache in (whole, loaded)]
    assert torch.equal(*after)


def test_a_file_of_eight_bit_floats_is_refused_by_name(tmp_path):
    """As versions before this one wrote them: codes without steps, and a scale for each head."""
    cache, _ = read(tiny_model("llama"))
    made = CacheFile.of(cache)
    heads, tensors = torch.ones(2), {}
    for name, x in made.tensors.items():
        layer, _, part = name.rpartition(".")
        if part in ("key_codes", "value_codes"):
            tensors |= {f"{layer}.{part[:-6]}s": x, f"{layer}.{part[:-6]}_scale": heads}
        elif not part.endswith(("_step", "_zero")):
            tensors[name] = x
    CacheFile(made.saved, tensors, {}).write(tmp_path / "old.locret")
    with pytest.raises(ValueError, match="old.locret: kv_bits=8: its 8-bit floats are no longer read: read the text"):
        load_cache(tmp_path / "old.locret", tiny_model("llama"))
