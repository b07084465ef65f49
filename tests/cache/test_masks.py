"""Masks and positions of a caller's own: what the plain model computes under them, or a sentence."""

import pytest
import torch
from policy_runs import tokens
from tiny_models import tiny_model
from torch.nn.attention.flex_attention import create_block_mask

from locret_kit import CACHE, BoundedCache, attach
from locret_kit.cache.batch import BatchCache

T, HALF = 40, 20
IDS = torch.tensor([tokens(T)])
CAUSAL = torch.ones(T, T, dtype=torch.bool).tril()


def window(size: int) -> torch.Tensor:
    return CAUSAL & ~CAUSAL.tril(-size)


def floats(mask: torch.Tensor, hidden: float) -> torch.Tensor:
    return torch.zeros(mask.shape).masked_fill(~mask, hidden)


def of_heads(mask: torch.Tensor, head: int) -> torch.Tensor:
    """Causal for all heads but one."""
    several = CAUSAL.expand(1, 6, T, T).clone()
    several[0, head] = mask
    return several


PACKED, BEGINNING = CAUSAL.clone(), CAUSAL.clone()
PACKED[HALF:, :HALF] = BEGINNING[:, :3] = False
LAST_ROW = CAUSAL.clone()
LAST_ROW[-1, 0] = False
OTHERS = {
    "packed": PACKED[None, None], "window": window(8)[None, None], "beginning": BEGINNING[None, None],
    "last row": LAST_ROW[None, None], "one head": of_heads(PACKED, 5), "other text": torch.stack((CAUSAL, PACKED))[:, None],
    "later": torch.ones(1, 1, T, T, dtype=torch.bool),
}  # fmt: skip


@pytest.mark.parametrize("hidden", [None, torch.finfo(torch.float32).min, -torch.inf, -1e9])
@pytest.mark.parametrize("family", ["llama", "mistral-window", "gemma3"])
def test_a_mask_is_followed_or_refused(family, hidden):
    model = tiny_model(family)
    size = model.config.sliding_window if family != "llama" else T
    own = {"mistral-window": window(size)[None, None], "llama": CAUSAL[None, None]}.get(family)
    if family == "gemma3":
        own = {"full_attention": CAUSAL[None, None], "sliding_attention": window(size)[None, None]}
    wrong = dict(OTHERS)
    if family == "gemma3":  # in one of the kinds of its layers, or for the other kind
        wrong |= {f"{kind} {name}": own | {kind: mask} for name, mask in OTHERS.items() for kind in own}
        wrong |= {
            "swapped": dict(zip(own, reversed(own.values()), strict=True)),
            "all causal": dict.fromkeys(own, CAUSAL[None, None]),
        }
    elif family == "mistral-window":
        wrong["wider"] = CAUSAL[None, None]

    def form(mask):
        if isinstance(mask, dict):
            return {kind: form(one) for kind, one in mask.items()}
        return mask if hidden is None else floats(mask, hidden)

    with attach(model):
        for given in (form(own), None, torch.ones(1, T), torch.ones(1, T + 9)):
            found = model(IDS, attention_mask=given, **{CACHE: BoundedCache(200, "snapkv", prompt_length=T)}).logits
            torch.testing.assert_close(found, model(IDS, attention_mask=given).logits, rtol=0, atol=1e-3)
        for name, mask in wrong.items():
            for cache in (BoundedCache(200, "snapkv", prompt_length=T), BatchCache(200, "snapkv")):
                with pytest.raises(ValueError, match=r"^attention_mask[^\n]{9,240}$"):
                    pytest.fail(f"{name}: {model(IDS, attention_mask=form(mask), **{CACHE: cache}).logits.shape}")


def test_a_mask_of_another_form_is_refused():
    model = tiny_model("llama")
    block = create_block_mask(lambda b, h, q, k: q >= k, 1, 1, T, T, device="cpu")
    others = {
        "short": torch.ones(1, HALF), "integers": CAUSAL[None, None].long(), "3": CAUSAL[None], "block": block,
        "columns": CAUSAL[None, None, :, :HALF], "padding": torch.ones(1, 1, 1, T, dtype=torch.bool), "one": torch.zeros(1, 1),
        "weak": floats(CAUSAL[None, None], -1.0),
    }  # fmt: skip
    with attach(model):
        for name, mask in others.items():
            ids = IDS[:, :1] if name == "one" else IDS
            for cache in (BoundedCache(200, "snapkv", prompt_length=T), BatchCache(200, "snapkv")):
                with pytest.raises(ValueError, match=r"^attention_mask[^\n]{9,240}$"):
                    pytest.fail(f"{name}: {model(ids, attention_mask=mask, **{CACHE: cache}).logits.shape}")


def test_a_later_piece_has_a_mask_of_the_whole_text():
    model = tiny_model("llama")
    with attach(model):
        for evicts in (False, True):
            budget = 12 if evicts else 200
            first = BoundedCache(budget, "streaming", prompt_length=T, chunk=4, local_len=2, stabilizers=2)
            model(IDS[:, :HALF], **{CACHE: first})
            rows = first.get_mask_sizes(HALF, 0)[0]
            want = model(IDS[:, HALF:], **{CACHE: first.fork(T)}).logits
            for columns in (T, rows):  # of the whole text, or as a model of several parts makes it
                mask = CAUSAL[None, None, HALF:, T - columns :]
                found = model(IDS[:, HALF:], attention_mask=mask, **{CACHE: first.fork(T)}).logits
                assert torch.equal(found, want)
            for wrong in (PACKED[None, None, HALF:], CAUSAL[None, None, HALF:, HALF:], torch.ones(1, HALF)):
                with pytest.raises(ValueError, match="^attention_mask"):
                    model(IDS[:, HALF:], attention_mask=wrong, **{CACHE: first.fork(T)})


def test_positions_are_those_of_the_text():
    """Of packed texts, in any number of axes, with a mask or without."""
    model, packed = tiny_model("llama"), torch.arange(T).remainder(HALF)
    with attach(model):
        others = torch.arange(T)[None] / 2, torch.tensor(3), packed[None, :9]
        for given in (packed, packed[None], packed.expand(3, 1, T), *others):
            for mask in (None, torch.ones(1, T)):
                for cache in (BoundedCache(200, "snapkv", prompt_length=T), BatchCache(200, "snapkv")):
                    with pytest.raises(ValueError, match="^position_ids=.* where this cache goes on"):
                        model(IDS, position_ids=given, attention_mask=mask, **{CACHE: cache})


def test_a_batch_goes_on_as_its_mask_began():
    """Columns that were seen stay as they were shown; positions count tokens, or columns after padding on the left alone."""
    model, ids = tiny_model("llama"), torch.tensor([tokens(T), tokens(T, seed=1)])
    left, hole = torch.ones(2, T + 1), torch.ones(2, T + 1)
    left[1, :7] = hole[1, 7:9] = 0
    columns = torch.arange(T + 1).expand(2, T + 1)
    with attach(model):
        for shown, positions in ((left, columns), (left, left.cumsum(1) - 1), (hole, hole.cumsum(1) - 1)):
            cache = BatchCache(200, "snapkv")
            model(ids, attention_mask=shown[:, :T], position_ids=positions[:, :T], **{CACHE: cache})
            cache.reorder_cache(torch.tensor([1, 0]))
            with pytest.raises(ValueError, match=f"^attention_mask must show the {T} columns"):
                model(ids[:, :1], attention_mask=shown, **{CACHE: cache})
            mask, places, whole = shown.flip(0), positions.flip(0), torch.cat((ids.flip(0), ids[:, :1]), 1)
            found = model(ids[:, :1], attention_mask=mask, position_ids=places[:, T:], **{CACHE: cache}).logits
            want = model(whole, attention_mask=mask, position_ids=places)
            torch.testing.assert_close(found[:, -1], want.logits[:, -1], rtol=0, atol=1e-3)
        with pytest.raises(ValueError, match="^position_ids=0 to 39"):
            model(ids, attention_mask=hole[:, :T], position_ids=columns[:, :T], **{CACHE: BatchCache(200, "snapkv")})
