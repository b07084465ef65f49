"""Compiled code is loaded from where nobody else can put it. What is planted answers 666, what is compiled 42."""

import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest
from forked import start, status_of

from locret_kernels import cpp

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
SOURCE = 'extern "C" int answer() {{ return {}; }}\n'
STRANGER = 12345
SAID = ["compiling C++ for this processor: some seconds, once"]


@pytest.fixture
def built(tmp_path, monkeypatch):
    """The answer of a source, compiled below ``home`` unless it was; as a new process would have it."""
    (tmp_path / "source").mkdir()
    source = tmp_path / "source" / "answer.cpp"
    source.write_text(SOURCE.format(42))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home" / "cache"))

    def answer() -> int:
        cpp.folder.cache_clear()
        cpp.announce.cache_clear()
        cpp.load.cache_clear()
        return cpp.load(source).answer()

    yield answer
    cpp.folder.cache_clear()


@pytest.fixture
def kept(tmp_path) -> Path:
    return tmp_path / "home" / "cache" / "locret_kit"


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> Path:
    """Another library, of the compiled one's name."""
    folder = tmp_path_factory.mktemp("other")
    (folder / "source").mkdir()
    source = folder / "source" / "answer.cpp"
    source.write_text(SOURCE.format(42))
    cpp.folder.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        assert cpp.load(source).answer() == 42
    [library] = (folder / "locret_kit").iterdir()
    source.write_text(SOURCE.format(666))
    subprocess.run(["g++", "-shared", "-fPIC", str(source), "-o", str(folder / library.name)], check=True)
    return folder / library.name


@pytest.fixture
def planted(built, kept, other) -> Path:
    """That library where the compiled one would be, as its user could have put it there. Nothing was loaded from that path: it
    would not be loaded twice."""
    cpp.made(kept)
    shutil.copy(other, kept)
    (kept / other.name).chmod(0o700)
    return kept / other.name


def give(path: Path, monkeypatch) -> None:
    """Have another user own a path. Root alone can do that; others are told that it is so."""
    if os.geteuid() == 0:
        os.chown(path, STRANGER, -1, follow_symlinks=False)
        return
    real = Path.lstat

    def lstat(self: Path) -> os.stat_result:
        found = real(self)
        return os.stat_result([*found[:4], STRANGER, *found[5:10]]) if self == path else found

    monkeypatch.setattr(Path, "lstat", lstat)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_it_is_made_for_its_user_alone_and_kept(built, kept, tmp_path, caplog, umask):
    (tmp_path / "home").mkdir()
    before = os.umask(umask)
    try:
        assert built() == 42
    finally:
        os.umask(before)
    [library] = kept.iterdir()
    assert [mode(path) for path in (kept.parent, kept, library)] == [0o700] * 3 and caplog.messages == SAID


def test_what_its_user_has_put_there_is_loaded(built, planted, caplog):
    """The test itself: what is planted would be seen."""
    assert built() == 666 and not caplog.records


def swap(kept: Path) -> None:
    kept.rename(kept.with_name("theirs"))
    kept.symlink_to(kept.with_name("theirs"))


FOLDERS = {
    "world-writable": lambda kept, patch: kept.chmod(0o777),
    "group-writable": lambda kept, patch: kept.chmod(0o770),
    "sticky": lambda kept, patch: kept.chmod(0o1777),
    "link": lambda kept, patch: swap(kept),
    "stranger's": lambda kept, patch: give(kept, patch),
    "below a stranger's": lambda kept, patch: give(kept.parent, patch),
    "below a world-writable": lambda kept, patch: kept.parent.parent.chmod(0o777),
}


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_folder_of_others_is_not_used(built, kept, planted, monkeypatch, caplog, kind):
    FOLDERS[kind](kept, monkeypatch)
    assert built() == 42
    line, *said = caplog.messages
    assert line.startswith("compiled code is not kept, and each process compiles anew: ")
    assert "\n" not in line and said == SAID
    private = cpp.folder()
    assert private != kept and mode(private) == 0o700
    assert [path.name for path in private.iterdir()] == [planted.name]


def test_below_a_sticky_folder_it_is_used(built, kept, caplog):
    """Such as ``/tmp``, where nobody can rename what is another's."""
    kept.parent.parent.mkdir()
    kept.parent.parent.chmod(0o1777)
    assert built() == 42 and [*kept.iterdir()] and caplog.messages == SAID


def test_links_above_it_are_followed_once(built, kept, tmp_path, caplog):
    (tmp_path / "disk").mkdir()
    (tmp_path / "home").symlink_to(tmp_path / "disk")
    assert built() == 42 and cpp.folder() == tmp_path / "disk" / "cache" / "locret_kit" and caplog.messages == SAID


def test_processes_that_start_together_compile_once(built, tmp_path, monkeypatch):
    real, log = cpp._compile, tmp_path / "log"

    def compiles(*given) -> None:
        with log.open("a") as file:
            file.write("compiled\n")
        real(*given)

    monkeypatch.setattr(cpp, "_compile", compiles)
    children = [start(lambda: built() - 42, tmp_path / "output") for _ in range(3)]
    assert [status_of(child) for child in children] == [0] * 3 and log.read_text() == "compiled\n"


FILES = {
    "world-writable": lambda library, patch: library.chmod(0o702),
    "group-writable": lambda library, patch: library.chmod(0o720),
    "stranger's": give,
    "link": lambda library, patch: library.symlink_to(library.rename(library.with_name("theirs"))),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_file_of_others_is_compiled_anew(built, planted, monkeypatch, caplog, kind):
    FILES[kind](planted, monkeypatch)
    assert built() == 42 and stat.S_ISREG(planted.lstat().st_mode) and caplog.messages == SAID


def test_no_folder_at_all(built, kept, tmp_path, monkeypatch):
    """Neither the usual one nor one in a temporary folder in which anybody may rename."""
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp").chmod(0o777)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    kept.parent.parent.mkdir()
    kept.parent.parent.chmod(0o777)
    with pytest.raises(cpp.Unavailable, match="others may write to .*/tmp: chmod go-w"):
        built()


def test_a_user_without_a_home(monkeypatch, tmp_path):
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert cpp.preferred() == tmp_path / f"locret_kit-{os.geteuid()}"


@pytest.mark.parametrize("named", ["", "env g++", "{tmp}/my tools/g++"])
def test_a_compiler_of_several_words(built, tmp_path, monkeypatch, named):
    """As make reads CXX, such as "ccache g++"; an empty one is the usual compiler."""
    (tmp_path / "my tools").mkdir()
    (tmp_path / "my tools" / "g++").symlink_to(shutil.which("g++"))
    monkeypatch.setenv("CXX", named.format(tmp=tmp_path))
    assert built() == 42
