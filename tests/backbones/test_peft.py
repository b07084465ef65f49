"""Adapters on the backbone: merged exactly, recorded by the heads, and asked for at inference."""

import io
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from peft import LoraConfig, PeftModel, PrefixTuningConfig, get_peft_model
from tiny_lora import make_lora
from tiny_tokenizer import save_tiny_backbone
from transformers import AutoModelForCausalLM

from locret_kit import RetainingHeads
from locret_kit.backbones.load import choose_adapter, load_backbone
from locret_kit.cli import infer
from locret_kit.cli.train import main as train

TEXT = "The harbour was quiet when the boats came in. The pass key is 12345. " * 20


@pytest.fixture(scope="module")
def backbone(tmp_path_factory) -> Path:
    return save_tiny_backbone(tmp_path_factory.mktemp("backbone"))


@pytest.fixture(scope="module")
def lora(backbone, tmp_path_factory) -> Path:
    return make_lora(backbone, tmp_path_factory.mktemp("adapters") / "lora")


def test_merged_weights_are_w_plus_scaled_b_a(backbone, lora):
    from safetensors.torch import load_file

    plain, _ = load_backbone(str(backbone), dtype="float32", device="cpu")
    adapted, _ = load_backbone(str(backbone), dtype="float32", device="cpu", adapter=str(lora))
    parts = load_file(lora / "adapter_model.safetensors")
    for i, (layer, mine) in enumerate(zip(plain.model.layers, adapted.model.layers, strict=True)):
        for name in ("q_proj", "k_proj", "v_proj"):
            key = f"base_model.model.model.layers.{i}.self_attn.{name}"
            a, b = (parts[f"{key}.lora_{half}.weight"].double() for half in "AB")
            wanted = getattr(layer.self_attn, name).weight.double() + 8 / 4 * b @ a
            assert torch.allclose(getattr(mine.self_attn, name).weight.double(), wanted, atol=1e-6)
        assert torch.equal(layer.self_attn.o_proj.weight, mine.self_attn.o_proj.weight)
    assert not any(p.requires_grad for p in adapted.parameters()) and type(adapted) is type(plain)


@pytest.mark.parametrize("targets", [["lm_head"], ["embed_tokens"], ["embed_tokens", "lm_head"]])
def test_a_merge_changes_one_of_two_modules_that_share_a_weight(targets, tmp_path):
    base = str(save_tiny_backbone(tmp_path / "tied", tie_word_embeddings=True))
    lora, ids = make_lora(Path(base), tmp_path / "lora", targets=("q_proj", *targets)), torch.arange(5, 25)[None]
    apart = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), lora).eval()
    merged, _ = load_backbone(base, dtype="float32", device="cpu", adapter=str(lora))
    merged.save_pretrained(tmp_path / "merged")
    again, _ = load_backbone(str(tmp_path / "merged"), dtype="float32", device="cpu", tokenizer=Mock())
    for model in (merged, again):
        assert torch.allclose(model(input_ids=ids).logits, apart(input_ids=ids).logits, atol=1e-5)


def fit(backbone: Path, out: Path, *more: str) -> int:
    given = ["recipe=tiny", "trainer.accelerator=cpu", "data.val_samples=0", f"backbone.model={backbone}", f"out={out}"]
    return train([*given, *more])


def answer(capsys, monkeypatch, *argv: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode())))
    status = infer.main([*argv, "--device", "cpu", "--dtype", "float32", "--max-new-tokens", "12", "--budget", "64"])
    return (status, *capsys.readouterr())


def test_heads_are_trained_on_the_adapted_backbone_and_remember_it(backbone, lora, tmp_path, capsys, monkeypatch):
    assert fit(backbone, tmp_path / "plain") == 0
    assert fit(backbone, tmp_path / "adapted", f"backbone.adapter={lora}") == 0
    files = (tmp_path / name / "heads.pt" for name in ("plain", "adapted"))
    plain, adapted = (RetainingHeads.from_pretrained(str(file)) for file in files)
    assert (plain.config.adapter, adapted.config.adapter) == (None, str(lora))
    assert not torch.equal(plain[0].fc1.weight, adapted[0].fc1.weight), "they saw other q, k, v"
    capsys.readouterr()
    ckpt = str(tmp_path / "adapted" / "heads.pt")
    status, own, err = answer(capsys, monkeypatch, "--ckpt", ckpt)
    assert status == 0 and "warning" not in err, err
    # The same weights without an adapter: the answer must come from another model.
    merged, tokenizer = load_backbone(str(backbone), dtype="float32", device="cpu", adapter=str(lora))
    merged.save_pretrained(tmp_path / "merged")
    tokenizer.save_pretrained(tmp_path / "merged")
    saved = torch.load(ckpt, weights_only=True)
    saved["config"] |= {"adapter": None, "backbone": str(tmp_path / "merged")}
    torch.save(saved, tmp_path / "bare.pt")
    capsys.readouterr()
    assert answer(capsys, monkeypatch, "--ckpt", str(tmp_path / "bare.pt"))[:2] == (0, own)
    saved["config"] |= {"backbone": str(backbone)}
    torch.save(saved, tmp_path / "without.pt")
    status, other, _ = answer(capsys, monkeypatch, "--ckpt", str(tmp_path / "without.pt"))
    assert status == 0 and other != own


def test_what_does_not_fit_is_one_line(backbone, lora, tmp_path):
    wide = save_tiny_backbone(tmp_path / "wide", hidden_size=64)
    with pytest.raises(ValueError, match=r"adapter='.*lora' cannot be put on LlamaForCausalLM: .*(size mism|Error)"):
        load_backbone(str(wide), adapter=str(lora))
    deep = save_tiny_backbone(tmp_path / "deep", num_hidden_layers=4)
    with pytest.raises(ValueError, match="cannot be put on LlamaForCausalLM: .*missing adapter keys"):
        load_backbone(str(deep), adapter=str(lora))
    with pytest.raises(
        ValueError, match=r"cannot be put on LlamaForCausalLM: the model has no module for .*layers\.3\."
    ):
        load_backbone(str(backbone), adapter=str(make_lora(deep, tmp_path / "deeper")))
    with pytest.raises((ValueError, OSError), match=r"adapter='.*gone': no such folder"):
        load_backbone(str(backbone), adapter=str(tmp_path / "gone"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="cannot be put on"):
        load_backbone(str(backbone), adapter=str(tmp_path / "empty"))
    model, _ = load_backbone(str(backbone))
    config = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    get_peft_model(model, config).save_pretrained(tmp_path / "prefix")
    with pytest.raises(ValueError, match="is PREFIX_TUNING, which cannot be merged"):
        load_backbone(str(backbone), adapter=str(tmp_path / "prefix"))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (dict(lora_bias=True), "RuntimeError: Impossible to merge LoRA with `lora_bias=True`"),
        (dict(layer_replication=[[0, 2], [0, 2]]), "it repeats layers, whose copies share the weights"),
        (dict(alora_invocation_tokens=[5, 6]), "NotImplementedError: aLoRA does not support merging"),
    ],
)
def test_what_peft_cannot_merge_is_one_line(settings, reason, backbone, tmp_path):
    model, _ = load_backbone(str(backbone))
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], **settings)
    get_peft_model(model, config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"cannot be put on LlamaForCausalLM: {reason}"):
        load_backbone(str(backbone), adapter=str(tmp_path))


def test_the_adapter_of_the_heads_unless_another_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lora").mkdir()
    for recorded, given, chosen, words in (
        (None, None, None, None),
        ("a/b", None, "a/b", None),
        ("a/b", "a/b", "a/b", None),
        ("lora", str(tmp_path / "lora"), str(tmp_path / "lora"), None),
        ("a/b", "c/d", "c/d", "trained with adapter='a/b', and this runs with adapter='c/d'"),
        ("a/b", "none", None, "trained with adapter='a/b', and this runs without it"),
        (None, "c/d", "c/d", "trained without an adapter, and this runs with adapter='c/d'"),
        (None, "none", None, None),
    ):
        adapter, warning = choose_adapter(recorded, given)
        assert adapter == chosen
        assert (warning is None) == (words is None) and (words or "") in (warning or "")
