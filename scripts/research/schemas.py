"""Last used 2026-11-26, for docs/results/serving.md.

Answers by random JSON schemas, each checked by a rule that was made with its schema; then tokens per second with a grammar
and without, in turn. Of a server that runs:

    locret-serve --ckpt checkpoints/smollm2-135m-locret --budget 1024 --sessions 4 --port 8000
    python scripts/research/schemas.py http://127.0.0.1:8000 --count 200 --rounds 10

Answers are drawn at temperature 1, where a grammar has most to do. One that does not end within ``--tokens`` counts as invalid.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx

Schema = dict[str, object]
Check = Callable[[object], bool]
WORDS = ["name", "depth", "open", "tide", "boats", "keeper", "since", "état", "a b", "größe", "код", 'quo"te']
QUESTIONS = [
    "Describe the harbour.", "Who is the keeper of the lighthouse?", "Give me an example.", "What is 17 times 23?",
    "Schreibe etwas über Boote.", "Tell a short story about a clock.", "List three towns and their rivers.", "{}", "Why?",
    "Answer in plain words, without any JSON.",
]  # fmt: skip
PATTERNS = [r"^[A-Z]{2}-[0-9]{3}$", r"^(red|green|blue)$", r"^[a-f0-9]{8}$", r"^\d{4}-\d{2}$"]


def number(rng: random.Random) -> tuple[Schema, Check]:
    low, whole = rng.randint(-50, 50), rng.random() < 0.6
    high = low + rng.randint(0, 1000)
    kinds = int if whole else (int, float)
    schema: Schema = {"type": "integer" if whole else "number", "minimum": low, "maximum": high}
    return schema, lambda v: isinstance(v, kinds) and not isinstance(v, bool) and low <= v <= high


def text(rng: random.Random) -> tuple[Schema, Check]:
    if rng.random() < 0.4:
        pattern = rng.choice(PATTERNS)
        return {"type": "string", "pattern": pattern}, lambda v: isinstance(v, str) and bool(re.search(pattern, v))
    least = rng.randint(0, 4)
    longest = least + rng.randint(0, 16)
    schema: Schema = {"type": "string", "minLength": least, "maxLength": longest}
    return schema, lambda v: isinstance(v, str) and least <= len(v) <= longest


def choice(rng: random.Random) -> tuple[Schema, Check]:
    values = rng.sample(["north", "südlich", "", 1, -2.5, None, True, "a\nb"], rng.randint(1, 4))
    schema: Schema = {"const": values[0]} if len(values) == 1 else {"enum": values}
    return schema, lambda v: any(v == one and type(v) is type(one) for one in values)


def truth(rng: random.Random) -> tuple[Schema, Check]:
    return {"type": "boolean"}, lambda v: isinstance(v, bool)


def row(rng: random.Random, depth: int) -> tuple[Schema, Check]:
    inner, valid = anything(rng, depth - 1)
    least = rng.randint(0, 2)
    longest = least + rng.randint(0, 2)
    schema: Schema = {"type": "array", "items": inner, "minItems": least, "maxItems": longest}
    return schema, lambda v: isinstance(v, list) and least <= len(v) <= longest and all(map(valid, v))


def either(rng: random.Random, depth: int) -> tuple[Schema, Check]:
    (one, first), (two, second) = anything(rng, depth - 1), anything(rng, depth - 1)
    return {"anyOf": [one, two]}, lambda v: first(v) or second(v)


def thing(rng: random.Random, depth: int) -> tuple[Schema, Check]:
    parts = {name: anything(rng, depth - 1) for name in rng.sample(WORDS, rng.randint(1, 4))}
    needed = [name for name in parts if rng.random() < 0.7]
    schema: Schema = {
        "type": "object", "properties": {name: inner for name, (inner, _) in parts.items()}, "required": needed,
        "additionalProperties": False,
    }  # fmt: skip

    def valid(value: object) -> bool:
        if not isinstance(value, dict) or not set(needed) <= set(value) <= set(parts):
            return False
        return all(parts[name][1](inner) for name, inner in value.items())

    return schema, valid


def anything(rng: random.Random, depth: int) -> tuple[Schema, Check]:
    """A schema of bounded values, and what checks one."""
    if depth > 0 and rng.random() < 0.5:
        return rng.choice([row, either, thing])(rng, depth)
    return rng.choice([number, text, choice, truth])(rng)


def ask(url: str, seed: int, tokens: int) -> tuple[bool, str, int]:
    """Whether an answer by a schema of its own is valid, the answer, and its tokens."""
    rng = random.Random(seed)
    schema, valid = thing(rng, 3)
    if rng.random() < 0.3:  # the same, by a name
        schema = {"$defs": {"one": schema}, "$ref": "#/$defs/one"}
    body = {
        "messages": [{"role": "user", "content": rng.choice(QUESTIONS)}], "max_tokens": tokens, "temperature": 1, "seed": seed,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}},
    }  # fmt: skip
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=900)
    if answer.status_code != 200:
        return False, f"{answer.text} {json.dumps(schema)}", 0
    (made,), count = answer.json()["choices"], answer.json()["usage"]["completion_tokens"]
    said = made["message"]["content"]
    try:
        good = made["finish_reason"] == "stop" and valid(json.loads(said))
    except ValueError:
        good = False
    return good, said if good else f"{made['finish_reason']}: {said!r} {json.dumps(schema)}", count


def rate(url: str, question: str, tokens: int, schema: Schema | None) -> float:
    """Tokens per second after the first, of an answer of so many."""
    form = {} if schema is None else {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
    body = {
        "messages": [{"role": "user", "content": question}], "max_tokens": tokens, "temperature": 0, "stream": True,
        "stream_options": {"include_usage": True}, **form,
    }  # fmt: skip
    first = last = 0.0
    made = 0
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=600) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if event["choices"] and event["choices"][0]["delta"].get("content"):
                last = time.perf_counter()
                first = first or last
            if event["usage"]:
                made = event["usage"]["completion_tokens"]
    return (made - 1) / (last - first)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda seed: ask(args.url, seed, args.tokens), range(args.count)))
    for seed, (good, said, _) in enumerate(answers):
        if not good:
            print(f"seed {seed}: {said}")
    tokens = sum(count for _, _, count in answers)
    print(f"{sum(good for good, _, _ in answers)} of {len(answers)} answers are valid, of {tokens} tokens")
    if not args.rounds:
        return
    line = {"type": "object", "properties": {"town": {"type": "string"}, "people": {"type": "integer"}},
            "required": ["town", "people"], "additionalProperties": False}  # fmt: skip
    schema: Schema = {"type": "array", "items": line, "minItems": 40, "maxItems": 40}
    question = "Write a long list of towns, with the number of their people."
    rates: dict[str, list[float]] = {"with": [], "without": []}
    for _ in range(args.rounds):
        for name in rates:
            rates[name].append(rate(args.url, question, 128, schema if name == "with" else None))
    middle = {name: statistics.median(values) for name, values in rates.items()}
    print(
        f"tokens per second: {middle['with']:.1f} with a grammar, {middle['without']:.1f} without, medians of {args.rounds}"
    )
    print(f"{middle['with'] / middle['without']:.3f} of the rate without; by rounds, in turn:")
    print(" ".join(f"{a / b:.2f}" for a, b in zip(*rates.values(), strict=True)))


if __name__ == "__main__":
    main()
