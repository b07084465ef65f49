"""Checks of one architecture: is what the kit answers right, or refused in one sentence?

A verdict is a line: "exact", "refused: " and the sentence, "wrong: " and by how much, "crash: " and the error with its place,
"no end: " and the place, or "not checked: " and why. Differences of logits are relative to their standard deviation.
"""

import signal
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM

import locret_kit
from locret_kit import BoundedCache, HeadsConfig, RetainingHeads, attach, load_cache, save_cache
from locret_kit.backbones.decoder_modules import decoder_of
from locret_kit.backbones.libraries import CACHE
from locret_kit.backbones.probe import describe
from locret_kit.backbones.spec import BackboneSpec, text_config
from locret_kit.naming import first_line
from locret_kit.planning.backbone_sizes import BackboneSizes
from locret_kit.planning.inference_plan import Setting, cache_bytes
from locret_kit.policies.grammar import parse_policy
from locret_kit.runtime.engine import Engine, Request
from locret_kit.runtime.session import prefill
from locret_kit.settings import RunSettings

from .needed import Sizes
from .rows import Row
from .shrink import tiny_decoder
from .simulation import Plan, Run, Unknown, before_rotation, simulate

PROMPT, NEW = 160, 4
"""Tokens of the text and of its answer."""
BUDGET, CHUNK, TAIL, STABILIZERS = 48, 32, 12, 8
MIDDLE = 96
"""Tokens after which a cache is saved or copied."""
LIMIT = 20
"""Seconds of processor time of one check: those of the clock are the machine's, and pytest's alarm."""
ROUNDING = {torch.float64: 1e-4, torch.float32: 2e-3}
"""Largest difference of logits: transformers' own kernels compute parts of a float64 model in float32."""
TIE = 1e-7
"""Relative difference of two scores that rounding may turn round."""


def forced(model: Any, ids: list[int], cache: BoundedCache, more: list[int]) -> Tensor:
    """Logits ``[len(more) + 1, V]`` of an engine after a prompt and after each of ``more`` tokens."""
    logits, tokens = [], iter([*more, 0])

    def choose(logits_V: Tensor) -> int:
        logits.append(logits_V)
        return next(tokens)

    engine = Engine(model, frozenset(), alone=True)
    engine.add(Request(ids, len(more) + 1, choose=choose), lambda: cache)
    while engine.running:
        engine.step()
    return torch.stack(logits)


class Wrong(Exception):
    """An answer that is not the right one."""


class NotChecked(Exception):
    """A check that does not apply."""


class Late(BaseException):
    """A check that has not ended."""


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """A block that ends with ``Late`` after so many seconds of processor time; without a limit outside of the main thread."""

    def late(*_: object) -> None:
        raise Late

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def verdict(check: Callable[[], None]) -> str:
    """The line of one check."""
    try:
        with limited(LIMIT):
            check()
    except (Wrong, NotChecked, Unknown) as error:
        return f"{'wrong' if isinstance(error, Wrong) else 'not checked'}: {error}"
    except Late as error:
        return f"no end: after {LIMIT} s at {place(error)}"
    except Exception as error:
        said = " ".join((str(error).strip().splitlines() or [""])[-1].split())[:300]
        if is_refusal(error):
            return f"refused: {' '.join(str(error).split())}"
        return f"crash: {type(error).__name__}: {said} ({place(error)})"
    return "exact"


def is_refusal(error: Exception) -> bool:
    """Whether an error is a line that the kit wrote: a ValueError that was raised in its own files."""
    *_, last = traceback.extract_tb(error.__traceback__)
    return isinstance(error, ValueError) and Path(last.filename).is_relative_to(Path(locret_kit.__file__).parent)


def place(error: BaseException) -> str:
    """The last line of an error's traceback in the kit or in transformers."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.name != "late"]
    known = [f for f in frames if "locret_k" in f.filename or "/transformers/" in f.filename] or frames
    return f"{'/'.join(Path(known[-1].filename).parts[-2:])}:{known[-1].lineno}"


def same(got: Tensor, want: Tensor, what: str) -> None:
    """Raise ``Wrong`` where logits differ by more than rounding."""
    if not got.isfinite().all():
        raise Wrong(f"{what}: logits are not finite")
    off = float((got - want).abs().max() / want.std())
    if off > ROUNDING[want.dtype]:
        raise Wrong(f"{what}: logits differ by {off:.2g} of their width")


class Subject:
    """A tiny model, its text, and what the model answers by itself."""

    def __init__(self, row: Row, sizes: Sizes, seed: int = 0) -> None:
        model_type, changes = row
        self.model = tiny_decoder(model_type, changes, sizes, seed)
        order = torch.randperm(sizes.vocab - 2, generator=torch.Generator().manual_seed(seed)) + 2
        if len(order) < PROMPT + NEW:
            raise ValueError(f"vocab={sizes.vocab} must be at least {PROMPT + NEW + 2}: tokens of the text differ")
        self.ids, self.more = order[:PROMPT].tolist(), order[PROMPT : PROMPT + NEW].tolist()
        with torch.no_grad():  # what does not run by itself is not the kit's to answer for
            self.model(input_ids=torch.tensor([self.ids]), use_cache=False)

    @cached_property
    def spec(self) -> BackboneSpec:
        """What the kit has measured on the model."""
        return describe(self.model).spec

    @cached_property
    def wide(self) -> Any:
        """The model in float64; in float32 where it cannot run so."""
        model = deepcopy(self.model).double()
        try:
            with torch.no_grad():
                return (
                    model
                    if model(input_ids=torch.tensor([self.ids[:8]]), use_cache=False).logits.dtype == torch.float64
                    else self.model
                )
        except Exception:
            return self.model

    @cached_property
    def answer(self) -> tuple[list[int], Tensor]:
        """Greedy tokens and logits ``[NEW, V]`` of the model by itself."""
        try:
            return self._generated()
        except Exception:
            self.read(self.model, self.cache("streaming", "original", PROMPT + NEW), [])  # which may be refused by name
            raise

    def _generated(self, **given: Any) -> tuple[list[int], Tensor]:
        out = self.model.generate(
            torch.tensor([self.ids]), max_new_tokens=NEW, min_new_tokens=NEW, return_dict_in_generate=True, output_logits=True,
            **given,
        )  # fmt: skip
        return out.sequences[0, PROMPT:].tolist(), torch.cat(out.logits)

    def _same_answer(self, logits: Tensor, tokens: list[int]) -> None:
        """Raise ``Wrong`` where ``logits`` of an answer's ``tokens`` are not the model's own. Where transformers differs from
        itself, its answer in chunks will do, or that of one forward without a cache."""

        def whole() -> Tensor:
            with torch.no_grad():
                ids = torch.tensor([self.ids + tokens[:-1]])
                return self.model(input_ids=ids, use_cache=False).logits[0, PROMPT - 1 :]

        try:
            self._compare(logits, self.answer[1])
        except Wrong as error:
            for other in (whole, lambda: self._generated(prefill_chunk_size=CHUNK)[1]):
                with suppress(Exception):
                    return self._compare(logits, other())
            raise error

    @staticmethod
    def _compare(logits: Tensor, want: Tensor) -> None:
        same(logits[0], want[0], "after the prompt")
        if (tokens := logits.argmax(-1).tolist()) != (right := want.argmax(-1).tolist()):
            raise Wrong(f"tokens {tokens} instead of {right}")
        same(logits, want, "while decoding")

    @cached_property
    def heads(self) -> RetainingHeads:
        """Random heads, in float32."""
        torch.manual_seed(0)
        return RetainingHeads(HeadsConfig.for_backbone(self.spec, "tiny", 16)).requires_grad_(False)

    def cache(
        self,
        policy: str,
        positions: str,
        budget: int = BUDGET,
        prompt: int = PROMPT,
        heads: RetainingHeads | None = None,
        **given: Any,
    ) -> BoundedCache:
        """An empty cache; ``heads`` are these, or where the policy needs some a copy of the random ones."""
        if heads is None and parse_policy(policy).needs_heads:
            heads = deepcopy(self.heads)
        numbers = {"chunk": CHUNK, "local_len": TAIL, "stabilizers": STABILIZERS, "prompt_length": prompt}
        return BoundedCache(budget, policy, heads, positions=positions, **numbers, **given)

    def read(self, model: Any, cache: BoundedCache, more: list[int]) -> Tensor:
        """Logits ``[len(more) + 1, V]`` of the kit's own reading and decoding."""
        with attach(model):
            return forced(model, self.ids, cache, more).to(model.dtype)

    # ---- a budget as long as the text ----------------------------------------------------------------------------------

    def generate(self) -> None:
        """``model.generate`` with a long budget gives the model's own tokens and logits."""
        cache = self.cache("streaming", "original", PROMPT + NEW)
        try:
            with attach(self.model):
                tokens, logits = self._generated(**{CACHE: cache}, prefill_chunk_size=CHUNK)
        except Exception as error:
            if not is_refusal(error):
                self._require_chunks()
            raise
        self._same_answer(logits, tokens)

    def _require_chunks(self) -> None:
        """Raise ``NotChecked`` where the model itself cannot generate in chunks."""
        try:
            self._generated(prefill_chunk_size=CHUNK)
        except Exception as error:
            raise NotChecked(f"generate fails in chunks without the kit too: {first_line(error)}") from error

    def long(self, policy: str = "streaming", positions: str = "original") -> None:
        """The kit's own reading and decoding with a long budget give the model's own logits."""
        tokens, _ = self.answer
        logits = self.read(self.model, self.cache(policy, positions, PROMPT + NEW), tokens[:-1])
        self._same_answer(logits, tokens)

    def plain(self) -> None:
        """An attached model without a bounded cache is the model."""
        ids = torch.tensor([self.ids])
        with torch.no_grad():
            want = self.model(input_ids=ids, use_cache=False).logits[0]
            with attach(self.model):
                got = self.model(input_ids=ids, use_cache=False).logits[0]
        same(got, want, "attached")

    # ---- a short budget ------------------------------------------------------------------------------------------------

    def simulated(self, policy: str) -> None:
        """Kept slots and logits with a short budget are those of the simulation; ``locret`` with scores of the heads."""
        model, heads = self.wide, deepcopy(self.heads) if policy == "locret" else None
        ids = torch.tensor([self.ids + self.more])
        plan = Plan("scores" if heads else policy, BUDGET, CHUNK, TAIL, PROMPT, STABILIZERS)
        scores = None if heads is None else self._scores(model, ids, heads.to(model.dtype))
        try:
            want, run = simulate(model, ids, plan, scores)
        except Unknown:
            self.read(model, self.cache(policy, "original", backend="reference"), [])  # its refusal says more
            raise
        cache = self.cache(policy, "original", heads=heads, backend="reference")
        got = self.read(model, cache, self.more)
        for i, call in enumerate(run.rows):
            if call.kept is None:
                continue
            kept = [list(map(int, row)) for row in cache.kept_positions(i)[0]]
            right = [row.nonzero()[:, 0].tolist() for row in call.kept]
            if kept != right:
                if run.gap < TIE:
                    raise NotChecked(f"two scores differ by {run.gap:.1g}")
                lost = sum(len({*a} - {*b}) for a, b in zip(right, kept, strict=True))
                raise Wrong(f"attention layer {i} lacks {lost} of {sum(map(len, right))} slots")
        same(got, want[PROMPT - 1 :].to(got.dtype), "kept slots are equal, but")

    @staticmethod
    def _scores(model: Any, ids: Tensor, heads: RetainingHeads) -> Callable[[Run], Tensor]:
        """Scores of heads that are made even: they weigh all channels of a query or key alike, so that the order in which the kit
        hands channels over does not matter."""

        def scores(run: Run) -> Tensor:
            if len(run.rows) > len(heads.layers):
                raise Unknown("attention is called more often than there are heads")
            call, head = before_rotation(model, ids, run), heads[len(run.rows) - 1]
            (Q, D), H, weights = call.q.shape[1::2], call.k.shape[1], head.fc1.weight
            even = weights[:, : (Q + H) * D].unflatten(1, (Q + H, D)).mean(2, keepdim=True) * D**0.5
            weights[:, : (Q + H) * D] = even.expand(-1, -1, D).flatten(1)
            return head(call.q, call.k, call.v)[0]

        return scores

    def bounded(self, positions: str) -> None:
        """Heads: exact with a long budget; with a short one no head holds more rows than the budget, and logits are finite."""
        self.long("locret", positions)
        cache = self.cache("locret", positions)
        logits = self.read(self.model, cache, [])
        if not logits.isfinite().all():
            raise Wrong("logits are not finite")
        rows = [n for n, window in zip(cache.kept_rows, self.spec.windows, strict=True) if window is None]
        if max(rows, default=0) > BUDGET:
            raise Wrong(f"a head holds {max(rows)} rows with a budget of {BUDGET}")

    # ---- what else goes with a cache -----------------------------------------------------------------------------------

    def training(self) -> None:
        """One step: gradients for every head of a layer without a window, and the backbone's own hidden states."""
        from locret_kit.config.recipes import load_config
        from locret_kit.samples import Sample
        from locret_kit.training.module import HeadTraining

        decoder, ids, seen = decoder_of(self.model), torch.tensor([self.ids]), []
        with torch.no_grad():
            want = decoder(input_ids=ids, use_cache=False).last_hidden_state
        training = HeadTraining(self.model, load_config(["recipe=tiny", "backbone.model=tiny"]))
        training._attachment = attach(self.model)
        hook = decoder.register_forward_hook(lambda module, args, out: seen.append(out.last_hidden_state))
        try:
            sample = Sample(tuple(self.ids), ((PROMPT - 20, PROMPT),))
            training.observe([sample], lambda loss: loss.backward())
        finally:
            hook.remove()
            training._attachment.detach()
        same(seen[-1], want, "the backbone in training")
        for layer in training.scored:
            grads = [weight.grad for weight in training.heads[layer].parameters()]
            if not all(grad is not None and grad.isfinite().all() and grad.abs().max() > 0 for grad in grads):
                raise Wrong(f"the head of layer {layer} got no gradient")

    @cached_property
    def best(self) -> tuple[str, str]:
        """The policy and the position scheme with which caches are saved, copied and batched: heads where they work."""
        for policy, positions in (("locret", "compact"), ("h2o", "original")):
            try:
                with limited(LIMIT):
                    self.read(self.model, self.cache(policy, positions), [])
                return policy, positions
            except (Exception, Late) as error:
                last = error
        raise last

    def _half_read(self) -> BoundedCache:
        cache = self.cache(*self.best)
        with attach(self.model):
            prefill(self.model, self.ids[:MIDDLE], cache)
        return cache

    def save(self) -> None:
        """A cache that is saved and loaded in the middle of the text goes on bit for bit."""
        cache = self._half_read()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "half.locret"
            save_cache(cache, path)
            again = load_cache(path, self.model, deepcopy(self.heads) if cache.policy.needs_heads else None)
        if not torch.equal(self.read(self.model, again, self.more), self.read(self.model, cache, self.more)):
            raise Wrong("a loaded cache goes on otherwise")

    def fork(self) -> None:
        """A copy goes on as the cache does, and neither changes the other."""
        cache = self._half_read()
        copy, again = cache.fork(PROMPT), cache.fork(PROMPT)
        logits = [self.read(self.model, one, self.more) for one in (cache, copy, again)]
        if not all(torch.equal(one, logits[0]) for one in logits):
            raise Wrong("a copy goes on otherwise")

    def batch(self) -> None:
        """Two texts of different length in one batch get the tokens of each alone."""
        texts, best = [self.ids, self.ids[::-1][:-40]], self.best  # found before the model is attached

        def tokens(prompts: list[list[int]]) -> list[list[int]]:
            batch = Engine(self.model, frozenset())
            running = [
                batch.add(Request(ids, NEW), lambda ids=ids: self.cache(*best, prompt=len(ids))) for ids in prompts
            ]  # fmt: skip
            while batch.running:
                batch.step()
            for sequence in running:
                if sequence.error is not None:
                    raise sequence.error
            return [sequence.tokens for sequence in running]

        with attach(self.model):
            alone, both = [*tokens(texts[:1]), *tokens(texts[1:])], tokens(texts)
        if both != alone:
            raise Wrong(f"tokens {both} instead of {alone}")

    def plan(self) -> None:
        """The bytes of a cache that are planned from a configuration are those that it holds."""
        policy, positions = self.best
        cache = self.cache(policy, positions)
        self.read(self.model, cache, [])
        run = RunSettings(budget=BUDGET, chunk=CHUNK, local_len=TAIL, stabilizers=STABILIZERS, positions=positions)
        planned = cache_bytes(
            self._configured(), Setting(PROMPT, run, dtype="float32", d_hidden=16, policy=parse_policy(policy))
        )
        if planned != cache.nbytes:
            raise Wrong(f"{planned} bytes planned, {cache.nbytes} held")

    def _configured(self) -> BackboneSpec:
        """Dimensions by the configuration alone; as measured where transformers has no model of a text part by itself."""
        config = text_config(self.model)
        known = any(type(config) in auto._model_mapping for auto in (AutoModelForCausalLM, AutoModel))
        return BackboneSizes.of(config).spec if known else self.spec

    def checks(self) -> dict[str, Callable[[], None]]:
        """Every check by name."""
        return {
            "plain": self.plain, "generate": self.generate, "long": self.long,
            **{policy: partial(self.simulated, policy) for policy in ("streaming", "h2o", "snapkv")},
            **{f"heads {positions}": partial(self.bounded, positions) for positions in ("compact", "original")},
            "heads kept": partial(self.simulated, "locret"),
            "training": self.training, "save": self.save, "fork": self.fork, "batch": self.batch, "plan": self.plan,
        }  # fmt: skip
