"""Backbones out of GGUF files."""

import json
import struct
from pathlib import Path
from unittest import mock

import pytest
import torch
from tiny_gguf import (
    SCALED,
    newer_source,
    tiny_source,
    write_byte_level,
    write_gguf,
    write_sentencepiece,
)  # fmt: skip
from tiny_tokenizer import TEMPLATE, tiny_tokenizer
from transformers import PreTrainedTokenizerFast

from locret_kit.backbones import gguf
from locret_kit.backbones.demo import unpack
from locret_kit.backbones.gguf import gguf_file, gguf_model
from locret_kit.backbones.gguf.gguf_file import open_gguf
from locret_kit.backbones.gguf.gguf_model import PackedLinear
from locret_kit.backbones.gguf.gguf_tokenizer import tokenizer_of
from locret_kit.backbones.identity import first_difference, identity_of, tokenizer_identity
from locret_kit.backbones.load import load_backbone, load_config, load_tokenizer, other_backbone
from locret_kit.cli.infer import main as infer
from locret_kit.cli.plan import main as plan
from locret_kit.text.template import template_source

IDS = torch.arange(2, 42)[None]


def same_logits(path, model) -> None:
    """With the definition's products; with activations in 8 bits to the tolerance of those."""
    loaded, _ = load_backbone(str(path), device="cpu", dtype="float32")
    with torch.inference_mode():
        wanted, integers = (one(input_ids=IDS).logits for one in (model, loaded))
        with mock.patch.object(gguf_model, "multiplies_integers", lambda form: False):
            own = loaded(input_ids=IDS).logits
    assert (own - wanted).abs().max() < 1e-4 * wanted.abs().max()
    assert (integers - wanted).square().mean().sqrt() < 0.1 * wanted.square().mean().sqrt()
    assert first_difference(identity_of(model)["config"], identity_of(loaded)["config"]) is None


@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("llama", "F16"),
        ("llama", "Q4_0"),
        *((f, "Q8_0") for f in ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma3", "smollm3")),
    ],
)
def test_a_file_gives_the_logits_of_its_source(family, form, tmp_path):
    model = tiny_source(family)
    same_logits(write_gguf(tmp_path / f"{family}.gguf", model, form), model)


@pytest.mark.parametrize(("arch", "form"), [("qwen35", "F16"), ("qwen35moe", "Q8_0"), ("lfm2", "Q8_0")])
def test_what_transformers_reads_is_unpacked_and_said(arch, form, tmp_path, caplog):
    """With the logits and the tokens of the same weights as safetensors."""
    model = newer_source(arch)
    path = write_gguf(tmp_path / "a.gguf", model, form)
    model.save_pretrained(tmp_path / "folder")
    tiny_tokenizer().save_pretrained(tmp_path / "folder")
    wanted, tokenizer = load_backbone(str(tmp_path / "folder"), device="cpu", dtype="float32")
    loaded, own = load_backbone(str(path), device="cpu", dtype="float32")
    said = f"a.gguf: its matrices are unpacked, which takes the memory of a model of float32: {arch} is read"
    assert said in caplog.text
    assert own("Of 3 parts, it's?").input_ids == tokenizer("Of 3 parts, it's?").input_ids
    with torch.inference_mode():
        logits, expected = (one(input_ids=IDS).logits for one in (loaded, wanted))
        tokens = [one.generate(IDS, max_new_tokens=20, do_sample=False) for one in (loaded, wanted)]
    assert (logits - expected).abs().max() < 1e-4 * expected.abs().max() and torch.equal(*tokens)
    assert load_config(str(path)).model_type == wanted.config.model_type
    write_gguf(tmp_path / "b.gguf", model, form, split_max_tensors=40)
    with pytest.raises(OSError, match=rf"architecture='{arch}' in parts: join them first \(llama-gguf-split --merge\)"):
        load_config(str(min(tmp_path.glob("b-*.gguf"))))


@pytest.mark.parametrize("scaling", SCALED)
def test_scalings_of_the_rotation_are_restored(scaling, tmp_path):
    family, changes = SCALED[scaling]
    model = tiny_source(family, **changes)
    same_logits(write_gguf(tmp_path / "scaled.gguf", model, "BF16"), model)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "Tiny.Q8_0.gguf", tiny_source("llama"), "Q8_0")


def test_the_tokenizer_is_the_source_s(file):
    tokenizer, source = load_tokenizer(str(file)), tiny_tokenizer()
    assert tokenizer_identity(tokenizer) == tokenizer_identity(source)
    assert tokenizer.chat_template == TEMPLATE and tokenizer.eos_token == "<|im_end|>"
    assert tokenizer("<|im_start|>user").input_ids[0] == source.bos_token_id


@pytest.mark.parametrize("architecture", ["llama", "phi3", "gemma3"])
def test_a_vocabulary_of_sentencepiece_is_as_transformers_reads_it(architecture, tmp_path):
    path = write_sentencepiece(tmp_path / "words.gguf", architecture)
    own = tokenizer_of(open_gguf(path))
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path, gguf_file=path.name)
    texts = ["the other  theatre", "é the\n\nthe", "the " * 9]
    # After a special token llama.cpp and the models' own files begin a word; transformers' reader does for Phi-3 alone.
    for text in texts if architecture == "llama" else [*texts, "a<end>the"]:
        assert own(text).input_ids == theirs(text).input_ids
        assert own.decode(own(text).input_ids) == theirs.decode(theirs(text).input_ids)
    # Phi-3's own file has it of all these tokens but a few; llama.cpp goes by the model's name.
    with_blanks, without = (own(text).input_ids for text in ("a<end>\n\nthe", "a<end>the"))
    assert (with_blanks == without) == (architecture == "phi3")
    assert own("<s>\n\nthe").input_ids != own("<s>the").input_ids


def test_a_vocabulary_of_sentencepiece_begins_as_llama_cpp_s_where_no_field_names_its_tokens(tmp_path):
    file = open_gguf(write_sentencepiece(tmp_path / "words.gguf", "llama"))
    own = tokenizer_of(file)
    for name in ("bos", "eos"):
        del file.fields[f"tokenizer.ggml.{name}_token_id"]
    silent = tokenizer_of(file)
    assert silent("the").input_ids == own("the").input_ids and silent("the").input_ids[0] == own.bos_token_id == 1
    assert silent.eos_token == own.eos_token == file.tokens[2]


def test_tokens_that_are_no_bytes_stay_whole_and_begin_a_text(tmp_path):
    """As those of DeepSeek; and the one for the beginning where a file of Llama 3 does not say whether it is added."""
    begin, end = ends = "<begin▁of▁sentence>", "<end▁of▁sentence>"
    own = tokenizer_of(open_gguf(write_byte_level(tmp_path / "deepseek.gguf", "deepseek-r1-qwen", ends)))
    the = own.convert_tokens_to_ids("the")
    assert len(own) == the + 3 and own(f"{begin}the{end}").input_ids == [the + 1, the, the + 2]
    assert own("the").input_ids == [the] and (own.bos_token_id, own.eos_token_id) == (the + 1, the + 2)
    assert own.decode([the + 1, the]) == f"{begin}the" and own.decode([the + 1, the], skip_special_tokens=True) == "the"
    llama = tokenizer_of(open_gguf(write_byte_level(tmp_path / "llama.gguf", "llama-bpe", ends)))
    assert llama("the").input_ids == [the + 1, the]
    assert len(own.backend_tokenizer.get_added_tokens_decoder()) == 2, "none beyond the model's rows"


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [("smollm", ["a", "ĊĊ", "1", "2"]), ("gpt-2", ["a", "Ċ", "Ċ", "12"]), ("qwen2", ["a", "ĊĊ", "1", "2"])],
)
def test_a_text_is_split_as_its_name_says(pre, pieces, tmp_path):
    made = tokenizer_of(open_gguf(write_byte_level(tmp_path / "split.gguf", pre, ("<s>", "<end>")))).backend_tokenizer
    assert [piece for piece, _ in made.pre_tokenizer.pre_tokenize_str("a\n\n12")] == pieces


def test_an_answer_ends_at_tokens_for_it_that_no_field_names(tmp_path):
    """As in llama.cpp: the fields of Phi-3 name another token than its chats end with."""
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = tokenizer.bos_token
    path = write_gguf(tmp_path / "ends.gguf", tiny_source("llama"), "F16", tokenizer)
    assert load_config(str(path)).eos_token_id == [0, 1]
    path.write_bytes(written(path.read_bytes(), "tokenizer.ggml.eos_token_id", 2**32 - 1))  # none of its tokens
    assert load_config(str(path)).eos_token_id == 1 and load_tokenizer(str(path)).eos_token is None


def test_a_conversation_with_tools_has_the_template_for_it(tmp_path):
    """As in llama.cpp and in transformers."""
    tokenizer, templates = tiny_tokenizer(), {"default": TEMPLATE, "tool_use": "{{ tools }}" + TEMPLATE}
    tokenizer.chat_template = [{"name": name, "template": text} for name, text in templates.items()]
    path = write_gguf(tmp_path / "templates.gguf", tiny_source("llama"), "F16", tokenizer)
    own = load_tokenizer(str(path))
    assert [template_source(own), template_source(own, tools=True)] == [*templates.values()]
    (file := open_gguf(path)).fields["tokenizer.chat_template"] = " "
    assert tokenizer_of(file).chat_template is None, "a blank one is none"


def test_matrices_stay_where_the_file_is_mapped(file):
    model, _ = load_backbone(str(file), device="cpu", dtype="bfloat16")
    down = model.model.layers[2].mlp.down_proj
    assert isinstance(down, PackedLinear) and model.dtype == torch.bfloat16
    assert bytes(down.weight.flatten().tolist()) in file.read_bytes()
    assert down.weight.untyped_storage().nbytes() == file.stat().st_size
    assert model.lm_head.weight is not model.get_input_embeddings().weight or model.config.tie_word_embeddings


def test_a_copy_in_few_bits_is_another_content_of_the_same_model(file, tmp_path):
    source = tiny_source("llama")
    packed, _ = load_backbone(str(file), device="cpu", dtype="float32")
    there, here = identity_of(packed), identity_of(source)
    assert there["config"] == here["config"] and there["weight_bits"] == "Q8_0"
    assert "weight_bits" in first_difference(there, {**here, "name": there["name"]})
    assert other_backbone("checkpoints/tiny", str(file)) is None
    assert other_backbone("checkpoints/SmolLM2-135M", "lab/SmolLM2-135M-GGUF:Q4_K_M") is None
    assert "trained on" in other_backbone("checkpoints/other", str(file))


def test_commands_take_it(file, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("The harbour was quiet. " * 9)
    given = ["--model", str(file), "--policy", "streaming", "--dtype", "float32"]
    flags = ["--budget", "24", "--chunk", "8", "--max-new-tokens", "2", "--report"]
    assert infer([str(text), *given, *flags, str(tmp_path / "report.json")]) == 0
    assert json.loads((tmp_path / "report.json").read_text())["dtype"] == "float32, Q8_0 weights"
    assert plan([*given, "--gpu-memory", "8GiB", "--context", "300", "--budget", "64", "--chunk", "16"]) == 0
    assert "float32, Q8_0 weights" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(adapter="some/lora"), "adapter='some/lora' does not act.*merge it into the float model"),
        (dict(weight_bits=4), "weight_bits=4 does not act on the packed weights"),
    ],
)
def test_what_floats_alone_allow_is_refused(changes, message, file):
    with pytest.raises(ValueError, match=message):
        load_backbone(str(file), device="cpu", **changes)


def written(data: bytes, after: str, number: int, at: int = 4, size: int = 4) -> bytes:
    """The file with a number so many bytes after a name; a field's value comes after the 4 bytes of its kind."""
    start = data.index(struct.pack("<Q", len(after)) + after.encode()) + 8 + len(after) + at
    return data[:start] + number.to_bytes(size, "little") + data[start + size :]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: b"GGML" + data[4:], "is no GGUF file"),
        (lambda data: data[:8] + b"\xff" * 8 + data[16:], "18446744073709551615 fields or tensors must be at most 65536"),
        (lambda data: written(data, "tokenizer.ggml.tokens", 2**40, 8, 8), "is damaged: .* bytes from .* on go beyond"),
        (lambda data: written(data, "blk.1.attn_q.weight", 2**40 + 2, 24, 8), "offset=1099511627778 must be a multiple of"),
        (lambda data: written(data, "blk.1.attn_q.weight", 2**40, 24, 8), "is cut off"),
        (lambda data: data.replace(b"blk.1.attn_q.weight", b"blk.1.attn_k.weight"), "a tensor occurs twice"),
        (lambda data: written(data, "llama.block_count", 2**31), "block_count=2147483648 must be a whole number from 1 to 6"),
        (lambda data: written(data, "llama.rope.freq_base", 0x7F800000), "rope.freq_base=inf must be a finite number above 0"),
        (lambda data: data[:-1000], "is cut off"),
        (lambda data: data.replace(b"llama", b"mamba"), "architecture='mamba' of a GGUF file is not mapped; there are: llama"),
        (lambda data: data.replace(b"llama.vocab_size", b"llama.other_size"), "other_size=.* is unknown for llama"),
        (lambda data: data.replace(b"blk.1.attn_q.weight", b"blk.9.attn_q.weight"), "blk.9.attn_q.weight is unknown"),
        (lambda data: data.replace(b"blk.1.attn_output.weight", b"rope_factors_long.weight"), "long.weight'. cannot be restored"),
        (lambda data: data.replace(b"gpt-2", b"weird"), "tokenizer.ggml.pre='weird' is not known"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_read_is_one_line(change, message, file, tmp_path):
    path = tmp_path / "changed.gguf"
    path.write_bytes(change(file.read_bytes()))
    with pytest.raises((ValueError, OSError), match=message) as caught:
        load_backbone(str(path), device="cpu")
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


@pytest.mark.parametrize("split", [dict(split_max_tensors=20), dict(split_max_tensors=99, small_first_shard=True)])
def test_parts_are_the_model_of_one_file_whichever_is_named(split, tmp_path):
    """The first part may hold fields alone."""
    model = tiny_source("qwen2")
    whole, _ = load_backbone(str(write_gguf(tmp_path / "whole.gguf", model, "Q8_0")), device="cpu")
    write_gguf(tmp_path / "Tiny-Q8_0.gguf", model, "Q8_0", **split)
    parts = sorted(tmp_path.glob("Tiny-Q8_0-0000?-of-0000?.gguf"))
    assert len(parts) > 1 and not (tmp_path / "Tiny-Q8_0.gguf").exists()
    for part in parts:
        loaded, tokenizer = load_backbone(str(part), device="cpu")
        assert tokenizer("Of parts?").input_ids == tiny_tokenizer()("Of parts?").input_ids
        mine, theirs = loaded.state_dict(), whole.state_dict()
        assert list(mine) == list(theirs) and all(torch.equal(mine[name], theirs[name]) for name in theirs)
        assert loaded.config.gguf == whole.config.gguf
        assert other_backbone("lab/Tiny", str(part)) is None
    upper, folder = tmp_path / parts[1].name.upper(), tmp_path / "else"
    parts[1].rename(upper)
    folder.mkdir()
    links = [folder / "model.gguf", folder / upper.name]  # alone in a folder
    for link in links:
        link.symlink_to(upper)
    for named in (parts[0], upper, *links):
        assert len(open_gguf(named).tensors) == len(open_gguf(tmp_path / "whole.gguf").tensors)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a, b, c: b.unlink(), "beside it these are missing: m-00002-of-00003.gguf"),
        (lambda a, b, c: c.rename(c.with_name("third.gguf")), "third.gguf is one of 3 parts: it must be named so"),
        (lambda a, b, c: b.write_bytes(c.read_bytes()), "a part of another model: split.no=2 must be 1"),
        (lambda a, b, c: b.write_bytes(written(c.read_bytes(), "split.no", 1, size=2)), ".weight is in another part, too"),
        (
            lambda a, b, c: [p.write_bytes(written(p.read_bytes(), "split.tensors.count", 90)) for p in (a, b, c)],
            r"its parts hold \d+ tensors, split.tensors.count=90",
        ),
        (lambda a, b, c: b.write_bytes(b.read_bytes()[:-1000]), "m-00002-of-00003.gguf is cut off"),
    ],
)  # fmt: skip
def test_parts_that_do_not_belong_together_are_one_line(change, message, tmp_path):
    model = tiny_source("llama")
    write_gguf(tmp_path / "whole.gguf", model, "Q8_0")
    write_gguf(tmp_path / "m.gguf", model, "Q8_0", split_max_tensors=20)
    parts = sorted(tmp_path.glob("m-*.gguf"))
    change(*parts)
    (named, *_) = [*sorted(tmp_path.glob("third.gguf")), *sorted(tmp_path.glob("m-*.gguf"), reverse=True)]
    with pytest.raises((ValueError, OSError), match=message) as caught:
        load_backbone(str(named), device="cpu")
    assert "\n" not in str(caught.value)


def test_names_of_the_hub(monkeypatch):
    pulled: list[str] = []

    def hub(*names: str) -> None:
        def pull(repo, choose, **rest):
            pulled[:] = choose(list(names))
            return [Path(repo, name) for name in pulled]

        monkeypatch.setattr(gguf_file, "pull", pull)

    hub("a/Tiny-Q4_K_M.gguf", "Tiny-Q8_0.gguf", "README.md")
    for name, wanted in {"lab/Tiny:q4_k_m": "a/Tiny-Q4_K_M.gguf", "lab/Tiny/Tiny-Q8_0.gguf": "Tiny-Q8_0.gguf"}.items():
        assert gguf.is_gguf(name) and gguf_file.pull_gguf(name) == Path("lab/Tiny", wanted)
    with pytest.raises(ValueError, match="'lab/Tiny:Q5_0' names 0 files of lab/Tiny; of GGUF there are: a/Tiny-Q4_K_M"):
        gguf_file.pull_gguf("lab/Tiny:Q5_0")
    assert not gguf.is_gguf("lab/Tiny")
    parts = [f"Q8_0/tiny-q8_0-0000{n}-of-00003.gguf" for n in (3, 1, 2)]
    for named in ("lab/Tiny:Q8_0", f"lab/Tiny/{parts[0]}"):
        hub(*parts, "tiny-q2_k.gguf")
        assert gguf.is_gguf(named) and gguf_file.pull_gguf(named) == Path("lab/Tiny", parts[1])
        assert pulled == sorted(parts) and gguf.model_name(named).casefold() == "tiny"
    hub("tiny-f16.gguf", "mmproj-tiny-f16.gguf")
    for named, wanted in {
        "lab/Tiny:F16": "tiny-f16.gguf",
        "lab/Tiny/mmproj-tiny-f16.gguf": "mmproj-tiny-f16.gguf",
    }.items():
        assert gguf_file.pull_gguf(named) == Path("lab/Tiny", wanted)
    hub(*parts[:2])
    with pytest.raises(ValueError, match="is in 3 parts, of which lab/Tiny lacks Q8_0/tiny-q8_0-00002-of-00003.gguf"):
        gguf_file.pull_gguf("lab/Tiny:Q8_0")
    hub(*parts, "tiny-q8_0.gguf")
    with pytest.raises(ValueError, match="names 2 files of lab/Tiny"):
        gguf_file.pull_gguf("lab/Tiny:Q8_0")


@pytest.mark.parametrize(("family", "form"), [("llama", "F32"), ("qwen2", "Q4_1"), ("gemma3", "Q4_1")])
def test_a_folder_holds_the_weights_and_the_tokens(family, form, tmp_path, capsys):
    tokenizer, model = tiny_tokenizer(), tiny_source(family)
    write_gguf(tmp_path / "tiny.gguf", model, form)
    unpack(tmp_path / "tiny.gguf", tmp_path / "made", "any/tiny")
    assert capsys.readouterr().err.splitlines() == ["unpacking tiny.gguf"], "and no bar"
    made, split = load_backbone(str(tmp_path / "made"), dtype="bfloat16", device="cpu")
    wanted = model.bfloat16().state_dict()
    assert made.state_dict().keys() == wanted.keys()
    assert all(torch.equal(weight, wanted[name]) for name, weight in made.state_dict().items())
    text = "The pass key is 4711.\n\nRemember it; 3 of 12."
    assert split.get_vocab().items() >= tokenizer.get_vocab().items() and split.eos_token == tokenizer.eos_token
    assert split.decode(split(text).input_ids) == text
    assert made.config.dtype == torch.bfloat16 and made.config.eos_token_id == tokenizer.eos_token_id
    assert not hasattr(made.config, "gguf")
