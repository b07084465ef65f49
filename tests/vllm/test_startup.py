"""An engine's refusal to start, as the command reports it."""

import logging
import os
import subprocess
import sys

import pytest
import tiny
from transformers import AutoConfig, AutoModelForCausalLM
from word_texts import word_tokenizer, words

from locret_kit.documents.document import Document
from locret_kit.vllm.startup import ENGINE, FILE, WORKER, is_logged, refusals

SETTINGS = dict(budget=64, chunk=32, stabilizers=8, local_len=16, positions="original", policy="knorm")


def fail(name: str, error: Exception) -> None:
    """Log an error as vLLM's processes do."""
    try:
        raise error
    except Exception:
        logging.getLogger(name).exception("failed to start")


@pytest.fixture(autouse=True)
def unwatched(monkeypatch):
    monkeypatch.setenv(FILE, "")
    for name in (WORKER, ENGINE):
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
        logging.getLogger(name).setLevel("INFO")
    yield
    for name in (WORKER, ENGINE):
        logging.getLogger(name).removeFilter(is_logged)


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (ValueError("budget=3 must be above 4\nmore"), "budget=3 must be above 4"),
        (RuntimeError("out of memory"), "out of memory"),
        (FileNotFoundError(2, "No such file", "weights"), "weights: No such file"),
    ],
)
def test_the_first_error_of_the_processes_is_the_sentence(error, sentence, caplog):
    """A worker fails, and its engine because of it."""
    with pytest.raises(ValueError, match=f"^{sentence}$"), refusals():
        fail(WORKER, error)
        with pytest.raises(SystemExit):
            fail(ENGINE, Exception("initialization failed, see above"))
        raise RuntimeError("Engine core initialization failed. See root cause above.")
    assert not caplog.records


def test_a_bug_and_what_comes_after_the_start_keep_their_traceback(caplog):
    with pytest.raises(RuntimeError, match="^dead$"), refusals() as started:
        fail(WORKER, KeyError("bug"))
        started()
        fail(ENGINE, ValueError("later"))
        raise RuntimeError("dead")
    assert [record.exc_info[0] for record in caplog.records] == [KeyError, ValueError]


def test_debug_shows_everything(caplog):
    with pytest.raises(RuntimeError, match="^failed$"), refusals():
        logging.getLogger(ENGINE).setLevel("DEBUG")
        fail(ENGINE, ValueError("a sentence"))
        raise RuntimeError("failed")
    assert len(caplog.records) == 1


def damaged(folder):
    """A document that ends too early."""
    model = tiny.make(folder / "model", "llama")
    (folder / "library").mkdir()
    path = folder / "library" / "boats.locret"
    Document.read(model, word_tokenizer(), words(range(300)), chat=False, **SETTINGS).save(path)
    path.write_bytes(path.read_bytes()[:-100])
    return ["--sessions", "2", "--documents", str(path.parent)], "boats.locret is damaged"


def too_much(folder):
    """More memory than there is."""
    tiny.make(folder / "model", "llama")
    return ["--kv-cache-memory-bytes", "900T"], "less than requested memory"


def weightless(folder):
    """A model without weights."""
    tiny.make(folder / "model", "llama")
    (folder / "model" / "model.safetensors").unlink()
    return ["--sessions", "2"], "Cannot find any model weights"


def bloom(folder):
    """Positions as biases of attention."""
    config = AutoConfig.for_model("bloom", vocab_size=8192, hidden_size=64, n_layer=2, n_head=4)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    return ["--sessions", "2"], "this model's attention has alibi_slopes="


@pytest.mark.slow
@pytest.mark.parametrize("fault", [damaged, too_much, weightless, bloom])
def test_the_command_says_it_in_one_line(tmp_path, fault):
    more, sentence = fault(tmp_path)
    own = [f"{name}={value}" for name, value in SETTINGS.items()]
    command = [sys.executable, "-m", "locret_kit.cli.vllm", "--model", str(tmp_path / "model"), "--dtype", "float32"]
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    words = [*command, "--skip-tokenizer-init", "--max-model-len", "1024", *own, *more]
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert done.returncode == 1 and "Traceback" not in done.stderr + done.stdout, done.stderr
    (said,) = (line for line in done.stderr.splitlines() if line.startswith("locret-vllm: "))
    assert sentence in said
