"""Decoding by one compiled call a token, against the plain forward: logits, tokens, rows and counts. Compiles for seconds, once
a machine."""

from copy import deepcopy

import pytest
import torch
from decoder_runs import alike, decoded, same
from policy_runs import LENGTH, SMALL, answer, backbone, heads_of, held, make, tokens
from scripts_loaded import load_script
from tiny_models import tiny_model

from locret_kernels import cpp
from locret_kernels.decoder_step import Bf16Copies
from locret_kernels.product import FORMATS
from locret_kit import BoundedCache, attach
from locret_kit.backbones.gguf.gguf_model import PackedEmbedding, PackedLinear
from locret_kit.runtime.drivers.cpu import CpuDriver, cpu_driver
from locret_kit.runtime.drivers.graph import NoDriver, warn
from locret_kit.runtime.session import prefill

packed_matrix = load_script("scripts/kernel_cases.py").packed_matrix
WIDE = dict(hidden_size=256, intermediate_size=512, num_attention_heads=4, attention_bias=True)
"""Sizes of which blocks of 256 are multiples."""
SOME = ["locret", "h2o", "roco", "ada-locret", "snapkv(6,3)", "tova", "scissorhands", "random", "lookahead-locret"]
"""One of each kind of score; the others differ in evictions alone, which are not the call's."""


def compiled(model, cache) -> CpuDriver:
    return CpuDriver(model)


@pytest.mark.parametrize("policy", SOME)
def test_policies(policy):
    """Over several evictions; every policy in one of the position rules."""
    positions = ("compact", "original", "clipped(60)")[SOME.index(policy) % 3]
    # No token twice: scores of the first layer are those of the token alone, and rounding would decide between equals.
    ids = (2 + torch.randperm(95, generator=torch.Generator().manual_seed(0))[:50]).tolist()
    caches = [make(policy, positions=positions, length=len(ids), chunk=5) for _ in range(2)]
    same(backbone(), caches, ids, compiled)
    assert caches[0].counters.evictions >= 8


@pytest.mark.parametrize("family", ["llama-mha", "llama-mqa", "qwen2", "qwen3", "phi3-longrope", "mistral-window"])
def test_families(family):
    model = tiny_model(family).double()
    caches = [BoundedCache(24, "h2o", chunk=5, prompt_length=LENGTH) for _ in range(2)]
    same(model, caches, tokens(), compiled)


def test_biases_and_another_type():
    """Biases of attention and of MLPs, which few checkpoints have; and float32, whose vectors are wider."""
    model = tiny_model("llama", attention_bias=True, mlp_bias=True)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.normal_(0, 0.1, generator=torch.Generator().manual_seed(len(name)))
    same(model, [make("h2o") for _ in range(2)], tokens(), compiled, 2e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_packed_matrices(dtype):
    """Of every format, also of the words and the last layer, with a plain matrix and biases between."""
    model, generator, forms = tiny_model("llama", **WIDE).to(dtype), torch.Generator(), [*FORMATS] * 9
    words = model.get_input_embeddings().weight
    matrix = packed_matrix(*words.shape, "Q6_K", generator=generator.manual_seed(0))
    for name, module in list(model.named_modules()):
        if name == "model.layers.0.mlp.up_proj" or type(module) is not torch.nn.Linear:
            continue
        form = forms.pop()
        weight = packed_matrix(*module.weight.shape, form, generator=generator.manual_seed(len(forms)))
        model.set_submodule(name, PackedLinear(weight, form, module.bias))
    model.set_submodule("model.embed_tokens", PackedEmbedding(matrix, "Q6_K", dtype))
    caches = [make("streaming") for _ in range(2)]
    with attach(model), torch.inference_mode():
        assert cpu_driver(model).weights.is_packed
        mine, _ = decoded(model, caches[0], tokens(), compiled, 12)
        theirs, _ = decoded(model, caches[1], tokens(), steps=12)
    assert held(caches[0]) == held(caches[1])
    bound = 2e-2 if dtype == torch.float32 else 5e-2  # the last bit of an activation may turn its code of 8 bits
    assert (mine - theirs).square().mean().sqrt() < bound * theirs.square().mean().sqrt()


@pytest.mark.parametrize("policy", ["locret", "h2o"])
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_few_bits(policy, bits):
    """The call reads codes as they are; rows whose group is full are quantised after it, as the plain forward would, and in 8
    bits each row by the call itself."""
    caches = [make(policy, kv_bits=bits, length=LENGTH, chunk=60) for _ in range(2)]
    same(backbone(), caches, tokens(), compiled, 1e-3 if bits == 8 else 3e-5, steps=45)
    for mine, theirs in zip(*(cache.bounded for cache in caches), strict=True):
        if bits == 8:
            torch.testing.assert_close(mine.slots("keys"), theirs.slots("keys"), rtol=0, atol=1e-2)
            continue
        group = mine.codec.group[mine.layout.every()]
        assert torch.equal(group, theirs.codec.group[theirs.layout.every()]) and (group >= 0).any()


def test_weights_that_bfloat16_holds_are_halved_and_no_bit_changes(monkeypatch):
    model, heads, said = tiny_model("llama").bfloat16().float(), deepcopy(heads_of()).bfloat16(), []
    with attach(model), torch.inference_mode():
        for halved in (True, False):
            with monkeypatch.context() as patch:
                if not halved:
                    patch.setattr(Bf16Copies, "_holds", lambda *_: False)
                decoder = CpuDriver(model)
            table = decoder._plain
            assert table.layers["query"]["halved"][0] == table.decoder["head"]["halved"] == halved
            numbers = sum(x.weight.numel() for x in model.modules() if isinstance(x, torch.nn.Linear))
            assert decoder.weight_bytes() == numbers * (2 if halved else 4)
            cache = make("streaming")
            prefill(model, tokens(), cache)
            said.append(torch.stack([decoder([cache], [token])[0] for token in tokens(5, seed=1)]))
        # Heads too, which the cache brings to the model's type.
        BoundedCache(24, "locret", heads, prompt_length=LENGTH, **SMALL).bind(model)
        read = CpuDriver(model).weight_bytes(heads)
    assert torch.equal(*said)
    assert read == 2 * (numbers + sum(x.numel() for x in heads.parameters()))


def test_bfloat16_is_as_near_to_the_truth_as_the_plain_forward():
    """Its sums are of float32, so it rounds less often."""
    model, exact = tiny_model("llama").bfloat16(), tiny_model("llama").bfloat16().double()
    ids, out = tokens(), []
    for one, form in ((model, compiled), (model, None), (exact, None)):
        cache = BoundedCache(24, "streaming", chunk=13, prompt_length=LENGTH)
        with attach(one), torch.inference_mode():
            out.append(decoded(one, cache, ids, form, 20)[0][1:])
    mine, plain, truth = out
    assert (mine - truth).square().mean() <= (plain - truth).square().mean()


def test_a_text_is_the_same_in_any_company():
    """Bit for bit: in a batch of several lengths, policies and threads as alone."""
    lengths = {"locret": 83, "h2o": 41, "ada-locret": 60, "snapkv(6,3)": 77, "knorm": 30}
    decoder, said = CpuDriver(backbone()), {}
    caches, alone = ({name: make(name, length=length) for name, length in lengths.items()} for _ in range(2))
    for name, length in lengths.items():
        for cache in (caches[name], alone[name]):
            prefill(backbone(), tokens(length), cache)
    with attach(backbone()), torch.inference_mode():
        for name, cache in alone.items():
            said[name] = torch.stack([decoder([cache], [token])[0] for token in tokens(20, seed=2)])
        torch.set_num_threads(3)
        try:
            together = [decoder([*caches.values()], [token] * len(caches)) for token in tokens(20, seed=2)]
        finally:
            torch.set_num_threads(1)
    for n, (name, cache) in enumerate(caches.items()):
        assert torch.equal(torch.stack([one[n] for one in together]), said[name]), name
        assert held(cache) == held(alone[name])


class Other(torch.nn.Module):
    """An MLP of somebody else's."""


@pytest.mark.parametrize(("policy", "known"), [("full", True), ("ada-locret", False)])
def test_another_text_in_a_cache_that_was_reset(policy, known):
    """As long as the first one was when it ended: counts do not tell them apart, but rows lie elsewhere."""
    model, (first, second) = backbone(), (tokens(60, seed=1), tokens(72, seed=2))
    used, fresh = (make(policy, length=len(ids) if known else None, chunk=7) for ids in (first, second))
    with attach(model), torch.inference_mode():
        decoder = CpuDriver(model)
        decoded(model, used, first, lambda *_: decoder, steps=12)
        used.reset(72 if known else None)
        mine, theirs = (decoded(model, cache, second, lambda *_: decoder, steps=12)[0] for cache in (used, fresh))
    assert torch.equal(mine, theirs)
    alike(used, fresh, 0)


@pytest.mark.parametrize(
    ("policy", "rest", "why"),
    [
        ("sirllm", {}, "logits"), ("merge-locret", {}, "merges"), ("locret recall=blocks(size=4,take=2)", {}, "back"),
        ("locret", dict(backend="reference"), "backend='reference'"), ("locret", {}, None),
    ],
)  # fmt: skip
def test_caches_that_it_does_not_take(policy, rest, why):
    """Each says why, and is decoded by the plain forward; ``backend`` asks for that by name."""
    cache = make(policy, **rest)
    cache.bind(backbone())
    reason = CpuDriver(backbone()).refusal(cache)
    assert (reason is None) if why is None else why in reason


def in_a_sequence(model):
    model.model.layers[0].mlp.down_proj = torch.nn.Sequential(model.model.layers[0].mlp.down_proj)


@pytest.mark.parametrize(
    ("family", "change", "why"),
    [
        ("llama", lambda model: model.model.layers[1].mlp.register_forward_hook(lambda *_: None), "hooks"),
        ("llama", lambda model: model.train(), "training"), ("llama", lambda model: model.half(), "float16"),
        ("llama", lambda model: setattr(model.model.layers[1], "mlp", Other()), "Other stands in"),
        ("llama", in_a_sequence, "Sequential"), ("gemma3", lambda model: None, "its words are a"),
        ("ministral3", lambda model: None, "queries are scaled by their positions"),
    ],
)  # fmt: skip
def test_models_that_it_does_not_take(family, change, why):
    model = tiny_model("mistral", model_type=family) if family == "ministral3" else tiny_model(family)
    change(model)
    with pytest.raises(NoDriver, match=why):
        cpu_driver(model)


def test_a_token_that_there_is_not():
    with pytest.raises(IndexError, match=r"tokens=\[97\] must be below 97"):
        CpuDriver(backbone())([], [97])


def test_without_a_compiler_tokens_are_decoded_all_the_same(monkeypatch, caplog):
    """And that is said once."""
    make("locret").bind(backbone())  # the backend of prompts is known by now
    monkeypatch.setenv("CXX", "no-such-compiler")
    cpp.load.cache_clear()
    warn.cache_clear()
    model, caches = tiny_model("llama").double(), [make("locret", backend=name) for name in (None, None, "reference")]
    try:
        said = [answer(cache, tokens(), 12, model) for cache in caches]
    finally:
        cpp.load.cache_clear()
    assert said[0] == said[1] == said[2]
    assert [record.getMessage().count("no C++ compiler") for record in caplog.records] == [1]
