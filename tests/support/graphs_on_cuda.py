"""On a CUDA device: attention of a chunk is right by every kernel that may be chosen, evictions of all layers at once equal those
of each, chunks of a prompt through a graph equal plain ones, and decoding through graphs equals the same step run as it is, and
dynamic decoding; so does a token whose products are one launch with what is around them. Ends with an error where not.

A process of its own, since the tests interpret the kernels: ``python tests/support/graphs_on_cuda.py`` with the repository and
``kernels`` on the path. ``test_graph_decoder_cuda.py`` runs it where there is a device.
"""

import sys
import time
import traceback
from contextlib import nullcontext
from functools import partial
from unittest import mock

import tiny_models
import torch
from scripts_loaded import load_script
from tiny_heads import tiny_heads

from locret_kit import BoundedCache, attach
from locret_kit.backbones.libraries import CACHE
from locret_kit.cache import attend, step
from locret_kit.runtime.drivers import dense
from locret_kit.runtime.drivers.graph import GraphDriver
from locret_kit.runtime.engine import Engine
from locret_kit.runtime.sequence import Request
from locret_kit.runtime.session import Sampling, prefill

decode = load_script("scripts/decoding.py").decode

LENGTH, STEPS = 300, 60
SETTINGS = dict(chunk=10, prompt_length=LENGTH, stabilizers=8, local_len=16, backend="triton")
POLICIES = ("locret", "h2o", "roco")
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


def attention() -> None:
    """Against float32, in shares of its root mean square."""
    for D in (64, 96, 128):
        sizes = (8, 300), (2, 900), (2, 900)
        q, k, v = (torch.randn(1, heads, rows, D, device="cuda").bfloat16() for heads, rows in sizes)
        x = q.float() @ k.float().repeat_interleave(4, 1).mT * D**-0.5
        x.masked_fill_(torch.ones(300, 900, dtype=torch.bool, device="cuda").triu(601), -torch.inf)
        exact, exact_lse = x.softmax(-1) @ v.float().repeat_interleave(4, 1), x.logsumexp(-1)
        chosen = attend.chunk_attention(q.device, q.dtype, D, (8, 2))
        assert chosen is not None, "no kernel of PyTorch runs"
        known = attend._running(q.device, q.dtype, D, (8, 2))
        for name, form in {chosen[0]: chosen[1], **known}.items():
            out, lse = form(q, k, v, D**-0.5)
            error = float((out.float() - exact).square().mean().sqrt() / exact.square().mean().sqrt())
            assert error < 8e-3 and (lse - exact_lse).abs().max() < 1e-2, f"{name}, heads of {D}: off by {error:.2g}"
            print(f"attention by {name}, heads of {D}: off by {error:.1e} of the rms", flush=True)


def evictions(model, heads) -> None:
    """Logits and rows, bit for bit."""
    for policy in POLICIES:
        found = []
        for may in (step.evicts_together, lambda ctx, rows: False):
            with mock.patch.object(step, "evicts_together", may):
                found.append(read(model, heads, policy, graph=False))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)), f"evictions of {policy} at once"
        print(f"{policy}: evictions of all layers at once are those of each", flush=True)


def read(model, heads, policy: str, **rest) -> list[torch.Tensor]:
    """Logits behind a prompt, and the positions that each layer keeps."""
    ids = torch.randint(2, 97, (LENGTH,), generator=torch.Generator().manual_seed(0)).tolist()
    graph = rest.pop("graph")
    cache = BoundedCache(64, policy, heads if policy == "locret" else None, **{**SETTINGS, **rest})
    logits = prefill(model, ids, cache, graph=graph)
    return [logits, *(cache.kept_positions(layer) for layer in range(len(cache.layers)))]


def chunks(model, heads) -> None:
    """Rows alike and logits as near as kernels of other runs are."""
    for policy in POLICIES:
        for positions in ("compact", "original"):
            replayed: list[int] = []
            replay = torch.cuda.CUDAGraph.replay
            counting = mock.patch.object(
                torch.cuda.CUDAGraph, "replay", lambda graph, replay=replay, n=replayed: (n.append(1), replay(graph))
            )
            plain, *kept = read(model, heads, policy, positions=positions, graph=False)
            with counting:
                logits, *graphs = read(model, heads, policy, positions=positions, graph=None)
            assert len(replayed) >= 15, f"{policy} {positions}: {len(replayed)} chunks of {LENGTH // 10} were replayed"
            assert all(torch.equal(a, b) for a, b in zip(kept, graphs, strict=True)), f"{policy} {positions}: rows"
            torch.testing.assert_close(logits, plain, **CLOSE)
            print(f"{policy} {positions}: {len(replayed)} chunks were replayed", flush=True)


def texts(model, heads) -> None:
    """Tokens of three texts that share graphs, one of which comes later, against those of shared forwards."""
    for policy in ("locret", "h2o", "snapkv(6,3)"):
        found = []
        for graph in (None, False):
            engine, of = Engine(model, frozenset(), pages=3, graph=graph), heads if policy == "locret" else None
            asked = []
            for n in range(3):
                ids = torch.randint(2, 97, (LENGTH,), generator=torch.Generator().manual_seed(n)).tolist()
                asked.append(engine.add(Request(ids, 60), partial(BoundedCache, 64, policy, of, **SETTINGS)))
                for _ in range(40 * (n == 1)):
                    engine.step()
            while engine.running:
                engine.step()
            assert not any(one.error for one in asked), [one.error for one in asked]
            found.append([one.tokens for one in asked])
            drivers = [*engine.drivers.of_texts.values()]
            assert graph is False or drivers
            assert graph is False or all(len(driver.graphs) >= 2 and not driver.reason for driver in drivers)
        assert found[0] == found[1], f"texts of {policy} with shared graphs"
        print(f"{policy}: tokens of three texts by shared graphs are those of shared forwards", flush=True)


def products() -> None:
    """Tokens of a graph whose products go with what is around them, launched early or not, against the graph over modules; in
    bfloat16 logits in shares of the root mean square, since near ties fall as sums are rounded."""
    for family, dtype in (("llama", torch.float32), ("qwen2", torch.float32), ("phi3", torch.bfloat16)):
        model = tiny_model(family).to(dtype)
        heads = tiny_heads(model, 32).cuda()
        with attach(model):
            with mock.patch("locret_kit.runtime.drivers.graph.dense_step", lambda model, ctx: None):
                modules, _ = run(model, "locret", heads, "graph")
            for name in [*dense.forms("triton")][1:]:
                with mock.patch.object(dense, "_chosen", lambda stages, kernels, name=name: name):
                    mine, driver = run(model, "locret", heads, "graph")
                assert driver is not None and driver.dense is not None and driver.reason is None and () in driver.graphs
                error = float((mine - modules).square().mean().sqrt() / modules.square().mean().sqrt())
                alike = int((mine.argmax(-1) == modules.argmax(-1)).sum())
                said = f"{alike} of {len(mine)} tokens, off by {error:.1e} of the rms"
                print(f"{family} {dtype}, {name}: {said}", flush=True)
                assert error < (1e-4 if dtype == torch.float32 else 3e-2), f"{family} {dtype}: {name}"
                assert alike == len(mine) or (dtype == torch.bfloat16 and alike >= len(mine) - 4)


def token(model, heads) -> None:
    """Logits of decoded tokens by graphs, by the same step run as it is, and by dynamic decoding."""
    for policy in POLICIES:
        for positions in ("compact", "original"):
            of = heads if policy == "locret" else None
            (graph, driver), (eager, _), (dynamic, _) = (
                run(model, policy, of, form, positions=positions) for form in ("graph", "eager", "dynamic")
            )
            assert driver is not None and driver.reason is None and () in driver.graphs, driver and driver.reason
            torch.testing.assert_close(graph, eager, **CLOSE)
            torch.testing.assert_close(graph, dynamic, **CLOSE)
            print(f"{policy} {positions}: {len(driver.graphs)} graphs, off by {float((graph - eager).abs().max()):.1e}")


def answers(model, heads) -> None:
    """Tokens of an answer with and without graphs."""
    ids, tokens = list(range(2, 90)), []
    for graph_wanted in (True, False):
        cache = BoundedCache(32, "h2o", chunk=10, prompt_length=len(ids), backend="triton")
        given = dict(prompt=ids, max_new_tokens=40, sampling=Sampling(), stop=frozenset(), graph=graph_wanted)
        tokens.append(list(decode(model, cache, prefill(model, ids, cache), **given)))
        print(cache.counters.decoding)
    assert tokens[0] == tokens[1]


WITHOUT_HEADS = attention, products
"""Parts that make models of their own."""
PARTS = evictions, chunks, texts, token, answers, *WITHOUT_HEADS
"""Exact parts first, and last those in shares of the root mean square, where bfloat16 may be unlike its definition."""


@torch.inference_mode()
def main(*names: str) -> int:
    """Run some parts, or all of them. One that is wrong ends no other."""
    model, wrong = tiny_model("llama"), []
    heads = tiny_heads(model, 32).cuda()
    for part in PARTS:
        if names and part.__name__ not in names:
            continue
        began = time.process_time()
        try:
            with attach(model) if part not in WITHOUT_HEADS else nullcontext():
                part(*(() if part in WITHOUT_HEADS else (model, heads)))
        except Exception:
            traceback.print_exc()
            wrong.append(part.__name__)
        print(f"{part.__name__}: {time.process_time() - began:.0f} s of this processor", flush=True)
    print(f"wrong: {', '.join(wrong)}" if wrong else "all are right", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
