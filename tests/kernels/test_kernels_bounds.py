"""Both backends of every operation: one signature, and the same refusals before anything is allocated."""

import inspect

import pytest
import torch
from interpreted import BOTH, KERNELS, REFERENCES

from locret_kernels.attend import STATISTICS


@pytest.mark.parametrize("name", sorted(KERNELS))
def test_one_signature(name):
    """Parameters of the kernels; the reference takes forms of a softmax besides (``Softmax`` of ``backbones.handlers``)."""
    mine, theirs = (inspect.signature(functions[name], eval_str=True).parameters for functions in (KERNELS, REFERENCES))
    assert dict(mine) == {key: value for key, value in theirs.items() if key in mine or key not in SOFTMAX}


SOFTMAX = ("window", "cap", "sinks_Q")


def call(functions, name: str, T: int, S: int):
    q, k = torch.zeros(1, 2, T, 64), torch.zeros(1, 1, S, 64)
    rest = {"column_stats": (0.1, torch.zeros(1, 2, T)), "window_attention": (0.1,)}[name]
    return functions[name](q, k, *rest, **({"want": STATISTICS} if name == "column_stats" else {}))


@BOTH
@pytest.mark.parametrize("name", ["column_stats", "window_attention"])
@pytest.mark.parametrize(("T", "S"), [(0, 5), (0, 0), (6, 5), (1, 0)])
def test_every_query_has_a_row(functions, name, T, S):
    with pytest.raises(ValueError, match=f"q: {T} queries must be at least 1 and at most the {S} rows of k"):
        call(functions, name, T, S)
    call(functions, name, 5, 5)


@BOTH
def test_no_answer_query(functions):
    k = torch.zeros(1, 1, 9, 64)
    with pytest.raises(ValueError, match="q: 0 answer queries must be at least 1"):
        functions["column_max"](torch.zeros(1, 2, 0, 64), k, torch.zeros(0, dtype=torch.int64), 0.2, log_prob=True)
    more = functions["column_max"](torch.ones(1, 2, 12, 64), k, torch.arange(12), 0.2)
    assert more.shape == (1, 1, 9), "answers may be longer than what they are asked about"


@BOTH
@pytest.mark.parametrize("K", [0, 6])
def test_rows_to_move(functions, K):
    index = torch.arange(K).expand(1, 1, K)
    with pytest.raises(ValueError, match=f"index: {K} rows must be at least 1 and at most the 5 rows of a buffer"):
        functions["compact_rows"]([[torch.zeros(1, 5, 64)]], index)
