"""The choice of the next token from logits, and the tokens that end an answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.logits_process import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)


@dataclass(frozen=True)
class Sampling:
    """The choice of the next token; ``temperature=0`` is greedy."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature={self.temperature} must be at least 0, and finite")
        if 0 < self.temperature < 1e-3:  # logits divided by it would overflow
            raise ValueError(f"temperature={self.temperature} must be 0 (greedy), or at least 0.001")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k} must be at least 0 (0 keeps every token)")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1")
        if not 0 < self.repetition_penalty < math.inf:
            raise ValueError(f"repetition_penalty={self.repetition_penalty} must be above 0, and finite")

    def processors(self) -> LogitsProcessorList:
        """transformers' own processors, in its own order."""
        chain = LogitsProcessorList()
        if self.repetition_penalty != 1.0:
            chain.append(RepetitionPenaltyLogitsProcessor(self.repetition_penalty))
        if self.temperature > 0:
            if self.temperature != 1.0:
                chain.append(TemperatureLogitsWarper(self.temperature))
            if self.top_k:
                chain.append(TopKLogitsWarper(self.top_k))
            if self.top_p < 1.0:
                chain.append(TopPLogitsWarper(self.top_p))
        return chain


class Chooser:
    """The next token of one text, by its own random numbers: ``choose(logits)``."""

    def __init__(self, sampling: Sampling, seed: int, device: torch.device, prompt: Sequence[int]) -> None:
        self._sampling, self._processors = sampling, sampling.processors()
        drawn = sampling.temperature > 0  # greedy choices need no generator, which some devices lack
        self._generator = torch.Generator(device=device).manual_seed(seed) if drawn else None
        self._seen = list(prompt) if sampling.repetition_penalty != 1.0 else []

    def __call__(self, logits_V: Tensor) -> int:
        scores_V = logits_V
        if self._processors:  # for a copy of what was said the host waits
            history = torch.tensor([self._seen], device=logits_V.device, dtype=torch.long)
            scores_V = self._processors(cast(torch.LongTensor, history), cast(torch.FloatTensor, logits_V[None]))[0]
        if self._sampling.temperature > 0:
            token = int(torch.multinomial(scores_V.softmax(-1), 1, generator=self._generator))
        else:
            token = int(scores_V.argmax())
        self._seen.append(token)
        return token


def stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Every end-of-sequence id that the generation configuration or the tokenizer names."""
    eos = getattr(model.generation_config, "eos_token_id", None)
    ids = set(eos if isinstance(eos, list) else [eos]) | {tokenizer.eos_token_id}
    return frozenset(i for i in ids if i is not None)
