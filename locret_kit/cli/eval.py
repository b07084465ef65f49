"""``locret-eval tasks=[...] policies=[...] out=FOLDER``: compare policies on tasks, resumably, on several processes."""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..evals.figures.study import Study
    from ..evals.rows import Row
    from ..evals.settings import Engine, Run, Variant
    from .eval_config import EvalConfig, RowsConfig

CONFIG = "config.json"


def plan_of(config: EvalConfig) -> Run:
    """Load tasks, backbone and heads."""
    from ..evals.settings import Run, variants
    from ..evals.tasks import find_tasks

    tasks = find_tasks(config.tasks, haystacks=config.haystacks, data=config.data, samples=config.samples)
    engine = load_engine(config)
    names = [name for name in engine.heads if name != "untrained"]
    return Run(
        engine=engine, tasks=tasks, variants=variants(config.policies, config.budgets, names), lengths=config.lengths,
        samples=config.samples, out=Path(config.out), keep=config.keep, retry_errors=config.retry == "errors",
        share_prefix=config.share_prefix, rank=int(os.environ.get("RANK", 0)), world_size=int(os.environ.get("WORLD_SIZE", 1)),
    )  # fmt: skip


def load_engine(config: EvalConfig) -> Engine:
    """Backbone, heads, and caches' settings as `locret-infer` scales them from the checkpoint's.

    Raises:
        ValueError: neither heads nor a backbone, heads of different backbones, or two of one name.
    """
    import torch

    from ..backbones.families import spec_of, text_config
    from ..backbones.load import load_backbone
    from ..evals.settings import RANDOM_HEADS, Engine
    from ..heads import RetainingHeads
    from .infer import scaled_settings

    if not config.ckpt and not config.model:
        raise ValueError("give ckpt=PATH (heads, which name their backbone) or model=NAME")
    heads = {Path(path).name: RetainingHeads.from_pretrained(path, backbone=config.model) for path in config.ckpt}
    if len(heads) < len(config.ckpt):
        raise ValueError(f"ckpt={config.ckpt} must have different last names: rows tell them apart by these")
    first = next(iter(heads.values()), None)
    name = config.model or (first.config.backbone if first else "")
    for other, one in heads.items():
        if not config.model and one.config.backbone != name:
            raise ValueError(f"ckpt={other} is for {one.config.backbone}, not for {name}: give model=NAME")
    adapter = config.adapter or (first.config.adapter if first else None)
    model, tokenizer = load_backbone(name, dtype=config.dtype, device=_device(config.device), adapter=adapter)
    if RANDOM_HEADS in config.policies:
        if first is None:
            raise ValueError(f"policy={RANDOM_HEADS} takes its sizes from heads: give ckpt=PATH_OR_REPO")
        torch.manual_seed(config.seed)
        heads["untrained"] = RetainingHeads(first.config)
    for one in heads.values():
        one.check_backbone(spec_of(text_config(model)))
        one.to(model.device, model.dtype)
    defaults = first.config.inference if first else {}

    def settings_for(budget: int | None) -> dict[str, Any]:
        given = {key: getattr(config, key) for key in ("chunk", "stabilizers", "local_len", "positions")}
        scaled = scaled_settings(defaults, Namespace(budget=budget, **given))
        form = {
            "one_shot": config.prefill == "one-shot",
            "decode_every": config.decode_every,
            "kv_bits": config.kv_bits,
        }
        return {**scaled, **form}

    return Engine(
        model, tokenizer, name, settings_for, heads, chat=config.chat, ending=config.ending, seed=config.seed,
        max_new_tokens=config.max_new_tokens,
    )  # fmt: skip


def _device(device: str | None) -> str | None:
    """Each local process takes a CUDA device of its own, where there are several and none is named."""
    import torch

    local = int(os.environ.get("LOCAL_RANK", 0))
    if device in (None, "auto", "cuda") and torch.cuda.is_available():
        return f"cuda:{local % torch.cuda.device_count()}"
    return device


def remember(config: EvalConfig) -> None:
    """Write what the folder's rows share; a folder of other settings is an error.

    Raises:
        ValueError: the folder holds rows of another setting; names it.
    """
    from dataclasses import asdict

    from ..checkpoint import write_beside
    from .eval_config import FIXED

    path, now = Path(config.out) / CONFIG, asdict(config)
    if path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
        for key in FIXED:
            if before.get(key) != now[key]:
                raise ValueError(
                    f"out={config.out} holds rows with {key}={before.get(key)}, not {key}={now[key]}: choose another out"
                )
    write_beside(path, lambda file: file.write_text(json.dumps(now, indent=2) + "\n", encoding="utf-8"))


def run(argv: list[str]) -> int:
    """Evaluate, then write the summary; of a finished run also figures and page."""
    from .eval_config import load_eval_config

    config = load_eval_config(argv)
    from ..evals.runner import is_complete
    from ..evals.runner import run as answer
    from ..evals.summary import write_summary

    plan = plan_of(config)
    remember(config)
    errors = answer(plan)
    tables = write_summary(plan.out)
    if is_complete(plan):  # the last process to finish shows what all have found
        print(tables)
        _draw_all(plan.out)
    if errors:
        print(f"locret-eval: {errors} examples ended with an error; see {plan.out}/rows.*.jsonl", file=sys.stderr)
    print(f"locret-eval: rows and summary are in {plan.out}", file=sys.stderr)
    return 0


def _draw_all(out: Path) -> None:
    """Figures and page of a finished run, where there is matplotlib to draw them."""
    from ..evals.page import write_page

    try:
        print(f"locret-eval: the page is {write_page(out)}", file=sys.stderr)
    except ImportError as error:
        print(f"locret-eval: no figures and no page: {error}", file=sys.stderr)


def _summary(argv: list[str]) -> int:
    from ..evals.summary import write_summary

    print(write_summary(_out(argv, "summary")))
    return 0


def _report(argv: list[str]) -> int:
    from ..evals.page import write_page

    print(write_page(_out(argv, "report")))
    return 0


def _figure(argv: list[str]) -> int:
    from ..evals.figures import FIGURES, draw, find_figure

    if not argv or "=" in argv[0]:
        print("\n".join(f"{name:<16} from {kind.source:<6} {kind.says}" for name, kind in FIGURES.items()))
        return 0 if not argv else 1
    name, words, kind = argv[0], argv[1:], find_figure(argv[0])
    if kind.source == "model":
        given = {word.partition("=")[0] for word in words}
        study = _study(name, [f"{key}={value}" for key, value in kind.defaults.items() if key not in given] + words)
        written = draw(name, study, study.out.parents[1] / "figures")
    elif kind.source == "rows":
        from .eval_config import load_rows_config

        config = load_rows_config(words)
        written = draw(name, chosen_rows(config), Path(config.out) / "figures")
    else:
        folder = _out(words, f"figure {name}")
        written = draw(name, folder, folder / "figures")
    print("\n".join(map(str, written)))
    return 0


def _study(name: str, words: list[str]) -> Study:
    """Backbone, heads and texts of a figure; the rows that it answers go to ``out/studies/NAME``."""
    from dataclasses import replace

    from ..evals.figures import find_figure
    from ..evals.figures.study import Study
    from ..evals.tasks import find_tasks
    from .eval_config import load_figure_config

    config = load_figure_config(words)
    tasks = find_tasks(config.tasks, haystacks=config.haystacks, data=config.data, samples=config.samples)
    out = Path(config.out) / "studies" / name
    engine = load_engine(config)
    if find_figure(name).answers:
        remember(replace(config, out=str(out)))
    return Study(
        engine=engine, tasks=tasks, policies=config.policies, budgets=config.budgets, lengths=config.lengths,
        samples=config.samples, out=out, sweep=config.sweep, layers=config.layers, heads=config.show_heads,
    )  # fmt: skip


def chosen_rows(config: RowsConfig) -> list[Row]:
    """The rows of a folder that the configuration asks for.

    Raises:
        ValueError: there are none.
    """
    from ..evals.rows import read_rows
    from ..evals.tasks import ALIASES

    tasks = {ALIASES.get(task, task) for task in config.tasks}
    rows = [
        row
        for row in read_rows(config.out)
        if (not tasks or row.task in tasks)
        and (not config.haystacks or row.haystack in config.haystacks)
        and (not config.policies or row.policy in config.policies)
        and (not config.budgets or row.budget in (0, *config.budgets))
        and (not config.lengths or row.length in config.lengths)
    ]
    if not rows:
        raise ValueError(f"out={config.out} holds no such rows")
    return rows


def _kept(argv: list[str]) -> int:
    from ..evals.kept import show_kept
    from .eval_config import load_kept_config

    config = load_kept_config(argv)
    rows = [row for row in chosen_rows(config) if row.sample == config.sample and row.kept is not None]
    if not rows:
        raise ValueError(
            f"out={config.out} holds no such rows with kept positions: run with keep=N above sample={config.sample}"
        )
    color = config.color == "always" or (
        config.color == "auto" and sys.stdout.isatty() and "NO_COLOR" not in os.environ
    )
    for row in rows:
        print(show_kept(Path(config.out), row, layer=config.layer, color=color))
    return 0


def _lm_eval(argv: list[str]) -> int:
    try:
        from ..evals.harness import main as harness
    except ModuleNotFoundError as error:
        raise ImportError(f"{error}: pip install 'locret-kit[harness]'") from error
    harness(argv, _engine_for_harness)
    return 0


def _engine_for_harness(settings: dict[str, Any]) -> tuple[Engine, Variant]:
    """Backbone and variant of ``--model_args policy=...,budget=...`` and this command's keys."""
    import torch

    from ..evals.settings import variants
    from .eval_config import load_eval_config

    given = {name: value for name, value in settings.items() if value is not None}
    policy, budget = given.pop("policy", "full"), given.pop("budget", 1024)
    if not torch.cuda.is_available() and str(given.get("device", "")).startswith("cuda"):
        del given["device"]  # the harness's own default
    words = [f"{name}={value}" for name, value in given.items()]
    config = load_eval_config(["tasks=lm_eval", "out=-", f"policies=[{policy}]", f"budgets=[{budget}]", *words])
    engine = load_engine(config)
    names = [name for name in engine.heads if name != "untrained"]
    return engine, variants(config.policies, config.budgets, names)[0]


def _tasks(argv: list[str]) -> int:
    from ..evals.tasks import GROUPS, known_tasks

    print("\n".join(known_tasks()))
    print(f"groups: {', '.join(GROUPS)}; fidelity:NAME scores a task against full attention")
    return 0


def _out(argv: list[str], command: str) -> Path:
    """The folder of ``out=FOLDER``.

    Raises:
        ValueError: anything else was given. FileNotFoundError: no such folder.
    """
    if len(argv) != 1 or not argv[0].startswith("out="):
        raise ValueError(f"{command} takes out=FOLDER, not {' '.join(argv) or 'nothing'}")
    folder = Path(argv[0].removeprefix("out="))
    if not folder.is_dir():
        raise FileNotFoundError(f"{argv[0]} is no folder")
    return folder


COMMANDS = {
    "summary": _summary, "report": _report, "figure": _figure, "kept": _kept, "tasks": _tasks, "lm_eval": _lm_eval,
}  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Exit status 0, 1 after an error said in one line, 130 after Ctrl-C."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        from .eval_config import USAGE

        print(USAGE)
        return 0 if argv else 1
    try:
        return COMMANDS[argv[0]](argv[1:]) if argv[0] in COMMANDS else run(argv)
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        print(f"locret-eval: {(str(error).strip() or type(error).__name__).splitlines()[0]}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nlocret-eval: stopped; the same command goes on", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
