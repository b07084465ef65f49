"""The choice of the next token from logits, and the tokens that end an answer."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Protocol, cast

import torch
from annotated_types import Ge, Interval
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import logits_process as steps

from ..backbones.wrapped import speaking
from ..settings import Repetition
from ..validation import validate_fields


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

    def __init__(self, sampling: Sampling, seed: int, device: torch.device, prompt: Sequence[int]) -> None:
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
