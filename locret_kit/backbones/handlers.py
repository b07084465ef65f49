"""Receivers of the attention calls of a backbone's forward, set by ``intercept``, and the types of their arguments."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple, Self, TypeAlias

from torch import Tensor
from transformers import PreTrainedModel

from locret_kernels.rows import HeadProduct

Arguments = dict[str, Any]
"""Arguments of the decoder's forward, by name."""
Linear = Callable[..., Tensor]
"""Linear map with the arguments of ``torch.nn.functional.linear``."""


class Softmax(NamedTuple):
    """Softmax of one layer's attention."""

    scaling: float
    """Factor on the products of queries and keys."""
    cap: float | None = None
    """Scaled logits ``x`` become ``cap * tanh(x / cap)`` (Gemma 2)."""
    sinks_Q: Tensor | None = None
    """Additional logit of each query head, without a value (gpt-oss)."""

    @property
    def is_plain(self) -> bool:
        """Whether the scaling is all there is."""
        return self.cap is None and self.sinks_Q is None

    def of(self, heads: slice) -> Self:
        """Softmax of some of the query heads."""
        return self if self.sinks_Q is None else self._replace(sinks_Q=self.sinks_Q[heads])


class LayerOperations(NamedTuple):
    """Operations of a layer besides its attention, for a backbone whose own take more passes over memory."""

    rms_norm: Callable[..., tuple[Tensor, Tensor]]
    """Root-mean-square norm, see ``locret_kernels.fused.rms_norm``."""
    swiglu: Callable[[Tensor, Tensor], Tensor]
    """Gated activation, see ``locret_kernels.fused.swiglu``."""
    linear: Linear


Choice = Callable[..., LayerOperations | None]
"""Operations for all the tensors it is given, in the forward that runs now; None for the backbone's own."""


LayerInput: TypeAlias = Tensor | HeadProduct | None
"""Normed hidden states ``[B, T, C]`` that a layer's attention projects, or its retaining head's product with them; None where
they are not at hand."""


class Handler(ABC):
    """Receiver of a forward's attention calls, and of its start and end. The bounded cache is one, a batch of caches another, the
    training observer a third."""

    wants_unrotated = False
    """Whether q and k come before RoPE: the rotary module is not asked then."""
    in_blocks = False
    """Whether a forward is cut into ``blocks``, whose final hidden states are ``read`` one by one."""

    @abstractmethod
    def attend(
        self, layer: int, q_BQTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, softmax: Softmax, x: LayerInput = None
    ) -> Tensor:
        """Attention output ``[B, Q, T, D]`` of a layer's new tokens. Layers are numbered as in ``BackboneSpec``."""

    def attend_shared(self, layer: int, q_BQTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, softmax: Softmax) -> Tensor:
        """Attention output ``[B, Q, T, D]`` of another layer that reads the keys and values of ``layer``, whose new ones are
        given again. Queries may be those of the newest tokens alone."""
        raise ValueError(f"{type(self).__name__} takes no layers that share keys and values")

    def operations(self, x: Tensor) -> LayerOperations | None:
        """Operations for tensors like ``x``, hidden states [B, T, C]; None for the backbone's own."""
        return None

    def begin(self, model: PreTrainedModel, arguments: Arguments) -> Arguments:
        """Prepare for a forward with these arguments of the decoder.

        Returns:
            The arguments for the forward.

        Raises:
            ValueError: arguments that this handler does not support.
        """
        return arguments

    def finish(self, hidden_BTE: Tensor, ids_BT: Tensor | None) -> None:
        """Take the final hidden states of a whole forward, and its token ids."""
        return None

    def blocks(self, tokens: int) -> list[int]:
        """Lengths of the blocks of a forward of ``tokens`` tokens, if it runs ``in_blocks``."""
        return [tokens]

    def read(self, hidden_BTE: Tensor, ids_BT: Tensor | None) -> None:
        """Take a block's final hidden states and its tokens, if the forward runs ``in_blocks``."""
        return None
