"""Programs of ``scripts/on_card.sh`` on a CPU that plays a card: kernels by Triton's interpreter, CUDA graphs as tapes of
operators and launches, small models. Results are right, and times mean nothing.

    PLAYED=1 scripts/on_card.sh tiny
    python tests/support/played_card.py FILE [ARGUMENT ...]
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("", "kernels", "scripts", "tests/support")]

import interpreted  # noqa: E402, F401  (before anything else imports the kernels)
import torch  # noqa: E402
from scripts_loaded import load_script  # noqa: E402
from tape import Tape, recorded  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils._python_dispatch import _disable_current_modes  # noqa: E402

from locret_kernels import common  # noqa: E402
from locret_kernels.fused import rms_norm, swiglu  # noqa: E402
from locret_kit.backbones.handlers import LayerOperations  # noqa: E402
from locret_kit.cache import attend, backend, context  # noqa: E402
from locret_kit.runtime import drivers  # noqa: E402
from locret_kit.runtime.drivers.graph import (  # noqa: E402
    CHUNKS,
    GraphDriver,
    StepGraphs,
    TextsDriver,
)

SHORTER = {
    'device="cuda"': 'device="cpu"', ".cuda()": "", "LENGTH, STEPS = 300, 60": "LENGTH, STEPS = 110, 9",
    "BoundedCache(64, policy": "BoundedCache(32, policy", "BoundedCache, 64, policy": "BoundedCache, 32, policy",
    "stabilizers=8, local_len=16": "stabilizers=4, local_len=6", "len(replayed) >= 15": "len(replayed) >= 4",
    'POLICIES = ("locret", "h2o", "roco")': 'POLICIES = ("locret", "roco")', '"h2o", "snapkv(6,3)"': '"snapkv(6,3)"',
    "Request(ids, 60)": "Request(ids, 16)", "range(40 * (n == 1))": "range(8 * (n == 1))",
    "num_attention_heads=4, head_dim=64": "num_hidden_layers=2, num_attention_heads=4, head_dim=64",
    "hidden_size=256, intermediate_size=256": "hidden_size=64, intermediate_size=64",
    "max_new_tokens=40": "max_new_tokens=6", "range(2, 90)": "range(2, 40)",
    'for positions in ("compact", "original"):': 'for positions in ["original" if policy == "roco" else "compact"]:',
}  # fmt: skip
"""Text of ``graphs_on_cuda.py`` -> what stands in its place."""


class LaunchTape(Tape):
    """Records launches of kernels too."""

    recording: LaunchTape | None = None

    def __enter__(self) -> LaunchTape:
        LaunchTape.recording = self
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        LaunchTape.recording = None
        super().__exit__(*error)


def launch(kernel, grid, *args, real=common.launch, **constants) -> None:
    """Launch a kernel. The interpreter's own operators are not recorded."""
    call = partial(real, kernel, grid, *args, **constants)
    if LaunchTape.recording is not None:
        LaunchTape.recording.calls.append((call, (), {}, None))
    with _disable_current_modes():
        call()


def captured(driver: StepGraphs, step) -> tuple[Tape, Tensor]:
    """A tape of a step and its logits."""
    own = isinstance(driver, GraphDriver) and [one for rows in driver.cache.bounded for one in (rows, rows.codec)]
    holders = [driver, *own] if own else driver.pools
    return recorded([x for one in holders for x in vars(one).values() if isinstance(x, Tensor)], step, LaunchTape)


def exact(q: Tensor, k: Tensor, v: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Attention to the lower right and its log-sum-exp, in float32."""
    (T, S), G = (q.shape[2], k.shape[2]), q.shape[1] // k.shape[1]
    x = q.float() @ k.float().repeat_interleave(G, 1).mT * scaling
    x.masked_fill_(torch.ones(T, S, dtype=torch.bool).triu(S - T + 1), -torch.inf)
    return (x.softmax(-1) @ v.float().repeat_interleave(G, 1)).to(q.dtype), x.logsumexp(-1)


def chunk_driver(model, cache, graph: bool | None) -> GraphDriver | None:
    """As the kit's, on any device."""
    s, seen = cache.schedule, cache.get_seq_length()
    worth = seen and s.chunk > 1 and not s.one_shot and (s.body or 0) - seen >= CHUNKS * s.chunk
    return GraphDriver(model, cache, s.chunk) if worth and graph is not False else None


def play() -> None:
    """From now on this process takes its CPU for a card."""
    torch.set_num_threads(1)
    common.launch = launch
    torch.cuda.CUDAGraph = LaunchTape
    StepGraphs._captured = captured
    for kind, more in ((StepGraphs, lambda driver, *given: vars(driver).update(captures=True)),
                       (TextsDriver, lambda driver, model, first: vars(driver).update(
                           pools=[rows.page.pool for rows in first.bounded]))):  # fmt: skip
        kind.__init__ = _also(kind.__init__, more)
    attend.chunk_attention = backend.chunk_attention = lambda *sizes: ("played", exact)
    backend.TritonBackend.folds = lambda self, device: True
    backend.TritonBackend.operations = lambda self, x: LayerOperations(rms_norm, swiglu, F.linear)
    real = backend.backend_for
    backend.backend_for = context.backend_for = lambda name, *given: real(name or "triton", *given)
    drivers.DRIVERS["graph"] = lambda model, cache, graph: None if graph is False else GraphDriver(model, cache)
    drivers.DRIVERS["cpu"] = lambda *given: None
    drivers.chunk_driver = chunk_driver


def _also(init, more):
    def both(self, *given) -> None:
        init(self, *given)
        more(self, *given)

    return both


def rows(args: list[str]) -> int:
    load_script("tests/support/rows_on_cuda.py").main(device="cpu", sizes=((700, 600, 64),), tokens=(1, 300))
    return 0


def graphs(args: list[str]) -> int:
    text = (ROOT / "tests/support/graphs_on_cuda.py").read_text(encoding="utf-8")
    for old, new in SHORTER.items():
        assert old in text, f"{old!r} is not in graphs_on_cuda.py"
        text = text.replace(old, new)
    module = ModuleType("graphs_on_cuda")
    exec(compile(text, "graphs_on_cuda.py", "exec"), vars(module))
    return module.main(*args)


def figures(args: list[str]) -> int:
    gpu = load_script("scripts/gpu.py")
    small = partial(gpu.RunSettings, budget=48, chunk=16)
    with (
        mock.patch.object(gpu, "RunSettings", lambda **given: small()),
        mock.patch.multiple(gpu.e2e, WARM=2, TIMED=4, PASSES=1, BEHIND=112, COMPILING=1.0),
    ):
        return gpu.main([*args, "--device", "cpu", "--tokens", "208"])


if __name__ == "__main__":
    program, args = Path(sys.argv[1]).name, sys.argv[2:]
    play()
    sys.exit({"rows_on_cuda.py": rows, "graphs_on_cuda.py": graphs, "gpu.py": figures}[program](args))
