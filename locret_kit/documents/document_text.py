"""Text of a document and its tokens. A token is settled when no later text can change it."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from copy import copy
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from ..naming import last_part
from ..text.folder import HEADING
from ..text.template import Objects, has_template, render_messages, render_prompt
from ..text.tokens import IdStream
from ..text.untrusted import defused_pieces


class DocumentText:
    """The text of a document, after the chat template's first tokens.

    Args:
        stream: the tokens. chat: whether questions go through the chat template. before: the template's text before the
            document.
        unknown: number of first tokens without ids, if a file was saved without its text.
    """

    def __init__(self, stream: IdStream, *, chat: bool, before: str, unknown: int = 0) -> None:
        self.stream, self.chat, self.before, self.unknown = stream, chat, before, unknown

    @classmethod
    def begin(cls, tokenizer: PreTrainedTokenizerBase, chat: bool, max_tokens: int | None = None) -> DocumentText:
        """An empty text. Raises ValueError for a slow tokenizer."""
        before = render_prompt(tokenizer, "", chat=chat)[0]
        stream = open_stream(tokenizer, chat)
        stream.max_tokens = max_tokens
        stream.feed(before)
        return cls(stream, chat=chat, before=before)

    @classmethod
    def of(
        cls, tokenizer: PreTrainedTokenizerBase, text: str | Path | Iterable[str], chat: bool, max_tokens: int | None = None
    ) -> DocumentText:  # fmt: skip
        """The document text of a string, pieces or a file.

        Raises:
            ValueError: no text, or more than ``max_tokens``. OSError: the file cannot be read.
        """
        whole = cls.begin(tokenizer, chat, max_tokens)
        if not whole.feed(text):
            raise ValueError("the document holds no text")
        return whole

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.stream.tokenizer

    @property
    def tokens(self) -> int:
        """Number of tokens, including the template's before the text."""
        return self.unknown + len(self.stream.finish())

    @property
    def start(self) -> int:
        """Number of the template's tokens before the text."""
        stream = open_stream(self.tokenizer, self.chat)
        stream.feed(self.before)
        return len(stream.finish())

    @property
    def ids(self) -> array[int]:
        """Token ids; zeros for unknown ids."""
        return self.ids_before("")

    @property
    def settled(self) -> array[int]:
        """Token ids that no later text can change; zeros for unknown ids."""
        return self._with_unknown(self.stream.ids)

    @property
    def bare(self) -> bool:
        """Whether the text is missing: the file was saved without it, and nothing was added."""
        stream = self.stream
        return bool(self.unknown) and not stream.ids and all(map(_is_sign, stream.text[stream.done :]))

    def copy(self) -> DocumentText:
        """A separate copy that may get more text."""
        stream = copy(self.stream)
        stream.ids = array("i", stream.ids)
        return DocumentText(stream, chat=self.chat, before=self.before, unknown=self.unknown)

    def feed(self, text: str | Path | Iterable[str]) -> bool:
        """Add a string, pieces, or a file (see ``text.reader``) at the end. Returns whether it has a word.

        Raises:
            OSError, ValueError: the file cannot be read.
        """
        if isinstance(text, Path):
            from ..text.reader import read_document

            text = read_document(text)
        words, pieces = False, _strings([text] if isinstance(text, str) else text)
        for piece in defused_pieces(self.tokenizer, pieces, self.stream.text) if self.chat else pieces:
            words = words or bool(piece.strip())
            self.stream.feed(piece)
        return words

    def parting(self, file: Path) -> str:
        """Text between this and a file or folder that follows: a blank line where a line's end is missing, as after converted
        texts; after a folder's files also a heading, below which evidence counts lines."""
        end, begin = self.stream.text[-2:], str(self.tokenizer.decode([*self.ids[self.start :][:16]]))
        heading = begin.startswith(HEADING.partition("{")[0]) and not file.is_dir()
        blank = end != "\n\n" and (heading or file.is_dir() or not end[-1:].isspace())
        return "\n\n" * blank + HEADING.format(path=last_part(str(file))) * heading

    def ids_before(self, after: str) -> array[int]:
        """Token ids of the document and the text ``after`` it; zeros for unknown ids."""
        return self._with_unknown(self.stream.finish(after))

    def prompt(self, question: str) -> array[int]:
        """Token ids of the whole prompt; zeros for unknown ids. Raises ValueError as ``conversation``."""
        if self.chat:
            return self.conversation([{"role": "user", "content": question}])
        return self.ids_before(render_prompt(self.tokenizer, question, chat=False)[1])

    def conversation(self, messages: Objects) -> array[int]:
        """Token ids of the chat template's prompt of a conversation about the document; zeros for unknown ids.

        Raises:
            ValueError: the chat template's text before the document depends on the conversation.
        """
        # What was read stays what it is. A template that tells the date has another text now.
        empty = render_prompt(self.tokenizer, "")[0]
        before, after = render_messages(self.tokenizer, messages, about=True)
        if before != empty == render_prompt(self.tokenizer, "")[0]:  # otherwise a clock has moved in between
            raise ValueError("the chat template's text before the document depends on the conversation")
        return self.ids_before(after)

    def before_questions(self, local_len: int) -> int:
        """Number of tokens before the tail of ``local_len`` tokens that even the shortest question holds back."""
        after = render_prompt(self.tokenizer, "?", chat=self.chat)[1]
        # Some tokenizers join a question's first letters to what precedes: two tokens fewer.
        return self.unknown + min(len(self.stream.finish(after)) - local_len - 2, len(self.stream.ids))

    def forgotten(self) -> tuple[array[int], DocumentText]:
        """All token ids (zeros for unknown ids), and a copy of the text without ids.

        Raises:
            ValueError: the last token depends on the text that follows.
        """
        question = render_prompt(self.tokenizer, "What?", chat=self.chat)[1]
        for ends in (str.isspace, _is_sign):  # many tokenizers join a full stop to the line ends after it
            text = self.copy()
            text.stream.forget(ends)
            if all(text.stream.finish(after) == self.stream.finish(after) for after in ("", question)):
                break
        else:
            raise ValueError("the last token of the text depends on the question: it cannot be saved without its text")
        ids, text.stream.ids = text.settled, array("i")
        text.unknown = len(ids)
        return ids, text

    def _with_unknown(self, ids: array[int]) -> array[int]:
        """Token ids, preceded by a zero for each unknown token in the cache."""
        return array("i", bytes(4 * self.unknown)) + ids


def open_stream(tokenizer: PreTrainedTokenizerBase, chat: bool) -> IdStream:
    """The stream of a prompt's tokens. A chat template writes the special tokens itself."""
    return IdStream(tokenizer, special=not (chat and has_template(tokenizer)))


def _strings(pieces: Iterable[object]) -> Iterator[str]:
    """The pieces of a text. Raises TypeError for a piece that is no string, as of bytes or token ids."""
    for piece in pieces:
        if not isinstance(piece, str):
            raise TypeError(f"text holds {piece!r:.40}, which must be a string: give a string, strings or a Path")
        yield piece


def _is_sign(letter: str) -> bool:
    """Whether a character is no letter or digit."""
    return not letter.isalnum()
