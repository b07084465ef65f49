"""Records of long-context question answering, from files and from the Hub, as chat messages."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from ..files import as_object, parse_json
from ..naming import nearest, prefixed_errors

SUFFIXES = (".json", ".jsonl", ".parquet")
WHOLE = 1 << 26
"""Bytes of the largest files that are held whole."""
PIECE = 1 << 20
"""Characters of a JSON array that are read at a time."""
SAVED = (("dataset_info.json", "state.json"), ("dataset_dict.json",))
"""Files that mark a data set, or a dictionary of splits, saved by ``datasets.save_to_disk``."""
SCHEMAS = (
    "messages: list of {role, content} (THUDM/LongAlign-10k)",
    "conversations: list of {from, value}",
    "input, instructions: list, outputs: list (L-Eval)",
    "instruction, output, optionally input (Yukang/LongAlpaca-12k)",
    "document or context or passage, question or query, answer or answers (wenbopan/anti-haystack)",
)
_UNKNOWN = "no known schema has the keys"
_HALF = re.compile(r"\\u[dD][89a-fA-F]")
"""Beginning of a lone surrogate, and of a pair of them, in JSON."""
ROLES = {name: name for name in ("system", "user", "assistant")}
ROLES |= {"human": "user", **dict.fromkeys(("gpt", "chatgpt", "bot", "model"), "assistant")}


def has_splits(source: str) -> bool:
    """Whether a source is a data set with splits, from the Hub or saved by ``datasets``."""
    return _is_saved(Path(source)) or not Path(source).exists()


def _is_saved(path: Path) -> bool:
    return any(all((path / name).is_file() for name in names) for names in SAVED)


def read_records(
    source: str | Path, *, split: str = "train", broken: Callable[[str], object] | None = None
) -> Iterator[dict]:
    """Records of a local .json, .jsonl or .parquet file, of a folder of such files (``files_below``), of a folder
    saved by ``datasets``, or of a Hub data set, which is streamed.

    Args:
        source: a path, or a Hub id such as "Yukang/LongAlpaca-12k".
        split: the split of a data set from the Hub or saved by ``datasets``; files have none.
        broken: called with the reason for each line that is no JSON object; the line is skipped.

    Raises:
        FileNotFoundError: the source does not exist (raised at once).
        ValueError: an unknown kind of file (raised at once), no such split, a data set that cannot be read from the Hub,
            or, without ``broken``, a line that is no JSON object; has file and line.
    """
    path = Path(source)
    if _is_saved(path):
        return _read_saved(path, split)
    if path.is_dir():
        files = files_below(path, SUFFIXES)
        if not files:
            raise FileNotFoundError(f"source={source} has no {', '.join(SUFFIXES)} file")
        return (record for file in files for record in _read_file(file, broken))
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise ValueError(f"source={source} must end in one of {', '.join(SUFFIXES)}")
        return _read_file(path, broken)
    if path.suffix in SUFFIXES or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", str(source)) or str(source).startswith("."):
        raise FileNotFoundError(f"source={source} does not exist, and is no id of a Hub data set (owner/name)")
    return _read_hub(str(source), split)


def files_below(folder: Path, endings: tuple[str, ...]) -> list[Path]:
    """Files with some endings in a folder and its folders, by name. Hidden ones are left out."""
    found = (file for file in folder.rglob("*") if file.name.endswith(endings) and file.is_file())
    return sorted(file for file in found if not any(part[0] == "." for part in file.relative_to(folder).parts))


def to_messages(record: dict, *, index: int = 0) -> list[dict]:
    """The conversation of one record, as dicts of 'role' and 'content'; the schema is recognised by its keys.

    A document comes first, then a blank line, then the question.

    Args:
        index: which instruction of an L-Eval record is asked (modulo their number).

    Raises:
        ValueError: an unknown schema (the record's keys and the known schemas are listed), a field of a wrong type, or
            a conversation without an assistant turn.
    """
    record = {name: value for name, value in record.items() if value is not None}  # of tables, what a row lacks
    name, question = _first(record, "document", "context", "passage"), _first(record, "question", "query")
    answer = _first(record, "answer", "answers")
    if isinstance(record.get("messages"), list):
        return _conversation(record["messages"], "role", "content")
    if isinstance(record.get("conversations"), list):
        return _conversation(record["conversations"], "from", "value")
    if "input" in record and isinstance(record.get("instructions"), list) and isinstance(record.get("outputs"), list):
        asked, given = record["instructions"], record["outputs"]
        if not asked or len(asked) != len(given):
            raise ValueError(f"instructions and outputs must be equally many, at least one: {len(asked)}, {len(given)}")
        index %= len(asked)
        turn = {f"instructions[{index}]": asked[index], f"outputs[{index}]": given[index]}
        question, answer = (_text(turn, name) for name in turn)
        return _turn(f"{_text(record, 'input')}\n\n{question}", answer)
    if "instruction" in record and "output" in record:
        extra = _text(record, "input") if record.get("input") else ""
        return _turn(_text(record, "instruction") + (f"\n\n{extra}" if extra else ""), _text(record, "output"))
    if name and question and answer:
        if isinstance(record[answer], list) and record[answer]:  # several accepted answers: the first
            record = {**record, answer: record[answer][0]}
        value = _text(record, answer)
        return _turn(f"{_text(record, name)}\n\n{_text(record, question)}", value)
    known = "\n".join(f"  {schema}" for schema in SCHEMAS)
    raise ValueError(f"{_UNKNOWN} {sorted(map(str, record))}\nKnown are\n{known}")


def is_unknown(reason: str) -> bool:
    """Whether a reason that ``to_messages`` gave is that a record has no known schema."""
    return reason.startswith(_UNKNOWN)


def _read_file(path: Path, broken: Callable[[str], object] | None) -> Iterator[dict]:
    with prefixed_errors(f"{path} is not UTF-8", UnicodeDecodeError):
        yield from _read_parquet(path) if path.suffix == ".parquet" else _read_json(path, broken)


def _read_parquet(path: Path) -> Iterator[dict]:
    import pyarrow.parquet

    with prefixed_errors(f"{path} cannot be read", pyarrow.ArrowInvalid):
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=64):
            yield from batch.to_pylist()


def _read_json(path: Path, broken: Callable[[str], object] | None) -> Iterator[dict]:
    with path.open(encoding="utf-8-sig") as lines:
        while (first := lines.read(64)).isspace():
            pass
        if path.suffix == ".json" and first.lstrip().startswith("["):
            yield from _read_array(path)
            return
        lines.seek(0)
        if path.suffix == ".json" and path.stat().st_size <= WHOLE:
            try:
                yield as_object(_loads(lines.read(), str(path)), f"{path}, record 0")
                return
            except ValueError as error:
                if "Extra data" not in str(error):
                    raise
            lines.seek(0)
        for number, line in enumerate(lines, 1):  # JSON lines, which some data sets name .json
            if line.strip():
                where = f"{path}, line {number}"
                try:
                    yield as_object(_loads(line, where), where)
                except ValueError as error:
                    if broken is None or isinstance(error, UnicodeDecodeError):
                        raise
                    broken(str(error))


def _read_array(path: Path) -> Iterator[dict]:
    """Records of a JSON array; a piece of its text is held at a time."""
    decoder, number = json.JSONDecoder(), 0
    with path.open(encoding="utf-8-sig") as file:
        text, at = file.read(PIECE).lstrip(), 1
        while text[at : at + 1] != "]":
            if text[at : at + 1] in (*" \t\r\n,",):
                at += 1
                continue
            where = f"{path}, record {number}"
            try:
                _, end = decoder.raw_decode(text, at)
            except RecursionError:
                end = len(text)  # its own error
            except json.JSONDecodeError:
                if more := file.read(max(PIECE, len(text) - at)):
                    text, at = text[at:] + more, 0
                    continue
                end = len(text)
            yield as_object(_loads(text[at:end], where), where)
            number, at = number + 1, end
        if rest := (text[at + 1 :] + file.read(PIECE)).strip():
            raise ValueError(f"{path}: text after the array's end: {rest[:40]!r}")


def _loads(text: str, where: str) -> object:
    """The value of a JSON text. Half a character (a cut emoji), which no tokenizer takes, becomes a question mark."""
    value = parse_json(text, where)
    if _HALF.search(text):
        value = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
    return value


def _read_saved(path: Path, split: str) -> Iterator[dict]:
    import datasets

    with prefixed_errors(f"{path} cannot be read", OSError, ValueError):
        saved = datasets.load_from_disk(str(path))
    yield from map(dict, _of_split(saved, split, path))


def _read_hub(name: str, split: str) -> Iterator[dict]:
    import datasets

    said = f"source={name} is no local path, and cannot be read from the Hub"
    with prefixed_errors(said, Exception):  # the client's and its transport's own kinds
        rows = datasets.load_dataset(name, split=split, streaming=True)
    chosen = _of_split(rows, split, name)
    with prefixed_errors(said, Exception):
        yield from map(dict, chosen)


def _of_split(rows: Mapping | Iterable, split: str, source: object) -> Iterable:
    """The rows of a split, if there are several. Raises ValueError if there is none of that name."""
    if isinstance(rows, Mapping) and split not in rows:
        raise ValueError(f"split={split} must be one that {source} has: {', '.join(rows)}.{nearest(split, rows)}")
    return rows[split] if isinstance(rows, Mapping) else rows


def _first(record: dict, *names: str) -> str | None:
    """The first of the names that the record has."""
    return next((name for name in names if name in record), None)


def _text(record: dict, name: str) -> str:
    if not isinstance(record[name], str):
        raise ValueError(f"{name}={record[name]!r:.200} must be a string")
    return record[name]


def about(text: str, turns: Sequence[tuple[str, str]]) -> list[dict]:
    """A conversation of questions and answers about a text, which stands before the first question."""
    first, *others = turns
    return [message for turn in ((text + first[0], first[1]), *others) for message in _turn(*turn)]


def _turn(question: str, answer: str) -> list[dict]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _conversation(turns: list, role: str, content: str) -> list[dict]:
    messages = []
    for i, turn in enumerate(turns):
        if not isinstance(turn, dict) or str(turn.get(role)) not in ROLES or not isinstance(turn.get(content), str):
            raise ValueError(f"turn {i} needs a {role!r} of {sorted(ROLES)} and a string {content!r}: {turn!r:.200}")
        messages.append({"role": ROLES[turn[role]], "content": turn[content]})
    if all(message["role"] != "assistant" for message in messages):
        raise ValueError(f"no assistant turn among the {len(messages)} of the conversation")
    return messages
