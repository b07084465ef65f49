"""On a CUDA device: decoding through graphs equals the same step run as it is, and dynamic decoding. Ends with an error
where it does not.

A process of its own, since the tests interpret the kernels: ``python tests/support/graphs_on_cuda.py`` with the repository and
``kernels`` on the path. ``test_graph_decoder_cuda.py`` runs it where there is a device.
"""

from __future__ import annotations

import tiny_models
import torch

from locret_kit import BoundedCache, HeadsConfig, RetainingHeads, attach
from locret_kit.backbones.libraries import CACHE
from locret_kit.backbones.spec import spec_of
from locret_kit.runtime.drivers.graph import GraphDriver
from locret_kit.runtime.session import Sampling, decode, prefill

LENGTH, STEPS = 300, 60
SETTINGS = dict(chunk=10, prompt_length=LENGTH, stabilizers=8, local_len=16, backend="triton")
CLOSE = dict(rtol=2e-3, atol=2e-3)


def tiny_model(family: str):
    """Heads of 64, the smallest that the kernels take."""
    model = tiny_models.tiny_model(
        family, hidden_size=256, intermediate_size=256, num_attention_heads=4, head_dim=64, max_position_embeddings=1024
    )
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.div_(2.0)
    return model.cuda()


def run(model, policy: str, heads, form: str, **rest) -> tuple[torch.Tensor, GraphDriver | None]:
    """Logits ``[1 + STEPS, V]``; ``form`` is "graph", "eager" or "dynamic"."""
    ids = torch.randint(2, 97, (LENGTH,), generator=torch.Generator().manual_seed(0)).tolist()
    cache = BoundedCache(64, policy, heads, **{**SETTINGS, **rest})
    out = [prefill(model, ids, cache)]
    step = None if form == "dynamic" else GraphDriver(model, cache)
    if step is not None:
        step.captures = form == "graph"
    for n in range(STEPS):
        token = 2 + 37 * n % 95
        if step is not None:
            out.append(step([cache], [token])[0])
        else:
            piece = torch.tensor([[token]], device="cuda")
            out.append(model(input_ids=piece, **{CACHE: cache}, logits_to_keep=1).logits[0, -1].float())
    return torch.stack(out), step


@torch.inference_mode()
def main() -> None:
    model = tiny_model("llama")
    config = HeadsConfig.for_backbone(spec_of(model.config), "tiny", 32)
    heads = RetainingHeads(config).requires_grad_(False).cuda()
    with attach(model):
        for policy in ("locret", "h2o", "roco"):
            for positions in ("compact", "original"):
                of = heads if policy == "locret" else None
                (graph, step), (eager, _), (dynamic, _) = (
                    run(model, policy, of, form, positions=positions) for form in ("graph", "eager", "dynamic")
                )
                assert step is not None and step.reason is None and step.cuts_captured, step and step.reason
                assert any(before for before, _ in step.graphs) and ((), ()) in step.graphs
                torch.testing.assert_close(graph, eager, **CLOSE)
                torch.testing.assert_close(graph, dynamic, **CLOSE)
                print(
                    f"{policy} {positions}: {len(step.graphs)} graphs, off by {float((graph - eager).abs().max()):.1e}"
                )
        ids, tokens = list(range(2, 90)), []
        for graph_wanted in (True, False):
            cache = BoundedCache(32, "h2o", chunk=10, prompt_length=len(ids), backend="triton")
            given = dict(prompt=ids, max_new_tokens=40, sampling=Sampling(), stop=frozenset(), graph=graph_wanted)
            tokens.append(list(decode(model, cache, prefill(model, ids, cache), **given)))
            print(cache.counters.decoding)
        assert tokens[0] == tokens[1]


if __name__ == "__main__":
    main()
