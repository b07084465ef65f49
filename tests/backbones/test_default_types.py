"""What runs after ``torch.set_default_dtype`` or ``torch.set_default_device``, each in a process of its own, which may die: the
same numbers as without. Models are made before, as by a program that loads and then changes the default; all else after."""

import json
from functools import partial
from itertools import cycle, product
from pathlib import Path
from unittest import mock

import interpreted  # noqa: F401  (Triton's kernels run interpreted)
import pytest
import torch
from forked import start, status_of
from policy_runs import POLICIES, distinct_tokens, held
from read_texts import text_of
from tiny_gguf import tiny_source, write_gguf
from tiny_heads import tiny_heads
from tiny_models import tiny_model
from tiny_tokenizer import save_tiny_backbone, tiny_tokenizer

from locret_kernels.ragged_decode import hadamard
from locret_kit import BoundedCache, Document, HeadsConfig, RetainingHeads, attach
from locret_kit.backbones.libraries import CACHE
from locret_kit.backbones.load import load_backbone
from locret_kit.backbones.probe import describe
from locret_kit.backbones.spec import spec_of
from locret_kit.cache.saved import load_cache, save_cache
from locret_kit.cli.eval import main as evaluate
from locret_kit.evals.engine import read_rows
from locret_kit.policies.grammar import parse_policy
from locret_kit.runtime.session import Answer

DEFAULTS = (), ("bfloat16",), ("float64", "meta")
"""Types and devices that a program sets, one beside the other where they cannot hide each other's faults."""
SETTINGS = dict(chunk=13, stabilizers=4, local_len=5)
APART = (
    "recall", "infllm", "minference", "rereading-locret(tokens=12,window=4,kernel=3,first=2)",
    "snapkv(6,3) reread=passages(tokens=12)",
)  # fmt: skip
"""Policies that recall, read sparsely or read again."""
EVALUATION = (
    "tasks=[passkey]", "policies=[kvzip,random]", "budgets=[48]", "lengths=[240]", "samples=1",
    "chunk=32", "stabilizers=4", "local_len=8", "max_new_tokens=4",
)  # fmt: skip


class Program:
    """Models and files that are there before a default changes."""

    def __init__(self, folder: Path) -> None:
        wide = dict(head_dim=64, num_attention_heads=4, num_hidden_layers=2, vocab_size=400)
        types = torch.float32, torch.bfloat16, torch.float64
        self.models = {str(dtype): tiny_model("llama", **wide).to(dtype) for dtype in types}
        families = "gemma3", "phi3-longrope", "mistral-window"
        self.models |= {family: tiny_model(family, vocab_size=400) for family in families}
        self.model, self.tokenizer, self.ids = self.models["torch.float32"], tiny_tokenizer(), distinct_tokens(57)
        # One head of one layer, for kernels that are interpreted.
        self.small = tiny_model(
            "llama", **wide | dict(num_attention_heads=1, num_key_value_heads=1, num_hidden_layers=1)
        )
        self.file = write_gguf(folder / "tiny.gguf", tiny_source("llama"), "Q8_0")
        self.saved, self.text = save_tiny_backbone(folder / "model"), text_of(160)
        self.step = torch.tensor([[5]])
        self.drawn = [torch.randn(1, heads, 5, 64, generator=torch.Generator()) for heads in (4, 2, 2)]

    def last(self, model, cache) -> list[float]:
        with attach(model), torch.inference_mode():
            return model(input_ids=self.step, **{CACHE: cache}).logits[0, -1].float().tolist()

    def run(self, model, policy: str, words: int = 57, tokens: int = 5, tokenizer=None, **more) -> list:
        heads = self.heads[model] if parse_policy(policy).needs_heads else None
        self.cache = BoundedCache(24, policy, heads, prompt_length=words, **SETTINGS, **more)
        given = tokenizer or self.tokenizer, self.ids[:words], self.cache
        text = str(Answer(model, *given, max_new_tokens=tokens))
        return [text, held(self.cache), self.last(model, self.cache)]

    def found(self, folder: Path) -> dict[str, object]:
        """Name -> texts, kept positions, logits and scores."""
        with torch.device("cpu"):  # a module is made where PyTorch says
            self.heads = {model: tiny_heads(model, 32) for model in (self.model, self.small)}
            spec = spec_of(self.model.config)
            heads = RetainingHeads(HeadsConfig.for_backbone(spec, "tiny", 8))
        found: dict[str, object] = {policy: self.run(self.model, policy) for policy in (*POLICIES[::3], *APART)}
        found["scores"] = [heads[0](*self.drawn).tolist(), heads.fingerprint]
        for name, backend in zip(self.models, cycle(("reference", "cpu"))):
            found[f"h2o {backend} {name}"] = self.run(self.models[name], "h2o", backend=backend)
        for policy, backend in product(("locret", "compactor(block=8)"), ("reference", "cpu")):
            found[f"{policy} {backend}"] = self.run(self.model, policy, backend=backend)
        for policy in ("h2o", "ada-snapkv(6,3)", "locret", "recall"):
            found[f"{policy} triton"] = self.run(self.small, policy, 26, 1, backend="triton")
        for (bits, backend), policy in zip(
            product((8, 4, 2), ("reference", "cpu")), cycle(("snapkv(6,3)", "recall", "snapkv(6,3)"))
        ):
            found[f"{policy} {backend} {bits}"] = self.run(self.model, policy, backend=backend, kv_bits=bits)
        save_cache(self.cache, folder / "it.cache")
        found["cache"] = self.last(self.model, load_cache(folder / "it.cache", self.model, self.heads[self.model]))
        for path in (self.file, self.saved):
            model, tokenizer = load_backbone(str(path), device="cpu", dtype="float32")
            found[path.name] = self.run(model, "h2o", tokenizer=tokenizer)
        heads = self.heads[self.model]
        document = Document.read(self.model, self.tokenizer, self.text, 48, "ada-locret", heads, **SETTINGS)
        document.save(folder / "it.locret")
        again = Document.load(folder / "it.locret", self.model, self.tokenizer, heads)
        found["documents"] = [str(one.ask("What is it?", max_new_tokens=6)) for one in (document, again)]
        with mock.patch("locret_kit.evals.report.write_page"):
            assert evaluate([*EVALUATION, f"model={self.saved}", f"out={folder / 'rows'}"]) == 0
        rows = read_rows(folder / "rows")
        found["evaluation"] = [[row.policy, row.score, row.output, row.error] for row in rows]
        return found


def after(defaults: tuple[str, ...], program: Program, folder: Path) -> int:
    """Change defaults and write what is found."""
    hadamard.cache_clear()  # which another test may have filled
    for name in defaults:
        (torch.set_default_device if name == "meta" else torch.set_default_dtype)(getattr(torch, name, name))
    (folder / "found.json").write_text(json.dumps(program.found(folder)))
    return 0


def test_defaults_of_a_program_change_nothing(tmp_path):
    program, children, found = Program(tmp_path), {}, {}
    for defaults in DEFAULTS:
        folder = tmp_path / "-".join(("of", *defaults))
        folder.mkdir()
        children[folder] = start(partial(after, defaults, program, folder), folder / "log")
    statuses = {folder: status_of(child) for folder, child in children.items()}
    for folder, status in statuses.items():
        assert status == 0, f"{folder.name}: {(folder / 'log').read_text()[-3000:]}"
        found[folder.name] = json.loads((folder / "found.json").read_text())
    wanted = found.pop("of")
    assert len({str(x) for x in wanted.values()}) > 30
    for name, others in found.items():
        assert [one for one in wanted if others[one] != wanted[one]] == [], name


@pytest.mark.parametrize(
    ("policy", "bits"),
    [*((policy, None) for policy in ("ada-snapkv(6,3)", "ada-locret", "merge")),
     *((policy, bits) for policy in ("snapkv(6,3)", "locret", "recall") for bits in (None, 4))],
)  # fmt: skip
def test_rows_under_autocast(policy, bits):
    """A cache has the model's type, whatever autocast makes of keys and values."""
    model = tiny_model("llama", vocab_size=400)
    heads = tiny_heads(model, 32) if parse_policy(policy).needs_heads else None
    cache = BoundedCache(24, policy, heads, prompt_length=83, kv_bits=bits, **SETTINGS)
    describe(model)  # a model that is known already: nothing else meets its keys in float32 first
    with torch.autocast("cpu", dtype=torch.bfloat16):
        str(Answer(model, tiny_tokenizer(), distinct_tokens(83), cache, max_new_tokens=4))
    assert cache.get_seq_length() >= 83 and {rows.codec.dtype for rows in cache.bounded} == {torch.float32}
