"""Pages of requests: bytes as planned, one for a request's whole life, none left behind."""

import gc
import weakref

import pytest
import tiny
import torch
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from locret_kit import BoundedCache
from locret_kit.backbones.spec import spec_of
from locret_kit.backbones.stand_in import config_of_rank
from locret_kit.cache.pages import page_bytes
from locret_kit.engine import RetainingHeads
from locret_kit.policies.grammar import parse_policy
from locret_kit.settings import RunSettings
from locret_kit.vllm.pages import EnginePages, Ranks
from locret_kit.vllm.server_settings import Pages

SETTINGS = dict(budget=64, chunk=32, stabilizers=8, local_len=16, positions="compact")
POLICIES = ["streaming", "h2o", "snapkv"]
"""One without a statistic, one with a statistic, one with queries."""


def test_planned_bytes_are_allocated_and_requests_wait_for_a_page(tmp_path):
    model = tiny.make(tmp_path / "model", "llama")
    settings = RunSettings.of(SETTINGS).resolved({}, None)
    each = page_bytes(model.config, settings, [parse_policy(name) for name in POLICIES], torch.float32)
    pages = Pages(each, 5)
    section = {**SETTINGS, "policy": POLICIES[0], "policies": POLICIES[1:]}
    with tiny.started(
        tmp_path / "model", section, kv_cache_memory_bytes=pages.bytes, max_num_seqs=12, max_num_batched_tokens=512
    ) as llm:
        config = tiny.scheduler(llm).kv_cache_config
        assert config.num_blocks == 6 and sum(tensor.size for tensor in config.kv_cache_tensors) == pages.bytes
        assert str(pages) == f"5 requests fit, each of any length in {each / 2**20:.1f} MiB: {6 * each} bytes"
        assert Pages.within(each, pages.bytes + each // 2) == pages

        engine = llm.llm_engine
        for number, ids in enumerate(tiny.prompts([700] * 12)):
            engine.add_request(str(number), {"prompt_token_ids": ids}, tiny.params(200))
        for _ in range(120):
            engine.step()
        running = tiny.scheduler(llm).running
        assert (len(running), len(tiny.scheduler(llm).waiting), tiny.free_pages(llm)) == (5, 7, 0)
        assert all(request.num_preemptions == 0 for request in running)
        engine.abort_request([str(number) for number in range(10)])
        for _ in range(5):  # the two that waited take theirs
            engine.step()
        assert tiny.free_pages(llm) == 3
        while engine.has_unfinished_requests():
            engine.step()
        assert tiny.free_pages(llm) == 5


def test_rotations_are_those_of_the_pages(tmp_path):
    """Texts of one length share them; of lengths that nobody has any more (each has its own, by dynamic NTK) none is kept."""
    config = tiny.make(tmp_path, "llama").config
    config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    config.save_pretrained(tmp_path)
    settings, policy = RunSettings.of(SETTINGS | {"positions": "original"}), parse_policy(POLICIES[0])
    pages = EnginePages(
        str(tmp_path), settings.resolved({}, None), [policy], None, dtype=torch.float32, device=torch.device("cpu")
    )

    def begin(tokens: int, page: int):
        pages.begin(page, BoundedCache(settings, policy, prompt_length=tokens))
        return pages.texts[page].context.ropes

    assert begin(5000, 1) is begin(5000, 2) is not begin(6000, 3)
    kept = [weakref.ref(begin(tokens, 1)[0]) for tokens in range(5001, 5009)]
    gc.collect()
    assert [ref() is not None for ref in kept] == [False] * 7 + [True]


@pytest.mark.slow
def test_an_engine_that_asks_for_nothing_is_vllms_own_and_with_room_for_all_tokens_are_the_same(tmp_path):
    tiny.make(tmp_path / "model", "wide")
    ids, tokens = tiny.prompts([20, 65, 150]), 40
    with tiny.started(tmp_path / "model", None) as llm:
        layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
        assert {layer.get_attn_backend() for layer in layers} == {CPUAttentionBackend}
        stock = tiny.generate(llm, ids, tokens)
    for positions in ("compact", "original"):
        section = {"budget": 256, "chunk": 64, "policy": "streaming", "positions": positions}
        with tiny.started(tmp_path / "model", section) as llm:
            assert tiny.generate(llm, ids, tokens) == stock


# ---- retaining heads of a model whose heads are split over two processes; ``test_documents`` compares its tokens -----


def test_a_head_that_is_split_gives_the_scores_of_the_whole(tmp_path):
    """Each rank's sums are added by hand."""
    model, heads = tiny.make_both(tmp_path, "llama")
    whole = RetainingHeads.from_pretrained(heads)
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
