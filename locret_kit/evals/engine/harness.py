"""lm-evaluation-harness over a bounded cache: ``locret-eval lm_eval --model locret --model_args ckpt=...,budget=256 ...``.

The harness finds a model by its registered name, which has to be known before its command line runs: `main` does both.
Only `locret_kit.lm_eval` and the command import this module, since it needs the package lm_eval.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, TypeVar

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from tqdm import tqdm

if TYPE_CHECKING:
    from accelerate import Accelerator

from ...engine import Answer, Sampling, Thought
from ...naming import prefixed_errors
from ...text.template import render
from ...text.tokens import stream_ids
from ...validation import build
from . import Setup, Variant, grouped
from .measure import Forced, cache_for, nll_reading

T = TypeVar("T")
Load = Callable[[dict[str, object]], tuple[Setup, Variant]]
"""Gives the backbone and the variant that ``--model_args`` name."""
OTHERS = ("do_sample", "until", "max_gen_toks")


class LocretLM(TemplateLM):
    """A backbone whose cache keeps ``budget`` slots, scored by the harness's own tasks and metrics. Under ``accelerate
    launch`` or torchrun the harness gives each process its share of the requests."""

    def __init__(self, setup: Setup, variant: Variant) -> None:
        super().__init__()
        self.setup, self.variant = setup, variant
        self.model, self.tokenizer = setup.model, setup.tokenizer
        self.accelerator: Accelerator | None = None
        self._device = self.model.device
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            from accelerate import Accelerator, InitProcessGroupKwargs

            weeks = InitProcessGroupKwargs(timeout=timedelta(weeks=52))  # one process may wait that long for the others
            self.accelerator = Accelerator(cpu=self.device.type == "cpu", kwargs_handlers=[weeks])
            self._rank, self._world_size = self.accelerator.process_index, self.accelerator.num_processes

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name_or_path.replace("/", "__")

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensors ``[N, ...]`` of all processes, concatenated along the first axis."""
        return tensor if self.accelerator is None else self.accelerator.gather(tensor)

    def gather_object(self, obj: T, dst: int = 0) -> list[T | None] | None:
        if self.accelerator is None:
            return [obj]
        objects: list[T | None] | None = [None] * self.world_size if self.rank == dst else None
        torch.distributed.gather_object(obj, objects, dst)
        return objects

    def barrier(self) -> None:
        if self.accelerator is not None:
            self.accelerator.wait_for_everyone()

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: object) -> list[int]:
        bos = self.tokenizer.bos_token
        if add_special_tokens is None:
            add_special_tokens = not (bos and string.startswith(bos))
        return list(stream_ids(self.tokenizer, [string], special=add_special_tokens))

    def apply_chat_template(self, chat_history: list[dict], add_generation_prompt: bool = True) -> str:
        return render(self.tokenizer, chat_history, add_generation_prompt, continued=not add_generation_prompt)

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **kwargs: object
    ) -> list[tuple[float, bool]]:
        """Continuations of the same context share its prefill as far as they can: the longest one, and all of one token."""
        by_context = grouped(range(len(requests)), lambda i: tuple(requests[i][1]))
        likelihoods: dict[int, tuple[float, bool]] = {}
        for prompt, members in self._shown(by_context.items(), "loglikelihood contexts", disable_tqdm):
            first_V: torch.Tensor | None = None
            for i in sorted(members, key=lambda i: -len(requests[i][2])):
                forced = Forced(requests[i][2])
                if first_V is not None and forced.tokens == 1:
                    forced(first_V)
                else:
                    forced.answer(self.setup, prompt, cache_for(self.setup, self.variant, len(prompt)))
                    first_V = forced.first_V
                likelihoods[i] = -forced.nll, forced.hits == forced.tokens
                self.cache_hook.add_partial("loglikelihood", requests[i][0], likelihoods[i])
        return [likelihoods[i] for i in range(len(requests))]

    def loglikelihood_rolling(self, requests: list, disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts, read chunk by chunk through the cache."""
        results = []
        for request in self._shown(requests, "rolling loglikelihood requests", disable_tqdm):
            (text,) = request.args
            ids = [self.prefix_token_id, *self.tok_encode(text, add_special_tokens=False)]
            cache = cache_for(self.setup, self.variant, len(ids))
            nll = nll_reading(self.setup, cache, ids, 1)[0] if len(ids) > 1 else 0.0
            results.append(-nll * (len(ids) - 1))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, results[-1])
        return results

    def generate_until(self, requests: list, disable_tqdm: bool = False) -> list[str]:
        results = []
        for number, request in enumerate(self._shown(requests, "generate_until requests", disable_tqdm)):
            context, settings = request.args
            results.append(self._generate(context, dict(settings), number))
            self.cache_hook.add_partial("generate_until", request.args, results[-1])
        return results

    def _shown(self, items: Iterable[T], what: str, hidden: bool) -> Iterable[T]:
        """The items, with a progress bar in the first process."""
        return tqdm(items, desc=f"Running {what}", disable=hidden or self.rank != 0)

    def _generate(self, context: str, given: dict[str, object], number: int) -> str:
        """The answer up to the first stop mark. ``number`` of the request: of the same prompt several are drawn."""
        settings = normalize_gen_kwargs(given)
        sampling, until = sampling_of(settings), [mark for mark in settings["until"] if mark]
        ids = self.tok_encode(context)
        answer = Answer(
            self.model, self.tokenizer, ids, cache_for(self.setup, self.variant, len(ids)),
            max_new_tokens=settings["max_gen_toks"], sampling=sampling, seed=self.setup.seed + number,
            thought=Thought.after(self.tokenizer, ids, max_tokens=self.setup.max_thought_tokens),
        )  # fmt: skip
        text = ""
        for _ in answer:
            text = answer.text
            if any(mark in text for mark in until):
                answer.leave()  # the model is detached
        return text[: min((text.find(mark) for mark in until if mark in text), default=len(text))]


def sampling_of(settings: Mapping[str, object]) -> Sampling:
    """Options of sampling, from the harness's normalised ``generation_kwargs``.

    Raises:
        ValueError: a setting that there is not here, a value out of bounds, or sampling without a temperature.
    """
    given = {name: value for name, value in settings.items() if name not in OTHERS and value is not None}
    if given.get("num_beams") == 1:  # which some tasks write out
        del given["num_beams"]
    with prefixed_errors("generation_kwargs", ValueError):
        sampling = build(Sampling, {"temperature": 0.0, **given})
    if settings["do_sample"] and sampling.temperature == 0:
        raise ValueError("generation_kwargs: do_sample=true needs temperature above 0, such as temperature=1.0")
    return sampling


_HARNESS_ONLY = ("batch_size", "max_batch_size")
"""Settings that the harness adds of its own accord: prompts go one by one here."""


@cache
def register(load: Load) -> type[LocretLM]:
    """Make ``--model locret`` known to the harness; its class. Once for a ``load``, however often it is called."""

    @register_model("locret")
    class Named(LocretLM):
        def __init__(self, **settings: object) -> None:
            super().__init__(*load({name: x for name, x in settings.items() if name not in _HARNESS_ONLY}))

    return Named


def main(argv: Sequence[str], load: Load) -> None:
    """The harness's own command line, with `register` done first."""
    from lm_eval.__main__ import cli_evaluate

    register(load)
    sys.argv = ["lm_eval", *argv]
    cli_evaluate()
