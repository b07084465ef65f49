"""Scripts and benchmarks as modules: files outside of any package."""

import sys
from importlib import util
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]


def load_script(path: str) -> ModuleType:
    """The module of a file, ``path`` being relative to the repository, under the file's own name."""
    file = ROOT / path
    spec = util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[file.stem] = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
