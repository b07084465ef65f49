"""A model that accelerate has spread over two cards, which are played: no operation mixes devices, and logits and kept rows are
those of the model on a CPU."""

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from policy_runs import tokens
from pretended import CUDA, SECOND, card, moved
from tiny_heads import tiny_heads
from tiny_models import tiny_model

from locret_kit import BoundedCache, attach
from locret_kit.backbones.decoder_modules import decoder_of, device_of
from locret_kit.backbones.libraries import CACHE
from locret_kit.backbones.probe import describe
from locret_kit.runtime.session import prefill

LENGTH, STEPS = 61, 3


def spread_over_two(model) -> None:
    """The last layer and what comes after it lie on the second card; accelerate's own hook brings tensors there."""
    decoder = decoder_of(model)
    *first, last = decoder.layers
    for piece in (decoder.embed_tokens, decoder.rotary_emb, *first):
        moved(piece, CUDA)
    for piece in (last, decoder.norm, model.lm_head):
        moved(piece, SECOND)
    add_hook_to_module(last, AlignDevicesHook(SECOND))


def run(policy: str, family: str, spread: bool, **rest):
    model = tiny_model(family, num_hidden_layers=3).double()
    heads = tiny_heads(model, 16, seed=1) if "locret" in policy else None
    describe(model)  # before its numbers are on cards
    if spread:
        spread_over_two(model)
        # PyTorch itself cannot move their tensors to a played card.
        for head in heads.layers if heads is not None else ():
            head.to = lambda device, head=head: moved(head, device)
        assert [device_of(layer) for layer in decoder_of(model).layers] == [CUDA, CUDA, SECOND]
    cache = BoundedCache(20, policy, heads, chunk=9, stabilizers=3, local_len=4, prompt_length=LENGTH, **rest)
    with attach(model), torch.inference_mode():
        made = [prefill(model, tokens(LENGTH), cache)]
        for token in range(STEPS):
            ids = torch.tensor([[token]]).to(model.device)
            made.append(model(input_ids=ids, **{CACHE: cache}, use_cache=True).logits[0, -1])
    if spread:
        assert [rows.device for rows in cache.bounded] == [CUDA, CUDA, SECOND]
        assert heads is None or [head.fc1.weight.device for head in heads.layers] == [CUDA, CUDA, SECOND]
    inner = [x.inner if spread else x for x in made]
    kept = [[head.tolist() for head in cache.kept_positions(i)[0]] for i in range(3)]
    return torch.stack([x.double() for x in inner]), kept


@pytest.mark.parametrize(
    ("policy", "family", "rest"),
    [
        ("locret", "llama", {}), ("locret", "phi3", dict(positions="original")), ("h2o", "llama", dict(positions="clipped(30)")),
        ("snapkv(6,3)", "qwen2", {}), ("streaming", "llama", dict(kv_bits=8)), ("ada-locret", "llama", {}),
    ],
)  # fmt: skip
def test_a_model_on_two_cards_reads_as_on_one(policy, family, rest):
    rest = dict(backend="reference", **rest)
    expected, kept = run(policy, family, False, **rest)
    with card():
        made, theirs = run(policy, family, True, **rest)
    torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-4)
    assert theirs == kept
