"""The runner: nothing twice, nothing lost, whatever interrupts it."""

import hashlib
import json
import math
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import forked
import pytest
import torch
from eval_runs import figures, kept_of, scores
from small_disk import file_limit
from tiny_heads import save_tiny_heads

from locret_kernels import cpp
from locret_kernels.attend import cpu as attend
from locret_kit.cli.eval import main
from locret_kit.cli.eval_setup import load_parts
from locret_kit.config.eval_options import load_eval_config
from locret_kit.evals.engine import KEY, Row, appending, measure, read_rows
from locret_kit.evals.tasks import _text
from locret_kit.heads import RetainingHeads
from locret_kit.runtime.report import weights_hash
from locret_kit.runtime.session import Answer
from locret_kit.samples.haystack import load_text


@pytest.fixture(scope="module")
def heads(tmp_path_factory) -> Path:
    return save_tiny_heads(tmp_path_factory.mktemp("tiny"))


def words(heads: Path, out: Path, **more: object) -> list[str]:
    settings = {
        "tasks": "[passkey,perplexity_prefill]", "policies": "[full,locret,streaming(sinks=2)]", "budgets": "[32]",
        "lengths": "[240]", "samples": 2, "haystacks": "[jargon]", "ckpt": heads, "max_new_tokens": 4, "out": out, **more,
    }  # fmt: skip
    return [f"{key}={value}" for key, value in settings.items()]


def lines(out: Path) -> list[dict]:
    return [json.loads(line) for path in sorted(out.glob("rows.*.jsonl")) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(heads, tmp_path_factory) -> Path:
    """An uninterrupted run; a length that is given twice is run once."""
    out = tmp_path_factory.mktemp("whole") / "run"
    assert main(words(heads, out, lengths="[240,240]")) == 0
    return out


def test_a_run_writes_rows_and_summary(finished, heads):
    rows = read_rows(finished)
    assert len(rows) == 2 * 2 * (1 + 2) == len(lines(finished))
    assert {row.error for row in rows} == {None}
    assert {row.heads for row in rows} == {"-", "heads"} and {row.label for row in rows} == {
        "full", "locret (heads)", "streaming(sinks=2)",
    }  # fmt: skip
    one = next(row for row in rows if row.policy == "locret" and row.budget == 32 and row.task == "R.PassKey")
    assert (one.chunk, one.stabilizers, one.local_len, one.positions) == (32, 4, 4, "compact")  # as locret-infer scales
    assert one.tokens <= 240 and one.new_tokens <= 4 and one.prefill_s > 0 and one.versions["locret_kit"]
    assert (one.backend, one.adapter, one.heads_hash) == (
        "cpu" if cpp.runs(attend.SOURCE) else "reference", None, weights_hash(RetainingHeads.from_pretrained(heads)),
    )  # fmt: skip
    text = hashlib.sha256(load_text("jargon").encode()).hexdigest()[:16]
    assert {row.text_hash for row in rows} == {text}
    hashes = {(row.task, row.sample): set() for row in rows}
    for row in rows:
        hashes[row.task, row.sample].add(row.prompt_hash)
    assert all(len(found) == 1 for found in hashes.values())  # the same prompt for every policy
    assert len({next(iter(found)) for found in hashes.values()}) == 4
    table = (finished / "summary.md").read_text()
    assert "**R.PassKey, haystack: jargon** (match;" in table and "| full | " in table and "(n=2)" in table
    assert (finished / "summary.csv").read_text().count("\n") == 1 + 2 * 3
    assert table.startswith("**All tasks**") and table.count("| 240 | 32 | locret (heads) |") == 1
    assert (finished / "report.html").stat().st_size > 10_000 and list((finished / "figures").glob("*.svg"))


def test_a_rerun_does_nothing_and_a_longer_one_what_is_missing(finished, heads, tmp_path):
    out = tmp_path / "run"
    assert main(words(heads, out, samples=1)) == 0
    first = lines(out)
    assert main(words(heads, out, samples=1)) == 0
    assert lines(out) == first
    assert main(words(heads, out)) == 0
    assert len(lines(out)) == len(first) + 6 and lines(out)[: len(first)] == first
    assert figures(out) == figures(finished)


def question(name: str, *answers: str) -> dict:
    return {"context": "A text.", "question": f"Who is {name}?", "answers": list(answers or ["A baker."])}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda asked: [asked[0], question("Ben", "A baker.", "Ben")],
         "sample=1: the answer is ['A baker.', 'Ben'], and was ['A baker.'] for the rows: choose another out"),
        (lambda asked: [asked[0], question("Dan")], "sample=1: the prompt differs from that of the rows"),
        (lambda asked: asked[:1], "mine.jsonl has 1 examples now, and the rows have sample=1: choose another out"),
    ],
    ids=["answer", "question", "fewer"],
)  # fmt: skip
def test_a_rerun_over_a_changed_file_of_questions_is_refused(heads, tmp_path, capsys, change, said):
    """Though no row is missing: the table would show the scores of other answers, or still count what is gone."""
    file, out, asked = tmp_path / "mine.jsonl", tmp_path / "run", [question("Ann"), question("Ben")]
    given = words(heads, out, tasks=f"[{file},agreement:{file}]", policies="[full]", samples=2)
    file.write_text("".join(json.dumps(record) + "\n" for record in asked))
    assert main(given) == 0 and main(given) == 0
    before = lines(out)
    file.write_text("".join(json.dumps(record) + "\n" for record in change(asked)))
    capsys.readouterr()
    assert main(given) == 1 and lines(out) == before and said in capsys.readouterr().err
    # All that it asks for are there.
    assert main(words(heads, out, tasks=f"[{file}]", policies="[full]", samples=1)) == 0


def test_folders_by_a_relative_path_have_their_names(heads, tmp_path, monkeypatch):
    """Rows would name neither the text nor the heads, and mix those of several folders."""
    (tmp_path / "boats").mkdir()
    (tmp_path / "boats" / "boats.txt").write_text("The boats came in. Nobody saw them before noon. " * 200)
    (tmp_path / "mine").symlink_to(heads)
    monkeypatch.chdir(tmp_path / "boats")
    given = words(
        Path("../mine/."), tmp_path / "run", tasks="[passkey]", policies="[locret]", haystacks="[.]", samples=1
    )
    assert main(given) == 0
    assert [(row.haystack, row.heads) for row in read_rows(tmp_path / "run")] == [("boats", "mine")]
    monkeypatch.chdir(tmp_path / "mine")
    assert {*load_parts(load_eval_config(["tasks=[passkey]", "out=x", "ckpt=."])).heads} == {heads.name}


def test_a_text_whose_name_is_no_utf8_has_a_summary(heads, tmp_path, capsys):
    text = tmp_path / os.fsdecode(b"boats\xff.txt")
    text.write_text("The boats came in. Nobody saw them before noon. " * 200)
    given = words(heads, tmp_path / "run", tasks="[passkey]", policies="[full]", haystacks=f"[{text}]", samples=1)
    assert main(given) == 0 and main(given) == 0 and len(lines(tmp_path / "run")) == 1
    assert r"R.PassKey, haystack: boats\udcff.txt" in capsys.readouterr().out


def test_kill_and_rerun_gives_the_same_summary(finished, heads, tmp_path, monkeypatch):
    """Killed (SIGKILL) after some rows, with half a line left behind."""
    out = tmp_path / "run"
    shard = out / "rows.0.jsonl"

    @contextmanager
    def pausing(path: Path) -> Iterator[Callable[[Row], None]]:
        with appending(path) as append:

            def then_wait(row: Row) -> None:  # two rows later, so that the run cannot end before it is killed
                append(row)
                if shard.read_bytes().count(b"\n") == 5:
                    signal.pause()

            yield then_wait

    with monkeypatch.context() as patch:
        patch.setattr("locret_kit.evals.engine.runner.appending", pausing)
        child = forked.start(lambda: main(words(heads, out)), tmp_path / "log")
    while not shard.exists() or shard.read_bytes().count(b"\n") < 3:
        time.sleep(0.005)
        assert os.waitpid(child, os.WNOHANG) == (0, 0), (tmp_path / "log").read_text()
    os.kill(child, signal.SIGKILL)
    assert forked.status_of(child) == -signal.SIGKILL
    before = shard.read_bytes()
    assert before.count(b"\n") >= 3
    with shard.open("ab") as file:
        file.write(b'{"task": "R.PassKey", "hays')
    assert len(read_rows(out)) == before.count(b"\n")
    assert main(words(heads, out)) == 0
    keys = [tuple(row[name] for name in KEY) for row in lines(out)]
    assert len(keys) == len(set(keys)) == 12
    assert figures(out) == figures(finished) and scores(out) == scores(finished)


def test_two_writers_of_one_shard_are_refused(tmp_path):
    twice = appending(tmp_path / "rows.0.jsonl"), appending(tmp_path / "rows.0.jsonl")
    with twice[0], pytest.raises(OSError, match="is being written by another process"), twice[1]:
        pass


def test_a_crash_is_a_row_and_the_run_goes_on(heads, tmp_path, monkeypatch, capsys):
    out = tmp_path / "run"

    class FailsOnce(Answer):
        def __init__(self, model, tokenizer, ids, cache, **rest):
            if cache.policy.name == "locret" and cache.schedule.budget == 32:
                raise torch.OutOfMemoryError("no room\nfor this")
            super().__init__(model, tokenizer, ids, cache, **rest)

    monkeypatch.setattr(measure, "Answer", FailsOnce)
    assert main(words(heads, out, tasks="[passkey]")) == 1
    assert "2 examples ended with an error" in capsys.readouterr().err
    bad = [row for row in read_rows(out) if row.error]
    assert len(bad) == 2 and {row.error for row in bad} == {"OutOfMemoryError: no room"}
    assert {(row.policy, row.budget, row.score) for row in bad} == {("locret", 32, None)}
    assert "- (n=0, 2 failed)" in (out / "summary.md").read_text()
    monkeypatch.setattr(measure, "Answer", Answer)
    assert main(words(heads, out, tasks="[passkey]")) == 0
    assert not any(row.error for row in read_rows(out)) and len(read_rows(out)) == 6


def test_a_text_that_is_cut_is_told_once(heads, tmp_path, capsys):
    """Questions about what was cut cannot be answered, and the default of ``lengths`` is 4,096 tokens."""
    questions, texts = tmp_path / "mine.jsonl", {"instructions": ["Who?"] * 2, "outputs": ["No one."] * 2}
    questions.write_text(json.dumps({"input": "The boats came in. " * 200, **texts}) + "\n")
    for length, told in ((300, 1), (4000, 0)):
        named = {"tasks": f"[{questions}]", "policies": "[full,streaming]", "budgets": "[32]", "lengths": f"[{length}]"}
        assert main(words(heads, tmp_path / str(length), **named)) == 0
        said = re.findall(r"warning: (.*): (\d+) of the prompt's \d+ tokens were cut out", capsys.readouterr().err)
        assert len(said) == told and all(name == "mine.jsonl" and int(cut) > 100 for name, cut in said)


@pytest.mark.parametrize(("task", "length", "said"), [
    ("reconstruction", 200, "length=200 is too short for a quotation"),
    ("perplexity_prefill", 1, "a prompt of one token has no token whose likelihood is known"),
])  # fmt: skip
def test_a_prompt_that_is_too_short_is_an_error_of_every_policy(heads, tmp_path, task, length, said):
    out = tmp_path / "run"
    assert main(words(heads, out, tasks=f"[{task}]", lengths=f"[{length}]", samples=1)) == 1
    rows = read_rows(out)
    assert len(rows) == 3 and all(f"ValueError: {said}" in row.error for row in rows)


def test_what_json_cannot_say_is_an_error_and_the_run_goes_on(heads, tmp_path, monkeypatch):
    """A score that is not finite, and half a surrogate pair, which the file and the page hold as it is."""
    out, metric = tmp_path / "run", measure.get_metric

    class WithHalfAPair(Answer):
        def __str__(self):
            return super().__str__() + "\ud83d"

    def sometimes_nan(name):
        return lambda text, answer, extra: {**metric(name)(text, answer, extra), "match": next(scores)}

    scores = iter([math.nan, 1.0, math.inf, 0.5])
    monkeypatch.setattr(measure, "Answer", WithHalfAPair)
    monkeypatch.setattr(measure, "get_metric", sometimes_nan)
    assert main(words(heads, out, tasks="[passkey]", policies="[locret]", samples=4)) == 1
    rows = read_rows(out)
    assert sorted((row.score, row.error) for row in rows if not row.error) == [(0.5, None), (1.0, None)]
    said = sorted(row.error for row in rows if row.error)
    assert [one.split(",")[0] for one in said] == ["ValueError: no JSON: score=inf", "ValueError: no JSON: score=nan"]
    assert all(row.output.endswith("\ud83d") and row.prompt_hash for row in rows)
    assert "(n=2, 2 failed)" in (out / "summary.md").read_text()


def test_a_full_disk_stops_the_run_and_loses_nothing(heads, finished, tmp_path, capsys):
    out, sizes = tmp_path / "run", [len(line) for line in (finished / "rows.0.jsonl").read_bytes().splitlines()]
    with file_limit(sum(sizes[:4]) + sizes[4] // 2):  # a disk that fills up takes a part
        assert main(words(heads, out)) == 1
    assert "rows.0.jsonl: File too large; finished examples are safe" in capsys.readouterr().err
    assert len(read_rows(out)) == 4 and (out / "rows.0.jsonl").read_bytes().endswith(b"}\n")


def test_a_full_disk_while_kept_tokens_are_stored_is_no_example_s_fault(heads, finished, tmp_path, monkeypatch, capsys):
    """It once became an error row, which the rerun that the message asks for left as it was."""
    out, store = tmp_path / "run", measure.write_beside

    def full(path, write):
        if path.parent.name == "kept" and len(list(path.parent.glob("*.npz"))) == 2:
            raise OSError(f"cannot write {path} (0 MiB free): No space left on device")
        store(path, write)

    monkeypatch.setattr(measure, "write_beside", full)
    assert main(words(heads, out, keep=1)) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert "No space left on device; finished examples are safe, run again to go on" in said
    assert not any(row.error for row in read_rows(out))
    monkeypatch.setattr(measure, "write_beside", store)
    assert main(words(heads, out, keep=1)) == 0
    assert scores(out) == scores(finished) and len(list((out / "kept").glob("*.npz"))) == 3  # of the pass keys


def test_fidelity_is_measured_against_full_attention(heads, tmp_path):
    out = tmp_path / "run"
    more = {"tasks": "[fidelity.continue]", "max_new_tokens": 12, "samples": 2}
    assert main(words(heads, out, policies="[locret]", budgets="[32,512]", positions="original", **more)) == 0
    rows = read_rows(out)
    full = {row.sample: row for row in rows if row.policy == "full"}  # not asked for: it is the reference
    assert len(full) == 2 and all(row.scores["same"] == row.score == 1 for row in full.values())
    for row in rows:
        assert row.answer == full[row.sample].output
        if row.budget == 512:  # longer than the prompt: the same text
            assert row.output == row.answer and row.scores["bleu"] == 1
    assert {"rougeL", "rouge1", "rouge2", "bleu", "same"} < set(rows[0].scores)
    reference = {sample: row.output for sample, row in full.items()}
    assert main(words(heads, out, policies="[full,recency]", positions="original", **more)) == 0
    rows = read_rows(out)
    assert len(rows) == 2 * 4 and all(row.answer == reference[row.sample] for row in rows)


def test_agreement_is_measured_on_full_attention_s_own_tokens(heads, tmp_path):
    out = tmp_path / "run"
    more = {"tasks": "[agreement:fidelity.continue]", "max_new_tokens": 12, "samples": 2, "positions": "original"}
    assert main(words(heads, out, policies="[full,locret]", budgets="[32,512]", **more)) == 0
    rows = read_rows(out)
    full = {row.sample: row for row in rows if row.policy == "full"}
    assert len(rows) == 6 and {row.metric for row in rows} == {"agreement"} and not any(row.error for row in rows)
    for row in rows:
        own = full[row.sample]
        assert row.answer == own.answer and row.score == row.scores["agreement"]
        if row.budget == 512:  # longer than the prompt: the same choices
            assert row.score == own.score == 1 and math.isclose(row.scores["nll"], own.scores["nll"], rel_tol=1e-4)
        elif row.budget == 32:
            assert row.scores["nll"] > own.scores["nll"]


def test_what_is_kept_is_stored_for_the_first_examples(heads, tmp_path):
    out = tmp_path / "run"
    assert main(words(heads, out, tasks="[passkey]", keep=1)) == 0
    rows = read_rows(out)
    assert {row.kept is not None for row in rows if row.sample == 0} == {True}
    assert {row.kept for row in rows if row.sample > 0} == {None}
    for row in rows:
        if row.kept:
            kept = kept_of(out, row)
            assert len(kept["ids"]) == row.tokens and kept["heads"].shape == (3, row.tokens) and kept["n_heads"] == 2
            wanted = row.tokens if row.policy == "full" else 32
            assert (kept["heads"].astype(int).sum(1) == 2 * wanted).all()
    assert main(words(heads, out, tasks="[passkey]", keep=2)) == 0
    assert read_rows(out) == rows  # none is done again, so the advice is another folder


def test_what_is_missing_is_said_before_the_first_example(heads, tmp_path, monkeypatch, capsys):
    """Without matplotlib a run has rows and no page."""
    monkeypatch.setattr("locret_kit.cli.eval.find_spec", lambda name: None)
    out = tmp_path / "run"
    assert main(words(heads, out, tasks="[passkey]", policies="[locret]", samples=1)) == 0
    before, said = capsys.readouterr().err.split("R.PassKey", 1)
    assert "no figures and no page without matplotlib: in the clone, pip install -e" in before
    assert (out / "summary.md").exists() and "the page is" not in said


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"tasks": "[paskey]"}, "task='paskey' is unknown. Did you mean 'passkey'? locret-eval tasks lists all."),
        ({"budgets": "[4]", "stabilizers": 8}, "budget=4: stabilizers=8 must be below budget=4"),
        ({"chat": "alway"}, "chat=alway must be one of: auto, always, never. Did you mean 'always'?"),
        ({"haystacks": "[missing.txt]"}, "source=missing.txt must be"),
        ({"ckpt": "[]"}, "give ckpt=PATH"),
        ({"tasks": ""}, "tasks is empty"),
    ],
)
def test_errors_are_one_line_and_leave_nothing(heads, tmp_path, capsys, monkeypatch, more, said):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    out = tmp_path / "run"
    assert main(words(heads, out, **more)) == 1
    err = capsys.readouterr().err
    assert said in err and err.startswith("locret-eval: ") and err.count("\n") == 1
    assert not out.exists()


@pytest.mark.parametrize("text", ["null", "{broken"])
def test_a_damaged_configuration_is_one_line(heads, finished, tmp_path, capsys, text):
    """A rerun once ended with a traceback."""
    (tmp_path / "rows.0.jsonl").write_bytes((finished / "rows.0.jsonl").read_bytes())
    (tmp_path / "config.json").write_text(text)
    assert main(words(heads, tmp_path)) == 1
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and "config.json" in said[0], said


def test_a_folder_knows_its_heads_by_their_weights(heads, tmp_path, capsys):
    """Another checkpoint may come in; one that has changed may not, unless it has no row yet."""
    out, mine, other = tmp_path / "run", tmp_path / "mine", tmp_path / "other"
    few = {"tasks": "[perplexity_prefill]", "policies": "[full,locret]", "samples": 1}
    changed = RetainingHeads.from_pretrained(heads)
    changed.layers[0].fc1.weight.data[0, 0] += 1
    for folder in (mine, other):
        changed.save_pretrained(folder)
    assert main(words(mine, out, **few | {"policies": "[full]"})) == 0
    RetainingHeads.from_pretrained(heads).save_pretrained(mine)
    assert main(words(mine, out, **few)) == 0
    assert main(words(f"[{mine},{other}]", out, **few)) == 0
    rows = {row.heads: row for row in read_rows(out)}
    assert rows.keys() == {"-", "mine", "other"}
    hashes = {name: row.heads_hash for name, row in rows.items()}
    assert hashes["-"] == "" and len({*hashes.values()}) == 3
    assert hashes["mine"] == weights_hash(RetainingHeads.from_pretrained(mine)) and len(hashes["mine"]) == 16
    written = json.loads((out / "config.json").read_text())
    assert written["heads"]["other"]["weights"] == hashes["other"] and written["model"] == rows["-"].model
    assert main(words(mine, out, **few)) == 0 and set(json.loads((out / "config.json").read_text())["heads"]) == {
        "mine", "other",
    }  # fmt: skip
    changed.save_pretrained(mine)
    capsys.readouterr()
    assert main(words(mine, out, **few)) == 1
    said = f"holds rows of heads mine with weights={hashes['mine']}, not weights={hashes['other']}: choose another out"
    assert said in capsys.readouterr().err


def test_a_change_far_from_the_first_prompt_is_noticed(heads, tmp_path, capsys):
    """Before any row is written, which no table could hold beside the others."""
    text, out = tmp_path / "text.txt", tmp_path / "run"
    more = {"haystacks": f"[{text}]", "tasks": "[perplexity_prefill]", "policies": "[streaming]", "budgets": "[32]"}
    pages = "\n".join(f"Page {n} tells of the harbour and of {n} boats that came in before noon." for n in range(400))
    for n, changed in enumerate((pages, pages.replace("Page 0 ", "Leaf 0 "), pages.replace("Page 399 ", "Leaf 399 "))):
        text.write_text(changed)  # at least one of both pages is not in the prompt, of some ten lines
        _text.cache_clear()
        assert main(words(heads, out, samples=1 + bool(n), **more)) == bool(n)
        assert (" differs from that of the rows" in capsys.readouterr().err) == bool(n)
    assert len(lines(out)) == 1


def test_settings_are_those_of_each_heads(heads, tmp_path, capsys):
    one, other, out = heads, tmp_path / "other", tmp_path / "run"
    config = RetainingHeads.from_pretrained(heads).config
    inference = {"budget": 64, "chunk": 16, "stabilizers": 16, "local_len": 4, "positions": "compact"}
    RetainingHeads(replace(config, inference=inference)).save_pretrained(other)
    few = {"ckpt": f"[{one},{other}]", "tasks": "[passkey]", "samples": 1}
    assert main(words(heads, out, policies="[full,locret]", **few)) == 0
    assert {row.heads: (row.chunk, row.stabilizers, row.local_len) for row in read_rows(out) if row.budget} == {
        "heads": (32, 4, 4), "other": (16, 8, 2),
    }  # fmt: skip
    capsys.readouterr()
    assert main(words(heads, out, policies="[h2o]", **few)) == 1
    assert "policy=h2o: the checkpoints have chunk=16 and 32: give chunk=..." in capsys.readouterr().err


def test_settings_are_remembered_before_a_backbone_is_loaded(heads, finished, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("locret_kit.backbones.load.load_backbone", lambda *given, **rest: pytest.fail("it was loaded"))
    assert main(words(heads, finished, seed=1)) == 1
    assert "holds rows with seed=0, not seed=1: choose another out" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main(words(heads, tmp_path / "file" / "run")) == 1
    assert main(words(heads, tmp_path / "file")) == 1
    assert "file is no folder" in capsys.readouterr().err


def test_a_length_that_a_task_cannot_have_ends_the_run_before_it_begins(heads, tmp_path, capsys):
    for task in ("R.KV", "passkey"):
        assert main(words(heads, tmp_path / "run", tasks=f"[perplexity_prefill,{task}]", lengths="[240,30]")) == 1
        (line,) = capsys.readouterr().err.splitlines()
        name = {"passkey": "R.PassKey"}.get(task, task)
        said = rf"locret-eval: task={name}: length=30 must be at least (\d+) for .* shortest prompt"
        least = int(re.fullmatch(said, line)[1])
        assert not list((tmp_path / "run").glob("rows.*.jsonl"))
    made = words(heads, tmp_path / "run", tasks="[passkey]", lengths=f"[{least + 8}]", policies="[full]", samples=1)
    assert main(made) == 0
