"""``locret-chat``: through pipes in this process, and in a real terminal."""

from __future__ import annotations

import io
import json
import os
import re
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from prompt_toolkit.utils import get_cwidth
from tiny_tokenizer import TEXT, save_tiny_backbone
from tmux import Tmux
from transformers import AutoModelForCausalLM, AutoTokenizer

from locret_kit import Chat, Document
from locret_kit.cli.chat import main
from locret_kit.cli.screen import Lines
from locret_kit.cli.talk import COMMANDS, Talk
from locret_kit.settings import RunSettings

ROOT = Path(__file__).resolve().parents[1]
HERE = {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "kernels"))), "OMP_NUM_THREADS": "1", "TERM": "screen"}
SETTINGS = ["--chunk", "32", "--history", "128", "--dtype", "float32"]


@pytest.fixture(scope="module")
def backbone(tmp_path_factory) -> str:
    """A random model that says letters and blanks, and never ends."""
    folder = save_tiny_backbone(tmp_path_factory.mktemp("chat") / "backbone", tie_word_embeddings=False)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    plain = [i for i in range(400) if (text := tokenizer.decode([i])).isascii() and text.replace(" ", "").isalpha()]
    with torch.no_grad():
        silent = torch.ones(400, dtype=torch.bool)
        silent[plain] = False
        model.lm_head.weight[silent] = 0
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def piped(backbone, monkeypatch, capsys):
    """Run the command over lines of stdin; ``(status, stdout, stderr)``."""

    def run(said: str | bytes, *words: str, policy: str = "h2o") -> tuple[int, str, str]:
        data = said.encode() if isinstance(said, str) else said
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        status = main(["--model", backbone, "--policy", policy, *SETTINGS, "--max-new-tokens", "6", *words])
        return status, *capsys.readouterr()

    return run


def chat(backbone: str, **settings) -> Chat:
    """The same conversation without the command."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(backbone), AutoTokenizer.from_pretrained(backbone)
    return Chat(
        model, tokenizer, settings=RunSettings(budget=128, chunk=32), policy="h2o", max_new_tokens=6, **settings
    )


def answers(chat: Chat, *questions: str) -> str:
    return "".join("".join(chat.say(question)) + "\n" for question in questions)


def test_a_line_is_a_message_and_stdout_holds_answers_alone(piped, backbone):
    status, out, err = piped("What is it?\n\nWho came in?\\\nAnd when?\n//what\n/stats\n")
    assert status == 0
    assert out == answers(chat(backbone), "What is it?", "Who came in?\nAnd when?", "/what")
    assert "turns: 3" in err and "last answer: 6 tokens" in err and "\033" not in out + err


def test_the_last_line_may_lack_its_end_and_a_mark_may_come_first(piped, backbone):
    expected = answers(chat(backbone, system="Be brief."), "What is it?", "Who?")
    assert piped("\ufeffWhat is it?\r\nWho?", "--system", "Be brief.")[:2] == (0, expected)
    assert piped("")[:2] == (0, "")


def test_an_error_is_one_line_and_the_talk_goes_on(piped, backbone):
    lines = [b"/sats", b"/undo", b"/stats now", b"/read nowhere.txt", b"/read", b"/budget 0", b"/kept", b"caf\xe9"]
    lines += [b"/read x.txt --bugdet 5", b"/save x.doc", b"/save x.locret", b"/save x.md", b"/retry", b"/pin"]
    status, out, err = piped(b"\n".join([*lines, b"What is it?"]))
    assert (status, out) == (1, answers(chat(backbone), "What is it?"))
    said = [line.removeprefix("locret-chat: ") for line in err.splitlines() if line.startswith("locret-chat: ")]
    for line, begin in zip(
        said,
        [
            "unknown command '/sats'. Did you mean '/stats'?",
            "there is no turn to undo",
            "/stats takes no words, not 'now'",
            "file='nowhere.txt' does not exist",
            "/read needs a file",
            "budget=0 must be at least 1 slot",
            "the cache is empty",
            "line 8 of stdin is not UTF-8: byte 3",
            "unknown key 'bugdet'. Did you mean 'budget'?",
            "/save needs a file that ends in one of: .locret, .md, .txt, .json",
            "there is no document to save",
            "nothing was said yet",
            "nothing was asked yet",
            "nothing was said yet that could be pinned",
        ],
        strict=True,
    ):
        assert line.startswith(begin)


def test_a_document_is_read_asked_shown_and_saved(piped, backbone, tmp_path):
    book, saved = tmp_path / "my book.txt", tmp_path / "book.locret"
    book.write_text(TEXT * 3)
    lines = [
        "/budget 64",
        "/budget",
        f"/read {book}",
        "/kept",
        "Who came in?",
        "/pin",
        "/kept",
        "/stats",
        f"/save {saved}",
    ]
    lines += [f"/save {tmp_path / name}" for name in ("said.md", "said.txt", "said.json", "said.md")]
    status, out, err = piped("\n".join([*lines, f"/save {book}"]))
    assert status == 1  # the last line
    model = chat(backbone)
    document = Document.read(model.model, model.tokenizer, TEXT * 3, RunSettings(budget=64, chunk=32), "h2o")
    about = document.chat(128, max_new_tokens=6)
    answer = answers(about, "Who came in?")
    assert f"\n{answer}" in out and out.count("tokens kept on average, in 3 layers of 2 heads") == 2
    assert f"my book.txt: {document.tokens} tokens, 64 slots" in err and "budget for the next /read: 64" in err
    assert f"document: my book.txt, {document.tokens} tokens" in err and "budget 192" in err
    assert (
        err.rstrip().splitlines()[-1]
        == f"locret-chat: file='{book}' is there already: name another file, or remove it first"
    )
    assert book.read_text() == TEXT * 3
    turn = [{"role": "user", "content": "Who came in?"}, {"role": "assistant", "content": answer[:-1]}]
    said = json.loads((tmp_path / "said.json").read_text())
    assert (said["document"], said["messages"]) == ("my book.txt", turn)
    assert (tmp_path / "said.md").read_text() == f"## User\n\nWho came in?\n\n## Assistant\n\n{answer.strip()}\n"
    assert (tmp_path / "said.txt").read_text() == f"user: Who came in?\n\nassistant: {answer.strip()}\n"
    # the file alone gives the same answer
    assert piped("Who came in?\n", str(saved))[:2] == (0, answer)
    again, out, _ = piped(f"/read {saved}\nWho came in?\n/read {saved} --budget 5\n")
    assert (again, out) == (1, answer)


def test_undo_and_retry(piped, tmp_path):
    lines = [
        "What is it?",
        "Who came in?",
        "/retry",
        f"/save {tmp_path / 'a.json'}",
        "/undo",
        f"/save {tmp_path / 'b.json'}",
    ]
    status, out, err = piped("\n".join([*lines, "/retry", "/stats"]), "--temperature", "1.0", "--seed", "3")
    before, after = (json.loads((tmp_path / name).read_text())["messages"] for name in ("a.json", "b.json"))
    first, second, third, fourth = out.splitlines()
    assert status == 0 and len({second, third, fourth}) > 1
    assert [said["content"] for said in before] == ["What is it?", first, "Who came in?", third]
    assert after == before[:2] and "forgotten: Who came in?" in err and "turns: 2" in err


def test_retry_after_an_undone_turn_asks_again(piped):
    status, out, err = piped("\n".join(["What is it?", "What is it?", "/undo", "/retry", "/stats"]))
    _, second, third = out.splitlines()
    assert status == 0 and third == second and "turns: 2" in err


def test_pinned_text_is_held_while_turns_are_evicted(piped):
    lines = ["The pass key is 12345, remember it.", "/pin key is 12345", "/pin never said"]
    lines += [f"And what about boat number {i}, which came in?" for i in range(12)]
    _, out, err = piped("\n".join([*lines, "/kept", "/stats"]), policy="streaming")
    assert "locret-chat: 'never said' does not occur in the conversation" in err and "pinned: " in err
    assert "key is 12345" in out and "remember it" not in out
    assert int(err.split("evictions: ")[1].split()[0]) > 0


def test_the_last_token_of_a_cut_answer_is_pinned_before_it_is_read(piped, backbone):
    last = answers(chat(backbone), "What is it?").strip()[-1]
    _, _, err = piped(f"What is it?\n/pin {last}\n")
    assert err.splitlines()[-1] == "pinned: 1 tokens"


def test_every_command_is_a_method_and_help_names_it(piped):
    assert all(callable(getattr(Talk, name)) for name in COMMANDS if name != "quit")
    status, _, err = piped("/help\n/quit\nWhat is it?\n")
    assert status == 0 and all(f"/{name}" in err for name in COMMANDS) and "cut after" not in err


def test_what_cannot_work_is_said_before_anything_is_loaded(tmp_path, capsys):
    (tmp_path / "bad.locret").write_text("no")
    for words, said in (
        (["nowhere.txt", "--model", "nowhere"], "file='nowhere.txt' does not exist: name a file"),
        ([str(tmp_path / "bad.locret")], "is no saved cache"),
        (["--history", "0", "--model", "nowhere"], "history=0 must be at least 1"),
    ):
        assert main(words) == 1
        err = capsys.readouterr().err
        assert said in err and err.count("\n") == 1


@given(st.lists(st.text("ab é漢\n", max_size=6)), st.integers(2, 12))
def test_lines_break_between_words(pieces, columns):
    text, lines = "".join(pieces), Lines(columns)
    shown = "".join(map(lines.feed, pieces)) + lines.end()
    words = re.sub("漢", " 漢 ", text).split()
    assert re.sub("漢", " 漢 ", shown).split() == words
    widest = max(columns, *map(get_cwidth, words), 0)
    assert all(get_cwidth(line) <= widest for line in shown.split("\n"))
    if all(get_cwidth(line) <= columns for line in text.split("\n")):  # nothing is broken that fits
        assert shown == text + "\n" * bool(text and not text.endswith("\n"))


def test_a_word_longer_than_a_line_is_shown_as_it_comes():
    lines = Lines(6)
    shown = [lines.feed(piece) for piece in ("Here ", "abc", "def", "ghi", "j", " k")]
    assert shown == ["Here ", "", "", "\nabcdefghi", "j", ""]
    assert lines.end() == "\nk\n"
    lines = Lines(10)
    assert lines.feed("\tab cd") + lines.end() == "\tab\ncd\n"  # a tabulator goes to the eighth column


# ---- a terminal ------------------------------------------------------------------------------------------------------


def talk(backbone: str, *words: str, tokens: int = 250) -> list[str]:
    said = ["--model", backbone, "--policy", "h2o", *SETTINGS, "--max-new-tokens", str(tokens), *words]
    return [sys.executable, "-m", "locret_kit.cli.chat", *said]


def follows(said: str, length: int) -> Callable[[str], bool]:
    """Whether more than so many characters follow a text on the screen."""
    return lambda screen: said in screen and len(screen.rpartition(said)[2]) > length


def shown(said: str, times: int) -> Callable[[str], bool]:
    """Whether the screen shows a text so many times."""
    return lambda screen: screen.count(said) == times


def test_a_talk_in_a_terminal(backbone, tmp_path):
    small, large, history = tmp_path / "small.txt", tmp_path / "large.txt", tmp_path / "history"
    small.write_text(TEXT * 2)
    large.write_text(TEXT * 2000)
    with Tmux(talk(backbone, "--history-file", str(history), tokens=4000), env=HERE) as window:
        window.until("/help")
        window.type("What is it?")
        # streams: a part of the answer is there before its end
        part = window.until(follows("What is it?", 40))
        assert "cut after" not in part
        whole = window.until("cut after max_new_tokens=4000")
        assert whole.startswith(part.rstrip("> \n")) and len(whole) > len(part)

        window.paste("naïve \U0001f600\nWho came in?\nAnd when?")
        window.until("And when?")
        window.keys("Enter")
        window.until(follows("And when?", 40))
        window.keys("C-c")
        window.until("stopped")
        window.type("/stats")
        window.until("last answer")
        window.until("turns: 2\n")

        window.type("one\\")
        window.keys("t", "w", "o", "M-Enter")
        window.type("three")
        window.until("> one\n  two\n  three")
        window.until(follows("three", 40))
        window.type("/stats")  # waits, and is dropped by Ctrl-C, as in a shell
        window.keys("C-c")
        window.until(shown("stopped", 2))
        window.type("/undo")
        window.until("forgotten: one two three")
        window.type("/retry")
        window.until(follows("/retry", 120))
        window.keys("C-c")
        window.until(shown("stopped", 3))

        window.type(f"/read {large}")
        window.until(" s left")
        window.keys("C-c")
        window.until(shown("stopped", 4))
        window.type("/stats")
        assert "document: none\nturns: 3" in window.until(shown("last answer", 2)).split("/read")[-1]
        window.type(f"/read {small} --budget 64")
        window.until("tokens, 64 slots")
        window.type("/stats")
        window.until("document: small.txt")
        window.keys("Up")  # the history
        window.until(shown("> /stats", 4))
        window.keys("C-c")
        window.until("Ctrl-C again")
        window.type("/quit")
        window.until("status 0")
    lines = history.read_text()
    assert "+/quit" in lines and "+Who came in?" in lines and stat.S_IMODE(history.stat().st_mode) == 0o600


def test_a_narrow_terminal_without_colours(backbone, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT * 60)
    words = talk(backbone, str(tmp_path / "text.txt"), "--budget", "64", tokens=4)
    with Tmux(words, env={**HERE, "NO_COLOR": "1", "PAGER": "cat"}, columns=30, rows=20) as window:
        window.until("/help")
        window.type("/kept")
        window.until("12345")
        assert "\033[1m" not in window.colors and "\033[2m" not in window.colors
        window.keys("C-c", "C-c")
        window.until("status 0")
