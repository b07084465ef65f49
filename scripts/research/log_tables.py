"""Tables of the logs from the rows of `scripts/results.py`: needles, and text by text what comes back and sparse prefill."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean

from locret_kit.evals.engine import RANDOM_HEADS, Row, label_of, reads_alone
from locret_kit.evals.report import usual_dtype
from locret_kit.evals.tables import MARKS, Cell, Table, size
from locret_kit.policies import Policy
from locret_kit.policies.grammar import parse_policy

HEADS, PAPER = "smollm2-135m-locret", "smollm2-135m-paper"
"""Heads that ship, and those of Locret's own target and loss."""
NEEDLES = ("R.PassKey", "R.Number")
POLICIES = ("locret", "lookahead-locret", "rereading-locret")
"""Policies of the heads that ship; a line is where the first was measured."""
RECALL = "recall(reading=false)"
MIN_EXAMPLES = 8
"""Examples that a line of the table of needles has at least."""
(_, PRECISION) = MARKS
"""Mark of a figure in another precision."""
Place = tuple[str, str, int, int]
"""Task, text, tokens and rows on the device."""
SAME_FIELDS = ("chunk", "positions", "ending", "dtype", "sample")
"""Fields that rows of the same prompt share when they are compared; stabilizers and tail follow the budget."""


def device_rows(policy: str, slots: int) -> int:
    """Rows of each key/value head: those that the policy may keep, and those that come back."""
    made = _parsed(policy)
    part = None if made is None else made.at(slots).recall
    return slots + (0 if part is None else part.take * part.size)


def remembers(policy: str) -> bool:
    """Whether evicted slots live on in a store."""
    made = _parsed(policy)
    return made is not None and made.recall is not None


def is_sparse(policy: str) -> bool:
    """Whether a part of the prompt's attention is left out."""
    made = _parsed(policy)
    return made is not None and made.sparse is not None


def _parsed(policy: str) -> Policy | None:
    """None for rows that are no policies: an oracle, retrieval, or heads that were not trained."""
    return None if reads_alone(policy) or policy == RANDOM_HEADS else parse_policy(policy)


RECALLED_ROWS = device_rows(RECALL, 1) - 1
"""Rows of it that come back; the others are the budget."""


def needle_table(cells: Sequence[Cell]) -> str:
    """One line per needle: full attention, the heads that ship, the paper's recipe, and the best that trains nothing, all with
    as many rows on the device."""
    found = {(c.task, c.haystack, c.length, c.budget, c.policy, c.heads): c for c in cells if c.mean is not None}
    head = ["needle", "text", "tokens", "slots", "n", "full attention", *(f"`{name}`" for name in (*POLICIES, RECALL))]
    lines = []
    ours = [c for c in cells if (c.policy, c.heads) == ("locret", HEADS) and c.task in NEEDLES and c.n >= MIN_EXAMPLES]
    usual = usual_dtype(ours)
    for cell in sorted(ours, key=lambda c: (NEEDLES.index(c.task), c.haystack, c.length, c.budget)):
        where = cell.task, cell.haystack, cell.length
        others = [
            found.get((*where, 0, "full", "-")),
            *(found.get((*where, cell.budget, name, HEADS)) for name in POLICIES),
            found.get((*where, cell.budget - RECALLED_ROWS, RECALL, HEADS)),
            found.get((*where, cell.budget, "locret", PAPER)),
        ]
        shares = [_share(other, cell.n, usual) for other in others]
        names = [cell.task, cell.haystack, size(cell.length), f"{cell.budget:,}", str(cell.n)]
        lines.append([*names, *shares, _best(cell, cells, usual)])
    text = Table([*head, "the paper's recipe", "best without training"], lines).markdown()
    others = " or ".join(sorted({cell.dtype for cell in cells} - {usual}))
    return f"{text}\n{PRECISION} in {others}, all else in {usual}\n" if PRECISION in text else text


def _share(cell: Cell | None, n: int, usual: str) -> str:
    """A mean, marked where it is of another number of texts or in another precision than usual."""
    if cell is None or cell.mean is None:
        return "-"
    mark = "" if cell.dtype == usual else PRECISION
    return f"{cell.mean:.2f}{mark}" + ("" if cell.n == n else f" (n={cell.n})")


def _best(ours: Cell, cells: Sequence[Cell], usual: str) -> str:
    """The named policies without heads that do best where ours was measured."""
    where = ours.task, ours.haystack, ours.length, ours.budget
    peers = [c for c in cells if (c.task, c.haystack, c.length, c.budget) == where and c.mean is not None]
    peers = [c for c in peers if c.heads == "-" and " " not in c.policy]
    if not peers:
        return "-"
    top = max(c.mean or 0.0 for c in peers)
    best = [c for c in peers if c.mean == top]
    names = ", ".join(c.policy for c in best) if top else f"all {len(best)}"
    return f"{_share(best[0], ours.n, usual)}: {names}"


def recall_table(rows: Sequence[Row], heads: str) -> str:
    """Every policy whose evicted slots live on, next to ``locret`` with as many rows on the device, on the same prompts."""
    found: dict[tuple[Place, str], list[Row]] = defaultdict(list)
    for row in rows:
        if row.score is not None and row.heads in (heads, "-") and (row.policy == "locret" or remembers(row.policy)):
            place = row.task, row.haystack, row.length, device_rows(row.policy, row.slots)
            found[place, label_of(row.policy, "-")].append(row)
    lines = []
    for (place, label), own in sorted(found.items(), key=lambda item: item[0]):
        if label == "locret":
            continue
        task, text, length, slots = place
        pairs = paired(own, found.get((place, "locret"), []))
        beside = [total([row for row, _ in pairs]), total([other for _, other in pairs])] if pairs else ["-", "-"]
        reading = times(pairs, lambda row: row.prefill_s / max(row.tokens, 1))
        answering = times(pairs, lambda row: row.decode_s / max(row.new_tokens, 1))
        lines.append([task, text, size(length), f"{slots:,}", f"`{label}`", total(own), *beside, reading, answering])
    head = ["task", "text", "tokens", "rows", "policy", "right", "of the same texts", "`locret` on these"]
    return Table([*head, "prefill time, `locret` is 1", "time a new token"], lines).markdown()


def sparse_table(rows: Sequence[Row]) -> str:
    """Sparse prefill next to dense attention on the same prompts; times where one day's run took both."""
    found: dict[tuple[str, str, str, int], dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row.score is not None and (row.policy == "full" or is_sparse(row.policy)):
            backbone = row.model.rsplit("/", 1)[-1]
            found[backbone, row.task, row.haystack, row.length][row.policy].append(row)
    lines = []
    for (backbone, task, text, length), by_policy in sorted(found.items()):
        for policy in sorted(by_policy.keys() - {"full"}):
            own = by_policy[policy]
            pairs = paired(own, by_policy["full"])
            dense = total([other for _, other in pairs]) if pairs else "-"
            ratio = times(pairs, lambda row: row.prefill_s / max(row.tokens, 1))
            share = f"{fmean(row.computed_share or 0.0 for row in own):.2f}"
            lines.append([backbone, task, text, size(length), f"`{policy}`", total(own), dense, share, ratio])
    head = ["backbone", "task", "text", "tokens", "policy", "right", "`full` on the same", "attention computed"]
    return Table([*head, "prefill time, `full` is 1"], lines).markdown()


def paired(own: Iterable[Row], others: Iterable[Row]) -> list[tuple[Row, Row]]:
    """Rows of the same prompt. Where a hash of it is not known, the answer must be the same."""
    by_prompt = {prompt_of(row): row for row in others}
    found = [(row, by_prompt[prompt_of(row)]) for row in own if prompt_of(row) in by_prompt]
    return [(a, b) for a, b in found if a.prompt_hash == b.prompt_hash or (not b.prompt_hash and a.answer == b.answer)]


def times(pairs: Iterable[tuple[Row, Row]], seconds: Callable[[Row], float]) -> str:
    """Mean ratio of the seconds, of pairs that one version took on one day; a dash where there are none."""
    together = [(a, b) for a, b in pairs if a.date[:10] == b.date[:10] and a.versions == b.versions and seconds(b)]
    return f"{fmean(seconds(a) / seconds(b) for a, b in together):.2f}" if together else "-"


def prompt_of(row: Row) -> tuple[object, ...]:
    return tuple(getattr(row, name) for name in SAME_FIELDS)


def total(rows: Sequence[Row]) -> str:
    """Right answers of all, or the mean where an answer can be right in part."""
    scores = [row.score or 0.0 for row in rows]
    if all(score in (0.0, 1.0) for score in scores):
        return f"{sum(scores):.0f} of {len(scores)}"
    return f"{fmean(scores):.2f} (n={len(scores)})"
