"""A warning where vLLM is given settings of a bounded cache and nothing that reads them: it ignores them in silence.

vLLM calls it in every engine's processes (``vllm.general_plugins``). Nothing of vLLM is imported, and nothing is changed.
"""

from __future__ import annotations

import logging
import re
import sys

LOG = logging.getLogger("locret_kit")


def warn() -> None:
    """Say so where this process's own arguments have a section and not the logits processor."""
    said = " ".join(sys.argv)
    ours = "locret_kit.vllm:" in said or "locret-vllm" in said
    if not ours and re.search(r'"locret"\s*:|additional.config\.locret\b', said):
        LOG.warning("warning: the section 'locret' has no effect without --logits-processors locret_kit.vllm:Requests")
