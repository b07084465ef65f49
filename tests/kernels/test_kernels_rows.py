"""Compaction and rotation of rows, and the choice of a backend: Triton (interpreted) against the references and plain torch."""

import re
import subprocess
import sys
from contextlib import nullcontext
from importlib import import_module

import pytest
import torch
from interpreted import BOTH, KERNELS, REFERENCES, close, common, poisoned, random
from rows_on_cuda import main as rows_on_a_card

from locret_kernels import backend
from locret_kernels.backend import capability
from locret_kit.cache import backend as backends

pytestmark = pytest.mark.usefixtures("poisoned")
META = torch.device("meta")


# ---- compaction --------------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize(("S", "K", "D"), [(1, 1, 64), (7, 5, 96), (700, 600, 64), (129, 1, 128), (40, 40, 256)])
def test_compact_rows(functions, S, K, D):
    """Layers whose buffers lie apart, one of another head size; rows of a larger buffer, and one that begins anywhere."""
    layers = [
        [random(3, S + 4, size, seed=size).bfloat16(), random(3, S + 4, D, seed=1).half(), random(2, 3, S + 4, seed=2)[1],
         torch.arange(3 * (S + 4), dtype=torch.int32).view(3, -1)]
        for size in (D, D, 64)
    ]  # fmt: skip
    index = random(3, 3, S, seed=3).argsort(-1)[..., :K].sort(-1).values
    addresses: dict = {}
    for number in (index, index.int()):
        before = [[buffer.clone() for buffer in layer] for layer in layers]
        functions["compact_rows"](layers, number, addresses)
        made = len(addresses)
        for layer, was, index_HK in zip(layers, before, index, strict=True):
            for new, old in zip(layer, was, strict=True):
                for h in range(3):
                    assert torch.equal(new[h, :K], old[h, index_HK[h]]) and torch.equal(new[h, K:], old[h, K:])
    assert made == len(addresses), "a table serves until buffers lie elsewhere"


def test_the_program_for_a_card_runs_to_its_end(capsys):
    """``scripts/on_card.sh`` looks for races in it."""
    rows_on_a_card(device="cpu", sizes=((700, 600, 64),), tokens=(1, 300))
    assert len(capsys.readouterr().out.splitlines()) == 3


# ---- the dispatcher ----------------------------------------------------------------------------------------------------


def test_a_backend_that_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "locret_kernels.attend.triton")
    with pytest.raises(backend.BackendUnavailable, match="backend='triton' needs the package triton, which is not"):
        backend.function.__wrapped__("column_max", "triton")


def test_the_rule_of_the_device():
    cpu, cuda, half = torch.device("cpu"), torch.device("cuda"), torch.bfloat16
    assert backend.choose(None, cpu, 80, half) == "reference" == backend.choose("reference", cuda, 80, half)
    assert backend.choose(None, cuda, 96, half) == "triton"
    assert backend.choose("triton", cpu, 64, half) == "triton", "interpreted here"
    assert backend.choose(None, cuda, 128, torch.float32) == "reference"
    with pytest.raises(ValueError, match="head size 80 must be one of: 64, 96, 128, 256"):
        backend.choose("triton", cuda, 80, half)
    with pytest.raises(ValueError, match="backend='cuda' must be one of: reference, triton"):
        backend.choose("cuda", cuda, 64, half)


@pytest.mark.parametrize(
    ("where", "size", "dtype", "said"),
    [
        ("cpu", 64, torch.bfloat16, "backend='triton' takes CUDA devices, not cpu"),
        ("cuda", 96, torch.float32, "float32 heads of 96 must be of at most 64 (backend='triton')"),
    ],
)
def test_what_triton_does_not_take(where, size, dtype, said, monkeypatch):
    monkeypatch.setattr(common, "INTERPRETED", False)
    with pytest.raises(ValueError, match=re.escape(said)):
        backend.choose("triton", torch.device(where), size, dtype)


@pytest.mark.parametrize("size", [80, 112, 160, 192])
def test_heads_of_other_sizes_take_the_reference_with_one_warning(size, caplog):
    """Phi-2 and StableLM have heads of 80."""
    backends._say_without_kernels.cache_clear()
    found = [backends.backend_for(None, torch.device("cuda"), size, torch.float16).name for _ in range(3)]
    assert found == ["reference"] * 3 and backends.backend_for(None, META, size, torch.float16).name == "reference"
    (record,) = caplog.records
    assert f"heads of {size} have no kernels" in record.message


def test_amds_cards_take_plain_torch(monkeypatch):
    """PyTorch calls them "cuda" too, and gives an MI300 compute capability 9.4."""
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))
    assert backend.choose(None, cuda, 128, torch.bfloat16) == "reference" and capability(cuda) == (0, 0)
    assert not import_module("locret_kernels.decoder_step.triton").has_pdl(cuda)
    monkeypatch.setattr(torch.version, "hip", None)
    assert backend.choose(None, cuda, 128, torch.bfloat16) == "triton" and capability(cuda) == (9, 4)
    assert import_module("locret_kernels.decoder_step.triton").has_pdl(cuda)


def test_a_kernel_starts_on_the_device_of_its_tensors(monkeypatch):
    """Triton launches on PyTorch's current device, which need not be the model's."""
    entered = []
    monkeypatch.setattr(torch.cuda, "device_of", lambda x: entered.append(x) or nullcontext())
    q, k = torch.randn(1, 1, 1, 64), torch.randn(1, 1, 5, 64)
    KERNELS["column_max"](q, k, torch.zeros(1, dtype=torch.int64), 0.1)
    assert entered and entered[0] is q


def test_a_tensor_that_is_not_on_a_gpu(monkeypatch):
    monkeypatch.setattr(common, "INTERPRETED", False)
    x = torch.zeros(1, 1, 2, 64)
    with pytest.raises(ValueError, match="q is on cpu: backend='triton' takes CUDA tensors"):
        KERNELS["window_attention"](x, x, 1.0)


def test_import_is_light():
    code = "import sys, locret_kernels.backend; assert not {'torch', 'triton'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- rotation ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("S", "D", "R"), [(1, 64, 64), (70, 96, 96), (129, 96, 72), (65, 128, 32), (9, 256, 256)])
def test_rotate_rows(S, D, R, dtype):
    """Tables of all heads and of each; rows of a larger buffer; some dimensions that pass."""
    x = random(2, 3, S + 5, D).to(dtype)[:, :, :S]
    angle = 6 * random(2, 3, S, R // 2, seed=1).repeat(1, 1, 1, 2)
    every = angle.cos().to(dtype), angle.sin().to(dtype)
    for tables in (every, tuple(table[0, 0] for table in every)):
        with poisoned():
            mine = KERNELS["rotate_rows"](x, *tables)
        exact = REFERENCES["rotate_rows"](x.double(), *(table.double() for table in tables))
        close(mine.float(), exact.float(), dtype)
        close(REFERENCES["rotate_rows"](x, *tables).float(), exact.float(), dtype)
        assert torch.equal(mine[..., R:], x[..., R:])
    # As a projection gives them.
    wide = random(2, S, 3 * D + 16).to(dtype)[..., : 3 * D].view(2, S, 3, D).transpose(1, 2)
    turned = KERNELS["rotate_rows"](wide, *every)
    close(turned.float(), KERNELS["rotate_rows"](wide.contiguous(), *every).float(), dtype)
    assert turned.transpose(1, 2).is_contiguous(), "what follows reads it as it lies"


def test_what_rotate_rows_refuses():
    x, table = random(1, 1, 4, 64), random(4, 66)
    with pytest.raises(ValueError, match="even number of columns up to 64"):
        KERNELS["rotate_rows"](x, table, table)
    with pytest.raises(ValueError, match="x: 0 numbers must be at least 1"):
        KERNELS["rotate_rows"](x[:, :, :0], table[:0, :64], table[:0, :64])
