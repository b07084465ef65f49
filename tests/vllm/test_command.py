"""What ``locret-vllm`` chooses where nobody does."""

from __future__ import annotations

import logging

import pytest
import tiny

from locret_kit.cli.vllm import served_by
from locret_kit.config.command_line import read
from locret_kit.config.vllm_options import VLLM
from locret_kit.vllm.server_settings import ServerSettings, VllmSettings


@pytest.fixture(autouse=True)
def forgotten():
    yield
    tiny.forget()


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
