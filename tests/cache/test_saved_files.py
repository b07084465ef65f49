"""Files of documents and caches between processes: whole after a kill and a full disk, exact in another process, small."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from forked import start, status_of
from policy_runs import answer, tokens
from read_texts import QUESTIONS, SETTINGS, heads_for, kept, load, parts, read, text_of, told
from tiny_models import tiny_model
from tiny_tokenizer import tiny_tokenizer

from locret_kit import BoundedCache, Document, attach, files
from locret_kit.backbones.libraries import CACHE
from locret_kit.cache import file
from locret_kit.cache.restore import DTYPES
from locret_kit.cache.saved import CacheFile, load_cache, save_cache
from locret_kit.files import write_text
from locret_kit.runtime.session import prefill

STORAGES = {
    "plain": ("h2o", {}),
    "ragged": ("ada-locret", {}),
    "8 bits": ("h2o", dict(kv_bits=8)),
    "4 bits": ("locret", dict(kv_bits=4)),
    "2 bits": ("snapkv(6,3)", dict(kv_bits=2)),
}
HERE = Path(__file__).parent


ASKING = """
import json, sys
from read_texts import load, told
found = [told(load(path, policy, family)) for family, policy, path in json.loads(sys.argv[1])]
json.dump(found, open(sys.argv[2], "w"))
"""


def test_another_process_answers_exactly_alike(tmp_path):
    """One policy a storage, the families in turn."""
    cases, expected = [], []
    for number, (policy, settings) in enumerate(STORAGES.values()):
        family = ("llama", "gemma3")[number % 2]
        document = read(family, policy, text_of(260), **SETTINGS, **settings)
        document.save(tmp_path / f"{number}.locret")
        cases.append((family, policy, str(tmp_path / f"{number}.locret")))
        expected.append(told(document))
    paths = os.pathsep.join([str(HERE), *filter(None, sys.path)])
    command = [sys.executable, "-c", ASKING, json.dumps(cases), tmp_path / "found.json"]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, check=True)
    assert json.loads((tmp_path / "found.json").read_text()) == expected


@pytest.mark.skipif(os.name != "posix", reason="forks and signals")
@pytest.mark.parametrize(("owner", "call"), [(Path, "write_bytes"), (os, "replace")])
def test_a_kill_while_saving_leaves_a_whole_file(owner, call, tmp_path):
    """In the middle of its bytes, and before it gets its name; the next save takes the leftovers away."""
    path = tmp_path / "text.locret"
    document = read("llama", "h2o", text_of(), **SETTINGS)
    document.save(path)
    before = path.read_bytes()

    def killed(beside: Path, *given: object) -> None:
        if call == "write_bytes":
            with beside.open("wb") as file:
                file.write(given[0][: len(given[0]) // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    def save() -> int:
        document.title += "x"
        setattr(owner, call, killed)  # in this process alone
        document.save(path)
        return 0

    assert status_of(start(save, tmp_path / "log")) == -signal.SIGKILL
    (left,) = tmp_path.glob(".*.partial")
    assert path.read_bytes() == before and 0 < left.stat().st_size < 2 * len(before)
    document.save(path)
    assert {one.name for one in tmp_path.iterdir()} == {path.name, "log"}


def test_leftovers_of_this_machine_go_and_those_of_others_stay(tmp_path, monkeypatch):
    """Containers of one host name have process numbers of their own."""
    monkeypatch.setattr("socket.gethostname", lambda: "node")
    monkeypatch.setattr("locret_kit.files._running", lambda pid: pid == 7)
    here = files._place()
    assert re.fullmatch("node-[0-9a-f]{8}", here)
    other = here.replace("node-", "node-2-"), here[:-1] + ("0" if here[-1] != "0" else "1")
    owners = (f"{here}-8", f"{other[0]}-9", f"{here}-7", *(f"{owner}-8" for owner in other), "node-8", "node-x")
    names = [f".a.locret.0123abcd.{owner}.partial" for owner in owners]
    for name in names:
        (tmp_path / name).touch()
    names.append(".film.iso.partial")  # of another program
    for name in (names[1], names[-1]):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (0, 0))
    write_text(tmp_path / "b", "words")
    assert {path.name for path in tmp_path.iterdir()} == {"b", *names[2:]}


def test_a_file_may_have_the_longest_name_that_there_is(tmp_path):
    path = tmp_path / (124 * "\u00e9" + ".locret")  # 255 bytes
    write_text(path, "words")
    assert path.read_text() == "words" and [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("mode", [0o400, 0o600, 0o664])
def test_a_file_keeps_the_mode_that_its_owner_gave_it(mode, tmp_path):
    path = tmp_path / "a.locret"
    write_text(path, "words")
    path.chmod(mode)
    write_text(path, "others")
    assert (path.stat().st_mode & 0o777, path.read_text()) == (mode, "others")


def test_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch):
    """Half of the bytes are written, then none."""
    path = tmp_path / "text.locret"
    document = read("llama", "h2o", text_of(), **SETTINGS)
    document.save(path)
    before = path.read_bytes()

    def full(target: Path, data: bytes) -> None:
        with target.open("wb") as file:
            file.write(data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match=rf"cannot write {path} \(.* MiB free\): No space left") as error:
        document.save(path)
    assert "\n" not in str(error.value)
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("storage", STORAGES)
def test_a_file_is_little_more_than_its_cache(storage, tmp_path):
    """At most 1.1 times the bytes of the cache's buffers, of a text that fills them, and the ids; as it says beforehand."""
    policy, settings = STORAGES[storage]
    document = read("gemma3", policy, text_of(900), **{**SETTINGS, "budget": 256}, **settings)
    document.save(tmp_path / "text.locret")
    ids, held = 4 * document.tokens, (tmp_path / "text.locret").stat().st_size
    assert held <= 1.1 * document.cache.nbytes + ids
    assert held <= document.as_file().nbytes <= held + 200 * len(document.as_file().tensors)


@pytest.mark.parametrize("storage", STORAGES)
def test_a_loaded_file_is_saved_as_it_was(storage, tmp_path, monkeypatch):
    policy, settings = STORAGES[storage]
    monkeypatch.setattr(time, "gmtime", lambda: time.struct_time((2026, 1, 2, 3, 4, 5, 0, 0, 0)))
    document = read("gemma3", policy, text_of(), **SETTINGS, **settings)
    text = settings.get("kv_bits") != 8
    document.save(tmp_path / "a.locret", text=text)
    loaded = load(tmp_path / "a.locret", policy, "gemma3")
    loaded.save(tmp_path / "b.locret", text=text)
    loaded.save(tmp_path / "a.locret", text=text)  # over itself
    assert (tmp_path / "a.locret").read_bytes() == (tmp_path / "b.locret").read_bytes()
    assert told(loaded) == told(load(tmp_path / "b.locret", policy, "gemma3"))


SHAPES: dict[str, tuple[str, dict[str, object], dict[str, tuple[int, ...]]]] = {
    "plain": ("h2o", {}, {"keys": (1, 2), "positions": (1, 2), "stats": (1, 1, 2)}),
    "queries": ("snapkv(6,3)", {}, {"queries": (1, 6, 6, 8), "scores": (1, 2)}),
    "ragged": ("ada-snapkv(6,3)", {}, {"keys": (96, 8), "lengths": (2,), "queries": (1, 6, 6, 8)}),
    "8 bits": ("locret", dict(kv_bits=8), {"key_codes": (1, 2), "key_step": (1, 2)}),
    "4 bits": (
        "locret",
        dict(kv_bits=4),
        {"key_codes": (1, 2), "group": (1, 2), "key_step": (1, 2), "tail_keys": (1, 2)},
    ),
    "recall": (
        "locret recall=blocks(size=4)",
        {},
        {"keys": (1, 2, 48, 8), "store.held": (1, 2), "store.index": (1, 2)},
    ),
    "state": ("expected-attention", {}, {"values": (1, 2), "state.count": (1,), "state.mean": (1, 6, 8)}),
}
"""Policy and settings, and how shapes of tensors begin in files of version 1: 2 heads, 6 query heads, 8 channels, 48 slots."""


@pytest.mark.parametrize("case", SHAPES)
def test_a_file_has_an_axis_of_one_text(case):
    """As every file of version 1 has it, whatever shape the layers hold, so that files of earlier kits are read."""
    policy, settings, expected = SHAPES[case]
    tensors = CacheFile.of(read("llama", policy, text_of(260), **SETTINGS, **settings).cache).tensors
    assert {name: tuple(tensors[f"layers.1.{name}"].shape)[: len(x)] for name, x in expected.items()} == expected


# ---- other dtypes and devices ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "narrow", "wide"),
    [
        ("h2o", "bfloat16", "float32"), ("locret", "float32", "float64"), ("sirllm", "bfloat16", "float32"),
        ("expected-attention(future=9)", "float32", "float64"), ("compactor(block=8)", "bfloat16", "float32"),
    ],
)  # fmt: skip
def test_rows_of_a_narrower_dtype_are_taken_where_that_is_asked(policy, narrow, wide, tmp_path):
    """A wider file is always refused: its rows would be rounded."""
    tokenizer, heads = tiny_tokenizer(), heads_for(policy)
    models, paths = {}, {}
    for name in (narrow, wide):
        model = models[name] = tiny_model("llama", vocab_size=400).to(DTYPES[name])
        # Frequencies stay in float32, as from_pretrained leaves them.
        model.model.rotary_emb = tiny_model("llama", vocab_size=400).model.rotary_emb
        document = Document.read(model, tokenizer, text_of(), 48, policy, heads, chunk=64)
        document.save(paths.setdefault(name, tmp_path / name))
    with pytest.raises(ValueError, match=f"dtype: {narrow} in the file, {wide} here: --force takes"):
        Document.load(paths[narrow], models[wide], tokenizer, heads)
    loaded = Document.load(paths[narrow], models[wide], tokenizer, heads, force=True)
    rows = Document.load(paths[narrow], models[narrow], tokenizer, heads).cache
    for mine, theirs in zip(loaded.cache.bounded, rows.bounded, strict=True):
        for name in ("keys", "values", "scores", "positions"):
            assert torch.equal(mine.slots(name).double(), theirs.slots(name).double())
        assert mine.codec.keys.dtype == DTYPES[wide]
    assert str(loaded.ask(QUESTIONS[0], max_new_tokens=4)) is not None
    for force in (False, True):
        with pytest.raises(ValueError, match=f"dtype: {wide} in the file, {narrow} here$"):
            Document.load(paths[wide], models[narrow], tokenizer, heads, force=force)


def test_a_model_without_its_weights_is_refused(tmp_path):
    document = read("llama", "h2o", text_of(), **SETTINGS)
    document.save(tmp_path / "text.locret")
    model = tiny_model("llama", vocab_size=400).double().to("meta")
    with pytest.raises(ValueError, match="put off their device have no fingerprint: load the model without offload"):
        Document.load(tmp_path / "text.locret", model, tiny_tokenizer())


@pytest.mark.parametrize(("policy", "kv_bits"), [("full", 4), ("streaming", None)])
def test_a_cache_is_saved_after_an_answer_and_after_a_reset(policy, kv_bits, tmp_path):
    """Also where the answer's rows have outgrown the prompt's room."""
    model, path = parts()[0], tmp_path / "cache.locret"
    cache = BoundedCache(64, policy, chunk=32, kv_bits=kv_bits, prompt_length=100)
    answer(cache, tokens(100), 40, model)
    with attach(model), torch.no_grad():
        save_cache(cache, path)
        loaded = load_cache(path, model)
        outs = [model(input_ids=torch.tensor([[7]]), **{CACHE: one}).logits for one in (cache, loaded)]
    assert torch.equal(*outs) and kept(cache) == kept(loaded)
    cache.reset(100)
    save_cache(cache, path)
    assert load_cache(path, model).get_seq_length() == 0


@pytest.mark.parametrize("policy", ["h2o", "streaming", "kvcrush(base=scissorhands)"])
def test_a_fork_that_sums_up_attention_is_saved_without_the_sums(policy, tmp_path):
    model, path = parts()[0], tmp_path / "cache.locret"
    cache = BoundedCache(48, policy, chunk=32, local_len=4)
    prefill(model, tokens(64), cache)
    fork = cache.fork(100, evidence=True)
    answer(fork, tokens(100), 9, model)
    save_cache(fork, path)
    loaded = load_cache(path, model)
    with attach(model), torch.no_grad():
        outs = [model(input_ids=torch.tensor([tokens(40)]), **{CACHE: one}).logits for one in (fork, loaded)]
    assert torch.equal(*outs) and kept(fork) == kept(loaded)


def test_tokens_that_are_no_longer_protected_stay_so(tmp_path):
    model, path = parts()[0], tmp_path / "cache.locret"
    cache = BoundedCache(64, "streaming", chunk=32, protect="first")
    prefill(model, tokens(40), cache)
    cache.unpin(0, 3)
    save_cache(cache, path)
    assert load_cache(path, model).pins == cache.pins == ((3, 4),)


def test_a_file_that_is_replaced_while_it_is_read_is_read_again(tmp_path, monkeypatch):
    """A writer comes between the header and the tensors."""
    path, model = tmp_path / "a.locret", parts("llama")
    old, new = (read("llama", "h2o", text_of(words)) for words in (120, 300))
    old.save(path)
    opened, real = [], file.safe_open

    def late(*given, **options):
        if not opened:
            opened.append(new.save(path))
        return real(*given, **options)

    monkeypatch.setattr(file, "safe_open", late)
    assert Document.load(path, *model[:2]).ids == new.ids and opened


def test_two_writers_of_one_file_notice_each_other(tmp_path):
    path, (model, tokenizer, _) = tmp_path / "a.locret", parts("llama")
    read("llama", "h2o", text_of(120)).save(path)
    one, two = (Document.load(path, model, tokenizer) for _ in range(2))
    for number in range(2):  # one alone may go on as often as it likes
        one.append(f" first {number}")
        one.save(path)
    two.append(" second")
    with pytest.raises(OSError, match="somebody else has written it since it was loaded: load it again"):
        two.save(path)
    assert Document.load(path, model, tokenizer).ids == one.ids
    with pytest.raises(OSError, match="it is there already"):
        two.save(path, replace=False)
    two.save(tmp_path / "b.locret")
    assert not list(tmp_path.glob(".*.partial"))


def test_float16_knows_its_own_files(tmp_path):
    """The heads are cast to the model's float16, which rounds otherwise than the bfloat16 of fingerprints."""
    model, tokenizer, heads = parts("llama")
    model, held, again = deepcopy(model).half(), deepcopy(heads), deepcopy(heads)
    document = Document.read(model, tokenizer, text_of(120), 64, "locret", held, chunk=32, stabilizers=8, local_len=8)
    document.save(tmp_path / "a.locret")
    assert next(held.parameters()).dtype == torch.float16
    assert Document.load(tmp_path / "a.locret", model, tokenizer, again).ids == document.ids
    other = deepcopy(heads)
    with torch.no_grad():
        next(other.parameters()).mul_(1.5)
    with pytest.raises(ValueError, match="heads: "):
        Document.load(tmp_path / "a.locret", model, tokenizer, other)
