"""Training of LoCoCo's pool: texts are read in chunks through the bounded cache, and next-token cross-entropy is
minimised.

The backbone is frozen: gradients flow through it into the convolutions. Back-propagation is truncated as in the
published code. A chunk's loss reaches the folds of the eviction before it, whose inputs are constants, and a slot
folded again is a constant too. So at most one chunk's graph is in memory.
Source: LoCoCo, arXiv 2406.05317. Its 200 steps and kernel of 21 are from Locret, appendix C.2, where layer norms were
trained as well.
"""

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from ..backbones.decoder_attention import DecoderAttention
from ..backbones.handlers import LayerInput, Softmax
from ..backbones.libraries import forward
from ..backbones.probe import describe
from ..backbones.rope import rotate
from ..backbones.spec import BackboneSpec
from ..cache.attend import attend_rows
from ..cache.bounded import BoundedCache
from ..cache.forward import TextForward
from ..config.train_options import TrainConfig
from ..heads import RetainingHeads
from ..policies import Policy, capabilities
from ..policies.base import Merge, Merged, Score, Slots
from ..policies.grammar import parse_policy
from ..policies.methods.lococo import ConvPool, PoolConfig, merge_convolved, pool_slots, save_pool
from ..samples import Sample
from ..settings import RunSettings
from . import FrozenTraining
from .data import Step


class LearningMerge(Merge):
    """Folds like ``Lococo``, by a pool in training, and keeps the graph of each layer's last folds."""

    tracks_weight = False

    def __init__(self, pool: ConvPool) -> None:
        self.pool = pool
        self.folds: dict[int, list[tuple[Tensor, Tensor, Tensor]]] = defaultdict(list)
        """A layer's heads in order: rows after the eviction ``[R]``, keys before RoPE and values ``[R, D]``."""
        self.grad = False

    def bind(self, spec: BackboneSpec, devices: Sequence[torch.device]) -> None:
        self.pool.check_backbone(spec)

    def slot_weights(
        self, score: Score, slots: Slots, scores_BHS: Tensor, protected_BHS: Tensor, stay_BHS: Tensor
    ) -> Tensor:
        return pool_slots(slots, scores_BHS, protected_BHS, stay_BHS, self.pool.config.slots)

    def merge(self, layer: int, keys_SD: Tensor, values_SD: Tensor, weights_S: Tensor, stay_S: Tensor) -> Merged:
        with torch.set_grad_enabled(self.grad):
            new = merge_convolved(self.pool[layer], keys_SD, values_SD, weights_S, stay_S)
        row_S = stay_S.cumsum(0) - 1
        self.folds[layer].append((row_S[new.slots_R], new.keys_RD, new.values_RD))
        return new


class LearningForward(TextForward):
    """Forwards of a text whose attention is differentiable with respect to the pool. It is fed piece by piece
    (``Schedule.piece``); every layer is full attention, heads hold as many rows, and keys are placed by rank."""

    def attend(
        self, layer: int, q_BQTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, softmax: Softmax, x: LayerInput = None
    ) -> Tensor:
        ctx, rows, T = self.state.context, self.state.layers[layer], q_BQTD.shape[2]
        merger = ctx.policy.merge
        assert isinstance(merger, LearningMerge)
        rows.update(k_BHTD, v_BHTD)  # makes the buffers before they are read
        folds = merger.folds.pop(layer, [])
        keys = torch.cat((_with(rows.slots("keys"), [(at, k) for at, k, _ in folds]), k_BHTD), 2)
        values = torch.cat((_with(rows.slots("values"), [(at, v) for at, _, v in folds]), v_BHTD), 2)
        merger.grad = torch.is_grad_enabled()
        # Without a graph: statistics, rows and evictions.
        super().attend(layer, q_BQTD, k_BHTD, v_BHTD, softmax, x)
        cos, sin = ctx.tables.between(ctx.rope(layer), 0, keys.shape[2], keys)
        return attend_rows(rotate(q_BQTD, cos[-T:], sin[-T:]), rotate(keys, cos, sin), values, softmax.scaling)


def _with(rows_BHSD: Tensor, folds: list[tuple[Tensor, Tensor]]) -> Tensor:
    """A copy of the rows ``[B, H, S, D]`` with each head's folds in their place; heads in order, batch first."""
    rows_NSD = rows_BHSD.flatten(0, 1).clone()
    if folds:
        head = torch.cat([at.new_full(at.shape, n) for n, (at, _) in enumerate(folds)])
        place, new = (torch.cat(parts) for parts in zip(*folds, strict=True))
        rows_NSD = rows_NSD.index_put((head, place), new.to(rows_NSD.dtype))
    return rows_NSD.view(rows_BHSD.shape)


class PoolTraining(FrozenTraining):
    """Trains the convolutions of a pool. ``pool.policy`` selects the slots to keep and is not trained.

    Raises:
        ValueError: a backbone, policy, strategy or setting that cannot train a pool.
    """

    watched = "val/loss"

    def __init__(self, backbone: PreTrainedModel, cfg: TrainConfig) -> None:
        super().__init__(backbone, cfg)
        description = describe(backbone)
        description.require_rotations()
        spec = description.spec
        self.policy = parse_policy(cfg.pool.policy)
        self._warned = False
        self._heads: list[RetainingHeads] = []
        """The policy's retaining heads, if it needs them; in a list, so that they are no submodule."""
        if heads := self.policy.heads_for(cfg.pool.heads, "name them with pool.heads"):
            self._heads = [RetainingHeads.from_pretrained(heads).requires_grad_(False)]
            self._heads[0].check_backbone(spec)
        refuse(cfg, description, self.policy)
        described = PoolConfig.for_backbone(
            spec, cfg.backbone.model, cfg.pool.slots, kernel=cfg.pool.kernel, norm=cfg.pool.norm, policy=cfg.pool.policy,
            inference=cfg.infer.published(),
        )  # fmt: skip
        self.pool = ConvPool(described)

    def export(self, trained: nn.Module, out: Path) -> Path:
        save_pool(cast(ConvPool, trained), out / "pool")
        return out / "pool"

    def used(self) -> nn.Module:
        return self.backbone

    def on_fit_start(self) -> None:
        super().on_fit_start()
        for heads in self._heads:
            heads.to(self.device, self.backbone.dtype)

    def new_cache(self, merges: bool = True) -> BoundedCache:
        """An empty cache. Without merges, the policy's plain eviction for the same budget."""
        policy = replace(self.policy, merge=LearningMerge(self.pool) if merges else None)
        cache = BoundedCache(RunSettings.of(self.cfg.infer.published()), policy, *self._heads)
        if merges:
            cache.handler = LearningForward(cache.state)
        return cache

    def read(
        self, ids: Sequence[int], cache: BoundedCache, backward: Callable[[Tensor], None] | None = None
    ) -> tuple[float, int]:
        """Sum of the cross-entropy (nats) of the tokens after the first eviction, and their number. ``backward`` takes
        each chunk's part of the mean, a scalar."""
        s = cache.schedule
        first, done, total = first_eviction(s.budget, s.chunk), 0, 0.0
        counted = max(0, len(ids) - 1 - first)
        text = torch.tensor([ids], device=self.device)
        while counted and done < len(ids) - 1:
            end = min(done + s.piece(done), len(ids) - 1)
            logits_BTV = forward(self.backbone, text[:, done:end], cache, logits_to_keep=0 if done >= first else 1)
            if done >= first:
                logits = logits_BTV[0].to(torch.promote_types(logits_BTV.dtype, torch.float32))
                loss = F.cross_entropy(logits, text[0, done + 1 : end + 1], reduction="sum")
                total += float(loss.detach())
                if backward is not None:
                    backward(loss / counted)
            done = end
        return total, counted

    def training_step(self, step: Step, index: int) -> None:
        began, share = time.perf_counter(), 1.0 / self.cfg.optim.accumulate
        read = []
        for sample in (sample for batch in step for sample in batch):
            total, counted = self.read(sample.ids, self.new_cache(), lambda loss: self.manual_backward(loss * share))
            read.append((total, counted, len(sample.ids)))
        sums = torch.tensor(read, dtype=torch.float32, device=self.device).sum(0)  # [3]
        total, counted, tokens = self.trainer.strategy.reduce(sums, reduce_op="sum").tolist()  # type: ignore[union-attr]
        if not counted and not self._warned and self.trainer.is_global_zero:
            self._warned, s = True, self.cfg.infer
            said = f"infer.budget={s.budget} and infer.chunk={s.chunk} evict nothing of its texts, which are too short"
            print(f"warning: step {self.global_step + 1} teaches nothing: {said}; so may others", file=sys.stderr)
        self.end_step({"loss": total / max(1, counted), "train/gate": self.pool.mean_gate()}, tokens, began)

    def validation_step(self, sample: Sample, index: int) -> None:
        """Every process validates every sample; the policy without a pool reads it too, to compare with."""
        both = [self.read(sample.ids, self.new_cache(merges)) for merges in (True, False)]
        self._validation.append(torch.tensor(both, dtype=torch.float32, device="cpu"))

    def on_validation_epoch_end(self) -> None:
        (loss, counted), (plain, _) = torch.stack(self._validation).sum(0).tolist()
        self.validated = {"val/loss": loss / max(1, counted), "val/loss_without_pool": plain / max(1, counted)}
        self.log("val/loss", self.validated["val/loss"], prog_bar=True, logger=False, sync_dist=True)
        self.logger.log_metrics(self.validated, step=self.global_step)  # type: ignore[union-attr]


def first_eviction(budget: int, chunk: int) -> int:
    """Tokens in front of the first eviction of a text of unknown length: the chunk's end that passes the budget."""
    return chunk * (budget // chunk + 1)


def refuse(cfg: TrainConfig, description: DecoderAttention, policy: Policy) -> None:
    """Raise ValueError where a pool cannot be trained."""
    spec = description.spec
    if any(window is not None for window in spec.windows):
        raise ValueError(f"{cfg.backbone.model} has layers with a window: no pool can be trained on it")
    if (unlike := description.unlike_llama) is not None:
        raise ValueError(f"no pool can be trained on {cfg.backbone.model}: {unlike}")
    capabilities.refuse("training of a pool", capabilities.Subject(policy))
    if cfg.infer.positions != "compact":
        raise ValueError(f"infer.positions={cfg.infer.positions} must be compact where a pool is trained")
    if cfg.trainer.strategy not in ("auto", "ddp"):
        raise ValueError(f"trainer.strategy={cfg.trainer.strategy} must be auto or ddp where a pool is trained")
    first = first_eviction(cfg.infer.budget, cfg.infer.chunk)
    if cfg.data.max_tokens <= first + 1:
        reason = f"infer.budget={cfg.infer.budget} and infer.chunk={cfg.infer.chunk} evict nothing before"
        raise ValueError(f"data.max_tokens={cfg.data.max_tokens} must be above {first + 1}: {reason}")
