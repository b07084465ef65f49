"""States of a run: checkpoints that survive a full disk or a kill, and what a run may begin from."""

import sys
from math import prod
from operator import itemgetter
from pathlib import Path

import torch
from lightning.fabric.plugins import TorchCheckpointIO

from ..files import write_beside
from ..heads import kept_in
from . import SETTINGS, FrozenTraining, flat
from .data import HELD, SampleModule

FREE = ("recipe", "out", "resume", "trainer.", "data.batch", "data.num_workers", "heads.init")
"""Beginnings of settings that may change from one part of a run to the next: they change no step."""
BATCH = ("optim.accumulate", "trainer.devices", "trainer.num_nodes")
"""Settings whose product is the number of samples in a step; they may change together."""


class AtomicCheckpointIO(TorchCheckpointIO):
    """Checkpoints are written beside their place and renamed: the previous one stays whole."""

    def save_checkpoint(self, checkpoint: dict, path: str | Path, storage_options: object = None) -> None:
        write_beside(Path(path), lambda beside: torch.save(checkpoint, beside))


def read_state(path: Path) -> dict:
    """A run's checkpoint; its tensors stay in the file until they are used.

    Raises:
        ValueError: it is damaged, or of another kind.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        itemgetter("global_step", "state_dict", SampleModule.__name__)(dict(state))
    except Exception as error:
        raise ValueError(f"{path} cannot be read as the state of a run ({type(error).__name__})") from error
    return state


def newest_state(out: Path) -> Path | None:
    """The checkpoint with the highest step under ``out/state``, unreadable ones left aside."""
    steps: dict[Path, int] = {}
    for path in (out / "state").glob("*.ckpt"):
        try:
            steps[path] = read_state(path)["global_step"]
        except ValueError as error:
            print(f"{error}: it is skipped", file=sys.stderr)
    return max(steps, key=lambda path: (steps[path], path), default=None)


def begin_from(resume: str, out: Path) -> Path | None:
    """The checkpoint that a run begins from.

    Raises:
        ValueError: a new run, or one from elsewhere, in the folder of another; or ``resume`` is no checkpoint of a run.
    """
    states = out / "state"
    if resume not in ("auto", "never"):
        advice = "name a whole checkpoint in an earlier run's out/state, or auto"
        try:
            read_state(Path(resume))
        except ValueError as error:
            raise ValueError(f"resume={error}: {advice}") from error
        if Path(resume).resolve().parent == states.resolve():
            return Path(resume)
    newest = newest_state(out)
    if resume == "auto":
        return newest
    if any(states.glob("*.ckpt")):
        steps = read_state(newest)["global_step"] if newest else 0
        raise ValueError(f"out={out} holds a run of {steps} steps: resume=auto continues it, or choose another out")
    if kept_in(out / "best"):
        raise ValueError(f"out={out} holds the best heads of another run: choose another out")
    return None if resume == "never" else Path(resume)


def check_state(path: Path, module: FrozenTraining, data: SampleModule) -> list[str]:
    """Warnings of the settings that a checkpoint's steps were made with and those to come are not, and of other validation
    samples.

    Raises:
        ValueError: it holds other weights than ``module``, or more steps.
    """
    state = read_state(path)
    saved, mine = (
        {n: [*w.shape] for n, w in weights.items()} for weights in (state["state_dict"], module.state_dict())
    )
    for name in sorted(saved.keys() | mine.keys()):
        theirs, ours = saved.get(name, "missing"), mine.get(name, "missing")
        if theirs != ours:
            raise ValueError(
                f"{path} was saved with other settings: {name} is {theirs} there and {ours} here; continue with that run's "
                "settings, or start a new run with another out"
            )
    if (done := state["global_step"]) > (steps := module.cfg.optim.steps):
        raise ValueError(f"optim.steps={steps} must be at least {done}, the steps of {path}")
    before, now = state.get(SETTINGS, {}), flat(module.cfg)
    batches = {prod(int(settings[name]) for name in BATCH) for settings in ({**now, **before}, now)}
    differ = [name for name in now if before.get(name, now[name]) != now[name]]
    changed = [name for name in differ if (len(batches) > 1 if name in BATCH else not name.startswith(FREE))]
    words = ", ".join(f"{name}={now[name]} (was {before[name]})" for name in changed)
    warned = [f"warning: {path} was saved with other settings; from here on: {words}"] if changed else []
    if "heads.init" in differ and (init := now["heads.init"]) is not None:
        warned.append(f"warning: heads.init={init} has no effect: the weights are those of {path}")
    held = data.samples.held and data.samples.held_hash
    if held and state[SampleModule.__name__].get(HELD, held) != held:
        why = "its figures and out/best do not compare with those to come, whose samples may have been trained on"
        warned.append(f"warning: {path} was validated on other samples: {why}")
    return warned
