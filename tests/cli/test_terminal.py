"""Helpers of commands in a terminal."""

import io
import itertools
import json
import sys
from types import SimpleNamespace

import pytest

from locret_kit.cli import command, documents
from locret_kit.runtime.session import ThoughtPiece


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", [20, 80])
def test_progress_counts_what_is_read_now_in_one_line(monkeypatch, columns):
    """A document's earlier tokens took no time; a wrapped line would stay on the screen."""
    clock = itertools.count()
    monkeypatch.setattr(command, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(sys, "stderr", Screen())
    monkeypatch.setenv("COLUMNS", str(columns))
    show = command.progress("read")
    for done in (100_512, 101_024, 101_536):  # a second each
        show(done, 101_536)
    shown = sys.stderr.getvalue().rstrip("\n").split("\r")
    assert len(shown) == 3 and all(len(line) < columns for line in shown)
    if columns == 80:
        assert [line.rstrip() for line in shown[:2]] == [
            "read 100512/101536 tokens", "read 101024/101536 tokens, 512 tok/s, 1 s left",
        ]  # fmt: skip


def test_the_time_that_is_left_is_that_of_a_full_cache(monkeypatch):
    """While a cache fills up, reading slows down; how much is then not known."""
    clock = iter((0.0, 1.0, 2.0, 3.0, 13.0, 23.0))
    monkeypatch.setattr(command, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(sys, "stderr", Screen())
    show = command.progress("read", 1000)
    for done in (100, 600, 1100, 2100, 3100):
        show(done, 12_000)
    shown = [line.rstrip() for line in sys.stderr.getvalue().rstrip("\r").split("\r")]
    assert shown == [
        "read 100/12000 tokens", "read 600/12000 tokens, 500 tok/s", "read 1100/12000 tokens",
        "read 2100/12000 tokens, 100 tok/s, 99 s left", "read 3100/12000 tokens, 100 tok/s, 89 s left",
    ]  # fmt: skip


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_a_line_of_json_is_json_in_every_encoding(monkeypatch, encoding):
    """stdout's own escapes are those of Python, such as \\xe9."""
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding, errors="backslashreplace"))
    print(documents.json_line({"answer": "caf\xe9 \U0001f600"}), flush=True)
    assert json.loads(sys.stdout.buffer.getvalue().decode(encoding)) == {"answer": "caf\xe9 \U0001f600"}


def test_a_question_has_no_byte_order_mark(tmp_path):
    (tmp_path / "asked").write_bytes(b"\xef\xbb\xbfWho?\r\n")
    assert documents.words_of(str(tmp_path / "asked")) == "Who?\n"


class Keys(io.RawIOBase):
    """A terminal's lines up to one Ctrl-D, after which nothing is typed."""

    def __init__(self, *lines: bytes) -> None:
        self.lines = [*lines, b""]

    def readable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return True

    def readinto(self, room: memoryview) -> int:
        line = self.lines.pop(0)  # raises where a second Ctrl-D is waited for
        room[: len(line)] = line
        return len(line)


@pytest.mark.parametrize("lines", [(), (b"caf\xc3\xa9\n", b"Who?\n"), (b"no end",)])
@pytest.mark.parametrize("read, what", [(command.text_of, "text"), (documents.words_of, "questions")])
def test_one_ctrl_d_ends_what_is_typed(monkeypatch, capsys, lines, read, what):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(Keys(*lines)), "utf-8"))
    if read == command.text_of and not lines:
        with pytest.raises(ValueError, match="stdin has no text"):
            read("-")
    else:
        assert "".join(read("-")) == b"".join(lines).decode()
    assert capsys.readouterr().err == f"reading the {what} from the terminal; end it with Ctrl-D\n"


class Said(list[str]):
    """Pieces of an answer without evidence."""

    evidence = ()


def test_an_answer_does_not_command_a_terminal(monkeypatch):
    """It may quote a text that holds escape sequences. A file gets the answer as it is."""
    said = ["red \x1b[31", "m\x9b31m\x07\r", "\ttab\n\xe9"]
    for out, shown in ((Screen(), "red [31m31m\ttab\n\xe9\n"), (io.StringIO(), "".join(said) + "\n")):
        monkeypatch.setattr(sys, "stdout", out)
        command.write_answer(Said(said))
        assert out.getvalue() == shown


def test_a_thought_is_one_line_that_grows(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Screen())
    pieces = [ThoughtPiece("So it "), ThoughtPiece("is red."), "Red", " indeed."]
    assert [*command.collapse(pieces)] == ["Red", " indeed."]
    dim = "\r\033[2mthought: {} words\033[0m"
    assert sys.stderr.getvalue() == dim.format(2) + dim.format(4) * 2 + "\n"
