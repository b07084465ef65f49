"""Forwards of several texts, each with a bounded cache of its own.

``Packed`` is for the kit's own batches: the new tokens of every text lie end to end in one row, so nothing is padded. A
text may be at its prompt while another is decoded, and texts come and go between forwards. ``BatchCache`` is for
``model.generate``, whose texts are rows that are padded to one length.
"""

from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ..backbones.handlers import Arguments, Handler, LayerInput, LayerOperations, Softmax
from ..heads import RetainingHeads, loaded
from ..policies import Policy
from ..policies.capabilities import refuse
from ..settings import RunSettings
from .bounded import BoundedCache
from .context import Stage
from .options import CacheOptions
from .storage.rows import CROPPING
from .texts import Span, TextBatch

WHOLE = "a BatchCache takes the whole prompt in one forward, without prefill_chunk_size"


class ForwardOfTexts(Cache, Handler):
    """Handler of forwards with several texts, which lie in ``texts`` as the forward begins."""

    batch: TextBatch
    position_BT: Tensor
    """Position of each new token in its own text; 0 at padding."""
    given_X4N: Tensor | None = None
    """Row indexes ``[4, N]`` of the new tokens, see ``TextBatch``."""

    def __init__(self, texts: Sequence[BoundedCache] = ()) -> None:
        super().__init__(layers=[])
        self.texts = list(texts)

    def __bool__(self) -> bool:
        """False, as ``BoundedCache``."""
        return False

    @property
    def wants_unrotated(self) -> bool:  # type: ignore[override]
        """Whether q and k come before RoPE."""
        return self.texts[0].handler.wants_unrotated

    def operations(self, x: Tensor) -> LayerOperations | None:
        """Operations of a layer besides attention, for hidden states like ``x [B, T, C]``: those of the first text."""
        return self.texts[0].handler.operations(x)

    def place(self, spans: Sequence[Span], B: int, T: int, device: torch.device) -> None:
        """Say where the new tokens of each text stand in a forward ``[B, T]``, row after row; a text may have none."""
        new = [(text, span) for text, span in zip(self.texts, spans, strict=True) if span[0] < span[1]]
        texts = [text for text, _ in new]
        seen = [text.get_seq_length() for text in texts]
        for (text, (start, end)), before in zip(new, seen, strict=True):
            text.context.description.check_places(before + end - start)
        self.batch = TextBatch([text.state for text in texts], [span for _, span in new], seen, self.given_X4N)
        self.position_BT = self.batch.positions(B * T, device).view(B, T)

    def attend(
        self, layer: int, q_BQTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, softmax: Softmax, x: LayerInput = None
    ) -> Tensor:
        """Attention output ``[B, Q, T, D]``: each text's own; zeros at padding."""
        B, Q, T, _ = q_BQTD.shape
        # Heads of a token lie side by side, as the backbone reads them. Of padding nothing is read.
        out_NQD = q_BQTD.new_zeros(B * T, Q, v_BHTD.shape[-1])
        q, k, v = (new.transpose(1, 2).flatten(0, 1) for new in (q_BQTD, k_BHTD, v_BHTD))
        self.batch.attend(layer, q, k, v, softmax, out_NQD, x.flatten(0, 1) if isinstance(x, Tensor) else x)
        return out_NQD.view(B, T, Q, -1).transpose(1, 2)

    def finish(self, hidden_BTE: Tensor, ids_BT: Tensor | None) -> None:
        """Evict where evictions waited for the forward's end. Texts whose policy scores tokens by their probability read the
        final hidden states ``[B, T, E]``."""
        self.batch.finish()
        hidden_NE = hidden_BTE.flatten(0, 1)
        for text, (start, end) in zip(self.batch.texts, self.batch.spans, strict=True):
            if text.context.evicts_after_forward:
                text.read(hidden_NE[None, start:end], None if ids_BT is None else ids_BT.view(1, -1)[:, start:end])

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values ``[B, H, T, D]`` unchanged; ``attend`` stores them."""
        return key_states, value_states

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return int(query_length), 0

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(text.nbytes for text in self.texts)


class Packed(ForwardOfTexts):
    """One forward of several texts whose new tokens stand end to end in one row.

    Args:
        counts: new tokens of each text. A text that is read ``in_blocks`` must not cross a boundary of its schedule.
        given_X4N: row indexes of the new tokens, see ``TextBatch``.
    """

    def __init__(self, texts: Sequence[BoundedCache], counts: Sequence[int], given_X4N: Tensor | None = None) -> None:
        super().__init__(texts)
        self.given_X4N = given_X4N
        self.ends = list(accumulate(counts))  # (3, 1, 2) -> 3, 4, 6
        self.spans = list(zip([0, *self.ends], self.ends, strict=False))

    def begin(self, model: PreTrainedModel, kwargs: Arguments) -> Arguments:
        ids = kwargs.get("input_ids")
        if ids is None:  # a model with several parts has looked its words up
            ids = kwargs["inputs_embeds"][..., 0]
        if tuple(ids.shape) != (1, self.ends[-1]):
            raise ValueError(f"input_ids={list(ids.shape)} must be [1, {self.ends[-1]}], every text's new tokens")
        for text in self.texts:
            text.bind(model)
            if len(self.texts) > 1:
                refuse("forward of several texts", text.context.subject)
        self.place(self.spans, 1, self.ends[-1], ids.device)
        return {**kwargs, "position_ids": self.position_BT, "attention_mask": None}

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


class BatchCache(ForwardOfTexts):
    """A cache for ``model.generate`` with a padded batch: every row is a text of its own, evicted where it would be alone.

    Arguments are those of ``BoundedCache``, but for ``prompt_length``. The first forward makes a cache for each row. Its
    prompt is the tokens that the attention mask shows; pass the whole prompt in one forward (no ``prefill_chunk_size``).
    Rows that are padded on the right, in a later turn too, are moved to the right edge, so that the last column is the
    last token of every row.

    Attributes:
        texts: the cache of each row. prompt: columns of the prompt.
        shown_BS: whether a column is a token of a row, of all columns seen; None before the first.

    Raises:
        ValueError: a setting out of range; a prompt in pieces, or a row without tokens; another model, or a forward that an
            interrupt ended; in the first forward, a policy that reads the end of the prompt twice or scores tokens by their
            probability: ``runtime.engine`` runs those.
    """

    prompt: int
    shown_BS: Tensor | None
    _after: tuple[int, Tensor] | None
    """``prompt`` and ``shown_BS`` after the forward that runs; None between two."""

    def __init__(
        self,
        settings: RunSettings | int | float | None = None,
        policy: str | Policy | None = None,
        heads: RetainingHeads | str | Path | None = None,
        *,
        stages: Sequence[Stage] = (),
        **given: object,
    ) -> None:
        super().__init__()
        heads = loaded(heads)  # once for all rows
        # Refused here and not at the first forward.
        options = CacheOptions.of(settings, policy, heads, given, stages)
        self._cache_for = partial(BoundedCache, options.settings, options.policy, heads, stages=stages)
        self.reset()

    @property
    def columns(self) -> int:
        """Columns seen, padding included."""
        return 0 if self.shown_BS is None else self.shown_BS.shape[1]

    def begin(self, model: PreTrainedModel, kwargs: Arguments) -> Arguments:
        name = "input_ids" if kwargs.get("input_ids") is not None else "inputs_embeds"
        given, mask = kwargs[name], kwargs.get("attention_mask")
        B, T = given.shape[:2]
        # The mask covers all columns so far; its last T are those of this forward.
        new_BS = torch.ones(B, T, dtype=torch.bool, device=given.device)
        shown_BS = new_BS if self.shown_BS is None or len(self.shown_BS) != B else torch.cat((self.shown_BS, new_BS), 1)
        if mask is not None:
            # A mask of fewer columns goes with a prompt that the cache has read already.
            if not isinstance(mask, Tensor) or tuple(mask.shape) != (B, self.columns + T):
                shape = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
                raise ValueError(
                    f"attention_mask={shape} must be {[B, self.columns + T]}: the {self.columns} columns that "
                    f"this cache has seen and {T} new ones; other texts need reset() or a new cache"
                )
            before_BS, shown_BS = shown_BS[:, :-T], mask.bool()
            if not torch.equal(before_BS, shown_BS[:, :-T]):
                raise ValueError(
                    f"attention_mask must show the {self.columns} columns that this cache has seen as before"
                )
        fresh, texts = shown_BS[:, -T:], self.texts
        counts = fresh.sum(1).tolist()
        if not self.columns:
            # The prompt: every row is a text of its own from here on.
            if not all(counts):
                raise ValueError(f"attention_mask shows no token of row {counts.index(0)} in {T} columns: {WHOLE}")
            texts = [self._cache_for(prompt_length=count) for count in counts]
        elif len(texts) != B:
            raise ValueError(f"batch={B} must be {len(texts)}, for which this cache has its buffers")
        elif self.columns == self.prompt and T > 1:
            raise ValueError(f"{T} columns after {self.columns}, before an answer: {WHOLE}")
        for text in texts:
            text.bind(model)
        ended = not self.columns or self._after is None
        if not ended and [text.get_seq_length() for text in texts] != shown_BS[:, :-T].sum(1).tolist():
            raise ValueError("this cache was interrupted at the end of a forward: reset() it and read again")
        if not self.columns:
            for who in ("batch of generate", "forward of several texts"):
                refuse(who, texts[0].context.subject)
        _refuse_other_places(kwargs.get("position_ids"), shown_BS, T)
        self.texts, self._after = texts, (self.prompt or T, shown_BS)
        # Padding stands on the left now, so the new tokens of a row end at its right edge.
        ends = range(T, (B + 1) * T, T)
        self.place([(end - count, end) for count, end in zip(counts, ends, strict=True)], B, T, given.device)
        moved = given if T == 1 else _to_the_right(given, fresh)
        return {**kwargs, name: moved, "position_ids": self.position_BT, "attention_mask": None}

    def finish(self, hidden_BTE: Tensor, ids_BT: Tensor | None) -> None:
        """Count the columns of a forward that has come to its end, so that one that has not changes nothing, or is refused."""
        super().finish(hidden_BTE, ids_BT)
        assert self._after is not None
        (self.prompt, self.shown_BS), self._after = self._after, None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns seen, padding included."""
        return self.columns

    def reset(self) -> None:
        """Forget all texts: the next forward makes caches for others."""
        self.texts, self.prompt, self.shown_BS, self._after = [], 0, None, None

    def crop(self, tokens_to_remove: int) -> None:
        """Raise ValueError: a bounded cache cannot give back tokens that it has read."""
        raise ValueError(CROPPING)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row becomes ``repeats`` rows, one after the other."""
        self.batch_select_indices(torch.arange(len(self.texts), device="cpu").repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Row ``i`` becomes a copy of row ``indices[i]``. A bool index of shape ``[B]`` keeps the marked rows."""
        rows = indices.nonzero().flatten() if indices.dtype == torch.bool else indices
        self.reorder_cache(rows)  # type: ignore[arg-type]  # a LongTensor

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Row ``i`` becomes a copy of row ``beam_idx[i]``, for an index of shape ``[B]``."""
        # A row that several beams go on from is copied for all of them but the first.
        taken: set[int] = set()
        texts = []
        for row in beam_idx.tolist():
            texts.append(deepcopy(self.texts[row]) if row in taken else self.texts[row])
            taken.add(row)
        self.texts = texts
        if self.shown_BS is not None:
            self.shown_BS = self.shown_BS[beam_idx.to(self.shown_BS.device)]


def _refuse_other_places(given: object, shown_BS: Tensor, T: int) -> None:
    """Raise ValueError unless ``T`` new tokens continue the texts of a cache: by their places among the tokens that a mask shows
    or, with padding on the left alone, among its columns."""
    by_text_BS, (B, S) = (shown_BS.cumsum(1) - 1).clamp(min=0), shown_BS.shape
    by_column_BS = torch.arange(S, device=shown_BS.device).expand(B, S)
    padded_left = not bool((shown_BS[:, 1:] < shown_BS[:, :-1]).any())
    # After padding on the right, generate itself counts on from the padding's place.
    if not isinstance(given, Tensor) or (S > T and not padded_left):
        return
    known = [places[:, -T:] for places in ((by_text_BS, by_column_BS) if padded_left else (by_text_BS,))]
    fits = given.shape[-1:] == (T,) and given.shape[-2:-1] in ((), (1,), (B,))
    if not fits or not any(bool(((given == want_BT) | ~shown_BS[:, -T:]).all()) for want_BT in known):
        first, last = (given.flatten()[end].item() for end in (0, -1))
        raise ValueError(
            f"position_ids={first} to {last} must be {known[0][:, 0].tolist()} to {known[0][:, -1].tolist()}, where this cache "
            "goes on: it takes texts in order and once; others need reset() or a new cache"
        )


def _to_the_right(x_BT: Tensor, fresh_BT: Tensor) -> Tensor:
    """Rows ``[B, T, ...]`` with their padding, wherever it is, before their tokens."""
    # False sorts before True, and a stable sort keeps the tokens' order.
    order_BT = fresh_BT.long().argsort(dim=1, stable=True)
    index = order_BT if x_BT.dim() == 2 else order_BT[..., None].expand_as(x_BT)
    return x_BT.gather(1, index)
