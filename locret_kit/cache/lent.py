"""Texts whose rows lie in another engine's memory. That engine runs the model and says which text has which page;
attention, scores and evictions are the kit's.

New tokens are scored at once. Texts with one new token are decoded in one call, and the others are read one after
another (see ``texts``). Each layer counts the tokens that it receives, so the engine needs no reports.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from ..backbones.decoder_attention import DecoderAttention, Described, Softmax, rotaries_of, unrotate
from ..backbones.libraries import Undo
from ..backbones.load import load_config, resolve_model
from ..backbones.patches import lacks_bfloat16
from ..backbones.probe import assumed
from ..backbones.spec import spec_of
from ..backbones.weights import stored_weights
from ..heads import RetainingHeads
from ..policies import Policy
from ..settings import Resolved
from .bounded import BoundedCache
from .foreign import SeenLayer, described
from .pages import PageShape, RowPool, SharedRotations
from .ranks import Ranks
from .storage.rows import BoundedLayer, export_rows, restore_rows
from .texts import TextBatch


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
        orders = [()] * self.spec.n_layers if isinstance(found.rotations, str) else [r.order for r in found.rotations]
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
