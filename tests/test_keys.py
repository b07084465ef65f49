"""What ``--help`` of a command with keys shows."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from locret_kit.cli import eval as eval_cli
from locret_kit.cli import train as train_cli
from locret_kit.config.evaluate import EvalConfig
from locret_kit.config.help import help_of, keys_of
from locret_kit.config.recipes import leaves
from locret_kit.config.train import TrainConfig


@dataclass
class Inner:
    """A section."""

    rate: float = 1e-3
    """Per step,
    no unit."""
    names: list[str] = field(default_factory=lambda: ["a", "b"])
    """Names."""
    bare: int = 1


@dataclass
class Outer:
    model: str
    """Which."""
    inner: Inner = field(default_factory=Inner)
    on: bool = True
    """Or off."""
    folder: str | None = None
    """Where."""


def test_keys_of_a_schema():
    assert list(keys_of(Outer)) == [
        ("model", "...", "Which."), ("inner.rate", "0.001", "Per step, no unit."), ("inner.names", "[a,b]", "Names."),
        ("inner.bare", "1", ""), ("on", "true", "Or off."), ("folder", "null", "Where."),
    ]  # fmt: skip
    assert "  inner.rate=0.001\n      Per step, no unit.\n" in help_of("usage", Outer)


@pytest.mark.parametrize("schema", [TrainConfig, EvalConfig])
def test_every_key_of_the_commands_is_explained(schema):
    found = list(keys_of(schema))
    assert [key for key, _, _ in found] == [key for key, _ in leaves(schema)]
    assert all(meaning for _, _, meaning in found)


@pytest.mark.parametrize("main", [train_cli.main, eval_cli.main])
def test_help_lists_them_and_nothing_alone_is_short(main, capsys):
    assert main(["--help"]) == 0
    long = capsys.readouterr().out
    assert "\n  seed=0\n" in long and "..." in long
    assert main([]) == 1
    short = capsys.readouterr().out
    assert long.startswith(short.rstrip()) and "seed=0" not in short
