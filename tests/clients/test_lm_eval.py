"""lm-evaluation-harness over ``/v1/completions`` gives the numbers of the harness in process."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from demo_server import BACKBONE, HEADS

ITEMS = 20
TASK = """task: harbours
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: label
metric_list: [{{metric: acc}}]
"""
GREEDY = """task: begun
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{choices[0]}}}}"
generation_kwargs: {{until: ["."], max_gen_toks: 12, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    rng, data = random.Random(0), folder / "harbours.jsonl"
    things = ["boats", "stones", "old songs", "clocks", "rain", "letters"]
    rows = []
    for number in range(ITEMS):
        right, *wrong = rng.sample(things, 3)
        told = " ".join(
            f"In {1900 + i} the people of the harbour counted their {right}." for i in range(rng.randint(1, 9))
        )
        choices = [f" {one}, and nothing else" for one in sorted([right, *wrong])]
        rows.append({"text": f"{told} Number {number}. What they counted most was", "choices": choices, "label": 0})
    data.write_text("\n".join(map(json.dumps, rows)))
    (folder / "harbours.yaml").write_text(TASK.format(data=data))
    (folder / "begun.yaml").write_text(GREEDY.format(data=data))
    return folder


def answers(tasks: Path, out: Path, *words: str) -> dict[str, list[object]]:
    """What the harness was told for each request of each task."""
    command = [
        sys.executable, *words, "--tasks", "harbours,begun", "--include_path", str(tasks), "--log_samples",
        "--output_path", str(out),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    found = {}
    for name in ("harbours", "begun"):
        (file,) = out.rglob(f"samples_{name}_*.jsonl")
        samples = sorted((json.loads(line) for line in file.read_text().splitlines()), key=lambda one: one["doc_id"])
        found[name] = [sample["resps"] for sample in samples]
        assert len(samples) == ITEMS
    return found


def test_local_completions_gives_the_harness_s_numbers(url, tasks, tmp_path):
    there = answers(
        tasks, tmp_path / "there", "-m", "lm_eval", "--model", "local-completions", "--model_args",
        f"base_url={url}/v1/completions,model=demo,tokenizer_backend=huggingface,tokenizer={BACKBONE},num_concurrent=1",
    )  # fmt: skip
    here = answers(
        tasks, tmp_path / "here", "-m", "locret_kit.cli.eval", "lm_eval", "--model", "locret", "--model_args",
        f"ckpt={HEADS},model={BACKBONE},budget=1024,dtype=float32",
    )  # fmt: skip
    assert there["begun"] == here["begun"]
    for ours, theirs in zip(here["harbours"], there["harbours"], strict=True):
        for ((value, greedy),), ((other, same),) in zip(ours, theirs, strict=True):
            assert float(other) == pytest.approx(float(value), abs=2e-3) and str(greedy) == str(same)
