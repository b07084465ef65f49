"""Recall: evicted slots are stored in the host's memory, and the best blocks of them come back for the tokens that are read.

``Blocks`` is this project's form: only what eviction drops is stored, the policy's own scores choose the keys by which a block
is found, and the slots that were kept point to blocks too. Source of store, blocks and representatives: InfLLM,
arXiv 2402.04617, whose published form is in ``infllm.py``.
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
    """A block is worth the largest share of one query's attention that one of its representatives, or a kept slot of the same
    tokens, has among all of them."""

    size: Positive = 32
    """Tokens of a block."""
    take: Positive = 4
    """Blocks that come back in each head."""
    representatives: Positive = 4
    """Keys of a block that find it: those of the slots that the policy's score ranks highest."""
    local: Size = 0.5
    """Newest slots, or share of the budget, that the prompt's tail and what follows it see, beside the first 4 tokens and the
    blocks; 0: every slot."""
    reading: bool = True
    """Whether blocks come back while the text is read, or only for the tail and what follows it."""
    apart: Count = 32
    """So many tokens or fewer, read together, look up for each of them alone; more look up together."""
    across: Literal["head", "layer", "model"] = "model"
    """'head': every head has blocks of its own; 'layer': the best of any head; 'model': of any head of this layer or one
    before it."""
    far: Count = 0
    """Distance (tokens) at which all slots stand that are further away; 0: where the run's positions place them."""

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
