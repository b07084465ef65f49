"""Weights that change between two answers, in every way in which people change them: what is said then is what the changed model
says by ``model.generate``, and with retaining heads what the reference says."""

from copy import deepcopy

import pytest
import torch
from policy_runs import distinct_tokens, heads_of
from tiny_lora import adapted
from tiny_models import tiny_model
from tiny_tokenizer import tiny_tokenizer
from torch import nn

from locret_kit import BoundedCache, attach
from locret_kit.backbones.libraries import CACHE
from locret_kit.backbones.probe import UnsupportedArchitecture, describe
from locret_kit.runtime.engine import Engine, Request
from locret_kit.runtime.session import Answer

IDS, LIMIT = distinct_tokens(60), 16


def model_of(**changes):
    """As a checkpoint of bfloat16 that is read in float32: the compiled call holds copies of its matrices."""
    return tiny_model("llama", **changes).bfloat16().float()


def noise(x, seed: int = 1):
    return (torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)) * x.std()).bfloat16().to(x.dtype)


def merged_and_back(model):
    peft = adapted(model)
    peft.merge_adapter()
    said(peft.get_base_model())
    peft.unmerge_adapter()
    return peft.unload()


def written(model):
    for layer in model.model.layers:
        layer.mlp.down_proj.weight.data.copy_(noise(layer.mlp.down_proj.weight))


def one_number(model):
    model.lm_head.weight.data[40, 7] = 64.0


def one_word(model):
    model.model.embed_tokens.weight.data[said.first] = noise(model.model.embed_tokens.weight)[0]


def one_norm(model):
    model.model.layers[1].input_layernorm.weight.data[::2] = 0


def epsilon(model):
    for layer in model.model.layers:
        layer.input_layernorm.variance_epsilon = 30.0


def not_halves(model):
    model.model.layers[1].mlp.down_proj.weight.data.mul_(1.2345)


def another_data(model):
    for weight in model.parameters():
        weight.data = noise(weight) if weight.dim() > 1 else weight.data.clone()


def another_parameter(model):
    mlp = model.model.layers[2].mlp
    mlp.up_proj.weight = nn.Parameter(noise(mlp.up_proj.weight), requires_grad=False)


def another_attention(model):
    other = tiny_model("llama", seed=5).model.layers[1].self_attn
    model.model.layers[1].self_attn = other


def another_last_layer(model):
    model.lm_head = nn.Linear(48, 97, bias=False).requires_grad_(False)
    model.lm_head.weight.data.copy_(noise(model.model.embed_tokens.weight))


@torch.no_grad()
def added(model):
    model.model.layers[0].mlp.up_proj.weight.add_(noise(model.model.layers[0].mlp.up_proj.weight))


def tied(model):
    model.lm_head.weight = model.model.embed_tokens.weight


class Int8(nn.Module):
    """As libraries quantise: another module in the place of a matrix."""

    def __init__(self, linear):
        super().__init__()
        step = linear.weight.abs().amax(1, keepdim=True) / 7
        self.register_buffer("step", step)
        self.register_buffer("codes", (linear.weight / step).round().to(torch.int8))

    def forward(self, x):
        return x @ (self.codes * self.step).T


def int8(model):
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = layer = deepcopy(layer)
        layer.mlp.up_proj, layer.self_attn.q_proj = Int8(layer.mlp.up_proj), Int8(layer.self_attn.q_proj)


def another_forward(model):
    mlp = model.model.layers[1].mlp
    mlp.forward = lambda x: -type(mlp).forward(mlp, x)


def another_hook(model):
    model.register_forward_hook(lambda module, args, out: out.__setitem__("logits", -out.logits))


def another_rotation(model):
    config = deepcopy(model.config)
    config.rope_parameters = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    model.model.rotary_emb = type(model.model.rotary_emb)(config)


def fewer_layers(model):
    model.model.layers = model.model.layers[:2]


def another_scaling(model):
    for layer in model.model.layers:
        layer.self_attn.scaling = 0.9


def hooked_norm(model):
    model.model.layers[1].post_attention_layernorm.register_forward_hook(lambda module, args, out: 2 * out)


def more_words(model):
    model.resize_token_embeddings(120)
    model.lm_head.weight.data[97:] = 3 * noise(model.lm_head.weight[:23])


CHANGES = [
    merged_and_back, written, one_number, one_word, one_norm, epsilon, not_halves,
    another_data, another_parameter, another_attention, another_last_layer, added, tied, int8,
    another_forward, another_hook, more_words, hooked_norm, another_rotation, fewer_layers, another_scaling, nn.Module.double,
]  # fmt: skip


def cache_of(heads=None, **settings):
    budget, policy = (200, "snapkv") if heads is None else (12, "locret")
    settings |= dict(chunk=4, stabilizers=2, local_len=3, prompt_length=60, decode_every=1)
    return BoundedCache(budget, policy, heads, **settings)


def said(model, heads=None, **settings):
    answer = Answer(model, tiny_tokenizer(), IDS, cache_of(heads, **settings), max_new_tokens=LIMIT)
    str(answer)
    return answer.tokens


said.first = 0


def batched(batch: Engine, heads=None):
    sequence = batch.add(Request(IDS, LIMIT), lambda: cache_of(heads))
    while sequence.finish_reason is None:
        batch.step()
    if sequence.error is not None:
        raise sequence.error
    return sequence.tokens


def true(model):
    return model.generate(torch.tensor([IDS]), max_new_tokens=LIMIT, do_sample=False)[0, len(IDS) :].tolist()


@pytest.mark.parametrize("change", CHANGES)
def test_answers_follow_the_weights(change):
    """By an answer of its own, and by a batch that is there before the change."""
    model = model_of()
    batch, before = Engine(model, frozenset()), true(model)
    assert said(model) == batched(batch) == before
    said.first = before[0]
    model = change(model) or model
    after = true(model)
    assert (after == before) == (change in (merged_and_back, nn.Module.double))
    assert said(model) == after
    assert batched(batch) == after


@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_an_attached_model(change):
    """Or a refusal, where an attention is another than was met."""
    model = model_of()
    with attach(model):
        said(model)
        model = change(model) or model
        if change is another_forward:  # that of attach stands below it
            return
        if change in (another_attention, int8, another_rotation):
            with pytest.raises((ValueError, RuntimeError), match="attach|some attention did not reach"):
                said(model)
            return
        mine = said(model)
    assert mine == true(model)


@pytest.mark.parametrize(
    "kind", ["LlamaMLP", "LlamaRMSNorm", "LlamaAttention", "LlamaDecoderLayer", "LlamaForCausalLM", None]
)
def test_forwards_that_a_program_gives_to_classes(kind, monkeypatch, request):
    """And a hook of every module: what they make is followed."""

    def twice(x, *rest):
        if hasattr(x, "logits"):
            return x.__setitem__("logits", -x.logits) or x
        return 2 * x if isinstance(x, torch.Tensor) else (2 * x[0], *x[1:])

    model = model_of()
    before = said(model)
    own = next((type(module) for module in model.modules() if type(module).__name__ == kind), None)
    if own is None:
        every = nn.modules.module.register_module_forward_hook
        hook = every(lambda module, args, out: -out if module is model.lm_head else None)
        request.addfinalizer(hook.remove)
    else:
        forward = own.forward
        monkeypatch.setattr(own, "forward", lambda self, *args, **named: twice(forward(self, *args, **named)))
    assert before != true(model) == said(model)


def test_attention_that_is_chosen_anew():
    """Between answers it is met; on an attached model it is refused."""
    model = model_of()
    before = said(model)
    model.set_attn_implementation("eager")
    assert said(model) == before
    with attach(model):
        model.set_attn_implementation("sdpa")
        with pytest.raises(RuntimeError, match="was changed on an attached model"):
            model(torch.tensor([IDS]), **{CACHE: cache_of()})
    model.model.layers[2] = model.model.layers[1]
    with pytest.raises(UnsupportedArchitecture, match="layer 1 calls attention more than once"):
        said(model)


HEADS = {
    "by .data": lambda heads: heads[1].fc2.weight.data.copy_(-heads[1].fc2.weight),
    "one row of a later layer": lambda heads: heads[2].fc1.weight.data[:8].zero_(),
    "another parameter": lambda heads: setattr(heads[1].fc2, "weight", nn.Parameter(-heads[1].fc2.weight)),
    "another module": lambda heads: setattr(heads[2], "fc1", deepcopy(heads[1].fc1)),
}


@pytest.mark.parametrize("change", HEADS.values(), ids=HEADS)
def test_answers_follow_the_heads(change):
    model, heads = model_of(), deepcopy(heads_of()).bfloat16().float()
    batch = Engine(model, frozenset())
    before = said(model, heads)
    assert batched(batch, heads) == before
    change(heads)
    after = said(model, heads, backend="reference")
    assert before != after == said(model, heads) == batched(batch, heads)


@pytest.mark.parametrize("empty", ["weight", "embed_tokens", "norm"])
def test_what_is_measured_without_weights_is_not_kept(empty):
    """A model of zeros looks as though it had no rotation; the next of its class has one."""
    model = model_of(max_position_embeddings=600 + len(empty))
    weights = deepcopy(model.state_dict())
    for name, weight in model.named_parameters():
        if empty in name:
            weight.data.zero_()
    with pytest.raises(UnsupportedArchitecture, match="queries and keys of zeros: load them first"):
        attach(model)
    model.load_state_dict(weights)
    assert all(rotation.module for rotation in describe(model).require_rotations())
    assert said(model) == true(model)
