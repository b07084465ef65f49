"""``locret-chat book.locret``: a conversation in a terminal, about a document or about anything.

Messages come from a line editor in a terminal, or from lines of stdin. Answers go to stdout, all else to stderr. In a terminal
Ctrl-C sets a flag, which is looked at between two pieces of work: no forward is left in the middle.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..cache.file import SUFFIX, is_saved, read_record
from ..config.infer_options import CHAT, TEMPLATE, ChatOptions
from ..config.schema import refuse
from ..files import write_text
from ..naming import first_line, nearest
from ..settings import RunSettings
from .command import check_target, collapse, entry, evidence_lines, install_hint, note, progress, text_of, to_stdout

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..documents.document import Document
    from .loading import ModelChoice

PATIENCE_S = 2
"""Seconds of reading a message after which its progress is shown."""


class Stopped(KeyboardInterrupt):
    """Ctrl-C in a terminal: between two pieces of work, or pressed again."""


class Left(Exception):
    """/quit."""


class Screen:
    """The terminal, or pipes without prompts and greetings.

    Args:
        history_file: file to store the terminal's messages; None keeps them in memory.

    Raises:
        OSError: the history file cannot be written.
    """

    def __init__(self, history_file: str | None = None) -> None:
        self.status = 0  # of the command: 1 after an error in pipes
        self._pressed = False
        self._editor: PromptSession[str] | None = None
        if sys.stdin.isatty() and (sys.stdout.isatty() or sys.stderr.isatty()):
            self._editor = line_editor(history_file)
            signal.signal(signal.SIGINT, self._press)

    def _press(self, *_: object) -> None:
        """Note Ctrl-C. A second one does not wait for a piece of work."""
        if self._pressed:
            raise Stopped
        self._pressed = True

    def messages(self) -> Iterator[str]:
        """Messages until the end of input: lines, each joined with the next where it ends with a backslash, none blank."""
        earlier = ""
        for line in self._lines() if self._editor is None else self._typed(self._editor):
            earlier = "" if line is None else earlier + line
            if earlier.endswith("\\"):
                earlier = earlier[:-1] + "\n"
                continue
            if earlier.strip():
                yield earlier
            earlier = ""
        if earlier.strip():
            yield earlier

    def _typed(self, editor: PromptSession[str]) -> Iterator[str | None]:
        """Lines; None where Ctrl-C takes back what was typed."""
        while True:
            try:
                self._pressed = False
                yield editor.prompt("> ", prompt_continuation="  ")
            except EOFError:
                return
            except KeyboardInterrupt:
                note("Ctrl-D leaves")
                yield None

    def _lines(self) -> Iterator[str | None]:
        for number, line in enumerate(sys.stdin.buffer, 1):
            try:
                yield line.decode().removeprefix("\ufeff" * (number == 1)).rstrip("\r\n")
            except UnicodeDecodeError as error:
                self.complain(f"line {number} of stdin is not UTF-8: byte {error.start}")

    def progress(self, patience_s: float = 0, full: float = 0) -> Callable[[int, int], None]:
        """A progress function for prefill: a line on stderr after ``patience_s`` seconds. After Ctrl-C, also where it was pressed
        since the last prompt, it raises Stopped.

        ``full``: see ``command.progress``.
        """
        show, began = progress("read", full), time.monotonic()

        def step(done: int, total: int) -> None:
            if time.monotonic() - began >= patience_s:
                show(done, total)
            if self._pressed:
                note("")  # ends the line
                raise Stopped

        return step

    def stream(self, pieces: Generator[str, None, None]) -> None:
        """Write an answer while it comes, and end its line."""
        last = "\n"
        try:
            with closing(pieces):
                for piece in collapse(pieces):
                    to_stdout(piece)
                    last = piece[-1:] or last
                    if self._pressed:
                        raise Stopped
        finally:
            to_stdout("" if last == "\n" else "\n")

    def greet(self, text: str) -> None:
        """Say something to a person alone."""
        if self._editor is not None:
            note(text)

    def complain(self, text: str) -> None:
        """Say an error."""
        self.status = int(self._editor is None)
        note(text if self._editor is not None else f"locret-chat: {text}")


def line_editor(history_file: str | None) -> PromptSession[str]:
    """A line editor with history. Enter sends, Alt-Enter begins another line, and so does a pasted end of a line."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, History, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
    from prompt_toolkit.output import create_output

    keys = KeyBindings()

    @keys.add("escape", "enter")
    @keys.add("escape", "c-j")  # the same keys, pressed before the prompt was there
    def another_line(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    history: History = InMemoryHistory()
    if history_file is not None:
        path = Path(history_file).expanduser()
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))  # what is said there is its owner's
        history = FileHistory(str(path))
    output = create_output(always_prefer_tty=True)
    return PromptSession(history=history, key_bindings=keys, enable_suspend=True, output=output)


@dataclass
class Talk:
    """A conversation and its commands, about no document yet."""

    args: ChatOptions
    chosen: ModelChoice
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    generation: dict[str, Any]
    screen: Screen
    document: Document | None = None
    asked: str = ""
    """The last message."""
    turns: int = 0
    """Number of turns before it."""

    def __post_init__(self) -> None:
        from ..documents.conversation import Chat

        self.generation = {**self.generation, "thoughts": self.args.thoughts}
        self.written = set[Path]()
        self.chat = Chat(
            self.model, self.tokenizer, settings=replace(self.args.run, budget=self.args.history),
            policy=self.chosen.policy, heads=self.chosen.heads, system=self.args.system, **self.generation,
        )  # fmt: skip

    def begin(self, document: Document) -> None:
        """Talk about a document, from its first turn on."""
        document.prepare()
        args, cache = self.args, document.cache
        self.chat = document.chat(args.history, evidence=self.args.evidence, **self.generation)
        self.document, self.asked, self.turns = document, "", 0
        if args.system:
            note("the system prompt is left out: a document's conversation has the template's")
        sizes = f"{document.tokens} tokens, {cache.settings.budget} slots, {cache.nbytes / 2**20:.1f} MiB"
        note(f"{document.title or 'untitled'}: {sizes}")

    def hold(self) -> None:
        """Answer messages until the last one, or /quit."""
        for message in self.screen.messages():
            try:
                self.take(message)
            except Left:
                return
            except Stopped:
                note("stopped")
            except BrokenPipeError:
                raise
            except (ValueError, OSError, ImportError, RuntimeError) as error:
                hint = install_hint(error) if isinstance(error, ImportError) else ""
                self.screen.complain(first_line(error) + hint)

    def take(self, message: str) -> None:
        """Answer a message or run a command.

        Raises:
            Left: /quit. Stopped: by Ctrl-C. ValueError, OSError, ImportError, RuntimeError: errors that the user can fix.
        """
        if not message.startswith("/") or message.startswith("//"):
            self._ask(message.removeprefix("/"))
            return
        name, words = (*message[1:].split(None, 1), "", "")[:2]
        words = words.strip()
        if name not in COMMANDS:
            near = nearest(f"/{name}", [f"/{known}" for known in COMMANDS])
            raise ValueError(f"unknown command '/{name}'.{near or ' /help lists them; // begins a message with /'}")
        argument = COMMANDS[name][0]
        if words and not argument:
            raise ValueError(f"/{name} takes no arguments, not {words!r}")
        if argument and not words:
            raise ValueError(f"/{name} needs a file: /{name} {argument}")
        getattr(self, name)(*filter(None, [words]))

    def _ask(self, question: str) -> None:
        self.asked, self.turns = question, len(self.chat.turns)
        self._stream(self.chat.say(question, self.screen.progress(PATIENCE_S)))

    def _stream(self, pieces: Generator[str, None, None]) -> None:
        self.screen.stream(pieces)
        if (answer := self.chat.answer) is not None:
            empty = () if str(answer).strip() else ("an empty answer",)
            for line in (*evidence_lines(answer), *answer.notices, *empty):
                note(line)

    def retry(self) -> None:
        """Ask the last message again."""
        if not self.asked:
            raise ValueError("no question has been asked yet")
        if self.args.temperature == 0:
            note("at temperature 0 the answer is the same each time: try --temperature 0.7")
        progress = self.screen.progress(PATIENCE_S)
        undone = len(self.chat.turns) == self.turns  # or stopped before its first word
        self._stream(self.chat.say(self.asked, progress) if undone else self.chat.retry(progress))

    def thought(self) -> None:
        """Show the thought before the last answer."""
        if not self.chat.turns or not self.chat.turns[-1].thought:
            raise ValueError("the last answer has no thought")
        note(self.chat.turns[-1].thought)

    def undo(self) -> None:
        """Forget the last turn."""
        line = " ".join(self.chat.undo().question.split())
        note(f"forgotten: {line if len(line) <= 60 else line[:57] + '...'}")

    def read(self, file: str) -> None:
        """Read a text, or load a document, and begin a conversation about it."""
        path = check_file(file)
        if not is_saved(path):
            self.read_text(text_of(str(path)), path.name)
            return
        from ..documents.document import Document

        self.begin(Document.load(path, self.model, self.tokenizer, self.chosen.heads))

    def read_text(self, text: Iterable[str], title: str) -> None:
        """Begin a conversation about a text."""
        from ..documents.document import Document, DocumentText

        began = time.perf_counter()
        whole = DocumentText.of(self.tokenizer, text, True)
        run = self.chosen.for_text(self.args.run, self.model, whole.ids, note, self.args.history)
        document = Document.read(
            self.model, self.tokenizer, whole, run, self.chosen.policy, self.chosen.heads, title=title,
            progress=self.screen.progress(full=run.budget or 0),
        )  # fmt: skip
        self.begin(document)
        note(f"read in {time.perf_counter() - began:.1f} s; /save FILE{SUFFIX} keeps what was read")

    def save(self, file: str) -> None:
        """Save the document as .locret, or the conversation as .md."""
        path = Path(file).expanduser()
        if path.suffix not in (SUFFIX, ".md"):
            raise ValueError(f"/save needs a file that ends in {SUFFIX} or .md")
        check_target(path, "file", replace=path.resolve() in self.written)
        if path.suffix == SUFFIX:
            if self.document is None:
                raise ValueError("there is no document to save: /read one, or save the conversation as .md")
            self.document.save(path, names=replace(self.chosen, policy=self.document.cache.policy).names)
        else:
            if not self.chat.turns:
                raise ValueError("the conversation is empty")
            write_text(path.resolve(), self._markdown())
        self.written.add(path.resolve())
        note(f"saved: {path}, {path.stat().st_size / 2**10:.1f} KiB")

    def quit(self) -> None:
        """Leave; so does Ctrl-D."""
        raise Left

    def help(self) -> None:
        """List the commands."""
        lines = [f"/{name} {argument}".rstrip() + f"\n    {meaning}" for name, (argument, meaning) in COMMANDS.items()]
        keys = "Enter sends; Alt-Enter, or a backslash at the end, begins another line; Ctrl-C stops an answer."
        note("\n".join((*lines, keys, "// begins a message with /.")))

    def _markdown(self) -> str:
        """The conversation as Markdown."""
        turns = [("System", self.args.system)] if self.args.system and self.document is None else []
        for turn in self.chat.turns:
            turns += [("User", turn.question), ("Assistant", turn.answer)]
        return "\n\n".join(f"## {role}\n\n{text.strip()}" for role, text in turns) + "\n"


COMMANDS = {
    name: ("FILE" if name in ("read", "save") else "", getattr(Talk, name).__doc__)
    for name in ("read", "thought", "undo", "retry", "save", "help", "quit")
}
"""Arguments and meaning of each command, a method of ``Talk``."""


def check_file(file: str) -> Path:
    """The path of a file. Raises ValueError where there is none."""
    path = Path(file).expanduser()
    if path.is_dir() or not path.exists():
        raise ValueError(f"file={file!r} {'is a folder' if path.is_dir() else 'does not exist'}: name a file")
    return path


def run(args: ChatOptions) -> int:
    """Load, then talk. Raises ValueError or OSError with a one-line message."""
    file = check_file(args.file) if args.file is not None else None
    saved = file is not None and is_saved(file)
    text: Iterable[str] = ()
    if file is not None:  # before torch is imported: a file that is wrong is turns at once
        if saved:
            read_record(file)
        else:
            text = text_of(str(file))
    from .loading import generation_of, open_document, resolve_choice

    generation = generation_of(args)
    screen, document = Screen(args.history_file), None
    screen.greet("loading the model ...")
    if saved:
        document, chosen = open_document(str(file), args)
        refuse(args, () if document.chat_template else TEMPLATE, "on a document that was read with --no-chat")
        model, tokenizer = document.model, document.tokenizer
    else:
        chosen = resolve_choice(args.ckpt, args.model, args.adapter, args.policy, args.run)
        model, tokenizer = chosen.load(args)
    for line in chosen.warnings:
        note(line)
    talk = Talk(args, chosen, model, tokenizer, generation, screen)
    if document is not None:
        talk.begin(document)
        values = {item.name: getattr(args, item.name) for item in fields(RunSettings) if item.name != "seed"}
        given = [f"{name}={value}" for name, value in values.items() if value is not None and value is not False]
        if given:
            said = f"texts that /read reads have {', '.join(given)}"
            note(f"{file} keeps the settings that it was read with; {said}")
    elif file is not None:
        try:
            talk.read_text(text, file.name)
        except Stopped:
            note("stopped: nothing was read")
    screen.greet(f"{chosen.backbone}, policy {chosen.policy.name}; /help lists the commands")
    talk.hold()
    return screen.status


main = entry(CHAT, run, also=(RuntimeError,))
"""Exit status 0, also after Ctrl-D; 1 in a pipe after an error of any message."""
