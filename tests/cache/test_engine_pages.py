"""Texts in another engine's memory, which hands over queries, keys and values of one layer after another."""

import pytest
import torch
from transformers import LlamaConfig

from locret_kit import BoundedCache
from locret_kit.backbones.handlers import Softmax
from locret_kit.cache import step as step_module
from locret_kit.policies.grammar import parse_policy
from locret_kit.settings import RunSettings
from locret_kit.vllm.pages import EnginePages, EngineStep, Ranks, Turn

SETTINGS = RunSettings(budget=24, chunk=8, stabilizers=3, local_len=4, positions="compact")
LAYERS, HEADS, D = 2, (4, 2, 2), 8
STEPS = ({1: 40, 2: 30}, {1: 20, 2: 1, 3: 30}, {3: 4}, *[{3: 1, 1: 1, 2: 1}] * 12)
"""New tokens by page, in the order of their rows. The text in page 3 has read a document before."""
LENGTHS = {1: 60, 2: 30, 3: 50}
READ = 16


@pytest.mark.parametrize(
    ("policy", "size", "together"),
    [("streaming", 1, False), ("h2o", 2, False), ("h2o", 1, True), ("snapkv(4,3)", 1, True), ("snapkv(4,3)", 2, False)],
)
def test_attention_is_that_of_a_cache_with_memory_of_its_own(tmp_path, policy, size, together, monkeypatch):
    """``together``: as on a card, where evictions wait for the last layer."""
    cuts, evict = [], step_module._evict
    monkeypatch.setattr(step_module, "evicts_together", lambda ctx, rows: together)
    monkeypatch.setattr(step_module, "_evict", lambda ctx, cut: (cuts.append(len(cut)), evict(ctx, cut)))
    LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=LAYERS, num_attention_heads=HEADS[0],
        num_key_value_heads=HEADS[1], head_dim=D, architectures=["LlamaForCausalLM"],
    ).save_pretrained(tmp_path)  # fmt: skip
    parts, draw = parse_policy(policy), torch.Generator().manual_seed(2)

    def pages_of(ranks: Ranks) -> EnginePages:
        resolved = SETTINGS.resolved({}, None)
        options = {"dtype": torch.float32, "device": torch.device("cpu"), "ranks": ranks}
        return EnginePages(str(tmp_path), resolved, [parts], None, **options)

    def text(tokens: int) -> BoundedCache:
        return BoundedCache(SETTINGS, parts, prompt_length=tokens)

    def tokens(count: int) -> list[torch.Tensor]:
        return [torch.randn(1, heads, count, D, generator=draw) for heads in HEADS]

    whole, ranks = pages_of(Ranks()), [pages_of(Ranks(rank, size)) for rank in range(size)]
    memory = [
        {layer: torch.full((4, pages.shape.nbytes // 4), torch.nan) for layer in range(LAYERS)} for pages in ranks
    ]
    document = whole.bind(text(80))
    for layer in range(LAYERS):
        document.handler.attend(layer, *tokens(READ), Softmax(0.3))
    alone = {page: whole.bind(text(LENGTHS[page])) for page in (1, 2)} | {3: document.fork(LENGTHS[3])}
    for pages, own in zip(ranks, memory, strict=True):
        pages.begin(3, text(9))  # whose page becomes another's
        for page in (1, 2):
            pages.begin(page, text(LENGTHS[page]))
        pages.take(3, text(LENGTHS[3]), document, own)
    for new in STEPS:
        turns, start = [], 0
        for page, count in new.items():
            turns.append(Turn(page, start, start + count, alone[page].get_seq_length()))
            start += count
        steps = [EngineStep(pages, turns) for pages in ranks]
        for layer in range(LAYERS):
            given, expected = tokens(start), torch.empty(1, HEADS[0], start, D)
            for page, first, end, _ in turns:
                new_tokens = (x[:, :, first:end] for x in given)
                expected[:, :, first:end] = alone[page].handler.attend(layer, *new_tokens, Softmax(0.3))
            outs = []
            for rank, step in enumerate(steps):
                q, k, v = (x[0].chunk(size)[rank].transpose(0, 1).contiguous() for x in given)
                outs.append(torch.empty_like(q))
                step.attend(layer, q, k, v, memory[rank][layer], Softmax(0.3), outs[-1])
            torch.testing.assert_close(torch.cat(outs, 1), expected[0].transpose(0, 1))
        for page in new:
            alone[page].state.evict_waiting()
    assert LAYERS in cuts if together else set(cuts) == {1}
    assert alone[1].schedule.budget < alone[1].get_seq_length()
    with pytest.raises(RuntimeError, match="page 2 holds 43 tokens, and the engine says 7 tokens"):
        ranks[0].text(2, 7)
