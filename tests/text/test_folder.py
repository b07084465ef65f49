"""A folder as one text: which files are read, in which order, and what is said of the others."""

import shutil
import subprocess

import pytest

from locret_kit.cli.command import text_of, title_of
from locret_kit.text.converters import ENCODED
from locret_kit.text.folder import read_folder
from locret_kit.text.reader import read_document

FILES = {
    "b.py": b"two = 2\r\n\r\n", "a/z.py": b"three = 3", "a/y.md": "\ufeffWords \u00e9\n".encode(), "empty.txt": b" \n",
    "image.png": b"\x89PNG\r\n\x1a\n\0\0", "latin.txt": b"caf\xe9", "built/out.py": b"built = 1\n", ".env": b"SECRET=1\n",
    ".github/ci.yml": b"on: push\n", ".gitignore": b"built/\n*.log\n", "run.log": b"a line\n",
    "large.bin": b"version https://git-lfs.github.com/spec/v1\n", "a/.gitignore": b"not-here.md\n",
    "a/not-here.md": b"ignored\n",
}  # fmt: skip
READ = ["# File: a/y.md\nWords \u00e9\n\n", "# File: a/z.py\nthree = 3\n\n", "# File: b.py\ntwo = 2\n\n"]


@pytest.fixture
def folder(tmp_path):
    for name, data in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    outside = tmp_path.parent / f"{tmp_path.name}-outside.txt"
    outside.write_text("elsewhere\n")
    (tmp_path / "link.txt").symlink_to(outside)
    return tmp_path


@pytest.mark.parametrize("repository", [False, True])
def test_text_files_in_order_each_under_its_path(folder, repository):
    if repository:
        subprocess.run(["git", "init", "--quiet", str(folder)], check=True)
    notes = []
    assert [*read_folder(folder, note=notes.append)] == READ
    assert notes == [f"{folder}: left out, since they are not plain text: image.png, large.bin, latin.txt, link.txt"]


def test_part_of_a_repository_with_a_file_that_is_gone(folder):
    git = ("git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b")
    for words in (("init", "--quiet"), ("add", "--all"), ("commit", "--quiet", "--message=one")):
        subprocess.run([*git, *words], check=True)
    (folder / "a/y.md").unlink()
    (folder / "a/new.py").write_text("new = 4\n")
    assert [*read_folder(folder / "a")] == ["# File: new.py\nnew = 4\n\n", "# File: z.py\nthree = 3\n\n"]


def test_without_git_hidden_files_alone_are_left_out(folder, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    names = [piece.split("\n")[0] for piece in read_folder(folder)]
    assert names == [f"# File: {n}" for n in ("a/not-here.md", "a/y.md", "a/z.py", "b.py", "built/out.py", "run.log")]


def test_patterns_are_of_the_name_or_the_path(folder):
    assert [*read_folder(folder, ["*.py"])] == READ[1:]
    notes = []
    assert [*read_folder(folder, ["a/*", "b.*", "*.rs"], notes.append)] == READ
    assert notes == [f"{folder}: include='*.rs' matches no file"]
    with pytest.raises(ValueError, match=r"^include='\*\.rs' matches none of the 8 files in "):
        [*read_folder(folder, ["*.rs"])]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("**/*.py", "a.py in/b.py in/two/c.py"),
        ("in/**/*.py", "in/b.py in/two/c.py"),
        ("in/**/two/**/c.py", "in/two/c.py"),
    ],
)
def test_two_stars_stand_for_any_folders_or_none(tmp_path, pattern, names):
    made(tmp_path, dict.fromkeys(("a.py", "in/b.py", "in/two/c.py", "d.md"), "words"))
    found = [piece.split("\n")[0].removeprefix("# File: ") for piece in read_folder(tmp_path, [pattern])]
    assert found == names.split()


def made(folder, files, repositories=()):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    for name in repositories:
        subprocess.run(["git", "init", "--quiet", str(folder / name)], check=True)


@pytest.mark.parametrize("rule", ["data/", "data/*"])
def test_a_folder_that_its_repository_ignores_is_read_where_it_is_named(tmp_path, rule):
    files = {".gitignore": rule, "data/a/b.md": "two", "data/a/c.log": "three", "data/a/.gitignore": "*.log"}
    made(tmp_path, files, ["."])
    assert [*read_folder(tmp_path / "data/a")] == ["# File: b.md\ntwo\n\n"]


@pytest.mark.parametrize("name", ["GIT_DIR", "GIT_TEST_ASSUME_DIFFERENT_OWNER"])
def test_hooks_of_git_and_other_users_read_what_a_shell_reads(tmp_path, monkeypatch, name):
    """git refuses a repository of another user, as a container's root has one."""
    made(tmp_path, {".gitignore": "built/", "a/b.md": "two", "a/built/c.md": "three"}, ["."])
    monkeypatch.setenv(name, str(tmp_path / ".git") if name == "GIT_DIR" else "1")
    assert [*read_folder(tmp_path / "a")] == ["# File: b.md\ntwo\n\n"]


@pytest.mark.parametrize("repositories", [["one", "in/two"], [".", "one", "in/two"]])
def test_repositories_within_a_folder_are_read(tmp_path, repositories):
    files = {"a.md": "a", "in/b.md": "b", "in/two/c.md": "c", "one/d.md": "d", "one/e.log": "e"}
    made(tmp_path, {**files, "one/.gitignore": "*.log"}, repositories)
    names = [piece.split("\n")[0].removeprefix("# File: ") for piece in read_folder(tmp_path)]
    assert names == ["a.md", "in/b.md", "in/two/c.md", "one/d.md"]


def test_a_bare_repository_is_a_folder_too(tmp_path):
    subprocess.run(["git", "init", "--quiet", "--bare", str(tmp_path)], check=True)
    made(tmp_path, {"notes.md": "words"})
    assert "# File: notes.md\nwords\n\n" in [*read_folder(tmp_path)]


def test_no_program_of_a_folder_is_run(tmp_path):
    """As one that its repository's configuration names, which somebody else may have packed."""
    made(tmp_path, {"a.md": "words", ".git/hook": f"#!/bin/sh\ntouch {tmp_path}/run\n"}, ["."])
    (tmp_path / ".git/hook").chmod(0o700)
    for words in (
        ("add", "a.md"),
        ("config", "core.fsmonitor", f"{tmp_path}/.git/hook"),
        ("update-index", "--fsmonitor"),
    ):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True, capture_output=True)
    (tmp_path / "run").unlink(missing_ok=True)
    assert [*read_folder(tmp_path)] == ["# File: a.md\nwords\n\n"] and not (tmp_path / "run").exists()


def test_a_name_that_is_no_utf8_is_shown_with_escapes(tmp_path):
    (tmp_path / "caf\udce9.txt").write_text("words")
    assert [*read_folder(tmp_path)] == ["# File: caf\\udce9.txt\nwords\n\n"]


def test_more_files_than_are_named(tmp_path):
    for number in range(8):
        (tmp_path / f"{number}.bin").write_bytes(b"\0")
    with pytest.raises(ValueError, match="has no file with text among 8$"):
        [*read_folder(tmp_path)]
    (tmp_path / "a.txt").write_text("words")
    notes = []
    assert [*read_folder(tmp_path, note=notes.append)] == ["# File: a.txt\nwords\n\n"]
    assert notes[0].endswith("0.bin, 1.bin, 2.bin, 3.bin, 4.bin and 3 more")


def test_base64_in_a_file_is_told(tmp_path):
    """As of pictures in notebooks."""
    made(tmp_path, {"a.md": "words", "b.ipynb": "Ab1/" * 600})
    notes = []
    assert len([*read_folder(tmp_path, note=notes.append)]) == 2 and notes == [f"{tmp_path}: b.ipynb: {ENCODED}"]


def test_commands_and_documents_take_a_folder(folder, capsys, monkeypatch):
    (folder / "\x1b[2J.bin").write_bytes(b"\0")
    assert "".join(text_of(str(folder))) == "".join(READ)
    assert capsys.readouterr().err.startswith(f"warning: {folder}: left out, since they are not plain text: [2J.bin, ")
    with pytest.warns(UserWarning, match="left out"):
        assert read_document(folder) == "".join(READ)
    monkeypatch.chdir(folder)
    assert title_of(".") == folder.name
    with pytest.raises(ValueError, match=r"^include='\*\.py' chooses files of a folder, and file='b\.py' is none$"):
        text_of("b.py", ["*.py"])
