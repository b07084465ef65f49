"""The grammar of policies: ``locret``, ``streaming(sinks=8)``, ``score=cis scope=stabilizers+sinks(4)``, and
``h2o merge=nearest``, a named policy with some of its parts changed."""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass, replace
from itertools import accumulate
from math import isfinite
from textwrap import wrap
from typing import TypeVar, cast

from ..cis import Loss
from ..naming import nearest, split_outside
from ..validation import type_words, validate
from . import Policy, registry

UNBOUNDED = "kvzip"
ORACLE = "locret-eval sets it beside the policies (policies=[...,kvzip])"
DEPTH = 16
"""Parentheses within parentheses, at most."""
_CALL = re.compile(r"^\s*([\w-]+)(?:\s*\((.*)\))?\s*$", re.DOTALL)  # blanks have one place: two would be tried in pairs
E = TypeVar("E", type, registry.NamedPolicy)


def parse_policy(text: str) -> Policy:
    """Parse a named policy (``roco``, ``streaming(sinks=8)``), a composition of parts separated by blanks, or a
    named policy followed by parts that replace its own.

    Raises:
        ValueError: unknown name, part or parameter, or a value out of bounds; has the name and the nearest known
            one.
    """
    text = text.strip()
    if max(accumulate((letter == "(") - (letter == ")") for letter in text), default=0) > DEPTH:
        raise ValueError(f"policy={text[:40]!r}...: parentheses are nested more than {DEPTH} deep")
    items = split_outside(text, " ")
    if items and items[0].split("(")[0] == UNBOUNDED:
        raise ValueError(f"policy={text!r} reads the whole prompt into an unbounded cache first: {ORACLE}")
    if not any("=" in item.split("(")[0] for item in items):
        return replace(_named(text), name=text)
    if "=" in items[0].split("(")[0]:
        parts = _parts(items)
        if "score" not in parts:
            raise ValueError(f"policy={text!r} names no score; known: {', '.join(registry.parts_named('score'))}")
        return Policy(text, **parts)
    base, parts = _named(items[0]), _parts(items[1:])
    if base.keeps_everything and parts.keys() - {"sparse"}:
        raise ValueError(f"policy={text!r}: {items[0]} evicts nothing, so of its parts only sparse can be changed")
    return replace(base, name=text, **parts)


def parse_loss(text: str) -> Loss:
    """A training's loss, such as ``smooth_l1(beta=0.5)``. Raises as ``parse_policy``."""
    return cast(Loss, _make("loss", text))


def parse_source(text: str) -> object | None:
    """A training's source that is made, such as ``code(src)``; None if the text names none. Raises as ``parse_policy``."""
    match = _CALL.match(text)
    return _make("source", text) if match and match[1] in registry.parts_named("source") else None


def _named(text: str) -> Policy:
    named, given = _call(text, "policy", registry.policies())
    if not named.base:
        return named.make(given)
    base = parse_policy(str(given.get("base", named.base)))
    if base.keeps_everything:
        raise ValueError(f"policy={named.name}: base={base.name} evicts nothing, so there is nothing to change")
    return named.make(given, base)


def _parts(items: list[str]) -> registry.Parts:
    """The parts that ``items`` name, ``score=cis`` and so on."""
    given: dict[str, str] = {}
    for item in items:
        key, eq, value = item.partition("=")
        if not eq or key not in registry.KINDS:
            known = ", ".join(registry.KINDS)
            raise ValueError(f"policy part {item!r} is unknown.{nearest(key, registry.KINDS)} Parts: {known}.")
        if key in given:
            raise ValueError(f"policy part {key!r} is given twice: {given[key]!r} and {value!r}")
        given[key] = value
    made: dict[str, object] = {}
    for kind, text in given.items():
        pieces = split_outside(text, "+") if kind in ("scope", "allocation") else [text]
        several = [_make(kind, piece) for piece in pieces]
        if kind == "scope":
            made["scopes"] = tuple(several)
        else:
            made[kind] = several[0] if len(several) == 1 else _both(text, several)
    return cast(registry.Parts, made)


def _make(kind: str, text: str) -> object:
    """A part with its parameters."""
    made, given = _call(text, kind, registry.parts_named(kind))
    return made(**given)


def _both(text: str, several: list[object]) -> registry.PyramidAdaptive:
    """A pyramid over layers and an adaptive allocation over heads, joined by ``+``."""
    match sorted(several, key=lambda one: isinstance(one, registry.Adaptive)):
        case [registry.Pyramid(beta=beta), registry.Adaptive(alpha=alpha)]:
            return registry.PyramidAdaptive(alpha=alpha, beta=beta)
    raise ValueError(f"allocation={text!r}: only pyramid+adaptive can be combined")


def _call(text: str, kind: str, known: Mapping[str, E]) -> tuple[E, dict[str, object]]:
    """The entry of a table that ``name(value, key=value)`` names, and the values."""
    if not (match := _CALL.match(text)):
        raise ValueError(f"{kind}={text!r} must be name or name(key=value)")
    name, inside = match.groups()
    if name not in known:
        said = f"{kind}={name!r} is unknown.{nearest(name, known)} Known: {', '.join(known)}."
        raise ValueError(f"{said} --plugin FILE.py brings others.")
    entry = known[name]
    there = entry.parameters() if isinstance(entry, registry.NamedPolicy) else registry.parameters_of(entry)
    given: dict[str, object] = {}
    for i, item in enumerate(split_outside(inside or "", ",")):
        key, eq, value = item.partition("=")
        if not (eq and re.fullmatch(r"\s*[\w-]+\s*", key)):  # such as a path with = in it
            if i >= len(there):
                raise ValueError(f"{kind}={name}({inside}) takes {len(there)} parameters")
            key, value = list(there)[i], item
        key = key.strip()
        if key not in there:
            names = ", ".join(there) or "none"
            raise ValueError(f"{kind}={name}: parameter {key!r} is unknown.{nearest(key, there)} There are: {names}.")
        if key in given:
            raise ValueError(f"{kind}={name}: parameter {key!r} is given twice")
        given[key] = _value(value.strip(), there[key], f"{kind}={name}: {key}")
    if missing := [key for key, parameter in there.items() if parameter.default is MISSING and key not in given]:
        raise ValueError(f"{kind}={name}: parameter {missing[0]!r} is missing: {name}({missing[0]}=...)")
    return entry, given


def _value(text: str, parameter: registry.Parameter, where: str) -> object:
    """The value of a parameter: the first reading of the text that its annotations allow as it is."""
    refusals = []
    for reading in _readings(text):
        try:
            made = [validate(where, annotation, reading) for annotation in parameter.annotations]
        except ValueError as error:
            infinite = isinstance(reading, float) and not isfinite(reading)
            words = f"{where}={text} must be finite: {type_words(parameter.annotations[0])}"
            refusals.append(words if infinite else str(error))
            continue
        if isinstance(reading, int) and abs(reading) >= 2**63:
            raise ValueError(f"{where}={text} does not fit into 64 bits")
        if all(type(one) in (type(reading), float) for one in made):  # 1.0 is no integer, it is a fraction
            return made[0]
        refusals.append(f"{where}={text} must be {' and '.join(map(type_words, parameter.annotations))}")
    raise ValueError(refusals[0])


def _readings(text: str) -> Iterator[object]:
    """The meanings of a text, in order: an integer, a number, true, false or none, and itself."""
    for kind in (int, float):
        with suppress(ValueError):
            yield kind(text)
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        yield words[text.lower()]
    yield text


def spell(part: object) -> str:
    """A part in the grammar, every parameter written out."""
    if isinstance(part, registry.PyramidAdaptive):
        return f"{spell(registry.Pyramid(part.beta))}+{spell(registry.Adaptive(part.alpha))}"
    assert is_dataclass(part)
    names = {kind: name for table in registry.KINDS for name, kind in registry.parts_named(table).items()}
    inside = ",".join(f"{field.name}={getattr(part, field.name)}" for field in fields(part))
    return names[type(part)] + (f"({inside})" if inside else "")


def parts_of(policy: Policy) -> dict[str, str]:
    """The policy's parts in the grammar, in its order; absent ones are left out."""
    made = {kind: policy.scopes if kind == "scope" else (getattr(policy, kind),) for kind in registry.KINDS}
    return {kind: "+".join(map(spell, parts)) for kind, parts in made.items() if parts not in ((), (None,))}


def composed_of(policy: Policy) -> str:
    """The policy written out in the grammar; '-' for one that keeps every slot and attends to all."""
    if not policy.keeps_everything:
        return " ".join(f"{kind}={text}" for kind, text in parts_of(policy).items())
    return "-" if policy.sparse is None else f"full sparse={spell(policy.sparse)}"


def read_once(policy: Policy) -> Policy:
    """The policy without its second reading, if it has one."""
    if policy.reread is None:
        return policy
    policy = replace(policy, reread=None)
    return replace(policy, name=composed_of(policy))


def describe_policies() -> list[str]:
    """Descriptions of the named policies, grouped by their need for heads: name and purpose, then parts in the
    grammar, parameters with defaults, and source."""
    made = [(name, named, parse_policy(name)) for name, named in registry.policies().items()]
    texts = []
    for title, needs_heads in (("With retaining heads (--ckpt):", True), ("Without:", False)):
        texts.append(title)
        for name, named, policy in made:
            if policy.needs_heads == needs_heads:
                parameters = ", ".join(f"{key}={one.default}" for key, one in named.parameters().items())
                said = f"parameters: {parameters}" if parameters else ""
                texts.append(_entry(name, named.keeps, (composed_of(policy).removeprefix("-"), said, policy.source)))
    return [*texts, _entry(UNBOUNDED, "an unbounded oracle", (ORACLE, "arXiv 2505.23416"))]


def _entry(name: str, keeps: str, below: Iterable[str]) -> str:
    """A policy's entry: name and purpose, then indented lines."""
    said = wrap(f"  {name:<18} {keeps}".rstrip(), 100, subsequent_indent=" " * 21)
    for text in below:
        said += [" " * 6 + line for line in wrap(text, 94, break_long_words=False, break_on_hyphens=False)]
    return "\n".join(said)
