"""The engine for rooms that serve, measure, or drive another engine: they import these names and nothing behind them.

``Engine`` answers requests, ``BoundedCache`` is a text. Another engine has a ``StandIn`` for its model, and ``TextBatch`` for the
texts of a forward, whose rows lie in its memory as ``PageShape`` says.
"""

from .backbones.stand_in import StandIn as StandIn
from .cache.bounded import BoundedCache as BoundedCache
from .cache.pages import PageShape as PageShape
from .cache.saved import CacheFile as CacheFile
from .cache.state import CannotFork as CannotFork
from .cache.texts import TextBatch as TextBatch
from .heads import RetainingHeads as RetainingHeads
from .runtime.engine import Engine as Engine
from .runtime.repetition import KVzip as KVzip
from .runtime.sampling import Sampling as Sampling
from .runtime.sequence import Request as Request
from .runtime.sequence import Sequence as Sequence
from .runtime.session import Answer as Answer
from .runtime.session import prefill as prefill
from .runtime.thoughts import Thought as Thought
