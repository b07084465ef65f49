import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import interpreted  # noqa: F401  (before any other module imports Triton, whose own functions are decorated then too)
