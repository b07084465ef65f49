"""The options of ``locret-publish``. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from .schema import Command

USAGE = """usage: locret-publish HEADS USER/NAME [--key value | key=value ...]

Put retaining heads on the Hugging Face Hub, with card, curves and results.

  locret-publish runs/mine/heads user/name --dry-run"""


@dataclass(frozen=True, kw_only=True)
class PublishOptions:
    """Heads to publish, and their names on the Hub."""

    ckpt: str
    """Retaining heads: a folder or a .pt file; a .bin needs --base-model."""
    repo: str
    """USER/NAME: where they go; made if it is not there."""
    private: bool = False
    """Make a new repository private."""
    dry_run: bool = False
    """Print the files and the card, and send nothing."""
    message: str = "Upload retaining heads"
    """Message of the commit."""
    base_model: str | None = None
    """USER/NAME: the backbone as others load it. Default: what the heads say."""
    adapter: str | None = None
    """USER/NAME: the PEFT adapter as others load it. Default: what the heads say."""
    license: str | None = None
    """Default: the card's beside the heads, or apache-2.0."""


PUBLISH = Command("locret-publish", PublishOptions, USAGE, positional=("ckpt", "repo"))
