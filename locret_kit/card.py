"""The model card of published heads: the Hub's metadata, a description, an example that runs, and results.

Pure functions turn a checkpoint's facts into text. ``write_release`` writes the folder to publish.
"""

import json
import os
import re
import shutil
import tempfile
from contextlib import suppress
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard
from jinja2 import Environment, StrictUndefined, UndefinedError

from .backbones.gguf import hub_repo
from .backbones.load import resolve_model
from .cis import TOP
from .evals.engine import KEY, Row, distinct
from .evals.tables import Cell, summarize
from .files import CONFIG, parse_json, read_json, write_json
from .heads import FORMAT, RetainingHeads, best_of
from .hub import REPO, push
from .naming import prefixed_errors
from .runtime.report import weights_hash
from .settings import SMOOTH_L1

_FILE = re.compile(r"\.(json|jsonl|parquet|txt|gz|md|yaml|pt|bin|ckpt|safetensors)$")
CARD, TRAINING = "README.md", "training.json"
MEASURED = re.compile(r"\n## Measured\n\n\| task \| haystack \|.*\n(\|.*\n?)*")
"""Results in a card that was written by ``TEMPLATE``."""
TEMPLATE = Environment(undefined=StrictUndefined, trim_blocks=True).from_string(
    resources.files(__package__).joinpath("card.md").read_text(encoding="utf-8")
)
"""A card: metadata that its author may change, the author's prose or the heads' shape and training, an example, and results."""
EXTRAS = ("*.csv", "*.jsonl", "*.md", "*.png", "*.txt", "NOTICE", TRAINING)
"""Files published with the heads if present: curves, evaluation rows and tables, the run's configuration, notices
and terms."""


def publish(
    heads: RetainingHeads,
    repo: str,
    source: Path | None = None,
    *,
    private: bool = False,
    message: str = "Upload retaining heads",
    token: str | None = None,
    **names: str | None,
) -> str:
    """Upload heads, a model card and the files beside them to the Hub; returns the commit's address. Curves, rows and
    settings of an earlier publication are deleted where there are none now.

    Args:
        repo: ``user/name``. It is made if it is missing.
        source: folder or file of the heads, whose curves, evaluation rows and card are uploaded too. None: heads and a
            new card alone.
        private: whether a new repository is private. A public one that exists is refused.
        message: the commit's message.
        token: a Hub token. Default: ``HF_TOKEN``, or that of ``hf auth login``.
        **names: ``base_model`` and ``adapter``, the Hub ids (``user/name``; of a GGUF file ``user/name:Q4_K_M``) that others
            need, and ``license``. Default: those of the heads' configuration and of the card in ``source``.

    Raises:
        ValueError: a name that is no ``user/name``, or a damaged file; it is named.
        OSError: no token, a repository with other files than heads, or no connection; says whether something was published.
    """
    with tempfile.TemporaryDirectory() as work:
        write_release(heads, repo, Path(work), source, **names)
        made = "*.csv", "*.jsonl", TRAINING  # pictures and texts there may be the user's
        return push(
            Path(work), repo, private=private, message=message, marker=(CONFIG, FORMAT), replaces=made, token=token
        )


def write_release(
    heads: RetainingHeads,
    repo: str,
    target: Path,
    source: Path | None = None,
    *,
    base_model: str | None = None,
    adapter: str | None = None,
    license: str | None = None,
) -> list[str]:
    """Write all files to publish into ``target``; returns their names.

    Local paths are reduced to their last part in the configuration, in ``training.json`` and in evaluation rows.
    Other files are copied unchanged.

    Raises:
        ValueError: ``repo``, ``base_model`` or ``adapter`` has no name of the Hub's; the backbone or adapter has a local
            name only; an adapter for heads without one; a damaged file, which is named; or one cell's results with
            different settings.
    """
    if not REPO.match(repo):
        raise ValueError(f"repo={repo!r} must be user/name")
    if adapter and not heads.config.adapter:
        raise ValueError(f"adapter={adapter!r} has no effect: the heads were trained without one")
    # Their own folder, or for ``heads.pt`` the folder ``heads`` next to it.
    folder = source and (source if source.is_dir() else source.with_suffix(""))
    beside = best_of(folder).resolve() if folder and folder.is_dir() else None
    given, prose = read_card(beside / CARD) if beside else ({}, "")
    given |= {"license": license} if license else {}
    backbone = _hub_name("base_model", base_model or given.get("base_model"), heads.config.backbone)
    adapter = heads.config.adapter and _hub_name("adapter", adapter, heads.config.adapter)
    config = replace(heads.config, backbone=backbone, adapter=adapter, inference=public(heads.config.inference))
    released = RetainingHeads(config)
    released.load_state_dict(heads.state_dict())
    released.save_pretrained(target)
    rows: list[Row] = []
    training = None
    for file in sorted({file for pattern in EXTRAS for file in beside.glob(pattern)}) if beside else ():
        if file.suffix == ".jsonl":
            (target / file.name).write_bytes(public_rows(file, heads.config.backbone, config.backbone, rows))
        elif file.name == TRAINING:
            training = public(read_json(file))
            write_json(target / TRAINING, training)
        elif file.name != CARD:
            shutil.copy(file, target / file.name)
    names = {path.name for path in (folder, beside) if path}  # of the best heads of a run, that of the folder best too
    known = "", weights_hash(heads)  # every run's heads may have one name; old rows say no hash
    mine = distinct([row for row in rows if row.heads in names and row.heads_hash in known])
    cells = summarize(row for row in mine if row.policy == heads.config.policy)
    prose = MEASURED.sub("", prose) if cells else prose
    with prefixed_errors(f"{source}: {TRAINING} is no training's configuration", KeyError, TypeError, UndefinedError):
        sources = training["data"]["sources"] if training else []
        text = TEMPLATE.render(
            config=config, repo=repo, prose=prose.strip(), training=training, smooth_l1=SMOOTH_L1, top=f"{TOP:.0%}",
            parameters=sum(p.numel() for p in heads.parameters()), cells=cells,
        )  # fmt: skip
    results = {"eval_results": list(map(result_of, cells)), "model_name": repo.split("/")[1]} if cells else {}
    facts = given | results
    facts["base_model"], facts["base_model_relation"] = hub_repo(config.backbone) or config.backbone, "adapter"
    # The client's checks of metadata raise errors of many kinds.
    with prefixed_errors(f"{source}: {CARD} has metadata that the Hub does not know", Exception):
        card = ModelCard(text.strip() + "\n")
        card.data["datasets"] = [name for name in sources if REPO.match(name)] or None
        for name, value in facts.items():
            card.data[name] = value
        card.save(target / CARD)
    return sorted(file.name for file in target.iterdir())


def result_of(cell: Cell) -> EvalResult:
    """A cell's figure in the Hub's form."""
    data = f"{cell.haystack}, {cell.length} tokens"  # what tells results apart in the index
    name, figures = f"{cell.metric} at budget {cell.budget}, n={cell.n}", {"budget": cell.budget, "samples": cell.n}
    facts: dict[str, Any] = dict(dataset_type=cell.task, dataset_name=f"{cell.task}, {data}", dataset_config=data)
    facts |= dict(metric_type=cell.metric, metric_name=name, metric_args=figures)
    return EvalResult(task_type="text-generation", metric_value=round(cell.mean or 0.0, 4), **facts)


def public_rows(file: Path, recorded: str, published: str, rows: list[Row]) -> bytes:
    """The content of a JSONL file without local paths; evaluation rows that have a score are added to ``rows``.

    Objects that are no rows stay as they are; a half last line goes.

    Args:
        recorded: the backbone as the heads name it. published: its name on the Hub, which rows get.

    Raises:
        ValueError: another line that is no JSON, or a row with a field of another type; names file and line.
    """
    kept = []
    *lines, last = file.read_bytes().split(b"\n")
    with suppress(ValueError):
        parse_json(last, "")
        lines.append(last)
    for number, line in enumerate(lines, 1):
        where = f"{file}, line {number}"
        value = parse_json(line, where) if line.strip() else None
        if isinstance(value, dict) and value.keys() >= set(KEY):
            with prefixed_errors(where, ValueError):
                row = Row.from_dict(value)
            value |= {name: public(value[name]) for name in ("model", "adapter", "policy", "error") if name in value}
            if Path(str(row.model)).name == Path(recorded).name:
                value["model"] = published
            # Half a surrogate pair becomes JSON's own escape.
            line = json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace")
            rows += [row] if row.score is not None else []
        kept += [line + b"\n"] if line.strip() else []
    return b"".join(kept)


def read_card(file: Path) -> tuple[dict[str, object], str]:
    """``(metadata, prose)`` of a card; nothing where there is no file.

    Raises:
        ValueError: metadata that cannot be read; names the file.
    """
    if not file.is_file():
        return {}, ""
    with prefixed_errors(f"{file}: its metadata cannot be read", Exception):  # YAML's and the client's own
        card = ModelCard.load(file, ignore_metadata_errors=True)
    return card.data.to_dict(), card.text


def public(value: object) -> Any:
    """A configuration's value with all local paths, and ``out``, reduced to their last part."""
    if isinstance(value, dict):
        return {k: Path(v).name if k == "out" and isinstance(v, str) else public(v) for k, v in value.items()}
    if isinstance(value, list):
        return [public(v) for v in value]
    return re.sub(r"[^()=,:'\"\[\]]+", _public_piece, value) if isinstance(value, str) else value


def _public_piece(match: re.Match[str]) -> str:
    """Some words, or one path whose names have blanks."""
    path = match[0].strip()
    if " " in path and (path.startswith(("/", "~")) or ("/" in path and os.path.exists(path))):
        return Path(path).name
    return re.sub(r"\S+", _public_word, match[0])


def _public_word(match: re.Match[str]) -> str:
    word = match[0].replace("\\", "/")
    on_hub = REPO.match(word) and not _FILE.search(word) and not word.startswith(("checkpoints/", "data/", "runs/"))
    return match[0] if "/" not in word or (on_hub and not Path(resolve_model(word)).exists()) else Path(word).name


def _hub_name(field: str, given: object, recorded: str) -> str:
    """The name that others load: as given, or as recorded, or as the recorded folder's ``backbone.json`` says."""
    if (repo := hub_repo(recorded)) and given in (None, repo):
        return recorded
    if given and not (REPO.match(str(given)) or (field == "base_model" and hub_repo(str(given)))):
        raise ValueError(f"{field}={given!r}, which others are to load, must be user/name")
    if given:
        return str(given)
    with suppress(OSError, ValueError, KeyError):
        path = Path(resolve_model(recorded))
        if not path.exists() and REPO.match(recorded):
            return recorded
        return str(json.loads((path / "backbone.json").read_text())["repo"])
    raise ValueError(
        f"{field}: the heads name {recorded!r}, which others cannot load: give --{field.replace('_', '-')} user/name"
    )
