"""Named policies and the grammar: ``locret``, ``streaming(sinks=8)``, ``score=cis scope=stabilizers+sinks(4)``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from ..naming import nearest
from .base import Policy
from .parts import Cis, Random, Recency, Sinks, Stabilizers, TopK

SCORES: dict[str, type] = {"cis": Cis, "random": Random, "recency": Recency}
SCOPES: dict[str, type] = {"sinks": Sinks, "stabilizers": Stabilizers}
ALLOCATIONS = ("uniform",)
SELECTIONS: dict[str, type] = {"top-k": TopK}


def _full() -> Policy:
    return Policy("full", Recency(), (), TopK(), keeps_everything=True)


def _random() -> Policy:
    return Policy("random", Random(), (), TopK(), source="RoCo, section 5.1.4")


def _recency() -> Policy:
    return Policy("recency", Recency(), (), TopK())


def _streaming(sinks: int = 4) -> Policy:
    return Policy("streaming", Recency(), (Sinks(sinks),), TopK(), source="StreamingLLM, arXiv 2309.17453")


def _locret(sinks: int = 0) -> Policy:
    scopes = (Stabilizers(), Sinks(sinks)) if sinks else (Stabilizers(),)
    return Policy("locret", Cis(), scopes, TopK(), source="Locret, arXiv 2410.01805")


NAMED: dict[str, Callable[..., Policy]] = {
    "full": _full,
    "locret": _locret,
    "random": _random,
    "recency": _recency,
    "streaming": _streaming,
}

_CALL = re.compile(r"^\s*([\w-]+)\s*(?:\(([^()]*)\))?\s*$")


def _call(text: str, what: str, known: Mapping[str, Callable[..., Any]]) -> Any:
    """Build ``name(value, key=value)`` from a table of parts."""
    match = _CALL.match(text)
    if not match:
        raise ValueError(f"{what}={text!r} does not read as name or name(key=value)")
    name, inside = match.groups()
    if name not in known:
        raise ValueError(f"{what}={name!r} is unknown.{nearest(name, known)} Known: {', '.join(sorted(known))}.")
    make = known[name]
    allowed = _parameters(make)
    given: dict[str, Any] = {}
    for i, item in enumerate(x for x in (inside or "").split(",") if x.strip()):
        key, eq, value = item.partition("=")
        if not eq:
            if i >= len(allowed):
                raise ValueError(f"{what}={name}({inside}) takes {len(allowed)} parameters")
            key, value = list(allowed)[i], item
        key = key.strip()
        if key not in allowed:
            there = ", ".join(allowed) or "none"
            raise ValueError(f"{what}={name}: parameter {key!r} is unknown.{nearest(key, allowed)} There are: {there}.")
        kind = type(allowed[key])
        try:
            given[key] = kind(value.strip())
        except ValueError:
            raise ValueError(f"{what}={name}: {key}={value.strip()!r} must be {kind.__name__}") from None
    return make(**given)


def _parameters(make: Callable[..., Any]) -> dict[str, Any]:
    """Parameter names and defaults of a part or of a named policy."""
    if isinstance(make, type):
        return {f.name: f.default for f in fields(make)}
    names = make.__code__.co_varnames[: make.__code__.co_argcount]
    return dict(zip(names, make.__defaults__ or (), strict=True))


def parse_policy(text: str) -> Policy:
    """A named policy (``roco``, ``streaming(sinks=8)``) or a composition of parts.

    Raises:
        ValueError: unknown name, part or parameter; the message says what there is and suggests the nearest.
    """
    text = text.strip()
    if "=" not in text.split("(")[0]:
        return _call(text, "policy", NAMED)
    parts = {"scope": "", "allocation": "uniform", "selection": "top-k"}
    for item in text.split():
        key, eq, value = item.partition("=")
        if not eq or key not in ("score", *parts):
            raise ValueError(
                f"policy part {item!r} is unknown.{nearest(key, ('score', *parts))} Parts: score, scope, allocation, selection."
            )
        parts[key] = value
    if "score" not in parts:
        raise ValueError(f"policy={text!r} names no score; known: {', '.join(SCORES)}")
    if parts["allocation"] not in ALLOCATIONS:
        raise ValueError(f"allocation={parts['allocation']!r} is unknown. Known: {', '.join(ALLOCATIONS)}.")
    scopes = tuple(_call(scope, "scope", SCOPES) for scope in parts["scope"].split("+") if scope)
    return Policy(
        text, _call(parts["score"], "score", SCORES), scopes, _call(parts["selection"], "selection", SELECTIONS)
    )


def describe_policies() -> list[str]:
    """One line a named policy: name, parts, parameters with defaults, source."""
    lines = []
    for name, make in NAMED.items():
        policy = make()
        scopes = "+".join(type(s).__name__.lower() for s in policy.scopes) or "-"
        params = ", ".join(f"{k}={v}" for k, v in _parameters(make).items()) or "-"
        score = "-" if policy.keeps_everything else type(policy.score).__name__.lower()
        lines.append(
            f"{name:<12} score={score:<8} scope={scopes:<18} parameters: {params:<10} {policy.source}".rstrip()
        )
    return lines
