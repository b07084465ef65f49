"""One text: its prompt, piece by piece, and then its answer, token by token: each is chosen here from logits. Who computes is not
asked here."""

import math
import time
from collections import Counter, abc, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Protocol, cast

import torch
from annotated_types import Ge, Interval
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import logits_process as steps

from ..backbones.wrapped import speaking
from ..cache.bounded import BoundedCache
from ..settings import Repetition
from ..validation import validate_fields
from .thoughts import Thought

# ---- choice of the next token, and those that end an answer --------------------------------------------------------------


class Constraint(Protocol):
    """The tokens that may come next in one answer, such as those of a grammar."""

    def allowed(self, vocabulary: int) -> Tensor:
        """Whether each token may come next: bool, of shape ``[vocabulary]``, on the CPU."""

    def take(self, token: int) -> None:
        """Note the token that was chosen."""


Penalty = Annotated[float, Interval(ge=-2, le=2)]


@dataclass(frozen=True)
class Sampling:
    """The choice of the next token; ``temperature`` below 0.001 is greedy, ``top_k=0`` keeps every token.

    ``min_p`` leaves out tokens below that share of the likeliest one's probability. ``frequency_penalty`` is taken from a
    token's logit for each time that the answer has it, ``presence_penalty`` once; ``logit_bias`` is added, by token.
    ``constrain`` makes the answer's own constraint.
    """

    temperature: Annotated[float, Ge(0)] = 0.0
    top_k: Annotated[int, Ge(0)] = 0
    top_p: Annotated[float, Interval(gt=0, le=1)] = 1.0
    repetition_penalty: Repetition = 1.0
    min_p: Annotated[float, Interval(ge=0, le=1)] = 0.0
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    constrain: Callable[[], Constraint] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        validate_fields(self)
        if self.temperature < 1e-3:  # logits divided by it would overflow
            object.__setattr__(self, "temperature", 0.0)


class Chooser:
    """The next token of one text, by its own random numbers: ``choose(logits)``."""

    def __init__(self, sampling: Sampling, seed: int, device: torch.device, prompt: abc.Sequence[int]) -> None:
        self._sampling = sampling
        drawing = [
            (steps.TemperatureLogitsWarper, sampling.temperature, 1.0), (steps.TopKLogitsWarper, sampling.top_k, 0),
            (steps.TopPLogitsWarper, sampling.top_p, 1.0), (steps.MinPLogitsWarper, sampling.min_p, 0.0),
        ] if sampling.temperature > 0 else []  # fmt: skip
        penalty = steps.RepetitionPenaltyLogitsProcessor, sampling.repetition_penalty, 1.0
        # transformers' own, in its own order, but for those that change nothing
        self._processors = steps.LogitsProcessorList(
            make(value) for make, value, idle in (penalty, *drawing) if value != idle
        )
        drawn = sampling.temperature > 0  # greedy choices need no generator, which some devices lack
        self._generator = torch.Generator(device=device).manual_seed(seed) if drawn else None
        self._seen = list(prompt) if sampling.repetition_penalty != 1.0 else []
        self._answered: Counter[int] = Counter()
        self._constraint = None if sampling.constrain is None else sampling.constrain()

    def __call__(self, logits_V: Tensor) -> int:
        scores_V = self._changed(logits_V)
        if self._processors:  # for a copy of what was said the host waits
            history = torch.tensor([self._seen], device=logits_V.device, dtype=torch.long)
            scores_V = self._processors(cast(torch.LongTensor, history), cast(torch.FloatTensor, scores_V[None]))[0]
        if self._sampling.temperature > 0:
            token = int(torch.multinomial(scores_V.softmax(-1), 1, generator=self._generator))
        else:
            at = scores_V.argmax()
            number, best = torch.stack((at.float(), scores_V.take(at).float())).tolist()  # the host waits once
            if not math.isfinite(best):
                raise RuntimeError(f"the next token's logits are not finite, but {best}: no token can be chosen")
            token = int(number)
        self.note(token)
        return token

    def note(self, token: int) -> None:
        """Note the token that comes next, chosen here or not."""
        self._seen.append(token)
        self._answered[token] += 1
        if self._constraint is not None:
            self._constraint.take(token)

    def _changed(self, logits_V: Tensor) -> Tensor:
        """Logits ``[V]`` changed by penalties on the answer's own tokens, by biases and by the constraint."""
        sampling, changes = self._sampling, defaultdict[int, float](float)
        if sampling.frequency_penalty or sampling.presence_penalty:
            for token, times in self._answered.items():
                changes[token] -= sampling.frequency_penalty * times + sampling.presence_penalty
        for token, bias in sampling.logit_bias:
            changes[token] += bias
        if changes:
            at = torch.tensor(list(changes), device=logits_V.device)
            by = torch.tensor(list(changes.values()), dtype=torch.float32, device=at.device)
            logits_V = logits_V.index_add(0, at, by.to(logits_V))
        if self._constraint is not None:
            allowed_V = self._constraint.allowed(len(logits_V)).to(logits_V.device)
            logits_V = logits_V.masked_fill(~allowed_V, -math.inf)
        return logits_V


def stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Every end-of-sequence id that the generation configuration or the tokenizer names."""
    eos = getattr(speaking(model).generation_config, "eos_token_id", None)
    ids = set(eos if isinstance(eos, list) else [eos]) | {tokenizer.eos_token_id}
    return frozenset(i for i in ids if i is not None)


# ---- a text that runs -------------------------------------------------------------------------------------------------

BLOCK = 256
"""Tokens of a prompt in one forward, at most, where the logits of each are wanted: they are as many as the vocabulary."""


@dataclass(eq=False)
class Request:
    """One prompt and how it is answered."""

    ids: abc.Sequence[int]
    max_new_tokens: int = 64
    """0 only reads the prompt."""
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    top_logprobs: int | None = field(default=None, kw_only=True)
    """Number of the likeliest tokens whose log-probabilities come with each token's own; None for neither."""
    prompt_logprobs: bool = field(default=False, kw_only=True)
    """Whether log-probabilities of the prompt's tokens are wanted too. Each depends on the slots that the cache had
    kept at that point."""
    choose: Callable[[Tensor], int] | None = field(default=None, kw_only=True)
    """The next token by its logits ``[V]``, such as one that is forced; by default ``sampling`` chooses."""
    on_prompt: Callable[[Tensor, int], None] | None = field(default=None, kw_only=True)
    """Takes the logits ``[T, V]`` (float32) of each piece of the prompt, and the tokens read with it, where they are wanted."""
    thought: Thought | None = field(default=None, kw_only=True)
    """Watches the answer's thought; None where the model has none."""


Logprobs = list[tuple[int, float]]
"""Token ids with the natural logarithms of their probabilities, by the model's own distribution (before temperature and
penalties): the likeliest, best first, and the token that was chosen."""


@dataclass(eq=False)
class Sequence:
    """A request that runs.

    Attributes:
        written: the answer's ids so far, those before an error too. stopped_by: the id that ended it, if one did.
        finish_reason: "stop", "length", "read" (nothing more was asked), "error",
            "cancelled", or None before the end.
        logprobs: of each token, where they are asked for. prompt_logprobs: of the prompt's tokens from its second on.
    """

    request: Request
    written: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: list[Logprobs] = field(default_factory=list)
    stopped_by: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    error: Exception | None = None
    cache: BoundedCache | None = None
    prompt_read: int = 0
    """Tokens of the prompt that the cache had read before."""
    evictions_before: int = 0
    """Evictions of the cache when it was given."""
    began: float = 0.0
    first_token_s: float | None = None
    ended_s: float | None = None
    alone: bool = False
    """Whether its forwards hold no other text; they may then cross boundaries, where its cache cuts them."""
    choose: Callable[[Tensor], int] | None = None
    logits_V: Tensor | None = None
    """Logits after the prompt's last token, in float32."""
    text: Tensor | None = None
    """The prompt on the model's device: one copy for all pieces, since for every copy the host waits."""

    @property
    def tokens(self) -> list[int]:
        """The answer's ids so far. Raises the error that ended it: what was written before is no answer."""
        if self.error is not None:
            raise self.error
        return self.written

    @property
    def reading(self) -> bool:
        """Whether its prompt is still being read."""
        return not self.written

    @property
    def wants_prompt_logits(self) -> bool:
        """Whether the logits of all tokens of the prompt are wanted."""
        return self.request.prompt_logprobs or self.request.on_prompt is not None

    @property
    def remaining(self) -> int:
        """Tokens of the prompt to read."""
        seen = self.cache.get_seq_length() if self.cache is not None else 0
        return 0 if self.finish_reason is not None else max(0, len(self.request.ids) - seen)

    @property
    def piece_len(self) -> int:
        """Tokens of the next piece of the prompt."""
        cache = self.cache
        assert cache is not None
        if not cache.context.description.in_pieces:
            return self.remaining
        done, cut = cache.get_seq_length(), cache.handler.in_blocks and not self.alone
        step = min(cache.schedule.until_boundary(done) if cut else cache.schedule.piece(done), self.remaining)
        return min(step, BLOCK) if self.wants_prompt_logits else step

    def start(self, cache: BoundedCache, device: torch.device) -> None:
        """Give it its cache: an empty one, or one that has read the prompt's beginning.

        Raises:
            ValueError: the cache has read all of the prompt.
        """
        seen, request = cache.get_seq_length(), self.request
        if seen >= len(request.ids):
            raise ValueError(f"the cache has seen {seen} tokens already, the prompt has {len(request.ids)}")
        self.cache, self.prompt_read, self.evictions_before = cache, seen, cache.counters.evictions
        self.choose = request.choose or Chooser(request.sampling, request.seed, device, request.ids)
        self.text = torch.as_tensor(request.ids, dtype=torch.long, device="cpu").to(device)

    def next_piece(self) -> Tensor:
        """Tokens ``[T]`` of the prompt's next piece."""
        assert self.cache is not None and self.text is not None
        done = self.cache.get_seq_length()
        at = self.cache.state.prompt_positions(done, done + self.piece_len)
        return self.text[at.start : at.stop] if isinstance(at, range) else self.text[torch.tensor(at, device="cpu")]

    def advance(self, logits_V: Tensor, stop: frozenset[int]) -> bool:
        """Continue after a forward of its new tokens, with the logits ``[V]`` of the last one. Returns whether it
        has one more token or has ended.

        Raises RuntimeError at logits that are not finite.
        """
        if self.reading:
            assert self.cache is not None
            self.cache.state.start_reread()
            if self.remaining:
                return False
            logits_V = self.logits_V = logits_V.float()
            if not self.request.max_new_tokens:
                self.end("read")
                return True
        self.take(logits_V.float(), stop)
        return True

    def note_prompt(self, logits_TV: Tensor) -> None:
        """Note the log-probabilities of the prompt tokens after those just read, from their logits ``[T, V]``. A
        second reading is not noted."""
        assert self.cache is not None
        if self.cache.reread_positions:
            return
        end = self.cache.get_seq_length()
        if self.request.on_prompt is not None:
            self.request.on_prompt(logits_TV, end)
        if self.request.prompt_logprobs:
            following = self.request.ids[end - len(logits_TV) + 1 : end + 1]
            for logits_V, token in zip(logits_TV[: len(following)], following, strict=True):  # nothing follows the last
                self.prompt_logprobs.append(self._logprob(logits_V, token))

    def _logprob(self, logits_V: Tensor, token: int) -> Logprobs:
        """The log-probability of a token, after those of the likeliest."""
        logprobs_V = logits_V.float().log_softmax(-1)
        top = logprobs_V.topk(min(self.request.top_logprobs or 0, len(logprobs_V)))
        return [*zip(top.indices.tolist(), top.values.tolist(), strict=True), (token, float(logprobs_V[token]))]

    def take(self, logits_V: Tensor, stop: frozenset[int]) -> bool:
        """Choose the next token; False where it is one of ``stop``, which ends the answer.

        Raises:
            RuntimeError: no probabilities to draw from: logits that are not finite.
        """
        assert self.choose is not None
        thought = self.request.thought
        forced = None if thought is None else thought.forced()
        token = self.choose(logits_V) if forced is None else forced
        if forced is not None and isinstance(self.choose, Chooser):
            self.choose.note(token)
        if self.first_token_s is None:
            self.first_token_s = time.perf_counter() - self.began
        if token in stop:
            self.stopped_by = [token]
            self.end("stop")
            return False
        if self.request.top_logprobs is not None:
            self.logprobs.append(self._logprob(logits_V, token))
        self.written.append(token)
        if thought is not None:
            thought.take(token)
        count = len(self.written) if thought is None else thought.counted()
        if count >= self.request.max_new_tokens:
            self.end("length")
        return True

    def end(self, reason: str, error: Exception | None = None) -> None:
        """Let it leave; its cache is free."""
        self.finish_reason, self.error = reason, error
        self.cache = self.text = None
        self.ended_s = time.perf_counter() - self.began
