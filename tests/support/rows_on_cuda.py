"""On a CUDA device: the kernels that select, move and rotate rows equal their references, at sizes for
``compute-sanitizer --tool racecheck``, which slows them a hundred times. Ends with an error where they do not.

A process of its own, since the tests interpret the kernels: ``python tests/support/rows_on_cuda.py`` with the repository and
``kernels`` on the path. ``scripts/on_card.sh`` runs it. ``test_kernels_rows.py`` runs it on a CPU, interpreted.
"""

import torch

from locret_kernels import backend, common
from locret_kernels.rows import HeadProduct, RowBuffers

SIZES = ((700, 600, 64), (4500, 4300, 96), (33000, 100, 128))
"""Slots, those that stay, and the head size: one block of slots, three, and many."""
SLACK = 16 if common.INTERPRETED else 1
"""Factor of tolerances: the interpreter cuts numbers to bfloat16, which a card rounds, and does not round activations."""


def enter(T: int, H: int, D: int, device: str) -> None:
    """New rows at a place that the device knows, with their scores by a head or zeros."""
    k, v, hidden, fc2 = (
        torch.randn(*n, device=device).bfloat16() for n in ((H, T, D), (H, T, D), (1, T, 200), (H, 200))
    )
    at, seen, N = torch.tensor([3], device=device), torch.tensor(70, device=device), H * (T + 5)
    for score, kinds in ((HeadProduct(hidden, fc2), 0), (None, 2)):
        found = []
        for name in ("reference", "triton"):
            rows = [
                torch.zeros(N, *n, device=device, dtype=kind)
                for n, kind in (((D,), k.dtype), ((D,), k.dtype), ((), torch.int32))
            ]
            rows = RowBuffers(*rows, torch.ones(N, device=device), torch.ones(kinds, N, device=device))
            backend.function("enter_rows", name)(rows, at, k, v, seen, score, apart=T + 5)
            found.append(rows)
        for what, expected, made in zip(RowBuffers._fields, *found, strict=True):
            if what == "scores_N":
                torch.testing.assert_close(made, expected, rtol=SLACK * 2**-7, atol=SLACK * 0.05)
            else:
                assert made is expected or torch.equal(made, expected), f"{what} of {T} new rows"
    print(f"{T} new rows of {H} heads of {D}: as their reference", flush=True)


def main(*, device="cuda", sizes=SIZES, tokens=(1, 16, 300)) -> None:
    for T in tokens:
        enter(T, 6, 96, device)
    generator = torch.Generator(device=device).manual_seed(0)
    for S, K, D in sizes:
        scores = torch.randn(1, 2, S, generator=generator, device=device).round(decimals=1)
        protected, valid = scores > 2.5, torch.ones_like(scores, dtype=torch.bool)
        guard = protected.byte()
        guard[..., :3] = 2
        keys = torch.randn(1, 2, S, D, generator=generator, device=device).bfloat16()
        buffers, found = [keys, scores], {}
        for name in ("reference", "triton"):
            call = {
                each: backend.function(each, name)
                for each in ("select_rows", "select_index", "compact_rows", "rotate_rows")
            }
            most = torch.full((1, 2), K, device=device)
            stay = call["select_rows"](scores, protected, valid, most)
            chosen = [call["select_index"](scores, K, S // 50, guard) for guard in (None, guard)]
            up = [[x[0].clone() for x in buffers] for _ in chosen]  # two layers whose buffers lie apart
            call["compact_rows"](up, torch.cat(chosen), {})
            tables = torch.randn(2, S, D // 2, generator=torch.Generator().manual_seed(0)).repeat(1, 1, 2).bfloat16()
            # The reference in float32: a kernel rounds once, at its end.
            exact = [x if name == "triton" else x.float() for x in (keys, *tables.to(device))]
            turned = call["rotate_rows"](*exact).float()
            found[name] = [stay, *(index.long() for index in chosen), *(x for layer in up for x in layer)], turned
        (mine, turned), (theirs, expected) = found["triton"], found["reference"]
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True)), f"rows of {S} slots"
        torch.testing.assert_close(turned, expected, rtol=SLACK * 2**-8, atol=SLACK * 1e-5)
        print(f"rows of {S} slots, {K} of them stay, heads of {D}: as their references", flush=True)


if __name__ == "__main__":
    main()
