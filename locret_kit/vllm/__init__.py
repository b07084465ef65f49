"""vLLM with a bounded cache: a plugin out of vLLM's tree, in which each request has one page for its whole life.

To vLLM's scheduler a bounded cache is a state of constant size. Attention, scores and evictions are the kit's own, over pages
that vLLM owns; nothing is told to the scheduler, and nothing of vLLM is changed.
"""

VERSIONS = ("0.32.0",)
"""Releases of vLLM in which the plugin was tried: no other is taken."""
SECTION = "locret"
"""Name of the kit's settings in vLLM's ``--additional-config``."""
