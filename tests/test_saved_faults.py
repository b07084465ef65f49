"""Files that are not what they should be: 500 mutants of saved documents by a seeded program. Every one is refused in one line
that says what is wrong, or holds other numbers that fit together; nothing is executed and no memory taken."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import random
import re
import sys
import zipfile
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from live_bytes import LiveBytes
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from test_documents import REREADING, parts, read, text_of
from tiny_models import tiny_model
from tiny_tokenizer import tiny_tokenizer

from locret_kit import BoundedCache, Document, RetainingHeads
from locret_kit.cache.file import LARGEST, digest
from locret_kit.cache.filling import FINITE
from locret_kit.cache.saved import load_cache, save_cache
from locret_kit.cli.command import command
from locret_kit.policies.grammar import parse_policy

MUTANTS, SEED = 500, 19
SETTINGS = dict(budget=96, chunk=64, stabilizers=4, local_len=5)
WORDS = 260
BASES = {
    "plain": ("llama", "h2o", dict(protect="first"), True),
    "ragged": ("gemma3", "ada-locret", {}, True),
    "bits": ("llama", "locret", dict(kv_bits=4), True),
    "without text": ("llama", "sirllm", {}, False),
    "merging": ("llama", "merge", {}, True),
    "remembering": ("llama", "compactor(block=8)", {}, True),
    "rereading": ("llama", REREADING, {}, None),
}
"""Backbone, policy, further settings, and whether the text is in the file; None: a cache after an answer, no document."""
HONEST = 4 << 20
"""Bytes of tensors that the largest of these caches and its checks take."""


@cache
def base(name: str) -> bytes:
    """A saved document, the same bytes in every run: one date, and no time that anything took."""
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
        body = Body.of(path.read_bytes())
        body.record["created"] = "2026-11-23T00:00:00Z"
        body.record["counters"] |= {name: 0.0 for name in body.record["counters"] if name.endswith("_s")}
        return body.file()


def load(name: str, path: Path) -> Document | BoundedCache:
    family, policy, _, text = BASES[name]
    model, tokenizer, heads = parts(family)
    needed = heads if parse_policy(policy).needs_heads else None
    if text is None:
        return load_cache(path, model, needed)
    return Document.load(path, model, tokenizer, needed)


# ---- the program -------------------------------------------------------------------------------------------------------


@dataclass
class Body:
    """A file taken apart."""

    record: dict
    tensors: dict[str, torch.Tensor]

    @classmethod
    def of(cls, data: bytes) -> Body:
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        return cls(json.loads(header["__metadata__"]["locret_kit"]), load_tensors(data))

    def file(self, *, again: bool = True, text: Callable[[str], str] = str) -> bytes:
        """The file, its digest made again or left as it is; ``text`` changes the record's JSON at last."""
        record = dict(self.record)
        if again:
            record.pop("digest", None)
            record["digest"] = digest(record, self.tensors)
        tensors = {name: tensor.clone().contiguous() for name, tensor in self.tensors.items()}
        return save_tensors(tensors, {"locret_kit": text(json.dumps(record))})


@dataclass
class Mutant:
    base: str
    what: str
    """Field or tensor that is changed, or "bytes"."""
    how: str
    data: Callable[[], bytes]
    may_load: bool = False
    """Whether other numbers fit together: nobody could tell."""
    names: tuple[str, ...] = ()
    """Words of which the message has one."""


def fields(value: object, path: tuple = ()) -> Iterator[tuple]:
    """Paths of all fields of a JSON value; of a list the first and the last."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in items:
        if isinstance(value, dict) or key in (0, len(value) - 1):
            yield (*path, key)
            yield from fields(one, (*path, key))


def at(record: dict, path: tuple) -> object:
    for key in path:
        record = record[key]
    return record


POISON = [
    None, True, -1, 0, 1, 0.5, -0.5, 2**31 - 1, 2**31, 2**63, 10**400, 1e308, "x", "", "9", "../../etc/passwd", "a\nb\x1b[31m",
    [], [1], {}, {"a": {"b": []}}, [[0, 2**31 - 1]],
]  # fmt: skip
RAW = {"NaN": "NaN", "infinity": "-Infinity", "digits": "9" * 10_000, "overflow": "1e999", "surrogate": '"\\ud800"',
       "nested": "[" * 100_000 + "]" * 100_000, "wide": '"' + "w" * LARGEST + '"'}  # fmt: skip
"""JSON that Python's writer would not write."""
PLACE = "LOCRET-PLACE"
NUMBER = r"\d+(\.\d+)?"
FREE = {  # what a file says by itself, so that any value of the kind fits
    r"kit|model\.name|document\.title|document\.names\.model|counters\.decoding": lambda x: isinstance(x, str),
    r"model\.(name|revision)|document\.share|settings\.(share|decode_every|backend|protect|kv_bits|store_bits)": lambda x: (
        x is None
    ),
    r"document\.sha256": lambda x: x is None,  # where the text is missing
    r"document": lambda x: isinstance(x, dict),  # of a cache that is loaded without
    r"document\.names": lambda x: x == {},
    r"document\.chat": lambda x: x is True or x is False,
    r"document\.(open|before)": lambda x: isinstance(x, str),
    r"document\.done": lambda x: type(x) is int and x >= 0,
    r"counters\.(evictions|evicted_rows|computed_pairs|dense_pairs)": lambda x: type(x) is int and x >= 0,
    r"settings\.seed|layers\.\d+\.(evictions|since_eviction)": lambda x: x in (0, 1),
    r"settings\.seed": lambda x: x == 2**31 - 1 or x == 2**31,
    r"counters\.\w+_s|layers\.\d+\.scaling": lambda x: type(x) in (int, float) and x >= 0,
    r"document\.share": lambda x: x in (0.5, 1, None),
    r"settings\.share": lambda x: x == 0.5 or type(x) is float,
    r"prompt_length|settings\.(budget|chunk|local_len|stabilizers|decode_every)": lambda x: (
        type(x) is int and 0 <= x < 2**31
    ),
    r"settings\.one_shot": lambda x: type(x) is bool,
    r"pins|pins\.0\.\d": lambda x: x in ([], [[0, 2**31 - 1]], 0, 1),
    r"model\.revision": lambda x: isinstance(x, str),
    r"ropes|prompt_length|heads|pool|settings\.(positions|share)": lambda x: x is None,
}
"""Fields whose value may be another one, and which ones. All others are compared with what is at hand, with tensors or with
each other; values of another type are refused everywhere."""


def may_load(path: tuple, value: object) -> bool:
    name = ".".join(map(str, path))
    return any(re.fullmatch(pattern, name) and fits(value) for pattern, fits in FREE.items())


def changed_fields(name: str) -> Iterator[Mutant]:
    body = Body.of(base(name))
    for path in fields(body.record):
        yield from changed_field(name, body, path)
    for again in (False, True):
        new = Body({**body.record, "unknown_field": 1}, body.tensors)
        yield Mutant(
            name, "unknown_field", f"again={again}", partial(new.file, again=again), names=("digest", "unknown")
        )


def changed_field(name: str, body: Body, path: tuple) -> Iterator[Mutant]:
    label, old, own = ".".join(map(str, path)), at(body.record, path), path != ("digest",)
    words = tuple(str(key) for key in path if isinstance(key, str))

    def mutant(how: str, change: Callable[[dict | list, object], object], *, again: bool, fits: bool = False,
               text: Callable[[str], str] = str, names: tuple = words) -> Mutant:  # fmt: skip
        def data() -> bytes:
            new = Body(deepcopy(body.record), body.tensors)
            change(at(new.record, path[:-1]), path[-1])
            return new.file(again=again, text=text)

        return Mutant(
            name,
            label,
            f"{how}, again={again}",
            data,
            fits and again,
            names if again or not names else ("digest", *words),
        )

    def put(value: object) -> Callable[[dict | list, object], object]:
        return lambda where, key: where.__setitem__(key, value)

    for again in (False, True)[: 1 + own]:
        for value in POISON:
            if value != old or type(value) is not type(old):
                yield mutant(f"{value!r:.40}", put(value), again=again, fits=may_load(path, value))
        fits = label in ("document.names.model", "pins.0")
        yield mutant("missing", lambda where, key: where.pop(key), again=again, fits=fits)
    for how, text in RAW.items():
        yield mutant(
            how, put(PLACE), again=own, names=(), text=lambda made, text=text: made.replace(f'"{PLACE}"', text)
        )
    if isinstance(path[-1], str):
        pair = f'"{path[-1]}": {json.dumps(old)}'
        twice = partial(body.file, text=lambda made: made.replace(pair, f"{pair}, {pair}"))
        yield Mutant(name, label, "twice", twice, names=("twice",))
    if isinstance(old, dict):
        yield mutant("an unknown field", lambda where, key: where[key].__setitem__("unknown_field", 1), again=True)


def changed_tensors(name: str) -> Iterator[Mutant]:
    body = Body.of(base(name))
    for key, tensor in body.tensors.items():
        last, fits = (
            key.split(".")[-1],
            key.endswith(("state.sketch", "state.attention", "reread_positions")),
        )  # made anew where there is none, of any length; without passages, the file is that of a first reading
        others = [
            other for other, one in body.tensors.items() if (one.dtype, one.shape) != (tensor.dtype, tensor.shape)
        ]
        twin = [other for other, one in body.tensors.items() if (one.dtype, one.shape) == (tensor.dtype, tensor.shape)]
        new: dict[str, torch.Tensor | None] = {
            "missing": None,
            "retyped": tensor.to(torch.float16 if tensor.dtype != torch.float16 else torch.float32),
            "as bytes": tensor.contiguous().flatten().view(torch.uint8),
            "flat": tensor.reshape(1, -1) if tensor.dim() == 1 else tensor.flatten(),
            "cut": tensor[..., :-1].contiguous(),
            "empty": tensor.new_empty(0),
            "a number": tensor.new_zeros(()),
            "an axis more": tensor[None],
        }
        if others:
            new["swapped"] = body.tensors[others[len(key) % len(others)]]
        if last in ("positions", "group", "lengths", "ids", "reread_positions"):
            low, high = tensor.clone(), tensor.clone()
            low.view(-1)[-1], high.view(-1)[-1] = -2, 2**31 - 1 if tensor.dtype != torch.int16 else 2**15 - 1
            new |= {"below": low, "above": high}
        if last in ("positions", "reread_positions"):
            new["backwards"] = tensor.flip(-1)
        if last in FINITE and tensor.numel():
            new["not finite"] = tensor.clone()
            new["not finite"].view(-1)[0] = float("nan")
        for how, changed in new.items():
            tensors = {n: x for n, x in body.tensors.items() if n != key} | ({} if changed is None else {key: changed})
            resized = (
                changed is not None and changed.dim() and changed.shape[:-1] == tensor.shape[:-1]
            )  # any length fits
            for again in (False, True):
                yield Mutant(name, key, f"{how}, again={again}", partial(Body(body.record, tensors).file, again=again),
                             again and fits and (how == "missing" or bool(resized and last in ("sketch", "attention"))),
                             names=(*key.split("."), "hash", "document") if again else ("digest", last))  # fmt: skip
        bits = tensor.clone().contiguous()
        if bits.numel():
            flat = bits.view(torch.uint8).view(-1)
            flat[len(flat) // 2] ^= 1
            yield Mutant(
                name, key, "one bit", partial(Body(body.record, {**body.tensors, key: bits}).file, again=False)
            )
        other = next((other for other in twin if not torch.equal(body.tensors[other], tensor)), None)
        if other is not None:
            swapped = {**body.tensors, key: body.tensors[other], other: tensor}
            yield Mutant(name, key, "swapped with its like", partial(Body(body.record, swapped).file, again=False))
        renamed = {n if n != key else f"{key}x": x for n, x in body.tensors.items()}
        yield Mutant(name, key, "renamed", Body(body.record, renamed).file, names=key.replace(".", " ").split())
    more = {**body.tensors, "layers.99.keys": torch.zeros(3), "state": torch.zeros(0, 2**40)}
    yield Mutant(name, "tensors", "two more", Body(body.record, more).file, names=("no such tensor",))


class Harmful:
    """Runs code where a file is unpickled."""

    ran = False

    def __reduce__(self) -> tuple:
        return exec, ("import test_saved_faults; test_saved_faults.Harmful.ran = True",)


def changed_bytes(name: str, random: random.Random) -> Iterator[Mutant]:
    data = base(name)
    size = int.from_bytes(data[:8], "little")
    body, header = Body.of(data), json.loads(data[8 : 8 + size])

    def headed(text: str | bytes, rest: bytes = data[8 + size :]) -> bytes:
        text = text if isinstance(text, bytes) else text.encode()
        return len(text).to_bytes(8, "little") + text + rest

    made = {f"cut at {n}": data[:n] for n in (0, 1, 7, 8, 9, size // 2, size + 7, size + 8, size + 9, len(data) - 1)}
    made |= {f"cut at {n}": data[:n] for n in (random.randrange(len(data)) for _ in range(6))}
    for n in (0, 1, size - 1, size + 1, LARGEST, LARGEST + 1, 2**31, 2**32, 2**62, 2**63, 2**64 - 1):
        made[f"a header of {n} bytes"] = n.to_bytes(8, "little") + data[8:]
    for _ in range(6):
        n = random.randrange(len(data))
        made[f"a bit at {n}"] = data[:n] + bytes([data[n] ^ 1 << random.randrange(8)]) + data[n + 1 :]
    first = next(key for key in header if key != "__metadata__")
    for what, value in {
        "dtype": "F99", "shape": [2**62, 4], "data_offsets": [0, 2**63], "no offsets": None,
        "negative": [-1, 8], "turned": [8, 0],
    }.items():  # fmt: skip
        key = what if what in ("dtype", "shape") else "data_offsets"
        made[f"header: {what}"] = headed(json.dumps({**header, first: {**header[first], key: value}}))
    record = header["__metadata__"]["locret_kit"]
    made |= {
        "longer": data + b"\0" * 64,
        "empty": b"",
        "an empty header": headed("{}", b""),
        "a list": headed("[]"),
        "no UTF-8": headed(b'{"a": "\xff\xfe"}'),
        "UTF-16": headed(json.dumps(header).encode("utf-16")),
        "nested": headed("[" * 200_000),
        "nested objects": headed('{"a":' * 100_000),
        "many objects": headed('{"__metadata__":{"locret_kit":"[' + "{}," * (LARGEST // 4) + '{}]"}}'),
        "many lists": headed('{"a":[' + "[]," * (LARGEST // 4) + "[]]}"),
        "twice": headed(json.dumps(header)[:-1] + ', "__metadata__": ' + json.dumps(header["__metadata__"]) + "}"),
        "more metadata": headed(json.dumps({**header, "__metadata__": {"locret_kit": record, "format": "pt"}})),
        "metadata without text": headed(json.dumps({**header, "__metadata__": {"locret_kit": 1}})),
        "a record of text": headed(json.dumps({**header, "__metadata__": {"locret_kit": '"x"'}})),
        "foreign": save_tensors({"weight": torch.zeros(4)}, {"format": "pt"}),
        "foreign without metadata": save_tensors(body.tensors),
        "a pickle": pickle.dumps(Harmful()),
        "noise": random.randbytes(4096),
    }
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("archive/data.pkl", pickle.dumps(Harmful()))
    made["a zip"] = archive.getvalue()
    return (Mutant(name, "bytes", how, lambda file=file: file) for how, file in made.items() if file != data)


def no_files(folder: Path) -> dict[str, Path]:
    """Paths of what is no file."""
    import os

    (folder / "folder").mkdir()
    os.mkfifo(folder / "pipe")
    return {"folder": folder / "folder", "pipe": folder / "pipe", "device": Path("/dev/zero"), "none": folder / "none"}


@cache
def mutants() -> list[Mutant]:
    """Every field and every tensor of every base changed at least once, and as many more by lot as make ``MUTANTS``."""
    lot = random.Random(SEED)
    every = [m for name in BASES for m in (*changed_fields(name), *changed_tensors(name), *changed_bytes(name, lot))]
    every.sort(key=lambda mutant: hashlib.sha256(f"{SEED} {mutant.base} {mutant.what} {mutant.how}".encode()).digest())
    picked: dict[tuple[str, str], Mutant] = {}
    for mutant in every:
        picked.setdefault((mutant.base if mutant.what == "bytes" else "", mutant.what), mutant)
    chosen = list(picked.values())
    taken = {id(mutant) for mutant in chosen}
    return chosen + [mutant for mutant in every if id(mutant) not in taken][: max(0, MUTANTS - len(chosen))]


# ---- what becomes of them ----------------------------------------------------------------------------------------------


class Watch:
    """Events of the interpreter while ``on``: files opened, modules imported, code executed, processes started."""

    KINDS = (
        "open",
        "import",
        "exec",
        "compile",
        "os.system",
        "subprocess.Popen",
        "pickle.find_class",
        "socket.connect",
    )

    def __init__(self) -> None:
        self.on, self.seen = False, []
        sys.addaudithook(self)  # cannot be taken away; it does nothing while not on

    def __call__(self, event: str, args: tuple) -> None:
        if self.on and event in self.KINDS:
            self.seen.append((event, str(args[0])))


def peak_rss() -> int:
    """Bytes of the process's memory at their largest since the last call."""
    status = Path("/proc/self/status").read_text()
    Path("/proc/self/clear_refs").write_text("5")
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) << 10


def test_the_program_covers_every_field_and_tensor():
    changed = {(mutant.base, mutant.what) for mutant in mutants()}
    whats = {what for _, what in changed}
    assert len(mutants()) == MUTANTS
    for name in BASES:
        body = Body.of(base(name))
        assert {".".join(map(str, path)) for path in fields(body.record)} | body.tensors.keys() <= whats
        assert (name, "bytes") in changed
    assert any(mutant.may_load for mutant in mutants())


def test_mutants_are_refused_in_one_line_and_cost_nothing(tmp_path, capsys):
    watch = Watch()
    for name in BASES:  # imports what loading imports
        path = tmp_path / "whole.locret"
        path.write_bytes(base(name))
        load(name, path)
    before, loaded, peaks = peak_rss(), 0, []
    for number, mutant in enumerate(mutants()):
        path = tmp_path / f"mutant{number}.locret"
        path.write_bytes(mutant.data())
        size = path.stat().st_size
        capsys.readouterr()
        where = f"{mutant.base}: {mutant.what}: {mutant.how}"

        @command("locret")
        def main(mutant: Mutant = mutant, path: Path = path) -> int:
            watch.seen, watch.on = [], True
            try:
                with LiveBytes() as bytes_alive:
                    load(mutant.base, path)
            finally:
                watch.on, peaks[-1] = False, bytes_alive.peak
            return 0

        peaks.append(0)
        status = main()
        assert peaks[-1] <= HONEST + 4 * size, where
        out, err = capsys.readouterr()
        assert all(event == "open" and seen == str(path) for event, seen in watch.seen), (where, watch.seen)
        path.unlink()
        if status == 0:
            assert mutant.may_load and not err, where
            loaded += 1
            continue
        assert status == 1 and not out and err.count("\n") == 1 and len(err) < 700, (where, err)
        assert str(path) in err and err[:-1].isprintable(), (where, err)
        said = err.replace(str(path), "")
        assert mutant.may_load or not mutant.names or any(word in said for word in mutant.names), (where, err)
    assert not Harmful.ran and loaded < MUTANTS // 10
    assert peak_rss() - before < 200 << 20


def test_what_is_no_file_is_refused(tmp_path):
    for what, path in no_files(tmp_path).items():
        with pytest.raises((ValueError, OSError), match=re.escape(str(path))) as error:
            load("plain", path)
        assert "\n" not in str(error.value), what


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


def written(tmp_path: Path, name: str) -> Path:
    path = tmp_path / "text.locret"
    path.write_bytes(base(name))
    return path


def test_another_model_tokenizer_or_heads_are_refused_with_the_first_difference(tmp_path):
    model, tokenizer, heads = parts("llama")
    path = written(tmp_path, "bits")
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
    others |= {
        "tokenizer.template": (model, template, heads),
        "tokenizer.vocabulary": (model, words, heads),
    }
    for said, (other, tokens, own) in others.items():
        with pytest.raises(ValueError, match=said):
            Document.load(path, other, tokens, own)
    with pytest.raises(ValueError, match="parts.score: .* in the file, .* here"):
        Document.load(path, model, tokenizer, heads, policy="h2o")
    again = tiny_model("llama", vocab_size=400).double()  # the same by content
    assert Document.load(path, again, tokenizer, heads).tokens


def test_another_factor_of_longrope_is_refused(tmp_path):
    """64 tokens and more are rotated by the long factors; a file that says so of the short ones is refused, and so is one
    whose prompt's length asks for others."""
    model, tokenizer = tiny_model("phi3-longrope", vocab_size=400).double(), tiny_tokenizer()
    document = Document.read(model, tokenizer, text_of(WORDS), 96, "h2o", chunk=32, positions="original")
    document.save(tmp_path / "long.locret")
    assert Document.load(tmp_path / "long.locret", model, tokenizer).tokens == document.tokens
    body = Body.of((tmp_path / "long.locret").read_bytes())
    rope = body.record["ropes"][0]
    changes = [
        ("ropes\\[0\\].inv_freq\\[1\\]", lambda record: rope["inv_freq"].__setitem__(1, rope["inv_freq"][1] * 1.1)),
        ("ropes\\[0\\].scaling", lambda record: rope.__setitem__("scaling", 1.5)),
        ("ropes\\[0\\]", lambda record: record.__setitem__("prompt_length", 40)),
    ]
    for said, change in changes:
        new = Body(deepcopy(body.record), body.tensors)
        rope = new.record["ropes"][0]
        change(new.record)
        (tmp_path / "mutant.locret").write_bytes(new.file())
        with pytest.raises(ValueError, match=said):
            Document.load(tmp_path / "mutant.locret", model, tokenizer)
