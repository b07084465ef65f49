"""Questions about source code, made from syntax trees: names, defaults, bases, callers, return values, and which file.

A sample shows stretches of several files, each under its path. Its questions are those whose evidence is in the stretches
and whose answer is unambiguous there.
"""

import ast
import random
import re
import sysconfig
import warnings
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import Sample, encode_chat
from .haystack import WORDS, count
from .records import about

WORDINGS: dict[str, list[list[str]]] = WORDS["code"]
"""Kind of question -> pairs of question and answer, with {name}, {of} and {value}."""
HELD_KINDS: tuple[str, ...] = tuple(WORDS["held_code"])
"""Kinds that are never trained on: they measure what heads do with other questions."""
HEADINGS: list[str] = WORDS["code_headings"]
"""Lines above a stretch of a file, with {path}."""
QUESTIONS, LONGEST = 6, 80
"""Most questions of a sample, and most characters of an answer's value."""
SKIPPED = {"test", "tests", "site-packages", "node_modules", "build", "dist"}
"""Folders without questions."""


@dataclass(frozen=True)
class Fact:
    """An answer that a file holds."""

    kind: str
    name: str
    """The subject: a class, a function, a constant or a path."""
    of: str
    """The parameter or imported name that is asked for, if any."""
    value: str
    first: int
    last: int
    """Lines of the evidence, from 0, the last included."""
    once: str
    """Pattern that matches only once in a sample if the answer is unambiguous."""


@dataclass(frozen=True)
class CodeFile:
    """A file with facts."""

    path: str
    """Path relative to the folder, with slashes."""
    lines: tuple[str, ...]
    facts: tuple[Fact, ...]


@dataclass(frozen=True)
class Asked:
    """A question, its full answer, and the value that the answer must contain."""

    kind: str
    question: str
    answer: str
    value: str


def read_code(folder: str, kinds: Collection[str] = (*WORDINGS, *HELD_KINDS)) -> list[CodeFile]:
    """The Python files of a folder that have facts of some kinds, by path; 'python' is the standard library of the running
    Python. Tests, hidden files and files that do not parse are left out.

    Raises:
        FileNotFoundError: no such folder. ValueError: no file has facts.
    """
    root = Path(sysconfig.get_path("stdlib") if folder == "python" else folder)
    if not root.is_dir():
        raise FileNotFoundError(f"code({folder}): no such folder; code(python) is the standard library")
    files = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if SKIPPED.intersection(parts) or any(part.startswith((".", "test_", "_test")) for part in parts):
            continue
        file = read_file(path, "/".join(parts))
        if file is not None and any(fact.kind in kinds for fact in file.facts):
            files.append(file)
    if not files:
        raise ValueError(f"code({folder}): no Python file in it has anything to ask for")
    return files


def read_file(path: Path, name: str) -> CodeFile | None:
    """A file's facts; None if it has none, or is no Python."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(text)
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    found = tuple(fact for fact in facts_of(tree, name) if 0 < len(fact.value) <= LONGEST and "\n" not in fact.value)
    return CodeFile(name, tuple(text.split("\n")), found) if found else None


def facts_of(tree: ast.Module, path: str) -> Iterator[Fact]:
    """The facts of a file's top level and of its classes' methods."""
    for node in tree.body:
        match node:
            case ast.ClassDef(name=name):
                yield from _of_class(node, path)
                for one in node.body:
                    if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) and not one.name.startswith("__"):
                        yield from _of_function(one)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield Fact("function_file", name, "", path, node.lineno - 1, node.lineno - 1, rf"\bdef {name}\b")
                yield from _of_function(node)
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant()) if name.isupper():
                yield _fact("constant", node, name, ast.unparse(node.value), rf"(?m)^{name} =")
            case ast.ImportFrom(module=str(module), names=[ast.alias(name=name, asname=None)], level=0) if name != "*":
                yield _fact("import", node, path, module, rf"\bimport {name}\b", of=name)


def _fact(kind: str, node: ast.stmt, name: str, value: str, once: str, of: str = "") -> Fact:
    return Fact(kind, name, of, value, node.lineno - 1, (node.end_lineno or node.lineno) - 1, once)


def _of_class(node: ast.ClassDef, path: str) -> Iterator[Fact]:
    head, once = node.lineno - 1, rf"\bclass {node.name}\b"
    yield Fact("class_file", node.name, "", path, head, head, once)
    bases = [ast.unparse(base) for base in node.bases]
    last = max((base.end_lineno or 0) - 1 for base in node.bases) if bases else head
    if bases:
        yield Fact("base" if len(bases) == 1 else "bases", node.name, "", ", ".join(bases), head, last, once)


def _of_function(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[Fact]:
    name, once, head, body = node.name, rf"\bdef {node.name}\b", node.lineno - 1, node.body[0].lineno - 1
    given, last = node.args, (node.end_lineno or node.lineno) - 1
    plain = [*given.posonlyargs, *given.args]
    defaults = [*zip(plain[len(plain) - len(given.defaults) :], given.defaults, strict=True)]
    for argument, default in (*defaults, *zip(given.kwonlyargs, given.kw_defaults, strict=True)):
        if default is not None:
            yield Fact("default", name, argument.arg, ast.unparse(default), head, body, once)
    own = [one.arg for one in (*plain, *given.kwonlyargs) if one.arg not in ("self", "cls")]
    if own:
        yield Fact("parameters", name, "", ", ".join(own), head, body, once)
    inside = [one for statement in node.body for one in _own(statement)]
    returns = [one.value for one in inside if isinstance(one, ast.Return) and one.value is not None]
    if len(returns) == 1:
        yield Fact("returns", name, "", ast.unparse(returns[0]), head, last, once)
    raises = {ast.unparse(one.exc).partition("(")[0] for one in inside if isinstance(one, ast.Raise) and one.exc}
    if len(raises) == 1:
        yield Fact("raises", name, "", raises.pop(), head, last, once)
    if len(node.decorator_list) == 1:
        first = node.decorator_list[0].lineno - 1
        yield Fact("decorator", name, "", ast.unparse(node.decorator_list[0]), first, head, once)
    called = [one.func.id for one in inside if isinstance(one, ast.Call) and isinstance(one.func, ast.Name)]
    for other in dict.fromkeys(called):
        if called.count(other) == 1 and len(other) > 3 and other != name:
            yield Fact("caller", other, "", name, head, last, rf"(?<!def )(?<!class )\b{other}\(")


def _own(statement: ast.AST) -> Iterator[ast.AST]:
    """Nodes of a statement, as ``ast.walk`` has them, without those of functions and classes in it."""
    todo = deque([statement])
    while todo:
        node = todo.popleft()
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node
            todo.extend(ast.iter_child_nodes(node))


def code_text(
    tokenizer, files: Sequence[CodeFile], n_tokens: int, rng: random.Random, kinds: Sequence[str]
) -> tuple[str, list[Asked]]:
    """Stretches of files, ``n_tokens`` tokens at most, and questions about them in random order.

    Raises:
        ValueError: nothing in them can be asked for; has the length.
    """
    heading, pieces, shown, room = rng.choice(HEADINGS), list[str](), list[Fact](), n_tokens
    for file in rng.sample(files, len(files)):
        piece, facts = _stretch(file, rng, heading, kinds)
        if (size := count(tokenizer, piece)) <= room:
            room -= size
            pieces.append(piece)
            shown += facts
        if room < 0.1 * n_tokens:
            break
    text = "".join(pieces)
    facts = [fact for fact in rng.sample(shown, len(shown)) if len(re.findall(fact.once, text)) == 1]
    if not facts:
        raise ValueError(f"n_tokens={n_tokens} is too small for a question about code")
    return text, [_ask(fact, rng) for fact in _varied(facts)[:QUESTIONS]]


def _stretch(file: CodeFile, rng: random.Random, heading: str, kinds: Sequence[str]) -> tuple[str, list[Fact]]:
    """Some lines around a random fact, with the file's heading, and the facts whose evidence they hold."""
    centre = rng.choice(file.facts)
    start = max(0, centre.first - rng.randint(0, 12))
    end = max(centre.last + 1, start + round(rng.expovariate(1 / 40)) + 8)
    lines = "\n".join(file.lines[start:end]).rstrip()
    held = [fact for fact in file.facts if start <= fact.first and fact.last < end and fact.kind in kinds]
    return f"{heading.format(path=file.path)}\n{lines}\n\n", held


def _varied(facts: Sequence[Fact]) -> list[Fact]:
    """The facts in turns of their kinds, so that common kinds do not crowd out others."""
    kinds = [fact.kind for fact in facts]
    turns = {id(fact): kinds[:i].count(fact.kind) for i, fact in enumerate(facts)}
    return sorted(facts, key=lambda fact: turns[id(fact)])


def _ask(fact: Fact, rng: random.Random) -> Asked:
    question, answer = rng.choice((WORDINGS | WORDS["held_code"])[fact.kind])
    words = {"name": fact.name, "of": fact.of, "value": fact.value}
    return Asked(fact.kind, question.format(**words), answer.format(**words), fact.value)


def code_sample(tokenizer, files: Sequence[CodeFile], n_tokens: int, rng: random.Random) -> Sample:
    """A conversation about stretches of files, ``n_tokens`` tokens at most: the text with a first question, then others.

    Raises:
        ValueError: ``n_tokens`` is too small.
    """
    text, asked = code_text(tokenizer, files, max(1, n_tokens - 200 - n_tokens // 20), rng, tuple(WORDINGS))
    if rng.random() < 0.5:  # values alone, as some people ask for
        asked = [Asked(one.kind, f"{one.question} {WORDS['bare'][0]}", one.value, one.value) for one in asked]
    while True:
        sample = encode_chat(tokenizer, about(text, [(one.question, one.answer) for one in asked]))
        if len(sample.ids) <= n_tokens:
            return sample
        if len(asked) == 1:
            raise ValueError(f"n_tokens={n_tokens} is too small: code and question take {len(sample.ids)} tokens")
        asked = asked[:-1]
