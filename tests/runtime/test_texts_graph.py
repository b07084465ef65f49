"""A token of each of several texts as one graph, played by a tape, against the shared forward and each text alone. No GPU."""

import gc

import pytest
from policy_runs import backbone, distinct_tokens, held, make
from tape import TapedDecoder, TapedTexts, on_the_reference  # noqa: F401  (a fixture)
from tiny_models import tiny_model

from locret_kit.runtime import drivers
from locret_kit.runtime.drivers.graph import warn
from locret_kit.runtime.engine import Engine
from locret_kit.runtime.sequence import Request

pytestmark = pytest.mark.usefixtures("on_the_reference")
ARRIVALS = ((0, 24, 32), (0, 20, 12), (6, 24, 10), (9, 16, 5), (17, 24, 8))
"""Step in which a text comes, its budget, and the tokens that are asked for: they join and leave while others go on."""


@pytest.fixture
def taped(monkeypatch):
    """An engine that plays its graphs by tapes; the drivers of several texts that it made."""
    made: list[TapedTexts] = []

    def texts(model, first):
        made.append(TapedTexts(model, first))
        return made[-1]

    monkeypatch.setattr(drivers, "TextsDriver", texts)
    own = {"taped": lambda model, cache, graph: TapedDecoder(model, cache) if graph else None}
    monkeypatch.setattr(drivers, "DRIVERS", own)
    return made


def answers(graph: bool, policy: str, model=None, pages: int = 5, **rest):
    """Tokens and kept slots of texts that come and go."""
    model = model or backbone()
    run = Engine(model, frozenset(), pages=pages, graph=graph)
    asked, caches, step = [], [], 0
    while run.running or len(asked) < len(ARRIVALS):
        for n, (when, budget, count) in enumerate(ARRIVALS):
            if when == step:
                ids = distinct_tokens(41 + 7 * n, n)
                cache = make(policy, budget, length=len(ids), chunk=12, **rest)
                caches.append(cache)
                asked.append(run.add(Request(ids, count), lambda cache=cache: cache))
        run.step()
        step += 1
    assert not [one.error for one in asked if one.error]
    read = [distinct_tokens(41 + 7 * n, n) + one.tokens for n, one in enumerate(asked)]
    return [one.tokens for one in asked], [kept(*pair) for pair in zip(caches, read, strict=True)], caches


def kept(cache, ids: list[int]):
    """Kept positions; in the first layer tokens, since heads score a token that comes twice alike there, but for rounding."""
    first, *rest = held(cache)
    return [[sorted(ids[i] for i in head) for head in first], *rest]


@pytest.mark.parametrize(
    ("policy", "rest"),
    [
        ("locret", {}), ("h2o", dict(positions="original")), ("roco", dict(decode_every=5)), ("snapkv(6,3)", {}),
        ("pyramid-locret", dict(positions="original")), ("streaming", dict(decode_every=1)), ("score=aqas", {}),
    ],
)  # fmt: skip
def test_texts_that_come_and_go(policy, rest, taped):
    wanted = answers(False, policy, **rest)
    assert not taped
    found = answers(True, policy, **rest)
    (driver,) = taped
    assert found[:2] == wanted[:2] and driver.dense is not None and driver.reason is None
    assert driver.replays > 8 and {form.texts for form in driver.graphs} >= {1, 2}
    assert driver.replays > driver.ran.total() - 2 * len(driver.ran) - 4, "a set of texts needs no graph of its own"


@pytest.mark.parametrize("family", ["gemma3", "mistral-window", "phi3-longrope"])
def test_families(family, taped):
    model = tiny_model(family).double()
    mine, theirs = (answers(graph, "h2o", model)[:2] for graph in (True, False))
    assert mine == theirs and taped[0].reason is None and taped[0].replays > 8


def test_a_text_that_was_decoded_otherwise_goes_on(taped):
    """A token of the plain forward, and pins, between two steps of a graph."""
    found = []
    for graph in (True, False):
        run = Engine(backbone(), frozenset(), pages=2, graph=graph)
        texts, caches = [distinct_tokens(40 + n, n) for n in range(2)], [make("h2o", length=40 + n) for n in range(2)]
        asked = [run.add(Request(ids, 32), lambda cache=cache: cache) for ids, cache in zip(texts, caches, strict=True)]
        for step in range(32):
            run.drivers.graph = graph and step % 7 != 5
            run.drivers.keep([])
            if step == 14:
                caches[1].pin(45, 48)
            run.step()
        found.append(([one.tokens for one in asked], [held(cache) for cache in caches]))
    assert found[0] == found[1] and taped[0].replays > 8


@pytest.mark.parametrize(
    ("policy", "rest", "why"),
    [
        ("h2o", dict(positions="clipped(60)"), "positions='clipped(60)' places rows of each text in its own way"),
        ("h2o", dict(pages=0), "its rows are no pages of a pool"),
        ("knorm", {}, "policy='knorm' scores the new tokens of each text by themselves"),
    ],
)
def test_texts_without_a_graph_say_why_once(policy, rest, why, taped, caplog):
    warn.cache_clear()
    *found, caches = answers(True, policy, **rest)
    assert tuple(found) == answers(False, policy, **rest)[:2] and not taped
    assert caplog.text.count(why) == 1
    assert all(cache.counters.decoding == f"dynamic beside other texts: {why}" for cache in caches)


def test_a_capture_that_fails_loses_no_token(taped, monkeypatch, caplog):
    def fails(self, step):
        step.args[1][0].state.unfinished = True  # of the texts of the step
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(TapedTexts, "_captured", fails)
    warn.cache_clear()
    mine, theirs = (answers(graph, "h2o")[:2] for graph in (True, False))
    gc.collect()
    assert mine == theirs and not len(taped[0]._states), "it holds no text that has ended"
    assert taped[0].reason == "its capture failed: operation not permitted when stream is capturing"
    assert caplog.text.count("steps run without CUDA graphs: its capture failed") == 1
