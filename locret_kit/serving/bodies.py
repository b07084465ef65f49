"""Bodies of requests in OpenAI's protocol, and the prompts that they ask for. Unknown fields are ignored: clients send many."""

from __future__ import annotations

from array import array
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from transformers import PreTrainedTokenizerBase

from ..documents.document import Document
from ..runtime.session import Sampling
from ..runtime.tokens import IdStream
from ..text.template import has_template, render_messages

REFUSED = ("tools", "tool_choice", "functions", "function_call", "response_format", "audio", "modalities", "logit_bias")
"""Fields that change the answer and that this server does not have."""
STOPS = 64
"""Stop texts of a request, at most: the engine's thread looks for each after every token, while all others wait."""
ROLES = {"developer": "system"}
"""Names of roles in chat templates."""


def check_text(name: str, text: str) -> None:
    """Raise ValueError for half of a surrogate pair, which JSON can hold and no tokenizer reads."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name}: character {error.start} is half of a surrogate pair") from None


class TextPart(BaseModel):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        """The content as one text."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class StreamOptions(BaseModel):
    """Options of a streamed answer."""

    include_usage: bool = False


class CompletionBody(BaseModel):
    """Fields of both kinds of completion."""

    model_config = ConfigDict(extra="ignore")  # what is not checked here is nowhere to be read

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=16)] = 1
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] = 0
    repetition_penalty: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    seed: Annotated[int, Field(ge=0, lt=2**32)] | None = None
    stop: str | Annotated[list[str], Field(max_length=STOPS)] | None = None
    document_id: str | None = None
    """A document of ``/v1/documents`` that the prompt is about."""
    budget: Annotated[int, Field(ge=1)] | None = None
    """Slots, at most those of a session."""
    policy: str | None = None
    """One that the server allows."""

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, body: object) -> object:
        if not isinstance(body, dict):
            return body
        for name in REFUSED:
            value = body.get(name)
            harmless = value in (None, [], {}, "none") or value == {"type": "text"}
            if not harmless and not (name == "tool_choice" and not body.get("tools")):
                raise ValueError(f"{name} is not supported")
        return body

    @property
    def stops(self) -> list[str]:
        """Texts at which the answer ends."""
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [text for text in given if text]

    @property
    def wanted_tokens(self) -> int | None:
        """Tokens of the answer, at most; None where the body does not say."""
        return self.max_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        """Number of the likeliest tokens that each token comes with; None for no log-probabilities at all."""
        raise NotImplementedError

    @property
    def sampling(self) -> Sampling:
        """OpenAI's default temperature is 1.

        Raises:
            ValueError: a temperature that is too near to 0.
        """
        temperature = 1.0 if self.temperature is None else self.temperature
        return Sampling(temperature, self.top_k, 1.0 if self.top_p is None else self.top_p, self.repetition_penalty)

    def shared_tokens(self, tokenizer: PreTrainedTokenizerBase, ids: array[int]) -> int:
        """Tokens with which other prompts may begin too; 0 for none."""
        return 0


class ChatBody(CompletionBody):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        return (self.top_logprobs or 0) if self.logprobs else None

    def ids(self, tokenizer: PreTrainedTokenizerBase, document: Document | None) -> array[int]:
        """Token ids of the prompt.

        Raises:
            ValueError: the chat template refuses the conversation.
        """
        for message in self.messages:
            check_text("messages", message.text)
        messages = [{"role": ROLES.get(m.role, m.role), "content": m.text} for m in self.messages]
        if document is not None:
            before, after = render_messages(tokenizer, messages, about=True)
            if before != document.text.before:
                raise ValueError(
                    "with document_id, no message may come before the first user message, system ones neither"
                )
            return document.text.ids_before(after)
        stream = IdStream(tokenizer, special=not has_template(tokenizer))
        return stream.finish(render_messages(tokenizer, messages)[1])

    def shared_tokens(self, tokenizer: PreTrainedTokenizerBase, ids: array[int]) -> int:
        """All that comes before the first user message, where that is not only the template's own."""
        messages = [{"role": ROLES.get(m.role, m.role), "content": m.text} for m in self.messages]
        first = next((at for at, message in enumerate(messages) if message["role"] == "user"), 0)
        if not first or not has_template(tokenizer):
            return 0
        before, _ = render_messages(tokenizer, messages, about=True)
        alone = IdStream(tokenizer).finish(before)
        return next(
            (at for at, (a, b) in enumerate(zip(alone, ids, strict=False)) if a != b), min(len(alone), len(ids))
        )


class TextBody(CompletionBody):
    """``POST /v1/completions``."""

    prompt: str | list[str]
    echo: bool = False
    suffix: str | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def wanted_logprobs(self) -> int | None:
        return self.logprobs

    def ids(self, tokenizer: PreTrainedTokenizerBase, document: Document | None) -> array[int]:
        """Token ids of the prompt.

        Raises:
            ValueError: more than one prompt, an echo or a suffix, or a document.
        """
        for name in ("echo", "suffix"):
            if getattr(self, name):
                raise ValueError(f"{name} is not supported")
        if document is not None:
            raise ValueError("document_id is for chat completions")
        prompts = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        if len(prompts) != 1:
            raise ValueError(f"prompt must be one text, not {len(prompts)}: send several requests")
        check_text("prompt", prompts[0])
        return IdStream(tokenizer, special=True).finish(prompts[0])
