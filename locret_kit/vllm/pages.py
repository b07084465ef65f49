"""Texts whose rows lie in vLLM's memory. vLLM runs the model and says which text has which page; attention, scores and
evictions are the kit's.

New tokens are scored at once. Texts with one new token are decoded in one call, and the others are read one after
another (see ``TextBatch``). Each layer counts the tokens that it receives, so vLLM needs no reports.
"""

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..engine import BoundedCache, PageShape, RetainingHeads, StandIn, TextBatch
from ..policies import Policy
from ..settings import Resolved

# ---- retaining heads of a model whose heads are split over several processes, as by tensor parallelism ---------------


@dataclass(frozen=True)
class Ranks:
    """Place of a process among the ranks that share a layer, and the sum over all of them."""

    rank: int = 0
    size: int = 1
    total: Callable[[Tensor], Tensor] = torch.clone
    """Sum over all ranks of a tensor, which keeps its shape."""

    def own(self, heads: int) -> slice:
        """This rank's part of as many heads of the whole model."""
        return slice(self.rank * heads // self.size, (self.rank + 1) * heads // self.size)

    def heads(self, heads: RetainingHeads) -> RetainingHeads:
        """The part of retaining heads that this rank has; the heads themselves where it is alone."""
        if self.size == 1:
            return heads
        config = heads.config
        with torch.device("meta"):
            split = RetainingHeads(config)
        split.config = replace(config, n_heads=config.n_heads // self.size, n_kv_heads=config.n_kv_heads // self.size)
        split.layers = nn.ModuleList(SplitHead(heads, layer, self) for layer in range(len(heads.layers)))
        return split


class SplitHead(nn.Module):
    """A rank's part of a layer's retaining head: its q, k, v ``[B, heads, T, D]`` to scores of its heads ``[B, H, T]``."""

    def __init__(self, heads: RetainingHeads, layer: int, ranks: Ranks) -> None:
        super().__init__()
        config, name = heads.config, f"layers.{layer}"
        fc1, fc2 = (heads.get_parameter(f"{name}.{linear}.weight").detach() for linear in ("fc1", "fc2"))
        self.total, self.act = ranks.total, heads.get_submodule(f"{name}.act")
        # fc1 reads [q; k; v] of all heads: of each of the three the columns of this rank.
        kinds = fc1.split([n * config.head_dim for n in (config.n_heads, config.n_kv_heads, config.n_kv_heads)], 1)
        self.fc1 = nn.Parameter(torch.cat([x[:, ranks.own(x.shape[1])] for x in kinds], 1), requires_grad=False)
        self.fc2 = nn.Parameter(fc2[ranks.own(config.n_kv_heads)].contiguous(), requires_grad=False)

    def forward(
        self, q_BQTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, linear: Callable[..., Tensor] = F.linear
    ) -> Tensor:
        x_BTE = torch.cat([x.transpose(1, 2).flatten(2) for x in (q_BQTD, k_BHTD, v_BHTD)], dim=-1)
        hidden = self.act(self.total(linear(x_BTE.to(self.fc1.dtype), self.fc1).contiguous()))
        return F.linear(hidden, self.fc2).transpose(1, 2).float()


# ---- texts ----------------------------------------------------------------------------------------------------------


class Turn(NamedTuple):
    """New tokens of a text in a forward: ``start`` to ``end`` of all, after ``seen`` others of the text."""

    page: int
    start: int
    end: int
    seen: int


class EnginePages:
    """Texts by their pages.

    Args:
        model: name of a folder or of a repository of the Hub, with ``revision``. settings, policies: the largest
            settings of a text, and all policies that it may choose. heads: of the whole model.

    Attributes:
        model: stands in for it. heads: the part of this rank. shape: of the largest page of a layer. texts: by page.

    Raises:
        ValueError: heads that do not fit the model, or heads that the ranks cannot share. FileNotFoundError: no such model.
    """

    mixed = False
    """Whether vLLM keeps states of layers in other pages of the same memory: each text is decoded by itself then."""

    def __init__(
        self, model: str, settings: Resolved, policies: Iterable[Policy], heads: RetainingHeads | None, *,
        dtype: torch.dtype, device: torch.device, ranks: Ranks | None = None, revision: str | None = None,
    ) -> None:  # fmt: skip
        self.ranks = ranks or Ranks()
        self.model = StandIn(model, revision, self.ranks.size, dtype, device)
        self.settings, self.policies = settings, list(policies)
        self._lay_out()
        self.heads: RetainingHeads | None = None
        if heads is not None:
            part = self.ranks.heads(heads)
            part.check_backbone(self.spec)
            # The whole stays on the host, where files are compared with it.
            self.heads = (deepcopy(part) if part is heads and device.type != "cpu" else part).to(device, dtype)
        self.texts: dict[int, BoundedCache] = {}
        self._binds: dict[int, Callable[..., None]] = {}
        """``RowPool.bind`` of each layer."""

    def _lay_out(self) -> None:
        """Make pages as the model's description asks for, before the first text begins. vLLM keeps states of layers that have
        one."""
        found = self.model.description
        if found.spec.shared:
            said = "they are evicted after a forward, which the engine does not cut"
            raise ValueError(f"layers that read another's rows: {said}")
        if uneven := [layer.index for layer in found.spec.layers if layer.key_size != layer.value_size]:
            raise ValueError(f"layer {uneven[0]} has keys and values of different sizes, which no page holds")
        self.spec = replace(found.spec, states=(), state_sizes=())
        self.model.description = replace(found, spec=self.spec)
        self.shapes = PageShape.for_policies(self.spec, self.settings, self.policies, self.model.dtype)
        self.shape = max(self.shapes, key=lambda shape: shape.nbytes)
        orders = [r.order for r in found.rotations] or [()] * self.spec.n_layers
        self.orders = [torch.tensor(order, device=self.model.device) if order else None for order in orders]

    def measure(self, seen: Iterable[tuple[object, ...]]) -> None:
        """Take over attention as seen in vLLM, see ``StandIn.described``. Raises ValueError for a form that the kit does not
        know."""
        self.model.description = self.model.described(seen)
        self._lay_out()
        if self.heads is not None:
            self.heads.check_backbone(self.spec)

    def bind(self, text: BoundedCache) -> BoundedCache:
        """A text that has read nothing, bound to the model. Raises ValueError at rows of another model."""
        text.bind(self.model)  # type: ignore[arg-type]
        return text

    def begin(self, page: int, text: BoundedCache) -> None:
        """Give a text that has read nothing a page, which held another one."""
        self.texts.pop(page, None)
        self.bind(text).state.share_rotations(other.state for other in self.texts.values())
        self.texts[page] = text

    def take(self, page: int, text: BoundedCache, document: BoundedCache, memory: Mapping[int, Tensor]) -> None:
        """Give a text a page, and the rows of a document that all ranks have read. ``memory``: of every layer, of
        shape ``[pages, ...]``."""
        self.begin(page, text)
        for layer in range(self.spec.n_layers):
            self.place(layer, page, memory[layer])
        text.state.take_over(document.state, (self.ranks.rank, self.ranks.size))

    def place(self, layer: int, page: int, memory: Tensor) -> None:
        """Let empty rows of a layer lie in a page of vLLM's memory, of shape ``[pages, ...]``."""
        shape, rows = self.shapes[layer], self.texts[page].bounded[layer]
        if self.mixed:  # other pages are not ours: nothing may be written outside of this one
            shape.pool(memory[page], 1).bind(0, rows)
            return
        if layer not in self._binds:
            self._binds[layer] = shape.pool(memory, len(memory)).bind
        self._binds[layer](page, rows)

    def text(self, page: int, seen: int) -> BoundedCache:
        """The text of a page. Raises RuntimeError where it is another one than vLLM says."""
        text = self.texts.get(page)
        if text is None or text.get_seq_length() != seen:
            tokens = "nothing" if text is None else f"{text.get_seq_length()} tokens"
            raise RuntimeError(f"page {page} holds {tokens}, and the engine says {seen} tokens: please report this")
        return text


class EngineStep:
    """New tokens of one forward, by the turn of each text that has some."""

    def __init__(self, pages: EnginePages, turns: list[Turn]) -> None:
        self.pages, self.turns = pages, turns
        self.batch: TextBatch | None = None

    def attend(
        self, layer: int, q_NQD: Tensor, k_NHD: Tensor, v_NHD: Tensor, memory: Tensor,
        softmax: tuple[float, float | None, Tensor | None], out_NQD: Tensor,
    ) -> None:  # fmt: skip
        """Attention of the new tokens in one layer, into ``out``. They become rows, and a due eviction runs.
        ``memory``: the layer's, ``[pages, ...]``."""
        if (order_D := self.pages.orders[layer]) is not None:
            q_NQD, k_NHD = q_NQD[..., order_D], k_NHD[..., order_D]
        if self.batch is None:  # in the first layer: by then documents are taken
            texts = [self.pages.text(turn.page, turn.seen).state for turn in self.turns]
            spans = [(turn.start, turn.end) for turn in self.turns]
            self.batch = TextBatch(texts, spans, [turn.seen for turn in self.turns])
        for turn in self.turns:
            if not self.pages.texts[turn.page].bounded[layer].is_initialized:
                self.pages.place(layer, turn.page, memory)
        self.batch.attend(layer, q_NQD, k_NHD, v_NHD, softmax, out_NQD)
        if layer + 1 == len(self.pages.orders):
            self.batch.finish()
