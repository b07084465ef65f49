"""A cache of transformers whose layers are bounded: what is asked of all of them together."""

from __future__ import annotations

from torch import LongTensor, Tensor

from ..backbones.intercept import active_handler
from ..backbones.states import StatefulCache
from .storage.codec import Float8, Scratch
from .storage.rows import BoundedLayer


class LayeredCache(StatefulCache):
    """The layers of one text. There are none before a model is known.

    Attributes:
        scratch: the buffers through which rows in few bits are read.
        unfinished: whether a forward has begun that not every layer has finished.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.scratch = Scratch()
        self.unfinished = False

    def __bool__(self) -> bool:
        """False, since Phi-3's ``prepare_inputs_for_generation`` goes on without a cache that is true where a text outgrows the
        first factors of LongRoPE; here they are chosen once, and stay."""
        return False

    def refuse_interrupted(self) -> None:
        """Raise ValueError where a forward ended in the middle: layers have seen different numbers of tokens then."""
        seen = sorted({rows.seen for rows in self.bounded})
        if self.unfinished or len(seen) > 1:
            raise ValueError(
                f"this cache was interrupted inside a forward, after {seen[0]} to {seen[-1]} tokens: reset() it and read again"
            )

    def finish(self, hidden_BTE: Tensor, ids_BT: Tensor | None) -> None:
        """Check that every layer has seen the forward's tokens. Raises ValueError where one has not."""
        # A backbone that computes some attention by itself leaves a layer behind.
        seen = {rows.seen for rows in self.bounded}
        if self.unfinished or len(seen) > 1:
            raise ValueError(
                f"layers have seen {min(seen)} to {max(seen)} tokens of this text: some attention did not reach the cache"
            )

    @property
    def bounded(self) -> list[BoundedLayer]:
        """The layers, by their type."""
        return self.layers  # type: ignore[return-value]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Hand keys and values through; ``attend`` stores them."""
        # A backbone's attention calls this first. Where no handler takes over, every row would be lost.
        if active_handler() is not self:
            raise RuntimeError(
                "a BoundedCache was given to a model that is not attached: use `with attach(model): ...`"
            )
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen, by every layer alike; the backbone's layers are numbered otherwise than the rows."""
        return self.bounded[0].get_seq_length() if self.layers else 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.bounded[0].get_mask_sizes(query_length) if self.layers else (int(query_length), 0)

    def reorder_cache(self, beam_idx: LongTensor) -> None:
        raise ValueError("a BoundedCache takes one text: beams are texts of a BatchCache")

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise ValueError("a BoundedCache takes one text: several are those of a BatchCache")

    @property
    def kept_rows(self) -> list[int]:
        """Rows a head holds now (on average where heads differ), per layer."""
        return [layer.rows for layer in self.bounded]

    @property
    def clipped(self) -> int:
        """Numbers of keys and values beyond the range of 8 bits (``kv_bits=8``). The host waits for the device."""
        return sum(
            int(rows.codec.clipped.sum()) for rows in self.bounded if isinstance(rows.codec, Float8) and rows.seen
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers on the device."""
        states = 0 if self.states is None else self.states.nbytes
        return sum(layer.nbytes for layer in self.bounded) + self.scratch.nbytes + states

    @property
    def host_nbytes(self) -> int:
        """Bytes of the stores in the host's memory, where evicted slots may come back."""
        return sum(layer.store.host_bytes for layer in self.bounded if layer.store is not None)
