"""The kit installed beside any vLLM: engines that do not ask for a bounded cache never meet it, those that ask are told."""

import re
import sys
from pathlib import Path

import pytest

import locret_kit.vllm
from locret_kit.cli.vllm import main

ROOT = Path(__file__).resolve().parents[2]
OTHERS = {
    "between two releases": ('__version__ = "0.32.1.dev7+g1234"', "vllm==0.32.1.dev7: it has no vllm."),
    "of no release": ("", "vllm==unknown: it has no vllm."),
    "a part is gone": ("from vllm import v1", "cannot import name 'v1'"),
    "a requirement is gone": ("import gone_library", "No module named 'gone_library'"),
    "broken by torch": ('raise AttributeError("_C has no x")', "vllm cannot be imported: AttributeError: _C has no"),
}
"""What an installed vLLM is, and what is said."""


@pytest.mark.parametrize(
    ("words", "warns"),
    [
        ('serve M --additional-config {"locret":{"budget":64}}', True),
        ('serve M --additional-config={"a": "b", "locret": {}}', True),
        ("serve M --additional_config.locret.budget 64", True),
        ('serve M --additional-config {"locret":{}} --logits-processors locret_kit.vllm:Requests', False),
        ('serve M --additional-config {"a":"b"}', False),
        ("serve /models/locret", False),
        ("", False),
    ],
)
def test_an_engine_is_told_of_settings_that_nothing_reads(words, warns, monkeypatch, caplog):
    """Of vLLM's other groups one is imported by every engine, which ends where that fails; one ends those of the newer runner,
    whatever it holds; one switches statistics on."""
    declared = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    groups = re.findall(r"^\[project\.entry-points.*vllm.*", declared, re.M)
    assert groups == re.findall(r".*vllm.general_plugins.*", declared)
    monkeypatch.setattr(sys, "argv", ["vllm", *words.split()])
    locret_kit.vllm.warn()
    said = "warning: the section 'locret' has no effect without --logits-processors locret_kit.vllm:Requests"
    assert [line for line in caplog.messages if "--logits-processors" in line] == [said] * warns


@pytest.mark.parametrize("other", OTHERS)
def test_another_vllm_is_named_where_it_is_asked(other, tmp_path, monkeypatch, capsys):
    """By the name that vLLM is given, and by the command."""
    text, said = OTHERS[other]
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    try:
        with pytest.raises((RuntimeError, ImportError), match=said):
            _ = locret_kit.vllm.Requests
        assert main(["--model", str(tmp_path)]) == 1
    finally:
        sys.modules.pop("vllm", None)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "newer than" not in line]
    assert line.startswith("locret-vllm: ") and said in line
