"""locret_kit: retaining heads on frozen language models, and long contexts in a fixed key/value budget.

| name | use |
|---|---|
| ``Document``, ``Chat`` | read a text once and ask about it; hold a conversation, with or without a document |
| ``attach``, ``BoundedCache``, ``CACHE`` | bound the cache of ``model.generate``; ``CACHE`` is its argument's name |
| ``BatchCache`` | the same for a batch: padded texts, beams, several sequences |
| ``save_cache``, ``load_cache`` | write a cache to a file, and continue from it |
| ``RetainingHeads``, ``HeadsConfig``, ``publish`` | load trained heads, describe them, upload them to the Hub |

Tensor names carry their axes as a suffix: ``q_BQTD``, ``score_BHS``.

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

from typing import TYPE_CHECKING

__version__ = "0.1.0"
_EXPORTS = {
    "CACHE": ".backbones.libraries",
    "BatchCache": ".cache.batch",
    "BoundedCache": ".cache.bounded",
    "Chat": ".documents.conversation",
    "Document": ".documents.document",
    "HeadsConfig": ".heads",
    "RetainingHeads": ".heads",
    "attach": ".backbones.intercept",
    "load_cache": ".cache.saved",
    "publish": ".card",
    "save_cache": ".cache.saved",
}
__all__ = [*_EXPORTS, "__version__"]

if TYPE_CHECKING:
    from .backbones.intercept import attach as attach
    from .backbones.libraries import CACHE as CACHE
    from .cache.batch import BatchCache as BatchCache
    from .cache.bounded import BoundedCache as BoundedCache
    from .cache.saved import load_cache as load_cache
    from .cache.saved import save_cache as save_cache
    from .card import publish as publish
    from .documents.conversation import Chat as Chat
    from .documents.document import Document as Document
    from .heads import HeadsConfig as HeadsConfig
    from .heads import RetainingHeads as RetainingHeads


def __getattr__(name: str) -> object:
    """Load on first use, so that ``import locret_kit`` stays light."""
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_EXPORTS[name], __name__), name)


def __dir__() -> list[str]:
    return __all__
