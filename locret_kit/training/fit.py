"""Run a training from its configuration: trainer, checkpoints that survive a full disk or Ctrl-C, exported heads."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import Callback, LearningRateMonitor, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import TensorBoardLogger

from ..backbones.load import load_backbone
from ..checkpoint import save_heads, write_beside
from .data import SampleModule
from .module import HeadTraining


class AtomicCheckpointIO(TorchCheckpointIO):
    """Checkpoints are written beside their place and renamed: the previous one stays whole."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        write_beside(Path(path), lambda beside: torch.save(checkpoint, beside))


class SaveOnInterrupt(Callback):
    """Ctrl-C saves the state at the last whole step and prints the command that goes on from there."""

    def __init__(self, path: Path, command: str) -> None:
        self.path, self.command = path, command

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if isinstance(exception, KeyboardInterrupt) and trainer.global_step > 0:
            trainer.save_checkpoint(self.path)
            print(f"\nstopped at step {trainer.global_step}; state saved. To go on:\n  {self.command}", file=sys.stderr)


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


def fit(cfg: Any, argv: list[str]) -> Path:
    """Train, and return the folder of the exported heads (``out/heads``)."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    L.seed_everything(cfg.seed, verbose=False)
    out = Path(cfg.out)
    resume = newest_state(out) if cfg.resume == "auto" else None if cfg.resume == "never" else Path(cfg.resume)
    if resume is not None and not resume.exists():
        raise FileNotFoundError(f"resume={cfg.resume!r}: no such file")
    backbone, tokenizer = load_backbone(
        cfg.backbone.model, dtype=cfg.backbone.dtype, adapter=cfg.backbone.adapter, revision=cfg.backbone.revision,
        device="cpu" if cfg.trainer.accelerator == "cpu" else None,
    )  # fmt: skip
    module = HeadTraining(backbone, cfg)
    data = SampleModule(cfg.data, tokenizer, seed=cfg.seed, steps=cfg.optim.steps, accumulate=cfg.optim.accumulate)
    state = out / "state"
    again = " ".join(["locret-train", *(a for a in argv if not a.startswith("resume=")), "resume=auto"])
    trainer = L.Trainer(
        accelerator=cfg.trainer.accelerator,
        devices=cfg.trainer.devices,
        num_nodes=cfg.trainer.num_nodes,
        strategy=cfg.trainer.strategy,
        max_steps=cfg.optim.steps,
        max_epochs=-1,
        log_every_n_steps=cfg.trainer.log_every,
        val_check_interval=cfg.trainer.val_every * cfg.optim.accumulate,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        logger=TensorBoardLogger(str(out), name="", version="tensorboard"),
        plugins=[AtomicCheckpointIO()],
        callbacks=[
            ModelCheckpoint(state, filename="{step}", every_n_train_steps=cfg.trainer.save_every, save_top_k=1,
                            monitor="step", mode="max", enable_version_counter=False),
            LearningRateMonitor(),
            TQDMProgressBar(),
            SaveOnInterrupt(state / "interrupted.ckpt", again),
        ],
        enable_model_summary=False,
    )  # fmt: skip
    try:
        trainer.fit(module, data, ckpt_path=str(resume) if resume else None, weights_only=True)
    except SystemExit as stop:  # Lightning turns Ctrl-C into exit(1) after its callbacks
        if trainer.interrupted:
            raise KeyboardInterrupt from stop
        raise
    dtype = torch.bfloat16 if cfg.heads.dtype_saved == "bfloat16" else torch.float32
    save_heads(module.heads, out / "heads", dtype)
    save_heads(module.heads, out / "heads.pt", dtype)
    return out / "heads"
