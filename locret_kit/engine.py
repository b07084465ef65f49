"""The engine for rooms that serve, measure, or drive another engine: they import these names and nothing behind them.

``Engine`` answers requests, ``LentPages`` are texts in another engine's forward, ``BoundedCache`` is a text.
"""

from __future__ import annotations

from .cache.bounded import BoundedCache as BoundedCache
from .cache.bounded import CannotFork as CannotFork
from .cache.lent import LentPages as LentPages
from .cache.lent import Ranks as Ranks
from .cache.lent import SeenLayer as SeenLayer
from .cache.saved import CacheFile as CacheFile
from .heads import RetainingHeads as RetainingHeads
from .runtime.engine import Engine as Engine
from .runtime.repetition import KVzip as KVzip
from .runtime.sampling import Sampling as Sampling
from .runtime.sequence import Request as Request
from .runtime.sequence import Sequence as Sequence
from .runtime.session import Answer as Answer
from .runtime.session import prefill as prefill
from .runtime.thoughts import Thought as Thought
