"""Backbones whose files are wrong, incomplete, or bring code of their own."""

import io
import json
import shutil
import sys
from array import array
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from scripts_loaded import ROOT, load_script
from tiny_decoders.needed import Sizes
from tiny_decoders.rows import variants
from tiny_decoders.shrink import tiny_decoder
from tiny_heads import save_tiny_heads
from tiny_tokenizer import save_tiny_backbone, tiny_tokenizer
from tokenizers import AddedToken

from locret_kit import BoundedCache, RetainingHeads, load_cache
from locret_kit.backbones import index
from locret_kit.backbones.identity import stored_weights
from locret_kit.backbones.load import load_backbone, load_config, load_tokenizer, other_backbone
from locret_kit.cli.infer import main as infer
from locret_kit.cli.plan import main as plan
from locret_kit.runtime.session import prefill
from locret_kit.text.reader import read_document
from locret_kit.text.template import render_prompt

WEIGHT = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def backbone(tmp_path) -> Path:
    return save_tiny_backbone(tmp_path / "backbone")


def rewrite(folder: Path, change) -> None:
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    "change", [lambda state: state.pop(WEIGHT), lambda state: state.update({WEIGHT: torch.zeros(3, 3)})]
)
def test_a_weight_that_is_missing_or_of_another_shape_is_named(backbone, change):
    """Nothing runs on random numbers."""
    rewrite(backbone, change)
    with pytest.raises(ValueError, match=f"lack weights.*{WEIGHT}"):
        load_backbone(str(backbone))


@pytest.mark.parametrize("method", ["modelopt", None])
def test_scales_that_are_left_out_are_named(backbone, method):
    """Those of a method that transformers does not know; it warns, where warnings are shown."""
    rewrite(backbone, lambda state: state.update({WEIGHT: state[WEIGHT].to(torch.float8_e4m3fn)}))
    rewrite(backbone, lambda state: state.update({f"{WEIGHT}_scale": torch.ones(())}))
    config = json.loads((backbone / "config.json").read_text())
    config |= {"quantization_config": {"quant_method": method, "quant_algo": "FP8"}} if method else {}
    (backbone / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"quantised, and transformers does not apply {WEIGHT}_scale"):
        load_backbone(str(backbone))


def test_a_model_that_sees_images_is_loaded(tmp_path):
    model = tiny_decoder(*variants(sizes := Sizes(layers=1, vocab=400))["qwen2_vl"], sizes)
    for part in (model, tiny_tokenizer()):
        part.save_pretrained(tmp_path)
    loaded, _ = load_backbone(str(tmp_path), dtype="float32")
    assert torch.equal(loaded(torch.tensor([[2, 3, 4]])).logits, model(torch.tensor([[2, 3, 4]])).logits)


def test_a_document_cannot_allow_a_backbone_to_run_its_code(backbone, tmp_path, monkeypatch, capsys):
    """transformers asks on stdin whether foreign code may run, and stdin is the document."""
    ran = tmp_path / "ran"
    (backbone / "foreign.py").write_text(
        f"from pathlib import Path\nPath({str(ran)!r}).touch()\n"
        "from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast\n"
        "class Config(LlamaConfig):\n    model_type = 'foreign'\n"
    )
    config = json.loads((backbone / "config.json").read_text())
    config |= {"model_type": "foreign", "auto_map": {"AutoConfig": "foreign.Config"}}
    (backbone / "config.json").write_text(json.dumps(config))
    text = "A quiet harbour.\ny\n" * 3
    for command, flags in ((infer, ["--policy", "streaming"]), (plan, ["--gpu-memory", "4GiB"])):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode()), encoding="utf-8"))
        assert command(["--model", str(backbone), *flags]) == 1
        assert "cannot be loaded" in capsys.readouterr().err
    for load in (load_config, load_backbone):
        with pytest.raises(FileNotFoundError, match="cannot be loaded"):
            load(str(backbone))
    load_tokenizer(str(backbone))  # it has no code of its own
    assert not ran.exists()


def test_heads_on_another_backbone_are_warned_of(backbone, tmp_path):
    copy = shutil.copytree(backbone, tmp_path / "elsewhere" / "backbone")
    assert other_backbone("lab/model", "lab/model") is None
    assert other_backbone("lab/backbone", str(copy)) is None, "a local copy goes by its name"
    said = other_backbone("lab/model-instruct", "lab/model")
    assert "trained on 'lab/model-instruct', and this runs 'lab/model'" in said


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_attention_heads", 0), ("num_key_value_heads", 3), ("head_dim", 7), ("max_position_embeddings", "x"),
        ("hidden_act", "evil"), ("rope_type", "evil"), ("num_hidden_layers", 10**9),
    ],
)  # fmt: skip
def test_an_impossible_field_is_one_line_that_names_file_and_field(backbone, field, value):
    """Tracebacks before, a plan of nonsense, or for 10**9 layers no end."""
    path = backbone / "config.json"
    config = json.loads(path.read_text())
    (config["rope_parameters"] if field == "rope_type" else config)[field] = value
    path.write_text(json.dumps(config))
    for load in (load_config, load_backbone):
        with pytest.raises((ValueError, OSError)) as caught:
            load(str(backbone))
        said = str(caught.value)
        assert "config.json" in said and field in said and str(value) in said and "\n" not in said, said


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer.json", b"{}", "tokenizer"),
        ("config.json", b"[" * 100_000, "config.json"),
        ("pytorch_model.bin", b"", "cannot be loaded"),
    ],
)
def test_a_damaged_file_is_one_line(backbone, name, content, words):
    (backbone / name).write_bytes(content)
    if name == "pytorch_model.bin":
        (backbone / "model.safetensors").unlink()
        torch.save({"x": Path("a pickle holds more than tensors")}, backbone / name)
    with pytest.raises((ValueError, OSError), match=words) as caught:
        load_backbone(str(backbone))
    assert "\n" not in str(caught.value) and str(backbone) in str(caught.value)


def test_a_template_that_runs_wild_is_one_line(backbone):
    tokenizer = load_tokenizer(str(backbone))
    for loop, said in (("999999", "refuses"), ("9999999", "holds 9999999: numbers are"), ("10**9", "computes a power")):
        tokenizer.chat_template = f"{{% for i in range({loop}) %}}x{{% endfor %}}"
        with pytest.raises(ValueError, match=f"the chat template {said}"):
            render_prompt(tokenizer, "question")


POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'4d7a2146' * 8}\nsize 269060552\n"


def test_a_pointer_of_git_lfs_is_named(backbone, tmp_path):
    """Of weights, whole or in shards, tokenizers, GGUF files and parts of one, heads, adapters, saved caches and documents."""
    lora, heads = tmp_path / "lora", save_tiny_heads(tmp_path, 8)
    get_peft_model(load_backbone(str(backbone))[0], LoraConfig(task_type="CAUSAL_LM")).save_pretrained(lora)
    cases = {
        "model.safetensors": lambda folder: load_backbone(str(folder)),
        "model-00001-of-00002.safetensors": lambda folder: next(stored_weights(str(folder), [WEIGHT])),
        "tokenizer.json": lambda folder: load_tokenizer(str(folder)),
        "config.json": lambda folder: load_config(str(folder)),
        "m.gguf": lambda folder: load_config(str(folder / "m.gguf")),
        "m-00001-of-00002.gguf": lambda folder: load_tokenizer(str(folder / "m-00001-of-00002.gguf")),
        "saved.cache": lambda folder: load_cache(folder / "saved.cache", load_backbone(str(backbone))[0]),
        "book.pdf": lambda folder: read_document(folder / "book.pdf"),
        "book.txt": lambda folder: read_document(folder / "book.txt"),
    }
    for name, load in cases.items():
        folder = shutil.copytree(backbone, tmp_path / "cloned", dirs_exist_ok=True)
        (folder / name).write_text(POINTER)
        with pytest.raises((ValueError, FileNotFoundError), match=r"^[^\n]*Git LFS pointer[^\n]*git lfs pull[^\n]*$"):
            pytest.fail(f"{name}: {load(folder)}")
        shutil.rmtree(folder)
    others = {
        lora: lambda: load_backbone(str(backbone), adapter=str(lora)),
        heads: lambda: RetainingHeads.from_pretrained(str(heads)),
    }
    for folder, load in others.items():
        weights = next(folder.glob("*.safetensors"))
        weights.write_text(POINTER)
        with pytest.raises((ValueError, FileNotFoundError), match=rf"{weights.name}: a Git LFS pointer"):
            load()


@pytest.fixture
def beyond(tmp_path) -> Path:
    """Its tokenizer has three tokens more than the model has rows."""
    tokenizer = tiny_tokenizer()
    backbone = save_tiny_backbone(tmp_path / "backbone", vocab_size=len(tokenizer))
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.add_tokens([AddedToken("<extra>", special=False, normalized=False), AddedToken("<image>", special=True)])
    tokenizer.save_pretrained(backbone)
    return backbone


def test_texts_that_spell_tokens_beyond_the_rows_are_plain(beyond, tmp_path, capsys):
    """In each command that reads a text; of ids that a caller gives, one line."""
    text = tmp_path / "text.txt"
    text.write_text("A quiet [PAD] harbour <extra> with <image> boats. " * 8)
    model, tokenizer = load_backbone(str(beyond))
    rows = model.config.vocab_size
    assert len(tokenizer) == rows and max(tokenizer(text.read_text()).input_ids) < rows
    assert tokenizer.decode(tokenizer("[PAD]<extra>").input_ids) == "[PAD]<extra>"
    run = ["--model", str(beyond), "--policy", "streaming", "--budget", "48", "--chunk", "16", "--stabilizers", "4"]
    run += ["--max-new-tokens", "2"]
    for words in (["--question", "What is <extra>?"], ["--question", "What is <extra>?", "--no-chat"], []):
        assert infer([str(text), *run, *words]) == 0, capsys.readouterr().err
    for ids in ([5, rows], [5, -1], array("i", [rows + 1])):
        with pytest.raises(ValueError, match=f"^tokens .* must be from 0 to {rows - 1}, the rows of the embed"):
            prefill(model, ids, BoundedCache(8, "streaming"))


def test_the_demo_is_fetched_beside_the_clone_of_the_script(monkeypatch, tmp_path):
    """Wherever the package is installed."""
    script, made = load_script("scripts/fetch_backbone.py"), []
    monkeypatch.setattr(index, "INSTALLED", tmp_path)
    monkeypatch.setattr(script.demo, "fetch", made.append)
    monkeypatch.setattr(script.index, "fetch", lambda file, to: made.append(to))
    for words in ([], ["--gguf"], ["--to", str(tmp_path / "m")]):
        assert script.main(words) == 0
    here = [ROOT / script.demo.BACKBONE, ROOT / "checkpoints" / script.demo.GGUF.name]
    assert made == [*here, tmp_path / "m"]
