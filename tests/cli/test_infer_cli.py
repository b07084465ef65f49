"""``locret-infer`` as a user meets it: answers, reports, and one clear line for every bad input."""

import json
import os
import shutil
import warnings
from array import array
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_heads import save_tiny_heads
from tiny_models import tiny_model
from tiny_tokenizer import TEXT, save_tiny_backbone
from transformers import AutoModelForCausalLM

from locret_kit import BoundedCache
from locret_kit.backbones.libraries import CACHE
from locret_kit.cli.infer import main
from locret_kit.cli.loading import ModelChoice, resolve_choice
from locret_kit.heads import RetainingHeads
from locret_kit.planning import duration
from locret_kit.policies.base import PolicyWarning
from locret_kit.policies.grammar import parse_policy
from locret_kit.runtime import session
from locret_kit.settings import RunSettings, too_few

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a tiny backbone and heads for it, made for a budget of 6000."""
    folder = tmp_path_factory.mktemp("infer")
    settings = dict(budget=6000, chunk=32, stabilizers=2500, local_len=100, positions="compact")
    backbone = save_tiny_backbone(folder / "backbone", max_position_embeddings=512)
    save_tiny_heads(folder, 16, inference=settings, backbone=backbone)
    save_tiny_backbone(folder / "other", num_hidden_layers=2, num_key_value_heads=4)
    os.mkfifo(folder / "pipe")
    return folder


@pytest.fixture
def infer(command):
    """Run the command over a text on stdin."""
    return lambda text, *words: command(main, *words, stdin=text)


def test_a_budget_that_cannot_work_is_told():
    said = too_few(1024, 41370)
    advice = "--budget 5200 takes 5.1 times the cache's memory, and more time"
    assert said == f"1,024 slots for 41,370 tokens, 1 in 40: facts need about 1 in 8: {advice}"
    assert too_few(1024, 8192) is None
    for policy, run, told in (
        ("snapkv", RunSettings(budget=0.01), True), ("full", RunSettings(budget=16), False),
        ("infllm", RunSettings(budget=16), False), ("snapkv", RunSettings(budget=512), False),
        ("snapkv reread=passages", RunSettings(budget=16, stabilizers=4, local_len=4), False),
    ):  # fmt: skip
        chosen = ModelChoice("", None, parse_policy(policy), None, (), None)
        lines: list[str] = []
        assert chosen.for_text(run, tiny_model("llama"), range(4000), lines.append) == run
        assert ["slots for" in line for line in lines if "window" not in line] == [True] * told
    model, lines = tiny_model("llama"), []
    window = model.config.max_position_embeddings
    chosen = ModelChoice("", None, parse_policy("snapkv"), None, (), None)
    for tokens in (4 * window - 1, 4 * window):
        chosen.for_text(RunSettings(budget=window), model, range(tokens), lines.append)
    times = f"{4 * window:,} tokens are 4 times the model's window of {window:,}"
    assert lines == [f"warning: {times}: single facts are often missed"]


def test_the_time_that_a_long_text_takes_is_told_before_it_is_read(monkeypatch):
    ids = array("i", [5] * 10_000)
    chosen = ModelChoice("", None, parse_policy("snapkv"), None, (), None)
    monkeypatch.setattr(session, "seconds_per_token", lambda *given: 1 / 500)
    said: list[str] = []
    chosen.for_text(RunSettings(budget=1024, chunk=512), tiny_model("llama"), ids, said.append)
    assert said[-1] == "10,000 tokens take about 20 s, 500 tok/s beside a full cache"
    assert [duration(seconds) for seconds in (0.4, 99, 720, 12600)] == ["0 s", "99 s", "12 min", "3.5 h"]


def test_the_time_of_a_text_is_measured_in_fewer_slots_without_a_word_of_them():
    """Settings that just fit their budget, and would not fit that of the measurement."""
    ids, policy = array("i", [5] * 8200), parse_policy("infllm(init=4,local=200,size=8,take=2)")
    settings = RunSettings(budget=200, chunk=128, stabilizers=195, protect="first").resolved({}, len(ids))
    with warnings.catch_warnings(action="error", category=PolicyWarning):
        assert session.reading_time(tiny_model("llama"), ids, settings, policy, None) is not None


@pytest.mark.parametrize(
    ("family", "policy", "bits"),
    [
        ("llama", policy, None)
        for policy in ("full", "snapkv", "h2o", "streaming", "ada-snapkv", "pyramidkv", "infllm", "nacl(first=4)")
    ]
    + [("llama", "snapkv", 4), ("gemma3", "snapkv", None)],
)
def test_a_piece_is_measured_in_a_cache_that_is_full(family, policy, bits):
    """Beside as many rows as a text has on average; then the cache is cut to its budget, as after every chunk."""
    model, ids = tiny_model(family), array("i", range(5, 95)) * 60
    cache = BoundedCache(128, policy, chunk=64, prompt_length=len(ids), kv_bits=bits)
    assert session.seconds_per_token(model, ids, cache) > 0
    end = len(ids) // 2 // 64 * 64
    assert cache.get_seq_length() == end and cache.counters.evictions == (policy != "full")
    held = [rows.rows for rows in cache.bounded if rows.window is None]
    assert sum(held) == len(held) * (end + 64 if policy == "full" else 128)


def test_answers_and_reports(place, tmp_path, infer):
    report = tmp_path / "report.json"
    status, out, err = infer(
        TEXT * 4, "--ckpt", str(place / "heads"), "--budget", "48", "--max-new-tokens", "5",
        "--question", "What is it?", "--report", str(report),
    )  # fmt: skip
    assert status == 0, err
    assert out.endswith("\n")
    figures = json.loads(report.read_text())
    assert figures["kept_rows"] == [48] * 3
    # 2500 and 100 were made for a budget of 6000: they scale to 48.
    assert (figures["stabilizers"], figures["local_len"]) == (20, 0)
    assert figures["policy"] == "locret" and figures["evictions"] > 0 and figures["answer"] + "\n" == out
    for word in ("tok/s", "peak memory", "evictions", "rows", "was cut after max_new_tokens=5"):
        assert word in err


def test_a_published_bin_takes_its_sizes_from_the_model(place, infer):
    from locret_kit.heads import state_of

    torch.save(state_of(RetainingHeads.from_pretrained(str(place / "heads")), torch.float32), place / "published.bin")
    run = ["--budget=48", "--chunk=32", "--stabilizers=20", "--local-len=0", "--positions=compact", "--quiet"]
    named = ("--ckpt", str(place / "published.bin"), "--model", str(place / "backbone"))
    answer = infer(TEXT * 4, *named, *run)
    assert answer == infer(TEXT * 4, "--ckpt", str(place / "heads"), *run)
    status, _, err = infer(TEXT, "--ckpt", str(place / "published.bin"), "--quiet")
    assert status == 1 and "give it (--model" in err


def test_the_same_seed_repeats_and_sampling_differs(place, infer):
    run = ["--ckpt", str(place / "heads"), "--budget", "64", "--max-new-tokens", "12", "--quiet"]
    greedy = infer(TEXT, *run)[1]
    assert greedy == infer(TEXT, *run)[1]
    hot = [infer(TEXT, *run, "--temperature", "2", "--seed", str(seed))[1] for seed in (1, 1, 2)]
    assert hot[0] == hot[1] != hot[2]


BAD = [
    (b"", [], "stdin has no text"),
    (b"fine until \xff here", [], "byte 11"),
    (b"text", ["--policy", "locrett"], "Did you mean 'locret'?"),
    (b"text", ["--model", "{place}/other"], "n_layers: heads have 3, the backbone has 2"),
    (b"text", ["--model", "{place}/nowhere"], "no such folder"),
    (b"text", ["--ckpt", "{place}/nothing.pt"], "no such file"),
    (b"text", ["--ckpt", "{place}/backbone"], "config.json: it is a backbone, not retaining heads: give it as --model"),
    (b"text", ["--ckpt", "{place}/truncated.pt"], "cannot be read safely"),
    (b"caf\xe9 noir", [], "stdin: the text is not UTF-8: byte 3 is 0xe9; if it is text, save it"),
    (b"text", ["--model", "{place}/cut"], "cannot be loaded"),
    (b"text", ["--device", "gpu"], "device='gpu' must be one of PyTorch's, such as cpu, cuda"),
    (b"text", ["--report", "{place}/nowhere/report.json"], "its folder is missing"),
    (b"text", ["--one-shot", "--chunk", "7"], "--chunk 7 has no effect with --one-shot"),
    (b"text", ["--budget", "2147483647"], "budget+chunk=2147483679 must be at most 2147483647"),
    (b"text", ["--no-chat"], "--no-chat has no effect without --question"),
    (b"text", ["--no-think"], "--no-think has no effect without --question"),
    (b"text", ["--question", "Who?", "--no-chat", "--no-think"], "--no-think has no effect with --no-chat"),
    (b"text", ["--report", "{place}/pipe"], "pipe' is no regular file"),
    (b"text", ["--temperature", "nan"], "temperature=nan must be a number, at least 0"),
    (b"text", ["--question", "caf\udce9"], "the question is not UTF-8: "),
    (b"text", ["--model", "{place}/heads"], "cannot be loaded: it holds no tokenizer"),
    (b"text", ["--one-shot", "--policy", "rereading-locret"], "one_shot=True holds none of them back"),
    (b"text", ["--top-k", "5"], "--top-k 5 has no effect at temperature 0"),
]


@pytest.mark.parametrize(("text", "flags", "said"), BAD, ids=[said for _, _, said in BAD])
def test_bad_input_is_one_line(place, infer, text, flags, said):
    whole = place / "whole.pt"
    if not whole.exists():
        RetainingHeads.from_pretrained(str(place / "heads")).save_pretrained(whole)
        (place / "truncated.pt").write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
        shutil.copytree(place / "backbone", place / "cut")
        weights = place / "cut" / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:2000])
    flags = [flag.replace("{place}", str(place)) for flag in flags]
    if "--ckpt" not in flags:
        flags = ["--ckpt", str(place / "heads"), *flags]
    status, out, err = infer(text, *flags, "--quiet")
    assert (status, out) == (1, "")
    assert len(err.strip().splitlines()) == 1 and err.startswith("locret-infer: ") and said in err, err


def test_a_path_that_heads_name_is_found_by_its_last_part(place):
    """A document names no more of it."""
    assert resolve_choice(str(place / "heads"), "backbone", None, None).backbone == str(place / "backbone")
    assert resolve_choice(str(place / "heads"), "other", None, None).backbone == "other"


def test_slots_beyond_the_default_budget_are_for_the_text_to_judge(place):
    """A long one gets more."""
    run, ids = RunSettings(stabilizers=2000, local_len=1500, positions="original"), array("i", [5] * 9000)
    chosen = resolve_choice(None, str(place / "other"), None, "streaming", run)
    run = chosen.for_text(run, tiny_model("llama"), ids, None)
    assert run.budget == 2250 and BoundedCache(run, chosen.policy, prompt_length=len(ids)).schedule.stabilizers == 2000


@pytest.mark.parametrize(
    ("device", "cards", "said"),
    [
        ("cuda", 0, ": PyTorch sees no CUDA device here"),
        ("cuda:2", 2, ": PyTorch sees the CUDA devices up to cuda:1"),
        ("xpu", 0, " cannot be used here: "),
        ("hpu", 0, " cannot be used here: "),
    ],
)
def test_a_device_that_is_not_there(device, cards, said, place, infer, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cards > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cards)
    status, _, err = infer("text", "--ckpt", str(place / "heads"), "--device", device, "--quiet")
    assert status == 1 and err.startswith(f"locret-infer: device={device!r}{said}") and err.count("\n") == 1


def test_the_library_runs_with_what_the_heads_were_published_with(place, tmp_path, infer):
    from transformers import AutoTokenizer

    from locret_kit import BoundedCache, attach

    report = tmp_path / "report.json"
    flags = ("--ckpt", str(place / "heads"), "--budget", "40", "--max-new-tokens", "8", "--dtype", "float32")
    status, out, _ = infer(TEXT * 4, *flags, "--report", str(report))
    heads = RetainingHeads.from_pretrained(str(place / "heads"))
    model = AutoModelForCausalLM.from_pretrained(place / "backbone", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(place / "backbone")
    ids = tokenizer(TEXT * 4, return_tensors="pt").input_ids
    cache = BoundedCache(40, heads=heads, prompt_length=ids.shape[1])
    with attach(model):
        made = model.generate(ids, **{CACHE: cache}, prefill_chunk_size=50, max_new_tokens=8, do_sample=False)
    s, said = cache.schedule, json.loads(report.read_text())
    assert status == 0 and ids.shape[1] == said["prompt_tokens"]
    assert (s.chunk, s.stabilizers, s.local_len, cache.settings.positions) == (32, 16, 0, "compact")
    assert tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True) == out.rstrip("\n")


def test_positions_beyond_the_window_are_said(place, infer):
    text, flags = TEXT * 9, ("--ckpt", str(place / "heads"), "--max-new-tokens", "1", "--quiet")
    for more in (("--policy", "full"), ("--positions", "original", "--budget", "40")):
        status, _, err = infer(text, *flags, *more)
        assert status == 0 and "beyond the backbone's window of 512" in err and err.count("\n") == 1, err
    assert infer(text, *flags, "--budget", "40")[2] == ""


def test_heads_run_the_policy_that_they_were_published_with(place, tmp_path, infer):
    heads = RetainingHeads.from_pretrained(str(place / "heads"))
    inference = {**heads.config.inference, "policy": "kvcrush(base=locret)"}
    heads.config = replace(heads.config, inference=inference)
    heads.save_pretrained(str(tmp_path / "heads"))
    for flags, policy in (([], inference["policy"]), (["--policy", "h2o", "--stabilizers", "3"], "h2o")):
        status, _, err = infer(
            TEXT, "--ckpt", str(tmp_path / "heads"), "--budget", "40", "--max-new-tokens", "2",
            "--report", str(tmp_path / "report.json"), *flags,
        )  # fmt: skip
        assert status == 0, err
        assert json.loads((tmp_path / "report.json").read_text())["policy"] == policy
        assert ("protects no stabilizers" in err) == bool(flags)


def test_list_policies_names_every_policy(capsys):
    from locret_kit.policies.registry import policies

    assert main(["--list-policies"]) == 0
    with_heads, without = capsys.readouterr().out.split("\nWithout:\n")
    names = [[line.split()[0] for line in part.splitlines() if line[:3].strip()] for part in (with_heads, without)]
    assert sorted(names[0][1:] + names[1][:-1]) == list(policies()) and names[1][-1] == "kvzip"
    assert "pyramid-locret" in names[0] and "pyramidkv" in names[1]
    assert "parameters: sinks=4" in without and all(len(line) <= 120 for line in without.splitlines())
