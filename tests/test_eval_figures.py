"""Figures: numbers against brute force, every one drawn on a tiny backbone, the same bytes twice."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_heads import tiny_heads
from tiny_models import tiny_model

from locret_kit.cli.eval import main
from locret_kit.config.figure_options import Look
from locret_kit.evals.engine.result_rows import Row, read_rows
from locret_kit.evals.engine.run_spec import Setup
from locret_kit.evals.figures import FIGURES, PAPERS, curves, draw, find_figure, results, style, sweep
from locret_kit.evals.tasks.task import Example, Task
from locret_kit.policies.grammar import parse_policy
from locret_kit.settings import RunSettings

EXAMPLES = Path(__file__).resolve().parents[1] / "examples" / "paper_figures"
sys.path.append(str(EXAMPLES))
import agreement  # noqa: E402
import attention  # noqa: E402
import draw as papers  # noqa: E402
import patterns  # noqa: E402
import study  # noqa: E402
import sweeps  # noqa: E402

SWEEPS = [name for name, kind in papers.FIGURES.items() if kind.function.__module__ == "sweeps"]
ROW = Row(
    task="R.PassKey", haystack="jargon", length=4096, budget=512, policy="locret", heads="h", sample=0,
        score=1.0, depth=0.25, tokens=4090, new_tokens=8, prefill_s=2.0,
    decode_s=0.5, peak_bytes=2**30, cache_bytes=2**20, device="cpu", dtype="float32",
)  # fmt: skip


def rows() -> list[Row]:
    made = []
    for sample, depth in enumerate((0.0, 0.5, 1.0)):
        for length in (4096, 8192):
            full = replace(ROW, sample=sample, depth=depth, length=length, policy="full", heads="-", budget=0)
            made += [
                full,
                *(replace(full, policy=p, budget=b, score=0.5) for p in ("h2o", "$tova") for b in (256, 512)),
            ]
    return made


@pytest.fixture(scope="module")
def look() -> study.Study:
    model = tiny_model("llama")

    def settings_for(variant, tokens):
        given = RunSettings(budget=variant.budget or 64, chunk=16, stabilizers=4, local_len=4, positions="compact")
        return given.resolved({}, tokens)

    setup = Setup(model, None, "tiny", settings_for, {"h": tiny_heads(model, 8)})
    task = Task("words", lambda request: Example("", ""), "match", 2)
    return study.Study(setup, [task], ["locret"], [24], [150], 1, Path("unused"))


@pytest.fixture
def ids(look, monkeypatch) -> study.Prompt:
    """A prompt within the tiny backbone's vocabulary, which every figure then reads."""
    numbers = torch.randint(2, 97, (70,), generator=torch.Generator().manual_seed(1)).tolist()
    prompt = study.Prompt("numbers", numbers)
    monkeypatch.setattr(study.Study, "prompts", lambda self: iter([prompt]))
    return prompt


@pytest.mark.parametrize("name", [name for name, kind in FIGURES.items() if kind.source == "rows"])
def test_a_figure_of_rows_has_title_units_and_the_same_bytes_twice(name, tmp_path):
    function = getattr(results, name.replace("-", "_"))
    figure = function(rows())
    panels = [axis for axis in figure.axes if axis.get_title()]
    assert figure.get_suptitle() and panels and all(axis.get_xlabel() and axis.get_ylabel() for axis in panels)
    first = [path.read_bytes() for path in draw(name, rows(), tmp_path)]
    assert first == [path.read_bytes() for path in draw(name, rows(), tmp_path)]
    assert first[0].startswith(b"\x89PNG") and b"<svg" in first[1]
    with pytest.raises(ValueError, match=r"no row"):
        function([replace(ROW, score=None, error="X: y")])


def test_lines_differ_without_colour():
    from locret_kit.evals.figures.style import line

    assert len({(str(line(i)["linestyle"]), line(i)["marker"]) for i in range(40)}) == 40


@pytest.mark.parametrize("policies", [2, 8, 40])
def test_a_legend_of_any_length_stands_below_the_panels(policies):
    """It takes nothing of their height."""
    figure = results.score_budget([replace(row, policy=f"policy-{i}") for row in rows()[:2] for i in range(policies)])
    figure.draw_without_rendering()
    boxes = [axis.get_tightbbox() for axis in figure.axes]
    (legend,) = figure.legends
    assert legend.get_window_extent().y1 <= min(box.y0 for box in boxes)
    assert legend.get_window_extent().y0 >= 0
    assert all(axis.get_window_extent().height >= 1.5 * figure.dpi for axis in figure.axes)


def test_score_lines_show_the_means():
    figure = results.score_budget(rows())
    assert len([axis for axis in figure.axes if axis.get_title()]) == 2
    drawn = {bar.get_label(): bar.lines[0].get_ydata().tolist() for bar in figure.axes[0].containers}
    assert drawn == {"h2o": [0.5, 0.5], "$tova": [0.5, 0.5]}
    full = next(one for one in figure.axes[0].lines if one.get_label() == "full")
    assert set(full.get_ydata()) == {1.0}


def test_the_grid_has_a_row_for_each_depth_asked_for():
    """Where the needle really stands differs by length; that once gave every prompt a row of its own."""
    moved = [
        replace(ROW, sample=n, length=length, depth=depth + 0.001 * n + length / 1e7)
        for n, depth in enumerate((0.5, 0.25, 0.75))
        for length in (4096, 8192)
    ]
    axis = results.needle_grid(moved).axes[0]
    assert [label.get_text() for label in axis.get_yticklabels()] == ["25", "50", "75"]
    assert np.isfinite(axis.images[0].get_array()).all()


def test_a_panel_of_the_grid_has_its_own_lengths_alone():
    """Those of other panels once stood empty in it."""
    two = [replace(ROW, length=length, budget=budget) for length, budget in ((4096, 256), (16384, 512))]
    shown = [axis for axis in results.needle_grid(two).axes if axis.get_title()]
    assert [[label.get_text() for label in axis.get_xticklabels()] for axis in shown] == [["4K"], ["16K"]]


def test_four_needles_of_a_text_stand_at_their_own_depths():
    rows = [replace(ROW, task="questions", sample=i, depth=(i + 0.5) / 4, score=i / 4) for i in range(4)]
    axis = results.needle_grid(rows).axes[0]
    assert [label.get_text() for label in axis.get_yticklabels()] == ["12", "38", "62", "88"]
    assert axis.images[0].get_array()[:, 0].tolist() == [0, 0.25, 0.5, 0.75]


def test_the_peak_of_a_process_on_a_cpu_is_not_drawn():
    titles = [axis.get_title() for axis in results.cost(rows()).axes]
    assert "Peak memory" not in titles and "Cache buffers" in titles
    on_gpu = results.cost([replace(row, device="cuda:0") for row in rows()])
    assert "Peak memory" in [axis.get_title() for axis in on_gpu.axes]


def test_whiskers_are_wilson_s_where_scores_are_shares():
    (cell,) = results.summarize([replace(ROW, sample=i, score=1.0) for i in range(10)])
    assert np.allclose(results.whisker(cell), (1 - 0.722467, 0), atol=1e-5)  # tables of Wilson's interval: 10 of 10
    (cell,) = results.summarize([replace(ROW, sample=i, score=score) for i, score in enumerate((0.25, 0.75))])
    assert results.whisker(cell) == (0.25, 0.25)


def test_a_look_is_that_of_the_file(tmp_path):
    """A PDF of a paper's column: its size in points, no title, a legend within, and fonts that may be edited."""
    look = Look(formats=["pdf"], width=3.3, height=2.5, title="none", font=7)
    (path,) = draw("score-budget", rows(), tmp_path, look)
    written = path.read_bytes()
    box = [float(x) for x in re.search(rb"/MediaBox \[ (.*?) \]", written)[1].split()]
    assert written.startswith(b"%PDF") and box == [0, 0, 3.3 * 72, 2.5 * 72]
    assert b"/Type3" not in written and written == draw("score-budget", rows(), tmp_path, look)[0].read_bytes()
    figure = results.score_budget(rows())
    style.fit(figure, Look(width=3.3, title="Mine"))
    figure.draw_without_rendering()
    (legend,) = figure.legends
    assert figure.get_suptitle() == "Mine" and legend.get_window_extent().x0 >= 0
    assert figure.get_figwidth() == 3.3 and figure.get_figheight() < 3


def test_a_sweep_joins_runs_by_the_setting_in_which_they_differ(tmp_path):
    for stabilizers in (8, 16):
        folder = tmp_path / f"stabilizers={stabilizers}"
        folder.mkdir()
        full = replace(ROW, policy="full", heads="-", budget=0, score=1.0, stabilizers=stabilizers)
        mine = [replace(ROW, sample=i, score=i / 4 + stabilizers / 100, stabilizers=stabilizers) for i in range(2)]
        (folder / "rows.0.jsonl").write_text("".join(row.to_json() + "\n" for row in (full, *mine)))
    read = [read_rows(folder) for folder in sweep.runs_in(tmp_path)]
    (axis,) = sweep.sweep(sweep.Sweep("stabilizers", read)).axes
    drawn = {bar.get_label(): np.array(bar.lines[0].get_xydata()).tolist() for bar in axis.containers}
    assert drawn.keys() == {"full", "locret (h)"} and drawn["full"] == [[8, 1], [16, 1]]
    assert np.allclose(drawn["locret (h)"], [[8, 0.205], [16, 0.285]])
    assert main(["figure", "sweep", "x=stabilizers", f"out={tmp_path}", "formats=[svg]"]) == 0
    assert (tmp_path / "figures" / "sweep.svg").stat().st_size > 1000
    named = [[replace(row, kv_bits=bits) for row in rows] for bits, rows in zip((None, 4), read, strict=True)]
    (axis,) = sweep.sweep(sweep.Sweep("kv_bits", named)).axes
    assert [label.get_text() for label in axis.get_xticklabels()] == ["4", "none"]
    for x, said in (("stabiliser", "Did you mean 'stabilizers'"), ("chunk", "chunk is ")):
        with pytest.raises(ValueError, match=said):
            sweep.sweep(sweep.Sweep(x, read))


@given(st.lists(st.tuples(st.floats(0, 1), st.sampled_from([1, 2])), min_size=1, max_size=30))
def test_the_grid_counts_every_row_once(found):
    members = [replace(ROW, depth=depth, length=length, score=depth) for depth, length in found]
    starts = np.arange(10) / 10
    grid, count = results._grid(members, [1, 2], starts)
    assert count.sum() == len(found)
    assert np.isclose(np.nansum(grid * count), sum(depth for depth, _ in found))


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=40), st.integers(1, 9))
def test_running_mean(values, window):
    slow = [np.mean(values[max(0, i - window + 1) : i + 1]) for i in range(len(values))]
    assert np.allclose(curves.running_mean(np.array(values), window), slow, atol=1e-9)


def test_training_curves(tmp_path):
    lines = [
        "step,loss,recall,val/loss",
        *(f"{i},{5 / (i + 1):.4f},{i / 100},{'' if i % 20 else 1.0}" for i in range(60)),
    ]
    (tmp_path / "curves.csv").write_text("\n".join(lines) + "\n")
    steps, values = curves.read_columns(tmp_path / "curves.csv")["val/loss"]
    assert steps.tolist() == [0, 20, 40] and values.tolist() == [1, 1, 1]
    assert all(path.stat().st_size > 1000 for path in draw("training-curves", tmp_path, tmp_path))
    (tmp_path / "run").mkdir()
    (tmp_path / "curves.csv").rename(tmp_path / "heads.csv")
    (tmp_path / "run" / "heads").mkdir()
    (tmp_path / "heads.csv").rename(tmp_path / "run" / "heads" / "curves.csv")
    assert draw("training-curves", tmp_path / "run", tmp_path)  # locret-train writes it beside the heads
    with pytest.raises(FileNotFoundError, match=r"no curves\.csv"):
        draw("training-curves", tmp_path / "none", tmp_path)


def test_a_policy_with_a_part_replaced_is_the_policy_with_that_part():
    for text in ("roco", "ada-snapkv", "kvcrush(base=tova)", "locret", "merge-locret", "merge(base=h2o)"):
        assert replace(parse_policy(study.varied(text)), name="", source="") == replace(
            parse_policy(text), name="", source="", allocation=parse_policy(study.varied(text)).allocation
        )
    assert parse_policy(study.varied("roco", scope="")).scopes == ()
    assert study.varied("merge-locret", scope="sinks(4)") == (
        "score=cis(decay=0.0,lookahead=0) scope=sinks(4) allocation=uniform selection=top-k "
        "merge=nearest(metric=cosine,weight=score)"
    )


def test_unknown_figures_suggest_the_nearest(tmp_path):
    with pytest.raises(ValueError, match=r"score-budget"):
        draw("score-bugdet", [], tmp_path)
    with pytest.raises(ValueError, match=r"Did you mean 'retained'"):
        draw("retaind", [], tmp_path)


def test_figures_of_papers_say_where_they_went():
    assert set(PAPERS) == set(papers.FIGURES)
    for name in PAPERS:
        with pytest.raises(ValueError, match=rf"examples/paper_figures/draw\.py {name}"):
            find_figure(name)
        assert f"examples/paper_figures/draw.py {name} " in (EXAMPLES / "README.md").read_text(encoding="utf-8")


def test_the_script_of_the_examples_runs(tmp_path, capsys):
    """Its help lists every figure; an error is one line."""
    with pytest.raises(SystemExit, match="^0$"):
        papers.main(["--help"])
    listed = capsys.readouterr().out
    assert all(f"  {name} " in listed for name in papers.FIGURES)
    command = [sys.executable, EXAMPLES / "draw.py", "retained", f"out={tmp_path}"]
    failed = subprocess.run(command, capture_output=True, text=True)
    assert failed.returncode == 1 and failed.stderr.count("\n") == 1 and "draw.py: " in failed.stderr


def test_the_default_sweep_of_stabilizers_stays_below_the_budget(tmp_path, monkeypatch):
    """`stabilizers budgets=[128]` once failed on its own default."""
    for name in ("load_parts", "load_setup", "find_tasks", "run_config", "write_json"):
        monkeypatch.setattr(papers, name, lambda *args, **more: [])
    made = []
    monkeypatch.setattr(papers, "draw", lambda function, source, folder, name: made.append(source) or [])
    assert papers.main(["stabilizers", "budgets=[128]", f"out={tmp_path}", "ckpt=heads"]) == 0
    assert made[0].sweep == [0, 16, 64] and made[0].policies == ["locret"] and made[0].samples == 4
    assert papers.main(["stabilizers", "budgets=[512]", "--sweep", "5", "--layers", "1", f"out={tmp_path}"]) == 0
    assert made[1].sweep == [5.0] and made[1].layers == [1]


# ---- what is read off a backbone -----------------------------------------------------------------------------------


def dense_attention(look, prompt) -> dict[int, torch.Tensor]:
    """Attention ``[H, T, T]`` in float64 by layer, by the definition; mean over the group."""
    out: dict[int, torch.Tensor] = {}

    def see(layer, q_QTD, k_HTD, scaling):
        G, T = len(q_QTD) // len(k_HTD), q_QTD.shape[1]
        logit = q_QTD.double() @ k_HTD.repeat_interleave(G, 0).double().transpose(1, 2) * scaling
        p = logit.masked_fill(torch.ones(T, T).triu(1).bool(), float("-inf")).softmax(-1)
        out[layer] = p.view(len(k_HTD), G, T, T).mean(1)

    study.watch(look.setup.model, prompt.ids, see)
    return out


def test_weights_are_the_newest_queries_attention(look, ids):
    found, dense = attention.weights(look, ids), dense_attention(look, ids)
    assert sorted(found) == [0, 1, 2]
    for layer, weights_HT in found.items():
        assert np.allclose(weights_HT, dense[layer][:, -attention.WINDOW :].mean(1), atol=1e-5)
        assert np.allclose(weights_HT.sum(-1), 1, atol=1e-5)


def test_needed_is_the_smallest_share():
    weights = np.array([[0.5, 0.25, 0.125, 0.125], [0.97, 0.01, 0.01, 0.01]])
    assert attention.needed(weights, 0.75).tolist() == [0.5, 0.25]


def test_adaptive_allocation_never_has_the_larger_bound(look, ids):
    """Ada-KV, theorem 4; and the bound of the uniform one by brute force."""
    found = attention.weights(look, ids)
    uniform = attention.bounds(look, "score=window(32,1)", ids, found)
    adaptive = attention.bounds(look, "score=window(32,1) allocation=adaptive(1)", ids, found)
    for layer, weights_HT in found.items():
        best = np.sort(weights_HT, axis=-1)[:, -24:].sum()
        assert np.isclose(uniform[layer], len(weights_HT) - best, atol=1e-6)
        assert adaptive[layer] <= uniform[layer] + 1e-9


def test_sparsity_by_counting(look, ids):
    a_TT = dense_attention(look, ids)[2][1]
    found = attention.below(a_TT, 0.01)
    for i in (0, 1, 17, 69):
        assert np.isclose(found[i], sum(float(x) < 0.01 for x in a_TT[i, : i + 1]) / (i + 1))


def test_deviations_by_brute_force(look, ids):
    a_TT = dense_attention(look, ids)[1][0]
    found = attention.deviations(a_TT)
    for s, n in ((0, 1), (0, 70), (5, 12), (69, 1), (40, 30)):
        assert np.isclose(found[s, n - 1], np.std(a_TT[s : s + n, s].numpy()), atol=1e-7)
    assert np.isnan(found[69, 1])


@given(st.sets(st.integers(0, 20)), st.sets(st.integers(0, 20), min_size=1))
def test_overlap_is_jaccard(a, b):
    made = agreement.overlap(np.array(sorted(a), dtype=int), np.array(sorted(b)))
    assert made == len(a & b) / len(a | b)


def test_agreement_is_whole_where_the_score_is_fixed_at_entry(look, ids):
    """What a token's position decides, no eviction can change; accumulated attention can differ."""
    assert agreement.similarity(look, "recency", ids, 24) == 1.0
    assert 0.2 < agreement.similarity(look, "score=aas", ids, 24) <= 1.0
    with pytest.raises(ValueError, match=r"smaller chunk"):
        agreement.similarity(look, "recency", ids, 70)


def test_errors_are_none_without_evictions(look, ids):
    hidden, scores = sweeps.hidden_and_score_errors(look, "locret", 70, ids)
    assert set(hidden) == {0, 1, 2} and set(hidden.values()) == {0.0} == set(scores.values())
    hidden, scores = sweeps.hidden_and_score_errors(look, "locret", 24, ids)
    assert hidden[0] > 0 and scores[0] == 0.0 and scores[2] > 0  # the first layer's scores see no attention


def test_a_trace_holds_the_budget_and_nothing_of_the_future(look, ids):
    times, shares = patterns.trace(look, "locret", ids, 24, [0, 2], [0, 1])
    assert times[0] == 0 and times[-1] == 70 and shares.shape == (2, 2, 70, len(times) - 1)
    for i, done in enumerate(times[1:]):
        assert not shares[:, :, done:, i].any() and (shares[..., i].sum(-1) <= 24).all()


@pytest.mark.parametrize("name", [name for name in papers.FIGURES if name not in SWEEPS])
def test_a_figure_of_a_backbone_is_drawn(name, look, ids, tmp_path):
    policies = ["h2o", "nacl(proxies=5)"] if name != "retained" else ["locret"]
    one = replace(look, policies=policies, sweep=[0.3, 0.6])
    figure = papers.FIGURES[name].function(one)
    panels = [axis for axis in figure.axes if axis.get_title()] or figure.axes
    assert figure.get_suptitle() and all(axis.get_xlabel() and axis.get_ylabel() for axis in panels)
    assert all(path.stat().st_size > 1000 for path in style.draw(papers.FIGURES[name].function, one, tmp_path, name))


@pytest.mark.parametrize("name", SWEEPS)
def test_a_sweep_is_answered_once(name, look, ids, tmp_path, monkeypatch):
    """Rows made by the harness's runner are stood in for: what it is asked, and what is drawn of its answers."""
    asked = []

    def answer(plan):
        asked.append(plan)
        plan.out.mkdir(parents=True, exist_ok=True)
        made = [
            Row(
                task="words",
                haystack="-",
                length=150,
                budget=v.budget,
                policy=v.policy,
                heads=v.heads,
                sample=0,
                score=0.1 * (i % 9),
            )
            for i, v in enumerate(plan.variants)
        ]
        (plan.out / "rows.0.jsonl").write_text("".join(row.to_json() + "\n" for row in made))

    monkeypatch.setattr(study, "answer", answer)
    one = replace(look, policies=["locret"], sweep=[0, 8] if name == "stabilizers" else [0.0, 0.5], out=tmp_path)
    figure = papers.FIGURES[name].function(one)
    assert asked and figure.get_suptitle() and len(figure.axes[0].containers) == (2 if name == "scope-size" else 1)
    if name == "stabilizers":
        assert [plan.setup.settings_for(plan.variants[0], 9).stabilizers for plan in asked] == [0, 8]
    with pytest.raises(ValueError, match=r"sweep"):
        papers.FIGURES[name].function(replace(one, sweep=[99.5]))


def test_layers_and_heads_that_are_not_there(look):
    with pytest.raises(ValueError, match=r"layers=\[7\]"):
        replace(look, layers=[7]).shown_layers()
    with pytest.raises(ValueError, match=r"heads=\[2\]"):
        replace(look, heads=[0, 2]).shown_heads()
    with pytest.raises(ValueError, match=r"evicts nothing"):
        look.variant("full", 24)
