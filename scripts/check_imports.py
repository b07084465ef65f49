"""Import the packages of ``on_card.sh``'s programs; name the missing ones in one line, with exit status 1.

A card's machine may have no way to install anything, so packages travel to it as wheels.
"""

from __future__ import annotations

import sys
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NEEDED = {
    "torch": "torch", "triton": "triton", "transformers": "transformers", "tokenizers": "tokenizers", "accelerate": "accelerate",
    "safetensors": "safetensors", "huggingface_hub": "huggingface_hub", "filelock": "filelock", "numpy": "numpy",
    "pydantic": "pydantic", "pydantic_core": "pydantic_core", "annotated_types": "annotated-types",
    "typing_inspection": "typing-inspection", "typing_extensions": "typing_extensions", "yaml": "pyyaml", "jinja2": "jinja2",
    "tqdm": "tqdm",
}  # fmt: skip
"""Module -> package that has it."""
PROGRAMS = "tests/support/graphs_on_cuda", "tests/support/rows_on_cuda", "scripts/gpu"


def missing() -> list[str]:
    """Packages that no import finds."""
    return [package for module, package in NEEDED.items() if find_spec(module) is None]


def main() -> int:
    if lacking := missing():
        print(
            f"on_card: missing: {' '.join(lacking)} (pip download --no-deps, and carry the wheels)",
            file=sys.stderr,
        )
        return 1
    sys.path += [str(ROOT / folder) for folder in ("tests/support", "scripts")]
    for program in PROGRAMS:
        try:
            import_module(Path(program).name)
        except ImportError as error:
            print(f"on_card: {program}.py does not import: {type(error).__name__}: {error}", file=sys.stderr)
            return 1
    found = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "triton", "transformers"))
    print(f"imports: all there ({found})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
