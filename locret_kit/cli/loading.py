"""Backbone, retaining heads and policy of the commands that answer. Names are resolved first; the backbone is loaded
after all other checks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..backbones import demo, probe
from ..backbones.load import choose_adapter, load_backbone, load_tokenizer, other_backbone, pick_device
from ..backbones.spec import text_config
from ..cache.backend import BACKENDS
from ..cache.bounded import BoundedCache
from ..cache.due import Schedule
from ..cache.storage.codec import check_storage
from ..config.infer_options import AskOptions, ChatOptions, Dtype, Generation, InferOptions, Machine, ReadOptions
from ..documents.document import Document
from ..documents.text_record import describe
from ..heads import RetainingHeads, shipped_for
from ..planning.text_budget import budget_of_text
from ..policies import Policy
from ..policies.grammar import parse_policy
from ..policies.registry import UNTRAINED, Stabilizers
from ..runtime.session import Sampling, reading_time
from ..settings import RunSettings, read_protect, too_few
from ..text.template import before_arguments, protected_spans, render_prompt, set_defaults
from ..text.untrusted import Span

ASKED = "rereading-locret"
"""The default policy with the demo's heads, if the text is read only for its questions."""

LATE = (
    "warning: the chat template has its arguments before the text, which stays as it was read: read it again with them"
)
"""For a document and arguments that other text before it was read with."""
MANY_WINDOWS = 4
"""Windows of the model beyond which single facts of a text are often missed, whatever the budget."""


@dataclass(frozen=True)
class ModelChoice:
    """The resolved parts of a run; the backbone as a name, not yet loaded."""

    backbone: str
    heads: RetainingHeads | None
    policy: Policy
    adapter: str | None
    warnings: tuple[str, ...]
    ckpt: str | None

    @property
    def names(self) -> dict[str, str]:
        """Names to write into a file: as given, but only the last part of an absolute path."""
        recorded = self.heads.config.adapter if self.heads else None
        names = {"model": self.backbone, "heads": self.policy.heads_for(self.ckpt)}
        names["adapter"] = self.adapter or (recorded and "none")
        return {what: Path(name).name if Path(name).is_absolute() else name for what, name in names.items() if name}

    @property
    def published(self) -> Mapping[str, object]:
        """Settings that the heads were published with."""
        return self.heads.config.inference if self.heads else {}

    def open_tokenizer(self, machine: Machine) -> PreTrainedTokenizerBase:
        """The tokenizer, with the chat template's arguments. Raises ValueError, OSError: it or the device is not there."""
        pick_device(machine.device)  # before a long text is tokenised
        tokenizer = load_tokenizer(self.backbone)
        set_defaults(tokenizer, machine.template_kwargs, machine.think, machine.reasoning_effort)
        return tokenizer

    def load(
        self, machine: Machine, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Load the backbone and its tokenizer, unless the tokenizer is given.

        Raises:
            ValueError, OSError: it cannot be loaded, or the heads have other shapes.
        """
        tokenizer = tokenizer or self.open_tokenizer(machine)
        model, _ = load_backbone(
            self.backbone, dtype=machine.dtype, device=machine.device, adapter=self.adapter,
            weight_bits=machine.weight_bits, tokenizer=tokenizer,
        )  # fmt: skip
        if self.heads is not None:
            self.heads.check_backbone(probe.describe(model).spec)
        return model, tokenizer

    def for_text(
        self, run: RunSettings, model: PreTrainedModel, ids: Sequence[int], say: Callable[[str], None] | None,
        turns: int = 0,
    ) -> RunSettings:  # fmt: skip
        """The settings, with a budget for the text if none was given. ``turns``: additional slots for a
        conversation. ``say`` gets lines to show before a long prefill: the budget, a warning of too few slots for
        facts, and the expected time."""
        lines: list[str | None] = []
        evicts = not self.policy.keeps_everything
        if run.budget is None and evicts:
            least = replace(run, stabilizers=None, local_len=None)  # which may need more slots
            resolved = least.resolved(self.published, len(ids))
            budget, line = budget_of_text(model, self.policy, resolved, len(ids), turns)
            run, lines = replace(run, budget=budget), [line]
        if say is None:
            return run
        settings = run.resolved(self.published, len(ids))
        if evicts and self.policy.recall is None and self.policy.reread is None:
            few = too_few(settings.budget, len(ids))
            lines.append(few and f"warning: {few}")
            window = getattr(text_config(model), "max_position_embeddings", None) or len(ids)
            if len(ids) >= MANY_WINDOWS * window:
                more = "finds more, and reads passages again for each question"
                again = f"; --policy rereading-locret {more}" if self.heads is not None else ""
                times = f"{len(ids) // window} times the model's window of {window:,}"
                lines.append(f"warning: {len(ids):,} tokens are {times}: single facts are often missed{again}")
        lines.append(reading_time(model, ids, settings, self.policy, self.heads))
        for line in filter(None, lines):
            say(line)
        return run

    def cache(
        self, run: RunSettings, tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], *, asked: bool
    ) -> tuple[BoundedCache, str | None]:
        """A new cache for a prompt, and a warning if ``protect`` matches nothing in it.

        Args:
            asked: whether the prompt is a single user message in the chat template.
        """
        cache = BoundedCache(run, self.policy, self.heads, prompt_length=len(ids))
        spans = protected_spans(tokenizer, ids, run.protect) if asked else []
        cache.pin_all(spans)
        return cache, not_shown(run.protect, spans)


def resolve_choice(
    ckpt: str | None, model: str | None, adapter: str | None, policy: str | None, run: RunSettings | None = None, *,
    asked: bool = False,
) -> ModelChoice:  # fmt: skip
    """Resolve backbone, heads and policy from the user's names. The heads provide the missing ones, and a backbone gets
    the heads that ship for it, unless the policy needs none. If neither is named, the demo's are used, and its backbone
    is downloaded once. ``asked``: the text is read only for its questions.

    Raises:
        ValueError, OSError: unreadable heads, an unknown policy or one that needs heads, settings of the ``run``
            that are out of bounds or have no effect with the policy, or a failed download of the demo.
    """
    if not ckpt and not model:
        ckpt, policy = demo.HEADS, policy or (ASKED if asked else None)
    named = parse_policy(policy) if policy is not None else None
    if model and not ckpt and (named is None or named.needs_heads):
        ckpt = shipped_for(model)
    heads = RetainingHeads.from_pretrained(ckpt, backbone=model) if ckpt else None
    config = heads.config if heads else None
    chosen = named or parse_policy(config.policy if config else UNTRAINED[0])
    chosen.heads_for(heads, "give --ckpt")
    warnings: list[str | None] = []
    if run is not None:  # before anything big is loaded
        check_storage(run.kv_bits, chosen)
        if run.backend is not None:
            _ = BACKENDS[run.backend]  # raises for a name that nobody has
        if isinstance(run.budget, int) and not run.one_shot:  # otherwise the text decides
            length = None if run.decode_every is None else 1
            Schedule.of(run.resolved(config.inference if config else {}, length), length)
        if run.stabilizers is not None and not any(isinstance(scope, Stabilizers) for scope in chosen.scopes):
            warnings.append(f"warning: policy={chosen.name} protects no stabilizers")
    name = model or (config.backbone if config else "")
    if config and (known := Path(config.backbone)).is_absolute() and known.exists() and not Path(name).exists():
        name = config.backbone if known.name == name else name  # a document has but the last part of its path
    demo.provide(name)
    adapter, warning = choose_adapter(config.adapter if config else None, adapter)
    warnings[:0] = warning, other_backbone(config.backbone, name) if config else None
    return ModelChoice(name, heads, chosen, adapter, tuple(filter(None, warnings)), ckpt)


def sampling_of(args: Generation) -> Sampling:
    """Options of sampling."""
    return Sampling(args.temperature, args.top_k, args.top_p, args.repetition_penalty)


def generation_of(args: InferOptions | AskOptions | ChatOptions) -> dict[str, Any]:
    """Arguments of ``Document.ask``."""
    names = ("max_new_tokens", "max_thought_tokens", "seed")
    return {"sampling": sampling_of(args), **{name: getattr(args, name) for name in names}}


def not_shown(protect: str | None, spans: Sequence[Span]) -> str | None:
    """A warning where a chat template's text is to be protected, and none is found."""
    if spans or not read_protect(protect) - {"first"}:
        return None
    return f"warning: protect={protect}: the prompt has no such text, or is not one message of a user"


def beyond_window(model: PreTrainedModel, cache: BoundedCache) -> str | None:
    """A warning where keys of the prompt are rotated by positions that the backbone was not made for."""
    window, s = getattr(text_config(model), "max_position_embeddings", None), cache.schedule
    budgets, places = cache.context.budgets, cache.context.positions
    rows = s.prompt_length or 0 if cache.policy.keeps_everything else max(budgets) + s.chunk
    if window is None or not any(budgets) or (reach := places.largest(rows, s.prompt_length)) <= window:
        return None
    advice = "use --positions compact with budget + chunk below the window"
    return f"warning: positions go up to {reach - 1}, beyond the backbone's window of {window}; {advice}"


def open_document(
    path: str, args: AskOptions | ChatOptions | ReadOptions, force: bool = False
) -> tuple[Document, ModelChoice]:
    """Load a document with its backbone and heads. By default they have the names stored in the file, and the file's
    precision; ``args`` override both.

    Raises:
        OSError: no such file. ValueError: it is damaged, a named part is missing, or the first difference from the
            parts found.
    """
    saved, about = describe(path)
    ckpt = args.ckpt or (about.names.get("heads") if saved.heads else None)
    model = args.model or about.names.get("model")
    if saved.heads and not ckpt:
        raise ValueError(f"{path} was read with retaining heads that it does not name: give --ckpt")
    if not model:
        raise ValueError(f"{path} does not name its backbone: give --model")
    try:
        chosen = resolve_choice(ckpt, model, args.adapter or about.names.get("adapter"), args.policy)
        bits = args.weight_bits or next((bits for bits in (8, 4) if saved.model.get("weight_bits") == bits), None)
        dtype = cast(Dtype, saved.dtype) if args.dtype == "auto" else args.dtype
        loaded, tokenizer = chosen.load(replace(args, dtype=dtype, weight_bits=bits))
    except FileNotFoundError as error:
        theirs = ", ".join(f"{what} {name!r}" for what, name in about.names.items())
        advice = "give their places with --model and --ckpt"
        raise FileNotFoundError(f"{error}. {path} was read with {theirs}: {advice}") from error
    needed = chosen.heads if saved.heads else None
    document = Document.load(path, loaded, tokenizer, needed, args.policy, force=force)
    warnings, expected = chosen.warnings, document.text.before
    if document.chat_template and render_prompt(tokenizer, "")[0] not in (expected, before_arguments(tokenizer)):
        warnings += (LATE,)
    return document, replace(chosen, policy=document.cache.policy, warnings=warnings)
