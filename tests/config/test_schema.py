"""The one reader of every command: its words, its files, its help."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import pytest
import yaml
from annotated_types import Ge

from locret_kit.config.eval_options import EVAL, FIGURE, PAIRED, REPORT, TABLE, TASKS
from locret_kit.config.infer_options import ASK, CHAT, INFER, INFO, KEPT, READ
from locret_kit.config.recipes import TRAIN
from locret_kit.config.schema import Command, Repeatable, UsageError, given_by, help_of, options_of, read
from locret_kit.config.serve_options import PLAN, SERVE, VLLM
from locret_kit.config.train_options import PUBLISH
from locret_kit.samples.haystack import ENDINGS
from locret_kit.settings import RunSettings
from locret_kit.validation import choices

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = {"infer": INFER, "train": TRAIN, "eval": EVAL, "plan": PLAN, "publish": PUBLISH}
OTHERS = [READ, ASK, CHAT, KEPT, INFO, SERVE, VLLM]
OF_EVAL = [FIGURE, TABLE, PAIRED, TASKS, REPORT]
EVERY = [*COMMANDS.values(), *OTHERS, *OF_EVAL]


@dataclass
class Section:
    """A section."""

    rate: Annotated[float, Ge(0)] = 1e-3
    """Per step,
    no unit."""


@dataclass
class Options:
    """Options."""

    model: str
    """The model."""
    section: Section
    names: list[str] = field(default_factory=lambda: ["a", "b"])
    """Names."""
    ask: Annotated[list[str], Repeatable()] = field(default_factory=list)
    """Asked."""
    on: bool = False
    """Or off."""
    number: Annotated[int, Ge(1)] | None = None
    """A number."""
    file: str | None = None
    """A file."""


ONE = Command("x", Options, "usage: x", positional=("file",))


@pytest.mark.parametrize(
    "argv",
    [
        ["--model", "m", "--section.rate", "1e-4", "--names", "a,b", "--on", "--number", "3"],
        ["model=m", "section.rate=1e-4", "names=[a, b]", "on=true", "number=3"],
        ["--number=3", "--on", "--names=[a,b]", "--section.rate=1e-4", "--model=m"],
    ],
)
def test_the_three_forms_are_the_same(argv):
    options = read(ONE, argv)
    assert options == Options(model="m", section=Section(1e-4), names=["a", "b"], on=True, number=3)


def test_dashes_switches_bare_words_and_lists_of_texts():
    assert given_by(ONE, ["--no-on", "text.txt", "--ask", "a, b", "ask=c=d"]) == {
        "on": False, "file": "text.txt", "ask": ["a, b", "c=d"],
    }  # fmt: skip
    given = given_by(INFER, ["--max-new-tokens=3", "--no-chat", "-"])
    assert given == {"max_new_tokens": 3, "chat": False, "file": "-"}


@pytest.mark.parametrize("text, names", [
    ("[a,'b, c.txt']", ["a", "b, c.txt"]), ("\"x(,1\",z", ["x(,1", "z"]), ("[it's,b's]", ["it's", "b's"]), ("['a,b]", ["a", "b"]),
    ("['f(a, 5)' , c]", ["f(a, 5)", "c"]),
])  # fmt: skip
def test_commas_in_quotes_belong_to_the_item_of_a_list(text, names):
    assert given_by(ONE, ["--names", text]) == {"names": names}


@pytest.mark.parametrize(
    ("argv", "kind", "said"),
    [
        (["nmaes=a"], UsageError, "unknown key 'nmaes'. Did you mean 'names'?"),
        (["E=mc2, or not?"], UsageError, "unknown key 'E'. --help all lists the options; put a text with = in it"),
        (["--rate", "1"], UsageError, "unknown key 'rate'. Did you mean 'section.rate'?"),
        (["--number"], UsageError, "--number needs a value"),
        (["number=1", "--number", "2"], UsageError, "number is given twice: number=1 and number=2"),
        (["names=a"], UsageError, "model=... is missing"),
        (["--model", ""], ValueError, "model is empty: give it a value, or leave it out"),
        (["--confg", "x"], UsageError, "unknown key 'confg'. Did you mean 'config'?"),
        (["number=0"], ValueError, "number=0 must be at least 1"),
        (["number=" + "9" * 5000], ValueError, "number=inf must be an integer"),
        (["section.rate=nan"], ValueError, "section.rate=nan must be a number"),
        (["section=1"], UsageError, "section is a section; its fields: section.rate"),
    ],
)
def test_errors(argv, kind, said):
    with pytest.raises(kind) as caught:
        read(ONE, argv)
    assert said in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("argv", "values"),
    [
        (["--on", "false"], {"on": False}),
        (["--no-on", "--", "--on=b.txt"], {"on": False, "file": "--on=b.txt"}),
        (["--", "a=b.txt"], {"file": "a=b.txt"}),
        (["./a=b.txt"], {"file": "./a=b.txt"}),
        (["--model", "-1"], {"model": "-1"}),
        (["--model", "-- not an option"], {"model": "-- not an option"}),
        (["--model", " m.txt ", "--number", " 3 "], {"model": " m.txt ", "number": 3}),
    ],
)
def test_words_that_look_like_others(argv, values):
    assert given_by(ONE, argv) == values


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("number: [", "is not valid YAML"),
        ("number: " + "9" * 5000, "is not valid YAML"),
        ("names: " + "[" * 5000, "nested too deeply"),
        ("number: 1\nnumber: 2", "number occurs twice"),
        ("names: &a [x]\nask: *a", "aliases are not read"),
        ("- a", "must hold sections of key: value"),
        ("nmaes: [a]", "unknown key 'nmaes' in config="),
        ("number: 0", "must be at least 1"),
    ],
)
def test_errors_in_a_file(tmp_path, text, said):
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(ValueError) as caught:
        read(ONE, ["model=m", f"config={tmp_path / 'x.yaml'}"])
    assert said in str(caught.value) and "\n" not in str(caught.value)


GIVEN = {
    "infer": ["--ckpt", "x", "--budget", "0.1", "--question", "a, b?", "long.txt", "--one-shot"],
    "train": ["recipe=tiny", "backbone.model=x", "optim.lr=1e-4", "data.weights=[2]"],
    "eval": ["tasks=[passkey]", "out=x", "budgets=[0.1,256]", "policies=[kvcrush(base=h2o,anchor=mean)]"],
    "plan": ["--model", "phi3-mini", "--gpu-memory", "24GiB"],
    "publish": ["--ckpt", "x", "--repo", "me/x", "--private"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_printed_configuration_is_read_back(name, tmp_path, capsys):
    assert read(COMMANDS[name], [*GIVEN[name], "--print-config"]) is None
    text = capsys.readouterr().out
    (tmp_path / "x.yaml").write_text(text)
    assert isinstance(yaml.safe_load(text), dict)
    assert read(COMMANDS[name], ["--config", str(tmp_path / "x.yaml")]) == read(COMMANDS[name], GIVEN[name])


def test_the_command_line_comes_before_the_file(tmp_path):
    (tmp_path / "x.yaml").write_text("number: 2\nmodel: m\nsection: {rate: 1e-3}\n")
    options = read(ONE, ["number=3", "--config", str(tmp_path / "x.yaml")])
    assert (options.number, options.model, options.section.rate) == (3, "m", 1e-3)


@pytest.mark.parametrize("text", ["ask: Who came, and when?", "ask: ['Who came, and when?']"])
def test_commas_of_a_file_belong_to_the_item_of_a_repeatable_option(tmp_path, text):
    (tmp_path / "x.yaml").write_text(f"model: m\nnames: a, b\n{text}\nsection: {{rate: 1}}\n")
    options = read(ONE, ["--config", str(tmp_path / "x.yaml")])
    assert (options.ask, options.names) == (["Who came, and when?"], ["a", "b"])


@pytest.mark.parametrize("one", EVERY, ids=lambda one: one.usage.split("\n")[0])
def test_help_all_explains_every_option(one):
    text = " ".join(help_of(one, everything=True).split())
    for name, option in options_of(one.schema).items():
        assert f"--{name.replace('_', '-')}" in text
        assert option.owner.__doc__ and not option.owner.__doc__.startswith(f"{option.owner.__name__}(")


@pytest.mark.parametrize("one", EVERY, ids=lambda one: one.usage.split("\n")[0])
def test_help_is_ten_options_on_one_screen(one, monkeypatch):
    """40 lines of 80 columns; what is left out is counted."""
    monkeypatch.setenv("COLUMNS", "80")
    known, lines = options_of(one.schema), help_of(one).splitlines()
    shown = one.main or tuple(known)
    assert set(shown) <= set(known) and len(shown) <= 12 and len(lines) <= 40, len(lines)
    heads = [line.split()[0] for line in lines if line.startswith("  --")]
    assert [head.removeprefix("--").removeprefix("no-").replace("-", "_") for head in heads] == list(shown)
    assert (f"--help all: {len(known) - len(shown)} more" in lines[-1]) == (len(shown) < len(known))


def test_choices_are_those_of_the_parts():
    known = options_of(EVAL.schema)
    assert choices(known["ending"].annotation) == [*ENDINGS]


def test_run_settings_are_options_of_every_command_that_runs():
    names = set(options_of(RunSettings))
    assert names - set(options_of(INFER.schema)) == {"decode_every"}
    assert names - set(options_of(EVAL.schema)) == {"budget", "backend"}
