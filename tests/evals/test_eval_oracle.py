"""kvzip and bm25, which look at the whole prompt first, as policies of an evaluation."""

from pathlib import Path

import pytest
from eval_runs import kept_of
from tiny_tokenizer import save_tiny_backbone

from locret_kit.cli.eval import main
from locret_kit.evals import tasks
from locret_kit.evals.engine import read_rows

BUDGET, TAIL = 48, 8


@pytest.fixture(scope="module")
def backbone(tmp_path_factory) -> Path:
    return save_tiny_backbone(tmp_path_factory.mktemp("tiny") / "backbone")


def words(backbone: Path, out: Path, **more: object) -> list[str]:
    given = {
        "tasks": "[passkey]", "policies": "[kvzip,kvzip(joint=true)]", "budgets": f"[{BUDGET}]",
        "lengths": "[240]", "samples": 1, "model": backbone, "chunk": 32, "stabilizers": 4, "local_len": TAIL, "keep": 2,
        "max_new_tokens": 4, "out": out, **more,
    }  # fmt: skip
    return [f"{key}={value}" for key, value in given.items()]


@pytest.mark.parametrize("chat", ["always", "never"])
def test_kvzip_keeps_its_budget_and_what_follows_the_context(backbone, tmp_path, chat):
    out = tmp_path / "run"
    assert main(words(backbone, out, chat=chat)) == 0
    rows = read_rows(out)
    assert len(rows) == 2 and not any(row.error for row in rows)
    for row in rows:
        assert (row.budget, row.local_len, row.stabilizers, row.prefix_shared) == (BUDGET, TAIL, 0, 0)
        heads = kept_of(out, row)["heads"].astype(int)
        assert (heads.sum(1) == 2 * BUDGET).all() or row.policy == "kvzip(joint=true)"
        assert heads.sum() == 3 * 2 * BUDGET
        assert (heads[:, -TAIL:] == 2).all() and (heads[:, :4] == 2).all()
    assert "| kvzip (unbounded oracle) |" in (out / "summary.md").read_text()


def test_with_room_for_all_it_is_full_attention(backbone, tmp_path, monkeypatch):
    monkeypatch.setattr(tasks, "CONTINUATION", 12)
    out = tmp_path / "run"
    more = {"tasks": "[passkey,perplexity,fidelity.continue]", "positions": "original", "policies": "[full,kvzip,bm25]"}
    assert main(words(backbone, out, budgets="[512]", **more)) == 0
    by_example: dict[tuple, list] = {}
    for row in read_rows(out):
        by_example.setdefault((row.task, row.sample), []).append(row)
    assert len(by_example) == 3
    for others in by_example.values():
        bm25, full, kvzip = sorted(others, key=lambda row: row.policy)
        assert (bm25.slots, bm25.tokens, bm25.prompt_hash) == (512, full.tokens, full.prompt_hash)
        for other in (bm25, kvzip):
            assert full.output == other.output and full.score == pytest.approx(other.score, abs=1e-4)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"budgets": "[12]"}, "policy=kvzip, budget=12: must be above 12: local_len=8 and 4 sinks"),
        ({"kv_bits": 4}, "policy=kvzip stores what it keeps as it is, in one form: leave kv_bits out"),
        ({"tasks": "[perplexity_prefill]"}, "take tasks=[perplexity] instead of perplexity_prefill"),
        ({"one_shot": "true", "chunk": 8}, "--chunk 8 has no effect with --one-shot"),
    ],
)
def test_what_it_cannot_do_is_said_before_anything_is_run(backbone, tmp_path, capsys, more, said):
    out = tmp_path / "run"
    assert main(words(backbone, out, **more)) == 1
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1 and not list(out.glob("rows.*"))


def test_a_prompt_that_is_all_tail_is_an_error_of_its_row(backbone, tmp_path):
    out = tmp_path / "run"
    more = {"tasks": "[perplexity]", "lengths": "[40]", "local_len": 44, "budgets": "[64]", "policies": "[kvzip]"}
    assert main(words(backbone, out, **more)) == 1
    assert [row.error for row in read_rows(out)] == ["ValueError: the prompt's 40 tokens must be above local_len=44"]


def test_full_attention_has_no_bounds_of_a_budget(backbone, tmp_path):
    """More stabilizers than slots by default: the budgets of the run have room for them."""
    more = {"tasks": "[perplexity_prefill]", "policies": "[full,streaming]", "budgets": "[1200]", "stabilizers": 1100}
    assert main(words(backbone, tmp_path / "run", **more)) == 0
