"""The page at ``/`` in a browser, against a real server."""

import re
from dataclasses import replace

import httpx
import pytest
from browser import BROWSER, BROWSERS, browsing
from families import chatml
from http_bodies import bearer, chat, user
from read_texts import text_of
from served import KEYS, LIMITS, dictate, held, serving, with_template

from locret_kit.serving.request import Busy, Stopping

pytestmark = pytest.mark.skipif(BROWSER is None, reason=f"none of {', '.join(BROWSERS)} to look with")
EVIL = "<img src=x onerror=document.title='gone'>"
TEXT = f"{EVIL} {text_of(400)}"
SAID = "turns().at(-1).content"
"""The newest answer as it was written."""
LAST = "document.querySelector('.turn.assistant:last-child .figures')"


@pytest.fixture(scope="module")
def url(engine):
    """Address of a server that sends a comment of waiting every 10 ms."""
    with serving(engine, silence=0.01) as address:
        yield address


@pytest.fixture(scope="module")
def tab(url, tmp_path_factory):
    """A tab in which the key is given already."""
    with browsing(tmp_path_factory.mktemp("browser")) as tab:
        tab.open(url)
        tab.wait("document.querySelector('#key-dialog').open")
        assert "API key" in tab.text("#key-says") and "missing or wrong" in tab.text("#key-says")
        tab.type("wrong")
        tab.press("Enter")
        tab.wait("document.querySelector('#key-dialog').open && document.querySelector('#key').value === 'wrong'")
        tab.evaluate("document.querySelector('#key').select()")
        tab.type(KEYS[0])
        tab.press("Enter")
        tab.wait("document.querySelector('#model').textContent === 'tiny'")
        assert [key in tab.evaluate("JSON.stringify(localStorage) + document.cookie") for key in KEYS] == [False, False]
        assert all("401" in line for line in tab.said)  # the browser's own lines on the keys that were refused
        tab.said.clear()
        yield tab


def opened(tab, url: str) -> None:
    """Open the page without earlier conversations, and wait until it knows the server."""
    tab.evaluate("location.protocol === 'http:' && sessionStorage.removeItem('locret-conversations')")
    tab.open(url)
    tab.wait("document.querySelector('#model').textContent === 'tiny'")


def ask(tab, question: str) -> str:
    """The figures under the answer to a question."""
    before = tab.evaluate("document.querySelectorAll('.turn').length")
    tab.click("#question")
    tab.type(question)
    tab.press("Enter")
    tab.wait(f"document.querySelectorAll('.turn').length > {before}")
    return tab.wait(
        f"document.querySelector('#stop').hidden && ({LAST}?.textContent ?? document.querySelector('#status').textContent)"
    )


def test_a_document_is_read_asked_and_shown(tab, url, engine, tmp_path):
    path = tmp_path / f"{EVIL}.txt".replace("/", "")
    path.write_text(TEXT)
    tab.evaluate("document.querySelector('#budget').value = 97")
    tab.choose("#file", path)
    assert "budget=97 must be at most 96" in tab.wait("document.querySelector('#notice').textContent")
    tab.said.clear()
    tab.evaluate("document.querySelector('#budget').value = 64")
    with held(engine, 3):
        tab.choose("#file", path)
        bar = "document.querySelector('#documents progress')"
        tab.wait(f"0 < {bar}?.value && {bar}.value < {bar}.max")
    tab.wait("document.querySelector('#title').textContent.includes('.txt')")
    [document] = httpx.get(f"{url}/v1/documents", headers=bearer()).json()["data"]
    assert tab.text("#title") == path.name
    says = tab.text("#documents li:last-child small")
    assert f"{document['total_tokens']:,} tokens" in says and f"{document['bytes'] / 1024:.1f} KiB of memory" in says

    tab.evaluate("document.querySelector('#max').value = 12")
    figures = ask(tab, "Who came in?")
    messages = user("Who came in?")
    asked = {"document_id": document["id"], "max_tokens": 12}
    alone = chat(url, messages, **asked).json()
    said, usage = alone["choices"][0]["message"]["content"], alone["usage"]
    assert tab.evaluate(SAID) == said and len(said) > 3
    assert f"{usage['prompt_tokens']:,} tokens in" in figures and f"{usage['completion_tokens']} out" in figures
    assert f"{usage['locret']['kept_rows']} rows kept" in figures and usage["locret"]["kept_rows"] < 96
    assert f"({usage['prompt_tokens_details']['cached_tokens']:,} cached)" in figures
    passages = chat(url, messages, **asked, evidence=True).json()["choices"][0]["evidence"]
    shown = tab.evaluate("[...document.querySelectorAll('.evidence li')].map((item) => item.lastChild.textContent)")
    assert shown == [passage["text"].strip() for passage in passages] != []

    ask(tab, f"And {EVIL}?")
    messages += [{"role": "assistant", "content": said}, *user(f"And {EVIL}?")]
    second = chat(url, messages, **asked).json()["choices"][0]["message"]["content"]
    assert tab.evaluate(SAID) == second

    tab.click("#documents li:last-child .show")
    tab.wait("document.querySelector('#kept').open")
    kept = httpx.get(f"{url}/v1/documents/{document['id']}/kept?limit=4000", headers=bearer()).json()
    assert tab.text("#text") == "".join(kept["texts"][:1000]) and EVIL in tab.text("#text")
    shares = tab.evaluate(
        "[...document.querySelectorAll('#text span')].map((s) => [s.textContent, s.style.getPropertyValue('--share')])"
    )
    assert len({share for _, share in shares}) > 2
    tab.click("#next")
    tab.wait("document.querySelector('#place').textContent.startsWith('tokens 1,001 to')")
    assert tab.text("#text") == "".join(kept["texts"][1000:]) != ""
    tab.press("Escape")
    tab.wait("!document.querySelector('#kept').open")

    assert tab.evaluate("document.title") == "locret-serve" and tab.evaluate("document.images.length") == 0
    assert tab.said == []
    tab.click("#documents li:last-child .delete")
    tab.wait("document.querySelectorAll('#documents li').length === 1")
    assert httpx.get(f"{url}/v1/documents", headers=bearer()).json()["data"] == []
    assert tab.text("#title") == "No document"
    tab.evaluate("document.querySelector('#budget').value = ''")
    (tmp_path / "short.txt").write_text("Hi.")
    tab.choose("#file", tmp_path / "short.txt")
    tab.wait("document.querySelector('#title').textContent === 'short.txt'")
    assert tab.text("#documents li:last-child small").endswith("tokens, read with each question")
    tab.click("#documents li:last-child .delete")
    tab.wait("document.querySelectorAll('#documents li').length === 1")


def test_stop_keeps_what_was_written(tab, url, engine):
    question = text_of(40)
    whole = chat(url, user(question), max_tokens=64).json()["choices"][0]["message"]["content"]
    opened(tab, url)
    with held(engine, 20):
        tab.evaluate("document.querySelector('#max').value = 64")
        tab.click("#question")
        tab.type(question)
        tab.click("#send")
        tab.wait("turns().at(-1)?.role === 'assistant' && turns().at(-1).content.length > 2")
        assert tab.evaluate("document.activeElement.id") == "stop"
        tab.press("Enter")
        assert tab.wait(f"{LAST}?.textContent") == "stopped"
        said = tab.evaluate(SAID)
        assert whole.startswith(said) and 2 < len(said) < len(whole)
    tab.wait("document.querySelector('#stop').hidden && document.activeElement.id === 'question'")
    assert tab.said == []


def test_a_thought_is_folded(tab, url, engine, monkeypatch):
    """Also where the limit ends it: then no answer is there, and the page says what to do."""
    tokenizer = with_template(monkeypatch, engine, chatml("<think></think>", "<think>\n"))
    ids = dictate(monkeypatch, tokenizer, "The rope is wet.</think>It is 7 m.")
    opened(tab, url)
    tab.evaluate(f"document.querySelector('#max').value = {len(ids)}")
    ask(tab, "How deep?")
    assert tab.text(".turn.assistant .content") == "It is 7 m."
    assert tab.text(".thought summary") == "Thought \u00b7 4 words"
    assert not tab.evaluate("document.querySelector('.thought').open")
    tab.click(".thought summary")
    assert tab.text(".thought div") == "The rope is wet."
    tab.evaluate("document.querySelector('#max').value = 3")
    assert "its limit ended the thought: raise it" in ask(tab, "And here?")


def test_markdown_becomes_elements_and_html_stays_text(tab, url, engine, monkeypatch):
    """An answer's Markdown is shown as such; what would be markup, a script or an address of another kind is text."""
    opened(tab, url)
    shown = []
    for answer, selectors in (
        ("**Two** `rope`s:\n\n- one\n- two", ("strong", "li:last-child", "code")),
        ("```python\nx = '<b>'\n```", ("pre code",)),
        ("[site](https://example.org)", ("a",)),
        ("[here](javascript:alert(1))", ("p",)),
        (f"See {EVIL}", ("p",)),
    ):
        ids = dictate(monkeypatch, engine.tokenizer, answer)
        tab.evaluate(f"document.querySelector('#max').value = {len(ids)}")
        ask(tab, "How many?")
        assert tab.evaluate(SAID) == answer
        shown += [tab.text(f".turn:last-child .content {selector}") for selector in selectors]
    assert shown == ["Two", "two", "rope", "x = '<b>'", "site", "[here](javascript:alert(1))", f"See {EVIL}"]
    assert tab.evaluate("[...document.querySelectorAll('.content a')].map((a) => a.href)") == ["https://example.org/"]
    assert tab.evaluate("document.images.length") == 0 and tab.evaluate("document.title") == "locret-serve"
    said = tab.evaluate(SAID)
    tab.open(url)  # a reload
    tab.wait(
        "document.querySelector('#model').textContent === 'tiny' && document.querySelectorAll('.turn').length === 10"
    )
    assert tab.evaluate(SAID) == said == answer and tab.said == []


def test_errors_are_said_in_words(tab, url, engine, monkeypatch, tmp_path):
    opened(tab, url)
    tab.evaluate("document.querySelector('#max').value = -2")
    assert ask(tab, "Who?") == "max_tokens=-2 must be at least -1"
    assert tab.text(".turn .bad") == "max_tokens=-2 must be at least -1"
    assert tab.evaluate("document.querySelector('#question').value") == "Who?"  # to be sent again

    def full(job):
        raise Busy(7)

    monkeypatch.setattr(engine, "submit", full)
    tab.evaluate("document.querySelector('#max').value = ''")
    tab.click("#send")
    tab.wait("document.querySelector('#status').textContent.includes('Try again in 7 s.')")
    large = tmp_path / "large.txt"
    large.write_text("x" * (LIMITS.upload_bytes + 1))
    tab.choose("#file", large)
    assert "large.txt: That is too large" in tab.wait("document.querySelector('#notice').textContent")
    tab.said.clear()
    with serving(None) as loading:
        tab.open(loading)
        assert tab.wait("document.querySelector('#notice').textContent") == "The model is being loaded."
    tab.open("about:blank")
    tab.said.clear()


def test_a_server_that_has_failed_is_not_said_to_load(tab, url, engine, monkeypatch):
    opened(tab, url)

    def ended(job):
        raise Stopping("the engine has ended with an error")

    monkeypatch.setattr(engine, "submit", ended)
    assert ask(tab, "Who?") == "the engine has ended with an error"
    monkeypatch.setattr(engine, "failed", True)
    tab.open(url)
    said = tab.wait("document.querySelector('#notice').textContent")
    assert said == "The server has ended with an error, which its log names."
    tab.open("about:blank")
    tab.said.clear()


def test_each_file_that_is_refused_is_named(tab, engine, tmp_path):
    names = ["t.csv", "t.json", "t.py"]
    for name in ("first.txt", *names):
        (tmp_path / name).write_text(text_of(200))
    with serving(engine, replace(LIMITS, documents=1), ()) as url:
        opened(tab, url)
        tab.choose("#file", tmp_path / "first.txt")
        tab.wait("document.querySelector('#title').textContent === 'first.txt'")
        tab.choose("#file", *(tmp_path / name for name in names))
        notice = "document.querySelector('#notice')"
        says = tab.wait(f"{notice}.textContent.includes('t.py') && {notice}.innerText")
        assert [line.split(":")[0] for line in says.splitlines()] == names
        assert all(line.endswith("delete one first, such as 'first.txt'") for line in says.splitlines())
        tab.click("#documents li:first-child input")
        tab.evaluate("document.querySelector('#max').value = 4")
        plain = ask(tab, "Who?")
        assert "rows kept" in plain and "document" not in plain
        tab.click("#documents li:last-child input")
        about = ask(tab, "Who?")
        assert re.search(r"document [\d.]+ KiB", about) and "undefined" not in tab.evaluate("document.body.innerText")
    tab.open("about:blank")
    tab.said.clear()


def test_the_page_may_ask_nobody_but_its_server(tab, url):
    answer = httpx.get(url)
    policy = answer.headers["content-security-policy"]
    assert answer.headers["content-type"].startswith("text/html")
    assert "'unsafe" not in policy and "default-src 'none'" in policy
    assert not re.search(r"<script>|<style>|style=|onclick|https?://", answer.text)
    tab.open(url)
    assert tab.evaluate("fetch('http://127.0.0.1:1/').then(() => 'asked', (error) => error.name)") == "TypeError"
    assert any("Content Security Policy" in line for line in tab.said)
    tab.said.clear()
