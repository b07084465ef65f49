"""Policies from outside of the kit, and what the grammar and a policy say of parameters that cannot be met."""

import io
import json
import sys
import warnings
from dataclasses import replace
from importlib.metadata import EntryPoint

import pytest
from checkout import forget_plugins
from policy_runs import held, run
from tiny_tokenizer import TEXT, save_tiny_backbone

import locret_kit.registry as plugins
from locret_kit.cli.eval_setup import CONFIG, EvalParts, run_config
from locret_kit.cli.infer import main
from locret_kit.config.eval_options import load_eval_config
from locret_kit.evals.engine import Row, appending
from locret_kit.files import write_json
from locret_kit.policies import Policy, registry
from locret_kit.policies.base import PolicyWarning, Score, TopK, best_of
from locret_kit.policies.grammar import describe_policies, parse_policy, spell

VATP = '''"""VATP, arXiv 2406.12335: attention times the L1 norm of the value. The file has no postponed annotations."""

from typing import ClassVar, Literal

from torch import Tensor

from locret_kit.policies.base import Slots, Weight
from locret_kit.policies.registry import part, register


@part("score", "NAME")
class Vatp(Weight):
    """``sum of a`` times ``|v|`` to a power."""

    power: float = 1.0
    most: float | None = None
    flag: bool = False
    size: int | float = 3
    kind: Literal["a", "b"] = "a"
    where: str = "x"
    statistics: ClassVar[frozenset[str]] = frozenset({"sum"})

    def score_slots(self, slots: Slots) -> Tensor:
        return slots.stats["sum"] * slots.values().float().abs().sum(-1) ** self.power


register("NAME", "VATP, arXiv 2406.12335", {"score": Vatp()}, names={"where": None})
'''


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    """Forget after a test whatever it registers."""
    forget_plugins(monkeypatch)


def written(folder, name: str, text: str = VATP) -> str:
    path = folder / f"{name.replace('-', '_')}.py"
    path.write_text(text.replace("NAME", name))
    return str(path)


def test_a_file_of_the_users_is_a_policy(tmp_path):
    path = written(tmp_path, "my-vatp")
    registry.load_plugin(path)
    registry.load_plugin(path)
    policy = parse_policy("my-vatp(power=2, most=none, flag=true, size=0.5, kind=b)")
    assert policy == parse_policy("score=my-vatp(2, none, true, 0.5, b)").__class__(
        policy.name, policy.score, source="VATP, arXiv 2406.12335"
    )
    assert spell(policy.score) == "my-vatp(power=2.0,most=None,flag=True,size=0.5,kind=b,where=x)"
    words = ["nan", "7", "true"]
    assert [parse_policy(f"score=my-vatp(where={word})").score.where for word in words] == words
    assert parse_policy("my-vatp(most=3)").score.most == 3.0 and parse_policy("my-vatp(size=7)").score.size == 7
    assert parse_policy(f"score={spell(policy.score)}").score == policy.score
    assert any(text.split()[0] == "my-vatp" for text in describe_policies())
    kept = held(run("my-vatp", budget=24))
    assert kept != held(run("score=aas", budget=24)) and all(len(head) == 28 for layer in kept for head in layer)


def test_rows_of_an_edited_file_are_not_continued(tmp_path):
    path, parts = written(tmp_path, "mine"), EvalParts("tiny", None, {}, {})
    config = load_eval_config(["tasks=[passkey]", f"out={tmp_path}", "model=tiny", f"plugin={path}"])
    write_json(tmp_path / CONFIG, run_config(config, parts))
    with appending(tmp_path / "rows.0.jsonl") as append:
        append(Row(task="passkey", haystack="-", length=1, budget=1, policy="mine", heads="-", sample=0))
    run_config(config, parts)
    written(tmp_path, "mine", VATP.replace("self.power", "3.0"))
    with pytest.raises(ValueError, match=r"plugin=.*mine.py of SHA-256 \w{16}, not \w{16}: choose another out"):
        run_config(config, parts)
    run_config(replace(config, plugin=None), parts)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("power=a", "policy=mine: power=a must be a number"),
        ("power=nan", "policy=mine: power=nan must be finite"),
        ("most=-inf", "policy=mine: most=-inf must be finite"),
        ("flag=7", "policy=mine: flag=7 must be true or false"),
        ("kind=c", "policy=mine: kind=c must be one of: a, b"),
        ("size=99999999999999999999", "does not fit into 64 bits"),
        ("where=y", "parameter 'where' is unknown"),
    ],
)
def test_its_parameters_are_checked_by_their_annotations(tmp_path, given, said):
    registry.load_plugin(written(tmp_path, "mine"))
    with pytest.raises(ValueError) as caught:
        parse_policy(f"mine({given})")
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import nowhere_at_all", "ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("def broken(:", "SyntaxError"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        (
            VATP.replace('@part("score", "NAME")', '@part("score", "cis")'),
            "score=cis is registered already, by locret_kit",
        ),
        (
            VATP.replace('"NAME"', '"h2o"').replace('@part("score", "h2o")', '@part("score", "q")'),
            "policy=h2o is registered",
        ),
    ],
)
def test_a_broken_file_is_one_line_that_names_it(tmp_path, text, said):
    path = written(tmp_path, "broken", text)
    with pytest.raises(ValueError) as caught:
        registry.load_plugin(path)
    assert str(caught.value).startswith(f"plugin={path!r}: ") and said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_command_runs_it(tmp_path, monkeypatch, capsys):
    """``locret-infer --plugin my_vatp.py --policy my-vatp``, and its error for a file that is not there."""
    model, path = str(save_tiny_backbone(tmp_path / "backbone")), written(tmp_path, "my-vatp")
    command = f"--model {model} --budget 32 --policy my-vatp(power=2) --report {tmp_path / 'report.json'}".split()
    for plugin, status in ((path, 0), (path + "x.py", 1)):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode())))
        assert main([*command, "--max-new-tokens", "3", "--plugin", plugin]) == status
    figures, said = json.loads((tmp_path / "report.json").read_text()), capsys.readouterr().err
    assert figures["policy"] == "my-vatp(power=2)" and figures["evictions"] > 0
    assert f"plugin='{path}x.py': FileNotFoundError" in said and "Traceback" not in said


class Spoilt(Score):
    """Scores by age, of which a function makes something else."""

    def __init__(self, spoil) -> None:
        self.spoil = spoil

    def score_slots(self, slots):
        return self.spoil(slots.positions.float())


class Lavish(TopK):
    """Keeps some slots more than it may, or fewer."""

    def __init__(self, more: int) -> None:
        object.__setattr__(self, "more", more)

    def select(self, scores_BHS, protected_BHS, valid_BHS, budgets_BH, slots):
        return best_of(scores_BHS, protected_BHS, valid_BHS, budgets_BH + self.more)


@pytest.mark.parametrize(
    "parts, said",
    [
        ({"score": Spoilt(lambda x: x / 0)}, "scores of Spoilt are NaN or infinite for [0-9]+ of 52 slots, they must be finite"),
        ({"score": Spoilt(lambda x: x.where(x != 5, float("nan")))}, "scores of Spoilt are NaN or infinite for 2 of 52 slots"),
        ({"score": Spoilt(lambda x: x[..., 1:])}, r"are torch.float32 \[1, 2, 25\], they must be floating point \[1, 2, 26\]"),
        ({"score": Spoilt(lambda x: x.int())}, "are torch.int32 .*, they must be floating point"),
        *(({"score": Spoilt(abs), "selection": Lavish(n)}, "Lavish and Uniform keep .* of the slots, they") for n in (-1, 1)),
    ],
)  # fmt: skip
def test_what_a_plugin_gives_is_checked(parts, said):
    """One line with the policy and the layer; nothing else would tell of it."""
    with pytest.raises(ValueError, match=rf"^policy='mine', layer 0: .*{said}"):
        run(Policy("mine", **parts))


def test_a_module_is_loaded_by_its_name(tmp_path, monkeypatch):
    """Its part is a dataclass of its own making."""
    plain = VATP.replace("class Vatp", "@dataclass(frozen=True)\nclass Vatp")
    written(tmp_path, "vatp_module", plain.replace("from typing", "from dataclasses import dataclass\nfrom typing", 1))
    monkeypatch.syspath_prepend(tmp_path)
    registry.load_plugin("vatp_module")
    assert parse_policy("vatp_module").score.power == 1.0


def test_a_package_brings_policies_by_an_entry_point(tmp_path, monkeypatch):
    def forget() -> None:
        registry._load.cache_clear()
        plugins.load_installed.cache_clear()

    written(tmp_path, "vatp-package")
    monkeypatch.syspath_prepend(tmp_path)
    found = [EntryPoint("vatp", "vatp_package", plugins.GROUP)]
    monkeypatch.setattr(plugins, "entry_points", lambda group: found if group == plugins.GROUP else [])
    forget()
    assert parse_policy("vatp-package").score.power == 1.0
    found.append(EntryPoint("bad", "no_such_package", plugins.GROUP))
    forget()
    with pytest.raises(ValueError, match=r"entry point bad = no_such_package of locret_kit.plugins: .*no_such_package"):
        parse_policy("h2o")
    found.clear()
    forget()
    assert parse_policy("h2o")


# ---- parameters that cannot be met ------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [17, 3000, 20000])
def test_deep_nesting_is_refused_at_once(depth):
    for text in ("kvcrush(base=" * depth, "kvcrush(base=" * depth + "h2o" + ")" * depth):
        with pytest.raises(ValueError, match=r"nested more than 16 deep") as caught:
            parse_policy(text)
        assert len(str(caught.value)) < 200
    assert parse_policy("kvcrush(base=" * 3 + "h2o(window=5)" + ")" * 3).scopes[0].size == 5


def test_many_blanks_are_refused_at_once():
    """A saved cache may come from elsewhere, and says its policy."""
    with pytest.raises(ValueError, match="must be name or name"):
        parse_policy("h2o" + " " * 10**6 + "x")
    assert parse_policy("h2o  (window=5)").scopes[0].size == 5


@pytest.mark.parametrize(
    ("policy", "budget", "said"),
    [
        ("streaming(sinks=1000)", 128, "Sinks(n=1000) asks for 1000 slots"),
        ("snapkv", 24, "Window(size=32) asks for 32 slots"),
        ("nacl(ratio=0.9)", 128, None),  # proxies are protected in half of what is not drawn
        ("nacl(ratio=0.9,protected=40)", 128, "asks for 40 slots, of which Sampled("),
        ("kvcrush(ratio=0.75)", 128, None),  # h2o's window is half of what representatives leave
        ("kvcrush(base=snapkv,ratio=0.9)", 128, "Window(size=32) asks for 32 slots, of which Representatives("),
        ("kvcrush(level=page)", 100, "has no room for a page: 0.25 of the budget is below 32 tokens"),
        ("nacl", 512, None),
    ],
)
def test_what_a_budget_has_no_room_for_is_said(policy, budget, said):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert parse_policy(policy).layer_budgets(budget, 3, 512, 16) == [budget] * 3
    told = [str(warning.message) for warning in caught if warning.category is PolicyWarning]
    assert len(told) == (said is not None)
    if said is not None:
        assert said in told[0] and f"policy={policy!r} at a budget of {budget} slots" in told[0] and "\n" not in told[0]
