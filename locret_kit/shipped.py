"""Retaining heads that ship with the project, under names that work in a clone and in a wheel.

A clone has them in ``checkpoints/``, a wheel in packages next to the kit. Commands find them by their backbone's name.
"""

from pathlib import Path

from .backbones.gguf import bare_name
from .files import CONFIG, as_object, read_json

INSTALLED = Path(__file__).resolve().parents[1]
"""The folder that holds the package: a clone's root, or where pip installs."""
PACKAGES = {
    "checkpoints/smollm2-135m-locret": "locret_demo",
    "checkpoints/gemma3-270m-locret": "locret_gemma3_270m",
}
"""Names of the heads, and what a wheel calls their folders. Gemma's are in clones only, because of their terms of use."""


def heads_folder(name: str) -> Path:
    """Folder of heads: a path as it is, and a name in ``PACKAGES`` wherever its files are."""
    if name not in PACKAGES or Path(name).exists():
        return Path(name)
    return clone if (clone := INSTALLED / name).is_dir() else INSTALLED / PACKAGES[name]


def heads_for(model: str) -> str | None:
    """Name of the heads that ship for a backbone, in float or packed form; None if there are none."""
    for name in PACKAGES:
        config = heads_folder(name) / CONFIG
        if config.is_file() and bare_name(str(as_object(read_json(config), name)["backbone"])) == bare_name(model):
            return name
    return None
