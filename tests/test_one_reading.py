"""Several heads from one reading, beside a cache each that reads the prompt by itself in one chunk."""

from __future__ import annotations

import json

import pytest
import torch
from scripts_loaded import load_script
from tiny_models import tiny_model
from tiny_tokenizer import save_tiny_backbone
from torch.nn import functional as F

from locret_kit import BoundedCache, HeadsConfig, RetainingHeads, attach
from locret_kit.backbones.families import spec_of
from locret_kit.backbones.load import load_backbone
from locret_kit.evals.engine.one_reading import given
from locret_kit.evals.engine.rows import read_rows
from locret_kit.runtime.session import prefill

TAIL = 6


def made(n: int = 2, family: str = "llama") -> tuple:
    model = tiny_model(family)
    torch.manual_seed(1)
    heads = [
        RetainingHeads(HeadsConfig.for_backbone(spec_of(model.config), "any", 8, form=form)) for form in ("mlp", "sink")
    ]
    ids = torch.randint(0, 97, (60,)).tolist()
    return model, heads[:n], ids, [5, 17, 33, 60]


@torch.inference_mode()
def alone(model, heads, ids, continuation, budget, policy="locret") -> torch.Tensor:
    """Logits ``[T, V]`` of the continuation through a plain cache, whose first chunk is all that it evicts from."""
    rest = [*ids[-TAIL:], *continuation[:-1]]
    cache = BoundedCache(
        budget - TAIL + len(rest), policy, heads, prompt_length=len(ids) - TAIL + len(rest), chunk=64, stabilizers=0,
        local_len=len(rest), positions="compact",
    ) if heads else None  # fmt: skip
    with attach(model):
        if cache is None:
            return model(torch.tensor([[*ids, *continuation[:-1]]])).logits[0, -len(continuation) :]
        prefill(model, ids[:-TAIL], cache)
        assert {rows.rows for rows in cache.bounded if rows.window is None} == {budget - TAIL}
        step = torch.tensor([rest])
        return model(input_ids=step, past_key_values=cache, use_cache=True, logits_to_keep=len(continuation)).logits[0]


@pytest.mark.parametrize(
    ("family", "policy"),
    [
        ("llama", "locret"), ("llama", "lookahead-locret"), ("llama", "locret(decay=0.01,lookahead=2,sinks=3)"),
        ("gemma3", "locret"), ("gemma3", "lookahead-locret"),
    ],
)  # fmt: skip
def test_it_is_each_cache_alone(family, policy):
    model, heads, ids, continuation = made(family=family)
    found = list(given(model, heads, ids, continuation, [16, 30], TAIL, policy))
    assert [(one.heads, one.budget) for one in found] == [(None, 0), (0, 16), (0, 30), (1, 16), (1, 30)]
    full = alone(model, None, ids, continuation, 0)
    nlls = set()
    for one in found:
        logits = full if one.heads is None else alone(model, heads[one.heads], ids, continuation, one.budget, policy)
        assert one.nll == pytest.approx(F.cross_entropy(logits.float(), torch.tensor(continuation)).item(), rel=1e-4)
        assert one.agreement == (logits.argmax(-1) == full.argmax(-1)).float().mean().item()
        assert one.right == (logits.argmax(-1).tolist() == continuation)
        nlls.add(round(one.nll, 4))
    assert len(nlls) == 5  # none of them is another one


def test_what_full_attention_writes_is_right():
    model, heads, ids, _ = made(1)
    written: list[int] = []
    for _ in range(3):
        written.append(int(model(torch.tensor([[*ids, *written]])).logits[0, -1].argmax()))
    first, evicted = given(model, heads, ids, written, [58], TAIL)
    assert first.right and first.agreement == 1.0
    assert evicted.right == (evicted.agreement == 1.0)


@pytest.mark.parametrize(
    ("budgets", "continuation", "said"),
    [
        ([TAIL], [1], "budget=6 must be above tail=6 and below the prompt's 60 tokens"),
        ([60], [1], "budget=60 must be"),
        ([16], [], "have 6 tokens, and must have at least one and at most 512"),
    ],
)
def test_what_it_cannot_do_is_said(budgets, continuation, said):
    model, heads, ids, _ = made(1)
    with pytest.raises(ValueError, match="must") as error:
        list(given(model, heads, ids, continuation, budgets, TAIL))
    assert said in str(error.value)


@pytest.mark.parametrize("policy", ["h2o", "ada-locret", "pyramid-locret", "merge-locret", "recall", "windowed-locret"])
def test_policies_that_choose_otherwise_are_refused(policy):
    model, heads, ids, _ = made(1)
    with pytest.raises(ValueError, match=f"policy='{policy}' must score by retaining heads alone"):
        list(given(model, heads, ids, [1], [16], TAIL, policy))


def test_windows_alone_are_refused():
    model, ids = tiny_model("mistral-window"), list(range(60))
    with pytest.raises(ValueError, match="every layer of this backbone has a window"):
        list(given(model, [], ids, [1], [16], TAIL))


def test_the_script_measures_once_chooses_and_writes_its_table(tmp_path, capsys, monkeypatch):
    script = load_script("scripts/signals.py")
    backbone = save_tiny_backbone(tmp_path / "backbone")
    spec = spec_of(load_backbone(str(backbone))[0].config)
    names = ["mean@0.1", "mean@0.2", "most@0.1"]
    for i, name in enumerate(names):
        torch.manual_seed(i)
        RetainingHeads(HeadsConfig.for_backbone(spec, str(backbone), 4)).save_pretrained(tmp_path / name)
    text, page = tmp_path / "a.txt", tmp_path / "page.md"
    text.write_text("".join(f"Line {i} of the story tells of {i * 7} ships.\n" for i in range(300)))
    page.write_text(f"Before.\n{script.BEGIN}{script.END}\nAfter.\n")
    words = ["--out", str(tmp_path / "out"), "--ckpt", *(str(tmp_path / name) for name in names[:2])]
    more = ["--haystacks", str(text), "--lengths", "720", "600", "--shares", "4", "8", "--samples", "2"]
    monkeypatch.setattr(script, "TAIL", 24)
    assert script.main([*words, *more]) == 0
    assert len(read_rows(tmp_path / "out")) == 2 * 2 * (1 + 2 * 2)
    assert script.main([*words, str(tmp_path / names[2]), *more]) == 0  # heads that come later
    rows = read_rows(tmp_path / "out")
    assert len(rows) == 2 * 2 * (1 + 3 * 2) and {row.budget for row in rows} == {0, 180, 90, 150, 75}
    capsys.readouterr()
    assert script.main(["--out", str(tmp_path / "out"), "--best", "--against", "mean@0.2", "--write", str(page)]) == 0

    def nats(name: str) -> float:
        mine = [row for row in rows if row.heads == name]
        cells = {(row.task, row.budget) for row in mine}
        return sum(sum(r.scores["nll"] for r in mine if (r.task, r.budget) == cell) / 2 for cell in cells) / len(cells)

    wanted = {min(names[:2], key=nats), names[2]}
    assert set(capsys.readouterr().out.split("\n\n")[0].splitlines()[:2]) == wanted
    made = page.read_text()
    assert made.startswith("Before.\n") and made.endswith("After.\n")
    one, base = (
        [r.scores["nll"] for r in rows if (r.heads, r.budget) == (name, 90)] for name in ("most@0.1", "mean@0.2")
    )
    gap = sum(a - b for a, b in zip(one, base, strict=True)) / 2
    assert f"| {gap:+.3f} ± " in next(line for line in made.splitlines() if line.startswith("| most@0.1"))
    assert "2 prompts of 720 tokens of a.txt; locret; mean" in made
    ahead = "lookahead-locret(lookahead=9)"
    other = [*words, *more, "--policy", ahead, "--against", "mean@0.1"]
    assert script.main(other) == 0  # beside the rows of the first policy
    found = [row for row in read_rows(tmp_path / "out") if row.policy == ahead]
    assert len(found) == 2 * 2 * 2 * 2 and "locret;" not in (said := capsys.readouterr().out) and "most@0.1" not in said
    assert {row.scores["nll"] for row in found}.isdisjoint(row.scores["nll"] for row in rows)


def test_the_script_asks_many_questions_and_what_full_attention_answers(tmp_path, capsys, monkeypatch):
    script = load_script("scripts/signals.py")
    backbone = save_tiny_backbone(tmp_path / "backbone")
    spec = spec_of(load_backbone(str(backbone))[0].config)
    torch.manual_seed(0)
    RetainingHeads(HeadsConfig.for_backbone(spec, str(backbone), 4)).save_pretrained(tmp_path / "any")
    records = tmp_path / "mine.jsonl"
    records.write_text(
        json.dumps({"context": "The ship is red. " * 40, "question": "Which?", "answers": ["red"]}) + "\n"
    )
    monkeypatch.setattr(script, "TAIL", 24)
    words = ["--out", str(tmp_path / "out"), "--ckpt", str(tmp_path / "any"), "--samples", "3", "--shares", "4"]
    asked = ["--tasks", "questions", f"agreement:{records}", str(records), "--lengths", "900", "300", "300"]
    assert script.main([*words, *asked]) == 0
    rows = read_rows(tmp_path / "out")
    found = {task: [row for row in rows if row.task == task] for task in {row.task for row in rows}}
    assert {task: len(mine) for task, mine in found.items()} == {
        "questions": 6,
        "agreement:mine.jsonl": 2,
        "mine.jsonl": 2,
    }
    assert {row.answer for row in found["mine.jsonl"]} == {"red"} and len(
        {row.answer for row in found["questions"]}
    ) == 3
    (full,) = (row for row in found["agreement:mine.jsonl"] if row.policy == "full")
    assert full.scores["agreement"] == 1.0 and 1 < full.new_tokens <= script.NEXT
    assert script.family("agreement:leval.quality") == "agreement:leval"
    assert [script.family(name) for name in found] == list(found)
    for more, said in (
        (["--tasks", "questions"], "lengths=[4096, 2048] must be as many as tasks=['questions']"),
        (
            ["--tasks", f"fidelity:{records}", "--lengths", "300"],
            "is of the kind fidelity, which must be one of answer",
        ),
    ):
        assert script.main([*words, *more]) == 1 and said in capsys.readouterr().err


def test_curves_say_what_was_learned_of_the_same_target(tmp_path, capsys):
    script = load_script("scripts/signal_curves.py")
    curves = {"a@0.1": [1, 2, 3, 5], "a@0.2": [2, 2, 2, 1], "b@0.1": [0, 0, 6, 9], "c@0.1": [1, 1, 4, 4]}
    for name in curves:
        target = {
            "kind": "logit" if name[0] == "c" else "log_mass",
            "queries": "all",
            "window": 4,
            "values": name[0] == "c",
        }
        (tmp_path / name).mkdir()
        (tmp_path / name / "training.json").write_text(json.dumps({"target": target}))
    steps = [",".join(("step", *(f"{name}/recall" for name in curves)))]
    steps += [",".join((str(i), *(f"{one[i] / 10}" for one in curves.values()))) for i in range(4)]
    (tmp_path / "curves.csv").write_text("\n".join(steps) + "\n")
    assert script.main([str(tmp_path), "--last", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()[4:7]
    assert lines[0] == "| log_mass, asked by all, window 4 | b | 0.1 | 0.750 ± 0.150 | - |"
    assert (
        lines[1] == "| log_mass, asked by all, window 4 | a | 0.2 | 0.150 ± 0.050 | -0.600 ± 0.200 |"
    )  # best before, not last
    assert lines[2] == "| logit, asked by all, window 4, times values | c | 0.1 | 0.400 ± 0.000 | - |"
    assert script.main([str(tmp_path), "--last", "3"]) == 1
    assert "last=3 must be at least 2 and at most half of the run's steps" in capsys.readouterr().err
