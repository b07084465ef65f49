"""The Hugging Face Hub: fetch files of a repository, publish a folder as one commit, and say in a line what went wrong.

Token, endpoint, cache and offline mode are those of ``huggingface_hub`` (``HF_TOKEN``, ``HF_ENDPOINT``, ``HF_HUB_OFFLINE``).
This module knows nothing of heads.
"""

import logging
import re
from collections.abc import Callable, Sequence
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
    _said = False

    def filter(self, record: logging.LogRecord) -> bool:
        said = record.getMessage()
        if " thrown while requesting " not in said:
            return not said.startswith("Retrying in ")
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

    If the Hub cannot be reached, or is out of order or busy, files from the local cache are used.

    Raises:
        FileNotFoundError: the files are not available; one line with ``field`` and the reason.
        ValueError: raised by ``choose``.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    def failed(error: Exception) -> FileNotFoundError:
        return FileNotFoundError(f"{field}={repo!r}: not a local file, and the Hub says: {explain(error, repo)}")

    try:
        if access.get("local_files_only"):
            raise OfflineModeIsEnabled("local_files_only")
        names = _file_names(repo, access.get("revision"), access.get("token"))
    except Exception as error:
        if isinstance(error, HfHubHTTPError | ValueError) and not _is_down(error):
            raise failed(error) from error
        # No answer: the transport's own errors, or offline mode; or one that says nothing of the repository.
        here: Access = {**access, "local_files_only": True}
        try:
            folder = Path(snapshot_download(repo, allow_patterns=[], **here))
            wanted = choose([str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()])
        except (OSError, ValueError):
            raise failed(error) from error
    else:
        wanted = choose(names)
        try:
            folder = Path(snapshot_download(repo, allow_patterns=wanted, **access))
        except Exception as error:
            raise failed(error) from error
    return [folder / name for name in wanted]


def push(
    folder: Path, repo: str, *, private: bool, message: str, marker: tuple[str, str], replaces: Sequence[str],
    token: str | None = None,
) -> str:  # fmt: skip
    """Upload every file of ``folder`` as one commit, and return its address: other readers see all of it or nothing. Files
    there whose name is of a pattern in ``replaces``, and that ``folder`` lacks, are deleted.

    A repository that is missing is made. One that has files is written to only if it is ours: ``marker`` names a JSON
    file and the value its ``format`` must have. With ``private``, a public one is refused.

    Raises:
        OSError: one line that says why, and whether something was published.
    """
    from huggingface_hub import HfApi, get_token, hf_hub_download

    if token is None and get_token() is None:
        raise OSError(f"repo={repo!r}: no Hub token: set HF_TOKEN or run `hf auth login`")
    api, state, (name, wanted) = HfApi(token=token), "nothing was published", marker
    try:
        api.create_repo(repo, private=private or None, exist_ok=True)  # None: the organisation's default
        if private and not api.model_info(repo, timeout=10).private:
            raise ValueError("it exists and is public: make it private there, or give another name")
        names = _file_names(repo, None, token)
        if not names:
            state += f", but the repository {repo} is there, and empty"
        if there := [one for one in names if one not in (".gitattributes", "README.md")]:
            config = read_json(Path(hf_hub_download(repo, name, token=token))) if name in there else None
            if not isinstance(config, dict) or config.get("format") != wanted:
                raise ValueError(f"it exists and holds something else ({', '.join(there[:3])}); give another name")
        state = f"look into {repo}: the upload did not end"
        commit = api.upload_folder(
            repo_id=repo, folder_path=folder, commit_message=message, delete_patterns=[*replaces]
        )
        return str(commit.commit_url)
    except Exception as error:
        raise OSError(f"repo={repo!r}: {state}: {explain(error, repo, 'write to')}") from error


def _file_names(repo: str, revision: str | None, token: str | bool | None) -> list[str]:
    from huggingface_hub import HfApi

    info = HfApi().model_info(repo, revision=revision, timeout=10, token=token)
    return [file.rfilename for file in info.siblings or ()]


def _is_down(error: BaseException) -> bool:
    """Whether the Hub answered that it is out of order, or has too many requests."""
    status = getattr(getattr(error, "response", None), "status_code", 0)
    return status >= 500 or status == 429


def explain(error: BaseException, repo: str, doing: str = "read") -> str:
    """One line for the user from a failed call that was ``doing`` something with a repository."""
    from huggingface_hub import constants, errors

    if isinstance(error, RuntimeError) and error.__cause__ is not None:  # the client's wrapper of an upload
        error = error.__cause__
    by_kind: dict[type[Exception], str] = {
        errors.OfflineModeIsEnabled: "offline mode is on (HF_HUB_OFFLINE or local_files_only), and it is not in the cache",
        errors.GatedRepoError: f"{repo} is gated: accept its terms at {constants.ENDPOINT}/{repo}, then set HF_TOKEN",
        errors.RevisionNotFoundError: f"{repo} has no such revision",
        errors.RepositoryNotFoundError: f"there is no {repo}, or it is private and the token (HF_TOKEN) does not open it",
        JSONDecodeError: f"{constants.ENDPOINT} answered with something else than JSON",
    }
    owner = "" if doing == "read" else ": it belongs to someone else, or the token is read-only"
    may_not = f"the token may not {doing} {repo}{owner}"
    by_status: dict[object, str] = {401: "the token is not valid: set HF_TOKEN or run `hf auth login`", 403: may_not}
    status = getattr(getattr(error, "response", None), "status_code", None)
    words = next((words for kind, words in by_kind.items() if isinstance(error, kind)), by_status.get(status))
    # The Hub's check of a card says what is wrong below its first line.
    said = words or (" ".join(str(error).split())[:300] if isinstance(error, ValueError) else first_line(error))
    if words or status is not None or isinstance(error, ValueError) or getattr(error, "errno", None):
        return said
    return f"{constants.ENDPOINT} cannot be reached: {said}"
