"""A conversation with its commands, as a terminal holds it."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Generator, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from ..config.chat_options import READ, ChatOptions
from ..config.command_line import given_by
from ..naming import first_line, nearest
from ..sizes import show
from .command import install_hint
from .loading import Chosen, check_run, counted_text
from .terminal import check_target, text_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..cache.bounded import BoundedCache
    from ..documents.document import Document
    from ..runtime.session import Sampling
    from .screen import Pipes

SAVED = ".locret"
"""Extension of documents."""
COMMANDS = {
    "read": ("FILE [--budget N ...]", "read a document, or load a .locret one, and begin a conversation about it"),
    "budget": ("[N]", "slots for the next /read, or with a point a share of its tokens; without N say how many"),
    "stats": ("", "tokens, turns, slots, memory, and the speed of the last answer"),
    "kept": ("", "the text that the cache holds: bright in at least half of the layers' heads, dim below the average"),
    "pin": ("[TEXT]", "never evict this text of the conversation, or your last message"),
    "undo": ("", "forget the last turn"),
    "retry": ("", "ask the last message again"),
    "save": ("FILE", "a .locret file: the document; .md, .txt or .json: the conversation"),
    "help": ("", "list the commands"),
    "quit": ("", "leave; so does Ctrl-D"),
}
"""Arguments and meaning of each command, a method of ``Talk``."""


class Generating(TypedDict):
    """Options of every answer."""

    max_new_tokens: int
    sampling: Sampling
    seed: int


class Talk:
    """A conversation and its commands, about no document yet."""

    def __init__(
        self,
        args: ChatOptions,
        chosen: Chosen,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        sampling: Sampling,
        screen: Pipes,
    ) -> None:
        from ..documents.conversation import Chat

        self.args, self.chosen, self.model, self.tokenizer = args, chosen, model, tokenizer
        self.screen, self.run = screen, args.run
        self._generation = Generating(max_new_tokens=args.max_new_tokens, sampling=sampling, seed=args.seed)
        self._asked, self._turns = "", 0  # the last message, and how many turns were before it
        self._took = 0.0  # seconds of the last answer
        self._written: set[Path] = set()
        self.document: Document | None = None
        self.chat = Chat(
            model, tokenizer, settings=replace(args.run, budget=args.history), policy=chosen.policy, heads=chosen.heads,
            system=args.system, **self._generation,
        )  # fmt: skip

    def begin(self, document: Document) -> None:
        """Talk about a document, from its first turn on."""
        document.prepare()
        self.chat = document.chat(self.args.history, **self._generation)
        self.document, self._asked, self._turns, cache = document, "", 0, document.cache
        if self.args.system:
            self.screen.note("the system prompt is left out: a document's conversation has the template's")
        self.screen.note(
            f"{document.title or 'untitled'}: {document.tokens} tokens, {cache.settings.budget} slots, "
            f"{cache.nbytes / 2**20:.1f} MiB"
        )

    def hold(self) -> None:
        """Answer messages until the last one, or /quit."""
        from .screen import Stopped

        for message in self.screen.messages():
            try:
                with self.screen.working():
                    if not self.take(message):
                        return
            except Stopped:
                self.screen.note("stopped")
            except BrokenPipeError:
                raise
            except (ValueError, OSError, ImportError, RuntimeError) as error:
                self.screen.complain(
                    first_line(error) + (install_hint(error) if isinstance(error, ImportError) else "")
                )

    def take(self, message: str) -> bool:
        """Answer a message, or do what a command says; False after /quit.

        Raises:
            Stopped: by Ctrl-C. ValueError, OSError, ImportError, RuntimeError: what the user can mend.
        """
        if not message.startswith("/") or message.startswith("//"):
            self._ask(message.removeprefix("/"))
            return True
        name, words = (*message[1:].split(None, 1), "", "")[:2]
        words = words.strip()
        if name not in COMMANDS:
            near = nearest(f"/{name}", [f"/{known}" for known in COMMANDS])
            raise ValueError(f"unknown command '/{name}'.{near or ' /help lists them; // begins a message with /'}")
        if words and not COMMANDS[name][0]:
            raise ValueError(f"/{name} takes no words, not {words!r}")
        if name == "quit":
            return False
        method = getattr(self, name)
        method(words) if COMMANDS[name][0] else method()
        return True

    # ---- answers ---------------------------------------------------------------------------------------------------

    def _ask(self, question: str) -> None:
        self._asked, self._turns = question, len(self.chat.turns)
        self._stream(self.chat.say(question, self.screen.progress("read", patience_s=2)))

    def _stream(self, pieces: Generator[str, None, None]) -> None:
        began = time.perf_counter()
        try:
            self.screen.stream(pieces)
        finally:
            self._took = time.perf_counter() - began
        answer = self.chat.answer
        if answer is not None and not str(answer).strip():
            self.screen.note("an empty answer")
        elif answer is not None and answer.finish_reason == "length":
            self.screen.note(f"cut after max_new_tokens={self.args.max_new_tokens}")

    def retry(self) -> None:
        again = self.screen.progress("read", patience_s=2)
        if not self._asked:
            raise ValueError("nothing was asked yet")
        if self.args.temperature == 0:
            self.screen.note("at temperature 0 the answer is the same each time: --temperature 0.7 draws others")
        if len(self.chat.turns) > self._turns:
            self._stream(self.chat.retry(again))
        else:  # it was stopped before its first word, or undone
            self._stream(self.chat.say(self._asked, again))

    def undo(self) -> None:
        self.screen.note(f"forgotten: {_short(self.chat.undo().question)}")

    def pin(self, text: str) -> None:
        from ..runtime.kept_text import kept_heads

        start, end = self.chat.pin(text or None)
        assert self.chat.cache is not None
        heads_LT, n_heads = kept_heads(self.chat.cache, min(end, self.chat.cache.get_seq_length()))
        read_LT = heads_LT[:, start:]  # not yet the last token of an answer that was cut
        gone = 1 - float(read_LT.mean()) / n_heads if read_LT.size else 0.0
        was = f"; {gone:.0%} of their slots were evicted before" if gone else ""
        self.screen.note(f"pinned: {end - start} tokens{was}")

    # ---- documents -------------------------------------------------------------------------------------------------

    def read(self, words: str) -> None:
        if not words:
            raise ValueError("/read needs a file: /read FILE [--budget N ...]")
        whole = Path(words).expanduser().is_file()  # blanks in its name need no quotes
        given = given_by(READ, ["--file", words] if whole else shlex.split(words))
        if "file" not in given:
            raise ValueError("/read needs a file: /read FILE [--budget N ...]")
        self.open(check_file(str(given.pop("file"))), given)

    def open(self, path: Path, given: dict[str, object]) -> None:
        """Begin a conversation about a file, read with the settings that are ``given``."""
        if path.suffix == SAVED:
            from ..documents.document import Document

            if given:
                raise ValueError(f"{path} was read before: {', '.join(given)} cannot be changed")
            self.begin(Document.load(path, self.model, self.tokenizer, self.chosen.heads))
            return
        self.read_text(text_of(str(path)), path.name, **given)

    def read_text(self, text: Iterable[str], title: str, **given: object) -> None:
        """Begin a conversation about a text."""
        from ..documents.document import Document

        run = replace(self.run, **given)  # type: ignore[arg-type]
        check_run(run, self.chosen.config)
        began = time.perf_counter()
        whole, run = counted_text(
            text, run, self.chosen, self.model, self.tokenizer, self.screen.note, turns=self.args.history
        )
        document = Document.read(
            self.model, self.tokenizer, whole, run, self.chosen.policy, self.chosen.heads, title=title,
            progress=self.screen.progress("read"),
        )  # fmt: skip
        self.begin(document)
        self.screen.note(f"read in {time.perf_counter() - began:.1f} s; /save FILE{SAVED} keeps what was read")

    def budget(self, words: str) -> None:
        if words:
            self.run = replace(self.run, **given_by(READ, ["--budget", words]))  # type: ignore[arg-type]
        config = self.chosen.config
        published = self.run.resolved(config.inference if config else {}, 1).budget
        now = "" if self.document is None else f"; this document has {self.document.cache.settings.budget} slots"
        budget = self.run.budget or f"a quarter of its tokens, at least {published}"
        self.screen.note(f"budget for the next /read: {budget}{now}")

    def save(self, words: str) -> None:
        path = Path(words).expanduser()
        if not words or path.suffix not in (SAVED, *WRITERS):
            raise ValueError(f"/save needs a file that ends in one of: {SAVED}, {', '.join(WRITERS)}")
        check_target(path, "file", replace=path.resolve() in self._written)
        if path.suffix == SAVED:
            if self.document is None:
                raise ValueError("there is no document to save: /read one, or save the conversation as .md")
            self.document.save(path, names=self.chosen.names)
        else:
            from ..files import write_text

            if not self.chat.turns:
                raise ValueError("nothing was said yet")
            write_text(path, WRITERS[path.suffix](self))
        self._written.add(path.resolve())
        size = path.stat().st_size
        self.screen.note(f"saved: {path}, {show(size) if size >= 2**20 else f'{size / 2**10:.1f} KiB'}")

    # ---- what there is ---------------------------------------------------------------------------------------------

    def _cache(self) -> BoundedCache | None:
        """The cache of the turns so far, or else of the document; None where it holds nothing."""
        cache = self.chat.cache
        if cache is None and self.document is not None:
            cache = self.document.cache
        return cache if cache is not None and cache.get_seq_length() else None

    def stats(self) -> None:
        chat, document, answer = self.chat, self.document, self.chat.answer
        about = "none" if document is None else f"{document.title or 'untitled'}, {document.tokens} tokens"
        lines = [f"document: {about}", f"turns: {len(chat.turns)}"]
        if (cache := self._cache()) is not None:
            kept_rows, room = cache.kept_rows, max(rows.capacity for rows in cache.bounded)
            slots = f"{min(kept_rows)} to {max(kept_rows)}" if min(kept_rows) < max(kept_rows) else f"{max(kept_rows)}"
            lines += [
                f"read: {cache.get_seq_length()} tokens, the answers' included",
                f"slots: {slots} of {room} per layer and head; budget {cache.settings.budget}",
                f"memory: {cache.nbytes / 2**20:.1f} MiB",
                f"evictions: {cache.counters.evictions}",
            ]
        if answer is not None and answer.tokens:
            writing = self._took - answer.first_token_s
            rate = f"{(len(answer.tokens) - 1) / writing:.1f} tok/s, " if len(answer.tokens) > 1 else ""
            lines.append(
                f"last answer: {len(answer.tokens)} tokens in {self._took:.1f} s, {rate}"
                f"the first after {answer.first_token_s:.2f} s"
            )
        self.screen.note("\n".join(lines))

    def kept(self) -> None:
        from ..runtime.kept_text import highlight, kept_heads, levels, token_texts

        cache, document = self._cache(), self.document
        if cache is None:
            raise ValueError("the cache is empty: a short text is read with each question")
        if document is not None and not document.has_text:
            raise ValueError("the document was saved without its text, so none can be shown")
        ids = self.chat.ids if document is None or self.chat.cache is not None else document.ids
        ids = ids[: cache.get_seq_length()]
        heads_LT, n_heads = kept_heads(cache, len(ids))
        share_T = heads_LT.mean(0) / n_heads
        texts = [self.screen.shown(text) for text in token_texts(self.tokenizer, ids)]
        text = highlight(texts, levels(share_T), color=self.screen.colored(sys.stdout))
        self.screen.page(
            f"{share_T.mean():.1%} of {len(ids)} tokens kept on average, in {len(heads_LT)} layers of {n_heads} heads; "
            f"{(share_T >= 0.5).sum()} tokens in at least half of the heads, {(share_T == 0).sum()} in none\n\n{text}"
        )

    def help(self) -> None:
        lines = [f"/{name} {words}".rstrip() + f"\n    {meaning}" for name, (words, meaning) in COMMANDS.items()]
        keys = "Enter sends; Alt-Enter, or a backslash at the end, begins another line; Ctrl-C stops an answer."
        self.screen.note("\n".join((*lines, keys, "// begins a message with /.")))

    def messages(self) -> list[dict[str, str]]:
        """The conversation as roles and contents."""
        said = [{"role": "system", "content": self.args.system}] if self.args.system and self.document is None else []
        for turn in self.chat.turns:
            said += [{"role": "user", "content": turn.question}, {"role": "assistant", "content": turn.answer}]
        return said


def _json(talk: Talk) -> str:
    document = talk.document.title if talk.document is not None else None
    saved = {"model": talk.chosen.backbone, "document": document, "messages": talk.messages()}
    return json.dumps(saved, indent=2, ensure_ascii=False) + "\n"


def _markdown(talk: Talk) -> str:
    return (
        "\n\n".join(f"## {said['role'].capitalize()}\n\n{said['content'].strip()}" for said in talk.messages()) + "\n"
    )


def _plain(talk: Talk) -> str:
    return "\n\n".join(f"{said['role']}: {said['content'].strip()}" for said in talk.messages()) + "\n"


WRITERS = {".md": _markdown, ".txt": _plain, ".json": _json}
"""The conversation as text, by a file's extension."""


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else line[:57] + "..."


def check_file(file: str) -> Path:
    """The path of a file. Raises ValueError where there is none."""
    path = Path(file).expanduser()
    if path.is_dir() or not path.exists():
        raise ValueError(f"file={file!r} {'is a folder' if path.is_dir() else 'does not exist'}: name a file")
    return path
