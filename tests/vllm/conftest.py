"""Environment of vLLM in these tests: its engine runs in the test's own process, so that its scheduler and pages are at hand."""

import os
import sys
from pathlib import Path

import pytest

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    TORCH_COMPILE_DISABLE="1",  # a request for logprobs would compile for minutes
    OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", "2"),
    OMP_WAIT_POLICY="passive",
    HF_HUB_OFFLINE="1",
)
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")]


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    """A folder with a tiny model whose window is 4,096 tokens."""
    import tiny  # within the environment above

    tiny.make(folder := tmp_path_factory.mktemp("llama"), "llama")
    return folder
