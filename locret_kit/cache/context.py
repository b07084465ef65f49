"""Constants of a bound cache: made once when the cache meets its model, read by every step, changed by none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

import torch
from annotated_types import Ge
from torch import Tensor
from transformers import PreTrainedModel

from locret_kernels.attend import Blocks

from ..backbones.decoder_attention import DecoderAttention
from ..backbones.probe import describe
from ..backbones.recording import FARTHEST
from ..backbones.rope import Rope, same_rotation
from ..backbones.spec import AttentionLayer, BackboneSpec, text_config
from ..heads import RetainingHeads
from ..policies import Policy
from ..policies.base import Slots
from ..policies.capabilities import Subject, refuse
from ..settings import Resolved
from .backend import REFERENCE, Backend, backend_for
from .due import Due, Schedule
from .folded import FoldedHeads, fold_heads
from .rotation import Positions, RotationTables
from .storage.blocks import BlockStore
from .storage.codec import CODECS, Plain, Scratch
from .storage.layouts import LAYOUTS, Layout
from .storage.rows import BoundedLayer


@dataclass
class RecallCounters:
    """Work of recall on one text. Seconds are host time."""

    lookups: int = 0
    """Counted over all layers."""
    blocks: int = 0
    """Blocks of a head that came back."""
    hits: int = 0
    """Blocks that came back and were on the device already."""
    loaded_bytes: int = 0
    stored_slots: int = 0
    recall_s: float = 0.0


BlockScores = dict[tuple[int, int], Tensor]
"""Scores ``[B, 1, N]`` that the layers of one forward gave to the blocks, the most of any layer so far, for each piece of the
forward: by its first token and its length."""


Pins = tuple[tuple[int, int], ...]
"""Half-open ranges of positions, ascending, with a gap between any two."""


@dataclass
class CacheCounters:
    """Work of a cache on one text, for the report. Seconds are host time; scoring includes the statistics of attention,
    compacting the merging of evicted slots."""

    evictions: Annotated[int, Ge(0)] = 0
    """Evictions of the layer with the most."""
    evicted_rows: Annotated[int, Ge(0)] = 0
    score_s: Annotated[float, Ge(0)] = 0.0
    select_s: Annotated[float, Ge(0)] = 0.0
    compact_s: Annotated[float, Ge(0)] = 0.0
    computed_pairs: Annotated[int, Ge(0)] = 0
    """Pairs of a query and a row whose attention sparse prefill computed, all heads and layers together."""
    dense_pairs: Annotated[int, Ge(0)] = 0
    """Pairs that dense attention computes in the same blocks; 0 where prefill was not sparse."""
    decoding: str = "dynamic"
    """Way of decoding: "graph", "cpu" (one compiled call per token), or "dynamic" and why."""

    @property
    def computed_share(self) -> float | None:
        """Share of the attention that sparse prefill computed; None where prefill was not sparse."""
        return self.computed_pairs / self.dense_pairs if self.dense_pairs else None

    def count_eviction(self, rows: BoundedLayer, evicted: int) -> None:
        """An eviction of ``evicted`` rows of a layer, of all its heads together."""
        rows.evictions += 1
        self.evictions = max(self.evictions, rows.evictions)
        self.evicted_rows += evicted


class Stage:
    """Work of a policy besides evicting. The base does none; a part of a policy that needs more derives from it."""

    def attend(self, ctx: Context, rows: BoundedLayer, q_BQTD: Tensor) -> Tensor | None:
        """Attention ``[B, Q, T, D]`` of the newest rows' tokens, where it is this stage's own; None otherwise."""
        return None

    def narrows(self, rows: BoundedLayer, tokens: int) -> bool:
        """Whether a chunk of ``tokens`` may see chosen ``blocks`` of the rows alone."""
        return False

    def blocks(self, ctx: Context, rows: BoundedLayer, heads: slice, q_BQTD: Tensor, k_BHSD: Tensor) -> Blocks | None:
        """Blocks of the rows that a chunk sees, for some key/value heads of a layer; None for all rows.

        Args:
            q_BQTD: queries and keys after RoPE.
        """
        return None

    def evicted(self, ctx: Context, rows: BoundedLayer, slots: Slots, scores_BHS: Tensor, stay_BHS: Tensor) -> None:
        """Take notice of an eviction before rows move. ``stay_BHS``: bool, the slots that the policy keeps."""
        return None


@dataclass(frozen=True)
class Context:
    """Everything that a step needs besides the rows of its layer. Only the counters and the tables of a forward change."""

    policy: Policy
    schedule: Schedule
    heads: RetainingHeads | None
    settings: Resolved
    """Positions and backend included, which depend on the model."""
    positions: Positions
    """The kind of position that rotates a cached key."""
    ropes: Sequence[Rope] | None
    """Rotary embedding of each layer; None where the rotation is of no known form, so that the backbone rotates."""
    budgets: Sequence[int]
    """Slots of a head, per layer; a windowed layer has 0 and holds its window."""
    statistics: tuple[str, ...]
    """Running statistics that rows carry; the count of a slot follows from its position."""
    group: int
    """Query heads per key/value head whose own statistics rows carry after those of the group; 0 without."""
    backend: Backend
    """Implementation of the kernels."""
    model: PreTrainedModel
    description: DecoderAttention
    tables: RotationTables
    counters: CacheCounters
    folded: FoldedHeads | None = None
    """Retaining heads folded into the projections of their layers, on a GPU."""
    recalls: RecallCounters = field(default_factory=RecallCounters)
    block_scores: BlockScores = field(default_factory=dict)
    stages: tuple[Stage, ...] = ()
    """Work besides evicting: of the policy, then of a user."""
    own_stages: int = 0
    """Number of the user's."""
    pins: Pins = ()
    """Positions, as rows carry them, whose tokens are never evicted."""
    first: int = 0
    """Position of the first token that rows have read, from which slots are counted; above 0 in a second reading."""

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        policy: Policy,
        schedule: Schedule,
        heads: RetainingHeads | None,
        settings: Resolved,
        counters: CacheCounters,
    ) -> Context:
        """The context of a run on ``model``: each head moves to its layer's device, and to the model's dtype.

        Raises:
            ValueError: heads or a policy of another backbone, or a policy that its attention does not take.
            UnsupportedArchitecture: the policy or the positions need a rotation that is not known.
        """
        if model.device.type == "meta" and hasattr(model, "_hf_hook"):
            raise ValueError(
                f"{type(model).__name__} has its embeddings offloaded: leave them on a device, as device_map='auto' does"
            )
        # Of a model with several parts, the language model alone.
        config, description = text_config(model), describe(model)
        description.check_places(schedule.prompt_length or 0)
        spec, known = description.spec, bool(description.rotations)
        # Where the rotation is known, the kit rotates: frequencies are then chosen once for the whole prompt.
        scheme = settings.positions or ("compact" if known else "original")
        sizes = spec.head_dim, model.dtype, (spec.n_heads, spec.n_kv_heads)
        steady = None if policy.keeps_everything else schedule.steady
        backend = backend_for(settings.backend, model.device, *sizes, steady)
        if description.has_weighted_rotations:  # kernels read one half of a table, and take the other to be like it
            backend = REFERENCE
        placed = Positions.parse(scheme, getattr(config, "max_position_embeddings", None) or 0)
        if placed.span is not None or policy.needs_unrotated:
            description.require_rotations()
        refuse("backbone", Subject(policy, description))
        if placed.span != 0 and policy.recall is not None and policy.recall.far:
            raise ValueError(
                f"positions={scheme!r}: policy={policy.name!r} places slots itself, so it must be 'compact'"
            )
        if heads is not None:
            heads.check_backbone(spec)
            # Heads from outside of inference mode stay so: others cannot be trained on.
            with torch.inference_mode(next(heads.parameters()).is_inference()):
                heads.to(model.dtype)  # all at once: their fingerprint is of the weights before float16
                for head, device in zip(heads.layers, description.devices(model), strict=True):
                    head.to(device)
        if policy.merge is not None:  # a pool moves to its layers' devices, as heads do
            policy.merge.bind(spec, description.devices(model))
        if policy.sparse is not None:
            policy.sparse.bind(spec)
        folded = None
        if heads is not None and policy.score.is_head and backend.folds(model.device):
            folded = fold_heads(model, heads, description)
        # Budgets before frequencies: how far positions reach depends on how many rows there will be.
        ctx = cls(
            policy=policy.at(schedule.budget),
            schedule=schedule,
            heads=heads,
            settings=replace(settings, positions=scheme, backend=backend.name),
            positions=placed,
            ropes=None,
            budgets=layer_budgets(policy, schedule, spec.windows),
            statistics=tuple(sorted(policy.statistics - {"count"})),
            group=spec.n_heads // spec.n_kv_heads if policy.by_query_head else 0,
            backend=backend,
            model=model,
            description=description,
            tables=RotationTables(),
            counters=counters,
            folded=folded,
        )
        if not known:
            return ctx
        ropes = description.ropes(model, ctx.span(schedule.prompt_length))
        if schedule.prompt_length is None and not same_rotation(description.ropes(model, 1), ropes):
            raise ValueError(
                "prompt_length is missing: this backbone's frequencies follow the length of the text (LongRoPE, dynamic "
                "NTK), so it must be known before the first token: pass prompt_length="
            )
        return replace(ctx, ropes=ropes)

    def due(self, rows: BoundedLayer, tokens: int) -> Due:
        """The next block of a layer with ``tokens`` more tokens at hand; with 0 tokens, the eviction due now."""
        return self.schedule.due(rows, self.budgets[rows.number], tokens, after_forward=self.evicts_after_forward)

    def until_cut(self, layers: Sequence[BoundedLayer]) -> int:
        """Tokens for which every layer has room, up to the first after which one may be cut."""
        room = min(rows.capacity - rows.rows for rows in layers)
        return min(self.due(rows, room).tokens for rows in layers)

    def outgrown(self, tokens: int) -> bool:
        """Whether a prompt of ``tokens`` tokens is rotated by other frequencies than were chosen (LongRoPE, dynamic
        NTK). It must then be read again."""
        if self.ropes is None:
            return False
        return not same_rotation(self.ropes, self.description.ropes(self.model, self.span(tokens)))

    def span(self, tokens: int | None) -> int:
        """One more than the largest position in a prompt of ``tokens`` tokens; ``FARTHEST`` where it is not known.
        LongRoPE and dynamic NTK choose frequencies from it."""
        if self.policy.keeps_everything or None not in self.spec.windows or self.positions.span is None:
            return FARTHEST if tokens is None else tokens  # places are those of the text
        # Bounded rows: their number alone bounds the positions. One head of a ragged layer may hold the slots of all of them.
        heads = self.spec.n_kv_heads if self.policy.ragged else 1
        return self.positions.largest(max(self.budgets) * heads + self.schedule.chunk, tokens)

    @property
    def spec(self) -> BackboneSpec:
        """Dimensions of the backbone."""
        return self.description.spec

    @property
    def attention(self) -> str:
        """Name of the operator that reads chunks of a prompt."""
        sizes = self.spec.head_dim, (self.spec.n_heads, self.spec.n_kv_heads)
        return self.backend.reads_by(self.model.device, self.model.dtype, *sizes)

    @property
    def subject(self) -> Subject:
        """Features in use, as ``capabilities`` asks."""
        return Subject(self.policy, self.description, self.settings.kv_bits, self.own_stages)

    @property
    def evicts_after_forward(self) -> bool:
        """Whether evictions wait for the end of a block's forward. Some scores need the final hidden states, and
        some later layers read the same rows."""
        return self.policy.score.needs_logits or self.spec.shared

    def rope(self, layer: int) -> Rope:
        """The rotation of a layer, for policies that need it.

        Raises:
            ValueError: the architecture has none.
        """
        if self.ropes is None:
            raise ValueError(f"policy={self.policy.name!r} needs keys before RoPE, which this backbone does not show")
        return self.ropes[layer]

    def read_rope(self, rows: BoundedLayer) -> Rope | None:
        """The rotation of keys that are stored before RoPE and rotated whenever they are read; None where they are not."""
        stored_raw = self.positions.span is not None and rows.window is None
        return self.ropes[rows.number] if self.ropes is not None and stored_raw else None

    def write_rope(self, rows: BoundedLayer) -> Rope | None:
        """The rotation of keys that are rotated once, before they are stored; None where they are not, or by the backbone."""
        return self.ropes[rows.number] if self.ropes is not None and self.read_rope(rows) is None else None


def layer_budgets(policy: Policy, schedule: Schedule, windows: Sequence[int | None]) -> list[int]:
    """Slots of a head, per layer: the policy's allocation among the layers without a window, 0 for the others."""
    s, full = schedule, sum(window is None for window in windows)
    shares = iter(policy.layer_budgets(s.budget, full, s.chunk, s.stabilizers, s.tail, s.prompt_length))
    return [next(shares) if window is None else 0 for window in windows]


def make_layers(ctx: Context, scratch: Scratch) -> list[BoundedLayer]:
    """Rows of every layer; those in few bits are read through ``scratch``."""
    policy, s, few = ctx.policy, ctx.schedule, ctx.settings.kv_bits is not None
    compiled = few and ctx.backend.packs(ctx.model.dtype)
    layers = []
    for number, (layer, budget) in enumerate(zip(ctx.spec.layers, ctx.budgets, strict=True)):
        capacity = s.prompt_length or 0 if policy.keeps_everything else budget + s.chunk
        rows = layer_rows(policy, layer, capacity, s.chunk, ctx.settings.kv_bits, scratch, compiled=compiled)
        if policy.recall is not None and layer.window is None:
            # Blocks for the whole prompt, where its length is known: the store then never grows.
            room = -(-(s.prompt_length or 0) // policy.recall.size)
            views = policy.recall.count(layer.n_heads // layer.n_kv_heads)
            rows.store = BlockStore(policy.recall.size, policy.recall.representatives, views, room)
        rows.number, rows.grows = number, policy.keeps_everything
        rows.backend, rows.launches = ctx.backend.kernels, ctx.backend.launches
        layers.append(rows)
    return layers


def layer_rows(
    policy: Policy,
    layer: AttentionLayer,
    capacity: int,
    chunk: int,
    bits: int | str | None,
    scratch: Scratch,
    *,
    compiled: bool = False,
) -> BoundedLayer:
    """Rows of one layer: ``capacity`` of them a head, with keys and values in ``bits`` bits; of one with a window those that it
    can still see besides a chunk, as they came. ``compiled``: read and quantised by compiled calls."""
    if layer.window is not None:
        # A chunk forgets everything at its end; before a sliding block stands the window of its first token.
        capacity = layer.window if layer.chunked else layer.window - 1 + chunk
        return BoundedLayer(Layout(capacity), Plain(), layer.window, chunked=layer.chunked)
    codec = Plain() if bits is None else CODECS[str(bits)](bits, scratch, compiled, policy.keeps_everything)
    # Those of the group first, then of each of its query heads where the policy asks for them.
    group = layer.n_heads // layer.n_kv_heads if policy.by_query_head else 0
    statistics = len(policy.statistics - {"count"}) * (1 + group)
    recent = 0 if policy.keeps_everything else policy.recent(chunk)
    merges = policy.merge is not None and policy.merge.tracks_weight
    return BoundedLayer(LAYOUTS[policy.allocation.layout](capacity), codec, None, statistics, recent, merges=merges)
