"""The Hugging Face Hub: fetch files of a repository, publish a folder as one commit, and say in a line what went wrong.

Token, endpoint, cache and offline mode are those of ``huggingface_hub`` (``HF_TOKEN``, ``HF_ENDPOINT``, ``HF_HUB_OFFLINE``).
This module knows nothing of heads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from .naming import first_line

REPO = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")
"""``user/name``, as the Hub writes it."""


def pull(
    repo: str,
    choose: Callable[[list[str]], list[str]],
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | None = None,
    local_files_only: bool = False,
) -> list[Path]:
    """Local paths of the files that ``choose`` picks from a repository's names, all of one commit.

    Where the Hub cannot be reached, what an earlier call left in the cache is used.

    Raises:
        FileNotFoundError: one line that says why they cannot be had. ValueError: raised by ``choose``.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    get = partial(snapshot_download, repo, revision=revision, token=token, cache_dir=cache_dir)
    try:
        try:
            if local_files_only:
                raise OfflineModeIsEnabled("local_files_only")
            wanted = choose(_names(repo, revision, token))
            folder = Path(get(allow_patterns=wanted))
        except (HfHubHTTPError, ValueError):
            raise
        except Exception as error:  # no answer: the transport's own errors, or offline mode
            try:  # no pattern: the folder as it is, whatever was fetched of it
                folder = Path(get(local_files_only=True, allow_patterns=[]))
            except OSError:
                raise error from None
            wanted = choose([str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()])
    except ValueError:
        raise
    except Exception as error:
        raise FileNotFoundError(f"ckpt={repo!r}: not a local file, and the Hub says: {explain(error, repo)}") from error
    return [folder / name for name in wanted]


def push(
    folder: Path, repo: str, *, private: bool, message: str, marker: tuple[str, str], token: str | None = None
) -> str:
    """Upload every file of ``folder`` as one commit, and return its address: other readers see all of it or nothing.

    A repository that is missing is made. One that has files is written to only if it is ours: ``marker`` names a JSON
    file and the value its ``format`` must have.

    Raises:
        OSError: one line that says why nothing was published.
    """
    from huggingface_hub import CommitOperationAdd, HfApi, get_token

    if token is None and get_token() is None:
        raise OSError(f"repo={repo!r}: no Hub token: set HF_TOKEN or run `hf auth login`")
    api = HfApi(token=token)
    operations = [
        CommitOperationAdd(str(file.relative_to(folder)), file) for file in sorted(folder.rglob("*")) if file.is_file()
    ]
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        _check_ours(repo, *marker, token)
        return str(api.create_commit(repo, operations, commit_message=message).commit_url)
    except Exception as error:
        raise OSError(f"repo={repo!r}: nothing was published: {explain(error, repo)}") from error


def _names(repo: str, revision: str | None = None, token: str | bool | None = None) -> list[str]:
    from huggingface_hub import HfApi

    info = HfApi().model_info(repo, revision=revision, timeout=10, token=token)
    return [file.rfilename for file in info.siblings or ()]


def _check_ours(repo: str, name: str, wanted: str, token: str | None) -> None:
    from huggingface_hub import hf_hub_download

    names = [n for n in _names(repo, token=token) if n not in (".gitattributes", "README.md")]
    if not names:
        return
    found = json.loads(Path(hf_hub_download(repo, name, token=token)).read_text()) if name in names else {}
    if found.get("format") != wanted:
        raise ValueError(f"it exists and holds something else ({', '.join(names[:3])}); give another name")


def explain(error: Exception, repo: str) -> str:
    """What a failed call means for the user, in one line."""
    from huggingface_hub import constants, errors

    if isinstance(error, RuntimeError) and isinstance(error.__cause__, Exception):  # the client's wrapper of an upload
        error = error.__cause__
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.OfflineModeIsEnabled):
        return "offline mode is on (HF_HUB_OFFLINE or local_files_only), and it is not in the cache"
    if isinstance(error, errors.GatedRepoError):
        return f"{repo} is gated: accept its terms at {constants.ENDPOINT}/{repo}, then set HF_TOKEN"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{repo} has no such revision"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"there is no {repo}, or it is private and the token (HF_TOKEN) does not open it"
    if status == 401:
        return "the token is not valid: set HF_TOKEN or run `hf auth login`"
    if status == 403:
        return f"the token may not write to {repo}: it belongs to someone else, or the token is read-only"
    said = first_line(error)
    if status is not None or isinstance(error, ValueError):
        return said
    if isinstance(error, OSError) and error.errno:
        return f"{error.filename or 'the cache'}: {error.strerror}"
    return f"{constants.ENDPOINT} cannot be reached: {said}"
