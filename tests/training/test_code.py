"""Questions about source code: answers beside those of Python itself, unambiguous in what is shown, and set-aside files."""

import importlib.util
import inspect
import json
import random
import re
from pathlib import Path

import pytest
from scripts_loaded import load_script
from tiny_tokenizer import tiny_tokenizer

from locret_kit.config.recipes import load_config
from locret_kit.samples.code import HELD_KINDS, WORDINGS, code_sample, code_text, read_code
from locret_kit.training.data import Samples

TOKENIZER = tiny_tokenizer()
MODULE = '''
from collections import OrderedDict
LIMIT = 1 << 3
SPEED, RATE = 3, 4
NAME_OF_{n} = "north-{n}"
COUNT_{n} = {n}

class Base{n}(object):
    """Nothing."""

class Ordered{n}(OrderedDict, Base{n}):
    def scaled_{n}(self, factor=2.5, *, unit="m", other):
        return factor * 3

def area_{n}(width, height=(1, {n}), depth=None):
    total = helper_{n}(width)
    if total:
        raise ValueError("too wide")
    return total + {n}

@staticmethod
def helper_{n}(value):
    return [value, -{n}]
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("project")
    for n in range(12):
        file = root / ("inner" if n % 2 else "") / f"part_{n}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(MODULE.replace("{n}", str(n)))
    others = {"broken.py": "def (:", "test_x.py": "A_TEST = 1", ".hidden.py": "HIDDEN = 1", "no.txt": "A = 1"}
    for name, text in others.items():
        (root / name).write_text(text)
    return root


def loaded(path: Path):
    spec = importlib.util.spec_from_file_location("loaded", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_answers_are_pythons_own(folder):
    files = read_code(str(folder))
    assert [file.path for file in files] == sorted(f"inner/part_{n}.py" if n % 2 else f"part_{n}.py" for n in range(12))
    for file in files:
        module, n = loaded(folder / file.path), re.search(r"\d+", file.path)[0]
        found = {(fact.kind, fact.name, fact.of): fact.value for fact in file.facts}
        area, scaled = (getattr(module, f"area_{n}"), getattr(module, f"Ordered{n}").__dict__[f"scaled_{n}"])
        signatures = {f"area_{n}": inspect.signature(area), f"scaled_{n}": inspect.signature(scaled)}
        wanted = {}
        for name, signature in signatures.items():
            wanted["parameters", name, ""] = ", ".join(key for key in signature.parameters if key != "self")
            for key, one in signature.parameters.items():
                if one.default is not inspect.Parameter.empty:
                    wanted["default", name, key] = repr(one.default)
        for name in (f"Base{n}", f"Ordered{n}"):
            bases = [base.__name__ for base in getattr(module, name).__bases__]
            wanted["base" if len(bases) == 1 else "bases", name, ""] = ", ".join(bases)
            wanted["class_file", name, ""] = file.path
        for name in (f"NAME_OF_{n}", f"COUNT_{n}"):
            wanted["constant", name, ""] = repr(getattr(module, name))
        wanted |= {
            ("function_file", f"area_{n}", ""): file.path, ("function_file", f"helper_{n}", ""): file.path,
            ("returns", f"area_{n}", ""): f"total + {n}", ("returns", f"scaled_{n}", ""): "factor * 3",
            ("returns", f"helper_{n}", ""): f"[value, -{n}]", ("caller", f"helper_{n}", ""): f"area_{n}",
            ("raises", f"area_{n}", ""): "ValueError", ("decorator", f"helper_{n}", ""): "staticmethod",
            ("import", file.path, "OrderedDict"): "collections", ("parameters", f"helper_{n}", ""): "value",
            ("caller", "ValueError", ""): f"area_{n}",
        }  # fmt: skip
        assert found == wanted


@pytest.mark.parametrize(("folder_name", "tokens", "texts"), [("made", 600, 60), ("python", 4000, 15)])
def test_what_is_asked_is_shown_and_unambiguous(folder, folder_name, tokens, texts):
    files = read_code(str(folder if folder_name == "made" else Path(json.__file__).parent))
    kinds = set()
    for seed in range(texts):
        text, asked = code_text(TOKENIZER, files, tokens, random.Random(seed), tuple(WORDINGS) + HELD_KINDS)
        assert 1 <= len(asked) <= 6 and len(TOKENIZER(text)["input_ids"]) <= tokens
        for one in asked:
            kinds.add(one.kind)
            assert one.value in one.answer
            shown = re.sub(r"\s+", "", text)
            plain = re.sub(r"\s+", "", one.value)
            assert plain in shown or one.kind in ("parameters", "default", "returns", "bases", "constant"), one
    assert kinds >= ({*WORDINGS, *HELD_KINDS} if folder_name == "made" else {"class_file", "parameters", "default"})


def test_a_name_that_occurs_twice_is_not_asked_for(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.py").write_text(f"class Same:\n    pass\n\nclass Only{name}:\n    pass\n")
    for seed in range(20):
        text, asked = code_text(TOKENIZER, read_code(str(tmp_path)), 400, random.Random(seed), tuple(WORDINGS))
        if text.count("class Same") > 1:
            assert not [one for one in asked if "Same" in one.question]


def test_samples_are_conversations_of_their_length(folder):
    files = read_code(str(folder))
    for seed in range(12):
        sample = code_sample(TOKENIZER, files, 700, random.Random(seed))
        assert len(sample.ids) <= 700 and sample.answers and all(a < b for a, b in sample.answers)
        said = TOKENIZER.decode(sample.ids)
        assert not re.search(r"Which exception|Which decorator|From which module", said)
        assert sample == code_sample(TOKENIZER, files, 700, random.Random(seed))


def config(*more: str):
    return load_config(["recipe=tiny", "backbone.model=tiny", *more]).data


def test_the_source_sets_files_aside(folder):
    data = config(f"data.sources=[code({folder}),synthetic]", "data.val_samples=4", "data.lengths=[400,500]")
    samples = Samples(data, TOKENIZER, seed=3)
    assert len(samples.held) == 4
    code = samples.sources[f"code({folder})"]
    held = {f"part_{n}" for n in range(12)} - {Path(file.path).stem for file in code.trained}
    assert len(held) == 1
    n = held.pop().removeprefix("part_")
    names = (f"Base{n}(", f"area_{n}(", f"COUNT_{n} ")
    said = [TOKENIZER.decode(samples[i].ids) for i in range(40)]
    assert not [text for text in said if any(name in text for name in names)]
    lengths = {400 if len(samples[i].ids) <= 400 else 500 for i in range(40)}
    assert lengths == {400, 500} and max(len(samples[i].ids) for i in range(40)) <= 500
    again = Samples(data, TOKENIZER, seed=3)
    assert [again[i] for i in (7, 2)] == [samples[i] for i in (7, 2)] and again.held == samples.held


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("code(nowhere)", r"code\(nowhere\): no such folder; code\(python\) is the standard library"),
        ("code({empty})", "no Python file in it has anything to ask for"),
        ("code({one})", "has one file with questions; data.val_samples=2 sets it aside"),
        ("code(files={one})", "parameter 'files' is unknown. There are: folder"),
        ("cod", "Did you mean 'code'"),
    ],
)
def test_unusable_sources_are_refused(source, said, tmp_path, monkeypatch):
    def absent(name, split):
        raise FileNotFoundError(f"source={name} is no local path")

    monkeypatch.setattr("locret_kit.samples.records._read_hub", absent)
    for name, text in {"empty": "", "one": "class Alone(Exception):\n    pass\n"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.py").write_text(text)
    source = source.format(empty=tmp_path / "empty", one=tmp_path / "one")
    with pytest.raises(ValueError, match=said) as caught:
        Samples(config(f"data.sources=[{source}]"), TOKENIZER, seed=0)
    assert "\n" not in str(caught.value)


def test_lengths_are_at_most_the_longest():
    with pytest.raises(ValueError, match=r"data.lengths=\[100, 600\] must be at most data.max_tokens=512"):
        config("data.lengths=[100,600]")


def test_the_script_writes_records_for_an_evaluation(folder, tmp_path, monkeypatch, capsys):
    script = load_script("scripts/code_questions.py")
    monkeypatch.setattr(script, "load_tokenizer", lambda name: TOKENIZER)
    words = [str(folder), str(tmp_path / "q.jsonl"), "--model", "tiny", "--tokens", "500", "--samples", "3"]
    for held in ([], ["--held"]):
        assert script.main([*words, *held]) == 0
        records = [json.loads(line) for line in (tmp_path / "q.jsonl").read_text().splitlines()]
        assert len(records) == 3
        for record in records:
            assert len(record["instructions"]) == len(record["outputs"]) > 0
            asked = [bool(re.search("exception|decorator|From which module", one)) for one in record["instructions"]]
            assert asked == [bool(held)] * len(asked)
    assert script.main([*words, "--tokens", "1"]) == 1
    assert capsys.readouterr().err == "error: n_tokens=1 is too small for a question about code\n"


def test_a_function_does_not_return_raise_or_call_what_one_within_it_does(tmp_path):
    inner = "    def inner():\n        helper()\n        if wrong:\n            raise KeyError\n        return 5\n"
    (tmp_path / "nested.py").write_text(f"def outer(one):\n{inner}    run(inner)\n    other()\n")
    (file,) = read_code(str(tmp_path))
    assert {(fact.kind, fact.name) for fact in file.facts} == {
        ("function_file", "outer"), ("parameters", "outer"), ("caller", "other"),
    }  # fmt: skip


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path):
    (tmp_path / "marked.py").write_text("class Alone(Exception):\n    pass\n", encoding="utf-8-sig")
    (file,) = read_code(str(tmp_path))
    assert file.lines[0] == "class Alone(Exception):"


def test_files_that_only_import_are_not_set_aside(tmp_path):
    """Questions about imports are never trained on: nothing could be validated."""
    for name in "abcdefgh":
        (tmp_path / f"{name}.py").write_text("from json import loads\n")
    for name in ("one", "two"):
        (tmp_path / f"{name}.py").write_text(f"class Alone{name}(Exception):\n    pass\n")
    data = config(f"data.sources=[code({tmp_path})]", "data.val_samples=1", "data.max_tokens=400")
    assert "Alone" in TOKENIZER.decode(Samples(data, TOKENIZER, seed=0).held[0].ids)
    assert len(read_code(str(tmp_path))) == 10
