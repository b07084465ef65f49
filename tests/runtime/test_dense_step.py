"""A token without the decoder's modules, against the forward over them; no GPU: Triton's interpreter, or the definitions."""

from dataclasses import replace

import interpreted  # noqa: F401  (before anything else imports the kernels)
import pytest
import torch
from decoder_runs import same
from policy_runs import LENGTH, make, tokens
from scripts_loaded import load_script
from tape import TapedDecoder, on_the_reference  # noqa: F401  (a fixture)
from tiny_heads import tiny_heads
from tiny_models import tiny_model
from torch import nn

from locret_kernels.decoder_step import RowProducts, composed
from locret_kit import BoundedCache
from locret_kit.backbones.gguf.gguf_model import PackedLinear
from locret_kit.cache.backend import BACKENDS
from locret_kit.cache.folded import fold_heads
from locret_kit.cache.pages import PagePool
from locret_kit.runtime.drivers import dense
from locret_kit.runtime.drivers.dense import APART, DenseStep
from locret_kit.runtime.drivers.graph import GraphDriver, TextsDriver

packed_matrix = load_script("scripts/kernel_cases.py").packed_matrix
pytestmark = pytest.mark.usefixtures("on_the_reference")
FAMILIES = [
    "llama", "llama-mha", "llama-mqa", "phi3", "phi3-longrope-window", "qwen2", "qwen3", "mistral-window", "smollm3",
    "internlm3", "gemma3",
]  # fmt: skip


def model_of(family: str, **changes):
    """With biases that are not zero, where it has some."""
    model = tiny_model(family, **changes)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.normal_(0, 0.2, generator=torch.Generator().manual_seed(len(name)))
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family):
    """Recorded and replayed; Gemma's modules do more than matrices."""
    model = model_of(family, tie_word_embeddings=family == "llama").double()
    caches = [BoundedCache(24, "h2o", chunk=5, prompt_length=LENGTH) for _ in range(2)]
    step = same(model, caches, tokens(), TapedDecoder, steps=20)
    assert (step.dense is None) == (family == "gemma3") and step.reason is None and step.replays > 12


@pytest.mark.parametrize(
    ("family", "policy", "driver"),
    [
        *((family, "locret", GraphDriver) for family in ("phi3", "qwen2", "qwen3")), ("mistral", "roco", GraphDriver),
        ("qwen2", "locret", TextsDriver), ("llama", "h2o", TextsDriver),
    ],
)  # fmt: skip
def test_kernels_and_folded_heads(family, policy, driver):
    """Products by Triton's kernel, scores by heads that are folded where nothing stands between; a text alone in a pool too."""
    model = model_of(family, num_hidden_layers=1)
    heads = tiny_heads(model, 32, seed=3)
    made: list[DenseStep] = []

    def form(model, cache):
        step, ctx = driver(model, cache), cache.context
        folded = fold_heads(model, heads, ctx.description) if policy == "locret" else None
        ctx = replace(ctx, backend=BACKENDS["triton"], folded=folded)
        assert policy != "locret" or (None in folded) == (family == "qwen3"), "norms stand between"
        step.dense = DenseStep(model, ctx, step.dense.weights)
        made.append(step.dense)
        return step

    chunk, steps = (13, 14) if family == "phi3" else (5, 9)  # Phi-3 repeats the same three tokens at first
    settings = dict(chunk=chunk, stabilizers=4, local_len=5, prompt_length=LENGTH)
    caches = [BoundedCache(24, policy, heads if policy == "locret" else None, **settings) for _ in range(2)]
    if driver is TextsDriver:
        caches[0].bind(model)
        PagePool(1).enter(caches[0])
    same(model, caches, tokens(), form, tolerance=2e-4, steps=steps)
    assert set(made[0].forms.values()) == {"one launch"} and caches[0].counters.evictions >= 5


def hooked(model):
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, out: 1.5 * out)


def adapted(model):
    class Adapter(nn.Linear):
        def forward(self, x):
            return super().forward(x).tanh()

    own = model.model.layers[1].self_attn.o_proj
    model.model.layers[1].self_attn.o_proj = Adapter(*own.weight.T.shape, bias=False).requires_grad_(False)


def packed(model):
    own = model.model.layers[1].mlp.down_proj.weight
    matrix = packed_matrix(*own.shape, "Q8_0", generator=torch.Generator().manual_seed(0))
    model.model.layers[1].mlp.down_proj = PackedLinear(matrix, "Q8_0", None)


@pytest.mark.parametrize(
    ("family", "change", "settings"),
    [
        ("llama", hooked, {}), ("llama", adapted, {}), ("llama", packed, {}), ("gemma3", None, {}),
        ("granite", None, dict(logits_scaling=0.5)), ("granite", None, dict(embedding_multiplier=3.0)),
        ("granite", None, dict(residual_multiplier=0.5)), ("olmo2", None, {}),
    ],
)  # fmt: skip
def test_what_modules_do_that_matrices_do_not(family, change, settings):
    """The graph is that of the modules, as ever."""
    model = model_of(family, **settings)
    if change is not None:
        change(model)
    caches = [BoundedCache(24, "h2o", chunk=5, prompt_length=LENGTH) for _ in range(2)]
    step = same(model, caches, tokens(), GraphDriver, tolerance=2e-4, steps=8)
    assert step.dense is None and step.reason is None


def test_the_fastest_form_of_each_shape_runs(monkeypatch):
    """A form is chosen by its time, once for each shape. Where PyTorch's products win throughout, modules run."""
    asked, apart = [], 1.0

    def timings(stages, kernels):
        asked.append([tuple(weight.shape) for weight in stages[0].weights])
        return {APART: apart, "one launch": 2.0 if len(stages[0].weights) > 1 else 0.5}

    model, cache = model_of("phi3"), make("h2o", family="phi3")
    cache.bind(model)
    ctx = replace(cache.context, backend=BACKENDS["triton"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dense, "timings", timings)
    monkeypatch.setattr(dense, "_CHOSEN", {})
    for _ in range(2):
        step = dense.dense_step(model, ctx)
        assert [shape[0] for shape in step.forms] == [(48, 16, 16, 48), (48, 48), (64, 64, 48), (48, 64)]
        assert [*step.forms.values()] == [APART, "one launch", APART, "one launch"] and len(asked) == 4
    monkeypatch.setattr(dense, "_CHOSEN", {})
    apart = 0.1
    assert dense.dense_step(model, ctx) is None


def no_such_instruction(x, stage, residual):
    raise OSError("ptxas: no such instruction\nmore")


@pytest.mark.parametrize(
    ("form", "why"),
    [
        (no_such_instruction, "ptxas: no such instruction"),
        (lambda *given: [1.1 * x for x in composed(*given, None, None)], "their products are not those of separate launches"),
        (lambda *given: [0 * x / 0 for x in composed(*given, None, None)], "their products are not those"),
        (lambda *given: [x.where(x != x.max(), 0) for x in composed(*given, None, None)], "their products are not those"),
        (lambda *given: [1.001 * x for x in composed(*given, None, None)], None),
    ],
)  # fmt: skip
def test_a_form_that_does_not_run_or_gives_other_products_is_left_out(form, why, monkeypatch, caplog):
    class Graph:
        def __init__(self, run):
            self.replay = run

    monkeypatch.setattr(dense, "capture", lambda device, others, run: (Graph(run), None))
    monkeypatch.setattr(dense, "quickest", lambda run, device: 8.0 if run() is not None else 0.0)
    monkeypatch.setattr(dense, "function", lambda name, kernels: form if name == "row_products" else None)
    stages = [RowProducts((torch.randn(4, 8),), (None,))] * 2
    assert dense.timings(stages, "triton") == {name: 4.0 for name in (APART, "one launch")[: 2 - bool(why)]}
    assert (f"matrix products of a token do not run as one launch: {why}" in caplog.text) == bool(why)
