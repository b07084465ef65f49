"""A server without keys answers its own names and its own pages; browsers' headers are written out here."""

from urllib.parse import urlsplit

import httpx
import pytest
from http_bodies import user
from read_texts import text_of
from served import KEYS, serving

from locret_kit.serving.process import refusal

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
    {"sec-fetch-site": "cross-site", "origin": "http://localhost:80"},
]  # fmt: skip
OWN = [
    {}, {"origin": "http://localhost:80"}, {"sec-fetch-site": "same-origin", "origin": "http://localhost:80"},
    {"sec-fetch-site": "none"}, {"sec-fetch-site": "same-origin", "origin": "https://behind.a.proxy"},
]  # fmt: skip
CHANGING = ("POST", "DELETE", "PUT", "PATCH", "TRACE", "ANY")
FORM = {"file": ("a.txt", text_of(40).encode())}


def refused(method: str, host: str, **headers: str) -> bool:
    """Whether a request of these headers is refused, in a line."""
    named = [(name.encode(), value.encode()) for name, value in {"host": host, **headers}.items()]
    why = refusal({"type": "http", "method": method, "server": ("127.0.0.1", 80), "headers": named}, NAMES)
    assert "\n" not in why and len(why) < 400
    return bool(why)


@pytest.mark.parametrize("host", [*OURS, *THEIRS])
def test_names(host):
    """A page after DNS rebinding is of the same origin as what it asks."""
    page = {"origin": f"http://{host}", "sec-fetch-site": "same-origin"}
    assert {refused(method, host, **page) for method in ("GET", *CHANGING)} == {host in THEIRS}


@pytest.mark.parametrize("headers", [*FOREIGN, *OWN])
def test_pages_of_another_origin_change_nothing(headers):
    assert {refused(method, "localhost:80", **headers) for method in CHANGING} == {headers in FOREIGN}
    assert not refused("GET", "localhost:80", **headers)  # a link; a page cannot read it


def test_routes_of_a_server_without_keys(engine):
    foreign, cross = {"host": "evil.com"}, {"sec-fetch-site": "cross-site"}
    with serving(engine, keys=(), hosts=NAMES) as url:
        for path in ("/v1/models", "/v1/documents", "/v1/documents/x/kept", "/metrics", "/", "/page.js", "/no"):
            error = httpx.get(url + path, headers=foreign)
            assert error.status_code == 403 and error.json()["error"]["type"] == "permission_error", path
            assert httpx.get(url + path, headers={"host": "box.lan"}).status_code in (200, 404)
        assert httpx.get(f"{url}/health", headers=foreign).status_code == 200
        body = {"messages": user("a"), "max_tokens": 1}
        for headers, status in ((foreign, 403), (cross, 403), ({"host": "box.lan"}, 200)):
            answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=300)
            assert answer.status_code == status
        name = httpx.post(f"{url}/v1/documents", files=FORM, timeout=300).json()["id"]
        for headers in (foreign, cross):
            assert httpx.post(f"{url}/v1/documents", files=FORM, headers=headers).status_code == 403
            assert httpx.delete(f"{url}/v1/documents/{name}", headers=headers).status_code == 403
        assert [one["id"] for one in httpx.get(f"{url}/v1/documents").json()["data"]] == [name]
        seen = httpx.get(f"{url}/v1/documents/{name}", headers=cross)
        assert seen.status_code == 200 and not [name for name in seen.headers if name.startswith("access-control")]
        assert httpx.options(f"{url}/v1/documents", headers=cross).status_code == 405
        assert httpx.delete(f"{url}/v1/documents/{name}").status_code == 200


def test_the_address_at_which_a_request_arrives_is_a_name(engine):
    """Of a server on all interfaces; loopback has more than one address."""
    with serving(engine, keys=(), address="0.0.0.0") as url:
        port = urlsplit(url).port
        for connected, host, status in (("127.0.0.2", "127.0.0.2", 200), ("127.0.0.2", "127.0.0.3", 403)):
            answer = httpx.get(f"http://{connected}:{port}/v1/models", headers={"host": f"{host}:{port}"})
            assert answer.status_code == status


def test_any_name_where_that_is_asked_for(engine):
    with serving(engine, keys=(), hosts=frozenset({"*"})) as url:
        assert httpx.get(f"{url}/v1/models", headers={"host": "evil.com"}).status_code == 200
        page = {"origin": "https://evil.com"}
        assert httpx.post(f"{url}/v1/documents", files=FORM, headers=page).status_code == 403


def test_with_keys_names_do_not_matter(engine):
    """A page has no key; programs that run in browsers, such as extensions, may have one."""
    page = {"host": "chat.example.org", "origin": "null", "sec-fetch-site": "cross-site"}
    with serving(engine) as url:
        assert httpx.get(f"{url}/v1/models", headers=page).status_code == 401
        assert httpx.post(f"{url}/v1/documents", files=FORM, headers=page).status_code == 401
        answer = httpx.get(f"{url}/v1/models", headers=page | {"authorization": f"Bearer {KEYS[0]}"})
        assert answer.status_code == 200
