"""Pictures and text for TensorBoard: predicted and true importance, and the prompt with its kept tokens."""

from collections.abc import Sequence

import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import functional as F

from ..cis import ranks

COLOURS = "cividis"
"""Brightness rises along it, so it reads in grey."""
LABELS = 16
"""Most layers that an axis names."""


def cis_figure(predicted_RS: Tensor, target_RS: Tensor, layers: Sequence[int], title: str, width: int = 768) -> Figure:
    """Ranks predicted above ranks in truth: a column for each slot of the prompt, a row for each KV head of ``layers``.

    Eviction compares slots within a head, so units do not matter. Long prompts are cut into ``width`` bins that show their
    highest slot.
    """
    slots, heads = predicted_RS.shape[-1], predicted_RS.shape[0] // len(layers)
    both = torch.stack([ranks(predicted_RS.float()), ranks(target_RS.float())])
    if slots > width:
        both = F.adaptive_max_pool1d(both, width)
    figure = Figure(figsize=(10, 6.4), dpi=100, layout="constrained")
    figure.suptitle(title, fontsize=11)
    panels = figure.subplots(2, 1, sharex=True)
    named = range(0, len(layers), -(-len(layers) // LABELS))
    for panel, ranks_RS, name in zip(
        panels, both, ("Predicted by the heads", "True: attention of the answer's queries"), strict=True
    ):
        image = panel.imshow(
            ranks_RS.numpy(), cmap=COLOURS, vmin=0, vmax=1, aspect="auto", interpolation="nearest",
            extent=(0, slots, len(layers), 0),
        )  # fmt: skip
        panel.set_title(name, fontsize=10)
        panel.set_ylabel(f"layer ({heads} KV heads each)")
        panel.set_yticks([row + 0.5 for row in named], [str(layers[row]) for row in named])
    panels[-1].set_xlabel("token of the prompt")
    legend = figure.colorbar(image, ax=list(panels), pad=0.01, ticks=[0, 0.5, 0.9, 1])
    legend.set_ticklabels(["lowest\n(evicted first)", "median", "top tenth", "highest\n(kept longest)"])
    legend.set_label("importance: rank of the token within its head")
    return figure


def most_kept(predicted_RS: Tensor, fraction: float = 0.1) -> Tensor:
    """``[S]`` of bool: the ``fraction`` of slots that most heads would keep if each kept that fraction."""
    n = max(1, int(fraction * predicted_RS.shape[-1]))
    votes = torch.zeros_like(predicted_RS).scatter(-1, predicted_RS.topk(n, dim=-1).indices, 1.0).sum(0)
    votes += 0.5 * ranks(predicted_RS.mean(0, keepdim=True))[0]  # among equals, the higher mean score
    return torch.zeros_like(votes, dtype=torch.bool).scatter(0, votes.topk(n).indices, True)


def marked_text(tokens: Sequence[str], kept: Sequence[bool]) -> str:
    """The text as a Markdown code block; kept tokens stand between ⟦ and ⟧, neighbours together."""
    parts, inside = [], False
    for token, keep in zip(tokens, kept, strict=True):
        if keep != inside:
            parts.append("⟦" if keep else "⟧")
            inside = keep
        parts.append(token)
    text = "".join(parts) + ("⟧" if inside else "")
    return "\n".join("    " + line for line in text.split("\n"))
