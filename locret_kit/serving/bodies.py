"""Bodies of requests in OpenAI's protocol, and the prompts that they ask for. Unknown fields are ignored: clients send many."""

from __future__ import annotations

import json
import re
import secrets
from array import array
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Annotated, Literal

import regex
from pydantic import AfterValidator, BeforeValidator, Field, NonNegativeInt, field_validator, model_validator
from pydantic_core import PydanticKnownError
from transformers import PreTrainedTokenizerBase

from ..answers.forms import AnswerForm, answer_form
from ..answers.values import nested
from ..documents.conversation import common
from ..documents.document import Document
from ..engine import Sampling
from ..policies.grammar import parse_policy
from ..settings import Repetition
from ..text.template import SWITCHES, has_template, render_messages, takes, template_source
from ..text.tokens import IdStream, TooManyTokens
from .engine_thread import EngineThread
from .histories import asked, render, rewritten
from .messages import JsonObject, Message, Part, Refused, ResponseFormat, Tool, form, places, refuse, tool_name
from .request import AnswerSpec, Prompt
from .state import Server

REFUSED = dict.fromkeys(("functions", "function_call", "audio", "modalities", "suffix"), "")
STOPS = 64
"""Stop texts of a request, at most: the engine's thread looks for each after every token, while all others wait."""
MESSAGES = 1 << 14
"""Messages of a conversation, at most: each takes its time, however short it is."""
MAX_TOKENS = 1 << 20
"""Tokens of a text that is turned into a list, at most; where each comes with its piece, as many as a prompt may have."""
ANSWER, THOUGHT = 512, 2048
"""Tokens of an answer, and of a thought before it, where a request bounds neither."""
NEAREST = 64
"""Tokens at a prompt's end where a thought may begin."""
MIN_TOP_P = 1e-6
"""Share of the probability, at least; any so small is the likeliest token's."""
DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""OpenAI's defaults for absent fields, if neither the server nor the model has its own."""


def listed(value: object) -> object:
    """A list of texts or of rows of ids, of which one alone may stand for itself."""
    alone = isinstance(value, str) or (isinstance(value, list) and isinstance(next(iter(value), None), int))
    return [value] if alone else value


Bias = Annotated[float, Field(ge=-100, le=100, strict=True)]


class StreamOptions(Part):
    """Options of a streamed answer."""

    include_usage: bool = False


class CompletionBody(Part):
    """Fields of both kinds of completion."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    n: Annotated[int, Field(ge=1, le=16)] = 1
    best_of: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[int, Field(ge=-1)] | None = None
    """-1, as more than the server gives: as many as it gives."""
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """0 as OpenAI has it: the likeliest token alone."""
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Repetition | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    logit_bias: dict[NonNegativeInt, Bias] = Field(default_factory=dict)
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    """-1 as none: another for each request. Of the others the lowest 32 bits count."""
    stop: Annotated[
        list[str], Field(max_length=STOPS), BeforeValidator(listed), form(f"a text, or at most {STOPS} of them"),
        places("stop", "stop_sequences"),
    ] = Field(default_factory=list)  # fmt: skip
    response_format: Annotated[
        ResponseFormat | None, places("response_format", "output_config.format", "output_format", "text.format")
    ] = None
    document_id: str | None = None
    """A document of ``/v1/documents`` that the prompt is about."""
    budget: Annotated[int, Field(ge=1)] | None = None
    """Slots, at most those of a session."""
    policy: str | None = None
    """Policy that the server allows."""
    evidence: bool = False
    """Give each answer the passages of the document that it was read from. A file without its text has none."""
    left_out: list[str] = Field(default_factory=list)
    """Parts of the body that have no effect here. They come in a set: a client's field of this name is unknown."""
    _found = field_validator("left_out", mode="before")(lambda found: sorted(found) if isinstance(found, set) else [])

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, body: object) -> object:
        refuse(body, REFUSED)
        return body

    @field_validator("*", mode="wrap")
    @classmethod
    def _numbers(cls, value: object, check: Callable[[object], object]) -> object:
        made = check(value)
        if type(made) in (int, float) and type(value) not in (int, float):  # pydantic reads true as 1, and "1" too
            raise ValueError(f"must be a number, not {json.dumps(value)[:40]}")
        return made

    @property
    def left_out_words(self) -> str:
        """What is left out, for the log and the header ``x-left-out``."""
        return ", ".join(re.sub(r"[^\w .:/-]", "?", part, flags=re.ASCII)[:80] for part in self.left_out[:20])

    def marks(self, tokenizer: PreTrainedTokenizerBase) -> AnswerForm:
        """Marks in the answers."""
        return AnswerForm()

    def resolve(self, server: Server, document: Document | None = None) -> AnswerSpec:
        """What is asked of each answer, within the server's bounds.

        Raises:
            HTTPException, ValueError: a field that is beyond them, or does not go with a document.
        """
        engine, bound, wanted = server.ready(), server.limits.answer_tokens, self.max_tokens
        sampling = self.sampling(server.defaults, engine.vocabulary)
        if document is not None:
            for name in ("budget", "policy"):
                if getattr(self, name) is not None:
                    said = f"{name} has no effect with document_id: the document was read with its own"
                    raise Refused(400, said, name)
            if sampling.repetition_penalty != 1.0 and not document.has_text:
                raise Refused(400, "repetition_penalty needs the document's text, which is not in its file")
        if self.evidence and document is None:
            raise Refused(400, "evidence needs a document_id", "evidence")
        if wanted is not None and wanted > bound and server.limits.strict:
            raise Refused(400, f"max_tokens={wanted} must be at most {bound}", "max_tokens")
        if self.best_of not in (None, self.n):
            raise Refused(400, f"best_of={self.best_of} must be n={self.n}: every answer is given", "best_of")
        allowed = [engine.policy.name, *server.policies]
        if self.policy not in (None, *allowed):
            said = f"policy={str(self.policy)[:64]!r} is not allowed here; allowed: {', '.join(allowed)}"
            raise Refused(400, said)
        if self.budget is not None and self.budget > (slots := engine.settings.budget or self.budget):
            raise ValueError(f"budget={self.budget} must be at most {slots}, the slots of a session")
        settings = engine.settings if self.budget is None else engine.settings_for(self.budget)
        return AnswerSpec(
            max_new_tokens=bound if wanted == -1 else min(ANSWER if wanted is None else wanted, bound),
            sampling=sampling,
            seed=secrets.randbelow(2**32) if self.seed is None or self.seed == -1 else self.seed,
            stops=tuple(filter(None, self.stop)),
            settings=None if settings == engine.settings else settings,
            policy=None if self.policy in (None, engine.policy.name) else parse_policy(self.policy),
            evidence=self.evidence,
        )

    def sampling(self, defaults: Mapping[str, float], vocabulary: int) -> Sampling:
        """Settings for the choice of tokens.

        Args:
            defaults: the server's values for absent fields. vocabulary: number of tokens.

        Raises:
            ValueError: the temperature is too near to 0, or a bias names no token.
        """
        said = {name: getattr(self, name) for name in DEFAULTS if getattr(self, name) is not None}
        chosen = {**DEFAULTS, **defaults, **said}
        if (last := max(self.logit_bias, default=0)) >= vocabulary:
            raise ValueError(f"logit_bias names {last}, which is no token from 0 to {vocabulary - 1}")
        return Sampling(
            chosen["temperature"], max(0, int(chosen["top_k"])), max(chosen["top_p"], MIN_TOP_P),
            chosen["repetition_penalty"], chosen["min_p"],
            self.frequency_penalty, self.presence_penalty, tuple(self.logit_bias.items()),
        )  # fmt: skip


def some(tokens: int) -> int:
    """A number of tokens that is not 0."""
    if not tokens:
        raise PydanticKnownError("greater_than_equal", {"ge": 1})
    return tokens


Tokens = Annotated[int, Field(ge=-1), AfterValidator(some)]
SWITCH = form("true, false, or an effort such as 'low', of at most 64 characters")
Level = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Switch = Annotated[bool | Level, Field(union_mode="left_to_right"), SWITCH]
Effort = Annotated[bool | Annotated[str, Field(max_length=64)], Field(union_mode="left_to_right"), SWITCH]


class ChatBody(CompletionBody):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MESSAGES)]
    max_tokens: Annotated[Tokens | None, places("max_completion_tokens", "max_output_tokens", "max_tokens")] = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[Tool] = Field(default_factory=list)
    """Tools that the answer may call, once the body is checked."""
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | JsonObject,
        form("'none', 'auto', 'required', or an object that names a tool"),
    ] = "auto"
    parallel_tool_calls: bool = True
    """Whether an answer may call more than one tool; otherwise it ends with its first call."""
    chat_template_kwargs: JsonObject = Field(default_factory=dict)
    """Arguments of the chat template, such as ``enable_thinking``."""
    reasoning: JsonObject | None = None
    """OpenRouter's switches."""
    thinking: JsonObject | None = None
    """Anthropic's switch, ``{"type": "disabled"}``."""
    enable_thinking: Annotated[Switch | None, places("enable_thinking", "reasoning.enabled", "think")] = None
    """Argument ``enable_thinking`` or ``thinking`` of a chat template that has it."""
    reasoning_effort: Annotated[
        Effort | None, places("reasoning_effort", "output_config.effort", "reasoning.effort", "think")
    ] = None
    """Argument ``reasoning_effort`` of a chat template that has it; "none" turns thinking off, any other on."""
    thought_tokens: Annotated[
        Annotated[int, Field(ge=1)] | None,
        places("thinking_budget", "thinking_token_budget", "reasoning.max_tokens", "thinking.budget_tokens"),
    ] = None
    """Tokens of the thought, at most: then the template's end mark closes it."""
    exclude: Annotated[Annotated[bool, Field(strict=True)] | None, places("reasoning.exclude")] = None
    """Whether thoughts are left out of the answer, as OpenRouter has it; usage counts them."""
    include_reasoning: Annotated[bool, Field(strict=True)] = True
    """The opposite, as vLLM has it."""
    continue_final_message: bool = True
    """Whether an answer in the last message is continued; otherwise it is answered."""

    @model_validator(mode="after")
    def _possible(self) -> ChatBody:
        for number, message in enumerate(self.messages):
            message._place = message._place or f"messages.{number}"
        others = [tool for tool in self.tools if tool.type != "function"]
        self.left_out += sorted({f"tool {tool.type}" for tool in others})
        self.tools = [tool for tool in self.tools if tool.type == "function"]
        known, choice, field = {tool.function.name for tool in self.tools}, self.tool_choice, "tool_choice"
        foreign = {name for tool in others for name in (tool.type, tool.function.name)} - known
        names = {tool_name(choice) or str(choice.get("type"))} if isinstance(choice, dict) else set()
        if nested(choice, "type") == "allowed_tools":  # some of the tools, and a choice among them
            allowed, field = nested(choice, "allowed_tools") or choice, "tool_choice.allowed_tools"
            mode, tools = nested(allowed, "mode"), nested(allowed, "tools")
            if mode not in ("auto", "required") or not isinstance(tools, list) or not tools:
                raise ValueError(f"{field} must have mode='auto' or 'required', and tools")
            names = {tool_name(tool) or str(nested(tool, "type")) for tool in tools} - foreign
            self.tools, self.tool_choice = [tool for tool in self.tools if tool.function.name in names], mode
        if absent := names - known:
            why = "is of a type that is not supported" if min(absent) in foreign else "is none of tools"
            raise ValueError(f"{field} names {min(absent)[:64]!r}, which {why}")
        if self.tool_choice == "required" and not self.tools:
            raise ValueError("tool_choice needs tools")
        self.tools = [] if self.tool_choice == "none" else self.tools
        return self

    def marks(self, tokenizer: PreTrainedTokenizerBase) -> AnswerForm:
        return answer_form(tokenizer, tools=bool(self.tools))

    def resolve(self, server: Server, document: Document | None = None) -> AnswerSpec:
        spec, bound = super().resolve(server, document), server.limits.answer_tokens
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        spec = replace(
            spec, top_logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            hides_thoughts=bool(self.exclude) or not self.include_reasoning, must_call=bool(self.called),
        )  # fmt: skip
        if not self.marks(server.ready().tokenizer).thinks:
            return spec
        if self.max_tokens is not None:
            return replace(spec, thought_tokens=self.thought_tokens)
        most = min(THOUGHT, bound * 4 // 5)
        thought = min(self.thought_tokens or most, most)
        return replace(spec, max_new_tokens=min(ANSWER, bound - most), thought_tokens=thought, apart=True)

    @property
    def called(self) -> list[str]:
        """Names of the tools of which the answer must call one; none where it need not."""
        if isinstance(self.tool_choice, dict):
            return [tool_name(self.tool_choice)]
        return [tool.function.name for tool in self.tools] if self.tool_choice == "required" else []

    @property
    def continued(self) -> bool:
        """Whether the last message is the start of the answer."""
        last = self.messages[-1]
        begun = bool(last.content or last.reasoning_content) and not last.tool_calls
        return self.continue_final_message and last.role == "assistant" and begun

    def conversation(self, tokenizer: PreTrainedTokenizerBase) -> tuple[list[Message], list[JsonObject]]:
        """Messages and tools for the chat template. Raises ValueError for a message that it would leave out."""
        *before, last = self.messages  # which may be the beginning of an answer, of which there is nothing yet
        empty = last.role == "assistant" and not (last.content or last.tool_calls or last.reasoning_content)
        messages = before if before and empty else self.messages
        template = template_source(tokenizer, tools=bool(self.tools))
        if any(name in template for name in ("thinking", "reasoning")):
            messages = [*before, thought_of(last, answer_form(tokenizer))] if self.continued else messages
        elif last.reasoning_content and not (last.content or last.tool_calls):
            said = "the chat template has no place for a thought, and there is nothing else"
            raise ValueError(f"{last._place} (assistant): {said}")
        if "tools" in template:
            return messages, [tool.model_dump() for tool in self.tools]
        return rewritten(messages, self.tools), []

    def rendering(self, tokenizer: PreTrainedTokenizerBase) -> tuple[list[Message], Callable[..., tuple[str, str]]]:
        """Messages for the chat template, and ``render_messages`` with all that the template takes beside them, or without
        where it is ``bare``."""
        messages, tools = self.conversation(tokenizer)
        anthropic = None if self.thinking is None else self.thinking.get("type") != "disabled"
        given = (self.enable_thinking, self.reasoning_effort, anthropic, self.thought_tokens)
        effort = self.reasoning_effort if isinstance(self.reasoning_effort, str) else None
        thinks = False if any(one in (False, "none") for one in given) else any(given) or None
        said = {"reasoning_effort": effort, "enable_thinking": thinks, "thinking": thinks}
        known = {name: value for name, value in said.items() if value is not None and takes(tokenizer, name)}
        arguments = known | self.chat_template_kwargs
        if not self.marks(tokenizer).thinks and not any(takes(tokenizer, name) for name in SWITCHES):
            # A model without thoughts does already what these ask for.
            arguments = {name: value for name, value in arguments.items() if name not in SWITCHES or value is not False}

        def shown(messages: list[Message], about: bool = False, *, bare: bool = False) -> tuple[str, str]:
            turns = [message.rendered() for message in messages]
            made = partial(render_messages, tokenizer, turns, about=about, continued=self.continued, by=render)
            return made() if bare else made(tools=tools, arguments=arguments)

        return messages, shown

    def ids(
        self, tokenizer: PreTrainedTokenizerBase, document: Document | None, max_tokens: int | None = None
    ) -> list[array[int]]:
        """Token ids of the prompt. About a document, system messages stand with the first question, after the document.

        Raises:
            ValueError: the chat template refuses the conversation. TooManyTokens: there are more than ``max_tokens``.
        """
        messages, render = self.rendering(tokenizer)
        if document is not None:
            about = partial(render, asked(messages), about=True)
            # All now: a template may tell the time.
            (plain, _), (before, after), (again, _) = about(bare=True), about(), about(bare=True)
            if plain == again != before:
                said = "tools, or arguments of the chat template, that it shows before the document, which was read without"
                raise ValueError(f"document_id does not go with {said}")
            text = document.text.copy()
            text.stream.max_tokens = max_tokens
            return [text.ids_before(after)]
        stream = IdStream(tokenizer, special=not has_template(tokenizer), max_tokens=max_tokens)
        return [stream.finish(render(messages)[1])]

    def prompts(self, engine: EngineThread, document: Document | None, max_tokens: int) -> list[Prompt]:
        """The prompt, and what others have of it. Raises as ``ids``."""
        tokenizer = engine.tokenizer
        form, (ids,) = self.marks(tokenizer), self.ids(tokenizer, document, max_tokens)
        shares = document is None and engine.shared_prefixes and len(ids)
        return [
            Prompt(
                ids, self.shared_tokens(tokenizer, ids) if shares else 0,
                self.next_ids(tokenizer, document) if form.thinks and not self.continued else array("i"),
                self.begins_in_thought(tokenizer, ids),
            )
        ]  # fmt: skip

    def begins_in_thought(self, tokenizer: PreTrainedTokenizerBase, ids: array[int]) -> bool:
        """Whether the answer starts within a thought, opened by the chat template or by the continued answer."""
        form, last = self.marks(tokenizer), self.messages[-1].content
        if self.continued and not last:
            return form.thinks
        last = last if self.continued else str(tokenizer.decode(list(ids[-NEAREST:])))
        return form.thinks and not form.anywhere and form.opened(last, continued=self.continued)

    def next_ids(self, tokenizer: PreTrainedTokenizerBase, document: Document | None) -> array[int]:
        """Token ids up to this prompt's answer, as the next turn's prompt has them; none where it can have none."""
        asked = Message(role="user", content="?")
        turns = ([*self.messages, Message(role="assistant", content=text), asked] for text in "xy")
        try:
            one, other = (self.model_copy(update={"messages": turn}).ids(tokenizer, document)[0] for turn in turns)
        except ValueError:
            return array("i")
        return one[: common(one, other)]

    def shared_tokens(self, tokenizer: PreTrainedTokenizerBase, ids: array[int]) -> int:
        """Number of tokens that other prompts may share: all before the first user message. 0 if there is none, or if only the
        template adds text there."""
        messages, render = self.rendering(tokenizer)
        first = next((at for at, message in enumerate(messages) if message.role == "user"), None)
        if first is None or not (first or self.tools) or not has_template(tokenizer):
            return 0
        with suppress(ValueError):  # a template that leaves out the first user message, or shows it twice
            return common(IdStream(tokenizer).finish(render(messages, about=True)[0]), ids)
        return 0


def thought_of(message: Message, form: AnswerForm) -> Message:
    """The beginning of an answer, with a thought at its content's start in the place of thoughts."""
    found = regex.match(
        rf"(?s)\s*(?:{form.open})\s*(?P<thought>.*?)(?:\s*(?:{form.close})\s*(?P<text>.*))?\Z", message.content
    )
    if found is None or form.anywhere:
        return message
    thought = f"{message.reasoning_content or ''}{found['thought']}"
    return message.model_copy(update={"content": found["text"] or "", "reasoning_content": thought})


Ids = Annotated[list[Annotated[int, Field(ge=0, strict=True)]], Field(min_length=1)]


class TextBody(CompletionBody):
    """``POST /v1/completions``."""

    prompt: Annotated[
        list[str | Ids], Field(min_length=1, max_length=64), BeforeValidator(listed),
        form("a text, token ids, or a list of at most 64 of either"),
    ]  # fmt: skip
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    def resolve(self, server: Server, document: Document | None = None) -> AnswerSpec:
        return replace(super().resolve(server, document), top_logprobs=self.logprobs, echoes=self.echo)

    def prompts(self, engine: EngineThread, document: Document | None, max_tokens: int) -> list[Prompt]:
        """The prompts.

        Raises:
            ValueError: a document, or ids that are no tokens. TooManyTokens: one has more than ``max_tokens``.
        """
        if document is not None:
            raise ValueError("document_id is for chat completions")
        return [Prompt(self._ids(engine.tokenizer, prompt, max_tokens)) for prompt in self.prompt]

    def _ids(self, tokenizer: PreTrainedTokenizerBase, prompt: str | list[int], max_tokens: int) -> array[int]:
        if isinstance(prompt, str):
            return IdStream(tokenizer, special=True, max_tokens=max_tokens).finish(prompt)
        if len(prompt) > max_tokens:
            raise TooManyTokens(max_tokens)
        if max(prompt) >= len(tokenizer):
            raise ValueError(f"prompt holds {max(prompt)}, which is no token from 0 to {len(tokenizer) - 1}")
        return array("i", prompt)
