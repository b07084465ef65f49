"""Sessions on disk. The oracle is a server that was never short of memory and never ended."""

import errno
import logging
import os
import re
import signal
import threading
from array import array
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from forked import start, status_of
from http_bodies import bearer, chat, until
from read_texts import parts, text_of
from served import KEYS, LIMITS, SETTINGS, ask, random_ids, running_engine, serve_until_killed, serving
from small_disk import file_limit

from locret_kit.documents.document import Document
from locret_kit.serving.engine_thread import EngineThread
from locret_kit.serving.process import give_back
from locret_kit.serving.state import Server, UploadedDocument, owner_of
from locret_kit.serving.store import Store
from locret_kit.settings import RunSettings

ANNA, BERT = (owner_of(key, b"salt") for key in KEYS)


@contextmanager
def engine_with(folder: Path | None, sessions: int = 8, most: int = 1 << 30, settings: RunSettings = SETTINGS):
    store = Store(folder, most) if folder is not None else None
    with running_engine(settings=settings, sessions=sessions, queue=20, store=store) as engine:
        yield engine


def saved(engine: EngineThread) -> None:
    """Wait until what is to be saved is."""
    engine._parked._saver.submit(int).result()


def talk(engine: EngineThread, conversations: int = 3, turns: int = 2, owner: str = ANNA) -> list:
    """Conversations that take turns: the answers' tokens, and how many tokens were not read again."""
    texts = [random_ids(60 + 90 * number, number) for number in range(conversations)]
    said = []
    for turn in range(turns):
        for number in range(conversations):
            request = ask(engine, owner, texts[number])
            said.append((request.sequence.tokens, request.cached_tokens))
            texts[number] += array("i", request.sequence.tokens) + random_ids(30, 100 * turn + number)
    return said


@pytest.fixture(scope="module")
def undisturbed():
    with engine_with(None) as engine:
        return talk(engine)


def test_sessions_leave_memory_for_others_and_come_back(tmp_path, undisturbed):
    with engine_with(tmp_path / "s", sessions=1) as engine:
        assert talk(engine) == undisturbed
        assert engine.figures["sessions_in_use"] == engine.figures["sessions_idle"] == 1
        assert all(cached for _, cached in undisturbed[3:])
    with engine_with(tmp_path / "s") as engine:  # another process would find them too
        texts = [random_ids(60, 0)]
        first = ask(engine, ANNA, texts[0])  # the conversation went on, so its file does not help
        assert (first.sequence.tokens, first.cached_tokens) == undisturbed[0]
    files = [path for path in (tmp_path / "s").rglob("*.locret")]
    assert len(files) == 4 and (tmp_path / "s").stat().st_mode & 0o777 == 0o700
    for path in (*files, tmp_path / "s" / "salt"):
        assert path.stat().st_mode & 0o777 == 0o600
    assert not [key for key in KEYS for path in files if key.encode() in path.read_bytes() or key in str(path)]


def next_turn(said: list, number: int) -> array:
    """The second prompt of a conversation."""
    return random_ids(60 + 90 * number, number) + array("i", said[number][0]) + random_ids(30, number)


@pytest.mark.parametrize("length", [60, 300])
def test_a_prompt_that_comes_again_and_again_has_one_session(tmp_path, length):
    """In memory and on disk, also where its answer cannot be taken back; a probe would push out all others."""
    probe = random_ids(length, 1)
    with engine_with(tmp_path, sessions=3) as engine:
        first = ask(engine, ANNA, random_ids(60, 2))
        answers = {tuple(ask(engine, ANNA, probe, tokens=40).sequence.tokens) for _ in range(2)}
        saved(engine)
        assert engine.figures["sessions_idle"] == 2 and len([*tmp_path.rglob("*.locret")]) == 2
    with engine_with(tmp_path, sessions=3) as engine:
        answers |= {tuple(ask(engine, ANNA, probe, tokens=40).sequence.tokens)}
        saved(engine)
        (answer,) = answers
        assert len([*tmp_path.rglob("*.locret")]) == 2
        for ids, said in ((random_ids(60, 2), first.sequence.tokens), (probe, answer)):
            assert ask(engine, ANNA, ids + array("i", said) + random_ids(9, 3)).cached_tokens >= len(ids)


def test_nobody_goes_on_from_the_session_of_another(tmp_path, undisturbed):
    with engine_with(tmp_path, sessions=1) as engine:
        said = talk(engine, 2, 1)
        assert len(engine.store.sessions(ANNA)) >= 1 and engine.store.sessions(BERT) == []
        cached = [ask(engine, owner, next_turn(said, 0)).cached_tokens for owner in (BERT, ANNA)]
        assert cached == [0, undisturbed[3][1]]
    assert {path.parent.name for path in tmp_path.rglob("session_*")} == {ANNA, BERT}


def test_damaged_files_and_those_of_other_settings(tmp_path, caplog, undisturbed):
    with engine_with(tmp_path, sessions=1) as engine:
        said = talk(engine, 2, 1)
    one, two = sorted(tmp_path.rglob("*.locret"))
    data = bytearray(one.read_bytes())
    data[-100] ^= 1
    one.write_bytes(data)
    (one.parent / f"session_{'0' * 32}.locret").write_bytes(b"nothing")
    (one.parent / ".session.x.host-1.partial").write_bytes(b"nothing")
    odd = [one.parent / f"session_{mark * 32}.locret" for mark in "123"]
    odd[0].mkdir()
    odd[1].symlink_to(two)
    os.mkfifo(odd[2])
    (one.parent / ".folder.partial").mkdir()
    smaller = RunSettings(**{**vars(SETTINGS), "budget": 64})
    with caplog.at_level(logging.WARNING), engine_with(tmp_path, settings=smaller) as engine:
        assert engine.store.sessions(ANNA) == [] and engine.store.bytes == len(data) + two.stat().st_size
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2 and lines[0].startswith("1 files of sessions are not usable and removed")
    assert lines[1].startswith("2 files") and "budget=96 must be at most 64" in lines[1]
    assert {*tmp_path.rglob("*.locret")} == {one, two, *odd} and not list(tmp_path.rglob("*1.partial"))
    caplog.clear()
    with caplog.at_level(logging.WARNING), engine_with(tmp_path) as engine:
        again = [ask(engine, ANNA, next_turn(said, number)) for number in range(2)]
        right = [(one.sequence.tokens, one.cached_tokens) == undisturbed[3 + n] for n, one in enumerate(again)]
        assert sorted(right) == [False, True] and again[right.index(False)].cached_tokens == 0
        assert not one.exists()
    (line,) = [record.getMessage() for record in caplog.records]
    assert "is damaged: its content does not have the digest" in line


def test_a_folder_that_was_there_stays_as_it_is(tmp_path, caplog):
    """Its mode, and what links in it name."""
    folder, other = tmp_path / "shared", tmp_path / "other"
    folder.mkdir()
    folder.chmod(0o777)
    other.write_text("mine")
    other.chmod(0o644)
    Store(folder, 1 << 30).close()
    assert folder.stat().st_mode & 0o777 == 0o777 and "others may write there" in caplog.text
    for name in (".lock", "salt"):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(other)
        with pytest.raises(OSError, match=re.escape(str(folder))):
            Store(folder, 1 << 30)
        (folder / name).unlink()
    assert other.read_text() == "mine" and other.stat().st_mode & 0o777 == 0o644


def test_a_file_that_went_on_meanwhile_stays(tmp_path):
    """Between its look-up and its reading."""
    with engine_with(tmp_path) as engine:
        store, text = engine.store, random_ids(60, 0)
        said = ask(engine, ANNA, text).sequence.tokens
        saved(engine)
        (before,) = store.sessions(ANNA)
        ask(engine, ANNA, text + array("i", said) + random_ids(30, 5))
        saved(engine)
        assert store.load(before) is None
        (after,) = store.sessions(ANNA)
        assert after.name == before.name and after.tokens > before.tokens
        assert store.load(after).get_seq_length() == after.tokens


def failing(*given: object, **more: object) -> None:
    raise OSError(errno.EROFS, "Read-only file system")


@pytest.mark.parametrize(
    ("place", "error"),
    [
        ("cache.file.read", OSError(errno.EMFILE, "Too many open files")),
        ("cache.file.read", RuntimeError("no memory")),
        ("cache.storage.rows.BoundedLayer.planned_bytes", None),  # more bytes than there are
    ],
)
def test_a_session_that_cannot_be_read_now_is_read_anew(tmp_path, monkeypatch, undisturbed, place, error):
    def failing(*given: object) -> int:
        if error is not None:
            raise error
        return 1 << 60

    with engine_with(tmp_path, sessions=1) as engine:
        said = talk(engine, 2, 1)
        saved(engine)
        files = {*tmp_path.rglob("*.locret")}
        with monkeypatch.context() as patch:
            patch.setattr(f"locret_kit.{place}", failing)
            assert ask(engine, ANNA, next_turn(said, 0)).cached_tokens == 0
        saved(engine)
        assert files < {*tmp_path.rglob("*.locret")}
        assert ask(engine, ANNA, next_turn(said, 1)).cached_tokens == undisturbed[4][1]


def test_a_document_that_cannot_be_read_now_stays(tmp_path, monkeypatch):
    """On a disk that fails, and behind another chat template than it was read with."""
    model, tokenizer, heads = parts("llama")
    document, name = Document.read(model, tokenizer, text_of(200), SETTINGS, "locret", heads), "doc_" + "1" * 32
    with engine_with(tmp_path) as engine:
        server = Server(engine, "tiny", KEYS, salt=engine.store.salt)
        engine.save_document(name, next(iter(server.owners.values())), document)
        saved(engine)
        for place, attribute, value in (
            (engine, "load_document", failing),
            (tokenizer, "chat_template", "{{ messages[0]['content'] }}"),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(place, attribute, value)
                server.restore(engine)
            saved(engine)
            assert not server.documents
        server.restore(engine)
        assert server.documents[name].shown()["status"] == "ready"
        monkeypatch.setattr(os, "utime", failing)
        engine.store.used(name)  # of a request about it


def test_files_of_a_later_version_wait_for_it(tmp_path, caplog, monkeypatch, undisturbed):
    """As after an update that was taken back."""
    with monkeypatch.context() as later:
        later.setattr("locret_kit.cache.file.VERSION", 2)
        with engine_with(tmp_path, sessions=1) as engine:
            said = talk(engine, 2, 1)
    files = {*tmp_path.rglob("*.locret")}
    with caplog.at_level(logging.WARNING), engine_with(tmp_path) as engine:
        assert engine.store.sessions(ANNA) == [] and {*tmp_path.rglob("*.locret")} == files
        assert engine.store.bytes == sum(path.stat().st_size for path in files)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("2 files") and "has version=2; this locret_kit reads versions 1 to 1" in line
    monkeypatch.setattr("locret_kit.cache.file.VERSION", 2)
    with engine_with(tmp_path) as engine:
        again = ask(engine, ANNA, next_turn(said, 0))
        assert (again.sequence.tokens, again.cached_tokens) == undisturbed[3]


def test_the_folder_has_a_bound(tmp_path):
    with engine_with(tmp_path / "all", sessions=1) as engine:
        talk(engine, 3, 1)
        saved(engine)
        whole = engine.store.bytes
    most = whole - 1
    with engine_with(tmp_path / "few", sessions=1, most=most) as engine:
        talk(engine, 3, 1)
        saved(engine)
        held = engine.store.sessions(ANNA)
        assert [key.tokens for key in held] == [153, 243]  # the one used least is gone
        assert engine.store.bytes == sum(path.stat().st_size for path in tmp_path.glob("few/*/*.locret")) <= most


def test_a_full_disk_is_said_once_and_the_server_goes_on(tmp_path, caplog, undisturbed):
    with caplog.at_level(logging.WARNING), engine_with(tmp_path, sessions=2) as engine:
        with file_limit(20_000):
            said = talk(engine, turns=1)
            saved(engine)
            failing, failures = engine.store.failing, engine.store.failures
        assert said == undisturbed[:3] and failing is not None and failures == 3
        with serving(engine) as url:
            figures = httpx.get(f"{url}/metrics", headers=bearer()).text
            assert "locret_session_disk_failing 1.0" in figures and "locret_save_failures_total 3.0" in figures
        ask(engine, ANNA, random_ids(50, 3))
        saved(engine)
        assert engine.store.failing is None and len(engine.store.sessions(ANNA)) == 1
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2 and "cannot write" in lines[0] and lines[1] == "sessions are saved again"
    assert not list(tmp_path.rglob("*.partial"))


def test_documents_come_back_for_their_owner(tmp_path):
    model, tokenizer, heads = parts("llama")
    name = "doc_" + "1" * 32
    with engine_with(tmp_path) as engine:
        server = Server(engine, "tiny", KEYS, salt=engine.store.salt)
        owner = server.owners[next(iter(server.owners))]
        document = Document.read(model, tokenizer, text_of(200), SETTINGS, "locret", heads, title="book")
        server.documents[name] = UploadedDocument(name, owner, "book", 1, document)
        engine.save_document(name, owner, document)
        ids = document.prompt("Who came in?")
        first = ask(engine, owner, ids, document=document, document_id=name)
    with engine_with(tmp_path) as engine:
        server = Server(engine, "tiny", KEYS, salt=engine.store.salt, limits=LIMITS)
        server.restore(engine)
        held = server.documents[name]
        assert held.owner == owner and held.shown()["status"] == "ready" and held.title == "book"
        again = ask(engine, owner, ids, document=held.document, document_id=name)
        assert again.sequence.tokens == first.sequence.tokens and again.cached_tokens == first.cached_tokens > 100
        more = ids + array("i", again.sequence.tokens) + random_ids(20, 1)
        assert ask(engine, owner, more, document=held.document, document_id=name).cached_tokens > len(ids)
        engine.forget(name)
    assert not list(tmp_path.rglob("*.locret"))
    with engine_with(tmp_path) as engine, pytest.raises(OSError, match="another server has it"):
        Store(tmp_path, 1 << 30)


def test_a_server_that_is_killed_loses_one_turn_at_most(tmp_path):
    """Greedy, in float64: the answer is that of a server that was not killed."""
    log = tmp_path / "log"
    log.touch()
    child = start(lambda: serve_until_killed(tmp_path / "saved"), log)
    try:
        url = until(lambda: re.search(r"http://\S+\n", log.read_text()))[0].strip()
        first = talk_over_http(url, 2, [], saved=0)
        late = talk_over_http(url, 1, [], seed=5, saved=2)
        late += talk_over_http(url, 1, late, seed=5)  # nobody waits for its file
    finally:
        os.kill(child, signal.SIGKILL)
        assert status_of(child) == -signal.SIGKILL
    with engine_with(tmp_path / "saved") as engine, serving(engine, salt=engine.store.salt) as url:
        again = talk_over_http(url, 1, first)
        assert talk_over_http(url, 1, late, seed=5)[-1][1] >= late[1][1] > 0
    with engine_with(None) as engine, serving(engine) as url:
        whole = talk_over_http(url, 3, [])
    assert [*first, *again] == whole and whole[2][1] > whole[1][1] > 0


def talk_over_http(url: str, turns: int, before: list, seed: int = 0, saved: int | None = None) -> list:
    """Turns of a conversation, each a text and how many tokens were not read again; after ``saved`` files each is saved."""
    messages = []
    for turn, (said, _) in enumerate(before):
        messages += [{"role": "user", "content": text_of(25, seed + turn)}, {"role": "assistant", "content": said}]
    made = []
    for turn in range(len(before), len(before) + turns):
        messages.append({"role": "user", "content": text_of(25, seed + turn)})
        answer = chat(url, messages, max_tokens=1).json()
        said = answer["choices"][0]["message"]["content"]
        made.append((said, answer["usage"]["prompt_tokens_details"]["cached_tokens"]))
        messages.append({"role": "assistant", "content": said})
        if saved is not None:
            figure = f"locret_saved_files_total {saved + len(made)}.0"
            until(lambda: figure in httpx.get(f"{url}/metrics", headers=bearer()).text)  # noqa: B023
    return made


def test_freed_memory_goes_back():
    """The C library does it, here glibc, until the server ends."""
    ended = threading.Event()
    give_back(ended)
    assert "locret-trim" in {thread.name for thread in threading.enumerate()}
    ended.set()
