"""vLLM with a bounded cache, out of vLLM's tree: each request has one page for its whole life.

To vLLM's scheduler a bounded cache is a state of constant size. Attention, scores and evictions are the kit's own, over pages
that vLLM owns; nothing is told to the scheduler, and nothing of vLLM is changed.

An engine asks for it by naming ``locret_kit.vllm:Requests`` among its logits processors. The kit has one of vLLM's entry
points, which warns (``unasked``): every engine of the environment loads them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .requests import Requests


def __getattr__(name: str) -> type[Requests]:
    """``Requests``, of the release that the kit takes. Raises RuntimeError for another one."""
    if name != "Requests":
        raise AttributeError(name)
    from .refusals import check_version

    check_version()
    from .requests import Requests

    return Requests
