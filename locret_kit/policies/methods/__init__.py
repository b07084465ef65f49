"""One file per method: its parts, its paper and its registration. The registry imports every module of this folder.

Scores of keys and values are defined by their papers for one eviction after a whole prompt, and that case is kept exactly. In
a chunked, bounded run a slot is either fresh (its own chunk) or kept (an earlier chunk, whose queries and neighbours may be
gone):

| score | fixed when a token enters | once, when what it is compared with is there | anew at every eviction |
|---|---|---|---|
| ``knorm`` | everything | - | - |
| ``keydiff`` | - | - | everything, over kept and fresh slots (the paper's own block-wise form) |
| ``lagkv`` | - | everything, when the next partition of the text is complete | - |
| ``expected-attention`` | running mean and covariance of all queries so far | - | everything else |
| ``compactor`` | - | attention inside a block of the text | leverage over kept and fresh slots, both z-scores |

A score's state of a layer between calls is in ``Entry.state`` and ``Slots.state``, one mapping; what it writes into
``Slots.entry_scores`` stays with the slot. Both depend on the text and on where evictions fall, never on how a model is fed.
"""
