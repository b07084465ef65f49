"""The kernels compile for cards that are not here, within the committed table; and the check that says so can fail."""

import ast
import os
import re
import subprocess
import sys

import pytest
from interpreted import common
from scripts_loaded import ROOT, load_script

BENCHMARKS = ROOT / "kernels" / "benchmarks"
TABLE = BENCHMARKS / "compile_table.csv"


check = load_script("scripts/compile_check.py")
SPILLS = {
    ("3.6.0", "column_max", 120),  # its assembler stops at 128 registers, though 255 are allowed
    ("3.6.0", "enter_rows", 120),  # so too: of a chunk in 8 bits
    ("3.6.0", "ragged_decode", 89),
    ("3.7.1", "column_max", 120),
    ("3.7.1", "column_stats", 120),
    ("3.7.1", "ragged_decode", 90),
    ("3.7.1", "sparse_attend", 80),
    ("3.7.1", "sparse_attend", 89),
}
"""Two words of stack a thread each, four of ``sparse_attend``."""


EVERY, FIRST = 35, 24
"""Every kernel, card and head size is among these launches. All take minutes: run compile_check.py without this option."""


def test_compilations_within_the_table():
    """A process of its own, since other tests interpret the kernels."""
    clean = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, check.__file__, "--every", str(EVERY), str(FIRST), "--against", str(TABLE)]
    run = subprocess.run(command, capture_output=True, text=True, env=clean)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    assert re.findall(r"(\d+) compilations, 0 problems", run.stdout) == [str(len(range(FIRST, 592, EVERY)))]
    rows = [line.split("\t") for line in run.stdout.splitlines() if "\t" in line]
    assert {row[2] for row in rows} == {"80", "89", "90", "120"}
    assert {row[3] for row in rows} == {"64", "96", "128", "256"}
    assert {row[0] for row in rows} == launched()


def launched() -> set[str]:
    """Kernels as they stand in the files: functions for Triton that no other one calls."""
    compiled, called = set(), set()
    for file in (ROOT / "kernels" / "locret_kernels").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(x) for x in node.decorator_list):
                compiled.add(node.name)
            elif isinstance(node, ast.Call):
                called.add(ast.unparse(node.func).rpartition(".")[2])
    return {name.strip("_") for name in compiled - called}


@pytest.fixture(scope="module")
def keys():
    """Names of all launches, without a compiler."""
    made = ((launch, D) for D in common.HEAD_SIZES for launch in check.launches(D))
    return {launch.row(arch, D).key for launch, D in made for arch in (80, 89, 90, 120)}


def test_every_kernel_is_launched_by_a_case(keys):
    assert {kernel for kernel, *_ in keys} == launched() and len(launched()) == 12


@pytest.mark.parametrize("version", ["3.6.0", "3.7.1", "3.9.0"])
def test_the_table_is_whole(version, keys):
    """Every launch of every kernel on four cards."""
    rows = [row for row in check.read(TABLE) if row.triton == version]
    assert {row.key for row in rows} == keys and len(rows) == len(keys) == 592
    assert all(1 <= row.registers <= 255 for row in rows)
    assert [row for row in rows if row.shared_bytes > check.LIMIT_KIB[row.arch] * 1024] == []
    spilled = {(version, row.kernel, row.arch) for row in rows if row.stack_bytes}
    assert spilled == {spill for spill in SPILLS if spill[0] == version}
    assert max(row.stack_bytes for row in rows) <= 16


def test_the_pinned_triton_is_in_the_table():
    (pinned,) = re.findall(r"^triton==([\d.]+)", (ROOT / "constraints.txt").read_text(), re.M)
    assert pinned in {row.triton for row in check.read(TABLE)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(shared_bytes=99 * 1024 + 1), "101377 bytes of shared memory, above 99 KiB"),
        (dict(stack_bytes=8), "8 bytes of stack a thread: registers spill"),
        (dict(shared_bytes=40_001), "shared memory grew from 40000 to 40001 bytes"),
        (dict(registers=133), "registers grew from 120 to 133, by over 10%"),
        (dict(options="BLOCK_S=32"), "not in the committed table"),
    ],
)
def test_what_the_check_finds(change, message):
    row = check.Row("column_max", "BLOCK_S=64", 89, 128, "bf16", 40_000, 120, 0)
    assert check.problems([row], [row]) == []
    assert any(message in line for line in check.problems([row._replace(**change)], [row]))
