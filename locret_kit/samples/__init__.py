"""Samples of training: conversations as token ids, with the token span of every assistant answer.

An answer's span is the characters of the rendering that come from the message (``text.untrusted``). This stays right when its
text also occurs elsewhere, and for templates that trim messages, leave their thoughts out, or tell the time.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ..text.template import around_message, has_template, render_traced
from ..text.tokens import encode, token_span
from ..text.untrusted import FIRST, Span, Traced, defused

CHARACTERS = 64
"""Characters per token that no text reaches on average."""


@dataclass(frozen=True)
class Sample:
    """One training sample."""

    ids: tuple[int, ...]
    """Token ids of the whole conversation, [S]."""
    answers: tuple[Span, ...]
    """Half-open token spans of the assistant's answers, in order, none of them empty."""

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
        ValueError: for an empty answer, a slow tokenizer, a template that hides a message or refuses the
            conversation, or one that does not fit `max_tokens` without cutting answers.
    """
    for i, message in enumerate(messages):
        if message["role"] == "assistant" and not message["content"].strip():
            raise ValueError(f"messages[{i}]['content']={message['content']!r} is an empty answer")
    if max_tokens is not None:
        short = [_ends(message, CHARACTERS * max_tokens) for message in messages]
        if short != list(messages):
            sample = encode_chat(tokenizer, short, max_tokens=max_tokens, cut=cut)
            if len(sample.ids) == max_tokens:  # so tokens of the middle went here too, and what is left is the same
                return sample
    if has_template(tokenizer):
        text: str = (made := render_traced(tokenizer, messages))
        where = [_located(made, i, message) for i, message in enumerate(messages)]
        turns = [  # an answer's tail: the template's text after it when the conversation ends with it
            (a, b, around_message(tokenizer, messages[: i + 1], i)[1] if messages[i]["role"] == "assistant" else "")
            for i, (a, b) in enumerate(where)
        ]
    else:
        text, turns = "", []
        for message in messages:
            content = defused(tokenizer, message["content"])
            turns.append((len(text), len(text) + len(content), ""))
            text += content + "\n"
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


def _located(text: Traced, index: int, message: Mapping[str, str]) -> Span:
    """Half-open character span of message `index` in the rendering `text`. A system message may be anywhere."""
    content, at = message["content"], 0
    if message["role"] not in ("user", "assistant") or not content.strip():
        return (0, 0)
    parts = [part.span() for part in re.finditer(re.escape(chr(FIRST + index)) + "+", text.origin)]
    for start, end in parts:
        at = content.find(text[start:end], at)
        if at < 0:
            break
        at += end - start
    if not parts:
        raise ValueError(f"the chat template shows messages[{index}] ({message['role']}) 0 times; it must show it once")
    if at < 0:
        raise ValueError(f"the chat template changes messages[{index}]; its span cannot be found exactly")
    return parts[0][0], parts[-1][1]


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
