"""Self-study: what a backbone writes is kept, read back, and hidden in a long text; set-aside text is never studied."""

import json
import pickle
import random
import re

import pytest
from tiny_tokenizer import TEMPLATE, tiny_tokenizer

from locret_kit.backbones.load import load_backbone
from locret_kit.cli.train import main
from locret_kit.config.recipes import load_config
from locret_kit.config.train_options import DataConfig
from locret_kit.samples.study import study, study_sample
from locret_kit.training.data import Samples, Share
from locret_kit.training.fit import read_curves
from locret_kit.training.writer import NEW, Writer

TOKENIZER = tiny_tokenizer()
TEXT = "\n".join(f"Stone {n} lies {n * 37 % 1000} steps from the gate." for n in range(2000))


def answer(document: str) -> str:
    """A question about the first whole stone of a passage."""
    number, steps = re.search(r"Stone (\d+) lies (\d+) steps", document).groups()
    return f"Question: How far from the gate is stone {number}?\nAnswer: {steps} steps"


def write(asked):
    return [answer(document) for document, _ in asked]


def pairs(said: str) -> list[tuple[str, str]]:
    """Number of a stone, and its steps, of each question in a decoded sample."""
    return re.findall(r"stone (\d+)\?.*?(\d+) steps", said, re.S)


def test_a_passage_is_studied():
    studied = study(TEXT, 20, random.Random(0), write)
    assert 15 < len(studied) <= 20 and len({one.passage for one in studied}) == len(studied)
    for one in studied:
        assert one.passage in TEXT and 1000 < len(one.passage) < 2500 and one.passage.startswith("Stone ")
        assert int(one.answer.split()[0]) == int(re.search(r"\d+", one.question)[0]) * 37 % 1000


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ("Question: Who?\nAnswer: He.", ("Who?", "He.")),
        ("Sure!\n\nQuestion:  Who?  \n\nAnswer:  He, the mayor.\nQuestion: More?", ("Who?", "He, the mayor.")),
        ("Question: What does the passage say?\nAnswer: This.", None),
        ("Question: Who?", None),
        ("Question: \nAnswer: He.", None),
        ("Who? He.", None),
    ],
)
def test_only_usable_questions_are_kept(written, found):
    studied = study("A text. It is short.", 1, random.Random(0), lambda asked: [written] * len(asked))
    assert [(one.question, one.answer) for one in studied] == ([found] if found else [])


def test_the_passages_are_hidden_in_the_text():
    studied = study(TEXT, 30, random.Random(1), write)
    for seed in range(10):
        sample = study_sample(TOKENIZER, TEXT, studied, 6000, random.Random(seed))
        assert 4000 < len(sample.ids) <= 6000 and 1 <= len(sample.answers) <= 3
        said = TOKENIZER.decode(sample.ids)
        for number, steps in pairs(said):
            assert int(steps) == int(number) * 37 % 1000 and f"Stone {number} lies {steps} steps" in said
        assert len(pairs(said)) == len(sample.answers)
        assert sample == study_sample(TOKENIZER, TEXT, studied, 6000, random.Random(seed))
    with pytest.raises(ValueError, match="n_tokens=300 is too small: a passage and its question take"):
        study_sample(TOKENIZER, TEXT, studied, 300, random.Random(0))


def test_set_aside_text_is_not_studied(tmp_path):
    (tmp_path / "stones.txt").write_text(TEXT)
    source, asked = f"self-study({tmp_path / 'stones.txt'}, 12)", []
    data = load_config(["recipe=tiny", "backbone.model=tiny", "data.max_tokens=4000"]).data
    data.sources, data.val_samples = [source], 2
    samples = Samples(data, TOKENIZER, seed=0, write=lambda more: (asked.extend(more), write(more))[1])
    assert len(samples.held) == 2 and 12 <= len(asked) <= 12 + 4
    held = {number for sample in samples.held for number, _ in pairs(TOKENIZER.decode(sample.ids))}
    trained = {number for i in range(20) for number, _ in pairs(TOKENIZER.decode(samples[i].ids))}
    shown = TOKENIZER.decode([token for i in range(20) for token in samples[i].ids])
    assert held and trained and not held & trained
    assert not [number for number in held if f"Stone {number} lies" in shown]
    with pytest.raises(ValueError, match="self-study needs a backbone that writes"):
        Samples(data, TOKENIZER, seed=0)
    with pytest.raises(ValueError, match="wrote no usable question about any of"):
        Samples(data, TOKENIZER, seed=0, write=lambda more: ["no"] * len(more))


def test_answers_are_the_backbones_and_kept(backbone, tmp_path):
    model, tokenizer = load_backbone(str(backbone), dtype="float32", device="cpu")
    loads: list[bool] = []
    path, asked = tmp_path / "written.jsonl", [("One text.", "Why?"), ("Another.", "Why?"), ("One text.", "Why?")]
    made = Writer(path, tokenizer, lambda: (loads.append(True), model)[1])(asked)
    for document, words in {("One text.", made[0]), ("Another.", made[1])}:
        messages = [{"role": "user", "content": f"{document}\n\nWhy?"}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        out = model.generate(**ids, max_new_tokens=NEW, do_sample=False)
        assert tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True).strip() == words
    assert made[0] == made[2] and len(loads) == len(path.read_text().splitlines()) == 2
    with path.open("a") as file:
        file.write('{"prompt": "cut')
    again = Writer(path, tokenizer, lambda: pytest.fail("nothing is missing"))
    assert again(asked) == made and all(json.loads(line) for line in path.read_text().splitlines())
    other = Writer(path, tokenizer, lambda: model, "another")
    assert other(asked) == made and len(path.read_text().splitlines()) == 4  # what others wrote is not its own


def test_a_control_token_in_a_passage_ends_no_turn(tmp_path):
    turns = []

    class Asked(Writer):
        def _answer(self, prompt):
            turns.append(TOKENIZER(prompt).input_ids.count(TOKENIZER.convert_tokens_to_ids("<|im_end|>")))
            return ""

    Asked(tmp_path / "written.jsonl", TOKENIZER, lambda: None)(
        [("A text.", "Why?"), ("Chats: <|im_end|> ends.", "Why?")]
    )
    assert turns[0] == turns[1] > 0


def test_a_training_by_self_study(backbone, tmp_path, monkeypatch):
    (tmp_path / "stones.txt").write_text(TEXT)
    monkeypatch.setattr(Writer, "_answer", lambda self, prompt: answer(prompt))
    words = ["recipe=tiny", f"backbone.model={backbone}", "data.max_tokens=3000", "data.val_samples=1"]
    words += [
        "trainer.accelerator=cpu",
        f"data.sources=['self-study({tmp_path / 'stones.txt'}, 6)']",
        f"out={tmp_path / 'run'}",
    ]
    assert main([*words, "optim.steps=2"]) == 0
    lines = (tmp_path / "run" / "written.jsonl").read_text()
    monkeypatch.setattr(Writer, "_answer", lambda self, prompt: pytest.fail("it was written before"))
    assert main([*words, "optim.steps=3", "resume=auto"]) == 0
    assert (tmp_path / "run" / "written.jsonl").read_text() == lines and len(read_curves(tmp_path / "run")["loss"]) == 3


def test_a_model_that_may_think_writes_at_once(tmp_path):
    """A thought would take all the tokens that an answer may have."""
    thinking = tiny_tokenizer()
    opened = "{% if enable_thinking is not defined or enable_thinking %}<think>{% endif %}{% endif %}"
    thinking.chat_template = TEMPLATE.removesuffix("{% endif %}") + opened
    prompt = Writer(tmp_path / "written.jsonl", thinking, lambda: None)._prompt("A text.", "Why?")
    assert prompt.endswith("A text.\n\nWhy?<|im_end|>\n<|im_start|>assistant\n")


def test_processes_that_are_spawned_can_prepare_samples(tmp_path):
    """Processes inherit nothing on macOS, and from Python 3.14 on."""
    write = Writer(tmp_path / "written.jsonl", TOKENIZER, lambda: None)
    share = Share(Samples(DataConfig(max_tokens=400, val_samples=1), TOKENIZER, seed=0, write=write), 0)
    assert pickle.loads(pickle.dumps(share))[3] == share[3]


def test_nothing_is_written_again_where_the_template_tells_the_time(tmp_path, monkeypatch):
    telling, prompts = tiny_tokenizer(), []
    telling.chat_template = "{{ strftime_now('%H:%M:%S.%f') }} " + TEMPLATE
    monkeypatch.setattr(Writer, "_answer", lambda self, prompt: prompts.append(prompt) or "He.")
    for _ in range(2):
        assert Writer(tmp_path / "written.jsonl", telling, lambda: None)([("A text.", "Who?")]) == ["He."]
    assert len(prompts) == 1
