"""What is validated on is never trained on; records come in whole epochs, wherever a run was stopped."""

import json
import os
import random
from collections import Counter
from itertools import count, islice
from pathlib import Path

import datasets
import pytest
from equal_runs import same_run
from forked import start, status_of
from tiny_tokenizer import tiny_tokenizer
from torch.utils.data import DataLoader
from word_grams import grams

from locret_kit.cli.train import main
from locret_kit.config.train_options import DataConfig
from locret_kit.samples import Sample, encode_chat
from locret_kit.samples import records as records_module
from locret_kit.samples.haystack import load_text
from locret_kit.samples.records import read_records, to_messages
from locret_kit.samples.synthetic import FACTS, HELD_FACTS, WORDS, make_fact
from locret_kit.training import data as data_module
from locret_kit.training.data import SampleModule, Samples, Share
from locret_kit.training.module import HeadTraining

TOKENIZER = tiny_tokenizer()


def document(number: int, length: int = 30) -> str:
    """A text whose words no other document has."""
    return " ".join(f"w{number}x{i}" for i in range(length))


def record(number: int, question: str = "What is it?") -> dict:
    return {"context": document(number), "question": question, "answer": f"It is {number}."}


def jsonl(path: Path, records: list[dict]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def samples_of(*sources: str, seed: int = 0, **settings) -> Samples:
    return Samples(DataConfig(sources=list(sources), max_tokens=400, **settings), TOKENIZER, seed=seed)


def said(sample: Sample) -> str:
    """A sample's text without the chat template's."""
    return TOKENIZER.decode(sample.ids).replace("<|im_start|>", "\n").replace("<|im_end|>", "\n")


def number_of(sample: Sample) -> int:
    """Of the document that a sample shows."""
    return int(said(sample).split("w", 1)[1].split("x")[0])


# ---- nothing of it is trained on ------------------------------------------------------------------------------------------


def test_synthetic_training_shares_no_13_words_with_validation():
    """pydoc says a third to a half of a stretch again elsewhere, so cutting the stretch out is not enough."""
    samples = samples_of("synthetic", val_samples=20)
    held, trained = set(), set()
    for sample in samples.held:
        held |= grams(said(sample))
    for text in [*samples.sources["synthetic"].texts, *(said(samples[i]) for i in range(15))]:
        trained |= grams(text)
    assert len(samples.held) == 20 and len(held) > 1000 and len(trained) > 30_000
    assert not held & trained
    whole = load_text("pydoc")
    assert 0.7 < len(samples.sources["synthetic"].texts[0]) / len(whole) < 0.9


def test_wordings_of_validation_are_its_own():
    for mine, theirs in (
        (FACTS, HELD_FACTS), *((WORDS[name], WORDS[f"held_{name}"]) for name in ("prompts", "sentences", "quotes")),
    ):  # fmt: skip
        assert len(set(mine)) == len(mine) and not set(mine) & set(theirs)
    for i in (1, 2, 3):
        assert not {fact[i] for fact in FACTS} & {fact[i] for fact in HELD_FACTS}, "statement, question, answer"
    rng, seen = random.Random(0), set()
    for _ in range(300):
        fact = make_fact(rng, HELD_FACTS)
        assert fact.value in fact.statement and "{" not in fact.statement + fact.question + fact.prefix
        seen.add(fact.prefix.split()[-1])
    assert len(seen) > 10
    assert all(prompt.count("{c}") == 1 and "{q}" in prompt for prompt in WORDS["held_prompts"])


def test_no_document_of_validation_is_in_a_whole_epoch(tmp_path):
    """A third of the documents have three records each, in two files; the file's first copies must not come back."""
    many = [record(n, f"Question {q}, please?") for n in range(0, 30, 3) for q in range(3)]
    first = jsonl(tmp_path / "first.jsonl", [record(n) for n in range(30)])
    second = jsonl(tmp_path / "second.jsonl", many + [record(n) for n in range(100, 120)])
    samples = samples_of(first, second, val_samples=10)
    held = [number_of(sample) for sample in samples.held]
    assert len(set(held)) == len(held) == 10, "no document twice"
    trained = Counter()
    for source in (first, second):
        part = samples.sources[source]
        trained.update(number_of(part[place]) for place in range(len(part.trained)))
    assert not set(held) & set(trained)
    assert set(trained) == {*range(30), *range(100, 120)} - set(held)


def test_a_text_shares_nothing_with_records_that_were_set_aside(tmp_path, monkeypatch):
    monkeypatch.setattr("locret_kit.samples.synthetic.REPETITIVE", 0.0)
    text = tmp_path / "text.txt"
    text.write_text("\n".join(document(n) + "." for n in range(40)))
    source = jsonl(tmp_path / "records.jsonl", [record(n) for n in range(40)])
    samples = samples_of("synthetic", source, val_samples=8, texts=[str(text)])
    (left,) = samples.sources["synthetic"].texts
    stretched = set(range(40)) - {n for n in range(40) if document(n) in left}
    held = {number_of(sample) for sample in samples.held[4:]}
    assert held < stretched and len(stretched) < 20
    part = samples.sources[source]
    assert {number_of(part[place]) for place in range(len(part.trained))} == set(range(40)) - stretched


def test_val_samples_0_sets_nothing_aside(tmp_path):
    source = jsonl(tmp_path / "records.jsonl", [record(0), record(0), record(1)])
    samples = samples_of(source, "synthetic", val_samples=0)
    assert samples.held == [] and samples.sources["synthetic"].texts == [load_text("pydoc")]
    assert sorted(number_of(samples.sources[source][place]) for place in range(3)) == [0, 0, 1]


@pytest.mark.parametrize(
    ("records", "most", "said"),
    [
        ([record(n) for n in range(4)], 3, "a text"),
        ([record(0), record(1), record(2), *[{"context": document(n)} for n in range(3, 9)]], 2, "a text"),
        (
            [record(0, f"Question {q}?") for q in range(20)],
            0,
            "19 of 20 records repeat the text of others, .* 0 trains on all",
        ),
    ],
)
def test_more_validation_than_can_be_set_aside_is_one_line(tmp_path, records, most, said):
    source = jsonl(tmp_path / "few.jsonl", records)
    words = rf"data\.val_samples={most + 1} sets {most + 1} samples of '.*few\.jsonl' aside, where at most {most} can be: {said}"
    with pytest.raises(ValueError, match=words):
        samples_of(source, val_samples=most + 1)
    assert len(samples_of(source, val_samples=most).held) == most


def test_questions_about_few_texts_are_set_aside_text_by_text(tmp_path, capsys):
    """Records with one question each, and one with all of them; the rest of the validated text is not trained on."""
    source = jsonl(tmp_path / "records.jsonl", [record(n, f"Question {q}?") for q in range(10) for n in range(3)])
    asked = {"instructions": [f"Question {q}?" for q in range(10)], "outputs": ["It."] * 10}
    whole = jsonl(tmp_path / "whole.jsonl", [{"input": document(n), **asked} for n in range(3)])
    capsys.readouterr()
    for file, each, said in (
        (source, 10, "2 of 30 records are not trained on: validation has their text\n"),
        (whole, 1, ""),
    ):
        samples = samples_of(file, val_samples=8)
        part, held = samples.sources[file], Counter(number_of(sample) for sample in samples.held)
        assert list(held.values()) == [8] and len({sample.ids for sample in samples.held}) == 8
        trained = Counter(number_of(part[place]) for place in range(len(part.trained)))
        assert trained == dict.fromkeys({0, 1, 2} - held.keys(), each)
        assert capsys.readouterr().err.endswith(said)


def test_slices_of_one_text_that_overlap_are_validated_and_trained_on(tmp_path):
    """41 slices, each of which shares more than half of its grams with the two beside it, and some with eight."""
    words = [f"w{i // 10}x{i}" for i in range(450)]
    rows = [{"context": " ".join(words[10 * n : 10 * n + 50]), "question": "Who?", "answer": "It."} for n in range(41)]
    source = jsonl(tmp_path / "slices.jsonl", rows)
    samples = samples_of(source, val_samples=8)
    held = {number_of(sample) for sample in samples.held}
    known = set().union(*(grams(rows[n]["context"]) for n in held))
    part = samples.sources[source]
    trained = {number_of(part[place]) for place in range(len(part.trained))}
    assert len(held) == 8 and len(trained) > 20
    assert all(len(grams(rows[n]["context"]) & known) <= len(grams(rows[n]["context"])) / 2 for n in trained)


def test_a_source_whose_texts_another_has_set_aside_is_one_line(tmp_path):
    first = jsonl(tmp_path / "first.jsonl", [record(1), record(2)])
    lines = [
        jsonl(tmp_path / f"{number}.jsonl", [record(number, f"What else, {i}?") for i in range(4)]) for number in (1, 2)
    ]
    for second in lines:  # the text of one is set aside, that of the other is needed for training
        with pytest.raises(
            ValueError, match="sets 1 samples of '.*' aside, where at most 0 can be: 3 of 4 records repeat"
        ):
            samples_of(first, second, val_samples=2)


def test_a_text_that_cannot_be_split_is_one_line(tmp_path):
    (tmp_path / "line.txt").write_text("one line " * 40)
    (tmp_path / "same.txt").write_text("The same few words, over and over, for ever and a day, to the end.\n" * 200)
    for name, said in (("line", "is too short, or one line, for "), ("same", "has nothing left to train on: ")):
        with pytest.raises(ValueError, match=rf"data\.texts: '.*{name}\.txt' {said}.*data\.val_samples=8"):
            samples_of("synthetic", texts=[str(tmp_path / f"{name}.txt")])


def test_settings_without_effect_are_said(tmp_path, capsys):
    (tmp_path / "code.py").write_text("class Alone(Exception):\n    pass\n")
    source = jsonl(tmp_path / "records.jsonl", [record(n) for n in range(4)])
    for sources, idle in (
        ((source,), ["texts", "lengths", "split"]),
        ((source, "synthetic"), ["split"]),
        ((source, f"code({tmp_path})"), ["texts", "split"]),
    ):
        capsys.readouterr()
        samples_of(*sources, val_samples=0, texts=["jargon"], lengths=[400], split="test")
        said = [line for line in capsys.readouterr().err.splitlines() if "has no effect on data.sources=" in line]
        assert [line.partition("=")[0] for line in said] == [f"warning: data.{setting}" for setting in idle]


# ---- whole epochs ---------------------------------------------------------------------------------------------------------


def test_each_epoch_visits_each_record_once_in_an_order_of_the_seed_alone(tmp_path):
    source = jsonl(tmp_path / "records.jsonl", [record(n) for n in range(23)])
    (tmp_path / "elsewhere").mkdir()
    elsewhere = jsonl(tmp_path / "elsewhere" / "named.jsonl", [record(n) for n in range(23)])
    samples = samples_of(source, val_samples=3)
    rest = set(range(23)) - {number_of(sample) for sample in samples.held}
    order = [number_of(samples[i]) for i in range(60)]
    epochs = [order[at : at + 20] for at in (0, 20, 40)]
    assert all(len(epoch) == len(set(epoch)) and set(epoch) == rest for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    again, other = samples_of(elsewhere, val_samples=3), samples_of(source, seed=1, val_samples=3)
    # Neither of the path nor of what was asked before.
    assert [number_of(again[i]) for i in reversed(range(60))] == order[::-1]
    assert [number_of(other[i]) for i in range(60)] != order
    assert [number_of(sample) for sample in again.held] == [number_of(sample) for sample in samples.held]


def test_a_record_is_asked_all_of_its_questions_in_turn(tmp_path):
    asked = {"input": document(0), "instructions": ["a?", "b?", "c?"], "outputs": ["one", "two", "three"]}
    samples = samples_of(jsonl(tmp_path / "records.jsonl", [asked, record(1)]), val_samples=0)
    wanted = [encode_chat(TOKENIZER, to_messages(asked, index=i)) for i in range(3)]
    seen = [samples[i] for i in range(12) if number_of(samples[i]) == 0]
    assert len(seen) == 6 and seen[:3] == seen[3:] and sorted(map(said, seen[:3])) == sorted(map(said, wanted))


def test_a_mixture_takes_each_source_in_epochs_of_its_own(tmp_path):
    sources = [jsonl(tmp_path / f"{i}.jsonl", [record(100 * i + n) for n in range(11)]) for i in (1, 2)]
    samples = samples_of(*sources, val_samples=2, weights=[3.0, 1.0])
    drawn = [number_of(samples[i]) for i in range(120)]
    for i, records in ((1, 9), (2, 11)):
        mine = [n for n in drawn if n // 100 == i]
        assert len(set(mine[:records])) == records and set(mine[:records]) == set(mine[records : 2 * records])
    assert 70 < sum(n < 200 for n in drawn) < 110


# ---- streams --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def streamed(monkeypatch):
    """Sources of any size are read in blocks of 8 records, and those to validate on; the list has the records that were read."""
    read: list[dict] = []

    def counted(*args, **more):
        for row in read_records(*args, **more):
            read.append(row)
            yield row

    monkeypatch.setattr(data_module, "read_records", counted)
    monkeypatch.setattr(data_module, "BLOCK", 8)
    monkeypatch.setattr(data_module, "WHOLE", 0)
    monkeypatch.setattr(records_module, "WHOLE", 0)
    monkeypatch.setattr(records_module, "PIECE", 300)
    return read


def stored(folder: Path, kind: str, rows: list[dict], monkeypatch) -> str:
    """The rows as a source of a kind."""
    if kind == "json":
        (folder / "rows.json").write_text(json.dumps(rows, indent=1))
        return str(folder / "rows.json")
    streamed = datasets.Dataset.from_list(rows).to_iterable_dataset()
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **more: streamed)
    return "lab/streamed"


@pytest.mark.parametrize("kind", ["json", "hub"])
def test_a_stream_is_read_as_steps_need_it_in_whole_epochs(streamed, tmp_path, monkeypatch, capsys, kind):
    """Record 30 cannot be used, those from 31 on are copies of the first block's."""
    rows = [record(n, "What is it?" if n < 31 else "Which?") for n in [*range(31), *range(11)]]
    rows[30]["answer"] = ""
    source = stored(tmp_path, kind, rows, monkeypatch)
    capsys.readouterr()
    samples = samples_of(source, val_samples=3)
    assert len(streamed) == 11
    held = {number_of(sample) for sample in samples.held}
    assert len(held) == 3 and max(held) < 11, "of the first block"
    order = [number_of(samples[i]) for i in range(8)]
    assert len(streamed) == 11 and len(set(order)) == 8 and not set(order) & held
    order += [number_of(samples[i]) for i in range(8, 120)]
    last = len(rows) - 6  # neither what is set aside nor its copies
    for epoch in (order[:last], order[last : 2 * last]):
        assert {*range(30)} - held == set(epoch)
    assert order[:8] != order[last : last + 8] and order[:8] != sorted(order[:8])
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and "is streamed: 11 records are read at a time, as steps need them, and shuffled" in said[0]
    assert "record 30 is left out: " in said[1]
    again, later = samples_of(source, val_samples=3), samples_of(source, val_samples=3)
    assert [number_of(again[i]) for i in reversed(range(0, 120, 7))] == order[::7][::-1]
    assert [number_of(later[i]) for i in range(77, 120)] == order[77:], "as a run that goes on"


def test_ranks_and_workers_share_a_stream(streamed, tmp_path):
    module = samples_of(jsonl(tmp_path / "rows.jsonl", [record(n) for n in range(50)]), val_samples=2)
    seen = []
    for rank in (0, 1):
        share = Share(module, 4, rank, 2, per_step=2)
        steps = iter(DataLoader(share, batch_size=None, sampler=count(), num_workers=2))
        seen += [number_of(sample) for step in islice(steps, 11) for batch in step for sample in batch]
    assert len(set(seen)) == len(seen) == 44
    assert sorted(seen) == sorted(number_of(module[i]) for i in range(4, 48))


def test_a_stream_s_broken_lines_and_useless_blocks_are_named_and_passed(streamed, tmp_path, capsys):
    lines = [json.dumps(record(n)) if n < 10 or n > 40 else json.dumps({"context": "a"}) for n in range(60)]
    lines[50] = "{"
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    samples = samples_of(str(tmp_path / "rows.jsonl"), val_samples=1)
    drawn = [number_of(samples[i]) for i in range(150)]
    assert {*range(41, 60)} - {50} < set(drawn)
    said = capsys.readouterr().err.splitlines()
    assert sum("1 line is left out, the first since" in line and "line 51 is not JSON" in line for line in said) == 1
    assert sum("record 20 is left out: " in line for line in said) == 1


def test_more_validation_than_a_stream_has_is_one_line(streamed, tmp_path):
    source = jsonl(tmp_path / "rows.jsonl", [record(n) for n in range(20)])
    assert len(samples_of(source, val_samples=19).held) == 19
    words = r"data\.val_samples=20 sets 20 samples of '.*' aside, where at most 19 can be: a text"
    with pytest.raises(ValueError, match=words):
        samples_of(source, val_samples=20)


def test_what_is_set_aside_is_the_same_where_the_template_tells_the_time(tmp_path):
    """A run that goes on the next day validates on the same records."""
    telling = tiny_tokenizer()
    telling.chat_template = "{{ strftime_now('%H:%M:%S.%f') }} " + telling.chat_template
    sources = [jsonl(tmp_path / "records.jsonl", [record(n) for n in range(9)]), "synthetic"]
    data = DataConfig(sources=sources, max_tokens=400, val_samples=4)
    first, then = (SampleModule(data, telling, seed=0) for _ in range(2))
    assert first.samples.held != then.samples.held
    then.load_state_dict(first.state_dict())
    assert then.set_aside == 4
    other = SampleModule(data, telling, seed=1)
    other.load_state_dict(first.state_dict())
    assert other.set_aside == 0


# ---- runs -----------------------------------------------------------------------------------------------------------------


def arguments(backbone: Path, out: Path, source: str, *more: str) -> list[str]:
    return [
        "recipe=tiny", f"backbone.model={backbone}", f"out={out}", f"data.sources=[{source}]", "trainer.accelerator=cpu",
        "data.val_samples=3", "heads.dtype_saved=float32", *more,
    ]  # fmt: skip


def test_a_run_killed_inside_an_epoch_goes_on_to_the_same_heads(backbone, tmp_path, monkeypatch, streamed):
    """7 records an epoch, 2 a step: it dies after 5 samples were trained on, and 6 were to be."""
    monkeypatch.setattr(data_module, "BLOCK", 2)
    source = jsonl(tmp_path / "records.jsonl", [record(n) for n in range(10)])
    more = ["optim.steps=8", "optim.accumulate=2", "trainer.save_every=1", "trainer.val_every=4", "resume=auto"]
    whole, part, log = tmp_path / "whole", tmp_path / "part", tmp_path / "log"
    assert main(arguments(backbone, whole, source, *more)) == 0
    observe, seen = HeadTraining.observe, []

    def die(self, *args, **more):
        seen.append(self.global_step)
        if len(seen) == 6:
            os._exit(9)
        return observe(self, *args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(HeadTraining, "observe", die)
        assert status_of(start(lambda: main(arguments(backbone, part, source, *more)), log)) == 9
    assert [path.name for path in (part / "state").iterdir()] == ["step=2.ckpt"]
    assert status_of(start(lambda: main(arguments(backbone, part, source, *more)), log)) == 0
    same_run(whole, part)


def test_a_run_that_goes_on_with_other_validation_samples_says_so(backbone, tmp_path, capsys):
    """Records that came in are shuffled among the old ones: those that are set aside now were trained on before."""
    source, out = tmp_path / "records.jsonl", tmp_path / "run"
    jsonl(source, [record(n) for n in range(10)])
    more = ["trainer.val_every=4", "resume=auto"]
    assert main(arguments(backbone, out, str(source), "optim.steps=1", *more)) == 0
    for records, steps, warned in (10, 2, 0), (14, 3, 1), (14, 4, 0):
        jsonl(source, [record(n) for n in range(records)])
        capsys.readouterr()
        assert main(arguments(backbone, out, str(source), f"optim.steps={steps}", *more)) == 0
        said = [line for line in capsys.readouterr().err.splitlines() if " was validated on other samples: " in line]
        assert len(said) == warned, said
        for heads in (out / "heads", *(out / "best").glob(f"*-step={steps}")):  # of a card that says so
            assert json.loads((heads / "training.json").read_text())["set_aside"] == (3 if records == 10 else 0)
