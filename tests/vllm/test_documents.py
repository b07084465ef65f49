"""Documents read once, through vLLM's connector: the same answers as a fresh run, of which most is not read again."""

import shutil

import pytest
import tiny
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from word_texts import word_tokenizer, words

from locret_kit.documents.document import Document
from locret_kit.validation import build
from locret_kit.vllm.documents import Documents
from locret_kit.vllm.server_settings import ServerSettings, VllmSettings
from locret_kit.vllm.worker import engine_options

POLICIES = ("locret", "snapkv", "h2o")
SETTINGS = dict(budget=64, chunk=32, stabilizers=8, local_len=16, positions="compact")


def connector() -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector="Documents", kv_connector_module_path="locret_kit.vllm.documents", kv_role="kv_both"
    )


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_prompt_that_begins_with_a_document_goes_on_from_its_page(tmp_path, ranks):
    """Alone and among strangers, whose pages are others, by each policy; of two processes each has the rows of its own heads."""
    model, heads = tiny.make_both(tmp_path, "llama")
    (book,), (short, long) = tiny.prompts([400]), ([8001, 8002, 8003], range(8010, 8080))
    book, strangers = [i for i in book if i < 8000], tiny.prompts([300, 90])
    asked = [[*book, *short], [*book, *long]]
    (tmp_path / "library").mkdir()
    wanted, read = {}, {}
    for policy in POLICIES:
        own = {"policy": policy, **({"heads": heads} if policy == "locret" else {})}
        document = Document.read(model, word_tokenizer(), words(book), chat=False, **SETTINGS, **own)
        document.save(tmp_path / "library" / f"{policy}.locret")
        assert asked == [list(document.prompt(" " + words(question))) for question in (short, long)]
        read[policy] = document.cache.get_seq_length()
        wanted[policy] = [tiny.kit(model, ids, 24, document.fork_for(len(ids))) for ids in asked]
        wanted[policy] += [tiny.kit(model, ids, 24, **SETTINGS, **own) for ids in strangers]
    section = {**SETTINGS, "policy": POLICIES[0], "policies": list(POLICIES[1:]), "heads": heads}
    section["documents"] = str(tmp_path / "library")
    asking = engine_options(ServerSettings(build(VllmSettings, section)))  # workers of two ranks are other processes
    rest = {"kv_transfer_config": connector(), "tensor_parallel_size": ranks, **asking}
    with tiny.started(tmp_path / "model", section, **rest) as llm:
        shutil.rmtree(tmp_path / "library")  # a server has its documents open
        for policy in POLICIES:
            params = tiny.params(24, policy=policy)
            answers = llm.generate([{"prompt_token_ids": ids} for ids in (*asked, *strangers)], params, use_tqdm=False)
            assert [list(answer.outputs[0].token_ids) for answer in answers] == wanted[policy], policy
            assert [answer.num_cached_tokens for answer in answers] == [read[policy], read[policy], 0, 0]
            (again,) = llm.generate([{"prompt_token_ids": asked[0]}], params, use_tqdm=False)
            assert list(again.outputs[0].token_ids) == wanted[policy][0]
            assert again.num_cached_tokens == read[policy]


def test_documents_that_do_not_fit_are_refused(tmp_path):
    model = tiny.make(tmp_path / "model", "llama")
    tiny.make(tmp_path / "other", "wide")
    path = tmp_path / "library" / "boats.locret"
    path.parent.mkdir()
    Document.read(model, word_tokenizer(), words(range(300)), policy="knorm", chat=False, **SETTINGS).save(path)

    def refused(said: str, folder: str = "model", **settings) -> None:
        section = {**SETTINGS, "policy": "knorm", "documents": str(path.parent), **settings}
        config = tiny.configuration(tmp_path / folder, section, kv_transfer_config=connector())
        with pytest.raises(ValueError, match=said):
            Documents(config, KVConnectorRole.SCHEDULER, None)
        tiny.forget()

    refused("boats.locret: policy='knorm' in the file, here streaming", policy="streaming")
    refused("boats.locret: budget: 64 in the file, 96 here", budget=96)
    refused(r"boats\.locret: model\.config.head_dim: 16 in the file, 64 here", folder="other")
    path.write_bytes(path.read_bytes()[:-100])
    refused(r"boats\.locret is damaged")
