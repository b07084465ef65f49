"""Named policies and the grammar: ``locret``, ``streaming(sinks=8)``, ``score=cis scope=stabilizers+sinks(4)``, and
``h2o merge=nearest``, a named policy with some of its parts changed."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

from ..naming import nearest
from .allocation import Adaptive, Pyramid, PyramidAdaptive
from .base import Policy, Uniform
from .key_scores import Compactor, ExpectedAttention, KeyDiff, KNorm, LagKV
from .merging import Lococo, Nearest
from .prefill_mask import Recent
from .reread import Reread
from .scopes import Deviation, Proxies, Sinks, Stabilizers, Window
from .scores import Aas, Aqas, Cis, Entropy, Ltas, Mas, ProxyAttention, Random, Recency, WindowAttention
from .selection import Representatives, Sampled, TopK

SCORES: dict[str, type] = {
    "aas": Aas, "aqas": Aqas, "cis": Cis, "compactor": Compactor, "entropy": Entropy,
    "expected-attention": ExpectedAttention, "keydiff": KeyDiff, "knorm": KNorm, "lagkv": LagKV, "ltas": Ltas, "mas": Mas,
    "proxy": ProxyAttention, "random": Random, "recency": Recency, "window": WindowAttention,
}  # fmt: skip
SCOPES: dict[str, type] = {
    "deviation": Deviation, "proxies": Proxies, "sinks": Sinks, "stabilizers": Stabilizers, "window": Window,
}  # fmt: skip
ALLOCATIONS: dict[str, type] = {"adaptive": Adaptive, "pyramid": Pyramid, "uniform": Uniform}
SELECTIONS: dict[str, type] = {"representatives": Representatives, "sampled": Sampled, "top-k": TopK}
MERGES: dict[str, type] = {"lococo": Lococo, "nearest": Nearest}
PREFILL_MASKS: dict[str, type] = {"recent": Recent}
REREADS: dict[str, type] = {"reread": Reread}
_FIELDS = {"reading": "prefill_mask", "answering": "reread"}
PARTS = ("score", "scope", "allocation", "selection", "merge", "reading", "answering")


def _full() -> Policy:
    return Policy("full", Recency(), (), TopK(), keeps_everything=True)


def _random() -> Policy:
    return Policy("random", Random(), (), TopK(), source="RoCo, section 5.1.4")


def _recency() -> Policy:
    return Policy("recency", Recency(), (), TopK())


def _streaming(sinks: int = 4) -> Policy:
    return Policy("streaming", Recency(), (Sinks(sinks),), TopK(), source="StreamingLLM, arXiv 2309.17453")


def _scissorhands(window: int | float = 0.5) -> Policy:
    return Policy("scissorhands", Aqas(), (Window(window),), TopK(), source="ScissorHands, arXiv 2305.17118")


def _h2o(window: int | float = 0.5) -> Policy:
    return Policy("h2o", Aas(), (Window(window),), TopK(), source="H2O, arXiv 2306.14048")


def _tova() -> Policy:
    return Policy("tova", Ltas(), (), TopK(), source="TOVA, arXiv 2401.06104")


def _roco(window: int | float = 0.5, newest: int = 10, sinks: int = 4) -> Policy:
    return Policy("roco", Mas(), (Deviation(window, newest, sinks),), TopK(), source="RoCo, arXiv 2402.06262")


def _snapkv(window: int = 32, kernel: int = 7) -> Policy:
    score = WindowAttention(window, kernel)
    return Policy("snapkv", score, (Window(window),), TopK(), source="SnapKV, arXiv 2404.14469")


def _pyramidkv(window: int = 32, kernel: int = 7, beta: float = 20.0) -> Policy:
    base = replace(_snapkv(window, kernel), name="pyramidkv", allocation=Pyramid(beta))
    return replace(base, source="PyramidKV, arXiv 2406.02069")


def _ada_snapkv(window: int = 32, kernel: int = 7, alpha: float = 0.5) -> Policy:
    base = replace(_snapkv(window, kernel), name="ada-snapkv", allocation=Adaptive(alpha))
    return replace(base, source="Ada-KV, arXiv 2407.11550")


def _ada_pyramid(window: int = 32, kernel: int = 7, beta: float = 20.0, alpha: float = 0.5) -> Policy:
    allocation = PyramidAdaptive(Pyramid(beta), Adaptive(alpha))
    base = replace(_snapkv(window, kernel), name="ada-pyramid", allocation=allocation)
    return replace(base, source="Ada-KV, arXiv 2407.11550")


def _nacl(proxies: int | float = 0.1, ratio: float = 0.7) -> Policy:
    scopes = (Proxies(proxies),)
    return Policy("nacl", ProxyAttention(proxies), scopes, Sampled(ratio), source="NaCl, arXiv 2408.03675")


def _sirllm(sinks: int = 4, window: int | float = 0.125) -> Policy:
    return Policy("sirllm", Entropy(), (Sinks(sinks), Window(window)), TopK(), source="SirLLM, arXiv 2405.12528")


def _kvcrush(
    base: str = "h2o", ratio: float = 0.25, anchor: str = "mean", pick: str = "even", level: str = "token"
) -> Policy:
    policy = parse_policy(base)
    if policy.keeps_everything:
        raise ValueError(f"kvcrush(base={base}): the base evicts nothing, so nothing is to be represented")
    selection = Representatives(ratio, anchor, pick, level)
    return replace(policy, name="kvcrush", selection=selection, source="KVCrush, arXiv 2503.00022")


def _locret(sinks: int = 0) -> Policy:
    scopes = (Stabilizers(), Sinks(sinks)) if sinks else (Stabilizers(),)
    return Policy("locret", Cis(), scopes, TopK(), source="Locret, arXiv 2410.01805")


def _ada_locret(sinks: int = 0, alpha: float = 0.5) -> Policy:
    return replace(_locret(sinks), name="ada-locret", allocation=Adaptive(alpha), source="Locret with Ada-KV's heads")


def _pyramid_locret(sinks: int = 0, beta: float = 20.0) -> Policy:
    base = replace(_locret(sinks), name="pyramid-locret", allocation=Pyramid(beta))
    return replace(base, source="Locret with PyramidKV's layers")


def _merge(base: str = "h2o", metric: str = "cosine", weight: str = "score") -> Policy:
    policy = parse_policy(base)
    if policy.keeps_everything:
        raise ValueError(f"merge(base={base}): the base evicts nothing, so nothing is to be merged")
    source = f"{policy.source or base} with an attention pool, Locret, section 4.4"
    return replace(policy, name="merge", merge=Nearest(metric, weight), source=source)


def _merge_locret(sinks: int = 0, metric: str = "cosine", weight: str = "score") -> Policy:
    return replace(_locret(sinks), name="merge-locret", merge=Nearest(metric, weight), source="Locret, section 4.4")


def _windowed_locret(newest: int = 1024, sinks: int = 8) -> Policy:
    reading = Recent(newest, sinks)
    return Policy(
        "windowed-locret",
        Cis(),
        (Stabilizers(newest),),
        TopK(),
        prefill_mask=reading,
        source="Locret with StreamingLLM's reading",
    )


def _rereading_locret(tokens: int = 512, window: int = 32, kernel: int = 33, first: int = 32) -> Policy:
    base = replace(_locret(), name="rereading-locret", reread=Reread(tokens, window, kernel, first))
    return replace(base, source="Locret, then InfiniRetri's second reading, arXiv 2502.12962")


def _knorm() -> Policy:
    return Policy("knorm", KNorm(), (), TopK(), source="arXiv 2406.11430")


def _keydiff() -> Policy:
    return Policy("keydiff", KeyDiff(), (), TopK(), source="KeyDiff, arXiv 2504.15364")


def _lagkv(sinks: int = 4, lag: int = 128) -> Policy:
    return Policy("lagkv", LagKV(sinks, lag), (), TopK(), source="LagKV, arXiv 2504.04704")


def _expected_attention(sinks: int = 4, future: int = 512, epsilon: float = 0.0, value_norm: bool = True) -> Policy:
    score = ExpectedAttention(sinks, future, epsilon, value_norm)
    return Policy("expected-attention", score, (), TopK(), source="Expected Attention, arXiv 2510.00636")


def _compactor(block: int = 256, sketch: int = 48, blend: float = 1.0, first: int = 8, last: int = 4) -> Policy:
    score = Compactor(block, sketch, blend, first, last)
    return Policy("compactor", score, (), TopK(), source="Compactor, arXiv 2507.08143")


NAMED: dict[str, Callable[..., Policy]] = {
    "full": _full,
    "random": _random,
    "recency": _recency,
    "streaming": _streaming,
    "scissorhands": _scissorhands,
    "h2o": _h2o,
    "tova": _tova,
    "roco": _roco,
    "snapkv": _snapkv,
    "pyramidkv": _pyramidkv,
    "ada-snapkv": _ada_snapkv,
    "ada-pyramid": _ada_pyramid,
    "nacl": _nacl,
    "sirllm": _sirllm,
    "kvcrush": _kvcrush,
    "knorm": _knorm,
    "keydiff": _keydiff,
    "lagkv": _lagkv,
    "expected-attention": _expected_attention,
    "compactor": _compactor,
    "locret": _locret,
    "ada-locret": _ada_locret,
    "pyramid-locret": _pyramid_locret,
    "windowed-locret": _windowed_locret,
    "rereading-locret": _rereading_locret,
    "merge": _merge,
    "merge-locret": _merge_locret,
}

_CALL = re.compile(r"^\s*([\w-]+)\s*(?:\((.*)\))?\s*$", re.DOTALL)


UNBOUNDED = "kvzip"
ORACLE = "locret-eval sets it beside the policies (policies=[...,kvzip])"


def parse_policy(text: str) -> Policy:
    """A named policy (``roco``, ``streaming(sinks=8)``), a composition of parts, separated by blanks, or a named policy and
    the parts in which it is changed.

    Raises:
        ValueError: unknown name, part or parameter; the message says what there is and suggests the nearest.
    """
    text = text.strip()
    items = split_outside(text, " ")
    if items and items[0].split("(")[0] == UNBOUNDED:
        raise ValueError(f"policy={text!r} reads the whole prompt into an unbounded cache first: {ORACLE}")
    parts = [item for item in items if "=" in item.split("(")[0]]
    if not parts:
        return replace(_call(text, "policy", NAMED), name=text)
    if parts[0] == items[0]:
        return _changed(Policy(text, None, (), TopK()), items)
    base = _call(items[0], "policy", NAMED)
    if base.keeps_everything:
        raise ValueError(f"policy={text!r}: {items[0]} evicts nothing, so no part of it can be changed")
    return _changed(replace(base, name=text), items[1:])


def _changed(base: Policy, items: list[str]) -> Policy:
    """The policy with the parts that ``items`` name in the place of its own."""
    given: dict[str, str] = {}
    for item in items:
        key, eq, value = item.partition("=")
        if not eq or key not in PARTS:
            raise ValueError(f"policy part {item!r} is unknown.{nearest(key, PARTS)} Parts: {', '.join(PARTS)}.")
        if key in given:
            raise ValueError(f"policy part {key!r} is given twice: {given[key]!r} and {value!r}")
        given[key] = value
    if base.score is None and "score" not in given:
        raise ValueError(f"policy={base.name!r} names no score; known: {', '.join(SCORES)}")
    tables = {
        "score": SCORES, "selection": SELECTIONS, "merge": MERGES, "reading": PREFILL_MASKS, "answering": REREADS,
    }  # fmt: skip
    made = {_FIELDS.get(part, part): _call(given[part], part, table) for part, table in tables.items() if part in given}
    if "scope" in given:
        made["scopes"] = tuple(_call(scope, "scope", SCOPES) for scope in split_outside(given["scope"], "+"))
    if "allocation" in given:
        made["allocation"] = _allocation(given["allocation"])
    return replace(base, **made)


def _allocation(text: str) -> Any:
    """One allocation, or a pyramid over layers and an adaptive one over heads joined by ``+``."""
    made = [_call(item, "allocation", ALLOCATIONS) for item in split_outside(text, "+")]
    if len(made) == 1:
        return made[0]
    by_type = {type(part): part for part in made}
    if len(made) != 2 or by_type.keys() != {Pyramid, Adaptive}:
        raise ValueError(f"allocation={text!r}: of several only pyramid+adaptive go together")
    return PyramidAdaptive(by_type[Pyramid], by_type[Adaptive])


def split_outside(text: str, mark: str) -> list[str]:
    """The pieces between marks that stand outside of parentheses; empty ones are left out.

    >>> split_outside("sinks(n=4)+window(0.5)", "+")
    ['sinks(n=4)', 'window(0.5)']
    """
    pieces, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if depth == 0 and (letter == mark or (mark == " " and letter.isspace())):
            pieces.append("")
        else:
            pieces[-1] += letter
    return [piece for piece in pieces if piece.strip()]


def _call(text: str, what: str, known: Mapping[str, Callable[..., Any]]) -> Any:
    """Build ``name(value, key=value)`` from a table of parts."""
    match = _CALL.match(text)
    if not match:
        raise ValueError(f"{what}={text!r} does not read as name or name(key=value)")
    name, inside = match.groups()
    if name not in known:
        raise ValueError(f"{what}={name!r} is unknown.{nearest(name, known)} Known: {', '.join(sorted(known))}.")
    allowed = inspect.signature(known[name]).parameters
    given: dict[str, Any] = {}
    for i, item in enumerate(split_outside(inside or "", ",")):
        key, eq, value = item.partition("=")
        if not eq or "(" in key:
            if i >= len(allowed):
                raise ValueError(f"{what}={name}({inside}) takes {len(allowed)} parameters")
            key, value = list(allowed)[i], item
        key = key.strip()
        if key not in allowed:
            there = ", ".join(allowed) or "none"
            raise ValueError(f"{what}={name}: parameter {key!r} is unknown.{nearest(key, allowed)} There are: {there}.")
        if key in given:
            raise ValueError(f"{what}={name}: parameter {key!r} is given twice")
        given[key] = _value(value.strip(), allowed[key].annotation, f"{what}={name}: {key}")
    if missing := [key for key, p in allowed.items() if p.default is p.empty and key not in given]:
        raise ValueError(f"{what}={name}: parameter {missing[0]!r} is missing: {name}({missing[0]}=...)")
    return known[name](**given)


def _value(text: str, kind: str, where: str) -> Any:
    """The value of a parameter annotated as int, float, a size (either), bool or str."""
    kinds: dict[str, tuple[Callable[[str], Any], ...]] = {
        "int": (int,), "float": (float,), "int | float": (int, float), "bool": (_yes_or_no,), "str": (str,),
    }  # fmt: skip
    for make in kinds[kind]:
        try:
            return make(text)
        except ValueError:
            continue
    raise ValueError(f"{where}={text!r} must be {kind.replace(' | ', ' or ')}")


def _yes_or_no(text: str) -> bool:
    known = {"true": True, "false": False}
    if text.lower() not in known:
        raise ValueError(text)
    return known[text.lower()]


def spell(part: Any) -> str:
    """A part in the grammar, every parameter written out."""
    if isinstance(part, PyramidAdaptive):
        return f"{spell(part.pyramid)}+{spell(part.adaptive)}"
    tables = (SCORES, SCOPES, ALLOCATIONS, SELECTIONS, MERGES, PREFILL_MASKS, REREADS)
    names = {kind: name for table in tables for name, kind in table.items()}
    inside = ",".join(f"{field.name}={getattr(part, field.name)}" for field in fields(part))
    return names[type(part)] + (f"({inside})" if inside else "")


def parts_of(policy: Policy) -> dict[str, str]:
    """The policy's parts in the grammar, in its order; those that it has not are left out."""
    found = {
        "score": spell(policy.score), "scope": "+".join(spell(scope) for scope in policy.scopes),
        "allocation": spell(policy.allocation), "selection": spell(policy.selection),
        "merge": spell(policy.merge) if policy.merge is not None else "",
        "reading": spell(policy.prefill_mask) if policy.prefill_mask is not None else "",
        "answering": spell(policy.reread) if policy.reread is not None else "",
    }  # fmt: skip
    return {part: text for part, text in found.items() if text}


def describe_policies() -> list[str]:
    """One line a named policy: name, its parts in the grammar, its parameters with their defaults, its source."""
    lines = []
    for name, make in NAMED.items():
        policy = make()
        parameters = ", ".join(f"{p.name}={p.default}" for p in inspect.signature(make).parameters.values()) or "-"
        composed = "-" if policy.keeps_everything else " ".join(f"{k}={v}" for k, v in parts_of(policy).items())
        lines.append(f"{name:<14} {composed}  parameters: {parameters}  {policy.source}".rstrip())
    return [*lines, f"{UNBOUNDED:<14} an unbounded oracle; {ORACLE}  arXiv 2505.23416"]
