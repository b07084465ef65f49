"""Texts whose rows lie in another engine's memory. That engine runs the model and says which text has which page;
attention, scores and evictions are the kit's.

New tokens are scored at once. Texts with one new token are decoded in one call, and the others are read one after
another (see ``texts``). Each layer counts the tokens that it receives, so the engine needs no reports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PretrainedConfig

from ..backbones.decoder_attention import (
    AttentionCall,
    DecoderAttention,
    Described,
    Linear,
    Rotation,
    Softmax,
    rotaries_of,
    unrotate,
)
from ..backbones.load import load_config, resolve_model
from ..backbones.patches import lacks_bfloat16
from ..backbones.probe import assumed
from ..backbones.recording import close, rotation_between
from ..backbones.spec import AttentionLayer, UnsupportedArchitecture, spec_of
from ..backbones.undo import Undo
from ..backbones.weights import stored_weights
from ..heads import HeadsConfig, RetainingHead, RetainingHeads
from ..policies import Policy
from ..settings import Resolved
from .bounded import BoundedCache
from .pages import PageShape, RowPool, SharedRotations
from .storage.rows import STATE, BoundedLayer, export_rows, restore_rows
from .texts import TextBatch

# ---- parts of a model whose heads are split over several processes, as by tensor parallelism -------------------------


@dataclass(frozen=True)
class Ranks:
    """Place of a process among the ranks that share a layer, and the sum over all of them."""

    rank: int = 0
    size: int = 1
    total: Callable[[Tensor], Tensor] = torch.clone
    """Sum over all ranks of a tensor, which keeps its shape."""

    def check(self, n_kv_heads: int) -> None:
        """Raise ValueError where key/value heads cannot be shared out evenly."""
        if n_kv_heads % self.size:
            raise ValueError(f"tensor_parallel_size={self.size} must divide the {n_kv_heads} key/value heads")

    def config(self, config: PretrainedConfig) -> PretrainedConfig:
        """A model's configuration with the heads of this rank; itself where the rank is alone."""
        if self.size == 1:
            return config
        own, spec = deepcopy(config), spec_of(config)
        self.check(spec.n_kv_heads)
        own.head_dim = spec.head_dim
        own.num_attention_heads, own.num_key_value_heads = spec.n_heads // self.size, spec.n_kv_heads // self.size
        return own

    def heads(self, heads: RetainingHeads) -> RetainingHeads:
        """The part of retaining heads that this rank has; the heads themselves where it is alone."""
        if self.size == 1:
            return heads
        config = heads.config
        self.check(config.n_kv_heads)
        with torch.device("meta"):
            split = RetainingHeads(config)
        split.config = replace(config, n_heads=config.n_heads // self.size, n_kv_heads=config.n_kv_heads // self.size)
        split.layers = nn.ModuleList(SplitHead(head, config, self) for head in heads.layers)  # type: ignore[arg-type]
        return split

    def rows(self, name: str, x: Tensor, layer: AttentionLayer) -> Tensor:
        """Heads of this rank in an exported tensor ``[H, ...]``, or ``[N, H, ...]`` for statistics and states: the same
        shape but for the heads. ``layer`` is the rank's."""
        heads = layer.n_heads if name == "queries" else layer.n_kv_heads
        return x.narrow(int(name == "stats" or name.startswith(STATE)), self.rank * heads, heads)

    def columns(self, config: HeadsConfig) -> Tensor:
        """Columns ``[C]`` of this rank in the concatenation [q; k; v] of all heads."""
        D, start, columns = config.head_dim, 0, []
        for heads in (config.n_heads, config.n_kv_heads, config.n_kv_heads):
            own = heads // self.size
            columns.append(torch.arange(start + self.rank * own * D, start + (self.rank + 1) * own * D, device="cpu"))
            start += heads * D
        return torch.cat(columns)


class SplitHead(nn.Module):
    """A rank's part of a ``RetainingHead``: local q, k, v ``[B, heads, T, D]`` to the scores of its own heads ``[B, H, T]``."""

    def __init__(self, whole: RetainingHead, config: HeadsConfig, ranks: Ranks) -> None:
        super().__init__()
        self.total, self.act = ranks.total, whole.act
        columns, own = ranks.columns(config), config.n_kv_heads // ranks.size
        self.fc1 = nn.Parameter(whole.fc1.weight.detach()[:, columns].contiguous(), requires_grad=False)
        rows = slice(ranks.rank * own, (ranks.rank + 1) * own)
        self.fc2 = nn.Parameter(whole.fc2.weight.detach()[rows].contiguous(), requires_grad=False)

    def forward(self, q_BQTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, linear: Linear = F.linear) -> Tensor:
        x_BTE = torch.cat([x.transpose(1, 2).flatten(2) for x in (q_BQTD, k_BHTD, v_BHTD)], dim=-1)
        hidden = self.act(self.total(linear(x_BTE.to(self.fc1.dtype), self.fc1).contiguous()))
        return F.linear(hidden, self.fc2).transpose(1, 2).float()


# ---- queries, keys and values in the engine's layers, as seen in forwards of a few tokens ----------------------------

# The engine runs the model, so its layers are measured, not transformers' own.


Heads = tuple[Tensor, Tensor]
"""Queries and keys ``[T, heads, D]``."""


class SeenLayer(NamedTuple):
    """Attention of one layer in forwards of the same tokens, from position 0 on."""

    name: str
    layer: int
    """Number of the decoder's layer."""
    sizes: tuple[int, int, int, int]
    """Heads of queries, heads of keys and values, channels of a key and of a value."""
    window: int | None
    plain: bool
    """Whether its softmax has a scaling alone."""
    shared: bool
    """Whether it reads another layer's rows."""
    came: Heads
    """Rotation for attention where nothing is rotated."""
    moved: Heads
    """The arguments of attention for the same tokens at other positions, without rotation."""
    turned: Heads
    """The arguments of attention where queries and keys are rotated."""


def described(
    assumed: DecoderAttention, config: PretrainedConfig, rotaries: nn.Module, seen: Sequence[SeenLayer]
) -> DecoderAttention:
    """The description of a decoder whose forward was seen.

    Args:
        assumed: by the configuration. rotaries: a module with transformers' rotary embeddings, whose frequencies the kit reads.

    Raises:
        UnsupportedArchitecture: a layer whose attention the kit does not know, in one sentence.
    """
    longest = getattr(config, "max_position_embeddings", None)
    layers, calls, rotations = [], [], []
    for number, one in enumerate(seen):
        # A window as long as the trained context never hides a token.
        window = None if longest and one.window and one.window >= longest else one.window
        layers.append(AttentionLayer(*one.sizes, window, index=one.layer))
        calls.append(AttentionCall(one.name, number, one.shared, one.plain))
        if not one.shared:
            rotations.append(_rotation(one, rotaries, _named(assumed, one.layer)))
    spec = replace(assumed.spec, layers=tuple(layers), shared=any(one.shared for one in seen))
    return DecoderAttention(spec, tuple(calls), tuple(rotations))


def _named(assumed: DecoderAttention, index: int) -> Rotation:
    """The rotation that the configuration names for a layer of the decoder."""
    if not assumed.rotations:
        return Rotation()
    pairs = zip(assumed.spec.layers, assumed.rotations, strict=True)
    return next((rotation for layer, rotation in pairs if layer.index == index), Rotation())


def _rotation(one: SeenLayer, rotaries: nn.Module, named: Rotation) -> Rotation:
    """The rotation of a layer by transformers' frequencies, ``named`` ones first."""
    if any(_turns(a, b) for a, b in zip(one.came, one.moved, strict=True)):
        raise UnsupportedArchitecture(f"{one.name} turns queries or keys by a rotation that cannot be left out")
    before, after = ([x.transpose(0, 1)[None] for x in pair] for pair in (one.came, one.turned))
    known = rotaries_of(rotaries)
    if (found := rotation_between(known, before, after, first=named.buffer)) is not None:
        return found
    # Chosen anew for each text by its length; vLLM chooses once, for the longest.
    kinds = getattr(known.get(named.module), "rope_type", None)
    if named.module and {"longrope", "dynamic"} & {*(kinds.values() if isinstance(kinds, dict) else [kinds])}:
        return named
    raise UnsupportedArchitecture(
        f"{one.name} rotates otherwise than transformers' frequencies of this configuration say"
    )


def _turns(a: Tensor, b: Tensor) -> bool:
    """Whether vectors ``[..., D]`` of one shape keep their lengths but not their directions."""
    return close(a.norm(dim=-1), b.norm(dim=-1)) and not close(a, b)


# ---- texts by their pages --------------------------------------------------------------------------------------------


def page_bytes(
    config: PretrainedConfig, settings: Resolved, policies: Iterable[Policy], dtype: torch.dtype, ranks: int = 1
) -> int:
    """Bytes of a text's pages on one rank, of a model whose heads are split over ``ranks``; those of its layers are alike."""
    shapes = PageShape.for_policies(spec_of(Ranks(0, ranks).config(config)), settings, policies, dtype)
    return max(shape.nbytes for shape in shapes) * len(shapes)


class ModelStub(nn.Module, Described):
    """The model of a cache whose forward is another engine's: the language model's configuration of one rank, its
    rotary embeddings, and its device. Its attention follows the configuration until the engine's was measured."""

    def __init__(self, name: str, revision: str | None, ranks: Ranks, dtype: torch.dtype, device: torch.device) -> None:
        from transformers import AutoModelForCausalLM

        super().__init__()
        config = load_config(name, revision)
        with torch.device("meta"):
            shell = AutoModelForCausalLM.from_config(deepcopy(config), dtype=torch.float32)
        self.name, self.names = name, [weight for weight, _ in shell.named_parameters()]
        self.config, self.dtype, self.device = ranks.config(config), dtype, device
        for path, module in rotaries_of(shell.get_decoder()).items():
            if "." not in path:
                setattr(self, path, type(module)(config=deepcopy(config)).to(device))
        self.description = assumed(self.config, getattr(self, "rotary_emb", None))

    def get_decoder(self) -> ModelStub:
        return self

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The whole model's weights from its files, to tell models apart. The engine's own weights are joined and
        split.

        Raises:
            ValueError: they are no ``.safetensors`` files with transformers' names.
        """
        return map(nn.Parameter, stored_weights(resolve_model(self.name), self.names))


class Turn(NamedTuple):
    """New tokens of a text in a forward: ``start`` to ``end`` of all, after ``seen`` others of the text."""

    page: int
    start: int
    end: int
    seen: int


class LentPages:
    """Texts by their pages.

    Args:
        model: name of a folder or of a repository of the Hub, with ``revision``. settings, policies: the largest
            settings of a text, and all policies that it may choose. heads: of the whole model.

    Attributes:
        model: stands in for it. heads: the part of this rank. shape: of the largest page of a layer. texts: by page.

    Raises:
        ValueError: heads that do not fit the model, or heads that the ranks cannot share. FileNotFoundError: no such model.
    """

    softmax = Softmax
    """Scaling, cap and sinks of a layer, see ``LentStep.attend``."""
    mixed = False
    """Whether the engine keeps states of layers in other pages of the same memory: each text is decoded by itself then."""

    def __init__(
        self, model: str, settings: Resolved, policies: Iterable[Policy], heads: RetainingHeads | None, *,
        dtype: torch.dtype, device: torch.device, ranks: Ranks | None = None, revision: str | None = None,
    ) -> None:  # fmt: skip
        self.ranks = ranks or Ranks()
        self.model = ModelStub(model, revision, self.ranks, dtype, device)
        self.settings, self.policies = settings, list(policies)
        self.describe(self.model.description)
        self.heads: RetainingHeads | None = None
        if heads is not None:
            part = self.ranks.heads(heads)
            part.check_backbone(self.spec)
            # The whole stays on the host, where files are compared with it.
            self.heads = (deepcopy(part) if part is heads and device.type != "cpu" else part).to(device, dtype)
        self.texts: dict[int, BoundedCache] = {}
        self._pools: dict[int, RowPool] = {}
        self._rotations = SharedRotations()

    def describe(self, found: DecoderAttention) -> None:
        """Take attention to be this: before the first text begins. The engine keeps states of layers that have one."""
        if found.spec.shared:
            raise ValueError(
                "layers that read another's rows: they are evicted after a forward, which the engine does not cut"
            )
        if uneven := [layer.index for layer in found.spec.layers if layer.key_size != layer.value_size]:
            raise ValueError(f"layer {uneven[0]} has keys and values of different sizes, which no page holds")
        self.spec = replace(found.spec, states=(), state_sizes=())
        self.model.description = replace(found, spec=self.spec)
        self.shapes = PageShape.for_policies(self.spec, self.settings, self.policies, self.model.dtype)
        self.shape = max(self.shapes, key=lambda shape: shape.nbytes)
        orders = [r.order for r in found.rotations] or [()] * self.spec.n_layers
        self.orders = [torch.tensor(order, device=self.model.device) if order else None for order in orders]

    def unrotate(self, model: nn.Module) -> None:
        """Let rotary embeddings of the engine's model turn no token, where they are transformers' own."""
        unrotate(Undo(), model)

    def measure(self, seen: Sequence[SeenLayer]) -> None:
        """Take over attention as seen in the engine. Raises ValueError for a form that the kit does not know."""
        self.describe(described(self.model.description, self.model.config, self.model, seen))
        if self.heads is not None:
            self.heads.check_backbone(self.spec)

    @property
    def widens(self) -> bool:
        """Whether the processor must widen each number of the model's type."""
        return self.model.device.type == "cpu" and self.model.dtype == torch.bfloat16 and lacks_bfloat16()

    def bind(self, text: BoundedCache) -> BoundedCache:
        """A text that has read nothing, bound to the model. Raises ValueError at rows of another model."""
        text.bind(self.model)  # type: ignore[arg-type]
        return text

    def begin(self, page: int, text: BoundedCache) -> None:
        """Give a text that has read nothing a page, which held another one."""
        self.bind(text).move(self._rotations.of(text.context), text.bounded)
        self.texts[page] = text

    def take(self, page: int, text: BoundedCache, document: BoundedCache, memory: Mapping[int, Tensor]) -> None:
        """Give a text a page, and the rows of a document that all ranks have read. ``memory``: of every layer, of
        shape ``[pages, ...]``."""
        self.begin(page, text)
        for layer, rows in enumerate(text.bounded):
            pool = self.place(rows, layer, page, memory[layer])
            empty = pool.keys.new_empty(1, pool.shape.heads, 0, pool.shape.head_dim)
            counts, tensors = export_rows(document.bounded[layer])
            part = {name: self.ranks.rows(name, x, self.spec.layers[layer]) for name, x in tensors.items()}
            restore_rows(rows, counts, part, empty, empty)

    def place(self, rows: BoundedLayer, layer: int, page: int, memory: Tensor) -> RowPool:
        """Let empty rows of a layer lie in a page of the engine's memory, of shape ``[pages, ...]``; returns the
        pool of the page."""
        if self.mixed:  # other pages are not ours: nothing may be written outside of this one
            pool, page = RowPool(self.shapes[layer], memory[page], 1), 0
        else:
            if layer not in self._pools:
                self._pools[layer] = RowPool(self.shapes[layer], memory, len(memory))
            pool = self._pools[layer]
        pool.bind(page, rows)
        return pool

    def text(self, page: int, seen: int) -> BoundedCache:
        """The text of a page. Raises RuntimeError where it is another one than the engine says."""
        text = self.texts.get(page)
        if text is None or text.get_seq_length() != seen:
            tokens = "nothing" if text is None else f"{text.get_seq_length()} tokens"
            raise RuntimeError(f"page {page} holds {tokens}, and the engine says {seen} tokens: please report this")
        return text

    def step(self, turns: Iterable[tuple[int, int, int, int]]) -> LentStep:
        """A forward, by the turn of each text that has new tokens, in the order of ``Turn``."""
        return LentStep(self, [Turn(*turn) for turn in turns])


class LentStep:
    """New tokens of one forward."""

    def __init__(self, pages: LentPages, turns: Sequence[Turn]) -> None:
        self.pages, self.turns = pages, turns
        self.batch: TextBatch | None = None

    def attend(
        self, layer: int, q_NQD: Tensor, k_NHD: Tensor, v_NHD: Tensor, memory: Tensor, softmax: Softmax, out_NQD: Tensor
    ) -> None:
        """Attention of the new tokens in one layer, into ``out``. They become rows, and a due eviction runs.
        ``memory``: the layer's, ``[pages, ...]``."""
        if (order_D := self.pages.orders[layer]) is not None:
            q_NQD, k_NHD = q_NQD[..., order_D], k_NHD[..., order_D]
        if self.batch is None:  # in the first layer: by then documents are taken
            texts = [self.pages.text(turn.page, turn.seen) for turn in self.turns]
            spans = [(turn.start, turn.end) for turn in self.turns]
            self.batch = TextBatch(texts, spans, [turn.seen for turn in self.turns])
        for turn in self.turns:
            rows = self.pages.texts[turn.page].bounded[layer]
            if not rows.is_initialized:
                self.pages.place(rows, layer, turn.page, memory)
        self.batch.attend(layer, q_NQD, k_NHD, v_NHD, softmax, out_NQD)
        if layer + 1 == len(self.pages.orders):
            self.batch.finish()
