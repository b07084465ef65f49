"""The model card of published heads: the Hub's metadata, what they are, a snippet that runs, their results.

Pure functions from a checkpoint's facts to text, and ``write_release``, which lays out the folder that is published.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from .checkpoint import CONFIG, FORMAT, save_heads
from .heads import HeadsConfig, RetainingHeads
from .hub import REPO, push

CARD, TRAINING = "README.md", "training.json"
EXTRAS = ("*.csv", "*.jsonl", "*.md", "*.png", TRAINING)
"""What is published beside the heads where their folder has it: curves, evaluation rows and tables, the run's configuration."""

COLUMNS = {"task": "", "haystack": "-", "length": 0, "budget": 0, "metric": "match"}
"""What tells results apart, and what older rows without the field mean."""


def publish(
    heads: RetainingHeads,
    repo: str,
    source: Path | None = None,
    *,
    private: bool = False,
    message: str = "Upload retaining heads",
    **facts: Any,
) -> str:
    """Upload the heads, with what ``source`` (their folder or file) has beside them; the commit's address.

    ``facts``: of ``write_release``. Raises ValueError or OSError with one line.
    """
    with tempfile.TemporaryDirectory() as work:
        write_release(heads, repo, Path(work), source, **facts)
        return push(Path(work), repo, private=private, message=message, marker=(CONFIG, FORMAT))


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
    """Fill ``target`` with everything that is published, and return the names of its files.

    Raises:
        ValueError: ``repo`` is no ``user/name``, or the backbone or adapter is known by a local folder only.
    """
    if not REPO.match(repo):
        raise ValueError(f"repo={repo!r} must be user/name")
    beside = _beside(source)
    own = beside / CARD if beside else None
    text = own.read_text(encoding="utf-8") if own and own.is_file() else ""
    given, prose = split_card(text)
    config = replace(
        heads.config,
        backbone=_hub_name("base_model", base_model or given.get("base_model"), heads.config.backbone),
        adapter=heads.config.adapter and _hub_name("adapter", adapter, heads.config.adapter),
    )
    dtype = torch.bfloat16 if all(_fits_bfloat16(weight) for weight in heads.parameters()) else torch.float32
    released = RetainingHeads(config)
    released.load_state_dict(heads.state_dict())
    save_heads(released, target, dtype)
    for pattern in EXTRAS if beside else ():
        for file in sorted(beside.glob(pattern)):  # type: ignore[union-attr]
            if file.name not in (CARD, TRAINING):
                shutil.copy(file, target / file.name)
    training = _training_of(beside)
    if training:
        (target / TRAINING).write_text(json.dumps(training, indent=2) + "\n")
    rows = [row for file in sorted(target.glob("*.jsonl")) for row in read_results(file)]
    mine = [row for row in rows if beside is not None and row.get("heads") == beside.name]
    body = prose or describe(config, sum(p.numel() for p in heads.parameters()), training)
    card = make_card(config, repo, body, mine, {**given, **({"license": license} if license else {})}, training)
    (target / CARD).write_text(card, encoding="utf-8")
    return sorted(file.name for file in target.iterdir())


def make_card(
    config: HeadsConfig,
    repo: str,
    prose: str,
    rows: list[dict[str, Any]],
    given: dict[str, Any] | None = None,
    training: dict[str, Any] | None = None,
) -> str:
    """The whole card; metadata that its author wrote by hand (``given``) comes first, results come from ``rows``."""
    from huggingface_hub import EvalResult, ModelCardData

    given = {k: v for k, v in (given or {}).items() if k != "model-index"}
    sources = (training or {}).get("data", {}).get("sources", [])
    facts: dict[str, Any] = {
        "license": "apache-2.0",
        "library_name": "locret_kit",
        "tags": ["locret", "kv-cache", "long-context"],
        "datasets": [name for name in sources if REPO.match(name)] or None,
        **given,
        "base_model": config.backbone,
        "base_model_relation": "adapter",
    }
    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type=key["task"],
            dataset_name=f"{key['task']}, {key['haystack']}, {key['length']} tokens",
            dataset_config=f"{key['haystack']}, {key['length']} tokens",  # what tells results apart in the index
            metric_type=key["metric"],
            metric_name=f"{key['metric']} at budget {key['budget']}, n={n}",
            metric_args={"budget": key["budget"], "samples": n},
            metric_value=round(value, 4),
        )
        for key, value, n in summarise(rows)
    ]
    if results:
        facts |= {"eval_results": results, "model_name": repo.split("/")[1]}
    parts = [f"---\n{ModelCardData(**facts).to_yaml()}\n---", prose.strip()]
    if f'from_pretrained("{repo}")' not in prose:
        parts.append(
            f"## Use\n\n```bash\nlocret-infer --ckpt {repo} < long.txt\n```\n\n```python\n{snippet(config, repo)}```"
        )
    if results:
        parts.append("## Measured\n\n" + results_table(rows))
    return "\n\n".join(parts) + "\n"


def snippet(config: HeadsConfig, repo: str) -> str:
    """Python that answers from ``long.txt`` with these heads; a test runs it."""
    inference = {"budget": 1024, "chunk": 512, **config.inference}
    adapter = f', adapter="{config.adapter}"' if config.adapter else ""
    return f"""from locret_kit import BoundedCache, RetainingHeads, attach
from locret_kit.backbones.load import load_backbone

heads = RetainingHeads.from_pretrained("{repo}")
model, tokenizer = load_backbone("{config.backbone}"{adapter})
heads.to(model.device, model.dtype)
prompt = open("long.txt").read() + "\\n\\nQuestion: what is this text about?\\nAnswer:"
ids = tokenizer(prompt, return_tensors="pt").input_ids.to(model.device)
cache = BoundedCache(budget={inference["budget"]}, policy="locret", heads=heads, prompt_length=ids.shape[1])
with attach(model):
    out = model.generate(ids, past_key_values=cache, prefill_chunk_size={inference["chunk"]}, max_new_tokens=32)
print(tokenizer.decode(out[0, ids.shape[1]:], skip_special_tokens=True))
"""


def describe(config: HeadsConfig, parameters: int, training: dict[str, Any] | None) -> str:
    """A card's prose for heads that come with none: their shape, and how they were trained where that is known."""
    width = (config.n_heads + 2 * config.n_kv_heads) * config.head_dim
    unit = {"logit": "attention logit", "log_prob": "log-probability"}[config.target]
    lines = [
        f"# Retaining heads for {config.backbone.split('/')[-1]}",
        "",
        f"One MLP for each of {config.n_layers} layers ({width} -> {config.d_hidden} -> {config.n_kv_heads}, "
        f"{config.activation}, no biases; {parameters / 1e6:.1f}M parameters in all) that predicts, from a token's q, k, v "
        f"before RoPE, the largest {unit} that later answer queries will give its slot. The key/value cache keeps the slots "
        "that score best ([Locret](https://arxiv.org/abs/2410.01805)).",
    ]
    if config.adapter:
        lines += [
            "",
            f"They belong to the backbone with the adapter [{config.adapter}](https://huggingface.co/{config.adapter}).",
        ]
    if training:
        optim, data = training["optim"], training["data"]
        lines += [
            "",
            "## Training",
            "",
            f"{optim['steps']} steps of {optim['accumulate']} samples a device, at most {data['max_tokens']} tokens each, "
            f"from {', '.join(data['sources'])}; learning rate {optim['lr']:g}, target {training['target']['kind']}, the top "
            f"{training['loss']['top_fraction']:.0%} of slots weigh {training['loss']['top_weight']:g}. "
            f"The whole configuration is in `{TRAINING}`.",
        ]
    return "\n".join(lines)


def read_results(file: Path) -> Iterable[dict[str, Any]]:
    """The evaluation rows of a JSONL file: its objects with a task and a score, a half last line left aside."""
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and "task" in row and isinstance(row.get("score"), (int, float)):
            yield row


def summarise(rows: list[dict[str, Any]]) -> list[tuple[dict[str, Any], float, int]]:
    """``(task, haystack, length, budget, metric)``, mean score and number of examples of the policy `locret`."""
    scores: dict[tuple, list[float]] = defaultdict(list)
    for row in rows:
        if row.get("policy") == "locret":
            scores[tuple(row.get(name, default) for name, default in COLUMNS.items())].append(row["score"])
    return [(dict(zip(COLUMNS, key, strict=True)), mean(values), len(values)) for key, values in sorted(scores.items())]


def results_table(rows: list[dict[str, Any]]) -> str:
    """The same as a Markdown table."""
    lines = ["| task | haystack | tokens | budget | metric | score |", "|---|---|---|---|---|---|"]
    for key, value, n in summarise(rows):
        lines.append("| " + " | ".join(str(key[name]) for name in COLUMNS) + f" | {value:.3f} (n={n}) |")
    return "\n".join(lines)


def split_card(text: str) -> tuple[dict[str, Any], str]:
    """``(metadata, prose)`` of a card; no metadata where it has none."""
    from huggingface_hub import ModelCard

    if not text:
        return {}, ""
    card = ModelCard(text, ignore_metadata_errors=True)
    return {k: v for k, v in card.data.to_dict().items() if v is not None}, card.text


def _beside(source: Path | None) -> Path | None:
    """The folder whose extras go with the heads: the heads' own; of ``heads.pt`` the folder ``heads`` beside it."""
    if source is None or not source.exists():
        return None
    folder = source if source.is_dir() else source.with_suffix("")
    return folder.resolve() if folder.is_dir() else None


def _training_of(folder: Path | None) -> dict[str, Any] | None:
    """The run's configuration, with local paths cut to their last part."""
    if folder is None or not (folder / TRAINING).is_file():
        return None
    return _without_paths(json.loads((folder / TRAINING).read_text()))


def _without_paths(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_paths(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_without_paths(v) for v in value]
    if isinstance(value, str) and (value.startswith(("/", "~", ".")) or "\\" in value):
        return Path(value.replace("\\", "/")).name
    return value


def _hub_name(field: str, given: str | None, recorded: str) -> str:
    """The Hub id that others load: as given, or as recorded, or as the recorded folder's ``backbone.json`` says."""
    from .backbones.load import resolve_model

    if given:
        return given
    try:
        path = Path(resolve_model(recorded))
    except FileNotFoundError:
        path = Path(recorded)
    if not path.exists() and REPO.match(recorded) and not recorded.startswith("checkpoints/"):
        return recorded
    try:
        return str(json.loads((path / "backbone.json").read_text())["repo"])
    except (OSError, ValueError, KeyError):
        flag = "--" + field.replace("_", "-")
        raise ValueError(
            f"{field}: the heads name {recorded!r}, which others cannot load: give {flag} user/name"
        ) from None


def _fits_bfloat16(weight: torch.Tensor) -> bool:
    return torch.equal(weight.to(torch.bfloat16).to(weight.dtype), weight)
