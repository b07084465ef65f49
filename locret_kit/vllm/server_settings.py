"""Settings of a server of vLLM and of one of its requests, and how many of them fit. Nothing of vLLM is imported."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from ..engine import BoundedCache, RetainingHeads
from ..naming import check_name, show
from ..policies import Policy
from ..policies.capabilities import Subject, refuse
from ..policies.grammar import parse_policy
from ..policies.registry import UNTRAINED, load_plugin
from ..settings import RunSettings, read_protect

LOG = logging.getLogger("locret_kit")
LEFT_OUT = {
    "one_shot": "the prompt would be one chunk, whose size no page bounds",
    "kv_bits": "pages hold keys and values in the model's type",
}
"""Settings of a run that a page does not have, and why."""
OWN = ("budget", "policy")
"""Settings that a request may have of its own."""


@dataclass(frozen=True, kw_only=True)
class VllmSettings(RunSettings):
    """The section of ``--additional-config '{"locret": {...}}'``.

    Raises:
        ValueError: a setting of a wrong type or out of bounds, or that a server of vLLM does not have; it is named.
    """

    heads: str | None = None
    """Retaining heads: a folder, a .pt or .bin file, or a Hub repository."""
    policy: str | None = None
    """Default policy. None takes the one published with the heads, or ``untrained()`` without heads."""
    policies: list[str] = field(default_factory=list)
    """Policies that requests may ask for, besides the default."""
    documents: str | None = None
    """Folder of ``.locret`` documents. A prompt that starts with one continues it. It needs the connector of ``documents``."""
    plugin: str | None = None
    """A module, or a Python file, that brings policies of your own."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_settings(self)

    def given(self) -> dict[str, object]:
        """The section: settings that differ from their defaults."""
        plain = asdict(VllmSettings())
        return {name: value for name, value in asdict(self).items() if value != plain[name]}


class ServerSettings:
    """Settings, policies and heads of a vLLM server, read once.

    Attributes:
        policies: allowed policies by name; the first is the default.
        settings: of a request without settings of its own; they do not depend on the prompt's length.
        documents: files of the folder of documents.

    Raises:
        ValueError: a policy that a page cannot hold, a policy that needs missing heads, no such folder of documents, or
            impossible settings. FileNotFoundError: no such heads.
    """

    def __init__(self, section: VllmSettings) -> None:
        self.section = section
        if section.plugin is not None:
            load_plugin(section.plugin)
        if (folder := section.documents) is not None and not os.path.isdir(folder):
            raise ValueError(f"documents={folder!r} must be a folder of .locret files")
        self.documents = [] if folder is None else sorted(Path(folder).glob("*.locret"))
        heads = None if section.heads is None else RetainingHeads.from_pretrained(section.heads).requires_grad_(False)
        self.heads: RetainingHeads | None = heads
        self.default = section.policy or (heads.config.policy if heads is not None else untrained())
        self.policies = {name: parse_policy(name) for name in dict.fromkeys([self.default, *section.policies])}
        self.settings = section.run.resolved({} if heads is None else heads.config.inference, None)
        for name, policy in self.policies.items():
            check_policy(policy)
            self.request({"policy": name}, 1)

    def request(
        self, own: Mapping[str, object], prompt_length: int, heads: RetainingHeads | None = None
    ) -> BoundedCache:
        """The cache of a request of ``prompt_length`` tokens, bound to no model. ``own`` may have a ``budget`` and a ``policy``
        (``vllm_xargs`` over HTTP, ``SamplingParams.extra_args``). ``heads`` replace the server's.

        Raises:
            ValueError: a budget above the server's, a policy that is not allowed, or impossible settings.
        """
        largest, policy = self.settings.budget, str(own.get("policy", self.default))
        check_name("policy", policy, self.policies)
        budget = own.get("budget", largest)
        # Numbers of vllm_xargs may come as floating point.
        if not isinstance(budget, int | float) or budget is True or not 1 <= budget <= largest or budget != int(budget):
            raise ValueError(f"budget={budget!r} must be an integer from 1 to {largest}, the server's")
        settings, heads = replace(self.section.run, budget=int(budget)), self.heads if heads is None else heads
        text = BoundedCache(settings, self.policies[policy], heads, prompt_length=prompt_length)
        schedule, pinned = text.schedule, sum(end - start for start, end in text.pins)
        # Said here, where requests arrive, for the longest tail: a worker that raises ends the engine.
        beside = max(schedule.stabilizers, schedule.local_len)
        if schedule.budget <= pinned + beside:
            why = f"{pinned} protected tokens and {beside} stabilizers or tail tokens"
            raise ValueError(f"budget={schedule.budget} must be above {pinned + beside}: {why}")
        return text


def check_settings(run: RunSettings) -> None:
    """Raise ValueError for a setting of a run that a page does not have."""
    for name, why in LEFT_OUT.items():
        if (value := getattr(run, name)) not in (None, False):
            raise ValueError(f"{name}={value} does not go with vLLM: {why}")
    if isinstance(run.budget, float):
        raise ValueError(f"budget={run.budget}: a page's rows must be known before the start: give an integer")
    if read_protect(run.protect) - {"first"}:
        raise ValueError(f"protect={run.protect!r}: with vLLM requests protect 'first' alone")


def untrained() -> str:
    """The policy of a backbone without heads: the kit's default, or the nearest that a page can hold, and a warning says so."""
    for name in UNTRAINED[:-1]:
        try:
            check_policy(parse_policy(name))
            return name
        except ValueError as error:
            LOG.warning("warning: %s; so it is %s", error, UNTRAINED[-1])
    return UNTRAINED[-1]


def check_policy(policy: Policy) -> None:
    """Raise ValueError for a policy whose rows no page of one size can hold, or whose parts remember more than rows."""
    refuse("vllm", Subject(policy))
    if len({*policy.layer_budgets(64, 8, 16, 0, 0, 4096)}) > 1:
        raise ValueError(f"policy={policy.name!r}: with vLLM all layers hold as many slots, and its layers differ")


SPARE = 1
"""Number of pages that vLLM keeps for itself: its block 0 belongs to no request."""


@dataclass(frozen=True)
class Pages:
    """Pages of all layers of one rank of a server."""

    each: int
    """Bytes of a request's pages."""
    requests: int
    """Requests that run at once; more wait."""
    engines: int = 1
    """Engines of data parallelism, which share them."""

    @classmethod
    def within(cls, each: int, memory: int) -> Pages:
        """Pages that fit into ``memory`` bytes."""
        return cls(each, max(0, memory // each - SPARE))

    @property
    def bytes(self) -> int:
        """Bytes of all pages, vLLM's own among them."""
        return (self.requests + SPARE * self.engines) * self.each

    def __str__(self) -> str:
        return f"{self.requests} requests fit, each of any length in {show(self.each)}: {self.bytes} bytes"
