"""Retaining heads that ship with the project, under names that work in a clone and in a wheel.

A clone has them in ``checkpoints/``, a wheel in packages next to the kit. Commands find them by their backbone's name.
"""

from pathlib import Path

from .backbones import index
from .backbones.gguf import bare_name
from .files import CONFIG, as_object, read_json

PACKAGES = {
    "checkpoints/smollm2-135m-locret": "locret_demo",
    "checkpoints/gemma3-270m-locret": "locret_gemma3_270m",
}
"""Names of the heads, and of their folders in a wheel. Gemma's are in clones only, because of their terms of use."""


def heads_folder(name: str) -> Path:
    """Folder of heads: a path as it is, and a name in ``PACKAGES`` wherever its files are."""
    if name not in PACKAGES or Path(name).exists():
        return Path(name)
    return clone if (clone := index.INSTALLED / name).is_dir() else index.INSTALLED / PACKAGES[name]


def heads_for(model: str) -> str | None:
    """Name of the heads that ship for a backbone, in float or packed form; None if there are none."""
    for name in PACKAGES:
        config = heads_folder(name) / CONFIG
        if config.is_file() and bare_name(str(as_object(read_json(config), name)["backbone"])) == bare_name(model):
            return name
    return None
