"""Settings of a run: what they refuse, and what they come to."""

import numpy as np
import pytest

from locret_kit.cache.due import Schedule
from locret_kit.settings import RunSettings


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"budget": 0}, "budget=0 must be at least 1 slot (at most 2147483647), or with a point a share of the prompt"),
        ({"budget": True}, "budget=True must be"),
        ({"budget": "512"}, "at most 1.0: '512' is a text"),
        ({"kv_bits": "4"}, "kv_bits=4 must be one of: 8, 4, 2: '4' is a text"),
        ({"one_shot": "true"}, "one_shot=true must be true or false: 'true' is a text"),
        ({"chunk": "x"}, "chunk=x must be an integer, at least 1"),
        ({"positions": "clipt"}, "positions='clipt' must be compact, original, clipped or clipped(SPAN)"),
        *(({"positions": text}, "compact, original, clipped") for text in ("clipped(-1)", "compact(4)", "clipped(x)")),
        ({"positions": "clipped(99999999999999999999)"}, "the span must be at most 2147483647"),
        ({"one_shot": 1}, "one_shot=1 must be true or false"),
        ({"chunck": 1}, "unknown setting 'chunck'. Did you mean 'chunk'?"),
        ({"chunk": 10**5000}, "chunk=(an integer of thousands of digits) must be"),
    ],
)
def test_errors(given, said):
    with pytest.raises(ValueError) as caught:
        RunSettings.of(given)
    assert said in str(caught.value)


def test_numbers_of_numpy_are_numbers():
    settings = RunSettings.of({"budget": np.int64(512), "chunk": np.int32(64), "seed": np.uint8(3)})
    assert settings == RunSettings.of({"budget": 512, "chunk": 64, "seed": 3}) and type(settings.budget) is int
    assert RunSettings.of({"budget": np.float32(0.5)}) == RunSettings.of({"budget": 0.5})


def test_published_settings_are_scaled_to_the_budget():
    published = {"budget": 1000, "chunk": 300, "stabilizers": 500, "local_len": 100, "positions": "compact"}
    half, double = (RunSettings(budget=b).resolved(published, 9000) for b in (500, 2000))
    assert (half.chunk, half.stabilizers, half.local_len, half.positions) == (300, 250, 50, "compact")
    assert (double.stabilizers, double.local_len) == (1000, 100)
    assert RunSettings().resolved(dict.fromkeys(published), 9) == RunSettings().resolved({}, 9)
    assert RunSettings().resolved({}, None).budget == 1024


def test_a_share_of_the_prompt():
    for budget, slots in ((0.1, 900), (0.69, 6210), (1.0, 9000), (0.00001, 1)):
        one = RunSettings(budget=budget).resolved({}, 9000)
        assert (one.budget, one.share) == (slots, budget)
        assert one.resolved({"budget": 7}, 9000) == one
    with pytest.raises(ValueError, match=r"budget=0\.1 is a share of the prompt: pass prompt_length="):
        RunSettings(budget=0.1).resolved({}, None)


def test_one_shot_has_the_prompt_as_its_chunk():
    one = RunSettings(one_shot=True, chunk=7, stabilizers=3).resolved({}, 90)
    assert (one.chunk, one.stabilizers, one.local_len) == (90, 0, 0)
    assert Schedule.of(one, 90).piece(0) == 90
    with pytest.raises(ValueError, match="one_shot=True needs prompt_length"):
        RunSettings(one_shot=True).resolved({}, None)
