"""The main job on the real backbone with the shipped heads: one real 4K text, read in a quarter of its length."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from locret_kit.cli.infer import main
from locret_kit.evals.metrics import first_number
from locret_kit.samples.haystack import load_text
from locret_kit.samples.needles import make_needle

ROOT = Path(__file__).resolve().parents[2]
BACKBONE, HEADS = ROOT / "checkpoints" / "SmolLM2-135M-Instruct", ROOT / "checkpoints" / "smollm2-135m-locret"


@pytest.mark.backbone
def test_reads_a_real_text_in_a_quarter_of_its_length(tmp_path, monkeypatch, capsys):
    assert BACKBONE.is_dir(), "run: python scripts/fetch_backbone.py"
    tokenizer = AutoTokenizer.from_pretrained(BACKBONE)
    needle = make_needle("R.PassKey", tokenizer, n_tokens=4096, depth=0.4, seed="test", haystack=load_text("pydoc"))
    report = tmp_path / "report.json"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(needle.prompt.encode()), encoding="utf-8"))
    options = ["--ckpt", str(HEADS), "--budget", "1024", "--max-new-tokens", "12", "--report", str(report)]
    status, (out, err) = main(options), capsys.readouterr()
    assert status == 0, err
    assert first_number(out, needle.answer, {}) == {"match": 1.0}, out
    figures = json.loads(report.read_text())
    assert figures["kept_rows"] == [1024] * 30
    assert figures["prompt_tokens"] == needle.n_tokens
    assert figures["evictions"] >= 5
