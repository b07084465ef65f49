"""What ``locret-vllm`` chooses where nobody does, precision and policy, and what it refuses before an engine starts."""

import logging
import re

import pytest
import tiny
from transformers import AutoConfig
from vllm.entrypoints.cli.serve import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from locret_kit.backbones import load as precision
from locret_kit.backbones import stand_in
from locret_kit.cli import vllm
from locret_kit.cli.vllm import main, served_by, settle
from locret_kit.config.schema import read
from locret_kit.config.serve_options import VLLM
from locret_kit.vllm.server_settings import ServerSettings, VllmSettings


@pytest.fixture(autouse=True)
def forgotten():
    yield
    tiny.forget()


@pytest.mark.parametrize(("given", "dtype"), [([], "float32"), (["--dtype", "bfloat16"], "bfloat16")])
def test_a_processor_without_bfloat16_serves_in_float32_unless_told_otherwise(llama, monkeypatch, capsys, given, dtype):
    monkeypatch.setattr(precision, "lacks_bfloat16", lambda: True)
    args = read(VLLM, ["--model", str(llama), "--budget", "64", "--chunk", "32", "--sessions", "2"])
    server, model = served_by(args)
    options = make_arg_parser(FlexibleArgumentParser()).parse_args([*given, "--model", model])
    page = settle(options, server, args.sessions, given)
    assert options.dtype == dtype
    said = "precision: float32: this processor widens bfloat16 to it"
    assert [line for line in capsys.readouterr().err.splitlines() if "precision" in line] == [said] * (not given)
    # 2 layers of 96 rows, of 2 heads: keys and values of 16 numbers; the planned bytes follow the type.
    assert page > 2 * 96 * 2 * 2 * 16 * (4 if dtype == "float32" else 2)
    assert options.kv_cache_memory_bytes == 3 * page


def test_plain_vllm_is_warned_of_bfloat16_that_the_processor_lacks(llama, monkeypatch, caplog):
    monkeypatch.setattr(stand_in, "lacks_bfloat16", lambda: True)
    for dtype, warned in (("bfloat16", True), ("float32", False)):
        caplog.clear()
        with tiny.started(llama, {"budget": 64, "chunk": 32, "policy": "knorm"}, dtype=dtype):
            assert ("--dtype float32 is faster" in caplog.text) == warned


def test_without_heads_the_policy_is_the_kits_or_the_nearest_that_a_page_holds(llama, caplog):
    with caplog.at_level(logging.WARNING):
        server, _ = served_by(read(VLLM, ["--model", str(llama), "--budget", "64", "--chunk", "32"]))
        assert server.default == server.section.policy == "snapkv"
        assert caplog.messages == [
            "warning: policy='compactor': with vLLM a request has a page alone, and its score remembers more; so it is snapkv"
        ]
        assert ServerSettings(VllmSettings(budget=64, chunk=32)).default == "snapkv"
        assert served_by(read(VLLM, ["--model", str(llama), "--policy", "streaming"]))[0].default == "streaming"
    assert len(caplog.messages) == 2


def test_a_model_may_stand_by_itself_as_for_vllm_serve(llama, monkeypatch, capsys):
    """Not the demo's, or that of the heads, is served then."""
    served, words = [], ["--budget", "64", "--chunk", "32", "--sessions", "2", "--policy", "knorm"]

    async def serve(options, *rest) -> None:
        served.append(options.model)

    monkeypatch.setattr(vllm, "serve", serve)
    assert main([str(llama), *words]) == 0 and served == [str(llama)]
    assert main(["--model", "other", *words, str(llama)]) == 1
    assert capsys.readouterr().err.endswith(f"locret-vllm: model='other' and {str(llama)!r}: leave one out\n")


def settled(llama, *more: str):
    """The options of vLLM, as the command sets them."""
    words = ["--model", str(llama), *more]
    args = read(VLLM, [word for word in words if not word.startswith("--max-model-len")])
    server, model = served_by(args)
    theirs = [word for word in words if word.startswith("--max-model-len")]
    options = make_arg_parser(FlexibleArgumentParser()).parse_args([*theirs, "--model", model])
    settle(options, server, args.sessions, theirs)
    return options


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("mpt", "MptForCausalLM"), ("mamba", "MambaForCausalLM"), ("t5", "T5ForConditionalGeneration"),
        ("mamba2", "Mamba2ForCausalLM"), ("mt5", "MT5ForConditionalGeneration"), ("bert", "BertForMaskedLM"),
        ("bloom", "BloomForCausalLM"), ("opt", "OPTForCausalLM"),
    ],
)  # fmt: skip
def test_a_model_that_nobody_runs_is_refused_in_a_sentence(tmp_path, name, architecture, capsys):
    AutoConfig.for_model(name, architectures=[architecture]).save_pretrained(tmp_path)
    assert main(["--model", str(tmp_path), "--budget", "64", "--chunk", "32", "--positions", "compact"]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert re.match(f"locret-vllm: .*({name}|{architecture}|runner=pooling must be auto or generate)", said)


@pytest.mark.parametrize(
    ("words", "reach"),
    [
        (["--budget", "4096", "--chunk", "1024"], 5120),
        (["--budget", "4000", "--chunk", "97", "--positions", "compact"], 4097),
        (["--budget", "512", "--chunk", "128", "--positions", "clipped(5000)"], 5000),
        (["--budget", "4096", "--chunk", "1024", "--positions", "clipped"], 5120),
    ],
)
def test_a_cache_beyond_the_window_is_refused(llama, words, reach):
    with pytest.raises(ValueError, match=f"^max_model_len=131072: .* reach {reach} positions, .* window has 4096$"):
        settled(llama, *words, "--max-model-len=131072")


@pytest.mark.parametrize("positions", ["compact", "clipped(4096)", "clipped"])
def test_a_cache_within_the_window_reads_any_length(llama, positions):
    words = (llama, "--budget", "3072", "--chunk", "1024", "--positions", positions)
    assert settled(*words, "--max-model-len=131072").hf_overrides == {"max_position_embeddings": 131072}
    assert not settled(*words, "--max-model-len=4096").hf_overrides


def test_true_positions_stay_within_the_window(llama):
    with pytest.raises(ValueError, match=r"max_model_len \(131072\) is greater than the derived"):
        settled(llama, "--budget", "64", "--chunk", "32", "--positions", "original", "--max-model-len=131072")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--documents", "/nosuch"], "documents='/nosuch' must be a folder of .locret files"),
        (["--documents", __file__], f"documents='{__file__}' must be a folder of .locret files"),
        (["--documents", ""], "documents is empty"),
        (["--sessions", "1000000000"], "sessions=1000000000 must be at most "),
        (["--sessions", "3000", "--max-num-batched-tokens", "2048"], "max_num_batched_tokens (2048) must be greater"),
        (["--enable-prefix-caching"], "enable_prefix_caching must be left out: a page holds"),
        (["--api-server-count", "2"], "api_server_count=2 must be 1"),
        (["--policy", "ada-snapkv"], "its heads differ"),
        (["--gpu-memory-utilization", "7"], "gpu_memory_utilization=7.0: Input should be less than or equal to 1"),
    ],
)
def test_what_cannot_start_is_refused_in_a_sentence(llama, words, said, capsys):
    assert main(["--model", str(llama), "--budget", "64", "--chunk", "32", *words]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("locret-vllm: ") and said in last
