"""The commands of the page on vLLM, as printed: those of a CPU run, those of a card are read by vLLM's parser."""

import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from serve_process import free_port
from vllm.entrypoints.cli.serve import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "howto" / "vllm.md").read_text(encoding="utf-8")
(CARD,) = re.findall(r"```bash\n(VLLM_USE.*?)```", PAGE, re.S)
BLOCKS = [block for block in re.findall(r"```bash\n(.*?)```", PAGE, re.S) if block != CARD]
(PYTHON,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
MODEL = "checkpoints/SmolLM2-135M-Instruct"
TEXT = " ".join(f"In {1000 + i} the town had {i * i % 977} houses." for i in range(160))
ENVIRONMENT = {
    **os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
}  # fmt: skip


@pytest.fixture
def place(tmp_path):
    """A folder with the checkpoints and a book."""
    (tmp_path / "checkpoints").symlink_to(ROOT / "checkpoints")
    (tmp_path / "book.txt").write_text(TEXT)
    return tmp_path


@pytest.mark.backbone
@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_a_block_serves(block, place):
    """Its last command is a server. Only the port is another, since 8000 may be taken."""
    *before, server = block.replace("\\\n", " ").strip().splitlines()
    subprocess.run(["bash", "-euc", "\n".join(before)], check=True, cwd=place, env=ENVIRONMENT)
    url, log = f"http://127.0.0.1:{(port := free_port())}", place / "log"
    with log.open("w") as out:
        command = ["bash", "-c", f"exec env {server} --port {port}"]
        process = subprocess.Popen(command, stdout=out, stderr=out, cwd=place, env=ENVIRONMENT)
    try:
        while True:
            assert process.poll() is None, log.read_text()[-3000:]
            try:
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            except httpx.HTTPError:
                time.sleep(1)
        asked = "What is the capital of France?"
        if documents := "--documents" in server:
            asked = f"{TEXT}\n\n{asked}"
        body = {"model": MODEL, "messages": [{"role": "user", "content": asked}], "max_tokens": 8, "temperature": 0}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=600).json()
        assert answer["choices"][0]["message"]["content"].strip()
        if documents:
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 1024
        said = log.read_text()
        ready = re.findall(r"^ready: \S+ (.*)$", said, re.M)
        if "--sessions 16" in server:  # some of a page does not depend on the type
            printed = re.search(r"^ready: \S+ (.*)$", PAGE, re.M)[1]
            bytes_here, bytes_there = (int(line.split()[-2]) for line in (ready[0], printed))
            assert ready[0].startswith("16 requests fit") and bytes_here % 17 == bytes_there % 17 == 0
            assert ready[0] == printed if "precision: bfloat16" in said else 1.9 < bytes_here / bytes_there < 2
        assert ready == [] or documents == ready[0].endswith(", documents: 1")
    finally:
        process.terminate()
        process.wait(120)


@pytest.mark.backbone
def test_the_python_answers(place):
    (place / "answer.py").write_text(PYTHON)
    done = subprocess.run([sys.executable, "answer.py"], cwd=place, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0 and "Paris" in done.stdout, done.stderr[-3000:]


def test_a_cards_command_differs_from_a_cpus_as_the_page_says():
    """``vllm serve`` needs the distribution called vllm; its parser is here."""
    (cpu,) = (block for block in BLOCKS if "api_server" in block)
    parser = make_arg_parser(FlexibleArgumentParser())
    words = shlex.split(CARD.replace("\\\n", " "))
    assert words[:3] == ["VLLM_USE_V2_MODEL_RUNNER=0", "vllm", "serve"]
    there = vars(parser.parse_args(["--model", *words[3:]]))
    here = vars(parser.parse_args(shlex.split(cpu.replace("\\\n", " "))[4:]))
    assert {name for name in there if there[name] != here[name]} == {
        "attention_backend", "enforce_eager", "kv_cache_memory_bytes", "max_num_seqs",
    }  # fmt: skip
