"""Documents read once, through vLLM's connector: the same answers as a fresh run, of which most is not read again."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import tiny
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from vllm import SamplingParams
from vllm.config import KVTransferConfig

from locret_kit.documents.document import Document

SETTINGS = dict(budget=64, chunk=32, stabilizers=8, local_len=16, positions="compact")


def word_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each word, so that a text can be without a repeated one (see ``tiny.prompts``)."""
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(8192)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0")


def words(ids: Sequence[int]) -> str:
    return " ".join(f"w{i}" for i in ids)


def connector() -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector="Documents", kv_connector_module_path="locret_kit.vllm.documents", kv_role="kv_both"
    )


@pytest.mark.parametrize(
    ("policy", "ranks"),
    [
        ("locret", 1),
        ("snapkv", 1),
        ("h2o", 1),
        *(pytest.param(name, 2, marks=pytest.mark.slow) for name in ("locret", "snapkv")),
    ],
)
def test_a_prompt_that_begins_with_a_document_goes_on_from_its_page(tmp_path, policy, ranks):
    """Alone and among strangers, whose pages are others; on two processes each has the rows of its own heads."""
    model = tiny.make(tmp_path / "model", "llama")
    own = {"heads": tiny.make_heads(tmp_path / "heads", model, tmp_path / "model")} if policy == "locret" else {}
    (book,), (short, long) = tiny.prompts([400]), ([8001, 8002, 8003], range(8010, 8080))
    book = [i for i in book if i < 8000]
    document = Document.read(model, word_tokenizer(), words(book), policy=policy, chat=False, **SETTINGS, **own)
    (tmp_path / "library").mkdir()
    document.save(tmp_path / "library" / "boats.locret")
    read = document.cache.get_seq_length()
    asked = [list(document.prompt(" " + words(question))) for question in (short, long)]
    assert asked == [[*book, *short], [*book, *long]]
    strangers = tiny.prompts([300, 90])
    section = {**SETTINGS, "policy": policy, "documents": str(tmp_path / "library"), **own}
    wanted = [tiny.kit(model, ids, 24, document.open(len(ids))) for ids in asked]
    wanted += [tiny.kit(model, ids, 24, policy=policy, **SETTINGS, **own) for ids in strangers]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    rest = {"kv_transfer_config": connector(), "tensor_parallel_size": ranks}
    with tiny.started(tmp_path / "model", section, **rest) as llm:
        answers = llm.generate([{"prompt_token_ids": ids} for ids in (*asked, *strangers)], params, use_tqdm=False)
        assert [list(answer.outputs[0].token_ids) for answer in answers] == wanted
        assert [answer.num_cached_tokens for answer in answers] == [read, read, 0, 0]
        (again,) = llm.generate([{"prompt_token_ids": asked[0]}], params, use_tqdm=False)
        assert list(again.outputs[0].token_ids) == wanted[0] and again.num_cached_tokens == read


@pytest.mark.slow
def test_documents_that_do_not_fit_are_refused(tmp_path):
    model = tiny.make(tmp_path / "model", "llama")
    document = Document.read(model, word_tokenizer(), words(range(300)), policy="knorm", chat=False, **SETTINGS)
    (tmp_path / "library").mkdir()
    path = tmp_path / "library" / "boats.locret"
    document.save(path)
    library = {"documents": str(path.parent)}
    for section, said in (
        ({**SETTINGS, **library, "policy": "streaming"}, "boats.locret: policy='knorm' in the file, here streaming"),
        ({**SETTINGS, **library, "policy": "knorm", "budget": 96}, "boats.locret: budget: 64 in the file, 96 here"),
    ):
        with pytest.raises(Exception, match=said):
            with tiny.started(tmp_path / "model", section, kv_transfer_config=connector()):
                pass
    tiny.make(tmp_path / "other", "wide")
    with pytest.raises(Exception, match=r"boats\.locret: model\.config.head_dim: 16 in the file, 64 here"):
        with tiny.started(
            tmp_path / "other", {**SETTINGS, **library, "policy": "knorm"}, kv_transfer_config=connector()
        ):
            pass
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(Exception, match=r"boats\.locret is damaged"):
        with tiny.started(
            tmp_path / "model", {**SETTINGS, **library, "policy": "knorm"}, kv_transfer_config=connector()
        ):
            pass
