"""A training that is killed, interrupted or out of disk goes on, and follows the curve of one that was not."""

import atexit
import os
import random
import shlex
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing import active_children
from pathlib import Path
from select import select
from types import SimpleNamespace

import pytest
import torch
from equal_runs import refused, same_run
from forked import start, status_of
from tiny_tokenizer import tiny_tokenizer

from locret_kit.cli.train import main
from locret_kit.config.recipes import load_config
from locret_kit.config.train_options import DataConfig
from locret_kit.files import locked
from locret_kit.training import SETTINGS as RECORDED
from locret_kit.training import fit, flat, module
from locret_kit.training.data import SampleModule, Share
from locret_kit.training.fit import read_curves
from locret_kit.training.module import HeadTraining
from locret_kit.training.state import begin_from, check_state, newest_state

SETTINGS = ["recipe=tiny", "data.max_tokens=512", "trainer.accelerator=cpu", "data.val_samples=2"]


def arguments(backbone: Path, out: Path, *more: str) -> list[str]:
    return [*SETTINGS, f"backbone.model={backbone}", f"out={out}", *more]


BROKEN = ("optim.steps=8", "optim.accumulate=2", "trainer.val_every=4", "trainer.keep_best=1")
"""Settings of the runs that are broken off, and of ``whole``, which is not."""


def forked(backbone: Path, out: Path, *more: str) -> int:
    """Status of such a run in a process of its own, whose output goes on in ``out.log``."""
    return status_of(start(lambda: main(arguments(backbone, out, *BROKEN, *more)), out.with_suffix(".log")))


@pytest.fixture(scope="module", autouse=True)
def random_losses() -> Iterator[None]:
    """Every loss is weighed at random, by PyTorch's generator and Python's: both must go on where they were."""
    loss = module.cis_loss

    def weighed(*args, **settings):
        regression, smooth = loss(*args, **settings)
        return regression * (0.5 + torch.rand(())), smooth * random.random()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "cis_loss", weighed)
        yield


@pytest.fixture(scope="module")
def whole(backbone, tmp_path_factory) -> Path:
    """In this process: those that are forked from it have imported what a run imports."""
    out = tmp_path_factory.mktemp("whole") / "run"
    assert main(arguments(backbone, out, *BROKEN)) == 0
    return out


def test_a_run_killed_at_three_random_moments_resumes_to_the_uninterrupted_curve(
    backbone, whole, tmp_path, monkeypatch
):
    """Two moments lie behind a step or two, one anywhere: while it loads, too. LOCRET_KILL_SEED chooses others."""
    more = "trainer.save_every=2", "resume=auto"
    part, log, seed = tmp_path / "part", tmp_path / "part.log", os.environ.get("LOCRET_KILL_SEED", "0")
    (heard, said), (waits, goes_on) = os.pipe(), os.pipe()
    step, rng = HeadTraining.end_step, random.Random(f"kill {seed}")

    def tell(self, *args):
        step(self, *args)
        os.write(said, b".")
        os.read(waits, 1)

    monkeypatch.setattr(HeadTraining, "end_step", tell)
    for steps in rng.sample([0, 1, 2], 3):
        seconds = rng.uniform(0, 0.15 if steps else 1.0)
        print(f"LOCRET_KILL_SEED={seed}: killed {seconds:.3f} s after {steps} steps")  # pytest shows it on failure
        child = start(lambda: main(arguments(backbone, part, *BROKEN, *more)), log)
        # It waits after so many steps: the run cannot end before it is killed.
        os.write(goes_on, b"." * (2 * steps or 1))
        for _ in range(steps):
            assert select([heard], [], [], 300)[0], log.read_text()[-3000:]
            os.read(heard, 1)
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
        assert status_of(child) == -signal.SIGKILL
        for pipe in (heard, waits):
            while select([pipe], [], [], 0)[0]:
                os.read(pipe, 1)
    monkeypatch.setattr(HeadTraining, "end_step", step)
    assert forked(backbone, part, *more) == 0
    assert "Traceback" not in log.read_text()
    same_run(whole, part)
    assert [path.name for path in (part / "state").iterdir()] == ["step=8.ckpt"]


def test_a_kill_between_writing_and_renaming_loses_nothing(backbone, whole, tmp_path, monkeypatch):
    """Child n is killed before its n-th rename, of a state, of the best heads or of what is exported."""
    part, rename, reached = tmp_path / "part", os.replace, []

    def die_before(source, target, last):
        reached.append(target)
        if len(reached) == last:
            print(f"killed before {Path(target).relative_to(part)} was there")
            os.kill(os.getpid(), signal.SIGKILL)
        rename(source, target)

    for n in range(1, 20):
        monkeypatch.setattr(os, "replace", lambda source, target, n=n: die_before(source, target, n))
        status = forked(backbone, part, "trainer.save_every=4", "resume=auto")
        if status == 0:
            break
        assert status == -signal.SIGKILL, part.with_suffix(".log").read_text()[-3000:]
    text = part.with_suffix(".log").read_text()
    assert status == 0 and "cannot be read" not in text and "Traceback" not in text
    assert all(f"killed before {place}" in text for place in ("state/step=", "best/recall=", "heads")), text
    same_run(whole, part)


def test_a_signal_lets_the_step_finish_saves_and_prints_the_command(backbone, whole, tmp_path, monkeypatch):
    part, log, more = tmp_path / "a part", tmp_path / "a part.log", "trainer.save_every=100"
    observe, forwards = HeadTraining.observe, []

    def interrupt(self, *args, **more):  # in the middle of a step, between two of its samples
        forwards.append(self.global_step)
        if forwards.count(5) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return observe(self, *args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(HeadTraining, "observe", interrupt)
        assert forked(backbone, part, more) == 130
    text = log.read_text()
    assert "SIGTERM: stopping after this step" in text and "stopped at step 6; state saved" in text
    assert "locret-train: stopped" not in text and "Traceback" not in text, "it is said once"
    (again,) = [line for line in text.splitlines() if line.startswith("  locret-train recipe=tiny")]
    again = shlex.split(again)
    assert again == ["locret-train", *arguments(backbone, part, *BROKEN, more), "resume=auto"]
    assert newest_state(part).name == "interrupted.ckpt"
    assert "6/8 [00:00<?" not in text
    assert status_of(start(lambda: main(again[1:]), log)) == 0
    assert "6/8 [00:00<?" in log.read_text(), "the bar of a run that goes on says how far it is"
    same_run(whole, part)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_all_processes_leaves_those_that_prepare_samples(backbone, tmp_path, monkeypatch, number):
    """A terminal sends Ctrl-C so; samples are slower than steps, so that the next one is not there yet."""
    step, sample, part = HeadTraining.end_step, Share.__getitem__, tmp_path / "part"

    def signal_all(self, *args):
        step(self, *args)
        if self.global_step == 2:
            os.killpg(0, number)

    def train() -> int:
        os.setpgrp()
        return main(arguments(backbone, part, "data.num_workers=1"))

    monkeypatch.setattr(HeadTraining, "end_step", signal_all)
    monkeypatch.setattr(Share, "__getitem__", lambda self, number: time.sleep(0.5) or sample(self, number))
    assert status_of(start(train, tmp_path / "part.log")) == 130
    text = (tmp_path / "part.log").read_text()
    assert "stopped at step 2; state saved" in text and "Traceback" not in text


def test_processes_that_prepare_samples_end_with_the_run(tmp_path, monkeypatch):
    """An error may keep their loader alive, and Python waits at its exit for processes that it has sent SIGTERM."""
    ends: list[Callable[[], None]] = []

    def prepare() -> int:
        data = DataConfig(max_tokens=512, val_samples=0, num_workers=1)
        steps = iter(SampleModule(data, tiny_tokenizer(), seed=0).train_dataloader())
        next(steps)
        (process,) = active_children()
        ends[-1]()
        process.join(60)
        return process.is_alive()

    monkeypatch.setattr(atexit, "register", ends.append)
    assert status_of(start(prepare, tmp_path / "log")) == 0, (tmp_path / "log").read_text()


def test_a_signal_during_a_validation_lets_it_finish(backbone, whole, tmp_path, monkeypatch):
    """It is neither lost nor made twice, and out/best has its heads."""
    part, validate = tmp_path / "part", HeadTraining.validation_step

    def interrupt(self, sample, index):
        if self.global_step == 4 and index == 0:
            os.kill(os.getpid(), signal.SIGINT)
        return validate(self, sample, index)

    with monkeypatch.context() as patch:
        patch.setattr(HeadTraining, "validation_step", interrupt)
        assert forked(backbone, part) == 130
    assert "stopped at step 4; state saved" in part.with_suffix(".log").read_text()
    assert forked(backbone, part, "resume=auto") == 0
    same_run(whole, part)


def test_a_second_training_in_the_same_folder_is_refused(run, capsys):
    with locked(run / ".lock", "busy"):
        said = refused(capsys, *arguments(Path("checkpoints/nothing"), run, "resume=auto"))
    assert said == f"locret-train: out={run}: another locret-train is writing there"


def test_a_second_signal_stops_at_once_and_leaves_the_checkpoint(backbone, tmp_path, monkeypatch):
    observe = HeadTraining.observe

    def interrupt(self, *args, **more):
        if self.global_step == 3:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.05)
        return observe(self, *args, **more)

    monkeypatch.setattr(HeadTraining, "observe", interrupt)
    assert forked(backbone, tmp_path / "part", "trainer.save_every=2") == 130
    assert "stopped at step" not in (tmp_path / "part.log").read_text()
    assert [path.name for path in (tmp_path / "part" / "state").iterdir()] == ["step=2.ckpt"]


# ---- what is said before a step is made -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(backbone, tmp_path_factory) -> Path:
    """A run of 2 steps."""
    out = tmp_path_factory.mktemp("run")
    assert main(arguments(backbone, out, "optim.steps=2")) == 0
    return out


def files(out: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}


def test_the_same_command_again_leaves_the_first_run_as_it_is(run, capsys):
    before = files(run)
    said = refused(capsys, *arguments(Path("checkpoints/nothing"), run, "optim.steps=2"))
    assert said == f"locret-train: out={run} holds a run of 2 steps: resume=auto continues it, or choose another out"
    assert files(run) == before


def test_a_new_run_does_not_mix_its_best_heads_with_those_of_a_run_that_saved_no_state(backbone, tmp_path, capsys):
    best = tmp_path / "best" / "recall=0.9000-step=3"
    best.mkdir(parents=True)
    assert begin_from("never", tmp_path) is None, "half-written, such as on a full disk"
    (best / "model.safetensors").touch()
    said = refused(capsys, *arguments(Path("checkpoints/nothing"), tmp_path))
    assert said == f"locret-train: out={tmp_path} holds the best heads of another run: choose another out"


def test_a_checkpoint_from_elsewhere_does_not_replace_another_run(backbone, run, tmp_path, capsys):
    """It goes on in an empty folder; the same command again would delete the steps made since."""
    given = arguments(backbone, tmp_path, "optim.steps=3", f"resume={run}/state/step=2.ckpt")
    assert main(given) == 0
    before = files(tmp_path)
    assert f"out={tmp_path} holds a run of 3 steps: resume=auto continues it" in refused(capsys, *given)
    assert files(tmp_path) == before
    assert main([*given[:-1], f"resume={tmp_path}/state/step=3.ckpt"]) == 0


def test_auto_in_an_empty_folder_begins_anew_and_in_a_finished_run_ends_at_once(backbone, run, tmp_path):
    assert main(arguments(backbone, tmp_path, "optim.steps=2", "resume=auto")) == 0
    same_run(run, tmp_path)
    states = files(tmp_path / "state")
    assert main(arguments(backbone, tmp_path, "optim.steps=2", "resume=auto")) == 0
    assert files(tmp_path / "state") == states and len(read_curves(tmp_path)["loss"]) == 2


def test_a_run_goes_on_with_the_optimiser_settings_that_it_is_given(backbone, tmp_path, capsys):
    """The rate is the new peak times the new schedule, from the first step on: two steps of warm-up, then down to step 5."""
    assert main(arguments(backbone, tmp_path, "optim.steps=3", "optim.lr=1e-3")) == 0
    more = ["optim.steps=5", "optim.lr=6e-4", "optim.weight_decay=0.5", "trainer.val_every=5", "--resume", "auto"]
    assert main(arguments(backbone, tmp_path, *more)) == 0
    rates = read_curves(tmp_path)["train/lr"]
    assert [rates[step] for step in range(1, 6)] == pytest.approx([1e-3 / 3, 2e-3 / 3, 1e-3, 4e-4, 2e-4])
    (said,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert "step=3.ckpt was saved with other settings" in said
    assert said.endswith("optim.lr=0.0006 (was 0.001), optim.weight_decay=0.5 (was 0.0), optim.steps=5 (was 3)")
    (group,) = torch.load(tmp_path / "state" / "step=5.ckpt", weights_only=True)["optimizer_states"][0]["param_groups"]
    assert group["weight_decay"] == 0.5 and group["initial_lr"] == 6e-4
    for said in (["--resume", "never", "seed=1"], ["resume=never", "seed=1"], ["--resume=never", "seed=1"]):
        assert fit.command_to_go_on(said) == "locret-train seed=1 resume=auto"


@pytest.mark.parametrize(
    ("given", "warned"),
    [
        (["optim.accumulate=1", "trainer.devices=4"], ""),
        (["optim.accumulate=2", "trainer.num_nodes=2"], ""),
        (["trainer.devices=2"], "trainer.devices=2 (was 1)"),
        (["optim.accumulate=2"], "optim.accumulate=2 (was 4)"),
        (["optim.accumulate=2", "trainer.devices=4"], "optim.accumulate=2 (was 4), trainer.devices=4 (was 1)"),
        (["trainer.val_every=7", "data.batch=2"], ""),
        (["heads.init=mine"], "heads.init=mine has no effect: the weights are those of FILE"),
    ],
)
def test_a_warning_says_whether_steps_have_as_many_samples(tmp_path, given, warned):
    """Devices and accumulation may change together: what counts is their product."""

    def config(words):
        given = {"optim.accumulate": 4, **dict(word.split("=") for word in words)}
        settings = ["recipe=tiny", "model=lab/tiny", "trainer.strategy=ddp"]
        return load_config([*settings, *(f"{key}={value}" for key, value in given.items())])

    saved = flat(config([]))
    state = {"global_step": 1, "state_dict": {}, SampleModule.__name__: {"done": 4}, RECORDED: saved}
    torch.save(state, path := tmp_path / "step=1.ckpt")
    module = SimpleNamespace(state_dict=dict, cfg=config(given))
    data = SimpleNamespace(samples=SimpleNamespace(held=[]))
    said = [line.replace(str(path), "FILE") for line in check_state(path, module, data)]
    changed = "FILE was saved with other settings; from here on: " * ("(was" in warned)
    assert said == ([f"warning: {changed}{warned}"] if warned else [])


def test_a_run_has_no_fewer_steps_than_are_done(run, tmp_path, capsys, backbone):
    shutil.copytree(run, tmp_path / "run")
    said = refused(capsys, *arguments(backbone, tmp_path / "run", "optim.steps=1", "resume=auto"))
    assert "optim.steps=1 must be at least 2, the steps of " in said and said.endswith("step=2.ckpt")


def test_a_damaged_or_foreign_checkpoint_is_one_line_before_the_backbone_is_loaded(run, tmp_path, capsys):
    whole = (run / "state" / "step=2.ckpt").read_bytes()
    for name, content in (("half.ckpt", whole[: len(whole) // 2]), ("empty.ckpt", b""), ("text.ckpt", b"not a file")):
        (tmp_path / name).write_bytes(content)
    torch.save(torch.zeros(3), tmp_path / "tensor.ckpt")
    for path in (*tmp_path.glob("*.ckpt"), run / "heads.pt", run / "state"):
        said = refused(capsys, *arguments(Path("checkpoints/nothing"), tmp_path / "out", f"resume={path}"))
        assert f"resume={path} cannot be read as the state of a run" in said and "out/state" in said, said


def test_a_checkpoint_of_other_settings_is_one_line(backbone, run, tmp_path, capsys):
    path = run / "state" / "step=2.ckpt"
    for out, resume in ((run, "auto"), (tmp_path, path)):
        said = refused(capsys, *arguments(backbone, out, "optim.steps=4", "heads.d_hidden=8", f"resume={resume}"))
        assert f"{path} was saved with other settings" in said and "[16, " in said and "[8, " in said, said
    said = refused(capsys, *arguments(backbone, run, "trains=pool", "pool.slots=8", "resume=auto"))
    assert "[16, 64] there and missing here" in said


def test_a_signal_while_the_backbone_loads_is_said_in_one_line(backbone, tmp_path, monkeypatch, capsys):
    def load(*args, **more):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(fit, "load_backbone", load)
    assert main(arguments(backbone, tmp_path)) == 130
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line == "locret-train: stopped; resume=auto continues from the newest saved state, if any"
