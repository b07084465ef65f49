"""The code for CUDA on a card that is only played (`pretended`): inside a chunk the host waits for nothing, and no operation
mixes devices; a step of the graph decoder is fit for a graph."""

from unittest import mock

import pytest
import tiny_models
import torch
from pretended import CUDA, card, moved
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from locret_kit import BoundedCache, HeadsConfig, RetainingHeads, attach
from locret_kit.backbones.libraries import CACHE
from locret_kit.backbones.probe import describe
from locret_kit.backbones.spec import spec_of
from locret_kit.backbones.weights import check_dense
from locret_kit.cache.pages import PagePool
from locret_kit.policies.methods.h2o import Aas
from locret_kit.runtime.drivers import dense, graph
from locret_kit.runtime.drivers.graph import GraphDriver, TextsDriver, graph_key
from locret_kit.runtime.session import prefill

LENGTH, CHUNK = 57, 13
COPIED = "a copy between host and device in start"
TABLE = "a copy between host and device in compact_rows"
LONGROPE = tiny_models.LONGROPE["rope_parameters"] | {"short_factor": [1.0] * 32, "long_factor": [2.0] * 32}
FAMILIES = {
    "llama": {}, "gemma3_text": dict(sliding_window=16, layer_types=["sliding_attention", "full_attention"]),
    "phi3": dict(sliding_window=None, original_max_position_embeddings=64, rope_parameters=LONGROPE),
}  # fmt: skip


def on_the_card(family: str):
    """A tiny model and its heads, whose attention is measured already: tensors of the card hold no numbers."""
    config = AutoConfig.for_model(
        family, vocab_size=97, hidden_size=256, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, bos_token_id=1, eos_token_id=None, pad_token_id=0,
        num_hidden_layers=2, max_position_embeddings=512, **FAMILIES[family],
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval().requires_grad_(False).bfloat16()
    heads = RetainingHeads(HeadsConfig.for_backbone(spec_of(config), "tiny", 32)).requires_grad_(False).bfloat16()
    heads.to = lambda *where: heads  # they are there
    describe(model)
    if family != "gemma3_text":
        check_dense(model, dense.dense(model))
        dense._ALIKE.add(model)
    return model, heads


def read(
    policy: str, family: str = "llama", steps: int = 0, dynamic: int = 0, length: int = LENGTH, **rest
) -> tuple[list[str], GraphDriver | None, BoundedCache]:
    """Where the host waits while a prompt of ``length`` tokens is read, and ``steps`` tokens of fixed shapes are decoded."""
    model, heads = on_the_card(family)
    cache = BoundedCache(
        24, policy, heads if "locret" in policy else None, chunk=CHUNK, stabilizers=4, local_len=5,
        prompt_length=length, **rest,
    )  # fmt: skip
    decoder = None
    with card() as mode, attach(moved(model)), torch.inference_mode():
        moved(heads)
        cache.bind(model)  # LongRoPE's factors are copied here, once a prompt
        mode.waits.clear()
        prefill(model, [n % 97 for n in range(length)], cache)
        for token in range(dynamic):
            with mock.patch.object(F, "scaled_dot_product_attention", lambda *given, **named: pytest.fail("SDPA")):
                model(input_ids=torch.full((1, 1), token, device=CUDA), **{CACHE: cache}, use_cache=True)
        if steps:
            decoder = GraphDriver(model, cache)
            decoder.captures = False
            mode.waits.clear()
            for token in range(steps):
                decoder([cache], [token])
    assert (cache.counters.evictions >= 3 or policy == "full") and cache.settings.backend == "triton"
    assert ("locret" not in policy) == (cache.context.folded is None) and None not in (cache.context.folded or ())
    return mode.waits, decoder, cache


@pytest.mark.parametrize(
    ("policy", "family", "positions"),
    [
        ("locret", "phi3", "compact"), ("h2o", "gemma3_text", "original"), ("roco", "llama", "clipped(40)"),
        ("tova", "llama", "compact"), ("snapkv(6,3)", "llama", "original"), ("streaming", "llama", "clipped(40)"),
        ("lagkv(sinks=2,lag=4)", "llama", "compact"), ("keydiff", "llama", "compact"), ("nacl(proxies=5)", "llama", "compact"),
        ("expected-attention(future=8)", "llama", "compact"),
    ],
)  # fmt: skip
def test_the_host_waits_for_nothing_inside_a_chunk(policy, family, positions):
    """The prompt's tokens are copied at once, and where the rows lie at the first eviction, and nothing more."""
    waits, _, _ = read(policy, family, positions=positions)
    assert waits[0] == COPIED and set(waits[1:]) == {TABLE} and len(waits) <= 3, "a table for each kind of column"


@pytest.mark.parametrize(
    ("policy", "family"), [("locret", "phi3"), ("h2o", "gemma3_text"), ("full", "llama"), ("ada-snapkv(6,3)", "llama")]
)
def test_one_token_never_goes_through_sdpa(policy, family):
    """Its plan is built for every length anew on some cards; windows and growing buffers included."""
    read(policy, family, dynamic=CHUNK + 2)


@pytest.mark.parametrize("policy", ["ada-locret", "ada-snapkv(6,3)"])
def test_heads_of_different_lengths_are_read_once_an_eviction(policy):
    """Attention is a call for each head, so the host must know how long they are; it asks once a layer."""
    waits, _, cache = read(policy)
    assert waits == [COPIED] + ["tolist in _lay_out"] * 2 * (1 + cache.counters.evictions)


@pytest.mark.parametrize(("policy", "family"), [("locret", "phi3"), ("h2o", "gemma3_text"), ("roco", "llama")])
def test_a_step_of_fixed_shapes_is_fit_for_a_graph(policy, family):
    waits, decoder, cache = read(policy, family, steps=CHUNK + 2)
    assert set(waits) == {"a copy between host and device in _write"} and decoder.reason is None
    assert (decoder.dense is None) == (family == "gemma3_text")
    assert cache.counters.evictions >= 4


@pytest.mark.parametrize(
    ("policy", "family", "positions"),
    [
        ("locret", "phi3", "compact"),
        ("h2o", "gemma3_text", "original"),
        ("roco", "llama", "clipped(40)"),
        ("tova", "llama", "compact"),
    ],
)
def test_a_chunk_of_fixed_shapes_is_fit_for_a_graph(policy, family, positions, monkeypatch):
    """A long prompt has one; nothing else than before makes the host wait."""
    drivers = []

    def step(driver, form, caches):
        drivers.append((driver, form))
        return real(driver, form, caches)

    real = GraphDriver._step
    monkeypatch.setattr(graph, "MOST_GRAPHS", 0)
    monkeypatch.setattr(GraphDriver, "_step", step)
    waits, _, _ = read(policy, family, positions=positions, length=LENGTH - 1)
    assert not drivers and set(waits) == {COPIED, TABLE}, "a prompt that is too short for it"
    waits, _, _ = read(policy, family, positions=positions, length=10 * CHUNK + 5)
    assert waits[0] == COPIED and len(waits) <= 3, "two tables"
    assert all(wait.startswith("a copy between") for wait in waits)
    assert len(drivers) >= 7 and len({form for _, form in drivers}) <= 4
    assert len({id(driver) for driver, _ in drivers}) == 1
    assert drivers[0][0].reason is None


@pytest.mark.parametrize(
    ("policy", "family", "positions"),
    [("locret", "phi3", "compact"), ("h2o", "gemma3_text", "original"), ("snapkv(6,3)", "llama", "original")],
)
def test_a_token_of_several_texts_is_fit_for_a_graph(policy, family, positions):
    """Their tokens and places are one copy, outside of it."""
    model, heads = on_the_card(family)
    settings = dict(chunk=CHUNK, prompt_length=LENGTH, positions=positions)
    with card() as mode, attach(moved(model)), torch.inference_mode():
        moved(heads)
        pool, of = PagePool(3), heads if policy == "locret" else None
        caches = [BoundedCache(24, policy, of, **settings) for _ in range(3)]
        for cache in caches:
            cache.bind(model)
            # Frequencies of the card cannot be compared: all texts have those of the first.
            cache.state.change_context(ropes=caches[0].context.ropes)
            pool.enter(cache)
            prefill(model, list(range(LENGTH)), cache)
        driver = TextsDriver(model, caches[0])
        assert len({graph_key(cache) for cache in caches}) == 1 and driver.captures
        driver.captures = False
        for _ in range(CHUNK + 2):
            mode.waits.clear()
            driver(caches, [1, 2, 3])
            assert mode.waits == ["a copy between host and device in _write"] and driver.reason is None
    assert caches[0].counters.evictions >= 4


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda x: x * float(x.sum()), "item"),
        (lambda x: x[x > x.mean()].sum() + x, "index by booleans"),
        (lambda x: x + torch.zeros(x.shape).to(x.device), "a copy between host and device"),
        (lambda x: x + torch.zeros(x.shape), "mixes devices"),
    ],
)
def test_what_waits_and_what_mixes_is_found(wrong, said, monkeypatch):
    monkeypatch.setattr(Aas, "score_slots", lambda self, slots: wrong(slots.stats["sum"]))
    try:
        found = read("h2o")[0]
    except RuntimeError as error:
        found = [str(error)]
    assert any(said in wait for wait in found)
