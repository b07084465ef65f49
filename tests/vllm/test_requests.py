"""Requests beside one another: with settings of their own, in pieces of any size, preempted and aborted."""

import pytest
import tiny
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

SETTINGS = dict(budget=96, chunk=32, stabilizers=8, local_len=16, positions="compact")
POLICIES = ("knorm", "snapkv", "h2o", "lagkv")


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """An engine, and the model as the kit runs it."""
    folder = tmp_path_factory.mktemp("model")
    model = tiny.make(folder, "llama")
    section = {**SETTINGS, "policy": POLICIES[0], "policies": list(POLICIES[1:])}
    with tiny.started(folder, section, max_num_batched_tokens=2048) as llm:
        yield llm, model


def test_each_request_has_a_budget_and_a_policy_of_its_own(served):
    llm, model = served
    ids = tiny.prompts([300, 400, 500, 310])
    own = [{}, {"budget": 48}, {"policy": "snapkv", "budget": 64}, {"policy": "h2o"}]
    plain = {**SETTINGS, "policy": "knorm"}
    wanted = [tiny.kit(model, one, 40, **plain | mine) for one, mine in zip(ids, own, strict=True)]
    prompts = [{"prompt_token_ids": one} for one in ids]
    answers = llm.generate(prompts, [tiny.params(40, **mine) for mine in own], use_tqdm=False)
    assert [list(answer.outputs[0].token_ids) for answer in answers] == wanted


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({"budget": 97}, "budget=97 must be an integer from 1 to 96"),
        ({"budget": -3}, "budget=-3 must be an integer"),
        ({"budget": float("inf")}, "budget=inf must be an integer"),
        ({"policy": ["h2o"]}, r"policy=\"\['h2o'\]\" is unknown"),
        ({"budget": 8}, "stabilizers=8 must be below budget=8"),
        ({"policy": "tova"}, "policy='tova' is unknown. Known: knorm, snapkv, h2o"),
    ],
)
def test_what_a_request_cannot_have_is_refused(served, own, said):
    with pytest.raises(VLLMValidationError, match=said):
        tiny.generate(served[0], tiny.prompts([20]), 1, **own)


def test_a_seed_is_refused_on_a_cpu(served):
    with pytest.raises(VLLMValidationError, match=r"seed=1: vLLM .* fails at seeds"):
        served[0].generate([{"prompt_token_ids": [5]}], SamplingParams(seed=1, detokenize=False), use_tqdm=False)


@pytest.mark.parametrize("tokens", [64, 512, 2048])
def test_how_a_prompt_was_cut_does_not_matter(served, tokens, monkeypatch):
    """Six requests at once, whose pieces depend on the tokens of a step."""
    llm, model = served
    ids = tiny.prompts([250, 300, 420, 513, 600, 640])
    monkeypatch.setattr(tiny.scheduler(llm), "max_num_scheduled_tokens", tokens)
    wanted = [tiny.kit(model, one, 24, policy="lagkv", **SETTINGS) for one in ids]
    assert tiny.generate(llm, ids, 24, policy="lagkv") == wanted


def test_requests_go_on_where_they_are_preempted_and_others_aborted(served, monkeypatch):
    llm, model = served
    engine, scheduler = llm.llm_engine, tiny.scheduler(llm)
    monkeypatch.setattr(scheduler, "max_num_scheduled_tokens", 48)
    ids, answers, preempted = tiny.prompts([640, 300, 400]), {}, 0
    wanted = [tiny.kit(model, one, 60, policy="h2o", **SETTINGS) for one in ids[:2]]
    for number, one in enumerate(ids):
        engine.add_request(str(number), {"prompt_token_ids": one}, tiny.params(60, policy="h2o"))
    for step in range(1, 1000):
        for answer in engine.step():
            answers[answer.request_id] = list(answer.outputs[0].token_ids)
        if step in (9, 45):  # within the prompt, and while decoding
            request = next(request for request in scheduler.running if request.request_id.startswith("0"))
            scheduler.running.remove(request)
            scheduler._preempt_request(request, 0.0)
            preempted += 1
        if step == 40:  # while the others go on
            engine.abort_request(["2"])
        if not engine.has_unfinished_requests():
            break
    assert preempted == 2 and 0 < len(answers["2"]) < 60
    assert [answers["0"], answers["1"]] == wanted and tiny.free_pages(llm) == scheduler.kv_cache_config.num_blocks - 1
