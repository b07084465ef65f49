"""Grammars of answers, in the words of llguidance: JSON by a schema, calls in a model's own form, a thought before them."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence

from .forms import CallForm, around_arguments, spelt_key
from .reader import reads
from .values import Schema, properties_of, resolved, types_of

COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": True}
"""Blanks between the parts of JSON: one way, so that no answer is a row of blanks. What is not followed is a warning."""
MORE = 15
"""Calls after the first in a list, at most: small models find no end."""
Spell = Callable[[str], str]
"""Place of a text in a grammar."""


def up_to(name: str, end: str, spell: Spell = json.dumps) -> str:
    """The rule, of this name, of any text with this end."""
    spelt = spell(end)
    if spelt.startswith("<["):
        return f"{name}: /(?s:.*)/ {spelt}"
    return f"{name}[suffix={json.dumps(end)}]: /(?s:.*)/"


def after_thought(rules: Sequence[str], words: tuple[str, str], thinks: bool, spell: Spell) -> list[str]:
    """The rules of an answer that may think before it follows one of ``rules``.

    Args:
        words: beginning and end of a thought. thinks: whether it has begun.
    """
    thought = 'thought ("\\n" | "\\n\\n")?'
    begin = thought if thinks else f"({spell(words[0])} {thought})?"
    return [f"{begin} ({' | '.join(rules)})\n{up_to('thought', words[1], spell)}"]


def json_rule(
    schema: Mapping[str, object], before: Iterable[str] = (), after: Iterable[str] = (), spell: Spell = json.dumps
) -> str:
    """The rule of JSON of a schema, between other texts, in pieces. Where these are JSON too, each piece is one of its tokens:
    llguidance tells rules apart by whole tokens.
    """
    value = f"%json {json.dumps({**schema, 'x-guidance': COMPACT})}"
    return " ".join([*map(spell, before), value, *map(spell, after)])


def call_rules(tools: Mapping[str, Schema], form: CallForm, spell: Spell = json.dumps, more: bool = False) -> list[str]:
    """The rules of an answer that calls one of the tools, whose names have the schemas of their arguments. Each has its schema as
    it is, since references in one count from its root. Of calls that stand in a list there may be ``more`` than one.

    Raises:
        ValueError: it is not known how the model writes its calls.
    """
    if not form.written:
        raise ValueError(f"tool_choice must be 'auto' or 'none', without response_format: {form.unwritten}")
    rules = list[str]()
    for name, schema in tools.items():
        before, after = around_arguments(form, name)
        if not reads(form, name, [*properties_of(schema)]):
            raise ValueError(f"tool_choice: the model's form of calls cannot write {name!r} or its arguments' names")
        if len(form.written) > 2:
            rules.append(f"{spell(before[0])} {parameters(schema, form, spell)} {spell(after)}")
        else:
            rules.append(json_rule({**schema, "type": "object"}, filter(None, before), filter(None, [after]), spell))
    if not form.row[0]:
        return rules
    (first, between, last), one = map(spell, form.row), " | ".join(rules)
    return [f"{first} ({one}) {f'({between} ({one})){{0,{MORE}}}' if more else ''} {last}"]


def parameters(schema: Schema, form: CallForm, spell: Spell) -> str:
    """The rule of parameters that have marks of their own: texts as they are, the rest as JSON. They are in the schema's order;
    with a text between them, those that must be come first."""
    _, begin, end, between, _ = form.written
    quote, after = (end, "") if form.quotes else ("", end)
    required = given if isinstance(given := schema.get("required"), list) else []
    shared: Schema = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    rules = list[tuple[str, bool]]()
    for key, given in properties_of(schema).items():
        one, said = resolved(given, schema), spelt_key(form, key)
        choices, types = one.get("enum", [one["const"]] if "const" in one else None), types_of(one, schema)
        bare = not form.json and (not types or "string" in types)
        if bare and isinstance(choices, list) and types == {"string"}:
            texts = (choice for choice in choices if isinstance(choice, str))  # others are of another type
            value = f"{spell(quote)} ({' | '.join(spell(text + end) for text in texts)})"
        elif bare:
            value = f"{spell(quote)} text"
        else:
            value = json_rule({**one, **shared}, (), filter(None, [after]), spell)
        rules.append((f"({spell(begin.replace('{key}', said))} {value})", key in required))
    if not between:
        return " ".join(rule + "?" * (not needed) for rule, needed in rules)
    must, optional = ([rule for rule, needed in rules if needed == kind] for kind in (True, False))
    rest = [f"({spell(between)} {rule})?" for rule in optional]
    if must or not optional:
        return " ".join([f" {spell(between)} ".join(must), *rest])
    return f"({' | '.join(' '.join([rule, *rest[at + 1 :]]) for at, rule in enumerate(optional))})?"
