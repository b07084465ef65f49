"""Run a training from its configuration: trainer, checkpoints that survive a full disk or a kill, what is exported."""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.loggers import TensorBoardLogger

from ..backbones.load import load_backbone, pick_device, pick_dtype
from ..checkpoint import write_beside
from .base import FrozenTraining
from .callbacks import Bar, Last, SaveEvery, SeedSteps, StopWhole, gather
from .curves import write_curves
from .data import SampleModule
from .module import HeadTraining
from .pool import PoolTraining
from .strategy import make_strategy

TRAININGS: dict[str, type[FrozenTraining]] = {"heads": HeadTraining, "pool": PoolTraining}
"""By ``trains``, the configuration's key."""


class AtomicCheckpointIO(TorchCheckpointIO):
    """Checkpoints are written beside their place and renamed: the previous one stays whole."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        write_beside(Path(path), lambda beside: torch.save(checkpoint, beside))


def newest_state(out: Path) -> Path | None:
    """The checkpoint with the highest step under ``out/state``, unreadable ones left aside."""
    best: tuple[int, Path] | None = None
    for path in (out / "state").glob("*.ckpt"):
        try:
            step = torch.load(path, map_location="cpu", weights_only=True, mmap=True)["global_step"]
        except Exception as error:
            print(f"{path.name} cannot be read and is left aside ({type(error).__name__})", file=sys.stderr)
            continue
        best = max(best or (-1, path), (step, path))
    return best[1] if best else None


def fit(cfg: Any, argv: list[str]) -> Path | None:
    """Train, and return the folder of what was exported (``out/heads`` or ``out/pool``); None in every process but the first."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    L.seed_everything(cfg.seed, verbose=False)
    out, strategy = Path(cfg.out), make_strategy(cfg.trainer.strategy, cfg.trainer.devices, cfg.trainer.num_nodes)
    resume = newest_state(out) if cfg.resume == "auto" else None if cfg.resume == "never" else Path(cfg.resume)
    if resume is not None and not resume.exists():
        raise FileNotFoundError(f"resume={cfg.resume!r}: no such file")
    backbone, tokenizer = _backbone(cfg, device=None if strategy == "auto" else "cpu")
    module = TRAININGS[cfg.trains](backbone, cfg)
    data = SampleModule(cfg.data, tokenizer, seed=cfg.seed, per_step=cfg.optim.accumulate)
    state, last = out / "state", Last()
    again = " ".join(["locret-train", *(a for a in argv if not a.startswith("resume=")), "resume=auto"])
    trainer = L.Trainer(
        accelerator=cfg.trainer.accelerator,
        devices=cfg.trainer.devices,
        num_nodes=cfg.trainer.num_nodes,
        strategy=strategy,
        use_distributed_sampler=False,
        max_steps=cfg.optim.steps,
        max_epochs=-1,
        val_check_interval=cfg.trainer.val_every,
        limit_val_batches=cfg.data.val_samples,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        inference_mode=False,  # weights that are gathered for validation must still be good for training
        logger=TensorBoardLogger(str(out), name="", version="tensorboard"),
        plugins=[AtomicCheckpointIO()],
        callbacks=[
            Bar(cfg.optim.steps),
            SeedSteps(cfg.seed),
            SaveEvery(state, cfg.trainer.save_every),
            StopWhole(state / "interrupted.ckpt", again),
            last,
        ],
        enable_checkpointing=False,
        enable_model_summary=False,
    )  # fmt: skip
    if trainer.is_global_zero:
        for left in state.glob(".*.ckpt.*"):  # half written when a run was killed
            left.unlink()
    try:
        trainer.fit(module, data, ckpt_path=str(resume) if resume else None, weights_only=True)
    except SystemExit as stop:  # Lightning turns Ctrl-C into exit(1) after its callbacks
        if trainer.interrupted:
            raise KeyboardInterrupt from stop
        raise
    trained = last.trained if last.gathered else gather(trainer)  # not gathered: the run had ended before
    if trained is None:
        return None
    folder = module.export(trained, out)
    settings = json.dumps(asdict(cfg), indent=2) + "\n"
    write_beside(folder / "training.json", lambda path: path.write_text(settings))
    write_curves(out, folder / "curves.csv")
    return folder


def _backbone(cfg: Any, device: str | None) -> tuple[Any, Any]:
    """On ``device``, or where training runs; in the precision that suits where training runs."""
    where = "cpu" if cfg.trainer.accelerator == "cpu" else None
    precision = str(pick_dtype(cfg.backbone.dtype, pick_device(where))).removeprefix("torch.")
    return load_backbone(
        cfg.backbone.model, dtype=precision, adapter=cfg.backbone.adapter, revision=cfg.backbone.revision,
        device=device or where, device_map=cfg.backbone.device_map, gpu_memory=cfg.backbone.gpu_memory,
    )  # fmt: skip
