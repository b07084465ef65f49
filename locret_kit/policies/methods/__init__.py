"""One file per method: its parts, its paper and its registration. The registry imports every module of this folder.

Papers define scores of keys and values for one eviction after a whole prompt, and one-shot runs follow them exactly.
In a chunked run a slot is either fresh (from the current chunk) or kept (from an earlier chunk, whose queries and
neighbours may be gone). Parts of a score are fixed at different times:

| score | when a token enters | once, when its reference is complete | at every eviction |
|---|---|---|---|
| ``knorm`` | everything | - | - |
| ``keydiff`` | - | - | everything, over kept and fresh slots (the paper's own block-wise form) |
| ``lagkv`` | - | everything, when the next partition of the text is complete | - |
| ``expected-attention`` | running mean and covariance of all queries so far | - | everything else |
| ``compactor`` | - | attention inside a block of the text | leverage over kept and fresh slots, both z-scores |

A score keeps its state of a layer in ``Entry.state`` and ``Slots.state``, which are one mapping. Scores written into
``Slots.entry_scores`` stay with their slot. Both depend on the text and on the evictions' positions, not on the
sizes of the model's forwards.
"""
