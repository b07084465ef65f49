"""What commands do at their edges: one line and a status, whatever ends them."""

import io
import logging
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import pytest
from forked import start, status_of
from pydantic import BaseModel, Field, ValidationError, model_validator

from locret_kit import backbones
from locret_kit.cli.command import command
from locret_kit.hub import OneRetryLine
from locret_kit.naming import first_line

ROOT = Path(__file__).resolve().parents[2]


def ended(capsys, error: BaseException, **settings) -> tuple[int, str]:
    @command("locret-x", **settings)
    def main(argv: list[str] | None = None) -> int:
        raise error

    return main(), capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("budget=0 must be at least 1\nand more"), "budget=0 must be at least 1"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (FileNotFoundError(2, "No such file or directory", "a.locret"), "a.locret: No such file or directory"),
        (ImportError("pip install it"), "pip install it"),
        (ValueError("  "), "ValueError"),
        (FileNotFoundError(), "FileNotFoundError"),
    ],
)
def test_what_a_user_can_mend_is_one_line(capsys, error, said):
    assert ended(capsys, error) == (1, f"locret-x: {said}\n")


class Inner(BaseModel):
    size: Annotated[int, Field(ge=1)] = 1
    names: list[str] = []


class Outer(BaseModel):
    inner: Inner = Inner()
    most: int = 9

    @model_validator(mode="after")
    def fits(self):
        if self.inner.size > self.most:
            raise ValueError(f"size={self.inner.size} must be at most {self.most}\nsee the page")
        return self


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"inner": {"size": 0}, "most": "x"}, "inner.size=0: Input should be greater than or equal to 1"),
        ({"inner": {"names": [1]}}, "inner.names.0=1: Input should be a valid string"),
        ({"inner": {"size": [3]}}, "inner.size: Input should be a valid integer"),
        ({"inner": {"size": 10}}, "Outer: size=10 must be at most 9"),
    ],
)
def test_of_pydantics_errors_the_field_and_the_reason(given, line):
    with pytest.raises(ValidationError) as refused:
        Outer(**given)
    assert first_line(refused.value) == line


def test_a_bug_keeps_its_traceback_unless_the_command_names_its_kind(capsys):
    with pytest.raises(RuntimeError, match="a shape"):
        ended(capsys, RuntimeError("a shape"))
    assert ended(capsys, RuntimeError("out of memory"), also=(RuntimeError,)) == (1, "locret-x: out of memory\n")
    with pytest.raises(SystemExit):
        ended(capsys, SystemExit(2))


def test_a_newer_library_is_named_and_so_is_the_release_that_works(capsys, monkeypatch, caplog):
    monkeypatch.setattr(backbones, "version", {"transformers": "6.1.0.dev1", "torch": "2.13.1+cpu"}.get)
    line = "transformers 6.1.0.dev1 is newer than 5.24, which was tested: pip install 'transformers==5.24.*'"
    backbones.warn_of_newer.cache_clear()
    for _ in range(2):
        backbones.warn_of_newer()
    backbones.warn_of_newer.cache_clear()
    assert [record.getMessage() for record in caplog.records] == [f"warning: {line} if something fails"]
    failed = f"locret-x: not attached\nlocret-x: {line}\n"
    assert ended(capsys, RuntimeError("not attached"), also=(RuntimeError,)) == (1, failed)
    assert ended(capsys, ImportError("cannot import name 'x'"))[1].endswith(f"locret-x: {line}\n")
    assert ended(capsys, ValueError("budget=0 must be at least 1")) == (1, "locret-x: budget=0 must be at least 1\n")
    with pytest.raises(KeyError):
        ended(capsys, KeyError("cache"))
    assert capsys.readouterr().err == f"locret-x: {line}\n"
    monkeypatch.setattr(backbones, "version", {"transformers": "5.24.9", "torch": "2.12.0"}.get)
    assert backbones.newer() == []


def test_ctrl_c_says_what_there_is_to_say(capsys):
    assert ended(capsys, KeyboardInterrupt()) == (130, "\nlocret-x: stopped\n")
    again = "stopped; again goes on"
    assert ended(capsys, KeyboardInterrupt(), stopped=again) == (130, f"\nlocret-x: {again}\n")
    assert ended(capsys, KeyboardInterrupt(), stopped="") == (130, "")


@command("locret-x")
def prints(text: str) -> int:
    """A command that reads stdin and prints."""
    sys.stdin.read()
    print(text)
    return 0


@pytest.mark.parametrize("length", [1, 10**6])
def test_a_reader_that_left_is_one_line(length, tmp_path):
    """A short output is written when the command ends, a long one while it runs."""

    def run() -> int:
        reader, writer = os.pipe()
        os.close(reader)
        sys.stdin, sys.stdout = io.StringIO(), os.fdopen(writer, "w")
        return prints("x" * length)

    assert status_of(start(run, tmp_path / "log")) == 1
    assert (tmp_path / "log").read_text() == "locret-x: stdout was closed before the output ended\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has it")
def test_output_onto_a_full_disk_is_one_line():
    """Also where Python ends, which tries to write it again."""
    code = "import sys\nfrom locret_kit.cli.documents import info\nsys.exit(info(['--help']))"
    with open("/dev/full", "w") as full:
        given = dict(stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT)
        done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONUNBUFFERED": ""}, **given)
    assert (done.returncode, done.stderr) == (1, "locret-info: No space left on device\n")


@pytest.mark.parametrize("closed", ["stdin", "stdout", "stderr"])
def test_a_stream_that_was_closed_reads_and_writes_nothing(closed, monkeypatch):
    """And what the terminal's encoding lacks is escaped."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("words"))
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    monkeypatch.setattr(sys, closed, None)
    assert prints("caf\u00e9") == 0
    if closed != "stdout":
        assert sys.stdout.buffer.getvalue() == b"caf\\xe9\n"


def test_the_package_lists_the_commands_that_are_installed(capsys):
    declared = set(re.findall(r"^(locret-\w+) =", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M))
    runpy.run_module("locret_kit", run_name="__main__")
    assert set(re.findall(r"^(locret-\w+) +\w", capsys.readouterr().out, re.M)) == declared


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_modules_of_commands_run_too(monkeypatch, capsys):
    """As ``torchrun -m locret_kit.cli.eval`` runs them."""
    for name in ("eval", "infer", "serve", "train", "vllm"):
        module = f"locret_kit.cli.{name}"
        monkeypatch.setattr(sys, "argv", [module, "--help"])
        with pytest.raises(SystemExit, match="^0$"):
            runpy.run_module(module, run_name="__main__")
        assert f"locret-{name}" in capsys.readouterr().out


def test_retries_of_the_hub_are_one_line(caplog):
    """As ``huggingface_hub`` logs them: two lines a try, for every file."""
    logger = logging.getLogger("a client's own")
    logger.addFilter(OneRetryLine())
    with caplog.at_level(logging.WARNING, logger=logger.name):
        for attempt in range(1, 6):
            logger.warning("'[Errno -2] no name' thrown while requesting HEAD https://hub/config.json")
            logger.warning(f"Retrying in {attempt}s [Retry {attempt}/5].")
        logger.warning("Rate limited. Waiting 301.0s before retry [Retry 1/5].")
    assert caplog.messages == [
        "'[Errno -2] no name' thrown while requesting HEAD https://hub/config.json: trying again; HF_HUB_OFFLINE=1 uses "
        "the local cache only",
        "Rate limited. Waiting 301.0s before retry [Retry 1/5].",
    ]


def test_the_hubs_client_logs_where_the_filter_is():
    """Its source is what says so: a release that logs elsewhere would print its ten lines again."""
    from huggingface_hub.utils import _http

    assert _http.logger.name == OneRetryLine.LOGGER
    source = Path(_http.__file__).read_text(encoding="utf-8")
    assert " thrown while requesting " in source and "Retrying in " in source
