"""Ceilings of three cards, and what operations reach of them: the assumptions of predicted speed, all of them here.

None is measured by this project. Ceilings and shares are estimates from public figures at the shapes of Phi-3-mini and
Llama-3.1-8B. Within their likely ranges (5 points of a share, half of a small kernel's time) a prediction moves by 4 to 9
points.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Card:
    """A GPU. Rates are per second; shares are of the matmul ceiling or of the copy ceiling."""

    name: str
    matmul: float
    """Floating-point operations of a large product in bfloat16, with float32 accumulation."""
    copy: float
    """Bytes read and written by a copy."""
    products: float
    """Share of ``matmul`` that a layer's products over a chunk reach."""
    weights: float
    """Share of ``copy`` that a product with one token reaches, which reads the weights once."""
    attention: float
    """Share of ``matmul`` that FlashAttention-2 reaches."""
    launch: float
    """Seconds of the smallest kernel."""
    newer: float | None = None
    """Share of ``matmul`` that FlashAttention-3 reaches, where the card has it: a package of its own."""


CARDS = {
    "rtx4090": Card("RTX 4090", 160e12, 920e9, products=0.92, weights=0.88, attention=0.93, launch=2.25e-6),
    "a100": Card("A100", 255e12, 1650e9, products=0.90, weights=0.82, attention=0.75, launch=2.6e-6),
    "h100": Card("H100", 680e12, 2900e9, products=0.85, weights=0.80, attention=0.52, launch=2.0e-6, newer=0.785),
}
ELEMENTWISE = 0.9
"""Share of ``copy`` that PyTorch's elementwise kernels reach."""
KERNELS = 0.7
"""Share of ``copy`` that the kit's Triton kernels reach."""
PASS = 2.5e-6
"""Seconds that one block of rows takes in a kernel that must finish it before the next."""
STEP = 0.5e-6
"""Seconds of one sum over the 32,768 numbers that a program holds in registers, its barriers included."""
SORT = 0.14e-3
"""Seconds of a layer's stable sort, whose passes PyTorch launches by itself."""


def card_of(device: str) -> Card | None:
    """The card by the name that its driver gives it, such as "NVIDIA H100 80GB HBM3"; None of another one."""
    return next((card for card in CARDS.values() if card.name.split()[-1] in device), None)
