"""An engine, a server over it, and OpenAI's client: one of each for a file."""

import openai
import pytest
from served import KEYS, running_engine, serving


@pytest.fixture(scope="module")
def engine():
    with running_engine() as made:
        yield made


@pytest.fixture(scope="module")
def url(engine):
    with serving(engine) as address:
        yield address


@pytest.fixture
def claude(url):
    import anthropic  # 3 seconds of a processor

    with anthropic.Anthropic(base_url=url, api_key=KEYS[0], max_retries=0) as made:
        yield made


@pytest.fixture
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEYS[0], max_retries=0) as made:
        yield made
