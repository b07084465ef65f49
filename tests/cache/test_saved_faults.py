"""Files that are not what they should be: cut, with other bits, or changed with a digest that is right. Every one is refused in
one line that says what is wrong, or holds other numbers that index nothing; nothing is executed and no memory taken."""

from __future__ import annotations

import json
import pickle
import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from live_bytes import LiveBytes
from read_texts import REREADING, parts, read, text_of
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from tiny_models import tiny_model
from tiny_tokenizer import tiny_tokenizer

from locret_kit import BoundedCache, Document, RetainingHeads
from locret_kit.cache.file import LARGEST, digest
from locret_kit.cache.saved import load_cache, save_cache
from locret_kit.policies.grammar import parse_policy

SETTINGS = dict(budget=96, chunk=64, stabilizers=4, local_len=5)
WORDS = 260
BASES = {
    "plain": ("llama", "h2o", dict(protect="first"), True),
    "ragged": ("gemma3", "ada-locret", {}, True),
    "bits": ("llama", "locret", dict(kv_bits=4), True),
    "8 bits": ("llama", "snapkv", dict(kv_bits=8), True),
    "without text": ("llama", "sirllm", {}, False),
    "merging": ("llama", "merge", {}, True),
    "remembering": ("llama", "compactor(block=8)", {}, True),
    "recalling": ("llama", "h2o recall=blocks(size=16)", {}, True),
    "rereading": ("llama", REREADING, {}, None),
}
"""Backbone, policy, further settings, and whether the text is in the file; None: a cache after an answer, no document."""
HONEST = 4 << 20
"""Bytes of tensors that the largest of these caches and its checks take."""


@cache
def base(name: str) -> bytes:
    """A saved document."""
    import tempfile

    family, policy, settings, text = BASES[name]
    document = read(family, policy, text_of(WORDS), **SETTINGS, **settings)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "base.locret"
        if text is None:
            answer = document.ask("Who came in?", max_new_tokens=3)
            assert str(answer) and answer.cache.reread_positions
            save_cache(answer.cache, path)
        else:
            document.save(path, text=text, names={"model": "tiny"})
        return path.read_bytes()


def load(name: str, path: Path) -> Document | BoundedCache:
    family, policy, _, text = BASES[name]
    model, tokenizer, heads = parts(family)
    needed = heads if parse_policy(policy).needs_heads else None
    if text is None:
        return load_cache(path, model, needed)
    return Document.load(path, model, tokenizer, needed)


@dataclass
class Body:
    """A file taken apart."""

    record: dict
    tensors: dict[str, torch.Tensor]

    @classmethod
    def of(cls, data: bytes) -> Body:
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        return cls(json.loads(header["__metadata__"]["locret_kit"]), load_tensors(data))

    def file(self, *, again: bool = True) -> bytes:
        """The file, its digest made again or left as it is."""
        record = dict(self.record)
        if again:
            record.pop("digest", None)
            record["digest"] = digest(record, self.tensors)
        tensors = {name: tensor.clone().contiguous() for name, tensor in self.tensors.items()}
        return save_tensors(tensors, {"locret_kit": json.dumps(record)})


def refused(name: str, path: Path, data: bytes, *words: str) -> None:
    """The file is refused in one line that has one of the words, and takes no memory."""
    path.write_bytes(data)
    with LiveBytes() as alive, pytest.raises((ValueError, OSError)) as error:
        load(name, path)
    said = str(error.value)
    assert alive.peak <= HONEST + 4 * len(data) and len(said) < 700 and said.isprintable(), said
    assert str(path) in said
    assert not words or any(word in said.replace(str(path), "") for word in words), (words, said)


class Harmful:
    """Runs code where a file is unpickled."""

    ran = False

    def __reduce__(self) -> tuple:
        return exec, ("import test_saved_faults; test_saved_faults.Harmful.ran = True",)


def test_what_is_cut_or_has_another_bit_is_refused(tmp_path):
    lot, path = random.Random(19), tmp_path / "text.locret"
    for name in ("plain", "bits", "rereading"):
        data = base(name)
        size = int.from_bytes(data[:8], "little")
        for n in (0, 1, 7, 8, 9, size // 2, size + 7, size + 8, size + 9, len(data) - 1, lot.randrange(len(data))):
            refused(name, path, data[:n])
        for n in (0, 1, size - 1, size + 1, LARGEST, LARGEST + 1, 2**31, 2**62, 2**64 - 1):
            refused(name, path, n.to_bytes(8, "little") + data[8:])
        for n in (9, size // 2, size + 9, *(lot.randrange(len(data)) for _ in range(12))):
            refused(name, path, data[:n] + bytes([data[n] ^ 1 << lot.randrange(8)]) + data[n + 1 :])
        body = Body.of(data)
        body.tensors["layers.0.keys" if name != "bits" else "layers.0.key_codes"][..., 0] += 1
        refused(name, path, body.file(again=False), "digest")
    foreign = save_tensors({"weight": torch.zeros(4)}, {"format": "pt"})
    for other in (pickle.dumps(Harmful()), lot.randbytes(4096), base("plain") + b"\0" * 64, foreign):
        refused("plain", path, other)
    assert not Harmful.ran


@pytest.mark.parametrize("name", BASES)
def test_tensors_of_another_shape_and_indices_out_of_range_are_refused(name, tmp_path):
    """With a digest that is right. Axes that are of any length may be shorter. Shapes are those of a list, whatever the layout:
    tensors that the plain cache has too are cut and retyped there alone."""
    body, path, plain = Body.of(base(name)), tmp_path / "text.locret", Body.of(base("plain"))
    elsewhere = {key.split(".")[-1] for key in plain.tensors} if name != "plain" else set()
    last_of_all = {key.split(".")[-1]: key for key in body.tensors}  # a layer's last tensor of each name
    for last, key in last_of_all.items():
        tensor, words = body.tensors[key], (*key.split("."), "hash", "document", "store")
        new = {"a number": tensor.new_zeros(())}
        if last not in elsewhere:
            new["retyped"] = tensor.to(torch.float16 if tensor.dtype != torch.float16 else torch.float32)
            new["an axis more"] = tensor[None]
            if last not in ("sketch", "attention"):  # as many as there were
                new["cut"] = tensor[..., :-1].contiguous()
        if last in ("positions", "group", "lengths", "ids", "reread_positions"):
            new["below"], new["above"] = tensor.clone(), tensor.clone()
            new["below"].view(-1)[-1], new["above"].view(-1)[-1] = -2, torch.iinfo(tensor.dtype).max
        if last == "group":
            new["of no group"] = tensor.clone()
            new["of no group"].view(-1)[0] = -1
        for changed in new.values():
            refused(name, path, Body(body.record, {**body.tensors, key: changed}).file(), *words)
        if last not in elsewhere:
            renamed = {n if n != key else f"{key}x": x for n, x in body.tensors.items()}
            refused(name, path, Body(body.record, renamed).file(), *words, f"{key}x")


def test_fields_of_a_record_that_cannot_be_are_refused(tmp_path):
    path = tmp_path / "text.locret"
    for where, value in {
        "version": 2, "dtype": "int8", "batch": 2, "layers.0.rows": 2**31, "layers.0.seen": -1, "layers.0.tail": 64,
        "layers.1.seen": 7, "settings.budget": 0, "settings.more": 1, "pins": [[3]], "model.weights": "0", "ropes": [],
    }.items():  # fmt: skip
        body = Body.of(base("bits"))
        *outer, last = (int(key) if key.isdigit() else key for key in where.split("."))
        at = body.record
        for key in outer:
            at = at[key]
        at[last] = value
        refused("bits", path, body.file(), *where.split("."), "finite", "JSON", "tokens", "roll")
    huge = Body.of(base("plain"))
    huge.record["settings"] |= {"budget": 2**31 - 1}
    refused("plain", path, huge.file())


def test_settings_of_an_earlier_file_are_read(tmp_path):
    """Its settings have a store's bits, which none has any more."""
    body, path = Body.of(base("recalling")), tmp_path / "text.locret"
    assert body.record["version"] == 1 and body.record["settings"]["store_bits"] is None
    path.write_bytes(body.file())
    assert load("recalling", path).cache.state.host_nbytes


def test_a_file_of_eight_bit_floats_is_refused_by_name(tmp_path):
    """As version 0.1 wrote them: codes without steps, and a scale for each head."""
    body, path, tensors = Body.of(base("8 bits")), tmp_path / "text.locret", {}
    for name, x in body.tensors.items():
        layer, _, part = name.rpartition(".")
        if part in ("key_codes", "value_codes"):
            tensors |= {f"{layer}.{part[:-6]}s": x, f"{layer}.{part[:-6]}_scale": torch.ones(2)}
        elif not part.endswith(("_step", "_zero")):
            tensors[name] = x
    refused("8 bits", path, Body(body.record, tensors).file(), "kv_bits=8: its 8-bit floats are no longer read")


def test_what_is_no_file_is_refused(tmp_path):
    import os

    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "folder", tmp_path / "pipe", Path("/dev/zero"), tmp_path / "none"):
        with pytest.raises((ValueError, OSError), match=str(path)) as error:
            load("plain", path)
        assert "\n" not in str(error.value)


def test_a_pool_in_a_folder_is_not_looked_for(tmp_path):
    """The file names a folder; nothing of it is opened."""
    body = Body.of(base("merging"))
    body.record["policy"] = f"h2o merge=lococo(pool={tmp_path})"
    (tmp_path / "config.json").write_text("{")
    path = tmp_path / "mutant.locret"
    path.write_bytes(body.file())
    with pytest.raises(ValueError, match="has its pool in a folder of the machine that wrote the file: pass policy="):
        load("merging", path)


# ---- another model, tokenizer, heads, rotation or policy ---------------------------------------------------------------


def test_another_model_tokenizer_or_heads_are_refused_with_the_first_difference(tmp_path):
    model, tokenizer, heads = parts("llama")
    path = tmp_path / "text.locret"
    path.write_bytes(base("bits"))
    others = {
        "model.weights": (tiny_model("llama", seed=1, vocab_size=400).double(), tokenizer, heads),
        "model.config.rms_norm_eps: 1e-06 in the file, 0.001 here": (
            tiny_model("llama", vocab_size=400, rms_norm_eps=1e-3).double(), tokenizer, heads,
        ),
        "model.config.model_type": (tiny_model("qwen2", vocab_size=400).double(), tokenizer, heads),
        "rope_theta: 10000.0 in the file, 500000.0 here": (
            tiny_model("llama", vocab_size=400, rope_parameters={"rope_type": "default", "rope_theta": 5e5}).double(),
            tokenizer, heads,
        ),
        "heads": (model, tokenizer, RetainingHeads(heads.config).double()),
        "pass heads=": (model, tokenizer, None),
    }  # fmt: skip
    template = tiny_tokenizer()
    template.chat_template += " "
    words = tiny_tokenizer()
    words.add_tokens(["harbour"])
    others |= {"tokenizer.template": (model, template, heads), "tokenizer.vocabulary": (model, words, heads)}
    for said, (other, tokens, own) in others.items():
        with pytest.raises(ValueError, match=said):
            Document.load(path, other, tokens, own)
    with pytest.raises(ValueError, match="parts.score: .* in the file, .* here"):
        Document.load(path, model, tokenizer, heads, policy="h2o")
    again = tiny_model("llama", vocab_size=400).double()  # the same by content
    assert Document.load(path, again, tokenizer, heads).tokens
