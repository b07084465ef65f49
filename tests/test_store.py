"""The host's store of recall: its bound, its file, its bits, and copies that share it."""

from __future__ import annotations

import errno
import os
import resource
import signal
import stat
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from policy_runs import LENGTH, SMALL, backbone, make, tokens

from locret_kit import BoundedCache, attach
from locret_kit.backbones.spec import spec_of
from locret_kit.cache.saved import load_cache, save_cache
from locret_kit.cache.storage.host import HostMemory, RowForm
from locret_kit.cache.storage.segments import NOWHERE, Segments
from locret_kit.config.command_line import read
from locret_kit.config.document_options import ASK
from locret_kit.planning.inference_plan import Setting, store_bytes
from locret_kit.policies.grammar import parse_policy
from locret_kit.runtime.session import prefill
from locret_kit.settings import RunSettings, StoreSettings

POLICY = "locret recall=blocks(size=4,take=3)"
BLOCK = 3 * 2 * 4 * 2 * 8 * 8
"""Bytes of a block of each of 3 layers: 2 heads of 4 slots, keys and values of 8 numbers in float64."""


def read_text(cache: BoundedCache, ids: list[int] | None = None) -> torch.Tensor:
    with attach(backbone()), torch.no_grad():
        return prefill(backbone(), ids or tokens(), cache)


# ---- which blocks stay --------------------------------------------------------------------------------------------------


class Model:
    """Blocks as a dictionary: the rows of each, and when it was used."""

    def __init__(self, most: int | None) -> None:
        self.most, self.rows, self.used = most, {}, {}

    def copy(self) -> Model:
        new = Model(self.most)
        new.rows, new.used = {n: dict(rows) for n, rows in self.rows.items()}, dict(self.used)
        return new

    def open(self, blocks: list[int], now: int) -> list[int]:
        for block in blocks:
            self.used[block] = now
        new = [block for block in blocks if block not in self.rows]
        gone = []
        while self.most is not None and len(self.rows) + len(new) > self.most:
            others = [block for block in self.rows if block not in blocks]
            if others:
                gone.append(min(others, key=lambda block: (self.used[block], block)))
                del self.rows[gone[-1]]
            else:
                new.pop(0)
        self.rows.update({block: {} for block in new})
        return gone


@pytest.mark.parametrize("most", [None, 5])
def test_least_used_go_first_and_copies_are_apart(most: int | None) -> None:
    draw = torch.Generator().manual_seed(2)
    form = RowForm(3, torch.float32)
    limit = (
        None if most is None else most * 2 * 2 * 4 * 2 * 3 * 4
    )  # texts, heads, rows, keys and values, channels, bytes
    stores = [(Segments(HostMemory(limit), (2, 2), 4, (form, form), 3), Model(most))]
    stores[0][0].grow(20)
    for turn in range(60):
        if turn % 15 == 14:
            store, model = stores[turn % len(stores)]
            stores.append((store.copy(HostMemory(limit), 20, 20), model.copy()))
        store, model = stores[int(torch.randint(len(stores), (), generator=draw))]
        blocks = torch.randint(20, (int(torch.randint(1, 8, (), generator=draw)),), generator=draw).unique()
        if turn % 3 == 2:
            store.touch(blocks)
            model.used.update(dict.fromkeys(blocks.tolist(), store.clock))
            continue
        assert sorted(store.open(blocks).tolist()) == sorted(model.open(blocks.tolist(), store.clock))
        there = blocks[store.place[blocks] != NOWHERE]
        head, row, rows = int(torch.randint(4, (), generator=draw)), turn % 4, torch.rand(len(there), 3, generator=draw)
        where = torch.full((len(there),), head), there, torch.full((len(there),), row)
        store.write(*where, (rows, -rows))
        for block, values in zip(there.tolist(), rows, strict=True):
            model.rows[block][head, row] = values
        for one, wanted in stores:
            assert set((one.place != NOWHERE).nonzero().flatten().tolist()) == set(wanted.rows)
            assert len(set(one.place[one.place != NOWHERE].tolist())) == len(wanted.rows)
            for block, rows in wanted.rows.items():
                for (head, row), values in rows.items():
                    keys, minus = one.read(torch.tensor([head]), torch.tensor([block]))
                    assert torch.equal(keys[0, row], values) and torch.equal(minus[0, row], -values)
            own = sum(segment.places for segment in one.segments if not segment.shared)
            assert most is None or own <= most


def test_a_run_keeps_within_its_memory_and_answers() -> None:
    cache = make(POLICY, store_memory=f"{6 * BLOCK / 2**20}MiB")
    read_text(cache)
    for rows in cache.bounded:
        there = rows.store.rows.place != NOWHERE
        assert int(there.sum()) == 6 and cache.host_nbytes == 6 * BLOCK
        held = rows.store.held[0].any(0).any(-1)
        assert torch.equal(held.nonzero(), there[: len(held)].nonzero())
        assert not rows.store.worth[0, :, ~held].isfinite().any()
    with pytest.raises(
        ValueError, match=rf"store_memory={BLOCK - 1} bytes must be at least {BLOCK}, a block of each of 3 layers"
    ):
        make(POLICY, store_memory=f"{(BLOCK - 1) / 2**20}MiB").bind(backbone())


# ---- few bits -----------------------------------------------------------------------------------------------------------


def test_rows_in_4_bits_come_back_within_half_a_step() -> None:
    form = RowForm(64, torch.float32, 4)
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(0)) * torch.rand(50, 1).exp()
    x[:, 7] += 30  # one large channel
    stored = form.encode(x)
    assert stored.dtype == torch.uint8 and stored.shape == (50, form.width) == (50, 64 // 2 + 2 * 2 * 2)
    signs = [[(-1) ** (a & b).bit_count() for a in range(64)] for b in range(64)]
    turned = torch.tensor(signs) / 8  # Hadamard's matrix, orthonormal
    groups, found = (rows @ turned for rows in (x, form.decode(stored)))
    step = (groups.view(50, 2, 32).amax(-1) - groups.view(50, 2, 32).amin(-1)) / 15
    assert ((groups - found).abs().view(50, 2, 32) <= 0.503 * step[..., None]).all()


def test_4_bits_are_near_and_smaller() -> None:
    exact, few = make(POLICY), make(POLICY, store_bits=4)
    a, b = (read_text(cache).log_softmax(-1) for cache in (exact, few))
    assert not torch.equal(a, b) and (a.exp() * (a - b)).sum() < 0.01
    assert few.host_nbytes * 8 == exact.host_nbytes  # 8 numbers: 4 bytes, a step and a zero point, instead of 64


@pytest.mark.parametrize("given", [{}, {"store_bits": 4}, {"store_memory": "0.005MiB"}])
def test_plans_count_the_host(given: dict) -> None:
    cache = make(POLICY, **given)
    read_text(cache)
    setting = Setting(LENGTH, RunSettings(budget=24, **SMALL, **given), dtype="float32", policy=parse_policy(POLICY))
    planned = store_bytes(spec_of(backbone().config), setting)
    if given.get("store_memory"):
        assert planned <= 0.005 * 2**20 and cache.host_nbytes <= 0.005 * 2**20
    else:  # the tiny backbone is in float64
        assert cache.host_nbytes == planned * (1 if given else 2)


# ---- files --------------------------------------------------------------------------------------------------------------


def test_a_file_is_private_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, path = [], tmp_path / "store"
    monkeypatch.setattr(os, "unlink", lambda name, unlink=os.unlink: (seen.append(os.stat(name).st_mode), unlink(name)))
    wanted, cache = read_text(make(POLICY)), make(POLICY, store_file=str(path))
    assert torch.equal(read_text(cache), wanted)
    assert [stat.filemode(mode) for mode in seen] == ["-rw-------"]  # one file for all layers
    assert len({id(rows.store.memory) for rows in deepcopy(cache).bounded}) == 1  # of a copy too
    assert not list(tmp_path.iterdir())
    assert torch.equal(read_text(make(POLICY, store_file=str(path))), wanted)  # another at the same time


def test_a_file_that_is_there_stays(tmp_path: Path) -> None:
    path = tmp_path / "store"
    path.write_text("mine")
    with pytest.raises(
        FileExistsError, match=f"store_file={path} is there already: name a new file, or remove that one"
    ):
        read_text(make(POLICY, store_file=str(path)))
    with pytest.raises(OSError, match="cannot be made: No such file or directory"):
        read_text(make(POLICY, store_file=str(tmp_path / "nowhere" / "store")))
    assert path.read_text() == "mine" and list(tmp_path.iterdir()) == [path]


def test_a_full_disk_and_a_killed_process_harm_nothing(tmp_path: Path) -> None:
    other, path = tmp_path / "other", tmp_path / "store"
    other.write_text("mine")
    out, into = os.pipe()
    if (child := os.fork()) == 0:  # a limit on a file's size is what a full disk is: the room is refused
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
        memory = HostMemory(path=path)
        memory.buffer((1000,), torch.uint8).fill_(1)
        try:
            memory.buffer((2**20,), torch.uint8)
        except OSError as error:
            os.write(into, str(error).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    os.close(into)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    said = os.read(out, 1000).decode()
    os.close(out)
    assert said.startswith(f"store_file={path}: 2.0 MiB do not fit, ") and os.strerror(errno.EFBIG) in said
    assert list(tmp_path.iterdir()) == [other] and other.read_text() == "mine"


# ---- copies and saved files ---------------------------------------------------------------------------------------------


def test_forks_share_what_neither_writes() -> None:
    cache, model = make(POLICY), backbone()
    read_text(cache, tokens()[:52])
    fork = cache.fork(LENGTH)
    mine, theirs = cache.bounded[0].store.rows, fork.bounded[0].store.rows
    assert [s.rows[0].data_ptr() for s in mine.segments] == [s.rows[0].data_ptr() for s in theirs.segments]
    before = {name: x.clone() for name, x in cache.bounded[0].store.export().items()}
    wanted, found = read_text(make(POLICY)), read_text(fork)
    assert torch.equal(found, wanted) and theirs.nbytes > mine.nbytes
    after = cache.bounded[0].store.export()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    with attach(model), torch.no_grad():
        assert torch.equal(prefill(model, tokens(), cache), wanted)


@pytest.mark.parametrize("given", [{"store_bits": 4}, {"store_memory": "0.02MiB"}])
def test_saved_stores_come_back(given: dict, tmp_path: Path) -> None:
    cache, model, saved = make(POLICY, **given), backbone(), tmp_path / "cache.locret"
    read_text(cache, tokens()[:52])
    save_cache(cache, saved)
    here = StoreSettings(store_memory=given.get("store_memory"), store_file=str(tmp_path / "store"))
    loaded = load_cache(saved, model, cache.heads, store=here)
    assert loaded.settings.store == here and loaded.settings.store_bits == given.get("store_bits")
    for a, b in zip(cache.bounded, loaded.bounded, strict=True):
        for name, x in a.store.export().items():
            assert torch.equal(x, b.store.export()[name])
    assert torch.equal(read_text(loaded), read_text(cache))
    # A smaller memory has room for fewer: 2 blocks, or in 4 bits 8 times as many.
    small = load_cache(saved, model, cache.heads, store=StoreSettings(store_memory=f"{2 * BLOCK / 2**20}MiB"))
    there = int(small.bounded[0].store.held.any(-1).any(1).sum())
    assert small.host_nbytes <= 2 * BLOCK and there == (12 if given.get("store_bits") else 2)


def test_options() -> None:
    args = read(ASK, ["book.locret", "Who?", "--store-memory", "4GiB", "--store-file", "x"])
    assert args is not None and args.store == StoreSettings(store_memory="4GiB", store_file="x")
    with pytest.raises(ValueError, match="store_memory=much is not a size such as 24GiB"):
        RunSettings(store_memory="much")
    assert not RunSettings(store_file="x").portable.keys() & {"store_file", "store_memory"}
