"""Rows of several texts in one pool: a token of each in one call is the step of each alone, and a page is all that a text has."""

import gc

import pytest
import torch
from policy_runs import backbone, distinct_tokens, held, make

from locret_kernels import ragged_decode as reference
from locret_kernels.ragged_decode import Angles, Rotation, Spans, angle_steps, cpu
from locret_kit.cache import step
from locret_kit.cache.pages import PageShape, RowPool
from locret_kit.cache.storage.codec import Plain
from locret_kit.cache.storage.layouts import Layout
from locret_kit.cache.storage.rows import BoundedLayer
from locret_kit.runtime.engine import Engine, Request


def answers(pages, budgets, monkeypatch, policy="h2o", family="llama", backend="reference", **given):
    """Tokens of texts that run together, and how many calls attended to the tokens of how many."""
    model, calls, real = backbone(family), [], step.decode_rows
    monkeypatch.setattr(step, "decode_rows", lambda q, *given: calls.append(len(q)) or real(q, *given))
    engine = Engine(model, frozenset(), pages=pages)
    prompts = [distinct_tokens(40 + 5 * i, i) for i in range(len(budgets))]
    made, running = [], []
    for budget, ids in zip(budgets, prompts, strict=True):
        made.append(make(policy, budget, length=len(ids), family=family, backend=backend, **given))
        running.append(engine.add(Request(ids, 12), lambda cache=made[-1]: cache))
    while engine.running:
        engine.step()
    assert all(one.error is None for one in running)
    return [one.tokens for one in running], [held(cache) for cache in made], calls, engine


def test_an_engine_makes_a_token_of_each_text_in_one_call_a_layer(monkeypatch):
    """Of those that have a page: a text that needs a larger one than the first, and one that finds none, are read alone."""
    budgets = (24, 24, 20, 30, 24)
    alone = answers(0, budgets, monkeypatch)
    assert not alone[2]
    tokens, kept, calls, engine = answers(3, budgets, monkeypatch)
    assert (tokens, kept) == alone[:2] and max(calls) == 3 and len(calls) % 3 == 0
    del kept, alone
    gc.collect()
    assert sorted(engine._pool._free) == [0, 1, 2]  # the caches are gone


@pytest.mark.parametrize("policy", ["roco", "kvcrush"])
def test_compiled_calls_take_several_statistics_of_a_page(policy, monkeypatch):
    alone, pooled = (answers(n, (24, 20), monkeypatch, policy, backend="cpu", decode_every=3)[:2] for n in (0, 2))
    assert pooled == alone


@pytest.mark.parametrize(
    ("family", "policy", "positions"),
    [
        ("llama", "score=entropy", "compact"), ("llama", "snapkv(6,3)", "original"), ("llama", "streaming", "compact"),
        ("llama", "h2o", "original"), ("qwen2", "knorm", "compact"), ("gemma3", "keydiff", "original"),
        ("gemma3", "roco", "compact"), ("llama-mqa", "score=aqas", "original"),
    ],
)  # fmt: skip
def test_texts_with_pages_evict_as_those_without(family, policy, positions, monkeypatch):
    """Every third token, one of them after the forward that scores it."""
    rest = {"decode_every": 3, "stabilizers": 0, "positions": positions}
    alone, pooled = (answers(pages, (24, 20, 16), monkeypatch, policy, family, **rest) for pages in (0, 3))
    assert pooled[:2] == alone[:2] and max(pooled[2]) == 3


def test_a_page_holds_all_that_its_rows_need():
    """Bytes by hand: 2 heads of 10 rows with keys, values, position, score, 3 statistics; 4 query heads' newest 2 queries."""
    shape = PageShape(2, 4, 8, 10, torch.float32, statistics=3, recent=2)
    # 84 bytes of a row, and 12.8 of the 256 of queries: a multiple of 8.
    assert shape.row_bytes == 104 >= 2 * 8 * 4 + 4 + 4 + 3 * 4 + 4 * 2 * 8 * 4 / 20
    pool = RowPool(shape, torch.empty(3, 2, 10, shape.row_bytes, dtype=torch.uint8), 3)
    whole = [pool.keys, pool.values, pool.positions, pool.scores, pool.stats, pool.queries]
    assert sum(x.nbytes for x in whole) <= 3 * shape.nbytes
    pages = []
    for page in range(3):
        rows = BoundedLayer(Layout(7 + page), Plain(), statistics=page, recent=page % 2 + 1)
        pool.bind(page, rows)
        pages.append(rows)
    for page, rows in enumerate(pages):
        for x in (rows.codec.keys, rows.codec.values, rows.positions, rows.scores, rows.stats, rows.queries):
            x.fill_(page + 1)
    for page, rows in enumerate(pages):  # nobody wrote into another's
        for x in (rows.codec.keys, rows.codec.values, rows.positions, rows.scores, rows.stats, rows.queries):
            assert (x == page + 1).all()
    with pytest.raises(RuntimeError, match="is invalid for input of size"):
        RowPool(shape, torch.empty(100, dtype=torch.uint8), 3)


@pytest.mark.parametrize(
    ("dtype", "D"), [(torch.float32, 64), (torch.float64, 48), (torch.bfloat16, 96), (torch.float32, 20)]
)
@pytest.mark.parametrize("turned", ["still", "by rank", "by place", "by angle"])
def test_the_compiled_decoding_is_its_definition(dtype, D, turned):
    draw = torch.Generator().manual_seed(5)
    keys, values = (torch.full((1500, D), float("nan")).to(dtype) for _ in range(2))
    starts, lengths = torch.tensor([[0, 1500], [600, 310]]), torch.tensor([[300, 0], [517, 1]])
    for start, length in zip(starts.flatten(), lengths.flatten(), strict=True):
        for x in (keys, values):
            x[start : start + length] = torch.randn(int(length), D, generator=draw).to(dtype)
    q, angle = torch.randn(2, 6, D, generator=draw).to(dtype), torch.randn(600, D // 4, generator=draw)
    tables = [torch.cat((x, x), -1).to(dtype) for x in (angle.cos(), angle.sin())]  # half of the columns are rotated
    place = torch.randint(-50, 600, (1500,), generator=draw)
    turn = {
        "still": None, "by rank": Rotation(*tables), "by place": Rotation(*tables, place),
        "by angle": Angles(angle_steps(angle[0], 517, 1.5), angle_steps(angle[1], 517)),
    }[turned]  # fmt: skip
    arguments = (q, (keys, values), Spans(starts, lengths, 517), 0.3, turn)
    mine, theirs = (form.ragged_decode(*arguments, received=True) for form in (cpu, reference))
    close = {torch.float32: 2e-6, torch.float64: 1e-12, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(mine.out_BQD, theirs.out_BQD, atol=close, rtol=close)
    torch.testing.assert_close(mine.received_BHS, theirs.received_BHS.float(), atol=1e-6, rtol=1e-5)
    assert torch.equal(cpu.ragged_decode(*arguments).out_BQD, mine.out_BQD)
    assert not mine.out_BQD[0, 3:].any()  # a head without rows
    with pytest.raises(TypeError, match="keys is .* side by side"):
        cpu.ragged_decode(q, (keys.T.contiguous().T, values), *arguments[2:])
