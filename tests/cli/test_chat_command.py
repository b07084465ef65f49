"""``locret-chat``: through pipes in this process, and in a real terminal."""

import os
import pty
import select
import stat
import sys
import time

import pytest
import torch
from forked import renew_threads, status_of
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from tiny_tokenizer import TEXT, save_tiny_backbone
from transformers import AutoModelForCausalLM, AutoTokenizer

from locret_kit import Chat, Document
from locret_kit.cli.chat import COMMANDS, Screen, Stopped, Talk, line_editor, main
from locret_kit.settings import RunSettings

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
def piped(backbone, command):
    """Run the command over lines of stdin; ``(status, stdout, stderr)``."""

    def run(said: str | bytes, *words: str, policy: str = "h2o") -> tuple[int, str, str]:
        given = ["--model", backbone, "--policy", policy, *SETTINGS, "--max-new-tokens", "6", *words]
        return command(main, *given, stdin=said)

    return run


def chat(backbone: str, **settings) -> Chat:
    """The same conversation without the command."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(backbone), AutoTokenizer.from_pretrained(backbone)
    settings |= dict(settings=RunSettings(budget=128, chunk=32), policy="h2o", max_new_tokens=6)
    return Chat(model, tokenizer, **settings)


def answers(chat: Chat, *questions: str) -> str:
    return "".join("".join(chat.say(question)) + "\n" for question in questions)


def test_a_line_is_a_message_and_stdout_holds_answers_alone(piped, backbone):
    status, out, err = piped("What is it?\n\nWho came in?\\\nAnd when?\n//what\n")
    assert status == 0
    assert out == answers(chat(backbone), "What is it?", "Who came in?\nAnd when?", "/what")
    assert "\033" not in out + err and "cut after max_new_tokens=6" in err


def test_the_last_line_may_lack_its_end_and_a_mark_may_come_first(piped, backbone):
    expected = answers(chat(backbone, system="Be brief."), "What is it?", "Who?")
    assert piped("\ufeffWhat is it?\r\nWho?", "--system", "Be brief.")[:2] == (0, expected)
    assert piped("")[:2] == (0, "")


SAID = {
    b"/sav": "unknown command '/sav'. Did you mean '/save'?",
    b"/undo": "there is no turn to undo",
    b"/undo now": "/undo takes no arguments, not 'now'",
    b"/read nowhere.txt": "file='nowhere.txt' does not exist",
    b"/read": "/read needs a file",
    b"caf\xe9": "line 6 of stdin is not UTF-8: byte 3",
    b"/save x.txt": "/save needs a file that ends in .locret or .md",
    b"/save x.locret": "there is no document to save",
    b"/save x.md": "the conversation is empty",
    b"/retry": "no question has been asked yet",
}
"""Lines of a talk in which nothing was said yet, and what is said to them."""


def test_an_error_is_one_line_and_the_talk_goes_on(piped, backbone):
    status, out, err = piped(b"\n".join([*SAID, b"What is it?"]))
    assert (status, out) == (1, answers(chat(backbone), "What is it?"))
    said = [line.removeprefix("locret-chat: ") for line in err.splitlines() if line.startswith("locret-chat: ")]
    assert all(line.startswith(begin) for line, begin in zip(said, SAID.values(), strict=True)), said


def test_a_document_is_read_asked_shown_and_saved(piped, backbone, tmp_path):
    book, saved = tmp_path / "my book.txt", tmp_path / "book.locret"
    book.write_text(TEXT * 3)
    book.with_suffix(".md").write_text("mine")
    lines = [f"/read {book}", "Who came in?", f"/save {saved}"]
    lines += [f"/save {tmp_path / name}" for name in ("said.md", "said.md")]
    status, out, err = piped("\n".join([*lines, f"/save {book.with_suffix('.md')}"]), "--budget", "64")
    assert status == 1  # the last line
    model = chat(backbone)
    document = Document.read(model.model, model.tokenizer, TEXT * 3, RunSettings(budget=64, chunk=32), "h2o")
    about = document.chat(128, max_new_tokens=6)
    answer = answers(about, "Who came in?")
    assert out == answer and f"my book.txt: {document.tokens} tokens, 64 slots" in err
    assert err.rstrip().endswith("already exists: name another file, or remove it first")
    assert book.with_suffix(".md").read_text() == "mine"
    assert (tmp_path / "said.md").read_text() == f"## User\n\nWho came in?\n\n## Assistant\n\n{answer.strip()}\n"
    # the file alone gives the same answer, by any name
    saved = saved.rename(tmp_path / "book.safetensors")
    status, out, err = piped("Who came in?\n", str(saved), "--budget", "99")
    assert (status, out) == (0, answer)
    assert f"{saved} keeps the settings that it was read with; texts that /read reads have budget=99, chunk=32\n" in err
    assert piped(f"/read {saved}\nWho came in?\n")[:2] == (0, answer)


def test_undo_and_retry(piped, tmp_path):
    files = [tmp_path / name for name in ("a.md", "b.md")]
    lines = ["What is it?", "Who came in?", "/retry", f"/save {files[0]}", "/undo", f"/save {files[1]}"]
    status, out, err = piped("\n".join([*lines, "/retry"]), "--temperature", "1.0", "--seed", "3")
    before, after = (file.read_text() for file in files)
    first, second, third, fourth = out.splitlines()
    assert status == 0 and len({second, third, fourth}) > 1
    turns = [f"## User\n\n{q}\n\n## Assistant\n\n{a.strip()}\n" for q, a in zip(lines, (first, third), strict=False)]
    assert before == "\n".join(turns) and after == turns[0] and "forgotten: Who came in?" in err


def test_retry_after_an_undone_turn_asks_again(piped):
    status, out, _ = piped("\n".join(["What is it?", "What is it?", "/undo", "/retry"]))
    _, second, third = out.splitlines()
    assert status == 0 and third == second


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


# ---- a terminal ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("enter", ["\r", "\n"], ids=["at the prompt", "before it"])
def test_alt_enter_begins_another_line(enter):
    """A terminal sends another character for Enter while no prompt reads its keys."""
    with create_pipe_input() as keys, create_app_session(input=keys):
        keys.send_text(f"two\x1b{enter}three{enter}")
        assert line_editor(None).prompt("> ") == "two\nthree"


def test_ctrl_c_takes_back_the_lines_before(monkeypatch):
    """All lines of a message go, as in a shell."""
    with create_pipe_input() as keys, create_app_session(input=keys):
        screen = Screen()
        monkeypatch.setattr(screen, "_editor", line_editor(None))
        keys.send_text("one\\\rtwo\x03three\\\rfour\r\x04")
        assert [*screen.messages()] == ["three\nfour"]


def test_ctrl_c_before_the_work_begins_stops_it(capsys):
    screen = Screen()
    screen._press()
    with pytest.raises(Stopped):
        screen.progress()(1, 2)


PROMPT, SENT = "\x1b[?2004h", "\x1b[?2004l"
"""What a terminal is told as a prompt begins and ends: pasted texts come in brackets, and no longer."""


class Terminal:
    """The command in a terminal of its own, in a fork of this process."""

    def __init__(self, *words: str) -> None:
        self.child, self.device = pty.fork()
        if not self.child:
            renew_threads()
            sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, "rww"[number]) for number in range(3))
            os._exit(main([*words]))
        self.shown = ""

    def until(self, *texts: str, length: int = 0) -> None:
        """Read what is shown until these texts have come in this order, and so many characters after them."""
        end = time.monotonic() + 120
        for text in texts:
            while text not in self.shown or len(self.shown.partition(text)[2]) < length:
                assert select.select([self.device], [], [], end - time.monotonic())[0], self.shown
                self.shown += os.read(self.device, 4096).decode(errors="replace")
            self.shown = self.shown.partition(text)[2]

    def type(self, keys: str) -> None:
        os.write(self.device, keys.encode())


def test_a_talk_in_a_terminal(backbone, tmp_path, monkeypatch):
    """Answers stream until Ctrl-C, a pasted text is one message, and the history is its owner's."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("PROMPT_TOOLKIT_NO_CPR", "1")
    history, book = tmp_path / "history", tmp_path / "book.txt"
    book.write_text(TEXT * 2000)
    given = ["--model", backbone, "--policy", "h2o", *SETTINGS, "--max-new-tokens", "1000000", "--budget", "64"]
    window = Terminal(*given, "--history-file", str(history))
    window.until("/help lists the commands", PROMPT)
    window.type("What is it?\r")
    window.until(SENT, length=200)
    window.type("\x03")
    window.until("stopped", PROMPT)
    window.type("\x1b[200~Who came in?\nAnd when?\x1b[201~\r")
    window.until(SENT, length=200)
    window.type("/help\r\x03")  # what waited is dropped, as in a shell
    window.until("stopped", PROMPT)
    window.type("/undo\r")
    window.until("forgotten: Who came in? And when?", PROMPT)
    window.type(f"/read {book}\r")
    window.until(" left")
    window.type("\x03")
    window.until("stopped", PROMPT)
    window.type("\x1b[A\x03")  # a line of the history, and away with it
    window.until("Ctrl-D leaves", PROMPT)
    window.type("\x04")
    assert status_of(window.child) == 0
    lines = history.read_text()
    assert "+/undo" in lines and "+Who came in?" in lines and stat.S_IMODE(history.stat().st_mode) == 0o600


def test_thoughts_are_folded_bounded_and_switched(backbone, command, tmp_path):
    folder = tmp_path / "thinking"
    AutoModelForCausalLM.from_pretrained(backbone).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(backbone)
    switch = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}"
    tokenizer.chat_template += f"{{% if add_generation_prompt %}}{switch}{{% endif %}}"
    tokenizer.save_pretrained(folder)

    def run(*words: str, said: str = "What is it?\n/thought\n") -> tuple[int, str, str]:
        given = ["--model", str(folder), "--policy", "h2o", *SETTINGS, "--max-new-tokens", "6"]
        return command(main, *given, *words, stdin=said)

    status, out, err = run("--max-thought-tokens", "40")
    first, *lines, thought = err.splitlines()
    assert status == 0 and out.strip() and "think" not in out
    assert first == f"thought: {len(thought.split())} words"
    assert any("closed after max_thought_tokens=40: --max-thought-tokens N" in line for line in lines)
    status, out, err = run("--no-think", said="What is it?\n")
    assert status == 0 and "thought:" not in err and out.strip()
    status, _, err = run("--reasoning-effort", "low")
    assert status == 1 and "reasoning_effort=low: the model's chat template has no reasoning_effort" in err
