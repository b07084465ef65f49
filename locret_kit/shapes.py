"""Axis legend. Tensor names carry their axes as a suffix: ``q_BQTD``, ``score_BHS``.

| letter | axis |
|---|---|
| B | batch: texts of a forward; 1 for attention and policies, and no axis of stored rows, since a cache has one text |
| L | layers |
| H | key/value heads of one layer |
| G | query heads per key/value head (1 for multi-head attention) |
| Q | query heads, ``Q = H * G``; query head ``h * G + g`` reads key/value head ``h`` |
| T | new tokens of this call |
| S | slots (rows) of the cache that are visible |
| D | size of one head |

``budget`` is the number of slots a key/value head keeps in one layer after eviction, everything counted.

| word | means |
|---|---|
| head | a key/value head; ``heads`` of a checkpoint are retaining heads, one for all key/value heads of a layer |
| slot, row | a token that a head holds, as a policy sees it; and as it lies in a buffer |
| chunk | tokens between evictions |
| block | tokens that attend together, none of them after an eviction that is due |
| piece | tokens that one forward is fed, of any number |
| body, tail | the prompt up to its last ``local_len`` tokens, and these, which are held back |
"""
