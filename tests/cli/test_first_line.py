"""The one line of an error that a command reports."""

from typing import Annotated

import pytest
from pydantic import BaseModel, Field, ValidationError, model_validator

from locret_kit.naming import first_line


class Inner(BaseModel):
    size: Annotated[int, Field(ge=1)] = 1
    names: list[str] = []


class Outer(BaseModel):
    inner: Inner = Inner()
    most: int = 9

    @model_validator(mode="after")
    def fits(self):
        if self.inner.size > self.most:
            raise ValueError(f"size={self.inner.size} must be at most {self.most}\nsee the page")
        return self


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"inner": {"size": 0}}, "inner.size=0: Input should be greater than or equal to 1"),
        ({"inner": {"names": [1]}}, "inner.names.0=1: Input should be a valid string"),
        ({"inner": {"size": [3]}}, "inner.size: Input should be a valid integer"),
        ({"inner": {"size": 10}}, "Outer: size=10 must be at most 9"),
        ({"inner": {"size": 0}, "most": "x"}, "inner.size=0: Input should be greater than or equal to 1"),
    ],
)
def test_of_pydantics_errors_the_field_and_the_reason(given, line):
    with pytest.raises(ValidationError) as refused:
        Outer(**given)
    assert first_line(refused.value) == line


def test_others_say_their_first_line_or_their_kind():
    assert first_line(ValueError("a\nb")) == "a" and first_line(KeyError()) == "KeyError"
    assert first_line(FileNotFoundError(2, "No such file", "heads.pt")) == "heads.pt: No such file"
