"""Beginnings that prompts have in common: read once, and nothing of a row changes."""

import weakref
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from unittest import mock

import eval_runs
import forked
import pytest
import torch
from eval_runs import kept_of, scores
from hypothesis import given
from hypothesis import strategies as st
from tiny_heads import INFERENCE, save_tiny_heads
from tiny_tokenizer import TEXT, tiny_tokenizer
from transformers import LlamaForCausalLM

from locret_kit.backbones.libraries import cache_among
from locret_kit.cache.bounded import BoundedCache, CannotFork
from locret_kit.cli.eval import main
from locret_kit.cli.eval_setup import load_parts, run_of
from locret_kit.config.eval_options import load_eval_config
from locret_kit.evals.engine import measure, read_rows, runner
from locret_kit.evals.engine.measure import SharedBeginning, shared_lengths
from locret_kit.evals.tables import summarize, to_csv
from locret_kit.evals.tasks import Example, Task
from locret_kit.runtime import drivers
from locret_kit.text.template import protected_spans

CHUNK = 32
POLICIES = ("full", "locret", "nacl(proxies=6)", "sirllm", "kvcrush(base=ada-snapkv(6,3))")
"""Every row kept, learned, drawn, read off the logits, and ragged."""


# ---- the plan ---------------------------------------------------------------------------------------------------------


class Tokens:
    """Stands in for a cache: what it has read, and how much all of them have read."""

    total = 0

    def __init__(self, ids: Sequence[int] = ()) -> None:
        self.ids = list(ids)

    def fork(self, prompt_length: int, **changes: object) -> "Tokens":
        return Tokens(self.ids)

    def get_seq_length(self) -> int:
        return len(self.ids)

    def pin_all(self, ranges: Iterable[tuple[int, int]]) -> None:
        assert not [*ranges]

    def read(self, ids: Sequence[int]) -> None:
        assert list(ids[: len(self.ids)]) == self.ids  # a cache only goes on with what it has begun
        Tokens.total += len(ids) - len(self.ids)
        self.ids = list(ids)


def read_all(prompts: Sequence[array], shared: Sequence[int]) -> int:
    """Tokens that are read of beginnings; every prompt goes on from its own."""
    Tokens.total = 0
    with mock.patch.object(measure, "prefill", lambda model, ids, cache: cache.read(ids)):
        document = SharedBeginning(None, lambda tokens: Tokens(), max(map(len, prompts)))
        for ids, length in zip(prompts, shared, strict=True):
            assert document.fork(ids, length).ids == ids[:length].tolist()
    return Tokens.total


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens in which two prompts agree from the first on."""
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


@st.composite
def prompts_that_begin_alike(draw):
    """Prompts of two letters in any order, many of which begin alike."""
    prompts: list[array] = []
    for _ in range(draw(st.integers(1, 12))):
        start: list[int] = []
        if prompts:
            base = draw(st.sampled_from(prompts))
            start = base[: draw(st.integers(0, len(base)))].tolist()
        prompts.append(array("i", start + draw(st.lists(st.integers(0, 1), min_size=1, max_size=6))))
    return prompts


@given(prompts_that_begin_alike(), st.integers(1, 3), st.integers(0, 3))
def test_a_beginning_grows_and_is_read_once(prompts, chunk, tail):
    shared = shared_lengths(prompts, BoundedCache(8, "full", chunk=chunk, stabilizers=0, local_len=tail))
    assert shared == sorted(shared) and all(length % chunk == 0 for length in shared)
    for ids, length in zip(prompts, shared, strict=True):
        assert length <= max(0, len(ids) - 1 - tail)
    assert read_all(prompts, shared) == shared[-1]


def in_order(*examples: tuple[array, float | None, int | None]) -> list[Example]:
    """Prompts as a process answers them, of ids, depth and document each."""
    made = [Example(None, None, 0, 0, depth=d, document=n, ids=ids) for ids, d, n in examples]
    return sorted(made, key=runner.sort_key)


@given(st.integers(1, 20), st.lists(st.integers(1, 20), min_size=2, max_size=8), st.integers(1, 4), st.integers(0, 3))
def test_a_haystack_is_read_once_up_to_each_depth(size, places, chunk, tail):
    text = range(100, 100 + size)
    hidden = [array("i", [*text[:n], i, *text[n:]]) for i, n in enumerate(places)]
    prompts = [p.ids for p in in_order(*((ids, n / size, None) for ids, n in zip(hidden, places, strict=True)))]
    pieces = set()
    for a, b in combinations(prompts, 2):
        end = max(0, min(common(a, b), size - tail)) // chunk * chunk
        pieces |= {tuple(a[: at + chunk]) for at in range(0, end, chunk)}
    shared = shared_lengths(prompts, BoundedCache(8, "full", chunk=chunk, stabilizers=0, local_len=tail))
    assert read_all(prompts, shared) == chunk * len(pieces)


# ---- runs -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def heads(tmp_path_factory) -> Path:
    return save_tiny_heads(tmp_path_factory.mktemp("tiny"), inference={**INFERENCE, "budget": 48})


def words(heads: Path, out: Path, **more: object) -> list[str]:
    given = {
        "tasks": "[passkey]", "policies": f"[{','.join(POLICIES)}]", "budgets": "[48]", "lengths": "[280]",
        "samples": 4, "ckpt": heads, "max_new_tokens": 3, "keep": 4, "out": out, **more,
    }  # fmt: skip
    return [f"{key}={value}" for key, value in given.items()]


figures = partial(eval_runs.figures, costs={*eval_runs.COSTS, "cache_bytes"})


@pytest.fixture(scope="module")
def alone(heads, tmp_path_factory) -> Path:
    """A run that shares nothing."""
    out = tmp_path_factory.mktemp("alone") / "run"
    with mock.patch("locret_kit.evals.report.write_page"):
        assert main(words(heads, out, share_prefix="false")) == 0
    rows = read_rows(out)
    assert {row.prefix_shared for row in rows} == {0} and not any(row.error for row in rows)
    assert len(rows) == 4 * len(POLICIES)
    return out


def test_rows_are_those_of_prompts_read_alone(alone, heads, tmp_path):
    out = tmp_path / "run"
    assert main(words(heads, out)) == 0
    assert figures(out) == figures(alone) and scores(out) == scores(alone)
    for policy in POLICIES:
        shared = [row.prefix_shared for row in read_rows(out) if row.policy == policy]
        assert max(shared) >= 96 and all(n % CHUNK == 0 for n in shared)
    assert all(row.prefix_shared < row.tokens and row.prefill_s > 0 for row in read_rows(out))


def test_protected_text_is_kept_shared_or_not(heads, tmp_path):
    outs = [tmp_path / name for name in ("shared", "alone")]
    more = {"policies": "[random]", "protect": "first+system+markers", "chat": "always", "samples": 3}
    for out, share in zip(outs, ("true", "false"), strict=True):
        assert main(words(heads, out, share_prefix=share, **more)) == 0
    assert figures(outs[0]) == figures(outs[1])
    rows, tokenizer = read_rows(outs[0]), tiny_tokenizer()
    assert max(row.prefix_shared for row in rows) > 0 and {row.protect for row in rows} == {more["protect"]}
    for row in rows:
        kept = kept_of(outs[0], row)
        spans = protected_spans(tokenizer, kept["ids"].tolist(), row.protect)
        wanted = {0, 1, 2, 3}.union(*(range(*span) for span in spans))
        assert len(wanted) > 12 and (kept["heads"][:, sorted(wanted)] == kept["n_heads"]).all()
    assert main(words(heads, tmp_path / "oracle", policies="[kvzip]", protect="first")) == 1


def test_processes_take_stretches_of_neighbours(alone, heads, tmp_path):
    out = tmp_path / "run"
    assert forked.ranks(lambda: main(words(heads, out)), 2, tmp_path / "log") == [0, 0], (tmp_path / "log").read_text()
    assert figures(out) == figures(alone) and scores(out) == scores(alone)
    summary = to_csv(summarize(read_rows(out)))
    assert (out / "summary.csv").read_text() == summary  # the last one to finish has written of all rows
    rows = read_rows(out)
    by_rank = [{row.sample for row in rows if row.rank == rank} for rank in range(2)]
    assert sorted(by_rank, key=min) == [{0, 2}, {1, 3}]  # depths 1/2 and 3/4 in one, 1/4 and 1/8 in the other
    assert all(max(row.prefix_shared for row in rows if row.rank == rank) > 0 for rank in range(2))


def documents(kind: str) -> Task:
    """A text with several endings, of which the second is much longer."""

    def make(request) -> Example:
        tail = f" Question {request.sample}: what is it?" * (20 if request.sample == 1 else 1)
        return replace(request, prompt=TEXT * 2 + tail, answer="x", continuation=" Remember it. The boats")

    return Task("documents", make, "rouge", 4, kind=kind, begins_alike=True)


@pytest.mark.parametrize("kind", ["nll", "nll_prefill", "fidelity", "agreement"])
def test_every_kind_of_task_and_length(heads, tmp_path, kind):
    """Exact figures of the likelihood; a pyramid's budgets depend on the prompt's length, so not all can be shared."""
    policies = "[full,locret,pyramid-locret]"
    config = load_eval_config(words(heads, tmp_path / "x", samples=3, policies=policies, budgets="[40]"))
    plan = run_of(config, load_parts(config))
    made = []
    for share in (True, False):
        out = tmp_path / str(share)
        runner.answer(run := replace(plan, tasks=[documents(kind)], out=out, share_prefix=share))
        assert runner.left(run) == (0, 0)
        made.append((out, figures(out)))
    assert made[0][1] == made[1][1] and len(made[0][1]) == 9
    assert (max(row.prefix_shared for row in read_rows(made[0][0])) > 0) == (kind != "nll_prefill")


@pytest.mark.parametrize("error", [CannotFork, ValueError])
def test_a_fork_that_is_refused_is_a_fresh_run_and_any_other_error_is_no_refusal(heads, tmp_path, monkeypatch, error):
    refused, fresh = [], error is CannotFork

    def fork(cache, prompt_length=None, **changes):
        refused.append(prompt_length)
        raise error("a bug")

    monkeypatch.setattr(measure.BoundedCache, "fork", fork)
    out = tmp_path / "run"
    assert main(words(heads, out, policies="[locret]", tasks="[passkey]", samples=3)) == (not fresh)
    rows = read_rows(out)
    assert refused and {row.prefix_shared for row in rows} == {0}
    assert ("ValueError: a bug" in {row.error for row in rows}) != fresh and fresh != any(row.error for row in rows)


def test_out_of_memory_frees_everything_before_the_prompt_is_read_alone(alone, heads, tmp_path, monkeypatch):
    """While a prompt goes on from a shared beginning, the model finds no room to decode."""
    forward, kind = LlamaForCausalLM.forward, measure.BoundedCache
    fork, fresh = kind.fork, kind.__init__
    forks, freed, left = [], [], []

    def forks_are_known(cache, prompt_length=None, **rest):
        forks.append(weakref.ref(made := fork(cache, prompt_length, **rest)))
        return made

    def made_anew(cache, *given, **rest):
        if len(left) < len(freed):
            left.append(sum(one() is not None for one in forks))
        fresh(cache, *given, **rest)

    def no_room(model, input_ids=None, **rest):
        if input_ids.shape[1] == 1 and any(one() is cache_among((), rest) for one in forks):
            raise torch.OutOfMemoryError("no room")
        return forward(model, input_ids=input_ids, **rest)

    monkeypatch.setattr(drivers, "cpu_driver", lambda *given: None)
    monkeypatch.setattr(LlamaForCausalLM, "forward", no_room)
    monkeypatch.setattr(measure.BoundedCache, "fork", forks_are_known)
    monkeypatch.setattr(measure.BoundedCache, "__init__", made_anew)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(len(forks)))
    out = tmp_path / "run"
    assert main(words(heads, out, policies="[locret]", tasks="[passkey]")) == 0
    assert freed and left and not any(left)  # neither a cache nor what had failed is held meanwhile
    wanted = figures(alone)
    assert all(wanted[key] == row for key, row in figures(out).items())
