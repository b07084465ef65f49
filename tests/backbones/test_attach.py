"""Attaching: what it leaves untouched, what it refuses, and architectures without an adapter."""

import copy
import io
import warnings

import pytest
import torch
from strangers import fingerprint, tokens
from tiny_models import tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from locret_kit import BoundedCache, attach
from locret_kit.backbones.handlers import Handler
from locret_kit.backbones.libraries import CACHE
from locret_kit.backbones.probe import describe
from locret_kit.backbones.spec import UnsupportedArchitecture
from locret_kit.runtime.session import prefill


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3-longrope", "gemma3"])
@torch.no_grad()
def test_a_detached_model_is_the_original(family):
    model = tiny_model(family)
    ids = tokens(60)
    logits, before = model(input_ids=ids).logits, fingerprint(model)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    attachment = attach(model)
    assert torch.equal(model(input_ids=ids).logits, logits)  # no bounded cache: the backbone's own attention
    prefill(model, ids[0].tolist(), BoundedCache(20, "streaming", chunk=8))
    assert torch.equal(model(input_ids=ids).logits, logits)
    attachment.detach()
    attachment.detach()
    assert fingerprint(model) == before
    assert torch.equal(model(input_ids=ids).logits, logits)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


class MatricesOfBatches(TorchDispatchMode):
    """Shapes of the right-hand matrices that are multiplied as a batch."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation is torch.ops.aten.bmm.default:
            self.shapes.append(tuple(args[1].shape))
        return operation(*args, **(kwargs or {}))


@torch.no_grad()
def test_the_vocabulary_is_never_a_batch_of_matrices():
    """A bfloat16 batch product copies it on a CPU: 0.4 s of 49,152 words, at every block of a prefill."""
    model, ids = tiny_model("llama").bfloat16(), tokens(40)
    vocabulary = (model.config.hidden_size, model.config.vocab_size)
    with MatricesOfBatches() as counted:  # torch before 2.15 does this for the model's last layer
        torch.bmm(torch.ones(1, 2, 3), torch.ones(1, 3, 4))
    assert counted.shapes == [(1, 3, 4)]
    wanted = model(input_ids=ids, logits_to_keep=1).logits
    with attach(model), MatricesOfBatches() as attached:
        found = model(input_ids=ids, **{CACHE: BoundedCache(64, "streaming")}, logits_to_keep=1).logits
    assert vocabulary not in [shape[1:] for shape in attached.shapes]
    torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.05)


def test_a_model_that_transformers_has_split_is_refused():
    """In one sentence, and it stays as it was; also where one that is whole was measured before."""
    whole, model = tiny_model("llama"), tiny_model("llama")
    with attach(whole):
        pass
    model._tp_size, before = 2, fingerprint(model)
    for meet in (attach, describe):
        with pytest.raises(UnsupportedArchitecture, match="^tp_plan has split this model over 2 processes: .*vLLM"):
            meet(model)
    assert fingerprint(model) == before


@torch.no_grad()
def test_an_exception_inside_the_block_restores_too():
    model, ids = tiny_model("llama"), tokens(20)
    logits, before = model(input_ids=ids).logits, fingerprint(model)

    class Broken(Handler):
        wants_unrotated = True

        def attend(self, *args):
            raise ArithmeticError("inside")

    with pytest.raises(ArithmeticError), attach(model) as attachment:
        with attachment.handled_by(Broken()), pytest.raises(ArithmeticError):
            model(input_ids=ids)
        assert torch.equal(model(input_ids=ids).logits, logits)  # the handler went with the failed forward
        with attachment.handled_by(Broken()):
            model(input_ids=ids)
    assert fingerprint(model) == before
    assert torch.equal(model(input_ids=ids).logits, logits)


@torch.no_grad()
def test_generation_without_a_bounded_cache_is_untouched():
    model, ids = tiny_model("mistral-window"), tokens(40)
    want = model.generate(ids, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    with attach(model):
        assert torch.equal(model.generate(ids, max_new_tokens=8, min_new_tokens=8, do_sample=False), want)
        padded = torch.ones_like(ids)
        padded[:, :3] = 0
        a = model(input_ids=ids, attention_mask=padded).logits
    assert torch.equal(a, model(input_ids=ids, attention_mask=padded).logits)


def test_attaching_twice_is_an_error():
    model = tiny_model("llama")
    with attach(model), pytest.raises(RuntimeError, match="already attached"):
        attach(model)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: torch.save(model, io.BytesIO())])
def test_an_attached_model_is_not_copied(copied):
    """A copy would run the forward of the model that it was made of."""
    model = tiny_model("llama")
    with attach(model), pytest.raises(TypeError, match="^an attached model cannot be copied or pickled: detach"):
        copied(model)
    copied(model)


def test_a_cache_of_a_model_that_is_not_attached_says_so():
    """Also after a detach: its rows are there, so the first forward must not pass for one over the new token alone."""
    model, cache = tiny_model("llama"), BoundedCache(8, "streaming", chunk=4)
    with pytest.raises(RuntimeError, match=r"not attached: use `with attach\(model\)"):
        model.generate(tokens(10), **{CACHE: BoundedCache(8, "streaming")}, max_new_tokens=2)
    with attach(model):
        prefill(model, tokens(10)[0].tolist(), cache)
    with pytest.raises(RuntimeError, match="not attached"):
        model(input_ids=tokens(1), **{CACHE: cache})
    with attach(model):  # and the cache goes on where it was
        model(input_ids=tokens(1), **{CACHE: cache})
    assert cache.get_seq_length() == 11


def test_a_padded_batch_is_refused():
    model, ids = tiny_model("llama"), tokens(10, batch=2)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    with attach(model), warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match="4 padded positions"):
            model(input_ids=ids, attention_mask=mask, **{CACHE: BoundedCache(8, "streaming")})
        with pytest.raises(ValueError, match="takes one text, and a padded batch a BatchCache"):
            model.generate(ids, attention_mask=mask, **{CACHE: BoundedCache(8, "streaming")}, max_new_tokens=2)


def test_a_cache_of_another_model_is_refused():
    small, large, cache = tiny_model("llama"), tiny_model("llama-mqa"), BoundedCache(8, "streaming")
    with attach(small):
        small(input_ids=tokens(6), **{CACHE: cache})
    with attach(large), pytest.raises(ValueError, match="another model"):
        large(input_ids=tokens(6), **{CACHE: cache})


@torch.no_grad()
def test_one_text_in_order_and_once():
    """What a bounded cache would read otherwise than the caller means is an error, not another text."""
    model, ids = tiny_model("llama"), tokens(20)
    once = dict(max_new_tokens=3, min_new_tokens=3, do_sample=False)
    with attach(model):
        cache = BoundedCache(64, "streaming", chunk=8)
        said = model.generate(ids, **{CACHE: cache}, prefill_chunk_size=7, **once)
        with pytest.raises(ValueError, match="position_ids=2 to 19 must be 22 to 39, where this cache goes on"):
            model.generate(ids, **{CACHE: cache}, **once)
        with pytest.raises(ValueError, match="no new tokens: this cache has seen 22"):
            model.generate(ids[:, :5], **{CACHE: cache}, **once)
        longer = torch.cat((said, tokens(6, seed=1)), dim=1)
        wanted = model.generate(longer, **once)
        assert torch.equal(model.generate(longer, **{CACHE: cache}, **once), wanted)
        cache.reset()
        assert torch.equal(model.generate(ids, **{CACHE: cache}, **once), said)
        with pytest.raises(ValueError, match="position_ids=0 to 20 must be 20 to 40.*without use_cache=False"):
            model.generate(ids, **{CACHE: BoundedCache(64, "streaming")}, use_cache=False, **once)
        packed, causal = torch.arange(20).remainder(10)[None], torch.zeros(1, 1, 20, 20)
        for given, said in (
            (dict(position_ids=packed), "position_ids=0 to 9 must be 0 to 19"),
            (dict(attention_mask=causal), r"attention_mask\[0, 0, 0, 1\]=0.0: in this cache a token sees all up to it"),
        ):
            with pytest.raises(ValueError, match=said):
                model(input_ids=ids, **given, **{CACHE: BoundedCache(64, "streaming")})
        with pytest.raises(ValueError, match="cannot be cropped, as assisted|Assisted decoding requires"):
            model.generate(ids, **{CACHE: BoundedCache(64, "streaming")}, prompt_lookup_num_tokens=2, max_new_tokens=3)


@torch.no_grad()
def test_generate_keeps_the_cache_where_phi3_would_drop_it():
    """Phi-3 gives up a cache with which a text passes 64 tokens here: bounded no more, in a later turn, a fork or an answer."""
    model, ids, more = tiny_model("phi3-longrope"), tokens(50), tokens(60, seed=1)
    ends = dict(max_new_tokens=20, min_new_tokens=20, do_sample=False)
    cache = BoundedCache(24, "streaming", chunk=8, prompt_length=50)
    with attach(model):
        said = model.generate(ids, **{CACHE: cache}, **ends)
        assert cache.get_seq_length() == 69
        cache.reset()
        said = model.generate(ids, **{CACHE: cache}, **{**ends, "max_new_tokens": 5, "min_new_tokens": 5})
        model.generate(torch.cat((said, more), dim=1), **{CACHE: cache}, **ends)
    assert cache.get_seq_length() == 134 and max(cache.kept_rows) <= 32


@pytest.mark.parametrize("policy", ["streaming", "ada-snapkv"])
@torch.no_grad()
def test_several_texts_are_refused(policy):
    model, cache = tiny_model("llama"), BoundedCache(64, policy)
    with attach(model):
        with pytest.raises(ValueError, match="batch=2 must be 1: a BoundedCache takes one text, a BatchCache several"):
            model(input_ids=tokens(6, batch=2), **{CACHE: cache})
        model(input_ids=tokens(6), **{CACHE: cache})
        for many in (dict(num_beams=3), dict(do_sample=True, num_return_sequences=3)):
            cache.reset()
            with pytest.raises(ValueError, match="batch=3 must be 1"):
                model.generate(tokens(6), **{CACHE: cache}, max_new_tokens=2, **many)
    with pytest.raises(ValueError, match="beams are texts of a BatchCache"):
        cache.reorder_cache(torch.tensor([0, 0]))
    for change in (cache.batch_select_indices, cache.batch_repeat_interleave):
        with pytest.raises(ValueError, match="several are those of a BatchCache"):
            change(torch.tensor([0, 0]))


def test_what_a_bounded_cache_does_not_give_is_said():
    """Neither weights of attention, nor gradients, which would lack attention's part."""
    model, ids = tiny_model("llama").requires_grad_(True), tokens(9)
    with attach(model):
        with pytest.raises(ValueError, match="output_attentions=True: attention over a bounded cache gives no weights"):
            model(ids, **{CACHE: BoundedCache(64, "streaming")}, output_attentions=True)
        loss = model(ids, **{CACHE: BoundedCache(64, "streaming")}, labels=ids).loss
        with pytest.raises(RuntimeError, match="a bounded cache computes no gradients"):
            loss.backward()


@torch.no_grad()
def test_who_wraps_attention_functions_may_pass_dropout_by_place(monkeypatch):
    """As kvpress does with every one there is when it is imported."""
    model, ids = tiny_model("llama"), tokens(40)
    want, own = model(input_ids=ids).logits, ALL_ATTENTION_FUNCTIONS["locret"]

    def wrapped(module, q, k, v, attention_mask, dropout, **kwargs):
        return own(module, q, k, v, attention_mask, dropout, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "locret", wrapped)
    with attach(model):
        assert torch.equal(model(input_ids=ids).logits, want)
        got = prefill(model, ids[0].tolist(), BoundedCache(50, "streaming", prompt_length=40, positions="original"))
    torch.testing.assert_close(got, want[0, -1])


@pytest.mark.parametrize("family", ["llama", "gemma3", "mixtral"])
@torch.no_grad()
def test_a_forward_in_blocks_has_the_states_of_all_tokens(family):
    """Hidden states, and the rows of a router: those of the plain model, in one piece or two."""
    model, ids = tiny_model(family), tokens(60)
    asked = dict(output_hidden_states=True) | (dict(output_router_logits=True) if family == "mixtral" else {})
    want = model(ids, **asked)
    with attach(model):
        for policy in ("sirllm", "snapkv"):
            for pieces in ([60], [37, 23]):
                cache = BoundedCache(200, policy, prompt_length=60, chunk=16, local_len=4, stabilizers=4)
                found = [model(piece, **asked, **{CACHE: cache}) for piece in ids.split(pieces, dim=1)]
                for layer, states in enumerate(want.hidden_states):
                    joined = torch.cat([part.hidden_states[layer] for part in found], dim=1)
                    torch.testing.assert_close(joined, states, rtol=0, atol=1e-3)
                for layer, rows in enumerate(want.router_logits if family == "mixtral" else ()):
                    joined = torch.cat([part.router_logits[layer] for part in found])
                    torch.testing.assert_close(joined, rows, rtol=0, atol=1e-3)
