"""Every policy against definitions written again from the papers (``policy_rules``), at every step, in float64.

A ``BoundedCache`` is driven with random q, k, v, without a model. Its positions are compared with the oracle's after every
block of the prompt, in the tail and through evictions while decoding, and its attention output with the oracle's.
"""

import math
from functools import cache, partial

import numpy as np
import policy_rules as oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from policy_oracle import OracleLayer, Rule, Setting, softmax
from tiny_heads import tiny_heads
from transformers import AutoConfig, AutoModelForCausalLM

from locret_kit import BoundedCache, RetainingHeads
from locret_kit.backbones.handlers import Softmax
from locret_kit.backbones.rope import Rope
from locret_kit.policies.base import Entry
from locret_kit.policies.grammar import parse_policy
from locret_kit.policies.methods.random import hashed
from locret_kit.policies.registry import policies

D = 8
VOCABULARY = 11
LAYOUTS = ((3, 1), (2, 3), (1, 4))  # key/value heads, query heads of each: MHA, GQA, MQA
NEAR = 1e-6  # the kit's scores and statistics are float32: below this relative gap either choice is right


# ---- driving a cache without a model ----------------------------------------------------------------------------------


@cache
def backbone(H: int, G: int, layers: int):
    """Only its configuration, its rotary module and, for token entropy, its output layer are used."""
    torch.manual_seed(3)
    config = AutoConfig.for_model(
        "llama", vocab_size=VOCABULARY, hidden_size=D * H * G, intermediate_size=8, num_hidden_layers=layers,
        num_attention_heads=H * G, num_key_value_heads=H, head_dim=D, max_position_embeddings=4096,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).double().requires_grad_(False)


class ExactRope(Rope):
    """The kit's own tables are float32; here rotations must not decide a choice."""

    def tables(self, pos_T: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        angle = pos_T[:, None].double() * self.inv_freq
        angle = torch.cat((angle, angle), dim=-1)
        return angle.cos(), angle.sin()


def importance(heads: RetainingHeads, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Predicted CIS ``[H, T]``: fc2(silu(fc1([q; k; v]))), Locret section 3.2."""
    fc1, fc2 = heads[layer].fc1.weight.numpy(), heads[layer].fc2.weight.numpy()
    out = np.empty(k.shape[:2])
    for t in range(k.shape[1]):
        hidden = fc1 @ np.concatenate([q[:, t].ravel(), k[:, t].ravel(), v[:, t].ravel()])
        out[:, t] = fc2 @ (hidden / (1 + np.exp(-hidden)))
    return out


class Pair:
    """A cache and the oracle's layers, fed the same random tokens."""

    def __init__(self, policy: str, rule: Rule, setting: Setting, seed: int = 0, **more) -> None:
        s = self.setting = setting
        self.policy, self.model = parse_policy(policy), backbone(s.H, s.G, s.layers)
        self.heads = tiny_heads(self.model, 16, seed=7) if self.policy.needs_heads else None
        run = dict(chunk=s.chunk, stabilizers=s.stabilizers, local_len=s.local_len, decode_every=s.decode_every)
        self.cache = BoundedCache(
            s.budget, self.policy, self.heads, prompt_length=s.length, positions=s.positions, **(run | more)
        )
        self.cache.bind(self.model)
        inv_freq = s.theta ** (-torch.arange(D // 2, dtype=torch.float64) / (D // 2))
        self.cache.state.change_context(ropes=[ExactRope(inv_freq)] * s.layers)
        self.layers = [OracleLayer(rule, s, layer) for layer in range(s.layers)]
        self.rng = np.random.default_rng(seed)
        self.hidden = np.empty((0, D * s.H * s.G))
        self.key_scale = 1.5
        self.forgiven = 0

    def entered(self, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray | None:
        """Scores fixed at entry. A hash is the part's own business; importance is computed again."""
        if self.heads is not None:
            return importance(self.heads, layer, q, k, v)
        tensors = (torch.from_numpy(x)[None] for x in (q, k, v))
        entry = Entry(layer, self.layers[layer].seen, *tensors, head=None, seed=self.cache.settings.seed)
        values = self.policy.score.score_new_tokens(entry)
        return None if values is None else values[0].double().numpy()

    def surprise(self, tokens: int) -> np.ndarray:
        """Random final hidden states and ids of the next tokens, read by the cache; -log P of each id, 0 for the first."""
        seen = len(self.hidden)
        self.hidden = np.concatenate([self.hidden, self.rng.standard_normal((tokens, self.hidden.shape[1]))])
        self.ids = self.rng.integers(0, VOCABULARY, tokens)
        head = self.model.lm_head.weight.numpy()
        out = np.zeros(tokens)
        for t in range(tokens):
            if seen + t:
                out[t] = -math.log(softmax(5 * head @ self.hidden[seen + t - 1])[self.ids[t]])
        return out

    def step(self, tokens: int) -> None:
        """The next tokens in one piece; a policy that reads logits takes no piece across a boundary."""
        if not self.policy.score.needs_logits:
            self.piece(tokens)
            return
        while tokens:
            step = min(tokens, self.layers[0].until_boundary())
            self.piece(step)
            tokens -= step

    def piece(self, tokens: int) -> None:
        s = self.setting
        entropy = self.surprise(tokens) if self.policy.score.needs_logits else None
        for layer, mine in enumerate(self.layers):
            q = 1.5 * self.rng.standard_normal((s.H * s.G, tokens, D))
            k = self.key_scale * self.rng.standard_normal((s.H, tokens, D))
            v = self.rng.standard_normal((s.H, tokens, D))
            entered = self.entered(layer, q, k, v) if entropy is None else np.broadcast_to(entropy, (s.H, tokens))
            want = mine.feed(q, k, v, entered)
            q_t, k_t, v_t = (torch.from_numpy(x)[None] for x in (q, k, v))
            self.cache.layers[layer].update(k_t, v_t)
            got = self.cache.handler.attend(layer, q_t, k_t, v_t, Softmax(D**-0.5))[0].numpy()
            np.testing.assert_allclose(got, want, atol=1e-8)
        if entropy is not None:
            self.cache.handler.read(5 * torch.from_numpy(self.hidden[-tokens:])[None], torch.from_numpy(self.ids)[None])
        for layer, mine in enumerate(self.layers):
            self.compare(mine, layer)

    def compare(self, mine: OracleLayer, layer: int) -> None:
        theirs = [head.tolist() for head in self.cache.kept_positions(layer)[0]]
        if mine.held() == theirs:
            return
        closest = min(mine.gaps, default=1.0)
        where = f"{self.policy.name} {self.setting} layer {layer} after {mine.seen} tokens, closest gap {closest:.1e}"
        assert closest < NEAR, f"{where}: keeps {theirs}, the definition {mine.held()}"
        self.forgiven += 1
        mine.adopt(theirs)

    def prefill(self) -> None:
        """The prompt block by block."""
        assert self.setting.length is not None
        while (seen := self.layers[0].seen) < self.setting.length:
            self.step(min(self.layers[0].until_boundary(), self.setting.length - seen))

    def decode(self, tokens: int) -> None:
        for _ in range(tokens):
            self.step(1)


# ---- the policies -----------------------------------------------------------------------------------------------------


def half(layer: OracleLayer) -> int:
    return layer.part // 2


def proxy_count(layer: OracleLayer) -> int:
    """NaCl's default: the last 10% of the chunk, at least one token."""
    return max(1, layer.setting.chunk // 10)


def gumbel(layer: OracleLayer, head: int, shared: bool = False) -> list[float]:
    """The part's own noise: a hash of seed 0, layer, head unless heads share it, position and how much was read."""
    at = torch.tensor([row.position for row in layer.heads[head]])
    uniform = hashed(at, 0, layer.layer, 0 if shared else torch.tensor(head), layer.seen).double() + 2**-25
    return (-torch.log(-torch.log(uniform))).tolist()


def nacl(ratio=0.7, *scopes, uniform=False, shared=False, first=0, most=lambda part: part // 2) -> Rule:
    """NaCl: C_r slots drawn, C_p of the proxies' choice, of which the newest proxies are some."""
    newest = oracle.newest(lambda layer: min(proxy_count(layer), most(layer.part)))
    select = oracle.sampled(ratio, partial(gumbel, shared=shared), uniform, shared)
    return Rule(oracle.proxies(proxy_count, first), [newest, *scopes], select=select, aside=ratio)


def six(_) -> int:
    """A window below every budget here; the default is 32."""
    return 6


def snap(**rest) -> Rule:
    return Rule(oracle.window(6), [oracle.newest(six)], **rest)


def crushed(score, protects, ratio: float = 0.25, *, unit: int = 1, head_keep=None, **how) -> Rule:
    """KVCrush over a base."""
    select = oracle.representatives(ratio, unit=unit, **how)
    return Rule(score, protects, select=select, aside=ratio, unit=unit, head_keep=head_keep)


HALF, TWO, BY_NEED = [oracle.newest(half)], [oracle.newest(lambda _: 2)], oracle.adaptive(normalise=True)
LOCRET = dict(score=oracle.entered, protects=[oracle.stabilizers])
POLICIES: dict[str, Rule] = {
    "full": Rule(oracle.position, everything=True),
    "random": Rule(oracle.entered),
    "recency": Rule(oracle.position),
    "streaming": Rule(oracle.position, [oracle.sinks(4)]),
    "scissorhands": Rule(oracle.quantised, HALF),
    "h2o": Rule(oracle.accumulated, HALF),
    "tova": Rule(oracle.last_token),
    "roco": Rule(oracle.mean, [oracle.deviating(0.5)]),
    "roco(newest=3,sinks=1)": Rule(oracle.mean, [oracle.deviating(0.5, 3, 1)]),
    "score=recency scope=deviation(0.5,2,1)": Rule(oracle.position, [oracle.deviating(0.5, 2, 1)]),
    "snapkv(window=6)": snap(),
    "rkv(window=6)": Rule(oracle.joint(6), [oracle.newest(six)]),
    "score=joint(6,7,0.5,0.1) allocation=adaptive(0)": Rule(oracle.joint(6, 0.5, 0.1)),
    "defensivekv(window=6)": Rule(oracle.defensive(6), [oracle.newest(six)], head_keep=oracle.adaptive(1.0)),
    "score=defensive(4,1) scope=window(4)": Rule(oracle.defensive(4, 1), [oracle.newest(lambda _: 4)]),
    "dropkv(window=6)": Rule(oracle.residual(6), [oracle.newest(six)]),
    "dropkv(window=6) allocation=adaptive": Rule(oracle.residual(6), [oracle.newest(six)], head_keep=oracle.adaptive()),
    "pyramidkv(window=6)": snap(layer_keep=oracle.pyramid(six)),
    "ada-snapkv(window=6)": snap(head_keep=oracle.adaptive()),
    "ada-pyramid(window=6)": snap(layer_keep=oracle.pyramid(six), head_keep=oracle.adaptive()),
    "nacl": nacl(),
    "nacl(ratio=0.5,first=9,protected=2,sinks=1,distribution=uniform)": nacl(
        0.5, oracle.sinks(1), uniform=True, first=9, most=lambda part: 2
    ),
    "nacl(ratio=0.9,per=layer,protected=0)": nacl(0.9, shared=True, most=lambda part: 0),
    "score=proxy(3)": Rule(oracle.proxies(lambda _: 3)),
    "score=window(window=40,kernel=1)": Rule(oracle.window(40, 1)),
    "sirllm": Rule(oracle.entered, [oracle.sinks(4), oracle.newest(lambda layer: layer.keep // 8)]),
    "knorm": Rule(oracle.low_norm),
    "keydiff": Rule(oracle.unlike_the_mean),
    "locret": Rule(**LOCRET),
    "locret(sinks=3)": Rule(oracle.entered, [oracle.stabilizers, oracle.sinks(3)]),
    "lookahead-locret": Rule(oracle.entered_ahead(3), [oracle.stabilizers, oracle.newest(lambda x: x.keep // 2)]),
    "locret(lookahead=3)": Rule(oracle.entered_ahead(3), [oracle.stabilizers]),
    "score=cis(lookahead=9) scope=sinks(2)": Rule(oracle.entered_ahead(9), [oracle.sinks(2)]),
    "ada-locret(lookahead=2)": Rule(oracle.entered_ahead(2), [oracle.stabilizers], head_keep=BY_NEED),
    "ada-locret": Rule(**LOCRET, head_keep=BY_NEED),
    "pyramid-locret": Rule(**LOCRET, layer_keep=oracle.pyramid(lambda s: s.stabilizers)),
    "kvcrush(base=h2o)": crushed(oracle.accumulated, HALF),
    "kvcrush(base=h2o,anchor=zeros,bits=median)": crushed(oracle.accumulated, HALF, anchor="zeros", bits="median"),
    "kvcrush(base=scissorhands,ratio=0.75)": crushed(oracle.quantised, HALF, 0.75),
    "kvcrush(base=roco(newest=1,sinks=0))": crushed(oracle.mean, [oracle.deviating(0.5, 1, 0)]),
    "kvcrush(base=h2o(window=2),level=chunk,ratio=0.5)": crushed(oracle.accumulated, TWO, 0.5, unit=8),
    "kvcrush(base=snapkv(window=6),anchor=ones)": snap(select=oracle.representatives(anchor="ones"), aside=0.25),
    "kvcrush(base=pyramidkv(window=6),anchor=alternate)": snap(
        layer_keep=oracle.pyramid(six), select=oracle.representatives(anchor="alternate"), aside=0.25
    ),
    "score=proxy(3,first=4) scope=window(3) selection=representatives": crushed(
        oracle.proxies(lambda _: 3, 4), [oracle.newest(lambda layer: min(3, layer.part))], bits="groups"
    ),
    "kvcrush(base=locret)": crushed(oracle.entered, [oracle.stabilizers]),
    "h2o selection=kmeans(iterations=3)": Rule(oracle.accumulated, HALF, select=oracle.clusters(0.25, 3), aside=0.25),
    "score=cis scope=stabilizers+sinks(4) allocation=adaptive(alpha=0.5) selection=representatives(ratio=0.3)": crushed(
        oracle.entered, [oracle.stabilizers, oracle.sinks(4)], 0.3, head_keep=BY_NEED
    ),
    "score=mas scope=window(3)+sinks(2) allocation=pyramid(beta=4)+adaptive(alpha=1) selection=sampled(ratio=0.5)": Rule(
        oracle.mean,
        [oracle.newest(lambda layer: min(3, layer.part)), oracle.sinks(2)],
        layer_keep=oracle.pyramid(lambda _: 3, beta=4),
        head_keep=oracle.adaptive(1.0),
        select=oracle.sampled(0.5, gumbel),
        aside=0.5,
    ),
}
RUNS = {  # chunk: the rest; the last chunk is ragged
    1: dict(budget=14, chunk=1, stabilizers=4, local_len=3, length=32),
    7: dict(budget=21, chunk=7, stabilizers=5, local_len=4, length=60),
    64: dict(budget=36, chunk=64, stabilizers=9, local_len=6, length=64 + 43 + 6),
}


def test_every_named_policy_is_here():
    elsewhere = {"compactor", "expected-attention", "lagkv"}  # with state of their own: test_key_scores.py
    elsewhere |= {"merge", "merge-locret"}  # test_merging.py
    elsewhere |= {"windowed-locret"}  # test_reading.py
    elsewhere |= {"rereading-locret", "rereading-lookahead-locret"}  # test_answering.py
    elsewhere |= {"infllm", "recall", "scaled-infllm"}  # test_recall.py
    elsewhere |= {"minference"}  # test_sparse_prefill.py
    assert {policy.split("(")[0] for policy in POLICIES} >= policies().keys() - elsewhere


def layers_of(policy: str) -> int:
    return 2 if "pyramid" in policy else 1


@pytest.mark.parametrize("chunk", RUNS)
@pytest.mark.parametrize("policy", POLICIES)
def test_keeps_what_the_definition_keeps(policy, chunk):
    """After every block of the prompt and every decoded token, past an eviction when full. Each policy has every layout of
    heads and both position schemes, in another chunk than the next policy has them."""
    turn = list(POLICIES).index(policy) + list(RUNS).index(chunk)
    H, G = LAYOUTS[turn % len(LAYOUTS)]
    setting = Setting(H, G, positions=("compact", "original")[turn % 2], layers=layers_of(policy), **RUNS[chunk])
    pair = Pair(policy, POLICIES[policy], setting)
    pair.prefill()
    last = pair.layers[-1]
    evictions = last.evictions
    pair.decode(chunk + 3 if chunk < 64 else 2)
    if not last.rule.everything:
        assert evictions > 1
        assert last.evictions > evictions or chunk == 64
    assert pair.forgiven <= 1


@pytest.mark.parametrize("positions", ["compact", "original"])
@pytest.mark.parametrize(
    "policy",
    ["snapkv(window=6)", "pyramidkv(window=6)", "ada-snapkv(window=6)", "ada-pyramid(window=6)", "nacl", "h2o", "roco"],
)
def test_one_shot_is_one_chunk_without_a_tail(policy, positions):
    setting = Setting(2, 2, budget=20, chunk=70, length=70, positions=positions, layers=layers_of(policy))
    pair = Pair(policy, POLICIES[policy], setting, one_shot=True, chunk=16, stabilizers=3, local_len=5)
    pair.step(30)
    pair.step(40)
    assert [layer.evictions for layer in pair.layers] == [1] * setting.layers
    pair.decode(3)


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("policy", ["h2o", "tova", "roco(newest=3,sinks=1)", "ada-snapkv(window=6)", "locret"])
def test_decoding_evicts_every_so_many_tokens(policy, every):
    setting = Setting(2, 2, budget=14, chunk=9, stabilizers=3, local_len=5, length=31, decode_every=every)
    pair = Pair(policy, POLICIES[policy], setting)
    pair.prefill()
    evictions = pair.layers[0].evictions
    pair.decode(9)
    assert pair.layers[0].evictions == evictions + 9 // every


@st.composite
def small_cases(draw) -> tuple[Setting, list[int]]:
    """Random shapes, the prompt's length known or not, and the pieces in which its tokens are handed over."""
    budget = draw(st.integers(2, 24))
    length = draw(st.integers(1, 60))
    setting = Setting(
        H=draw(st.integers(1, 3)),
        G=draw(st.integers(1, 3)),
        budget=budget,
        chunk=draw(st.integers(1, 20)),
        stabilizers=draw(st.integers(0, budget - 1)),
        local_len=draw(st.integers(0, budget - 1)),
        length=length if draw(st.booleans()) else None,
        positions=draw(st.sampled_from(["compact", "original"])),
        layers=draw(st.integers(1, 3)),
    )
    cuts = sorted(draw(st.sets(st.integers(1, 60), max_size=4)) & set(range(1, length)))
    return setting, [b - a for a, b in zip([0, *cuts], [*cuts, length], strict=True)]


@given(case=small_cases(), policy=st.sampled_from(list(POLICIES)), seed=st.integers(0, 9))
def test_random_small_cases(case, policy, seed):
    """Pieces of any size, budgets below a window, no known end: the same slots."""
    setting, pieces = case
    pair = Pair(policy, POLICIES[policy], setting, seed)
    for tokens in pieces:
        pair.step(tokens)
        if pair.forgiven:  # several evictions may lie in a piece: a near tie in the first cannot be settled afterwards
            return
    pair.decode(5)


@pytest.mark.parametrize("policy", ["tova", "snapkv(window=2)", "ada-snapkv(window=2)", "nacl(ratio=0)"])
def test_ties_go_to_the_newer_slot(policy):
    """Keys of zero give every slot the same attention, so recency decides."""
    setting = Setting(2, 3, budget=10, chunk=8, length=40)
    pair = Pair(policy, Rule(oracle.position), setting)
    pair.key_scale = 0.0
    pair.prefill()
    assert pair.layers[0].held() == [list(range(30, 40))] * 2
