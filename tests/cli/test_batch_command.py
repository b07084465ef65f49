"""``locret-infer --batch``: a file of prompts becomes a file of answers. The oracle is the command for one prompt."""

import io
import json
import os
import sys
from pathlib import Path
from threading import Thread

import pytest
from small_disk import file_limit
from tiny_heads import save_tiny_heads
from tiny_tokenizer import TEXT

from locret_kit.cli.infer import main
from locret_kit.files import locked
from locret_kit.runtime import engine

BASE = ("--dtype", "float32", "--budget", "40", "--chunk", "16", "--max-new-tokens", "5")
WORDS = TEXT.split()
LINES = [
    {"id": "plain", "prompt": " ".join(WORDS * 2)},
    {"id": "asked", "text": " ".join(WORDS[7:40]), "question": "What is the key?", "max_new_tokens": 3},
    {"text": " ".join(WORDS[:30]), "question": "Who?", "temperature": 0.9, "top_p": 0.8, "seed": 3},
    {"id": 9, "prompt": "The", "temperature": 1.5, "seed": 4},
]
SINGLES = [
    (LINES[0]["prompt"],),
    (LINES[1]["text"], "--question", "What is the key?", "--max-new-tokens", "3"),
    (LINES[2]["text"], "--question", "Who?", "--temperature", "0.9", "--top-p", "0.8", "--seed", "3"),
    (LINES[3]["prompt"], "--temperature", "1.5", "--seed", "4"),
]


@pytest.fixture(scope="module")
def heads(tmp_path_factory) -> str:
    return str(save_tiny_heads(tmp_path_factory.mktemp("batch"), 16, inference={}))


class Files:
    """The two files, and the command between them."""

    def __init__(self, folder: Path, heads: str) -> None:
        self.prompts, self.answers, self.heads = folder / "prompts.jsonl", folder / "answers.jsonl", heads

    def write(self, *lines: object) -> None:
        self.prompts.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))

    def run(self, *more: str, batch: Path | None = None, base: tuple[str, ...] = BASE) -> int:
        words = ["--batch", str(batch or self.prompts), "-o", str(self.answers), "--ckpt", self.heads]
        return main([*words, *base, "--quiet", *more])

    def read(self) -> dict[object, dict]:
        found = [json.loads(line) for line in self.answers.read_text().splitlines()]
        assert len({str(line["id"]) for line in found}) == len(found)
        return {line["id"]: line for line in found}


@pytest.fixture
def files(tmp_path, heads) -> Files:
    return Files(tmp_path, heads)


@pytest.fixture(scope="module")
def singles(heads, tmp_path_factory) -> list[dict]:
    """Reports of the command for each prompt alone."""
    report = tmp_path_factory.mktemp("single") / "report.json"
    found = []
    for text, *options in SINGLES:
        base = BASE[:-2] if "--max-new-tokens" in options else BASE
        words = ["--ckpt", heads, *base, *options, "--report", str(report)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode()), encoding="utf-8"))
            assert main([*words, "--quiet"]) == 0
        found.append(json.loads(report.read_text()))
    return found


@pytest.mark.parametrize("size", ["1", "3"])
def test_answers_are_those_of_the_command_for_one(files, singles, size):
    files.write(*LINES)
    assert files.run("--batch-size", size) == 0
    answers = files.read()
    assert list(answers) == ["plain", "asked", 3, 9] if size == "1" else set(answers) == {"plain", "asked", 3, 9}
    for name, single in zip(("plain", "asked", 3, 9), singles, strict=True):
        line = answers[name]
        for field in ("answer", "finish_reason", "prompt_tokens", "new_tokens"):
            assert line[field] == single[field], (name, field)
        assert line["first_token_s"] > 0
    assert max(answer["prompt_tokens"] for answer in answers.values()) > 56  # so that rows were evicted


def test_messages_go_through_the_template(files):
    content = f"{LINES[1]['text']}\n\n{LINES[1]['question']}"
    files.write(LINES[1], {"messages": [{"role": "user", "content": content}], "max_new_tokens": 3})
    assert files.run() == 0
    answers = files.read()
    assert answers[2]["answer"] == answers["asked"]["answer"]
    assert answers[2]["prompt_tokens"] == answers["asked"]["prompt_tokens"]


def test_a_wrong_line_is_an_error_of_its_own(files, capsys):
    wrong = {
        "{": "line 1 is not JSON",
        '{"prompt": "a", "max_tokens": 3}': "Did you mean 'max_new_tokens'?",
        '{"prompt": "a", "max_new_tokens": 0}': "max_new_tokens=0 must be at least 1",
        '{"prompt": "a", "text": "b", "question": "c"}': "give one of: prompt, text and question, messages; found",
        '{"text": "b", "question": " "}': "the question is empty",
        '{"messages": [{"role": "user", "content": 3}]}': "must be a list of",
        '{"messages": []}': "the last message must not be the assistant's",
        '{"prompt": ""}': "the prompt holds no tokens",
        '{"prompt": "a", "top_p": 0.5}': "top_p has no effect at temperature 0",
        '{"prompt": "\\ud800"}': "line 10 is not UTF-8: surrogates not allowed",
    }
    files.write(*wrong, LINES[0])
    assert files.run() == 1
    answers = files.read()
    for number, words in enumerate(wrong.values(), 1):
        assert words in answers[number]["error"] and "answer" not in answers[number], answers[number]
    assert answers["plain"]["answer"]
    assert f"{len(wrong)} of {len(wrong) + 1} prompts have an error" in capsys.readouterr().err


def test_a_budget_that_a_prompt_cannot_have_is_its_error_alone(files):
    files.write({"id": "short", "prompt": "The"}, LINES[0])
    assert files.run("--budget", "0.5", "--stabilizers", "4", "--local-len", "1", base=("--dtype", "float32")) == 1
    answers = files.read()
    assert "must be below budget" in answers["short"]["error"] and answers["plain"]["answer"]


def test_a_run_that_was_cut_short_goes_on(files, monkeypatch, capsys):
    """By Ctrl-C, and in the middle of a line; errors are tried again."""
    files.write({"id": "wrong", "prompt": ""}, *LINES)
    assert files.run() == 1
    expected = {name: line.get("answer") for name, line in files.read().items()}
    files.answers.unlink()
    step, add, started = engine.Engine.step, engine.Engine.add, []

    def interrupted(self):
        if '"plain"' in files.answers.read_text():
            raise KeyboardInterrupt
        return step(self)

    with monkeypatch.context() as patch:
        patch.setattr(engine.Engine, "step", interrupted)
        assert files.run("--batch-size", "1") == 130
    assert list(files.read()) == ["wrong", "plain"]
    with files.answers.open("a") as cut:
        cut.write('{"id": "asked", "ans')
    noted = lambda self, *given: (started.append(given[0].name), add(self, *given))[1]  # noqa: E731
    monkeypatch.setattr(engine.Engine, "add", noted)
    assert files.run() == 1
    assert set(started) == {"asked", 4, 9}
    assert {name: line.get("answer") for name, line in files.read().items()} == expected
    files.write({"id": "plain", "prompt": ""}, *LINES[1:2])
    started.clear()
    assert files.run() == 0 and not started  # all that is left has an answer, and no model is loaded
    assert "has an answer for each of the 2 prompts" in capsys.readouterr().err


def test_a_full_disk_is_named(files, capsys):
    files.write(*LINES)
    files.answers.write_text(json.dumps({"id": "before", "answer": "x" * 2**16}) + "\n")
    with file_limit(2**16):
        assert files.run() == 1
    assert f"cannot write {files.answers}: File too large" in capsys.readouterr().err


def test_prompts_from_a_pipe(files):
    """As ``<(...)`` and ``/dev/stdin`` give them: more than a pipe holds, and once."""
    text = "\n".join([" " * 200_000, *map(json.dumps, LINES)])
    out, into = os.pipe()
    with os.fdopen(into, "w") as pipe, os.fdopen(out):
        writer = Thread(target=lambda: (pipe.write(text), pipe.close()), daemon=True)
        writer.start()
        assert files.run("--batch-size", "1", batch=Path(f"/dev/fd/{out}")) == 0
        writer.join(10)
    answers = files.read()
    assert list(answers) == ["plain", "asked", 4, 9] and all(line["answer"] for line in answers.values())


def test_what_is_wrong_with_the_files_is_said_before_anything_is_loaded(files, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("locret_kit.cli.loading.resolve_choice", None)

    def says(words: str, *more: str, given: list[str] | None = None) -> None:
        assert main(given or ["--batch", str(files.prompts), "-o", str(files.answers), *more]) == 1
        captured = capsys.readouterr().err
        assert words in captured and captured.count("\n") == 1, captured

    says("prompts.jsonl: No such file or directory")
    files.write()
    says("holds no prompts")
    says(f"batch: {tmp_path}: Is a directory", given=["--batch", str(tmp_path), "-o", str(files.answers)])
    for source in ("/dev/zero", "/dev/null"):
        says(f"batch='{source}' must be a file or a pipe", given=["--batch", source, "-o", str(files.answers)])
    files.write(LINES[0], LINES[0])
    says('id "plain" occurs twice')
    files.write({"id": 2, "prompt": "a"}, {"prompt": "b"})
    says("id 2 occurs twice (a prompt without one has its line's number)")
    files.write(LINES[0])
    says("--batch needs a file for the answers", given=["--batch", str(files.prompts)])
    again = ["--batch", str(files.prompts), "-o", f"{tmp_path}/./prompts.jsonl"]
    says("is the input file: name another", given=again)
    says("its folder is missing", given=["--batch", str(files.prompts), "-o", f"{tmp_path}/no/answers.jsonl"])
    says("--question Who? has no effect with --batch", "--question", "Who?")
    says("--batch-size 2 has no effect without --batch", given=["text.txt", "--batch-size", "2"])
    says("--evidence has no effect with --batch", "--evidence")
    says("--include *.py has no effect with --batch", "--include", "*.py")
    for diary in ("my diary\n", "my diary", '{"id": 1, "answer": "a"}\nmy diary'):
        files.answers.write_text(diary)
        says(f"answers.jsonl': line {len(diary.splitlines())} is not JSON")
        assert files.answers.read_text() == diary
    files.answers.write_text('{"id": 1, "prompt": "a"}\n')
    says("line 1 is not an answer of --batch")
    assert files.answers.read_text() == '{"id": 1, "prompt": "a"}\n'


def test_two_runs_into_one_file_notice_each_other(files, capsys):
    files.write(*LINES[:1])
    with locked(files.answers.with_name(f".{files.answers.name}.lock"), "busy"):
        assert files.run() == 1
    assert "is being written by another process" in capsys.readouterr().err and not files.answers.exists()
    assert files.run() == 0
