"""Where figures come from: hashes of weights, commits, and what rows and reports say of them."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from read_texts import read, text_of

from locret_kernels.provenance import commit, peak_memory
from locret_kit import HeadsConfig, RetainingHeads
from locret_kit.runtime import report
from locret_kit.runtime.report import weights_hash

CONFIG = HeadsConfig("lab/tiny", "llama", 3, 4, 2, 8, "silu", 16)


def make(seed: int = 0, config: HeadsConfig = CONFIG) -> RetainingHeads:
    torch.manual_seed(seed)
    return RetainingHeads(config).requires_grad_(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_hash_is_that_of_the_weights_wherever_they_come_from(tmp_path, dtype):
    heads = make().to(dtype).float()
    heads.save_pretrained(tmp_path / "folder", dtype)
    heads.save_pretrained(tmp_path / "heads.pt", torch.float32)
    found = {weights_hash(RetainingHeads.from_pretrained(str(tmp_path / name))) for name in ("folder", "heads.pt")}
    assert found == {weights_hash(heads)} and len(found.pop()) == 16


def test_a_hash_tells_every_weight_and_its_place():
    hashes = {weights_hash(make()), weights_hash(make(1)), weights_hash(make(config=replace(CONFIG, d_hidden=8)))}
    for layer in range(3):
        for name in ("fc1", "fc2"):
            heads = make()
            getattr(heads[layer], name).weight[0, 0] += 1e-6
            hashes.add(weights_hash(heads))
    swapped = make()
    swapped.layers[0], swapped.layers[1] = swapped.layers[1], swapped.layers[0]
    assert len(hashes | {weights_hash(swapped)}) == 3 + 3 * 2 + 1
    assert weights_hash(make(config=replace(CONFIG, inference={"budget": 7}))) == weights_hash(make())


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    return subprocess.run(["git", "-C", folder, *identity, *words], capture_output=True, text=True, check=True).stdout


def test_a_commit_is_that_of_a_checkout_of_its_own(tmp_path):
    repo = tmp_path / "repo"
    repo.mkdir()
    git(repo, "init", "-q")
    (repo / "file").write_text("1")
    git(repo, "add", "file")
    git(repo, "commit", "-q", "-m", "one", "--no-verify")
    head = git(repo, "rev-parse", "HEAD")[:12]
    git(repo, "tag", "-a", "v1", "-m", "v1")
    commit.cache_clear()
    assert commit(repo) == head
    (repo / "file").write_text("2")
    commit.cache_clear()
    assert commit(repo) == f"{head}-dirty"
    (repo / "site-packages").mkdir()
    assert commit(repo / "site-packages") is None, "another project's checkout around an installed kit"


def test_there_need_not_be_a_commit(monkeypatch, tmp_path):
    def no_git(*given, **rest):
        raise FileNotFoundError("git")

    commit.cache_clear()
    (tmp_path / ".git").mkdir()
    monkeypatch.setattr(report.origin, "ROOT", tmp_path)
    monkeypatch.setattr(subprocess, "run", no_git)
    assert report.versions().keys() == {"python", "torch", "transformers", "locret_kit"}
    commit.cache_clear()


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="other systems count a program's memory in another way"
)
def test_a_peak_is_that_of_the_program_alone():
    """A notebook that holds a model starts a command: its report has the memory of the command."""
    program = "import sys; from unittest.mock import Mock; sys.modules['torch'] = Mock(); held = b'1' * 2**26\n"
    program += "from locret_kernels.provenance import peak_memory; print(peak_memory(Mock(type='cpu')))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert 2**26 < int(done.stdout) < 2**28 < peak_memory(torch.device("cpu"))


def test_seconds_of_a_report_are_those_of_its_own_run():
    document = read("llama", "locret", text_of(), chunk=32)
    counters, seconds = document.cache.counters, ("score_s", "select_s", "compact_s")
    vars(counters).update(dict.fromkeys(seconds, 1000.0))
    report = document.ask("What is it?", max_new_tokens=2).report
    assert 0 < sum(getattr(report, name) for name in seconds) <= report.prefill_s + report.decode_s
    assert report.evictions > counters.evictions > 0  # of the whole text
