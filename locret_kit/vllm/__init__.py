"""vLLM with a bounded cache, out of vLLM's tree: each request has one page for its whole life.

To vLLM's scheduler a bounded cache is a state of constant size. Attention, scores and evictions are the kit's own, over pages
that vLLM owns. vLLM's code is unchanged.

An engine asks for it by naming ``locret_kit.vllm:Requests`` among its logits processors. The kit has one of vLLM's entry
points, ``warn``: every engine of the environment loads them. Nothing of vLLM is imported for it.
"""

from __future__ import annotations

import logging
import re
import sys
from typing import TYPE_CHECKING

from . import startup

if TYPE_CHECKING:
    from .requests import Requests

LOG = logging.getLogger("locret_kit")


def __getattr__(name: str) -> type[Requests]:
    """``Requests``, of the release that the kit takes. Raises RuntimeError for another one."""
    if name != "Requests":
        raise AttributeError(name)
    from .refusals import check_version

    check_version()
    from .requests import Requests

    return Requests


def warn() -> None:
    """Say so where this process's own arguments have a section and not the logits processor: vLLM ignores it in silence."""
    startup.watch()
    said = " ".join(sys.argv)
    ours = "locret_kit.vllm:" in said or "locret-vllm" in said
    if not ours and re.search(r'"locret"\s*:|additional.config\.locret\b', said):
        LOG.warning("warning: the section 'locret' has no effect without --logits-processors locret_kit.vllm:Requests")
