"""Decoding with fixed shapes, run as it is, against dynamic decoding: tokens, logits, rows and counts. No GPU."""

from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest
import torch
from decoder_runs import STEPS, decoded, plain, same
from policy_runs import answer, backbone, make, tokens
from tape import TapedDecoder, on_the_reference  # noqa: F401  (a fixture)

from locret_kit import BoundedCache, attach
from locret_kit.cache import graphs
from locret_kit.cache import step as steps
from locret_kit.cache.due import Schedule
from locret_kit.runtime import drivers
from locret_kit.runtime.drivers import graph as driver
from locret_kit.runtime.drivers import logits_after
from locret_kit.runtime.drivers.dense import DenseStep
from locret_kit.runtime.drivers.graph import GraphDriver, SyncDetector, warn
from locret_kit.runtime.engine import Engine
from locret_kit.runtime.sequence import Request
from locret_kit.runtime.session import prefill

pytestmark = pytest.mark.usefixtures("on_the_reference")
RULES = ["compact", "original", "clipped(60)"]
POLICIES = [
    "locret", "lookahead-locret", "h2o", "roco", "scissorhands", "pyramid-locret", "knorm", "keydiff", "streaming",
    "random", "snapkv(6,3)", "nacl(proxies=5)", "kvcrush",
    "score=aas selection=sampled(0.7)",  # a draw of the wrong length of text would choose other slots
]  # fmt: skip


def pair(policy: str, **rest) -> list[BoundedCache]:
    return [make(policy, **rest) for _ in range(2)]


@pytest.mark.parametrize(
    ("policy", "positions"),
    [*((policy, RULES[n % 3]) for n, policy in enumerate(POLICIES)), *(("tova", positions) for positions in RULES)],
)
def test_what_is_replayed(policy, positions):
    """Tokens, recorded once and run again and again between evictions, equal dynamic decoding. The place of TOVA's query is its
    rank in one rule, and follows from the text's length in the others."""
    caches = pair(policy, positions=positions, chunk=5)
    step = same(backbone(), caches, tokens(), TapedDecoder)
    assert step.reason is None and step.replays >= STEPS - 6 and caches[0].counters.evictions >= 8


def test_a_score_that_reads_back_is_said(monkeypatch):
    monkeypatch.setattr(driver, "_reason_against", lambda *_: None)  # settings would have said so
    with attach(backbone()), torch.inference_mode():
        step = decoded(backbone(), make("compactor(block=8)"), tokens(), GraphDriver, 3)[1]
        assert "makes the host wait" in (step.reason or "")


def gone_on(form, policy: str, positions: str, between) -> torch.Tensor:
    """Logits after tokens of a form, with ``between(model, cache, n)`` giving those that come in another way."""
    model, cache, out = backbone(), make(policy, positions=positions, chunk=5), []
    with attach(model), torch.inference_mode():
        prefill(model, tokens(), cache)
        step = form(model, cache)
        for n in range(30):
            other = between(model, cache, n)
            out.append(step([cache], [2 + 37 * n % 95])[0] if other is None else other)
    return torch.stack(out)


def plain_token(model, cache, n):
    return None if n % 7 != 5 else plain(model)([cache], [2 + 37 * n % 95])[0]


def plain_piece(model, cache, n):
    return None if n not in (8, 19) else logits_after(model, [cache], torch.tensor([range(2, 10)]), [8])[0].float()


def token_that_is_taken_back(model, cache, n):
    if n % 9 == 7 and plain(model)([cache], [5]) is not None:
        cache.take_back(1)  # where the policy lets it be


@pytest.mark.parametrize(
    ("policy", "positions", "between"),
    [
        ("h2o", "compact", plain_token), ("locret", "original", plain_piece), ("h2o", "clipped(60)", plain_piece),
        ("knorm", "clipped(60)", token_that_is_taken_back), ("knorm", "compact", token_that_is_taken_back),
    ],
)  # fmt: skip
def test_a_graph_goes_on_after_tokens_that_came_in_another_way(policy, positions, between):
    forms = TapedDecoder, lambda model, _: plain(model)
    mine, theirs = (gone_on(form, policy, positions, between) for form in forms)
    torch.testing.assert_close(mine, theirs, rtol=0, atol=3e-6)


def test_texts_without_pages_share_a_forward_and_one_alone_has_a_graph(monkeypatch):
    """A text joins one that is decoded as a graph, and leaves it: tokens are those of each alone."""
    steps: list[TapedDecoder] = []

    def taped(model, cache, graph):
        assert graph is None, "the default"
        steps.append(TapedDecoder(model, cache))
        return steps[-1]

    monkeypatch.setitem(drivers.DRIVERS, "taped", taped)

    def answers(*counts: int) -> list[list[int]]:
        engine = Engine(backbone(), frozenset())
        asked = [engine.add(Request(tokens(), counts[0]), lambda: make("h2o", chunk=5))]
        while engine.running:
            if len(counts) > len(asked) and len(asked[0].tokens) == 9:
                asked.append(engine.add(Request(tokens(seed=1), counts[1]), lambda: make("h2o", chunk=5)))
            engine.step()
        return [one.tokens for one in asked]

    first, second = answers(40, 12)
    assert len(first) == 40 and len(second) == 12
    assert steps[0].replays > 5 and steps[0].reason is None and not steps[1].replays
    assert answers(40) == [first] and steps[2].replays > 30


def test_between_two_evictions_the_host_asks_for_none(monkeypatch):
    """It knows how many tokens no layer is cut, so that the device does not wait for it."""
    asked, due, quiet = [], Schedule.due, 0
    monkeypatch.setattr(Schedule, "due", lambda *given, **rest: asked.append(1) or due(*given, **rest))
    model, cache = backbone(), make("h2o")
    with attach(model), torch.inference_mode():
        prefill(model, tokens(), cache)
        step = TapedDecoder(model, cache)
        for token in range(2, 54):
            asked.clear()
            step([cache], [token])
            quiet += not asked
    assert cache.counters.evictions >= 6 and quiet >= 52 * 10 // 13, "of 13 tokens, of which one is cut"


@pytest.mark.parametrize("every", [1, 5])
def test_evictions_that_are_due_after_a_token(every):
    assert same(backbone(), pair("h2o", decode_every=every), tokens(), TapedDecoder).replays > 20


@pytest.mark.parametrize(
    ("policy", "rest", "why"),
    [
        ("ada-locret", {}, "policy='ada-locret' has heads of different lengths"), ("merge", {}, "policy='merge' has merging"),
        ("full", {}, "policy='full' has buffers that grow"), ("sirllm", {}, "has scores from the backbone's logits"),
        ("h2o", dict(kv_bits=4), "kv_bits=4: rows are quantised when the host says"), ("h2o", {}, None),
        ("expected-attention", {}, "keeps tensors of its own between tokens"),
    ],
)  # fmt: skip
def test_what_is_not_captured_says_why(policy, rest, why):
    """Asked before the prompt, and after it."""
    model, cache = backbone(), make(policy, 40, chunk=20, **rest)
    with attach(model), torch.inference_mode():
        cache.bind(model)
        assert why is not None or GraphDriver(model, cache).refusal(cache) is None
        prefill(model, tokens(), cache)
        reason = GraphDriver(model, cache).refusal(cache)
        assert reason is None if why is None else why in (reason or "")
        unknown = replace(cache.context.description, rotations=(), unknown_rotation="other turns")
        cache.state.change_context(description=unknown)
        assert "other turns" in (GraphDriver(model, cache).refusal(cache) or "")


@pytest.mark.parametrize("with_modules", [True, False])
def test_an_interrupt_between_layers_is_noticed(with_modules, monkeypatch):
    model, cache, read = backbone(), make("h2o"), steps.read_block

    def interrupted(ctx, rows, *rest):
        if rows.number == 1:
            raise KeyboardInterrupt
        return read(ctx, rows, *rest)

    with attach(model), torch.inference_mode():
        prefill(model, tokens(), cache)
        step = GraphDriver(model, cache)
        assert isinstance(step.dense, DenseStep)
        step.dense = None if with_modules else step.dense
        monkeypatch.setattr(steps, "read_block", interrupted)
        with pytest.raises(KeyboardInterrupt):
            step([cache], [5])
        with pytest.raises(ValueError, match="interrupted inside a forward, after 83 to 84 tokens: reset"):
            cache.bind(model)


@pytest.mark.parametrize("inference", [True, False], ids=["inference mode", "no mode"])
def test_the_guard_sees_what_it_must(inference):
    """In inference mode, in which decoding runs, composed operators are not taken apart."""
    with torch.inference_mode(inference):
        x = torch.arange(5)
        for read in (
            lambda: int(x[2]), lambda: x[2].item(), lambda: x[x > 2], lambda: x.nonzero(), lambda: bool((x > 9).any()),
            lambda: torch.arange(x[1], x[3]), lambda: x.clone().__setitem__(x > 2, torch.tensor([0, 0])), x.unique,
            lambda: torch.where(x > 2), lambda: x.repeat_interleave(x), lambda: x.masked_select(x > 2),
            lambda: torch.equal(x, x), lambda: max(0, x[2]), lambda: x.tolist()[:x[1]], x.bincount,
        ):  # fmt: skip
            with SyncDetector() as reads:
                read()
            assert reads.found, read
        with SyncDetector() as reads:
            x.to("meta")
        assert reads.found
        with SyncDetector() as reads:
            y = x.clone().index_copy_(0, x[:1], x[4:])
            y[x[1:2]] = 7
            torch.where(y > 3, y, 0).masked_fill_(y > 3, 0).sort()
            y.repeat_interleave(2, 0)
        assert not reads.found


def test_decode_chooses(monkeypatch):
    monkeypatch.undo()  # the backend that the device's rule chooses
    caches = [make("h2o", backend=name) for name in (None, None, "reference")]
    said = [answer(cache, tokens(), 6, graph=graph) for cache, graph in zip(caches, (None, False, None), strict=True)]
    assert said[0] == said[1] == said[2]
    assert [cache.counters.decoding for cache in caches] == ["cpu", "cpu", "dynamic: backend='reference'"]
    with pytest.raises(ValueError, match="graph=True is not possible here: CUDA graphs need a CUDA device, not"):
        answer(make("h2o"), tokens(), 6, graph=True)


def test_a_capture_that_fails_loses_no_token(monkeypatch, caplog):
    """The step that could not be captured runs as it is, once, then over modules; the reason is there for the next."""

    def fails(self, step):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(TapedDecoder, "_captured", fails)
    warn.cache_clear()
    step = same(backbone(), pair("h2o"), tokens(), TapedDecoder, steps=15)
    assert step.reason == "its capture failed: operation not permitted when stream is capturing" and not step.graphs
    assert step.dense is None and "a token runs through the decoder's modules: its capture failed" in caplog.text
    same(backbone(), pair("h2o"), tokens(), TapedDecoder, steps=5)
    assert caplog.text.count("steps run without CUDA graphs: its capture failed") == 1
    with attach(backbone()), torch.inference_mode():  # a short answer pays nothing
        assert decoded(backbone(), make("h2o"), tokens(), TapedDecoder, 3)[1].reason is None


def test_a_capture_that_fails_gives_the_stream_back(monkeypatch):
    """As PyTorch's own context does not: where the capture's end raises, what comes next would run on the side stream."""
    streams = ["current"]

    @contextmanager
    def switched(name):
        before = list(streams)
        try:
            yield
        finally:
            streams[:] = before

    @contextmanager
    def graph(graph, stream, **form):
        streams.append(stream)
        yield
        raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(graphs, "capture_stream", lambda device: "side")
    for name, stand_in in (
        ("CUDAGraph", object), ("graph", graph), ("stream", switched),
        ("device", lambda device: nullcontext()), ("current_stream", lambda device: streams[-1]),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, stand_in)
    with pytest.raises(RuntimeError, match="previous error during capture"):
        graphs.capture(torch.device("cuda"), (), lambda: torch.zeros(1))
    assert streams == ["current"]
