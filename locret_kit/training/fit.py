"""A training run from its configuration: trainer, progress, seeds and signals.

The export includes the run's curves: TensorBoard's scalars in one CSV file.
"""

import logging
import random
import shlex
import signal
import sys
import tempfile
import threading
import warnings
from contextlib import nullcontext
from functools import cache
from pathlib import Path

import lightning as L
import pandas
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from tqdm import tqdm
from transformers import PreTrainedModel

from ..backbones.load import load_backbone, load_tokenizer, pick_device, pick_dtype
from ..backbones.probe import describe
from ..backbones.spec import text_config
from ..config.train_options import TrainConfig
from ..files import locked, write_beside, write_json
from ..naming import first_line, prefixed_errors
from ..text.template import set_defaults
from . import TRAINING, FrozenTraining, gather, trained_with
from .data import SampleModule
from .module import HeadTraining
from .pool import PoolTraining
from .state import AtomicCheckpointIO, begin_from, check_state
from .strategy import make_strategy
from .writer import Writer

TRAININGS: dict[str, type[FrozenTraining]] = {"heads": HeadTraining, "pool": PoolTraining}
"""Trainings by ``trains``, the configuration's key."""
LOGS = "tensorboard"
"""Folder of a run's curves; other runs may have theirs in the same folder."""


def read_curves(run: Path) -> dict[str, dict[int, float]]:
    """``{tag: {step: value}}``; where a resumed run made a step again, the later value counts."""
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

    curves: dict[str, dict[int, float]] = {}
    for file in sorted((run / LOGS).glob("events.*"), key=lambda path: (path.stat().st_mtime, path.name)):
        events = EventAccumulator(str(file), size_guidance={SCALARS: 0})
        events.Reload()
        for tag in events.Tags()["scalars"]:
            curves.setdefault(tag, {}).update({event.step: event.value for event in events.Scalars(tag)})
    return curves


def write_curves(read: dict[str, dict[int, float]], steps: int, target: Path) -> None:
    """One row per step up to ``steps``, one column per tag. A run that went on from an earlier state had made more."""
    curves = pandas.DataFrame(read).sort_index().loc[:steps]
    tags = sorted(curves, key=lambda tag: (tag != "loss", "layer" in tag, tag))
    form = {"index_label": "step", "float_format": "%.5g", "lineterminator": "\r\n"}
    write_beside(target, lambda path: curves.to_csv(path, columns=tags, **form))


class Bar(Callback):
    """Progress in optimiser steps, on stderr, of the first process."""

    def on_train_start(self, trainer: L.Trainer, *rest: object) -> None:
        self.bar = tqdm(
            total=trainer.max_steps, initial=trainer.global_step, desc="locret-train", unit="step", smoothing=0,
            mininterval=1, dynamic_ncols=True, disable=not trainer.is_global_zero,
        )  # fmt: skip

    def on_train_batch_end(self, trainer: L.Trainer, *rest: object) -> None:
        self.bar.set_postfix(trainer.progress_bar_metrics, refresh=False)
        self.bar.update()

    def on_validation_start(self, *rest: object) -> None:
        self.bar.set_postfix_str("validation")

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if hasattr(self, "bar"):
            self.bar.close()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "fit")  # so that the error has a line of its own


class SeedSteps(Callback):
    """Seeds the random generators from the run's seed and the step's number. A resumed run then draws the same numbers
    as an uninterrupted one, and no generator state is saved."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def on_train_batch_start(self, trainer: L.Trainer, *rest: object) -> None:
        drawn = random.Random(f"{self.seed}:{trainer.global_step}").getrandbits(63)
        random.seed(drawn)
        torch.manual_seed(drawn)


class SaveEvery(Callback):
    """The state of every ``steps``-th optimiser step, once its validation is done; the newest one stays. And the trained module,
    gathered before the strategy is torn down."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder, self.steps, self.saved, self.ended = folder, steps, 0, False
        self.trained: nn.Module | None = None
        """Trained heads, in the first process only, once the run has ended."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.saved = trainer.global_step

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *rest: object) -> None:
        if trainer.global_step % self.steps == 0:
            self._save(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._save(trainer)
        self.ended, self.trained = True, gather(trainer)

    def _save(self, trainer: L.Trainer) -> None:
        step = trainer.global_step
        if step == self.saved:
            return
        trainer.save_checkpoint(self.folder / f"step={step}.ckpt")
        self.saved = step
        if trainer.is_global_zero:
            for older in (self.folder / "interrupted.ckpt", *self.folder.glob("step=*.ckpt")):
                if older.stem != f"step={step}":
                    older.unlink(missing_ok=True)


class TrainingStopped(KeyboardInterrupt):
    """Raised after a stopped run has saved its state and printed the command to resume."""


class StopWhole(Callback):
    """Callback that stops at Ctrl-C or SIGTERM: it finishes the running step and its validation, saves the state and prints
    the command to resume.

    A second signal stops at once; the last checkpoint stays.
    """

    def __init__(self, path: Path, command: str) -> None:
        self.path, self.command = path, command
        self.asked = self.whole = self.saved = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.whole = True
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):  # Lightning restores what was there before
                signal.signal(number, self._ask)

    def _ask(self, number: int, frame: object) -> None:
        if self.asked:
            self.whole = False
            raise KeyboardInterrupt
        self.asked = True
        print(f"\n{signal.Signals(number).name}: stopping after this step", file=sys.stderr, flush=True)

    def on_train_batch_start(self, trainer: L.Trainer, *rest: object) -> None:
        """Stop between steps, when the last validation is done, so that a resumed run does not repeat it."""
        if trainer.strategy.reduce_boolean_decision(self.asked, all=False):
            raise KeyboardInterrupt

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if isinstance(exception, KeyboardInterrupt) and self.whole and trainer.global_step > 0:
            trainer.save_checkpoint(self.path)
            self.saved = True
            if trainer.is_global_zero:
                said = f"\nstopped at step {trainer.global_step}; state saved. To resume:\n  {self.command}"
                print(said, file=sys.stderr)


def beyond_window(backbone: PreTrainedModel, cfg: TrainConfig) -> str | None:
    """A warning if samples are longer than the backbone's window. A pool's samples are read at compact positions, below
    it.

    Raises:
        ValueError: they are longer, and the backbone has position embeddings for its window only.
    """
    window = getattr(text_config(backbone), "max_position_embeddings", None)
    if window is None or cfg.data.max_tokens <= window or cfg.trains == "pool":
        return None
    said = f"data.max_tokens={cfg.data.max_tokens} must be at most the window of {cfg.backbone.model}, {window}"
    if not any(rotation.module for rotation in describe(backbone).require_rotations()):
        raise ValueError(f"{said}: it has no positions beyond")
    return f"warning: {said}, otherwise heads learn from attention beyond the model's window"


def command_to_go_on(argv: list[str]) -> str:
    """The command line that resumes the run of ``argv``."""
    kept, words = ["locret-train"], iter(argv)
    for word in words:
        if word == "--resume":
            next(words, None)
        elif not word.startswith(("resume=", "--resume=")):
            kept.append(word)
    return shlex.join([*kept, "resume=auto"])


def fit(cfg: TrainConfig, argv: list[str]) -> Path | None:
    """Train, and return the export folder (``out/heads`` or ``out/pool``); None in all processes but the first.

    Raises:
        Stopped: after Ctrl-C or SIGTERM, with the state saved. KeyboardInterrupt: after Ctrl-C without a saved state.
        ValueError: settings that cannot be trained here, or not from this checkpoint.
    """
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning)
    L.seed_everything(cfg.seed, verbose=False)
    out, strategy = Path(cfg.out), make_strategy(cfg.trainer.strategy, cfg.trainer.devices, cfg.trainer.num_nodes)
    with prefixed_errors(f"out={out} cannot be written", OSError):  # before the backbone is loaded
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
    state = out / "state"
    saves = SaveEvery(state, cfg.trainer.save_every)
    stop = StopWhole(state / "interrupted.ckpt", command_to_go_on(argv))
    trainer = _trainer(cfg, strategy, [saves, stop])
    # The other processes of a run share its folder.
    busy = f"out={out}: another locret-train is writing there"
    alone = locked(out / ".lock", busy) if trainer.is_global_zero else nullcontext()
    with alone, torch.device("cpu"):  # whatever the default device: PyTorch's loaders draw on it
        return _run(cfg, trainer, stop, saves)


def _run(cfg: TrainConfig, trainer: L.Trainer, stop: StopWhole, saves: SaveEvery) -> Path | None:
    out = Path(cfg.out)
    resume = begin_from(cfg.resume, out)
    # Before the weights, which may take minutes: what is wrong with the data is said at once.
    tokenizer = load_tokenizer(cfg.backbone.model, cfg.backbone.revision)
    set_defaults(tokenizer, think=cfg.data.think)
    load = cache(lambda: _backbone(cfg, device=None if cfg.trainer.strategy == "auto" else "cpu"))
    author = " ".join(filter(None, (cfg.backbone.model, cfg.backbone.revision, cfg.backbone.adapter)))
    write = Writer(out / "written.jsonl", tokenizer, load, author)
    data = SampleModule(cfg.data, tokenizer, seed=cfg.seed, per_step=cfg.optim.accumulate, write=write)
    backbone = load()
    too_long = beyond_window(backbone, cfg)
    size = f"pool.slots={cfg.pool.slots}" if cfg.trains == "pool" else f"heads.d_hidden={cfg.heads.d_hidden}"
    try:
        module = TRAININGS[cfg.trains](backbone, cfg)
        if resume is None:
            module.begin()
    except RuntimeError as error:
        if "DefaultCPUAllocator" not in str(error):
            raise
        raise ValueError(f"{size} does not fit into memory: {first_line(error)}") from error
    changes = [] if resume is None else check_state(resume, module, data)
    for warning in (too_long, *changes) if trainer.is_global_zero else ():
        if warning:
            print(warning, file=sys.stderr)
    try:
        trainer.fit(module, data, ckpt_path=str(resume) if resume else None, weights_only=True)
    except SystemExit as ended:  # Lightning turns Ctrl-C into exit(1) after its callbacks
        if trainer.interrupted:
            raise (TrainingStopped if stop.saved else KeyboardInterrupt) from ended
        raise
    except ValueError as error:  # of a process that prepares samples: PyTorch puts its traceback before it
        error.args = (str(error).rsplit("\nValueError: ", 1)[-1],)
        raise
    trained = saves.trained if saves.ended else gather(trainer)  # it had ended before
    if trained is None:
        return None
    folder = module.export(trained, out)
    curves = read_curves(out)
    recall = curves.get("val/recall", {}).get(cfg.optim.steps)
    write_json(folder / TRAINING, trained_with(cfg, data.set_aside, cfg.optim.steps, recall))
    write_curves(curves, cfg.optim.steps, folder / "curves.csv")
    return folder


def _trainer(cfg: TrainConfig, strategy: Strategy | str, callbacks: list[Callback]) -> L.Trainer:
    where = cfg.trainer
    try:
        return L.Trainer(
            accelerator=where.accelerator,
            devices=where.devices,
            num_nodes=where.num_nodes,
            strategy=strategy,
            use_distributed_sampler=False,
            max_steps=cfg.optim.steps,
            max_epochs=-1,
            val_check_interval=where.val_every,
            limit_val_batches=cfg.data.val_samples,
            check_val_every_n_epoch=None,
            num_sanity_val_steps=0,
            inference_mode=False,  # weights that are gathered for validation must still be good for training
            logger=TensorBoardLogger(cfg.out, name="", version=LOGS),
            plugins=[AtomicCheckpointIO()],
            callbacks=[Bar(), SeedSteps(cfg.seed), *callbacks],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
    except (MisconfigurationException, ValueError, ImportError) as error:
        raise ValueError(
            f"trainer.accelerator={where.accelerator} with trainer.devices={where.devices} cannot run here, choose another "
            f"trainer.accelerator (cpu, auto) or fewer trainer.devices: {' '.join(str(error).split())}"
        ) from error


def _backbone(cfg: TrainConfig, device: str | None) -> PreTrainedModel:
    """Load the frozen backbone on ``device``, by default that of training, in a suitable precision."""
    where = "cpu" if cfg.trainer.accelerator == "cpu" else None
    precision = str(pick_dtype(cfg.backbone.dtype, pick_device(where))).removeprefix("torch.")
    backbone, _ = load_backbone(
        cfg.backbone.model, dtype=precision, adapter=cfg.backbone.adapter, revision=cfg.backbone.revision,
        device=device or where, device_map=cfg.backbone.device_map, gpu_memory=cfg.backbone.gpu_memory,
        weight_bits=cfg.backbone.weight_bits,
    )  # fmt: skip
    return backbone
