"""Structs of the compiled calls as Python has them, against the compiler's own sizes, offsets and types; and what is refused."""

import re
import shutil
import subprocess

import numpy as np
import pytest
import torch

from locret_kernels import cpp, decoder_step, quantise
from locret_kernels.attend import cpu as attend
from locret_kernels.ragged_decode import cpu as ragged_decode

HEADERS = cpp.HEADERS
SOURCES = {
    HEADERS / "layout.h": {name.capitalize(): getattr(decoder_step, name) for name in
                           ("FORMAT", "LINEAR", "LAYER", "DECODER", "PACKED", "ROWS")},
    attend.SOURCE: {"Attention": attend.ATTENTION},
    ragged_decode.SOURCE: {"Decode": ragged_decode.DECODE},
    quantise.SOURCE: {"Group": quantise.GROUP},
}  # fmt: skip
NAMES = {
    torch.float32: "float", torch.float64: "double", torch.int64: "int64_t", torch.int32: "int32_t", torch.int16: "int16_t",
    torch.uint8: "uint8_t", torch.float16: "f16", None: "void",
}  # fmt: skip


def claims(name: str, struct: cpp.Struct) -> list[str]:
    """What Python believes, as C++."""
    found = [f"sizeof({name}) == {struct.dtype.itemsize}"]
    for field, (form, offset, *_) in struct.dtype.fields.items():
        own, kind = f"decltype({name}::{field})", struct.points[field]
        numbers = {np.dtype(np.int64): "i64", np.dtype(np.float64): "double"}
        found.append(f"offsetof({name}, {field}) == {offset} && sizeof({own}) == {form.itemsize}")
        pointee = f"std::remove_const_t<std::remove_pointer_t<{own}>>"
        if kind is None:
            found.append(f"std::is_class_v<{own}>" if form.fields else f"std::is_same_v<{own}, {numbers[form]}>")
        elif kind in ("Weights", "Sums") or kind in cpp.POINTED:
            found.append(f"std::is_pointer_v<{own}> && std::is_same_v<{pointee}, {NAMES[cpp.POINTED.get(kind)]}>")
        else:  # a struct, or a function
            found.append(f"std::is_pointer_v<{own}> && std::is_same_v<{pointee}, {kind}>")
    return found


def wrong(source, structs, headers=HEADERS) -> list[str]:
    """Claims that the compiler denies, and other errors of it."""
    lines = [f'#include "{source}"', "#include <cstddef>", "#include <type_traits>"]
    lines += [f'static_assert({claim}, "");' for name, struct in structs.items() for claim in claims(name, struct)]
    command = ["g++", *cpp.FLAGS, "-fsyntax-only", "-DTYPE=32", "-DCHANNELS=0", f"-I{headers}", "-x", "c++", "-"]
    done = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    return re.findall("error: .*", done.stderr)


def test_the_compiler_has_the_same_structs():
    known = {id(x) for structs in SOURCES.values() for x in structs.values()}
    modules = attend, decoder_step, quantise, ragged_decode
    assert known == {id(x) for module in modules for x in vars(module).values() if isinstance(x, cpp.Struct)}
    for source, structs in SOURCES.items():
        assert wrong(source, structs) == [], source


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("int32_t *positions;", "int32_t *positions;\n    i64 more;"),  # added
        ("float *scores, *stats;", "float *stats, *scores;"),  # swapped
        ("float *scores, *stats;", "double *scores, *stats;"),  # retyped
        ("i64 position, rotated,", "i64 position; double rotated; i64"),
        ("i64 position,", "i64 positions_seen,"),  # renamed
        ("const Packed *packed;", "Packed packed;"),
    ],
)  # fmt: skip
def test_a_change_of_one_side_is_seen(tmp_path, old, new):
    """The compiler's side is changed; Python's is what it was."""
    headers = shutil.copytree(HEADERS, tmp_path / "headers")
    layout = headers / "layout.h"
    text = layout.read_text()
    assert text.count(old) == 1
    layout.write_text(text.replace(old, new))
    assert wrong(layout, {"Rows": decoder_step.ROWS}, headers)


def test_what_is_refused(tmp_path):
    rows, x = decoder_step.ROWS, torch.zeros(4, 4)
    at = np.zeros((), rows.dtype)
    rows.point(at, torch.bfloat16, scores=x, cos=x, keys=x.bfloat16(), positions=x.int())
    assert [at[name] for name in ("scores", "cos", "keys", "positions")].count(0) == 0
    for name, other in {
        "scores": x.double(), "stats": x.bfloat16(), "cos": x.bfloat16(), "keys": x, "positions": x.long(), "starts": x.int(),
        "values": x.half(), "lengths": x.long().to("meta"), "own_cos": x.T[:2], "own_sin": torch.zeros(4, 8)[:, ::2],
    }.items():  # fmt: skip
        with pytest.raises(TypeError, match=name):
            rows.point(at, torch.bfloat16, **{name: other})
    sliced = torch.zeros(4, 8)[:, :4]
    with pytest.raises(TypeError, match="side by side"):
        attend.ATTENTION.point(np.zeros((), attend.ATTENTION.dtype), x.dtype, q=sliced)
    attend.ATTENTION.point(np.zeros((), attend.ATTENTION.dtype), x.dtype, strided=True, q=sliced)
    with pytest.raises(TypeError, match="'block'"):
        decoder_step.FORMAT.of(nbytes=1, rows=0, unpack=0)
    for line in ("int narrow;", "float real;", "i64 many[4];", "void (*call)(int a, int b);"):
        (tmp_path / "it.h").write_text(f"struct It {{\n    i64 one;\n    {line}\n}};\n")
        with pytest.raises(ValueError, match="It has"):
            cpp.Struct(tmp_path / "it.h", "It")
