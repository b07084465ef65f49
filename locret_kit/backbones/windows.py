"""Windows of attention, read off the mask that a layer is given."""

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from .recording import NOW, RecordedCall, storage_of
from .spec import UnsupportedArchitecture

FARTHEST = 1 << 20
"""Position, at most, whose visible tokens say how long a window is."""


def window_of(call: RecordedCall, config: PreTrainedConfig, where: str) -> tuple[int | None, bool]:
    """Tokens that a layer's query sees by the mask that it is given, and whether they are a chunk's."""
    if call.mask is None:
        return None, False
    if not isinstance(call.mask, Tensor):
        raise UnsupportedArchitecture(f"{where} is given a mask of the type {type(call.mask).__name__}")
    sees = NOW.masks.get(storage_of(call.mask))
    if sees is None:
        raise UnsupportedArchitecture(f"{where} is given a mask of the model's own")
    zero = torch.zeros((), dtype=torch.long, device="cpu" if call.mask.is_meta else call.mask.device)

    def start(query: int) -> int:
        """The first token that a query sees. It must see all from there on."""
        at = torch.arange(query + 2, device=zero.device)
        seen = torch.as_tensor(sees(zero, zero, zero + query, at), device=zero.device).expand(len(at))
        first = int(seen.long().argmax())
        if bool(seen[query + 1]) or not bool(seen[first : query + 1].all()):
            raise UnsupportedArchitecture(f"{where} sees tokens that are no stretch up to its own")
        return first

    last = min(getattr(config, "max_position_embeddings", None) or FARTHEST, FARTHEST) - 1
    # A window as long as the trained context (Phi-3-mini-128K: 262,144) never hides a token: full attention.
    if (at := start(last)) == 0:
        return None, False
    if all(start(last - n) == at - n for n in (1, 2, 5) if at >= n):
        return last - at + 1, False
    end = next((n for n in range(1, 4) if start(last - n) != at), 0)
    first = at if not end else start(last - 4)  # the query was within a few tokens of a chunk's beginning
    size = first - start(first - 1)
    if any(start(query) != query - query % size for query in (last, first, first - 1, first + size // 2)):
        raise UnsupportedArchitecture(f"{where} sees tokens that are neither a window nor a chunk")
    return size, True
