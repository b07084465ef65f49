"""The rotation of stored values, by another definition than the package's."""

import torch


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Rows ``[..., D]`` in the order of Walsh functions, by the fast transform; blocks of the largest power of two in ``D``."""
    D = x.shape[-1]
    side, step = D & -D, 1
    x = x.double()
    while step < side:
        pairs = x.unflatten(-1, (-1, 2, step))
        x = torch.stack((pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]), -2).flatten(-3)
        step *= 2
    return x / side**0.5
