"""Files: atomic writes, folders of weights, JSON.

Every write goes beside its target and is renamed, so a full disk or a kill leaves the previous file whole.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .naming import first_line

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS, CONFIG = "model.safetensors", "config.json"


def write_beside(target: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a temporary file in the target's folder, then rename it over the target; a device or a pipe, which a
    rename would take away, is refused."""
    if target.exists() and not target.is_file():
        raise OSError(f"cannot write {target}: it is no regular file")
    from safetensors import SafetensorError

    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    os.close(handle)
    try:
        write(Path(name))
        with open(name, "rb+") as file:
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, target)
    except (OSError, RuntimeError, SafetensorError) as error:  # a full disk: torch.save and safetensors have their own
        if str(error).startswith("cannot write"):
            raise
        free = shutil.disk_usage(target.parent).free
        reason = getattr(error, "strerror", None) or first_line(error)
        raise OSError(f"cannot write {target} ({free / 2**20:.0f} MiB free): {reason}") from error
    finally:
        Path(name).unlink(missing_ok=True)


def write_folder(folder: Path, config: dict[str, Any], state: dict[str, Tensor]) -> None:
    """Write ``config.json`` and ``model.safetensors``: the new configuration is on the disk before the weights that it
    describes are renamed, and renamed after them."""
    from safetensors.torch import save_file

    def both(path: Path) -> None:
        path.write_text(json.dumps(config, indent=2) + "\n")
        write_beside(folder / WEIGHTS, lambda path: save_file(state, path, metadata={"format": "pt"}))

    write_beside(folder / CONFIG, both)


def read_json(path: Path) -> Any:
    """What a configuration's file holds.

    Raises:
        ValueError: no JSON; names the file.
    """
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
