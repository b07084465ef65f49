"""A server without keys answers its own names and its own pages; browsers' headers are written out here."""

from collections.abc import Iterator
from dataclasses import replace
from urllib.parse import urlsplit

import httpx
import pytest
from http_bodies import user
from read_texts import text_of
from served import KEYS, LIMITS, serving

NAMES = frozenset({"box.lan"})
OURS = ["localhost", "localhost:3000", "LOCALHOST", "127.0.0.1", "[::1]:80", "[0:0:0:0:0:0:0:1]", "box.lan:8000"]
THEIRS = [
    "rebind.evil.com", "127.0.0.1.evil.com", "localhost.evil.com:80", "evil.com:localhost", "localhost@evil.com", "10.0.0.5",
    "0.0.0.0", "[::2]", "localhost/", "a b", "", "box.lan.", "localhost:80:80", "[localhost]", "*",
    "[fe80::1%eth0]", "[abc]", "user:pw@localhost",
]  # fmt: skip
FOREIGN = [
    {"origin": "https://evil.com"}, {"origin": "null"}, {"origin": ""}, {"origin": "http://localhost:1"},
    {"origin": "http://box.lan"}, {"sec-fetch-site": "cross-site"}, {"sec-fetch-site": "same-site"}, {"sec-fetch-site": ""},
    {"sec-fetch-site": "cross-site", "origin": "OWN"},
]  # fmt: skip
OWN = [
    {}, {"origin": "OWN"}, {"sec-fetch-site": "same-origin", "origin": "OWN"}, {"sec-fetch-site": "none"},
    {"sec-fetch-site": "same-origin", "origin": "https://behind.a.proxy"},
]  # fmt: skip
FORM = {"file": ("a.txt", text_of(40).encode())}


@pytest.fixture(scope="module")
def url(engine) -> Iterator[str]:
    # Documents that are deleted while they are read leave a moment later.
    with serving(engine, replace(LIMITS, documents=99), keys=(), hosts=NAMES) as address:
        yield address


def refused(answer: httpx.Response) -> bool:
    if answer.status_code != 403:
        return False
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"} and error["type"] == "permission_error"
    assert "\n" not in error["message"] and len(error["message"]) < 400
    return True


def headers_of(url: str, headers: dict[str, str]) -> dict[str, str]:
    return {name: url if value == "OWN" else value for name, value in headers.items()}


@pytest.mark.parametrize("host", OURS)
def test_own_names(url, host):
    for path in ("/v1/models", "/v1/documents", "/metrics", "/", "/health"):
        assert httpx.get(url + path, headers={"host": host}).status_code == 200
    body = {"messages": user("a"), "max_tokens": 1}
    assert httpx.post(f"{url}/v1/chat/completions", json=body, headers={"host": host}, timeout=300).status_code == 200


@pytest.mark.parametrize("host", THEIRS)
def test_foreign_names(url, host):
    """After DNS rebinding a page is of the same origin as what it asks."""
    page = {"host": host, "origin": f"http://{host}", "sec-fetch-site": "same-origin"}
    for path in ("/v1/models", "/v1/documents", "/v1/documents/x/kept", "/metrics", "/", "/page.js", "/no"):
        assert refused(httpx.get(url + path, headers=page)), path
    assert refused(httpx.post(f"{url}/v1/documents", files=FORM, headers=page))
    assert refused(httpx.delete(f"{url}/v1/documents/x", headers=page))
    assert refused(httpx.post(f"{url}/v1/chat/completions", json={"messages": user("a")}, headers=page))
    assert httpx.get(f"{url}/health", headers=page).status_code == 200
    assert httpx.get(f"{url}/v1/documents").json()["data"] == []


@pytest.mark.parametrize("headers", FOREIGN)
def test_pages_of_another_origin_change_nothing(url, headers):
    page = headers_of(url, headers)
    name = httpx.post(f"{url}/v1/documents", files=FORM, timeout=300).json()["id"]
    assert refused(httpx.post(f"{url}/v1/documents", files=FORM, headers=page))
    assert refused(httpx.post(f"{url}/v1/chat/completions", json={"messages": user("a")}, headers=page))
    assert refused(httpx.delete(f"{url}/v1/documents/{name}", headers=page))
    for method in ("PUT", "PATCH", "TRACE", "ANY"):
        assert refused(httpx.request(method, f"{url}/v1/documents/{name}", headers=page))
    assert [held["id"] for held in httpx.get(f"{url}/v1/documents").json()["data"]] == [name]
    seen = httpx.get(f"{url}/v1/documents/{name}", headers=page)  # a link; a page cannot read it
    assert seen.status_code == 200 and not [name for name in seen.headers if name.startswith("access-control")]
    assert httpx.options(f"{url}/v1/documents", headers=page).status_code == 405
    assert httpx.delete(f"{url}/v1/documents/{name}").status_code == 200


@pytest.mark.parametrize("headers", OWN)
def test_own_pages_and_programs(url, headers):
    page = headers_of(url, headers)
    held = httpx.post(f"{url}/v1/documents", files=FORM, headers=page, timeout=300)
    assert held.status_code == 202
    assert httpx.delete(f"{url}/v1/documents/{held.json()['id']}", headers=page).status_code == 200


def test_the_address_at_which_a_request_arrives_is_a_name(engine):
    """Of a server on all interfaces; loopback has more than one address."""
    with serving(engine, keys=(), address="0.0.0.0") as url:
        port = urlsplit(url).port
        for connected, host, passes in (("127.0.0.2", "127.0.0.2", True), ("127.0.0.2", "127.0.0.3", False)):
            answer = httpx.get(f"http://{connected}:{port}/v1/models", headers={"host": f"{host}:{port}"})
            assert refused(answer) is not passes


def test_any_name_where_that_is_asked_for(engine):
    with serving(engine, keys=(), hosts=frozenset({"*"})) as url:
        assert httpx.get(f"{url}/v1/models", headers={"host": "evil.com"}).status_code == 200
        assert refused(httpx.post(f"{url}/v1/documents", files=FORM, headers={"origin": "https://evil.com"}))


def test_with_keys_names_do_not_matter(engine):
    """A page has no key; programs that run in browsers, such as extensions, may have one."""
    page = {"host": "chat.example.org", "origin": "null", "sec-fetch-site": "cross-site"}
    with serving(engine) as url:
        assert httpx.get(f"{url}/v1/models", headers=page).status_code == 401
        assert httpx.post(f"{url}/v1/documents", files=FORM, headers=page).status_code == 401
        answer = httpx.get(f"{url}/v1/models", headers=page | {"authorization": f"Bearer {KEYS[0]}"})
        assert answer.status_code == 200
