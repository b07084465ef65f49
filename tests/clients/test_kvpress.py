"""kvpress with the installed transformers: the page's block as it stands, its pipeline, and the comparison of kept slots."""

import re
import subprocess
import sys
from pathlib import Path

import kvpress
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

from locret_examples.press import LocretPress, arguments_for_kvpress

ROOT = Path(__file__).resolve().parents[2]
BACKBONE, HEADS = "checkpoints/SmolLM2-135M-Instruct", "checkpoints/smollm2-135m-locret"
TEXT = (
    "The grass is green. The sky is blue. " * 20
    + "The pass key is 48213. Remember it. "
    + "There and back again. " * 20
)


def test_the_block_of_the_page_runs(tmp_path, monkeypatch):
    """Half of the slots are masked in every layer: AdaKVPress leaves all of them in memory."""
    page = (ROOT / "docs" / "howto" / "others.md").read_text(encoding="utf-8")
    (block,) = (text for text in re.findall(r"```python\n(.*?)```", page, re.S) if "import AdaKVPress" in text)
    (tmp_path / "long.txt").write_text(TEXT)
    (tmp_path / "checkpoints").symlink_to(ROOT / "checkpoints")
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(compile(block, "pasted", "exec"), names)
    for layer in names["model"].model.layers:
        masked, heads = len(layer.self_attn.masked_key_indices[0]), layer.self_attn.config.num_key_value_heads
        assert masked == heads * -(-names["ids"].shape[1] // 2) and not layer.self_attn._forward_hooks


@pytest.mark.parametrize("wrap", [lambda press: press, kvpress.KeyRerotationPress, kvpress.BlockPress])
@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")  # kvpress's own calls
def test_its_pipeline_answers(wrap):
    model = AutoModelForCausalLM.from_pretrained(ROOT / BACKBONE)
    tokenizer = AutoTokenizer.from_pretrained(ROOT / BACKBONE)
    ask = pipeline("kv-press-text-generation", model=model, tokenizer=tokenizer)
    press = wrap(LocretPress(0.5, str(ROOT / HEADS)))
    with arguments_for_kvpress(model):
        assert "48213" in ask(TEXT, question="What is the pass key?", press=press, max_new_tokens=16)["answer"]


def test_both_keep_the_same_slots():
    done = subprocess.run(
        [sys.executable, "scripts/research/compare_kvpress.py"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout.count("| 1.000 |") >= 14, done.stdout + done.stderr
