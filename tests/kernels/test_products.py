"""Products with matrices in few bits: each format beside the package ``gguf``, and the compiled products in float64."""

import shutil
import subprocess
from pathlib import Path

import gguf
import pytest
import torch
from gguf.quants import dequantize
from scripts_loaded import load_script

from locret_kernels import cpp
from locret_kernels.product import FORMATS, cpu, product, unpack

packed_matrix = load_script("scripts/kernel_cases.py").packed_matrix
pytestmark = pytest.mark.usefixtures("poisoned")
EACH = pytest.mark.parametrize("form", FORMATS)


def exact(data: torch.Tensor, form: str) -> torch.Tensor:
    """Numbers ``[N, K]`` of a matrix by the package ``gguf``, in float64."""
    return torch.from_numpy(dequantize(data.numpy(), gguf.GGMLQuantizationType[form])).double()


@EACH
def test_unpacked_as_specified(form):
    """Random codes."""
    data = packed_matrix(3, 512, form, generator=torch.Generator().manual_seed(0))
    mine, size = unpack(data, form), FORMATS[form]
    assert mine.shape == (3, 512) and size.row_bytes(512) == data.shape[1] and size.columns(data.shape[1]) == 512
    torch.testing.assert_close(mine.double(), exact(data, form), rtol=1e-6, atol=1e-7)
    x = torch.randn(2, 5, 512, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(product(x, data, form).double(), x.double() @ exact(data, form).T, rtol=1e-4, atol=1e-4)


def test_refusals():
    data = packed_matrix(3, 256, "Q4_K", generator=torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match="in blocks of 210 bytes"):
        unpack(data, "Q6_K")
    with pytest.raises(ValueError, match="must have rows of 256 numbers"):
        product(torch.zeros(1, 255), data, "Q4_K")
    with pytest.raises(ValueError, match="columns=300 must be a multiple of 256"):
        FORMATS["Q4_K"].row_bytes(300)


# ---- compiled --------------------------------------------------------------------------------------------------------------


def in_eight_bits(x: torch.Tensor) -> torch.Tensor:
    """Rows as whole multiples of a 127th of the largest of each 32 numbers, in float64."""
    groups = x.double().unflatten(-1, (-1, 32))
    step = groups.abs().amax(-1, keepdim=True) / 127
    return ((groups / step.clamp_min(1e-300)).round() * step).flatten(-2)


PLAIN = ("-march=x86-64", "-O1")


@EACH
@pytest.mark.parametrize("options", [(), PLAIN], ids=["native", "plain"])
def test_compiled_product(form, options, monkeypatch):
    """Of a few rows and of many, of odd numbers of rows, as the numbers in eight bits give in float64; the same for any number of
    threads and whatever rows stand beside a row."""
    library = cpu.load(form, *options)
    monkeypatch.setattr(cpu, "load", lambda form: library)
    columns = 512 if FORMATS[form].block == 256 else 608  # not whole stretches of 256, nor panels of 1,024
    data = packed_matrix(39, columns, form, generator=torch.Generator().manual_seed(0))
    matrix, generator = unpack(data, form).double(), torch.Generator().manual_seed(1)
    x, bias = torch.randn(21, columns, generator=generator), torch.randn(39, generator=generator)
    x[2, 32:64] = 0
    wanted = in_eight_bits(x) @ matrix.T + bias
    size = wanted.square().mean().sqrt()
    for rows in (slice(0, 1), slice(1, 4), slice(0, 7), slice(0, 8), slice(0, 21)):
        mine = cpu.product(x[rows], data, form, bias)
        assert (mine.double() - wanted[rows]).abs().max() < 2e-3 * size  # ties of the codes, and sums in float32
        assert ((mine.double() - wanted[rows]).square().mean().sqrt()) < 1e-4 * size
    exact = product(x, data, form, bias).double()
    assert (wanted - exact).square().mean().sqrt() < 1e-2 * size
    half = cpu.product(x.bfloat16(), data, form, bias.bfloat16())
    assert half.dtype == torch.bfloat16 and (half.double() - exact).square().mean().sqrt() < 1e-2 * size
    assert torch.equal(mine, cpu.product(x, data, form, torch.stack((bias, -bias), 1).double()[:, 0]))  # with gaps
    few, many = (cpu.product(x[rows], data, form) for rows in (slice(0, 7), slice(0, 21)))
    assert torch.equal(few[2:5], cpu.product(x[2:5], data, form))
    assert torch.equal(many[6:15], cpu.product(x[6:15], data, form))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert torch.equal(many, cpu.product(x, data, form)) and torch.equal(few, cpu.product(x[:7], data, form))
    x[3, 40], x[9, 7] = float("nan"), float("inf")
    assert cpu.product(x, data, form).isnan().any(-1).nonzero().flatten().tolist() == [3, 9]
    assert cpu.product(x[3:4].double(), data, form).dtype == torch.float64  # the definition's


@pytest.mark.parametrize("form", ["Q5_1", "Q8_0"])
@pytest.mark.parametrize("processor", ["alderlake", "sapphirerapids", "skylake-avx512"])
def test_other_processors_are_compiled(processor, form):
    """AVX-VNNI, AVX512-VNNI and AVX512 without it: no processor of the tests need have them."""
    compiler = shutil.which("g++")
    assert compiler is not None
    folder = Path(cpp.__file__).parent
    options = f"-std=c++17 -march={processor} -DFORMAT={form} -fopenmp -fsyntax-only -Wno-unknown-pragmas".split()
    source = str(Path(cpu.__file__).with_name("cpu.cpp"))
    done = subprocess.run([compiler, *options, f"-I{folder}", source], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
