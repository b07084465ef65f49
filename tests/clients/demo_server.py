"""``locret-serve`` over the demo backbone, as a program, for the clients of these tests."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BACKBONE, HEADS = ROOT / "checkpoints" / "SmolLM2-135M-Instruct", ROOT / "checkpoints" / "smollm2-135m-locret"
WORDS = [
    "--ckpt", str(HEADS), "--model", str(BACKBONE), "--budget", "1024", "--sessions", "2", "--dtype", "float32",
    "--temperature", "0", "--model-name", "demo",
]  # fmt: skip
