"""Conversations as token ids, with the exact token span of every assistant answer.

A span is found by rendering the conversation once more with a marker in the place of one message: what stands before
and after the marker is the template's, what stands there in the real rendering is the message. This stays right
when an answer's text also occurs elsewhere, and for templates that trim messages or put blocks in front of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..settings import read_protect

Span = tuple[int, int]
CHARACTERS = 64
"""Characters per token that no text reaches on average."""


@dataclass(frozen=True)
class Sample:
    """One training sample.

    Raises:
        ValueError: if the answers are not non-empty, ordered, disjoint half-open spans inside `ids`.
    """

    ids: tuple[int, ...]
    """Token ids of the whole conversation, [S]."""
    answers: tuple[Span, ...]
    """Half-open token spans of the assistant's answers, in order."""
    scored: int | None = None
    """First tokens whose importance is learned, where these are not all before the last answer."""
    replayed: int | None = None
    """Token from which on the answers are a replay of the prompt; None where there is no replay."""

    def __post_init__(self) -> None:
        at = 0
        for start, end in self.answers:
            if not at <= start < end <= len(self.ids):
                raise ValueError(f"answers={self.answers} must be ordered, disjoint spans in {len(self.ids)} tokens")
            at = end

    @property
    def prompt_len(self) -> int:
        """Start of the last answer, in tokens: everything in front of it, earlier answers included, is its prompt.
        A sample without answers is all prompt."""
        return self.answers[-1][0] if self.answers else len(self.ids)


def encode_chat(
    tokenizer, messages: Sequence[dict], *, max_tokens: int | None = None, cut: Literal["middle", "end"] = "middle"
) -> Sample:
    """Render `messages` with the tokenizer's chat template and tokenise them.

    An answer's span holds its text and the end-of-turn token, if the template puts one right after it. Without a chat
    template, the text is "{content}\\n" for each message, under the tokenizer's own special tokens (such as a BOS).

    Args:
        tokenizer: a fast tokenizer (offsets are needed).
        messages: dicts of 'role' and 'content', both strings.
        max_tokens: upper bound of the sample. A longer one loses tokens of its longest user message, then of the next
            longest; answers are never cut.
        cut: the part of a message that goes, its 'middle' (head and tail stay) or its 'end'.

    Raises:
        ValueError: for a malformed message, a slow tokenizer, a template that hides a message or refuses the
            conversation, or one that does not fit `max_tokens` without cutting answers.
    """
    _check(messages)
    if max_tokens is not None:
        short = [_ends(message, CHARACTERS * max_tokens) for message in messages]
        if short != list(messages):
            sample = encode_chat(tokenizer, short, max_tokens=max_tokens, cut=cut)
            if len(sample.ids) == max_tokens:  # so tokens of the middle went here too, and what is left is the same
                return sample
    if has_template(tokenizer):
        text = _render(tokenizer, messages)
        where = [_locate(tokenizer, messages, i, text) for i in range(len(messages))]
        turns = [  # an answer's tail: the template's text after it when the conversation ends with it
            (a, b, _marked(tokenizer, messages[: i + 1], i)[1] if messages[i]["role"] == "assistant" else "")
            for i, (a, b) in enumerate(where)
        ]
    else:
        text, turns = "", []
        for message in messages:
            turns.append((len(text), len(text) + len(message["content"]), ""))
            text += message["content"] + "\n"
    ids, offsets = encode(tokenizer, text, special=not has_template(tokenizer))
    answers, users = [], []
    for message, (start, end, tail) in zip(messages, turns, strict=True):
        if message["role"] == "assistant":
            first, last = token_span(offsets, start, end)
            answers.append((first, _with_end_token(tokenizer, text, ids, offsets, last, tail)))
        elif message["role"] == "user":
            users.append(token_span(offsets, start, end, inner=True))
    if max_tokens is not None and len(ids) > max_tokens:
        ids, answers = _shorten(ids, answers, users, max_tokens, cut)
    return Sample(tuple(ids), tuple(answers))


def _ends(message: dict, size: int) -> dict:
    """A user's message without the middle that no shortening would keep: tokenising it would cost minutes.

    Raises:
        ValueError: another message that has more characters than tokens could hold.
    """
    content = message["content"]
    if len(content) <= 2 * size:
        return message
    if message["role"] == "user":
        return {**message, "content": content[:size] + content[-size:]}
    raise ValueError(f"the {message['role']}'s message has {len(content)} characters, which are never cut")


def render_prompt(tokenizer, document: str, question: str, *, chat: bool = True) -> tuple[str, str]:
    """The text before and after a long document, so that `before + document + after` is the prompt.

    The document comes first, then a blank line, then the question. With `chat` the prompt is the chat template's
    rendering of one user message, with generation prompt; without a template, "{document}\\n\\n{question}\\n".
    `chat=False` gives ("", "\\n\\n" + question): nothing is added, so an answer prefix may end the question.

    Raises:
        ValueError: if the template does not show the message exactly once.
    """
    if not chat:
        return "", f"\n\n{question}"
    if not has_template(tokenizer):
        return "", f"\n\n{question}\n"
    marker = _marker([document, question])
    text = _render(tokenizer, [{"role": "user", "content": f"{marker}\n\n{question}"}], generation=True)
    return _split(text, marker, "the document")


def protected_spans(tokenizer, ids: Sequence[int], protect: str | None, system: str | None = None) -> list[Span]:
    """Token spans of a prompt that ``protect`` names (see ``RunSettings``), but for 'first': of the system prompt, the
    template's own or the one given, and of all that the template puts around a user's message, the generation prompt included.

    A token in which template and message meet belongs to the message. The first words of an answer may follow the template.

    Args:
        ids: the chat template's rendering of one user message (see `render_prompt`), with generation prompt.

    Raises:
        ValueError: an unknown name, a slow tokenizer, or a template that does not show the message exactly once.
    """
    names = read_protect(protect) - {"first"}
    if not names or not has_template(tokenizer):
        return []
    marker = _marker([system or ""])
    before, after = _split(render_first(tokenizer, marker, system), marker, "the message")
    tokens, offsets = encode(tokenizer, before)
    head, tail = spans_around(ids, tokens, encode(tokenizer, after)[0])
    start, end = token_span(offsets[: head[1]], *_system_span(tokenizer, before), inner=True)
    spans = [(start, end)] if "system" in names else []
    if "markers" in names:
        spans += [(0, start), (end, head[1]), tail]
    return [(a, b) for a, b in spans if a < b]


def spans_around(ids: Sequence[int], head: list[int], tail: list[int]) -> tuple[Span, Span]:
    """Token spans of the template's text around a message: as much of ``head`` as ``ids`` begin with, and the last stretch that
    equals ``tail``, empty where there is none."""
    same = next((i for i, (a, b) in enumerate(zip(head, ids, strict=False)) if a != b), min(len(head), len(ids)))
    # Where the message's end and the template make one token, the rest of the template follows it.
    return (0, same), _last_occurrence(ids, tail) or _last_occurrence(ids, tail[1:]) or (0, 0)


def _system_span(tokenizer, before: str) -> Span:
    """Half-open character span of the system prompt in the rendering ``before`` a user's message; empty where there is none."""
    user = {"role": "user", "content": "U"}
    try:
        head, tail = _marked(tokenizer, [{"role": "system", "content": "S"}, user], 0)
    except ValueError:  # a template that takes no system message, and so shows none
        return 0, 0
    tail = tail[: len(tail) - len(_marked(tokenizer, [user], 0)[1])].removesuffix("U")
    fits = len(head) + len(tail) <= len(before) and before.startswith(head) and before.endswith(tail)
    return (len(head), len(before) - len(tail)) if fits else (0, 0)


def _last_occurrence(ids: Sequence[int], part: list[int]) -> Span | None:
    """Span of the last stretch of ``ids`` that equals ``part``; None where there is none."""
    n = len(part)
    starts = range(len(ids) - n, -1, -1) if n else ()
    return next(((i, i + n) for i in starts if list(ids[i : i + n]) == part), None)


def render_first(tokenizer, question: str, system: str | None = None) -> str:
    """The text of a conversation up to its first answer.

    Raises:
        ValueError: if the template refuses the conversation, as some do with a system prompt.
    """
    if not has_template(tokenizer):
        return (f"{system}\n\n" if system else "") + f"{question}\n"
    messages = [{"role": "system", "content": system}] if system else []
    return _render(tokenizer, [*messages, {"role": "user", "content": question}], generation=True)


def render_messages(tokenizer, messages: Sequence[dict], *, about: bool = False) -> tuple[str, str]:
    """The text of a conversation up to its next answer: '' and all of it, or what comes before and after a document that
    stands, with a blank line, before the first user message's text (``about``).

    Raises:
        ValueError: if the template refuses the conversation, or there is no user message for the document.
    """
    if not has_template(tokenizer):
        text = "".join(f"{message['content']}\n" for message in messages)
        return "", f"\n\n{text}" if about else text
    if not about:
        return "", _render(tokenizer, messages, generation=True)
    first = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
    if first is None:
        raise ValueError("a question about a document needs a user message")
    marker, changed = _marker([message["content"] for message in messages]), [dict(message) for message in messages]
    changed[first]["content"] = f"{marker}\n\n{changed[first]['content']}"
    return _split(_render(tokenizer, changed, generation=True), marker, "the document")


def render_turn(tokenizer, question: str, *, chat: bool = True) -> str:
    """The text between the end of an answer and the next one's beginning: the next question in its turn.

    Raises:
        ValueError: if the template does not show the answer exactly once.
    """
    if not chat or not has_template(tokenizer):
        return f"\n\n{question}" + ("\n" if chat else "")
    marker = _marker([question])
    turns = [("user", "Hello"), ("assistant", marker), ("user", question)]
    messages = [{"role": role, "content": content} for role, content in turns]
    return _split(_render(tokenizer, messages, generation=True), marker, "the answer")[1]


def around_turn(tokenizer) -> tuple[str, str]:
    """What `render_turn` puts before and after the question; nothing without a template. Raises ValueError as it does."""
    if not has_template(tokenizer):
        return "", ""
    marker = _marker([])
    return _split(render_turn(tokenizer, marker), marker, "the message")


def has_template(tokenizer) -> bool:
    """Whether the tokenizer has a chat template."""
    return getattr(tokenizer, "chat_template", None) is not None


def encode(tokenizer, text: str, *, special: bool = False) -> tuple[list[int], list[Span]]:
    """Token ids of `text` [S] and their half-open character offsets [S].

    Args:
        special: whether the tokenizer adds its special tokens (of empty offset) around the text.

    Raises:
        ValueError: for a slow tokenizer, which has no offsets.
    """
    if not tokenizer.is_fast:
        raise ValueError(f"tokenizer={type(tokenizer).__name__} must be a fast tokenizer: character offsets are needed")
    encoded = tokenizer(text, add_special_tokens=special, return_offsets_mapping=True, verbose=False)
    return encoded["input_ids"], encoded["offset_mapping"]


def token_span(offsets: Sequence[Span], start: int, end: int, *, inner: bool = False) -> Span:
    """Half-open token span of the characters [start, end).

    Args:
        offsets: character offsets of the tokens.
        inner: leave out tokens that reach beyond the characters; otherwise they belong to the span.

    Raises:
        ValueError: if no token lies there (never with `inner`, which then gives an empty span).
    """
    if inner:
        found = [i for i, (a, b) in enumerate(offsets) if start <= a < b <= end]
    else:  # a trimmed blank has an empty offset, and counts when it lies inside
        found = [i for i, (a, b) in enumerate(offsets) if (a < end and b > start) or start < a == b < end]
    if not found and not inner:
        raise ValueError(f"no token covers the characters {start} to {end}: is the answer empty?")
    return (found[0], found[-1] + 1) if found else (0, 0)


def _check(messages: Sequence[dict]) -> None:
    for i, message in enumerate(messages):
        for field in ("role", "content"):
            if not isinstance(message.get(field), str):
                raise ValueError(f"messages[{i}][{field!r}]={message.get(field)!r} must be a string")
        if message["role"] == "assistant" and not message["content"].strip():
            raise ValueError(f"messages[{i}]['content']={message['content']!r} is an empty answer")


def _render(tokenizer, messages: Sequence[dict], generation: bool = False) -> str:
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=generation)
    except (TemplateError, ArithmeticError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"the chat template refuses the conversation: {error}") from error


def _marker(contents: Sequence[str]) -> str:
    """A word that occurs in none of the texts."""
    n = 0
    while any(f"LOCRETMARK{n}X" in content for content in contents):
        n += 1
    return f"LOCRETMARK{n}X"


def _split(text: str, marker: str, what: str) -> tuple[str, str]:
    if text.count(marker) != 1:
        raise ValueError(f"the chat template shows {what} {text.count(marker)} times; it must show it once")
    before, after = text.split(marker)
    return before, after


def _marked(tokenizer, messages: Sequence[dict], index: int) -> tuple[str, str]:
    """The rendering before and after message `index`."""
    marker = _marker([message["content"] for message in messages])
    changed = [dict(message) for message in messages]
    changed[index]["content"] = marker
    return _split(_render(tokenizer, changed), marker, f"messages[{index}] ({changed[index]['role']})")


def _locate(tokenizer, messages: Sequence[dict], index: int, text: str) -> Span:
    """Half-open character span of message `index` in the rendering `text`. A system message may be anywhere."""
    if messages[index]["role"] not in ("user", "assistant"):
        return (0, 0)
    before, after = _marked(tokenizer, messages, index)
    start, end = len(before), len(text) - len(after)
    content = messages[index]["content"].strip()
    if not (text.startswith(before) and text.endswith(after) and content in text[start:end]):
        raise ValueError(f"the chat template changes messages[{index}]; its span cannot be found exactly")
    return start, end


def _with_end_token(tokenizer, text: str, ids: list[int], offsets: list[Span], last: int, tail: str) -> int:
    """End of an answer's token span, moved after the end-of-turn token if the turn's `tail` starts with one."""
    blank = len(tail) - len(tail.lstrip(" "))
    end = last
    while end < len(ids) and blank and text[offsets[end][0] : offsets[end][1]].strip(" ") == "":
        end += 1
    if not tail.strip(" ") or end >= len(ids):
        return last
    added = tokenizer.added_tokens_decoder.items()
    special = {*tokenizer.all_special_ids, *(i for i, token in added if token.special)}
    word = text[offsets[end][0] : offsets[end][1]].strip(" ")
    return end + 1 if ids[end] in special and word and tail.lstrip(" ").startswith(word) else last


def _shorten(
    ids: list[int], answers: list[Span], users: list[Span], max_tokens: int, cut: Literal["middle", "end"]
) -> tuple[list[int], list[Span]]:
    """Cut tokens from the middles or ends of the longest user messages; ids [S] -> [max_tokens], spans moved along."""
    drop = []
    excess = len(ids) - max_tokens
    for start, end in sorted(users, key=lambda span: span[0] - span[1]):
        size = min(excess, max(0, end - start - 2))  # a first and a last token stay
        excess -= size
        at = end - size if cut == "end" else start + (end - start - size) // 2
        drop.append((at, at + size))
    if excess > 0:
        kept = len(ids) - sum(end - start for start, end in drop)
        raise ValueError(
            f"max_tokens={max_tokens} must be at least {kept}: the conversation has {len(ids)} tokens, its answers "
            f"{sum(end - start for start, end in answers)}, and only user messages are cut"
        )
    for start, end in sorted(drop, reverse=True):
        ids = ids[:start] + ids[end:]
        answers = [(a - end + start, b - end + start) if a >= end else (a, b) for a, b in answers]
    return ids, answers
