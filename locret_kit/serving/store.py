"""Sessions and documents on disk, to save memory and to outlive the process; and checks that saved files fit this server.

The folder has one subfolder per owner, named by a salted hash of the API key and private to this user (mode 0700). Each
session and document is one file in the format of saved caches, written to a temporary name and renamed. A session's file holds
no token ids: a hash tells whether a prompt starts with the session's tokens. Above a size limit, the least recently used files
are removed.
"""

import os
import re
import secrets
import stat
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from threading import Lock

from transformers import PreTrainedModel

from ..engine import BoundedCache, CacheFile, RetainingHeads
from ..files import LaterVersion, locked, write_beside
from ..naming import first_line
from ..policies import Policy
from ..policies.grammar import parts_of
from ..settings import RunSettings
from .request import LOG, PrefixKey


class SessionSpec:
    """Model, settings, heads and policies of a server's sessions.

    Args:
        policies: the server's, then those that requests may ask for. document_budget: slots of a document, at most.
    """

    def __init__(
        self, model: PreTrainedModel, settings: RunSettings, heads: RetainingHeads | None, policies: Sequence[Policy],
        document_budget: int,
    ) -> None:  # fmt: skip
        self.model, self.settings, self.heads, self.policies = model, settings, heads, policies
        self.document_budget = document_budget
        self.origin = lru_cache(partial(CacheFile.origin, model, heads))
        """The model and the heads, by content."""

    def cache(
        self, prompt_length: int | None, settings: RunSettings | None = None, policy: Policy | None = None
    ) -> BoundedCache:
        """An empty cache for a prompt of ``prompt_length`` tokens."""
        settings, policy = settings or self.settings, policy or self.policies[0]
        return BoundedCache(settings, policy, policy.heads_for(self.heads), prompt_length=prompt_length)

    def check(self, file: CacheFile, *, session: bool = False) -> None:
        """Refuse a saved cache.

        Args:
            session: a conversation without a document, whose settings must be the server's own.

        Raises:
            ValueError: it is another model's, its policy is not allowed here, or it has more slots than a session.
        """
        saved = file.saved
        file.check_origin(self.origin().scored(by_heads=saved.heads is not None))
        policies = self.policies[:1] if session else self.policies
        if not any(saved.parts == parts_of(policy) for policy in policies):
            allowed = ", ".join(policy.name for policy in policies)
            raise ValueError(f"policy={saved.policy[:64]!r} is not allowed here; allowed: {allowed}")
        mine, theirs = self.cache(saved.prompt_length).settings.portable, saved.resolved
        if theirs.share is not None:
            raise ValueError(f"budget={theirs.share} is a share of the prompt: the slots of a session are fixed")
        for name, most in (("budget", mine["budget"] if session else self.document_budget), ("chunk", mine["chunk"])):
            if getattr(theirs, name) > most:
                raise ValueError(f"{name}={getattr(theirs, name)} must be at most {most}, that of a session")
        if theirs.kv_bits != mine["kv_bits"]:
            raise ValueError(f"kv_bits={theirs.kv_bits} must be {mine['kv_bits']}, that of a session")
        if session:
            chosen = {name for name, value in mine.items() if value is not None or name not in ("backend", "positions")}
            file.check_settings({name: mine[name] for name in sorted(chosen)})


SUFFIX, SALT = ".locret", "salt"
SESSION = re.compile(r"session_[0-9a-f]{32}")
DOCUMENT = re.compile(r"doc_[0-9a-f]{32}")
OWN = re.compile(rf"[0-9a-f]{{32}}/(?:{SESSION.pattern}|{DOCUMENT.pattern}){re.escape(SUFFIX)}")
"""Path of a file of this folder, whose owner is its subfolder."""


@dataclass(frozen=True)
class File:
    """A file in the folder. ``keys``: a session's read tokens; empty for a document. ``usable``: this server may load it.
    ``created``: the second, of a usable one that the server has found."""

    path: Path
    bytes: int
    keys: tuple[PrefixKey, ...] = ()
    usable: bool = True
    created: int = 0


class Store:
    """The folder, which one server at a time has.

    Args:
        max_bytes: of all files.

    Raises:
        OSError: it cannot be written, another server has it, or its salt is no file.
    """

    _spec: SessionSpec
    """Model, settings, heads and policies of the sessions, from ``scan`` on."""

    def __init__(self, folder: str | Path, max_bytes: int) -> None:
        self.folder, self.max_bytes = Path(folder), max_bytes
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self.folder.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):  # it is as whoever made it wants it
                LOG.warning("session_dir=%r: others may write there; chmod go-w takes that away", str(folder))
        except OSError as error:
            raise OSError(f"session_dir={str(folder)!r} cannot be used: {error.strerror}") from error
        self._open = ExitStack()
        self._open.enter_context(locked(self.folder / ".lock", f"session_dir={str(folder)!r}: another server has it"))
        self._lock, self._files = Lock(), OrderedDict[str, File]()
        self.failing: str | None = None
        """Why the last file could not be written; None where it was."""
        self.written = self.failures = 0
        self.version = 0
        """Changes with every change of the files."""
        salt = self.folder / SALT
        if not os.path.lexists(salt):
            write_beside(salt, lambda path: path.write_bytes(secrets.token_bytes(32)))
            salt.chmod(0o600)
        if not stat.S_ISREG(salt.lstat().st_mode):
            raise OSError(f"session_dir={str(folder)!r} cannot be used: {salt} is no regular file")
        self.salt = salt.read_bytes()

    def close(self) -> None:
        """Let another server have the folder."""
        self._open.close()

    def scan(self, spec: SessionSpec) -> None:
        """Find the files of an earlier server. Damaged files are removed. Files of a later version, and files that ``spec``
        refuses, stay and count, since another server may want them. Both are logged in one line each."""
        self._spec, files = spec, []
        damaged, others = list[str](), list[str]()
        for path in self.folder.glob(f"*/*{SUFFIX}"):
            try:
                found = path.lstat()
                if stat.S_ISREG(found.st_mode) and OWN.fullmatch(path.relative_to(self.folder).as_posix()):
                    file, why = self._look(path, found.st_size)
                    files.append((found.st_mtime_ns, path.stem, file))
                    others += [why] if why else []
            except OSError as error:
                others.append(f"{path}: {error.strerror}")
            except ValueError as error:
                damaged.append(first_line(error))
                with suppress(OSError):  # of a disk that takes no changes
                    path.unlink()
        for left in self.folder.glob("*/.*.partial"):  # of a server that was killed
            with suppress(OSError):
                left.unlink()
        for lines, words in ((damaged, "removed"), (others, "left as they are")):
            if lines:
                LOG.warning("%d files of sessions are not usable and %s; the first: %s", len(lines), words, lines[0])
        with self._lock:
            for _, name, file in sorted(files, key=lambda found: found[:2]):
                self._add(name, file)

    def _look(self, path: Path, size: int) -> tuple[File, str]:
        """The record of a file, and why this server cannot use it; '' where it can.

        Raises:
            OSError: it cannot be read now. ValueError: it is damaged.
        """
        try:
            file = CacheFile.read_record(path)
        except LaterVersion as error:
            return File(path, size, usable=False), first_line(error)
        name, owner, record = path.stem, path.parent.name, file.saved.document or {}
        keys = PrefixKey.from_record(name, owner, record) if SESSION.fullmatch(name) else ()
        try:
            self._spec.check(file, session=any(not key.document_id for key in keys))
            return File(path, size, keys, created=file.created), ""
        except ValueError as error:
            return File(path, size, usable=False), f"{path}: {first_line(error)}"

    def sessions(self, owner: str) -> list[PrefixKey]:
        """Keys of an owner's sessions."""
        with self._lock:
            return [key for file in self._files.values() for key in file.keys if key.owner == owner]

    def documents(self, owners: set[str]) -> list[tuple[str, File]]:
        """Names and files of all documents of these owners, the one used last first."""
        with self._lock:
            files = [(name, file) for name, file in reversed(self._files.items()) if file.path.parent.name in owners]
        return [(name, file) for name, file in files if file.usable and DOCUMENT.fullmatch(name)]

    @property
    def bytes(self) -> int:
        """Bytes of all files."""
        with self._lock:
            return sum(file.bytes for file in self._files.values())

    def _add(self, name: str, file: File) -> None:
        self.version += 1
        self._files[name] = file
        self._files.move_to_end(name)

    def remove(self, name: str) -> None:
        """Remove a session or a document."""
        with self._lock:
            self.version += 1
            if (file := self._files.pop(name, None)) is not None:
                file.path.unlink(missing_ok=True)

    def forget(self, document: str) -> None:
        """Remove a document and all sessions about it."""
        with self._lock:
            about = {key.name for file in self._files.values() for key in file.keys if key.document_id == document}
        for name in (document, *about):
            self.remove(name)

    def used(self, name: str) -> None:
        """Note that a file is used: it is removed after those that were not."""
        with self._lock:
            if name in self._files:
                self._files.move_to_end(name)
                with suppress(OSError):  # somebody has removed it, or the disk takes no more
                    os.utime(self._files[name].path)

    def save(self, name: str, owner: str, make: Callable[[], CacheFile], keys: tuple[PrefixKey, ...] = ()) -> None:
        """Write the file that ``make`` gives: of a document, or of a session with these ``keys``. A disk error is logged and
        counted, not raised."""
        path = self.folder / owner / f"{name}{SUFFIX}"
        try:
            file = make()
            if (size := file.nbytes) > self.max_bytes:
                raise OSError(f"{name} has {size} bytes, the folder may have {self.max_bytes}")
            self._make_room(size, name)
            path.parent.mkdir(mode=0o700, exist_ok=True)
            file.write(path)
            path.chmod(0o600)
            made = path.stat().st_size
        except (OSError, ValueError) as error:
            self.failures += 1
            if self.failing is None:
                LOG.warning("sessions are not saved: %s", first_line(error))
            self.failing = first_line(error)
            return
        if self.failing is not None:
            LOG.warning("sessions are saved again")
        self.failing = None
        self.written += 1
        with self._lock:
            self._add(name, File(path, made, keys))
        self._make_room(0, "")  # where the file was larger than it seemed

    def _make_room(self, size: int, name: str) -> None:
        """Remove the files that were used least recently, so that ``size`` bytes more are within the bound."""
        with self._lock:
            sizes = {other: file.bytes for other, file in self._files.items() if other != name}
        total = size + sum(sizes.values())
        for other, freed in sizes.items():
            if total > self.max_bytes:
                self.remove(other)
                total -= freed

    def load(self, key: PrefixKey) -> BoundedCache | None:
        """A session's cache; None for a file that is gone or damaged, which is said and removed, and for one that cannot be read
        now, which stays."""
        path = self.folder / key.owner / f"{key.name}{SUFFIX}"
        try:
            file, spec = CacheFile.read(path), self._spec
            if key not in PrefixKey.from_record(key.name, key.owner, file.saved.document or {}):
                return None  # it went on since the key was looked up
            policy = spec.policies[0] if file.saved.policy == spec.policies[0].name else None
            cache = file.restore(spec.model, spec.heads, policy, origin=spec.origin())
            if cache.get_seq_length() != (tokens := key.tokens + key.skipped):
                raise ValueError(f"{path}: its cache has read {cache.get_seq_length()} tokens, not {tokens}")
        except (FileNotFoundError, ValueError) as error:
            LOG.warning("a session's file is not usable and removed: %s", first_line(error))
            self.remove(key.name)
            return None
        except OSError as error:  # such as too many open files
            LOG.warning("a session's file cannot be read: %s", first_line(error))
            return None
        self.used(key.name)
        return cache
