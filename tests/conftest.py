import gc
import io
import os
import signal
import sys
from collections import defaultdict
from hashlib import sha256
from pathlib import Path

# One thread a process: OpenMP's threads do not survive `os.fork`, and a forked process would wait for them forever.
os.environ["OMP_NUM_THREADS"] = "1"  # torch reads it once, so here; torch.set_num_threads fails in threads of a fork
sys.path.insert(0, str(Path(__file__).parent / "support"))

import interpreted  # before any other module imports Triton, whose own functions are decorated then too
import pytest
from hypothesis import settings
from import_graph import changed_since, tests_that_reach

signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a terminal: a shell's background job ignores it


WHOLE = (
    "test_imports", "test_layout", "test_readme", "test_docs", "test_command",
    "test_saved_files::test_a_file_is_little_more_than_its_cache", "test_checkpoint::test_round_trip",
    "test_training::test_it_learns_and_exports", "test_infer_cli::test_answers_and_reports",
    "test_eval_runner::test_a_run_writes_rows_and_summary", "test_serving::test_an_answer_whole_and_streamed",
    "test_serve_command::test_curl", "test_light_install::test_help_needs_no_extra_and_loads_nothing_heavy",
    "test_light_install::test_an_answer_and_a_plan_need_no_extra_and_a_training_names_its_own",
)  # fmt: skip
"""Files and tests that ``--fast`` runs: imports, pages and their commands, and each command once. None needs the demo backbone, a
browser or a terminal."""
SAMPLED = (
    "test_policies_oracle", "test_bounded_cache", "test_attention", "test_cis", "test_positions", "test_families",
    "test_attach", "test_decoding", "test_batch", "test_quantised", "test_documents", "test_ragged_decode",
    "test_architectures", "test_rope_scalings",
)  # fmt: skip
"""Files of whose tests ``--fast`` runs ``SETS`` sets of parameters; of the oracle's (the first), as many of each policy."""
SETS = 2
GRIDS = (
    "test_policies_oracle", "test_pins", "test_bounded_cache", "test_batch", "test_decoding", "test_attention",
    "test_lococo", "test_sparse_prefill", "test_answering", "test_interrupts",
    "test_kernels_attention", "test_kernels_fused", "test_kernels_rows", "test_kernels_select",
    "test_backend_contract", "test_cpu_backend", "test_products", "test_fake_cuda", "test_key_scores", "test_kvzip",
    "test_families", "test_architectures", "test_rope_scalings",
    "test_ragged_decode", "test_changed_weights", "test_turns", "test_wrapped_models", "test_dense_step", "test_reading",
    "test_row_products", "test_kernels_enter", "test_masks", "test_positions", "test_pages",
)  # fmt: skip
"""Files of whose tests as few sets of parameters run as have every value, ``GRID`` at least; of each implementation by itself,
and of a policy one. With ``--all`` every one, and more examples of hypothesis."""
GRID = 3
LONGEST = (
    "test_readme_pasted", "test_default_types", "test_golden", "test_dense_step", "test_architectures", "test_on_card",
    "test_fake_cuda", "test_resume", "test_folded", "test_kernels_compile", "test_changed_weights", "test_hub",
    "test_several_cards", "test_chunk_graph", "test_gpu_script", "test_deepspeed", "test_serving_faults",
    "test_serving_sessions", "test_docs",
)  # fmt: skip
"""Files that take ten seconds of a processor and more, in that order."""


def pytest_addoption(parser):
    parser.addoption("--fast", action="store_true", help="run a sample of the tests")
    parser.addoption("--all", action="store_true", help="run every set of parameters, and more examples of hypothesis")
    parser.addoption("--changed", nargs="?", const="HEAD", help="run the files that reach what differs from a commit")


def pytest_configure(config):
    commit = config.getoption("--changed")
    config.reaching = None if commit is None else tests_that_reach(changed_since(commit))
    examples = 100 if config.getoption("--all") else 15
    # The same examples on every machine, however slow.
    settings.register_profile("locret", deadline=None, derandomize=True, max_examples=examples)
    settings.load_profile("locret")


def pytest_ignore_collect(collection_path, config):
    if not collection_path.name.startswith("test_"):
        return None
    names = {name.partition("::")[0] for name in (*WHOLE, *SAMPLED)}
    left_out = config.getoption("--fast") and collection_path.stem not in names
    return True if left_out or (config.reaching is not None and collection_path not in config.reaching) else None


@pytest.hookimpl(trylast=True)  # of what -k and -m leave
def pytest_collection_modifyitems(config, items):
    """With ``--fast`` a sample, else without ``--all`` some of each grid. The longest first, so that no process waits for them
    at the end."""
    if not config.getoption("--all"):
        chosen = sample(items) if config.getoption("--fast") else one_size(items)
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = [item for item in items if item in chosen]
    last = len(LONGEST)
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else last)


def pytest_collection_finish(session):
    """Keep garbage collections away from what is imported, here and in processes that are forked."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session):
    """End with the garbage collected: libraries count what is left."""
    gc.unfreeze()


def sample(items):
    """The tests of ``WHOLE``, and ``SETS`` of each in ``SAMPLED``: the same on every machine.

    Raises:
        pytest.UsageError: a file that was collected lacks a test that ``WHOLE`` names.
    """
    chosen, sets, names = set(), defaultdict(list), set()
    for item in items:
        file, name = item.path.stem, f"{item.path.stem}::{item.originalname}"
        names |= {file, name}
        if file in WHOLE or name in WHOLE:
            chosen.add(item)
        elif file in SAMPLED:
            sets[name, policy_of(item) if file == SAMPLED[0] else None].append(item)
    if wrong := [name for name in WHOLE if name.partition("::")[0] in names and name not in names]:
        raise pytest.UsageError(f"--fast: there is no {', '.join(wrong)}")
    for found in sets.values():
        chosen.update(by_lot(found, SETS))
    return chosen


def one_size(items):
    """All tests but those that are marked ``left`` and those of ``GRIDS``, and of each of these some."""
    chosen, sets = set(), defaultdict(list)
    for item in items:
        if item.get_closest_marker("left") is not None:
            continue
        if item.path.stem in GRIDS:
            implementation = repr([params_of(item).get(name) for name in ("functions", "backend")])
            sets[item.path, item.originalname, policy_of(item), implementation].append(item)
        else:
            chosen.add(item)
    for (_, _, policy, _), found in sets.items():
        chosen.update(with_every_value(found) if policy is None else by_lot(found, 1))
    return chosen


def with_every_value(found):
    """As few as have every value of every parameter, and ``GRID`` at least."""
    left, chosen = by_lot(found, len(found)), []
    missing = set().union(*map(values_of, left))
    while missing:
        chosen.append(max(left, key=lambda item: len(values_of(item) & missing)))
        left.remove(chosen[-1])
        missing -= values_of(chosen[-1])
    return chosen + left[: max(0, GRID - len(chosen))]


def values_of(item):
    return {(name, repr(value)) for name, value in params_of(item).items()}


def params_of(item):
    return item.callspec.params if hasattr(item, "callspec") else {}


def policy_of(item):
    return params_of(item).get("policy")


def by_lot(found, count):
    """The same on every machine."""
    return sorted(found, key=lambda item: sha256(item.nodeid.encode()).digest())[:count]


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs a command in this process over a text on stdin: its status, stdout and stderr."""

    def run(main, *words: str, stdin: str | bytes = "") -> tuple[int, str, str]:
        data = stdin.encode() if isinstance(stdin, str) else stdin
        capsys.readouterr()  # what came before is not the command's
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
        return main([*words]), *capsys.readouterr()

    return run


@pytest.fixture
def poisoned():
    with interpreted.poisoned():
        yield
