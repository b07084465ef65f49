"""Recall: evicted slots are stored in host memory, and the best blocks come back for the next tokens.

``Blocks`` is this project's form. Only evicted slots are stored, the policy's scores select the keys that represent
a block, and kept slots vote for blocks too. Source of store, blocks and representatives: InfLLM, arXiv 2402.04617,
whose published form is in ``infllm.py``.
"""

from typing import Literal

import torch
from torch import Tensor

from ..base import BlockIndex, Count, Positive, Recall, Size, wide
from ..registry import part, register

PIECE = 64
"""Queries whose logits exist at once."""


@part("recall", "blocks")
class Blocks(Recall):
    """Blocks by attention. The keys are the representatives of all stored blocks, and the kept slots. A block's relevance is
    the largest attention weight that a query gives to one of its representatives, or to a kept slot of the same tokens."""

    size: Positive = 32
    """Tokens in a block."""
    take: Positive = 4
    """Number of blocks that a head recalls."""
    representatives: Positive = 4
    """Number of representatives of a block: the keys of the slots with the policy's highest scores."""
    local: Size = 0.5
    """Number of newest slots, or share of the budget, that the prompt's tail and later tokens attend to. They also attend to
    the first 4 tokens and the recalled blocks. 0: to every slot."""
    reading: bool = True
    """True: recall from the first chunk on. False: only for the prompt's tail and later tokens."""
    apart: Count = 32
    """Up to this number of tokens in a piece, each token recalls blocks of its own. A longer piece recalls once for all."""
    across: Literal["head", "layer", "model"] = "model"
    """Heads that share blocks: 'head' shares none; 'layer' takes the best relevance of the layer's heads; 'model' that of
    this layer's heads and all earlier layers'."""
    far: Count = 0
    """Largest distance, in tokens, between a query and a slot; slots further away count as that far. 0: no limit."""

    def relevance(self, q_BQTD: Tensor, index: BlockIndex) -> Tensor:
        B, H, N, R, D = index.index_BHNRD.shape
        stored_BHN = index.there_BHNR.any(-1)
        any_BHN = stored_BHN if self.across == "head" else stored_BHN.any(1, keepdim=True).expand(B, H, N)
        block_BHS = index.block_BHS.clamp(min=0)
        counts_BHS = (index.block_BHS >= 0) & any_BHN.gather(-1, block_BHS)
        keys_BHYD = wide(torch.cat((index.index_BHNRD.flatten(2, 3), index.kept_BHSD), 2))
        shown_BHY = torch.cat((index.there_BHNR.flatten(2), counts_BHS), -1)
        worth_BHY = keys_BHYD.new_zeros(B, H, keys_BHYD.shape[2])
        for q_BQtD in wide(q_BQTD).split(PIECE, 2):
            logits_BHXY = q_BQtD.reshape(B, H, -1, D) @ keys_BHYD.mT * index.scaling
            share_BHXY = logits_BHXY.masked_fill(~shown_BHY[:, :, None], float("-inf")).softmax(-1)
            worth_BHY = torch.maximum(worth_BHY, share_BHXY.amax(2).nan_to_num(0.0))
        number_BHY = torch.cat((torch.arange(N * R, device=block_BHS.device).expand(B, H, -1) // R, block_BHS), -1)
        worth_BHN = worth_BHY.new_zeros(B, H, N).scatter_reduce(-1, number_BHY, worth_BHY, "amax")
        worth_BHN = worth_BHN if self.across == "head" else worth_BHN.amax(1, keepdim=True)
        return worth_BHN.masked_fill(~any_BHN[:, : worth_BHN.shape[1]], float("-inf"))


register(
    "recall",
    "{base}; what is evicted comes back, after InfLLM, arXiv 2402.04617",
    {"recall": Blocks()},
    base="locret",
    keeps="as locret; the best evicted blocks are recalled from host memory",
)
