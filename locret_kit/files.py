"""Files: atomic writes, folders of weights, JSON, YAML, UTF-8, locks.

Every write goes beside its target and is renamed, so a full disk or a kill leaves the previous file whole.
"""

from __future__ import annotations

import codecs
import hashlib
import io
import json
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NoReturn

from safetensors import SafetensorError, safe_open

from .naming import first_line, prefixed_errors

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS, CONFIG = "model.safetensors", "config.json"
HASH = "weights_sha256"
"""Field of ``config.json`` that says which weights it belongs to."""
ABANDONED = 86400
"""Seconds after which a temporary file of another machine is nobody's."""
POINTER = b"version https://git-lfs"
"""First bytes of the file that Git LFS leaves in place of a large one."""


class LaterVersion(ValueError):
    """A file of a later kit."""


def pointer_note(path: Path) -> str:
    """The words for a file, or for files of a folder, that are pointers of Git LFS; empty where none is. They end an error."""
    found = []
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        with suppress(OSError), file.open("rb") as opened:
            found += [file.name] if opened.read(len(POINTER)) == POINTER else []
    return f" ({', '.join(found[:3])}: a Git LFS pointer in place of the content, run `git lfs pull`)" if found else ""


def _cut(path: Path) -> str:
    return f"{path} is truncated or no safetensors file{pointer_note(path)}"


def write_beside(target: Path, write: Callable[[Path], object]) -> None:
    """Write a file atomically: ``write`` fills a temporary file in the target's folder, which is then renamed over
    the target.

    The mode is that of the file before, otherwise it follows the umask. Temporary files of killed processes are
    removed: those of this machine at once, others after a day.

    Raises:
        OSError: one line with the target; also for a device or a pipe, which a rename would replace.
    """
    if target.exists() and not target.is_file():
        raise OSError(f"cannot write {target}: it is no regular file")
    target.parent.mkdir(parents=True, exist_ok=True)
    here = _place()
    for left in target.parent.glob(".*.partial"):
        # The whole name: other programs have partial files too, and another machine that shares the folder may be called as
        # this one and more, node and node-2.
        made = re.fullmatch(r"\..*\.[0-9a-f]{8}\.([\w-]+)-(\d+)\.partial", left.name)
        with suppress(OSError):  # its writer has just renamed it, or it is another user's
            old = time.time() - left.stat().st_mtime > ABANDONED
            if made and (not _running(int(made[2])) if made[1] == here else old):
                left.unlink()
    # Of a name of 255 bytes, the most that there are, a part.
    beside = target.with_name(f".{target.name[:30]}.{secrets.token_hex(4)}.{here}-{os.getpid()}.partial")
    try:
        beside.touch(exist_ok=False)
        mode = (target if target.exists() else beside).stat().st_mode
        write(beside)
        with open(beside, "rb+") as file:
            os.fsync(file.fileno())
        beside.chmod(mode)  # safetensors makes a file of its own, for its owner alone
        os.replace(beside, target)
    except (OSError, RuntimeError, SafetensorError) as error:  # a full disk: torch.save and safetensors have their own
        if str(error).startswith("cannot write"):
            raise
        free = shutil.disk_usage(target.parent).free
        reason = getattr(error, "strerror", None) or first_line(error)
        raise OSError(f"cannot write {target} ({free / 2**20:.0f} MiB free): {reason}") from error
    finally:
        beside.unlink(missing_ok=True)


def _place() -> str:
    """Name of what shares process numbers: machines and containers may have one host name, and numbers of their own."""
    made = hashlib.sha256()
    for name in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        with suppress(OSError):  # Linux has them
            made.update(os.readlink(name).encode() if os.path.islink(name) else Path(name).read_bytes())
    return f"{re.sub(r'[^A-Za-z0-9_]', '-', socket.gethostname())}-{made.hexdigest()[:8]}"


def _running(pid: int) -> bool:
    if os.name != "posix":  # signal 0 would end the process elsewhere
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


def write_text(target: Path, text: str) -> None:
    """Write UTF-8 text as ``write_beside`` does."""
    write_beside(target, lambda path: path.write_text(text, encoding="utf-8"))


def write_json(target: Path, value: object) -> None:
    """Write indented JSON as ``write_beside`` does."""
    write_text(target, json.dumps(value, indent=2) + "\n")


def read_json(path: Path) -> object:
    """The value in a JSON file.

    Raises:
        ValueError: no JSON; names the file.
    """
    return parse_json(path.read_bytes(), str(path))


def as_object(value: object, where: str) -> dict[str, object]:
    """A JSON value that has to be an object. Raises ValueError for another one, which begins with ``where``."""
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be a JSON object, not {type(value).__name__}")
    return value


def parse_json(text: str | bytes, where: str, *, strict: bool = False) -> object:
    """The value of a JSON text.

    Args:
        strict: refuse Python's extensions of the standard: duplicate names, NaN and infinities, and halves of
            surrogate pairs.

    Raises:
        ValueError: invalid JSON, or nested too deeply; one line that begins with ``where``.
    """
    try:
        if not strict:
            return json.loads(text)
        value = json.loads(text, object_pairs_hook=_once, parse_constant=_no_number)
        # Written again: a number may have overflowed, a text may be no Unicode.
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        return value
    except (UnicodeEncodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{where} is not UTF-8: {error.reason}") from error
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {first_line(error)}") from error
    except RecursionError as error:
        raise ValueError(f"{where} is nested too deeply") from error


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """A JSON object without duplicate names. Raises ValueError otherwise."""
    values: dict[str, object] = {}
    for name, value in pairs:
        if name in values:
            raise ValueError(f"{name[:60]!r} occurs twice in an object")
        values[name] = value
    return values


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number")


def read_yaml(path: Path, source: str) -> dict[str, object]:
    """Read a YAML file of ``name: value``.

    Raises:
        ValueError: it cannot be read, is no YAML or holds something else; the message begins with ``source``.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        """Refuses duplicate keys and aliases."""

        def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
            if self.check_event(yaml.AliasEvent):
                raise yaml.YAMLError("aliases are not read")
            return super().compose_node(parent, index)

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
            names = [key.value for key, _ in node.value if isinstance(key.value, str)]
            if twice := [name for name in names if names.count(name) > 1]:
                raise yaml.YAMLError(f"{twice[0]} occurs twice")
            return super().construct_mapping(node, deep)

    try:
        loaded = yaml.load(path.read_text(encoding="utf-8"), Loader)
    except OSError as error:
        raise ValueError(f"{source} cannot be read: {error.strerror}") from error
    except RecursionError:
        raise ValueError(f"{source} is not valid YAML: it is nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: an integer of thousands of digits, wrong UTF-8
        raise ValueError(f"{source} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(loaded, dict):
        raise ValueError(f"{source} must hold sections of key: value")
    return loaded


def read_utf8(stream: BinaryIO, block: int = 1 << 16, first: bytes = b"") -> Iterator[str]:
    """Decode a byte stream block by block, without a byte-order mark at its beginning; lines end with a newline, whatever
    they end with there.

    Args:
        block: bytes read at a time.
        first: bytes that were read before.

    Raises:
        ValueError: the stream is not UTF-8; names the offset of the first wrong byte.
    """
    newlines = io.IncrementalNewlineDecoder(None, translate=True)
    decoder, offset, begun = codecs.getincrementaldecoder("utf-8")(), 0, False
    data, wrong = first or stream.read(block), "the text is not UTF-8: byte"
    while True:
        unread = len(decoder.getstate()[0])
        try:
            text = decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            at, byte = offset - unread + error.start, error.object[error.start]
            raise ValueError(f"{wrong} {at} is {byte:#04x}; if it is text, save it as UTF-8") from None
        if odd := re.search("\0|\x1b[$][@AB()]", text):  # neither is in text for people; both decode
            kind = "UTF-16 without its mark, or no text" if odd[0] == "\0" else "ISO-2022"
            raise ValueError(f"{wrong} {offset - unread + len(text[: odd.start()].encode())} is as in {kind}")
        offset += len(data)
        yield newlines.decode(text if begun else text.removeprefix("\ufeff"), final=not data)
        if not data:
            return
        begun, data = begun or bool(text), stream.read(block)


def write_folder(folder: Path, config: dict[str, object], state: dict[str, Tensor]) -> None:
    """Write ``model.safetensors`` (tensors ``state`` by name, of any shape) and ``config.json``.

    The weights' metadata holds the configuration too, and the weights are renamed first. From then on the folder is the
    new save, even if the process is killed. ``config.json``, which people may edit, holds the weights' hash.
    """
    from safetensors.torch import save_file

    def both(settings: Path) -> None:
        def weights(path: Path) -> None:
            save_file(state, path, metadata={CONFIG: json.dumps(config)})  # of two, any may come first
            whole = {**config, HASH: hashlib.sha256(path.read_bytes()).hexdigest()}
            settings.write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")

        write_beside(folder / WEIGHTS, weights)

    write_beside(folder / CONFIG, both)


def read_folder(folder: Path, what: str) -> tuple[dict[str, object], dict[str, Tensor]]:
    """Configuration and weights (by name, in their saved shape) of a folder that ``write_folder`` wrote. ``what``, such
    as 'heads', names its content in messages.

    Raises:
        FileNotFoundError: a file is missing. ValueError: a file is damaged, or the two are from different saves.
    """
    from safetensors.torch import load

    lacks = FileNotFoundError(f"{folder} holds no {what}: it needs {CONFIG} and {WEIGHTS}")
    if not (folder / WEIGHTS).is_file():
        raise lacks
    there = (folder / CONFIG).is_file()
    config = as_object(read_json(folder / CONFIG), f"{folder / CONFIG}: a configuration of {what}") if there else None
    weights = (folder / WEIGHTS).read_bytes()  # after it: a save replaces them first
    if config is None or config.pop(HASH, None) not in (None, hashlib.sha256(weights).hexdigest()):
        # A save was cut short between the two renames: its weights say what it is.
        with prefixed_errors(_cut(folder / WEIGHTS), SafetensorError), safe_open(folder / WEIGHTS, "np") as file:
            within = (file.metadata() or {}).get(CONFIG)
        if within is None:
            pair = f"{folder}: {CONFIG} and {WEIGHTS} belong to different saves, of which the last was cut short"
            raise ValueError(pair) if there else lacks
        where = f"{folder / WEIGHTS}: its configuration of {what}"
        config = as_object(parse_json(within, where), where)
    with prefixed_errors(_cut(folder / WEIGHTS), SafetensorError):
        return config, load(weights)


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file by name, in their saved shape.

    Raises:
        ValueError: it is damaged; names the file.
    """
    from safetensors.torch import load_file

    with prefixed_errors(_cut(path), SafetensorError):
        return load_file(path)


@contextmanager
def locked(path: Path, busy: str, wait: float = 0.0) -> Iterator[None]:
    """Hold a lock file; it stays when it is let go.

    Args:
        busy: the error's words. wait: seconds to wait for another process; -1 waits without end.

    Raises:
        OSError: another process holds it, or it cannot be made.
    """
    import filelock

    try:
        held = filelock.FileLock(path, wait, 0o600, thread_local=False).acquire()  # a store ends in any thread
    except filelock.Timeout as error:
        raise OSError(busy) from error
    with held:
        yield
