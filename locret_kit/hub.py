"""The Hugging Face Hub: fetch files of a repository, publish a folder as one commit, and say in a line what went wrong.

Token, endpoint, cache and offline mode are those of ``huggingface_hub`` (``HF_TOKEN``, ``HF_ENDPOINT``, ``HF_HUB_OFFLINE``).
This module knows nothing of heads.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from json import JSONDecodeError
from pathlib import Path
from typing import TypedDict, Unpack

from .files import read_json
from .naming import first_line

REPO = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*\Z")
"""``user/name``, as the Hub writes it."""


class OneRetryLine(logging.Filter):
    """A filter of the client's retry warnings. It passes the first one and adds advice for the user."""

    LOGGER = "huggingface_hub.utils._http"
    """The logger to filter."""

    def __init__(self) -> None:
        super().__init__()
        self._said = False

    def filter(self, record: logging.LogRecord) -> bool:
        said = record.getMessage()
        if said.startswith("Retrying in "):
            return False
        if " thrown while requesting " not in said:
            return True
        if first := not self._said:
            record.msg, record.args = f"{said}: trying again; HF_HUB_OFFLINE=1 uses the local cache only", ()
        self._said = True
        return first


class Access(TypedDict, total=False):
    """Arguments of reading a repository, as ``huggingface_hub`` takes them."""

    revision: str | None
    token: str | bool | None
    cache_dir: str | None
    local_files_only: bool


def pull(
    repo: str, choose: Callable[[list[str]], list[str]], *, field: str = "ckpt", **access: Unpack[Access]
) -> list[Path]:
    """Local paths of the repository's files that ``choose`` selects by name, all from one commit.

    If the Hub cannot be reached, files from the local cache are used.

    Raises:
        FileNotFoundError: the files are not available; one line with ``field`` and the reason.
        ValueError: raised by ``choose``.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    def get(wanted: list[str], local: bool) -> Path:
        here: Access = {**access, "local_files_only": local}
        return Path(snapshot_download(repo, allow_patterns=wanted, **here))

    wanted = None
    try:
        if access.get("local_files_only"):
            raise OfflineModeIsEnabled("local_files_only")
        names = _state(repo, access.get("revision"), access.get("token"))[1]
        wanted = choose(names)
        folder = get(wanted, local=False)
    except Exception as error:
        if wanted is None and isinstance(error, ValueError) and not isinstance(error, JSONDecodeError | HfHubHTTPError):
            raise  # choose's own words
        reason = FileNotFoundError(f"{field}={repo!r}: not a local file, and the Hub says: {explain(error, repo)}")
        if isinstance(error, HfHubHTTPError | ValueError):
            raise reason from error
        try:  # no answer: the transport's own errors, or offline mode. What is in the cache may be a part of the files.
            folder = get([], local=True)
            cached = [str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()]
            wanted = wanted or choose(cached)
        except (OSError, ValueError):
            raise reason from error
        if not set(wanted) <= set(cached):
            raise reason from error
    return [folder / name for name in wanted]


def push(
    folder: Path, repo: str, *, private: bool, message: str, marker: tuple[str, str], token: str | None = None
) -> str:
    """Upload every file of ``folder`` as one commit, and return its address: other readers see all of it or nothing.

    A repository that is missing is made. One that has files is written to only if it is ours: ``marker`` names a JSON
    file and the value its ``format`` must have.

    Raises:
        OSError: one line that says why, and whether something was published.
    """
    from huggingface_hub import HfApi, get_token

    if token is None and get_token() is None:
        raise OSError(f"repo={repo!r}: no Hub token: set HF_TOKEN or run `hf auth login`")
    api, state = HfApi(token=token), "nothing was published"
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        names = _state(repo, None, token)[1]
        if not names:
            state += f", but the repository {repo} is there, and empty"
        _check_ours(repo, names, *marker, token)
        state = f"look into {repo}: the upload did not end"
        return str(api.upload_folder(repo_id=repo, folder_path=folder, commit_message=message).commit_url)
    except Exception as error:
        raise OSError(f"repo={repo!r}: {state}: {explain(error, repo, 'write to')}") from error


def _cause(error: Exception) -> Exception:
    """The original error behind the client's wrapper of an upload."""
    if isinstance(error, RuntimeError) and isinstance(error.__cause__, Exception):
        return error.__cause__
    return error


def _state(repo: str, revision: str | None, token: str | bool | None) -> tuple[str | None, list[str]]:
    """A repository's commit, and the names of its files."""
    from huggingface_hub import HfApi

    info = HfApi().model_info(repo, revision=revision, timeout=10, token=token)
    return info.sha, [file.rfilename for file in info.siblings or ()]


def _check_ours(repo: str, names: list[str], name: str, wanted: str, token: str | None) -> None:
    from huggingface_hub import hf_hub_download

    names = [n for n in names if n not in (".gitattributes", "README.md")]
    if not names:
        return
    config = read_json(Path(hf_hub_download(repo, name, token=token))) if name in names else None
    if not isinstance(config, dict) or config.get("format") != wanted:
        raise ValueError(f"it exists and holds something else ({', '.join(names[:3])}); give another name")


def explain(error: Exception, repo: str, doing: str = "read") -> str:
    """One line for the user from a failed call that was ``doing`` something with a repository."""
    from huggingface_hub import constants, errors

    error = _cause(error)
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.OfflineModeIsEnabled):
        return "offline mode is on (HF_HUB_OFFLINE or local_files_only), and it is not in the cache"
    if isinstance(error, errors.GatedRepoError):
        return f"{repo} is gated: accept its terms at {constants.ENDPOINT}/{repo}, then set HF_TOKEN"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{repo} has no such revision"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"there is no {repo}, or it is private and the token (HF_TOKEN) does not open it"
    if isinstance(error, JSONDecodeError):
        return f"{constants.ENDPOINT} answered with something else than JSON"
    if status == 401:
        return "the token is not valid: set HF_TOKEN or run `hf auth login`"
    if status == 403:
        owner = "" if doing == "read" else ": it belongs to someone else, or the token is read-only"
        return f"the token may not {doing} {repo}{owner}"
    said = first_line(error)
    if status is not None or isinstance(error, ValueError):
        return said
    if isinstance(error, OSError) and error.errno:
        return f"{error.filename or 'the cache'}: {error.strerror}"
    return f"{constants.ENDPOINT} cannot be reached: {said}"
