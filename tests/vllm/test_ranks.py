"""Retaining heads of a model whose heads are split over two processes; ``test_documents`` compares its tokens."""

from __future__ import annotations

import pytest
import tiny
import torch

from locret_kit.backbones.spec import spec_of
from locret_kit.backbones.stand_in import config_of_rank
from locret_kit.engine import RetainingHeads
from locret_kit.vllm.pages import Ranks


def test_a_head_that_is_split_gives_the_scores_of_the_whole(tmp_path):
    """Each rank's sums are added by hand."""
    model = tiny.make(tmp_path / "model", "llama")
    whole = RetainingHeads.from_pretrained(tiny.make_heads(tmp_path / "heads", model, tmp_path / "model"))
    draw = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, heads, 5, 16, generator=draw) for heads in (4, 2, 2))
    sums: list[torch.Tensor] = []

    def noted(x: torch.Tensor) -> torch.Tensor:
        sums.append(x.clone())
        return x

    mine = [(q[:, 2 * rank : 2 * rank + 2], k[:, rank : rank + 1], v[:, rank : rank + 1]) for rank in (0, 1)]
    for rank in (0, 1):
        Ranks(rank, 2, noted).heads(whole)[1](*mine[rank])
    total = sums[0] + sums[1]
    scores = [Ranks(rank, 2, lambda x: total).heads(whole)[1](*mine[rank]) for rank in (0, 1)]
    torch.testing.assert_close(torch.cat(scores, 1), whole[1](q, k, v))
    split = Ranks(1, 2, noted).heads(whole)
    assert split.config.n_kv_heads == 1 and spec_of(model.config).n_kv_heads == 2


def test_ranks_that_do_not_divide_the_heads_are_refused(tmp_path):
    with pytest.raises(ValueError, match="tensor_parallel_size=3 must divide the 2 key/value heads"):
        config_of_rank(tiny.make(tmp_path, "llama").config, 3)
