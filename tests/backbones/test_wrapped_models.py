"""Models that torch, PEFT and accelerate wrap: wherever one is taken, tokens are those of the model inside, or it is refused by
name."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, cpu_offload, dispatch_model
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from policy_runs import decode, tokens
from tiny_lora import adapted as lora
from tiny_models import tiny_model
from tiny_tokenizer import save_tiny_backbone, tiny_tokenizer
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel
from transformers import pipeline

from locret_kit import BoundedCache, Chat, Document, attach, load_cache, save_cache
from locret_kit.backbones.identity import identity_of
from locret_kit.backbones.intercept import attached
from locret_kit.backbones.libraries import CACHE
from locret_kit.backbones.load import load_backbone
from locret_kit.backbones.probe import describe
from locret_kit.config.recipes import load_config
from locret_kit.policies.grammar import parse_policy
from locret_kit.runtime.engine import Engine, Request, run
from locret_kit.runtime.session import Answer, Sampling, prefill
from locret_kit.serving.engine_thread import EngineThread
from locret_kit.settings import RunSettings
from locret_kit.training.module import HeadTraining

IDS, LIMIT = tokens(60), 6


@pytest.fixture(scope="module", autouse=True)
def alone(tmp_path_factory):
    """A world of one rank."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("world") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def compiled(model):
    return torch.compile(model, backend="eager")


def compiled_in_place(model):
    model.compile(backend="eager")
    return model


def compiled_layers(model):
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = torch.compile(layer, backend="eager")
    return model


def parallel(model):
    return DistributedDataParallel(model.requires_grad_(True))


WRAPPERS = {
    "compiled": compiled, "compiled in place": compiled_in_place, "compiled layers": compiled_layers,
    "lora": lora, "tuner": lambda model: lora(model).base_model, "DataParallel": DataParallel,
    "DistributedDataParallel": parallel, "compiled parallel lora": lambda x: compiled(DistributedDataParallel(lora(x))),
    "dispatched": partial(dispatch_model, device_map={"": "cpu"}, force_hooks=True),
    "prepared": lambda model: Accelerator(cpu=True).prepare(model),
}  # fmt: skip


def cache() -> BoundedCache:
    return BoundedCache(200, "snapkv", chunk=16, prompt_length=60)


def plain(model, **more) -> list[int]:
    return model.generate(torch.tensor([IDS]), max_new_tokens=LIMIT, do_sample=False, **more)[0, len(IDS) :].tolist()


def by_generate(wrapped, model):
    with attach(wrapped):
        return plain(model, **{CACHE: cache()})


def by_answer(wrapped, model):
    answer = Answer(wrapped, tiny_tokenizer(), IDS, cache(), max_new_tokens=LIMIT)
    str(answer)
    return answer.tokens


def by_steps(wrapped, model):
    mine = cache()
    with attach(wrapped):
        logits = prefill(wrapped, IDS, mine)
        return [*decode(wrapped, mine, logits, prompt=IDS, max_new_tokens=LIMIT, sampling=Sampling(), stop=frozenset())]


def by_batch(wrapped, model):
    batch = Engine(wrapped, frozenset())
    sequence = batch.add(Request(IDS, LIMIT), cache)
    while sequence.finish_reason is None:
        batch.step()
    (other,) = run(wrapped, tiny_tokenizer(), [Request(IDS, LIMIT)], lambda request: cache())
    assert sequence.error is None and other.tokens == sequence.tokens
    return sequence.tokens


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_tokens_are_those_of_the_model_inside(wrap):
    wrapped = wrap(model := tiny_model("llama").bfloat16().float())
    before = plain(model) if wrap is not compiled_in_place else plain(tiny_model("llama").bfloat16().float())
    for entrance in (by_generate, by_answer, by_steps, by_batch):
        assert entrance(wrapped, model) == before, entrance
    assert describe(wrapped) == describe(model) and identity_of(wrapped) == identity_of(model)
    assert plain(model) == before


@pytest.mark.parametrize("wrap", [compiled, lora, parallel], ids=["compiled", "lora", "parallel"])
def test_documents_servers_and_training(wrap, tmp_path):
    model, tokenizer = load_backbone(str(save_tiny_backbone(tmp_path / "tiny")), dtype="float32", device="cpu")
    wrapped = wrap(model)
    text = "The harbour was quiet. The pass key is 12345. " * 20
    said = []
    for one in (wrapped, model):
        document = Document.read(one, tokenizer, text, 64, "snapkv(6,3)")
        document.save(tmp_path / "document.safetensors")
        loaded = Document.load(tmp_path / "document.safetensors", one, tokenizer)
        chat = Chat(one, tokenizer, settings=64, policy="snapkv(6,3)", max_new_tokens=8)
        mine = cache()
        by_ids = Answer(one, tokenizer, IDS, mine, max_new_tokens=8)
        said.append((str(loaded.ask("Which key?", max_new_tokens=8)), "".join(chat.say("Which key?")), str(by_ids)))
        save_cache(mine, tmp_path / "cache.safetensors")
        assert load_cache(tmp_path / "cache.safetensors", one).get_seq_length() == mine.get_seq_length()
        engine = EngineThread(one, tokenizer, RunSettings(budget=64), parse_policy("snapkv(6,3)"), None)
        assert engine.model is model
        assert HeadTraining(one, load_config(["recipe=tiny", "backbone.model=some/model"])).backbone is model
    assert said[0] == said[1]


def adapted(kind, **config):
    return lambda model: get_peft_model(model, kind(task_type="CAUSAL_LM", **config))


PROMPTS, PREFIXES = (adapted(kind, num_virtual_tokens=2) for kind in (PromptTuningConfig, PrefixTuningConfig))
INVOKED = adapted(LoraConfig, target_modules=["q_proj"], alora_invocation_tokens=[5, 6])
REFUSED = [
    (PROMPTS, "PeftModelForCausalLM: adapter 'default' .PROMPT_TUNING. acts outside the layers.*: pass the model without it"),
    (PREFIXES, "PeftModelForCausalLM: adapter 'default' .PREFIX_TUNING. acts outside the layers"),
    (INVOKED, "PeftModelForCausalLM: adapter 'default' .LORA. acts outside the layers"),
    (partial(FullyShardedDataParallel, device_id=torch.device("cpu")), "FullyShardedDataParallel keeps its weights in shards"),
    (fully_shard, "FSDPLlamaForCausalLM keeps its weights in shards: pass the model before it is sharded"),
    (lambda model: [model], "list is neither a model of transformers nor a known wrapper"),
    (lambda model: pipeline("text-generation", model=model, tokenizer=tiny_tokenizer()), "Pipeline is neither a model"),
    (nn.Sequential, "Sequential is neither a model of transformers nor a known wrapper: pass the model itself"),
]  # fmt: skip


@pytest.mark.parametrize(("wrap", "said"), REFUSED)
def test_what_cannot_be_met_is_refused_by_name(wrap, said):
    wrapped = wrap(tiny_model("llama"))
    entrances = (
        attach, describe, identity_of, cache().bind, lambda model: Engine(model, frozenset()),
        lambda model: Answer(model, tiny_tokenizer(), IDS, cache()), lambda model: prefill(model, IDS, cache()),
        lambda model: Chat(model, tiny_tokenizer()),
    )  # fmt: skip
    for entrance in entrances:
        with pytest.raises(ValueError, match=said):
            entrance(wrapped)


@pytest.mark.parametrize(
    ("wrap", "said"),
    [
        (lambda model: model.model, "LlamaModel gives no tokens: pass a model with its language model's head"),
        (cpu_offload, "LlamaForCausalLM has its embeddings offloaded: leave them on a device"),
    ],
)
def test_what_can_be_attached_and_not_answer(wrap, said):
    wrapped, words = wrap(tiny_model("llama", vocab_size=400)), tiny_tokenizer()
    attach(wrapped).detach()
    (failed,) = run(wrapped, words, [Request(IDS, 4)], lambda request: cache()) if wrap is cpu_offload else (None,)
    assert failed is None or said in str(failed.error)
    for entrance in (
        lambda: str(Answer(wrapped, words, IDS, cache())), lambda: prefill(wrapped, IDS, cache()),
        lambda: "".join(Chat(wrapped, words, settings=64, policy="snapkv(6,3)").say("Which?")),
        lambda: Document.read(wrapped, words, "The pass key is 12345. " * 9, 64, "snapkv(6,3)").ask("Which?"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=said), attached(wrapped):
            entrance()
