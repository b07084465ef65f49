"""Recall: evicted slots are stored in host memory, and the best blocks come back for the next tokens.

``Blocks`` is this project's form. Only evicted slots are stored, the policy's scores select the keys that represent
a block, and kept slots vote for blocks too. Source of store, blocks and representatives: InfLLM, arXiv 2402.04617,
whose published form is below.
"""

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..base import BlockIndex, Count, Positive, Recall, Size, Slots, wide
from ..registry import Sinks, part, register
from .streaming import Recency

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


# ---- InfLLM ----------------------------------------------------------------------------------------------------------------

# InfLLM, arXiv 2402.04617: the first tokens, a local window, and recalled blocks of everything else.
#
# As published and in its code (``inf_llm/attention/context_manager.py`` of thunlp/InfLLM): the first tokens; a window
# of ``far`` tokens; and blocks of 128 tokens of the text between both, in host memory. Slots further away than the
# window get its RoPE distance. A block's representatives are the 4 tokens with the most attention from within the
# window, per query head; their mean is its key. The mean of the queries read together selects the best 16 blocks for
# all heads of a layer. As published: a budget of 4224 (128 and 4096), ``chunk=512``, ``decode_every=128``, positions
# ``compact``.
#
# Differences: tokens that leave the window wait for the next eviction, after a chunk. The block cut by the prompt's
# last eviction is stored with its evicted part.

PUBLISHED = 4224
"""Slots of a head: 128 first tokens, and a window of 4096."""


@part("recall", "infllm")
class Infllm(Recall):
    """Blocks found by the mean of their queries, for a whole layer."""

    size: Positive = 128
    """Tokens of a block."""
    take: Positive = 16
    """Blocks that come back."""
    representatives: Positive = 4
    """Tokens per block and query head whose mean key finds it."""
    far: Positive = 4096
    """Distance (tokens) at which all slots stand that are further away: the local window."""
    statistics: ClassVar[frozenset[str]] = frozenset({"sum"})
    by_query_head: ClassVar[bool] = True
    apart = 0
    reading = True
    local = 0
    across = "layer"

    def shortfall(self, budget: int) -> str:
        return f"places {self.far} slots as in the text" if budget < self.far else ""

    def views(self, slots: Slots, scores_BHS: Tensor) -> Sequence[Tensor]:
        return [one.stats["sum"] for one in slots.group]

    def relevance(self, q_BQTD: Tensor, index: BlockIndex) -> Tensor:
        B, H, _, _, D = index.index_BHNRD.shape
        there_BHNGR = index.there_BHNR.unflatten(-1, (-1, self.representatives))
        keys_BHNGRD = wide(index.index_BHNRD).unflatten(3, (-1, self.representatives))
        total_BHNGD = keys_BHNGRD.masked_fill(~there_BHNGR[..., None], 0).sum(-2)
        key_BHNGD = total_BHNGD / there_BHNGR.sum(-1).clamp(min=1)[..., None]
        q_BHGD = wide(q_BQTD).mean(2).view(B, H, -1, D)
        return (key_BHNGD * q_BHGD[:, :, None]).sum((1, 3, 4))[:, None]


@part("recall", "scaled-infllm")
class ScaledInfllm(Infllm):
    """InfLLM for any budget: at 4224 slots the sizes are as they are given. At another number the window, and the rows that come
    back, are in proportion to it; half of that is in the size of blocks, half in their number. The scaling is this project's."""

    def at(self, budget: int) -> Infllm:
        share = budget / PUBLISHED
        size, take = (max(1, round(n * share**0.5)) for n in (self.size, self.take))
        return Infllm(size, take, min(self.representatives, size), max(1, round(self.far * share)))

    def shortfall(self, budget: int) -> str:
        return ""


NAMES = {"n": "init", "far": "local"}
SOURCE = "InfLLM, arXiv 2402.04617"
register(
    "infllm",
    f"{SOURCE}: with a budget of {PUBLISHED}",
    {"score": Recency(), "scopes": (Sinks(128),), "recall": Infllm()},
    names=NAMES,
    keeps="its place among the first 128 tokens or the newest; blocks of the others are recalled",
)
register(
    "scaled-infllm",
    f"{SOURCE}, in proportion to the budget",
    {"score": Recency(), "scopes": (Sinks(128 / PUBLISHED),), "recall": ScaledInfllm()},
    names=NAMES,
    keeps="as infllm, in proportion to the budget",
)
