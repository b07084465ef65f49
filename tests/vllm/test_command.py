"""What ``locret-vllm`` chooses where nobody does: precision and policy."""

from __future__ import annotations

import logging

import pytest
import tiny
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from locret_kit.backbones import load as precision
from locret_kit.cache import lent
from locret_kit.cli.vllm import served_by, settle
from locret_kit.config.schema import read
from locret_kit.config.serve_options import VLLM
from locret_kit.vllm.server_settings import ServerSettings, VllmSettings


@pytest.fixture(autouse=True)
def forgotten():
    yield
    tiny.forget()


@pytest.mark.parametrize(("given", "dtype"), [([], "float32"), (["--dtype", "bfloat16"], "bfloat16")])
def test_a_processor_without_bfloat16_serves_in_float32_unless_told_otherwise(
    tmp_path, monkeypatch, capsys, given, dtype
):
    tiny.make(tmp_path, "llama")
    monkeypatch.setattr(precision, "lacks_bfloat16", lambda: True)
    args = read(VLLM, ["--model", str(tmp_path), "--budget", "64", "--chunk", "32", "--sessions", "2"])
    server, model = served_by(args)
    options = make_arg_parser(FlexibleArgumentParser()).parse_args([*given, "--model", model])
    page = settle(options, server, args.sessions, given)
    assert options.dtype == dtype
    said = "precision: float32: this processor widens bfloat16 to it"
    assert [line for line in capsys.readouterr().err.splitlines() if "precision" in line] == [said] * (not given)
    # 2 layers of 96 rows, of 2 heads: keys and values of 16 numbers; the planned bytes follow the type.
    assert page > 2 * 96 * 2 * 2 * 16 * (4 if dtype == "float32" else 2)
    assert options.kv_cache_memory_bytes == 3 * page


def test_plain_vllm_is_warned_of_bfloat16_that_the_processor_lacks(tmp_path, monkeypatch, caplog):
    tiny.make(tmp_path, "llama")
    monkeypatch.setattr(lent, "lacks_bfloat16", lambda: True)
    for dtype, warned in (("bfloat16", True), ("float32", False)):
        caplog.clear()
        with tiny.started(tmp_path, {"budget": 64, "chunk": 32, "policy": "knorm"}, dtype=dtype):
            assert ("--dtype float32 is faster" in caplog.text) == warned


def test_without_heads_the_policy_is_the_kits_or_the_nearest_that_a_page_holds(tmp_path, caplog):
    tiny.make(tmp_path, "llama")
    with caplog.at_level(logging.WARNING):
        server, _ = served_by(read(VLLM, ["--model", str(tmp_path), "--budget", "64", "--chunk", "32"]))
        assert server.default == server.section.policy == "snapkv"
        assert caplog.messages == [
            "warning: policy='compactor': with vLLM a request has a page alone, and its score remembers more; so it is snapkv"
        ]
        assert ServerSettings(VllmSettings(budget=64, chunk=32)).default == "snapkv"
        assert served_by(read(VLLM, ["--model", str(tmp_path), "--policy", "streaming"]))[0].default == "streaming"
    assert len(caplog.messages) == 2
