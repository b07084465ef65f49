"""Retaining heads trained end to end: what the frozen model says with evictions is brought near to what it says without.

In ``module`` heads learn a target of each layer. Here the loss is the model's output, through all layers: a head learns what its
slots are worth beside those of the others, in a context that evictions have cut. The backbone is frozen: gradients flow through
it and end in the heads, which begin best with what a target has taught (``heads.init``).
Source: IndexMem++ (arXiv 2605.25475) and TRIM-KV (arXiv 2512.03324) train so, with gates of their own kinds.
"""

from __future__ import annotations

import random
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from ..backbones.probe import describe
from ..config.train_config import TrainConfig
from ..heads import RetainingHeads
from ..samples.sample import Sample
from .data import Step
from .frozen_training import FrozenTraining
from .gates import Gated, drawn_eviction
from .trial import Trial, evicting


class EndToEndTraining(FrozenTraining):
    """Trains retaining heads by the divergence of the model's next-token distributions from its own under full attention, after
    the answers' tokens and after some of the text's.

    Raises:
        ValueError: a backbone whose layers all have windows; settings that go with one layer's targets.
    """

    watched = "val/answers"

    def __init__(self, backbone: PreTrainedModel, cfg: TrainConfig) -> None:
        super().__init__(backbone, cfg)
        self.spec = evicting(backbone, cfg).spec
        self._trial = Trial(cfg, self.spec, None)
        self.heads = self._trial.heads
        # Only the order within a head is learned: scores of different heads do not compare.
        self.heads.config = replace(self.heads.config, target="logit")

    def fresh(self) -> nn.Module:
        return RetainingHeads(self.heads.config)

    def export(self, trained: nn.Module, out: Path) -> Path:
        return self._trial.export(trained, out)

    def used(self) -> nn.Module:
        return self.backbone

    # ---- one sample ------------------------------------------------------------------------------------------------------

    def divergence(self, sample: Sample, rng: random.Random, temperature: float) -> tuple[Tensor, Tensor]:
        """``(answers, text)``: mean divergence (nats a token) of what an answer's tokens are predicted with, and of what follows
        drawn tokens of the prompt that see a history with gates; 0 where there are none."""
        how = self.cfg.gates
        eviction = drawn_eviction(
            rng, len(sample.ids), sample.answers[-1][0], share=how.shares, chunks=how.chunks, newest=how.newest,
            tail=self.cfg.infer.local_len, temperature=temperature,
        )  # fmt: skip
        answers = [at - 1 for first, last in sample.answers for at in range(first, last)]
        known = range(eviction.first, sample.answers[-1][0] - 1)
        text = sorted(rng.sample(known, min(how.text_tokens, len(known))))
        places = torch.tensor(answers + text, device=self.device)
        ids = torch.tensor([sample.ids], device=self.device)
        read = partial(self.backbone, input_ids=ids, use_cache=False, logits_to_keep=places)
        with torch.no_grad():
            wanted_TV = read().logits[0].float()
        ropes = describe(self.backbone).ropes(self.backbone, len(sample.ids))
        with self._attachment.handled_by(
            Gated(self.heads, ropes, self.spec.layers, eviction, hard=how.forward == "evicted")
        ):
            mine_TV = read().logits[0].float()
        each = divergence(mine_TV, wanted_TV, how.divergence)
        apart = each.split([len(answers), len(text)])
        a, b = (part.mean() if len(part) else each.new_zeros(()) for part in apart)
        return a, b

    def temperature(self, step: int) -> float:
        """That of a step: from the first to the last, evenly in its logarithm."""
        first, last = self.cfg.gates.temperatures
        done = min(1.0, step / max(1, self.cfg.optim.steps - 1))
        return first * (last / first) ** done

    def training_step(self, step: Step, index: int) -> None:
        began, share = time.perf_counter(), 1.0 / self.cfg.optim.accumulate
        rng = random.Random(f"{self.cfg.seed}:gates:{self.global_step}:{self.trainer.global_rank}")
        seen, tokens = [], 0
        for sample in (sample for batch in step for sample in batch):
            answers, text = self.divergence(sample, rng, self.temperature(self.global_step))
            loss = (answers + self.cfg.gates.text_weight * text) * share
            if (
                loss.requires_grad
            ):  # not where the drawn budget holds all that comes before the tail: nothing is to be learned
                self.manual_backward(loss)
            seen.append(torch.stack((answers.detach(), text.detach())))
            tokens += len(sample.ids)
        mean = torch.cat([torch.stack(seen).mean(0), seen[0].new_tensor([tokens])])
        answers, text, tokens = self.trainer.strategy.reduce(mean, reduce_op="mean").tolist()  # type: ignore[union-attr]
        total = answers + self.cfg.gates.text_weight * text
        self.require_finite(total)
        speed = self._update(tokens * self.trainer.world_size, began)
        self.log_step({"loss": total, "train/answers": answers, "train/text": text} | speed)

    def validation_step(self, sample: Sample, index: int) -> None:
        """Every process validates every sample, with evictions of its own number and gates of the last temperature."""
        rng = random.Random(f"{self.cfg.seed}:validation:{index}")
        with torch.no_grad():
            self._validation.append(torch.stack(self.divergence(sample, rng, self.cfg.gates.temperatures[1])))

    def on_validation_epoch_end(self) -> None:
        answers, text = torch.stack(self._validation).mean(0).tolist()
        self.validated = {"val/answers": answers, "val/text": text}
        self.log("val/answers", answers, prog_bar=True, logger=False)
        self.logger.log_metrics(self.validated, step=self.global_step)  # type: ignore[union-attr]


def divergence(mine_TV: Tensor, wanted_TV: Tensor, kind: str) -> Tensor:
    """Kullback-Leibler divergence ``[T]`` (nats) of two next-token distributions, given as logits: 'forward' is the mean over
    ``wanted`` of what ``mine`` loses, 'reverse' the mean over ``mine``."""
    mine_TV, wanted_TV = mine_TV.log_softmax(-1), wanted_TV.log_softmax(-1)
    p, q = (wanted_TV, mine_TV) if kind == "forward" else (mine_TV, wanted_TV)
    return F.kl_div(q, p, reduction="none", log_target=True).sum(-1)
