"""The registry: every task by name, and names to tasks. And tasks on plain text, with no labels: distance from full attention's
output, reconstruction, and likelihood.

Sources: RoCo (section 5.1: summaries, context reconstruction, language modelling; the full cache's output is the
reference, but of a reconstruction it is the text itself); prompts as in EasyKV where it has them.
"""

import hashlib
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

from ...naming import check_name, last_part
from ...samples.haystack import cut, load_text, starts
from ...text.tokens import encode
from .document_tasks import BENCHMARKS, averages, document_task, entries, is_file_of_records, read_table, records_task
from .synthetic_tasks import NIAHS, STANDALONE_TASKS, niah_task, variable_tracking_task
from .task import Example, Task, count_ids, needle_task, questions_task, spread_depth, wrap

CONTINUATION = 128
"""Tokens whose likelihood 'perplexity' measures after the prompt."""
PASSAGE = 128
"""Tokens that 'reconstruction' asks to repeat."""
QUOTE = re.compile(r"(?:\S+\s+){11}\S+")
"""Words that stand in front of them, quoted as the answer's beginning."""
QUESTIONS = {
    "fidelity.summary": ("\n\nSummarize the above article in 3 sentences.", 96),
    "fidelity.reconstruct": ("\n\nRepeat the above article from its beginning, word for word.", 128),
    "fidelity.continue": ("", 96),
}
"""Words that follow the text, and tokens of the answer."""


def fidelity_task(name: str, haystack: str, text: str) -> Task:
    """A piece of text with a request; the reference is what full attention answers. Reconstruction also carries the
    piece's beginning, which is compared as well."""
    question, new_tokens = QUESTIONS[name]

    def make(request: Example) -> Example:
        chat = request.wants_chat(bool(question))
        title = "###\nArticle: " if question else ""

        def prompt_of(piece: str) -> tuple[str, bool]:
            return wrap(request, f"{title}{piece}{question}", chat=chat)

        room = request.length - count_ids(request.tokenizer, *prompt_of(""))
        piece = _piece(request, haystack, text, room)
        while (over := count_ids(request.tokenizer, *prompt_of(piece)) - request.length) > 0:
            # Half the way: a control token that the text spells has more tokens in the prompt than in the text.
            room -= max(1, over * room // (2 * (request.length + over)))
            piece = _piece(request, haystack, text, room)
        prompt, special = prompt_of(piece)
        reference = piece[: 8 * new_tokens] if name == "fidelity.reconstruct" else ""
        return replace(request, prompt=prompt, special=special, extra={"source": reference} if reference else {})

    return Task(name, make, "distance", new_tokens, haystack, kind="fidelity")


def reconstruction_task(name: str, haystack: str, text: str) -> Task:
    """RoCo's context reconstruction: the text is to be repeated, and what comes is compared with it.

    RoCo has articles of some hundred tokens repeated whole. So that a text of any length costs the same, a passage is asked
    for here, which begins after a quotation at an evenly spread depth; over the examples every part of the text counts.
    """

    def make(request: Example) -> Example:
        chat = request.wants_chat(True)

        def prompt_of(piece: str, quote: str) -> tuple[str, bool]:
            asked = "Repeat the above article word for word, beginning where this quotation stands in it."
            return wrap(request, f"###\nArticle: {piece}\n\n{asked}\n\n", quote, chat=chat)

        room = request.length - count_ids(request.tokenizer, *prompt_of("", ""))
        examples: dict[int, Example] = {}
        for _ in range(8):  # another piece may have another quotation, of another length
            piece = _piece(request, haystack, text, room)
            quote, passage, depth = _passage(request, piece)
            prompt, special = prompt_of(piece, quote)
            over = count_ids(request.tokenizer, prompt, special) - request.length
            examples[over] = replace(request, prompt=prompt, answer=passage, special=special, depth=depth)
            if -0.01 * request.length <= over <= 0:
                break
            room -= over
        if (best := max((over for over in examples if over <= 0), default=None)) is None:
            raise ValueError(f"length={request.length} cannot be met by a quotation of sample {request.sample}")
        return examples[best]

    return Task(name, make, "reconstruction", PASSAGE, haystack)


def _passage(request: Example, piece: str) -> tuple[str, str, float]:
    """``(quotation, the tokens after it, its depth)``: words that stand once in the piece, from the start of a line or
    sentence on, the nearest to the depth of the example.

    Raises:
        ValueError: the piece is too short for both.
    """
    offsets = encode(request.tokenizer, piece)[1]
    last = offsets[max(0, len(offsets) - 2 * PASSAGE)][0]
    wanted = spread_depth(request.sample) * last
    for at in sorted((start for start in starts(piece) if start <= last), key=lambda start: abs(start - wanted)):
        match = QUOTE.match(piece, at)
        if match and piece.count(match.group()) == 1:
            rest = piece[match.end() :]
            borders = encode(request.tokenizer, rest[: 16 * PASSAGE])[1]
            if len(borders) >= PASSAGE:
                return match.group(), rest[: borders[PASSAGE - 1][1]], round(at / max(1, last), 4)
    raise ValueError(f"length={request.length} is too short for a quotation and {PASSAGE} tokens after it")


def perplexity_task(name: str, haystack: str, text: str) -> Task:
    """'perplexity': the text's next tokens after a prompt, one at a time; 'perplexity_prefill': the prompt's own second
    half while it is read."""

    def make(request: Example) -> Example:
        room = request.length - count_ids(request.tokenizer, "", True)
        behind = 0 if name == "perplexity_prefill" else CONTINUATION
        piece = _piece(request, haystack, text, room + behind)
        if not behind:
            return replace(request, prompt=piece)
        offsets = encode(request.tokenizer, piece)[1]
        border = offsets[min(room, len(offsets) - 1)][0]  # which both parts share
        return replace(request, prompt=piece[:border], continuation=piece[border:])

    kind = "nll_prefill" if name == "perplexity_prefill" else "nll"
    return Task(name, make, "nll", CONTINUATION, haystack, kind=kind)


AGAINST_FULL = {"fidelity": "distance", "agreement": "agreement"}
"""Metrics of a task 'PREFIX:NAME': the distance from full attention's output, and the share of its tokens that a policy would
choose too."""


def against_full(task: Task, prefix: str) -> Task:
    """A task with the prompts of another, compared with full attention's output."""
    if task.kind not in ("answer", "fidelity"):
        raise ValueError(f"task={prefix}:{task.name}: only tasks with written answers have one to compare with")
    if task.kind == prefix:
        return task
    return replace(task, name=f"{prefix}:{task.name}", metric=AGAINST_FULL[prefix], kind=prefix)


def _piece(request: Example, haystack: str, text: str, n_tokens: int) -> str:
    """A random piece of the text; its start depends on the request's numbers alone."""
    if n_tokens < 1:
        raise ValueError(f"length={request.length} is too short for this task")
    rng = random.Random(f"text:{haystack}:{request.sample}:{request.seed}")
    return cut(text, request.tokenizer, n_tokens, rng)


ALIASES = {"passkey": "R.PassKey", "number": "R.Number", "kv": "R.KV", "math_find": "Math.Find"}
HaystackTask = Callable[[str, "str | None"], Task]
"""Makes the task for a haystack: its name and its text (None: repeated sentences)."""

HAYSTACK_TASKS: dict[str, HaystackTask] = {
    "R.PassKey": partial(needle_task, "R.PassKey", "R.PassKey"),
    "R.Number": partial(needle_task, "R.Number", "R.Number"),
    "grid": partial(needle_task, "grid", "R.PassKey"),
    "paraphrase": partial(needle_task, "paraphrase", "paraphrase"),
    **{niah.name: partial(niah_task, niah) for niah in NIAHS if not niah.own_haystack},
    "ruler.vt": variable_tracking_task,
    "questions": questions_task,
}
"""Synthetic tasks over repeated sentences or real text."""
REAL_TEXT_TASKS: dict[str, Callable[[str, str], Task]] = {
    **{name: partial(fidelity_task, name) for name in QUESTIONS},
    **{name: partial(perplexity_task, name) for name in ("perplexity", "perplexity_prefill")},
    "reconstruction": partial(reconstruction_task, "reconstruction"),
}
"""Tasks that make no sense over repeated sentences."""
DEFAULT_REAL_TEXT = "pydoc"
"""The text that these read where no real text is named: the one that is always there."""
DESCRIPTIONS: dict[str, str] = read_table("synthetic")
"""The question of each synthetic task, in a few words."""


def known_tasks() -> list[str]:
    """Every name that `find_tasks` takes, groups and prefixes aside."""
    return [*ALIASES, *HAYSTACK_TASKS, *STANDALONE_TASKS, *REAL_TEXT_TASKS, *entries()]


@lru_cache(maxsize=1)
def groups() -> dict[str, list[str]]:
    """Task names by group: all tasks of a benchmark, or those of a paper's average."""
    names = [*HAYSTACK_TASKS, *STANDALONE_TASKS]
    documents = {table: [n for n in entries() if n.startswith(start)] for table, start in BENCHMARKS.items() if start}
    return {"ruler": [name for name in names if name.startswith("ruler.")], **documents, **averages()}


def prefix_of(name: str) -> tuple[str, str]:
    """The prefix of a task's name, '' without one, and the rest. The path of a file of records may have colons.

    >>> prefix_of("fidelity:passkey"), prefix_of("passkey")
    (('fidelity', 'passkey'), ('', 'passkey'))
    """
    prefix, colon, plain = name.partition(":")
    whole = not colon or (prefix not in AGAINST_FULL and is_file_of_records(name) and Path(name).exists())
    return ("", name) if whole else (prefix, plain)


def row_names(name: str) -> list[str]:
    """The names that rows give to a task, or to those of a group: aliases resolved, the prefix kept.

    >>> row_names("fidelity:passkey")
    ['fidelity:R.PassKey']
    """
    prefix, plain = prefix_of(name)
    before = f"{prefix}:" if prefix else ""
    if is_file_of_records(plain):
        return [before + haystack_name(plain)]
    return [before + ALIASES.get(member, member) for member in groups().get(plain, [plain])]


def haystack_name(haystack: str) -> str:
    """The name that rows give and pieces are drawn by: of a file or folder its name alone, so that its place on a machine
    matters to neither.

    >>> haystack_name("/data/leval/quality.jsonl"), haystack_name("jargon")
    ('quality.jsonl', 'jargon')
    """
    return last_part(haystack)


def find_tasks(
    names: Sequence[str],
    *,
    haystacks: Sequence[str] = ("repeated",),
    data: Sequence[str] = (),
    samples: int = 20,
    metric: str = "contains",
) -> list[Task]:
    """Tasks by name, without repetition: one per haystack for tasks that use haystacks.

    Args:
        names: tasks, groups ('ruler', 'leval', ...), files of records ('mine.jsonl'), or 'fidelity:NAME' and
            'agreement:NAME' to score a task against full attention's answer.
        haystacks: 'repeated', or an argument of `samples.haystack.load_text`.
        data: folders with the benchmarks' files; missing ones come from the Hub.
        samples: number of records to read per data set.
        metric: metric for files of records.

    Raises:
        ValueError: an unknown task, with the nearest name; or two haystacks or files with one name. FileNotFoundError:
            a haystack, a file or a data set is missing.
    """
    files = [plain for name in names if is_file_of_records(plain := prefix_of(name)[1])]
    if metric != "contains" and not files:
        raise ValueError(f"metric={metric} is for files of questions, and tasks={','.join(names)} has none")
    for what, places in (("haystacks", haystacks), ("tasks", files)):
        known: dict[str, str] = {}
        for place in places:
            if (one := known.setdefault(haystack_name(place), place)) != place:
                said = "have one name, which rows could not tell apart: rename one"
                raise ValueError(f"{what}={one} and {place} {said}")
    tasks: dict[tuple[str, str], Task] = {}
    for name in names:
        prefix, plain = prefix_of(name)
        if prefix or plain != name:
            check_name(f"task={name!r}: prefix", prefix, AGAINST_FULL)
        for one in [plain] if is_file_of_records(plain) else row_names(plain):
            for task in _tasks_of(one, haystacks, data, samples, metric):
                task = against_full(task, prefix) if prefix else task
                tasks[task.name, task.haystack] = task
    return list(tasks.values())


def _tasks_of(name: str, haystacks: Sequence[str], data: Sequence[str], samples: int, metric: str) -> list[Task]:
    if name in STANDALONE_TASKS:
        return [STANDALONE_TASKS[name]]
    if name in entries():
        return [document_task(name, data, samples)]
    real = [haystack for haystack in haystacks if haystack != "repeated"]
    if name in HAYSTACK_TASKS:
        return [_over(HAYSTACK_TASKS[name], h) if h in real else HAYSTACK_TASKS[name](h, None) for h in haystacks]
    if is_file_of_records(name):
        return [records_task(name, samples, metric)]
    check_name("task", name, [*known_tasks(), *groups()], "locret-eval tasks lists all.")
    return [_over(REAL_TEXT_TASKS[name], haystack) for haystack in real or [DEFAULT_REAL_TEXT]]


def _over(make: Callable[[str, str], Task], haystack: str) -> Task:
    """The task over a real text, with its hash."""
    text = _text(haystack)
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return replace(make(haystack_name(haystack), text), text_hash=digest[:16])


_text = lru_cache(maxsize=8)(load_text)
