"""Heads on disk: round trips, and every way a file can be wrong, half-written or hostile."""

import errno
import json
import os
import pickle
from contextlib import nullcontext
from dataclasses import asdict, replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_disk import file_limit
from transformers import AutoConfig

from locret_kit import HeadsConfig, RetainingHeads, files
from locret_kit.backbones.spec import AttentionLayer, BackboneSpec, spec_of
from locret_kit.heads import PUBLISHED, state_of

SPEC = BackboneSpec("llama", tuple(AttentionLayer(4, 2, 8, 8, index=i) for i in range(2)), "silu")
CONFIG = HeadsConfig.for_backbone(SPEC, "some/backbone", 16, target="log_prob", inference={"budget": 64})


def make(seed: int = 0, config: HeadsConfig = CONFIG) -> RetainingHeads:
    torch.manual_seed(seed)
    return RetainingHeads(config)


def equal(a: RetainingHeads, b: RetainingHeads) -> bool:
    mine, theirs = a.state_dict(), b.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in mine)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["heads", "heads.pt", "locret.bin"])
def test_round_trip(tmp_path, dtype, name):
    heads, target = make(), tmp_path / name
    if name.endswith(".bin"):  # the published format: a flat state dict that says nothing of its backbone
        torch.save(state_of(heads, dtype), target)
        with pytest.raises(ValueError, match="does not name its backbone"):
            RetainingHeads.from_pretrained(target)
        (tmp_path / "config.json").write_text(json.dumps(asdict(CONFIG)))
        back = RetainingHeads.from_pretrained(target)
    else:
        heads.save_pretrained(target, dtype)
        back = RetainingHeads.from_pretrained(str(target))
    assert back.config == CONFIG
    assert equal(back, heads.to(dtype).float())
    assert [p.name for p in tmp_path.rglob(".*")] == []


def test_an_activation_that_has_weights_and_buffers(tmp_path):
    """xIELU, of Apertus: files hold its weights alone, and nothing of it is rounded."""
    heads = make(config=replace(CONFIG, activation="xielu"))
    heads.save_pretrained(tmp_path)
    assert equal(back := RetainingHeads.from_pretrained(tmp_path), heads)
    assert {x.dtype for x in back.state_dict().values()} == {torch.float32}


@pytest.mark.parametrize("name", ["heads.pt", "model.safetensors"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_truncated(tmp_path, name, share):
    target = tmp_path / (name if name.endswith(".pt") else "h")
    make().save_pretrained(target)
    file = target if target.is_file() else target / name
    file.write_bytes(file.read_bytes()[: int(share * file.stat().st_size)])
    with pytest.raises(ValueError, match="truncated") as caught:
        RetainingHeads.from_pretrained(target)
    assert str(file) in str(caught.value)


class Payload:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


@pytest.mark.filterwarnings("ignore:.*weights_only")
@pytest.mark.filterwarnings("ignore:Detected pickle")
@pytest.mark.parametrize("raw", [False, True])
def test_a_malicious_pickle_does_not_run(tmp_path, raw):
    proof, target = tmp_path / "ran", tmp_path / "heads.pt"
    hostile = {"model.layers.0.self_attn.fc1.weight": Payload(f"touch {proof}")}
    if raw:
        target.write_bytes(pickle.dumps(hostile))
    else:
        torch.save(hostile, target)
    with pytest.raises(ValueError, match="cannot be read safely"):
        RetainingHeads.from_pretrained(target)
    assert not proof.exists()


@pytest.mark.parametrize("kind", [".pt", ""])
def test_every_wrong_head_is_named(tmp_path, kind):
    state = state_of(make(), torch.float32)
    del state["model.layers.0.self_attn.fc2.weight"]
    state["model.layers.7.self_attn.fc1.weight"] = torch.zeros(1)
    state["model.layers.1.self_attn.fc1.weight"] = torch.zeros(16, 5)
    state["model.layers.1.self_attn.fc2.weight"][0, 3] = float("nan")
    target = tmp_path / f"heads{kind}"
    if kind:
        torch.save({"config": asdict(CONFIG), "state": state}, target)
    else:
        target.mkdir()
        save_file(state, target / "model.safetensors")
        (target / "config.json").write_text(json.dumps(asdict(CONFIG)))
    with pytest.raises(ValueError) as caught:
        RetainingHeads.from_pretrained(target)
    for words in (
        "layers.0.self_attn.fc2.weight is missing",
        "layers.7.self_attn.fc1.weight is not expected",
        "layers.1.self_attn.fc1.weight is (16, 5), expected (16, 64)",
        "layers.1.self_attn.fc2.weight is not finite",
    ):
        assert words in str(caught.value)


STATE, FC1 = state_of(make(), torch.float32), "model.layers.1.self_attn.fc1.weight"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([1, 2], "not a heads checkpoint"),
        ({"config": {**asdict(CONFIG), "colour": 1}, "state": {}}, "unknown field .colour."),
        ({"config": {"backbone": "x"}, "state": {}}, "missing"),
        ({"config": {**asdict(CONFIG), "activation": "wiggle"}, "state": STATE}, "wiggle"),
        ({"config": asdict(CONFIG), "state": {"model.layers.0.self_attn.fc1.weight": "text"}}, "heads.pt"),
        ({"config": {**asdict(CONFIG), "n_layers": 10**9}, "state": {}}, "n_layers=1000000000"),
        ({"config": {**asdict(CONFIG), "d_hidden": 10**12}, "state": STATE}, "expected"),
        ({"config": {**asdict(CONFIG), "inference": {"budget": 0}}, "state": {}}, "at least 1"),
        ({"config": asdict(CONFIG), "state": {**STATE, FC1: STATE[FC1].to(torch.int8)}}, rf"{FC1} is torch\.int8, "),
        ({"config": asdict(CONFIG), "state": {**STATE, FC1: STATE[FC1] * 0 + 3e38}}, f"{FC1} .* would overflow"),
    ],
)
def test_a_file_of_something_else(tmp_path, content, words):
    torch.save(content, tmp_path / "heads.pt")
    with pytest.raises(ValueError, match=words):
        RetainingHeads.from_pretrained(tmp_path / "heads.pt")


def test_a_broken_configuration_names_its_file(tmp_path):
    make().save_pretrained(tmp_path / "h")
    for text in ("{", "[]", "[" * 200_000, '{"format": "other"}'):
        (tmp_path / "h" / "config.json").write_text(text)
        with pytest.raises(ValueError, match=r"config\.json"):
            RetainingHeads.from_pretrained(tmp_path / "h")


def test_nothing_there(tmp_path):
    for source in (tmp_path / "no.pt", tmp_path / "no", "./no", "no", "a/b/c"):
        with pytest.raises(FileNotFoundError, match="no such file or folder"):
            RetainingHeads.from_pretrained(source)
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"config\.json and model\.safetensors"):
        RetainingHeads.from_pretrained(tmp_path / "empty")


def test_a_wrong_backbone_is_named_field_by_field():
    wrong = BackboneSpec("qwen3", tuple(AttentionLayer(4, 4, 16, 16, index=i) for i in range(3)), "silu")
    with pytest.raises(ValueError) as caught:
        make().check_backbone(wrong)
    assert str(caught.value) == (
        "these heads are for some/backbone: model_type: heads have llama, the backbone has qwen3; n_layers: heads have 2, "
        "the backbone has 3; n_kv_heads: heads have 2, the backbone has 4; head_dim: heads have 8, the backbone has 16"
    )
    make().check_backbone(SPEC)


# ---- a full disk ------------------------------------------------------------------------------------------------


def full_disk(*args, **kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("name", ["heads", "heads.pt"])
@pytest.mark.parametrize("where", ["replace", "fsync"])
def test_a_full_disk_leaves_the_previous_file(tmp_path, monkeypatch, name, where):
    target = tmp_path / name
    make(0).save_pretrained(target, torch.float32)
    before = sorted(p.name for p in tmp_path.rglob("*"))
    monkeypatch.setattr(os, where, full_disk)
    with pytest.raises(OSError, match=r"cannot write .*MiB free\): No space left on device"):
        make(1).save_pretrained(target, torch.float32)
    monkeypatch.undo()
    assert sorted(p.name for p in tmp_path.rglob("*")) == before
    assert equal(RetainingHeads.from_pretrained(target), make(0))


@pytest.mark.parametrize("name", ["heads", "heads.pt"])
def test_a_real_write_error_is_one_clear_line(tmp_path, name):
    """The writers' own exceptions (PyTorch's is a RuntimeError, safetensors has its own) read as the same one line."""
    target = tmp_path / name
    make(0).save_pretrained(target, torch.float32)
    before = sorted(p.name for p in tmp_path.rglob("*"))
    with file_limit(100_000), pytest.raises(OSError) as error:
        make(1, replace(CONFIG, d_hidden=4096)).save_pretrained(target, torch.float32)
    assert str(error.value).startswith(f"cannot write {tmp_path}") and "\n" not in str(error.value)
    assert sorted(p.name for p in tmp_path.rglob("*")) == before
    assert equal(RetainingHeads.from_pretrained(target), make(0))


def test_a_bare_file_of_weights_takes_its_sizes_from_the_backbone_that_is_named(backbone, tmp_path):
    spec = spec_of(AutoConfig.from_pretrained(backbone))
    heads = RetainingHeads(HeadsConfig.for_backbone(spec, str(backbone), 8, target="log_prob"))
    heads.save_pretrained(tmp_path / "h")
    file = tmp_path / "h" / "model.safetensors"
    read = RetainingHeads.from_pretrained(file, backbone=str(backbone))
    assert read.config == heads.config, "what lies beside it says more"
    (tmp_path / "h" / "config.json").unlink()
    loaded = RetainingHeads.from_pretrained(file, backbone=str(backbone))
    assert equal(loaded, heads) and loaded.config.target == "logit"
    with pytest.raises(ValueError, match="name it"):
        RetainingHeads.from_pretrained(file)


def test_published_heads_are_known_by_name(backbone, tmp_path, monkeypatch):
    """A repository of the authors holds one flat .bin, which says nothing of its backbone or its settings."""
    spec = spec_of(AutoConfig.from_pretrained(backbone))
    heads = RetainingHeads(HeadsConfig.for_backbone(spec, "x", 8))
    torch.save(state_of(heads, torch.float32), tmp_path / "heads.bin")
    monkeypatch.setitem(PUBLISHED, "lab/heads", (str(backbone), {"budget": 60, "chunk": 30}))
    pull = lambda repo, choose, **hub: [tmp_path / choose(["a.md", "heads.bin"])[0]]  # noqa: E731
    monkeypatch.setattr("locret_kit.hub.pull", pull)
    loaded = RetainingHeads.from_pretrained("lab/heads")
    assert equal(loaded, heads)
    assert (loaded.config.backbone, loaded.config.inference) == (str(backbone), {"budget": 60, "chunk": 30})
    with pytest.raises(ValueError, match="name it"):
        RetainingHeads.from_pretrained("lab/unknown")
    for name, settings in PUBLISHED.values():
        HeadsConfig(name, "llama", 1, 1, 1, 8, "silu", 8, inference=settings)


def test_a_pipe_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="cannot write .*pipe: it is no regular file"):
        files.write_beside(tmp_path / "pipe", lambda path: path.write_text("x"))
    assert (tmp_path / "pipe").is_fifo() and len(list(tmp_path.iterdir())) == 1


# ---- faults of a review: pairs cut short, modes, leftovers, weights that score nothing ------------------------------


@pytest.mark.parametrize("renames", range(3))
def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch, renames):
    """A save that ends after none, one or both of its renames. The heads have equal shapes: only the file tells them apart."""
    changed = replace(CONFIG, target="logit")
    make(0).save_pretrained(tmp_path / "h")
    rename, done = os.replace, []

    def killed(*names: object) -> None:
        if len(done) == renames:
            raise KeyboardInterrupt
        done.append(rename(*names))

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt) if renames < 2 else nullcontext():
            make(1, changed).save_pretrained(tmp_path / "h")
    heads = RetainingHeads.from_pretrained(tmp_path / "h")
    assert equal(heads, make(1 if renames else 0)) and heads.config.target == (changed if renames else CONFIG).target


def test_files_of_different_saves_are_noticed(tmp_path):
    """As older releases left them, whose weights do not say what they are."""
    make(0).save_pretrained(tmp_path / "h")
    weights = tmp_path / "h" / "model.safetensors"
    save_file({name: weight + 1 for name, weight in load_file(weights).items()}, weights)
    with pytest.raises(ValueError, match="belong to different saves"):
        RetainingHeads.from_pretrained(tmp_path / "h")


@pytest.mark.skipif(os.name != "posix", reason="signals and modes")
@pytest.mark.parametrize(("mask", "mode"), [(0o077, 0o600), (0o022, 0o644)])
def test_modes_follow_the_umask(tmp_path, mask, mode):
    before = os.umask(mask)
    try:
        make().save_pretrained(tmp_path / "h")
        make().save_pretrained(tmp_path / "h.pt")
    finally:
        os.umask(before)
    for path in (*(tmp_path / "h").iterdir(), tmp_path / "h.pt"):
        assert path.stat().st_mode & 0o777 == mode, path
