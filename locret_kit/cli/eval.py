"""``locret-eval tasks=[...] policies=[...] out=FOLDER``: compare policies on tasks, resumably, on several processes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import eval_options as options
from ..config.schema import Command, read
from ..files import write_json
from ..naming import check_name, install_line
from .command import command, load_plugin

if TYPE_CHECKING:
    from ..evals.engine import Row


def run(argv: list[str]) -> int:
    """Evaluate, then write the summary; of a finished run also figures and page. Exit status 1 where an example failed."""
    config = read(options.EVAL, argv)
    if config is None:
        return 0
    from ..evals.engine.runner import answer, check, left
    from ..evals.report import write_page, write_summary
    from .eval_setup import CONFIG, load_parts, run_config, run_of

    draws = find_spec("matplotlib") is not None
    if not draws:
        print(f"locret-eval: no figures and no page without matplotlib: {install_line('eval')}", file=sys.stderr)
    load_plugin(config)
    parts = load_parts(config)
    settings = run_config(config, parts)
    made = run_of(config, parts)
    check(made)
    write_json(made.out / CONFIG, settings)  # of a run that can begin: an error before leaves no folder
    answer(made)
    tables = write_summary(made.out)
    missing, failed = left(made)
    if not missing:  # the last process to finish shows what all have found
        print(tables)
        if draws:
            print(f"locret-eval: the page is {write_page(made.out)}", file=sys.stderr)
    print(f"locret-eval: rows and summary are in {made.out}", file=sys.stderr)
    if failed:
        where = f"see {made.out}/rows.*.jsonl; the same command repeats them"
        print(f"locret-eval: {failed} examples ended with an error, {where}", file=sys.stderr)
    return 1 if failed else 0


def _report(config: options.FolderConfig) -> None:
    from ..evals.report import write_page, write_summary

    if not (folder := Path(config.out)).is_dir():
        raise FileNotFoundError(f"out={config.out} is no folder")
    write_summary(folder)
    print(write_page(folder))


def _table(config: options.TableConfig) -> None:
    from ..evals.report import tables_of

    tables = tables_of(chosen_rows(config))
    print("\n".join(table.latex() if config.format == "latex" else table.markdown() for table in tables), end="")


def _figure(config: options.FigureConfig) -> None:
    from ..evals.report import draw

    print("\n".join(map(str, draw(config.name, chosen_rows(config), Path(config.out) / "figures", config.width))))


def chosen_rows(config: options.RowsConfig) -> list[Row]:
    """The rows of a folder that the configuration asks for.

    Raises:
        ValueError: there are none.
    """
    from ..evals.engine import read_rows
    from ..evals.tasks import haystack_name, row_names

    wanted = {
        "task": {name for task in config.tasks for name in row_names(task)},
        "haystack": {haystack_name(haystack) for haystack in config.haystacks},
        "policy": config.policies, "budget": [0, *config.budgets] if config.budgets else [], "length": config.lengths,
    }  # fmt: skip
    rows = [*read_rows(config.out)]
    for name, some in wanted.items():
        rows = [row for row in rows if not some or getattr(row, name) in some]
    if not rows:
        raise ValueError(f"out={config.out} holds no such rows")
    return rows


def _paired(config: options.PairedConfig) -> None:
    from ..evals.tables import differences, differences_table

    pairs = differences(chosen_rows(config), config.against, config.figure)
    print(differences_table(pairs, config.against).markdown(), end="")


def _tasks(config: options.NoConfig) -> None:
    from ..evals.tasks import ALIASES, DESCRIPTIONS, groups, known_tasks
    from ..evals.tasks.document_tasks import entries

    for name in known_tasks():
        entry = entries().get(name)
        says = f"documents of a benchmark, by {entry.metric}" if entry else DESCRIPTIONS[ALIASES.get(name, name)]
        print(f"{name:<32} {says}")
    print(f"groups: {', '.join(groups())}; fidelity:NAME and agreement:NAME score a task against full attention")


COMMANDS: dict[str, tuple[Command[Any], Callable[[Any], None]]] = {
    "report": (options.REPORT, _report), "table": (options.TABLE, _table), "figure": (options.FIGURE, _figure),
    "paired": (options.PAIRED, _paired), "tasks": (options.TASKS, _tasks),
}  # fmt: skip
"""Options of each subcommand, and what shows its result."""


@command("locret-eval", stopped="stopped; the same command continues", also=(RuntimeError,))
def main(argv: list[str] | None = None) -> int:
    """Returns exit status 0; 1 after a reported error or a failed example; 130 after Ctrl-C."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv:
        print(options.EVAL.usage)
        return 1
    if argv[0] == "lm_eval":
        from ..evals.engine.harness import main as harness
        from .eval_setup import engine_for_harness

        harness(argv[1:], engine_for_harness)
        return 0
    if argv[0].isidentifier():
        check_name("command", argv[0], [*COMMANDS, "lm_eval"])
    if argv[0] not in COMMANDS:
        return run(argv)
    command_options, show = COMMANDS[argv[0]]
    if config := read(command_options, argv[1:]):
        show(config)
    return 0


if __name__ == "__main__":
    sys.exit(main())
