"""Chunks of a prompt as a graph, played on a CPU: recorded once, then run again on the very same tensors. Logits, rows and counts
equal those of the plain prefill."""

from contextlib import contextmanager, nullcontext
from functools import partial
from unittest import mock

import pytest
import torch
from decoder_runs import alike
from policy_runs import EVICTING, backbone, by_kind, make, tokens
from tape import TapedDecoder, on_the_reference  # noqa: F401  (a fixture)
from tiny_models import tiny_model

from locret_kit import attach
from locret_kit.policies.grammar import parse_policy
from locret_kit.runtime import drivers
from locret_kit.runtime.engine import Engine
from locret_kit.runtime.sequence import Request
from locret_kit.runtime.session import prefill

pytestmark = pytest.mark.usefixtures("on_the_reference")
LENGTH, CHUNK = 200, 13
RULES = ["compact", "original", "clipped(60)"]
FAMILIES = ["phi3", "qwen3", "llama-mqa", "phi3-longrope", "mistral-window", "gemma3"]


@contextmanager
def taped():
    """Drivers that record, in the place of those of a card."""
    made: list[TapedDecoder] = []

    def chunk_driver(model, cache, graph):
        if not cache.get_seq_length():
            return None
        made.append(TapedDecoder(model, cache, CHUNK))
        return made[-1]

    with mock.patch.object(drivers, "chunk_driver", chunk_driver):
        yield made


def same(policy: str, family: str = "llama", **rest) -> TapedDecoder:
    """The driver of a prompt whose reading equals the plain one."""
    model, ids = backbone(family), tokens(LENGTH)
    mine, theirs = (make(policy, length=LENGTH, family=family, **rest) for _ in range(2))
    with attach(model), torch.inference_mode():
        wanted = prefill(model, ids, theirs)
        with taped() as made:
            found = prefill(model, ids, mine)
    torch.testing.assert_close(found, wanted, rtol=0, atol=3e-6)
    alike(mine, theirs, 3e-6)
    (driver,) = made
    return driver


@pytest.mark.parametrize("policy", by_kind(EVICTING))
def test_policies(policy):
    """What can be replayed is; the others say why not, and are read as ever."""
    parsed = parse_policy(policy)
    refused = (
        parsed.ragged or parsed.merge is not None or parsed.score.needs_logits or bool(parsed.score.memory(LENGTH))
    )
    driver = same(policy, positions=RULES[EVICTING.index(policy) % 3])
    assert (driver.reason is not None) == refused, driver.reason
    if not refused:
        assert driver.replays >= 9 and len(driver.graphs) == 1, driver.ran


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family):
    driver = same("h2o", family)
    assert driver.reason is None and driver.replays >= 9 and len(driver.graphs) == 1


@pytest.mark.parametrize("rest", [{"protect": "first"}, {"local_len": 0}, {"budget": 40}, {"kv_bits": 8}], ids=str)
def test_settings(rest):
    assert same("roco", **rest).replays >= 7


def test_a_prompt_that_shares_forwards_is_read_plainly():
    """One that is alone again goes on with its graph."""
    prompts, answers = [tokens(LENGTH), tokens(2 * CHUNK, seed=1)], []
    for form in (taped, nullcontext):
        run = Engine(backbone(), frozenset(), piece=2 * CHUNK)
        with form() as made, attach(backbone()):
            asked = [run.add(Request(ids, 5), partial(make, "h2o", length=len(ids))) for ids in prompts]
            while run.running:
                assert not (made and len(run.running) > 1 and made[0].replays)
                run.step()
        answers.append([one.tokens for one in asked])
        assert made is None or (len(made) == 1 and made[0].replays >= 5)
    assert answers[0] == answers[1] and list(map(len, answers[0])) == [5, 5]


def test_queries_that_are_scaled_by_their_positions(monkeypatch):
    """A graph would scale those of every chunk as those of the one that was recorded."""
    rope = {
        "rope_type": "default",
        "rope_theta": 1e4,
        "llama_4_scaling_beta": 0.5,
        "original_max_position_embeddings": 32,
    }
    model = tiny_model("ministral3", sliding_window=None, rope_parameters=rope).double()
    monkeypatch.setitem(globals(), "backbone", lambda family: model)
    assert same("h2o", "ministral3").reason == "queries of the backbone are scaled by their positions"
