"""The commands about documents, and the cache options of ``locret-infer``, as a user meets them."""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from browser import BROWSER, BROWSERS, browsing
from safetensors import safe_open
from tiny_heads import save_tiny_heads
from tiny_tokenizer import TEMPLATE, TEXT, save_tiny_backbone, tiny_tokenizer

from locret_kit import Document
from locret_kit.backbones import demo
from locret_kit.backbones.load import load_backbone
from locret_kit.cli import chat, infer
from locret_kit.cli.command import title_of
from locret_kit.cli.documents import ask, info, kept, questions_of, read
from locret_kit.cli.loading import ASKED
from locret_kit.config.infer_options import AskOptions
from locret_kit.heads import RetainingHeads
from locret_kit.text.tokens import token_texts

ROOT = Path(__file__).resolve().parents[2]
HERE = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "kernels")))}
RUN = ("--budget", "48", "--chunk", "32", "--stabilizers", "8", "--local-len", "8")
EVIL = "</script><img src=x onerror=alert(1)> & <b>"
QUESTIONS = ("What is it?", "Remember the key?")
COMMANDS = {"read": read, "info": info, "ask": ask, "infer": infer.main, "kept": kept, "chat": chat.main}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a backbone, heads, another backbone of the same shapes, a text and its document."""
    folder = tmp_path_factory.mktemp("documents")
    save_tiny_heads(folder, 16, inference={})
    save_tiny_backbone(folder / "other", initializer_range=0.5)
    (folder / "long.txt").write_text(TEXT * 4)
    (folder / "more.txt").write_text(TEXT)
    return folder


@pytest.fixture
def use(place, tmp_path, monkeypatch, command):
    """Run a command in the folder of the backbone: ``(status, stdout, stderr)``. {out} is a folder of the test's own."""
    monkeypatch.chdir(place)

    def run(name: str, *words: str, stdin: str = "") -> tuple[int, str, str]:
        return command(COMMANDS[name], *(word.replace("{out}", str(tmp_path)) for word in words), stdin=stdin)

    return run


@pytest.fixture(scope="module")
def made(place, tmp_path_factory) -> Path:
    """A document of the text, read with the heads."""
    path = tmp_path_factory.mktemp("made") / "book.locret"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        assert read(["long.txt", "-o", str(path), "--ckpt", "heads", *RUN]) == 0
    return path


@pytest.fixture
def book(made, tmp_path) -> Path:
    """A copy of it."""
    return Path(shutil.copy(made, tmp_path))


FRESH: dict[tuple[str, ...], list[str]] = {}
"""Answers by the words of a command."""


def answers(use, *words: str) -> list[str]:
    """Answers to the questions, each from a run of its own over text and question."""
    for question in QUESTIONS if words not in FRESH else ():
        status, out, err = use("infer", *words, "--question", question, "--max-new-tokens", "5", "--quiet")
        assert status == 0, err
        FRESH.setdefault(words, []).append(out)
    return FRESH[words]


def test_a_document_is_named_like_its_text(use, place):
    status, out, err = use("read", "more.txt", "--ckpt", "heads", *RUN)
    assert (status, out) == (0, "") and err.splitlines()[-1].startswith("more.locret: "), err
    assert "tok/s" in err and "32 slots" in err and "MiB" in err
    (place / "more.locret").unlink()


@pytest.mark.parametrize(("name", "document"), [("notes.v2", "notes.v2.locret"), ("link.txt", "link.locret")])
def test_a_folder_s_document_has_its_whole_name_and_a_link_s_its_own(use, tmp_path, monkeypatch, name, document):
    """As of a file in a cache or a store, which may be named by its hash."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.v2").mkdir()
    (tmp_path / "8f3a").write_text(TEXT)
    (tmp_path / "link.txt").symlink_to("8f3a")
    (tmp_path / document).touch()
    assert f"out={document!r} already exists" in use("read", name, "--ckpt", "heads")[2]
    assert title_of(name) == name


def test_reading_once_and_asking_equals_fresh_runs(use, book):
    fresh = answers(use, "long.txt", "--ckpt", "heads", *RUN)
    assert fresh[0] != fresh[1]
    status, out, err = use("ask", str(book), *QUESTIONS, "--max-new-tokens", "5")
    assert status == 0, err
    assert out == f"question: {QUESTIONS[0]}\n{fresh[0]}\nquestion: {QUESTIONS[1]}\n{fresh[1]}"
    status, out, _ = use("ask", str(book), QUESTIONS[1], "--max-new-tokens", "5")
    assert (status, out) == (0, fresh[1])


def test_questions_from_stdin_and_answers_as_json(use, book):
    lines, flag = f"{QUESTIONS[0]}\n\n  {QUESTIONS[1]}\n", "--question-file=-"
    fresh = answers(use, "long.txt", "--ckpt", "heads", *RUN)
    status, out, err = use("ask", str(book), flag, "--json", "--max-new-tokens", "5", "--quiet", stdin=lines)
    assert (status, err) == (0, "")
    said = [json.loads(line) for line in out.splitlines()]
    assert [(one["question"], one["answer"] + "\n") for one in said] == list(zip(QUESTIONS, fresh, strict=True))
    for one in said:
        assert one["finish_reason"] == ("length" if one["tokens"] == 5 else "stop")
        assert one["cached_tokens"] > 100 and 0 < one["prompt_tokens"] < 200
        assert 0 < one["first_token_s"] <= one["total_s"]


def test_a_line_of_questions_ends_with_its_newline(tmp_path):
    """Not at the other line ends of Unicode, which a question that was copied may hold."""
    (tmp_path / "questions.txt").write_text("Who\u2028came\x0bin?\n\x0c\nWhen?\u0085")
    given = AskOptions(book="b", question_file=str(tmp_path / "questions.txt"))
    assert questions_of(given) == ["Who\u2028came\x0bin?", "When?"]


def test_appending_equals_reading_it_all(use, book, tmp_path):
    (tmp_path / "whole.txt").write_text(TEXT * 5)
    assert use("read", "{out}/whole.txt", "-o", "{out}/whole.locret", "--ckpt", "heads", *RUN)[0] == 0
    status, _, err = use("read", "more.txt", "-o", str(book), "--append")
    assert status == 0, err
    told = [json.loads(use("info", str(path), "--json")[1]) for path in (book, tmp_path / "whole.locret")]
    assert told[0]["document"]["sha256"] == told[1]["document"]["sha256"]
    assert told[0]["document"]["names"] == {"model": "backbone", "heads": "heads"}
    said = [use("ask", str(path), *QUESTIONS)[1] for path in (book, tmp_path / "whole.locret")]
    assert said[0] == said[1]
    err = use("read", "more.txt", "-o", str(book), "--append", "--budget", "64")[2]
    assert err.endswith("--budget 64 has no effect with --append: the document keeps its settings\n")


def test_appended_text_joins_no_word(use):
    words = "-o", "{out}/a.locret"
    assert use("read", *words, "--ckpt", "heads", *RUN, stdin="They came in")[0] == 0
    assert use("read", *words, "--append", stdin="Who?")[0] == 0
    assert json.loads(use("info", words[1], "--json")[1])["document"]["open"].endswith("They came in\n\nWho?")


def test_a_file_that_is_there_is_not_replaced_unasked(use, book):
    before = book.read_bytes()
    again = ("read", "long.txt", "-o", str(book), "--ckpt", "heads", *RUN)
    status, _, err = use(*again)
    assert status == 1 and "already exists" in err and book.read_bytes() == before
    assert use(*again, "--overwrite", "--no-text", "--title", "A book\x1b[31m")[0] == 0
    status, out, _ = use("info", str(book))
    assert status == 0 and "not stored" in out and "A book\\x1b[31m" in out
    fresh = answers(use, "long.txt", "--ckpt", "heads", *RUN)
    assert use("ask", str(book), QUESTIONS[0], "--max-new-tokens", "5")[1] == fresh[0]


@pytest.mark.parametrize(
    ("name", "shown"),
    [("caf\udce9.txt", "caf\\udce9.txt"), (240 * "x" + ".txt", 60 * "x" + "...")],
    ids=["no UTF-8", "long"],
)
def test_a_text_of_any_name_becomes_a_document(use, tmp_path, name, shown):
    (tmp_path / name).write_text(TEXT * 4)
    out = Path(name).stem if name.isascii() else "b"
    assert use("read", f"{{out}}/{name}", "-o", f"{{out}}/{out}.locret", "--ckpt", "heads", *RUN)[0] == 0
    assert f"  {shown}\n" in use("info", f"{{out}}/{out}.locret")[1]


def test_what_a_link_names_is_written(use, book, tmp_path):
    link, page = tmp_path / "link.locret", tmp_path / "page.html"
    link.symlink_to(book)
    page.symlink_to(tmp_path / "there.html")
    before = json.loads(use("info", str(book), "--json")[1])["document"]["tokens"]
    assert use("read", "more.txt", "-o", str(link), "--append")[0] == 0
    assert use("kept", str(link), "-o", str(page), "--overwrite") == (0, "", "")
    assert json.loads(use("info", str(book), "--json")[1])["document"]["tokens"] > before
    assert link.is_symlink() and page.is_symlink() and page.read_text().startswith("<!")


def test_nothing_private_is_in_a_file(use, place, tmp_path):
    words = ("--ckpt", str(place / "heads"), "--model", str(place / "backbone"))
    assert use("read", str(place / "long.txt"), "-o", "{out}/a.locret", *words, *RUN)[0] == 0
    held = (tmp_path / "a.locret").read_bytes()
    assert str(place).encode() not in held and b'"heads"' in held.replace(b"\\", b"")
    assert use("ask", "{out}/a.locret", *QUESTIONS)[0] == 0  # the last parts of the names lead here by chance


def test_a_talk_of_another_policy_keeps_the_name_of_a_document_s_heads(use, book):
    words = "--ckpt", "heads", "--policy", "snapkv", "--chunk", "32"
    assert use("chat", *words, stdin=f"/read {book}\n/save {book.with_name('again.locret')}\n")[0] == 0
    assert use("ask", str(book.with_name("again.locret")), "What is it?", "--max-new-tokens", "1")[0] == 0


def test_evidence_that_finds_nothing_says_why(use, tmp_path):
    words = "--evidence", "--max-new-tokens", "1"
    assert use("read", "long.txt", "-o", "{out}/a.locret", "--ckpt", "heads", *RUN, "--no-text")[0] == 0
    for name, given, stdin in (("ask", ["What is it?"], ""), ("chat", ["--history", "64"], "What is it?")):
        status, out, err = use(name, f"{tmp_path}/a.locret", *given, *words, stdin=stdin)
        assert status == 0 and "evidence" not in out and "no evidence: the document was written without its text" in err
    status, out, err = use("infer", "long.txt", "--ckpt", "heads", "--policy", "minference", "--question", "?", *words)
    assert status == 0 and "evidence" not in out and "no evidence: no attention to the text was summed up" in err


def test_arguments_of_a_template_that_a_document_does_not_use_are_refused(use):
    assert use("read", "more.txt", "-o", "{out}/a.locret", "--ckpt", "heads", *RUN, "--no-chat")[0] == 0
    for name, words in (("ask", ["Who?"]), ("chat", [])):
        status, _, err = use(name, "{out}/a.locret", *words, "--template-kwargs", "{}", stdin="Who?")
        said = f"locret-{name}: --template-kwargs {{}} has no effect on a document that was read with --no-chat\n"
        assert (status, err) == (1, said)


def test_appended_text_that_cannot_be_left_out_is_refused_before_it_is_read(use, monkeypatch):
    rereads = "--ckpt", "heads", "--policy", "rereading-locret", *RUN
    assert use("read", "more.txt", "-o", "{out}/a.locret", *rereads)[0] == 0
    monkeypatch.setattr(Document, "append", lambda *given: pytest.fail("it is read"))
    status, _, err = use("read", "more.txt", "-o", "{out}/a.locret", "--append", "--no-text")
    assert status == 1 and "it cannot be saved without its text" in err


def test_arguments_that_a_template_has_before_the_text_are_read_with_it(use, tmp_path):
    tokenizer, kwargs = tiny_tokenizer(), '{"effort": "%s"}'
    tokenizer.chat_template = "{{ effort }}" + TEMPLATE
    tokenizer.save_pretrained(save_tiny_backbone(tmp_path / "backbone"))
    words = "{out}/a.locret", "--model", "{out}/backbone", "--template-kwargs"
    assert use("read", "more.txt", "-o", *words, kwargs % "high", "--policy", "h2o", *RUN)[0] == 0
    for effort, told in (("high", False), ("low", True)):
        status, _, err = use("ask", *words, kwargs % effort, "--question", "Who?", "--max-new-tokens", "1")
        assert status == 0 and ("before the text, which stays as it was read" in err) == told


def test_a_pipe_that_is_named_as_a_file_has_no_title(use, tmp_path):
    """A shell makes one of <(...)."""
    end, pipe = os.pipe()
    os.write(pipe, TEXT.encode())
    os.close(pipe)
    with open(end, "rb"):
        said = use("read", f"/dev/fd/{end}", "--ckpt", "heads", *RUN)[::2]
    assert said == (1, "locret-read: out=... is missing: a text from stdin or a pipe has no name\n")


def test_info_is_quick_and_shows_the_record(use, book):
    code = f"import sys\nfrom locret_kit.cli.documents import info\ninfo([{str(book)!r}])\n"
    code += "assert not {'torch', 'transformers'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=HERE)
    assert done.returncode == 0, done.stderr
    record = json.loads(use("info", str(book), "--json")[1])
    with safe_open(book, "pt") as file:
        assert file.get_tensor("layers.0.positions").shape[-1] == 48
        del record["bytes"]
        assert record == json.loads(file.metadata()["locret_kit"])
    for shown in (
        "long.txt", f"{record['document']['tokens']}", "backbone (3 layers)", f"heads ({record['heads']})", "locret", "48",
        f"{book.stat().st_size:,}", record["kit"], record["created"], record["digest"], record["document"]["sha256"],
    ):  # fmt: skip
        assert str(shown) in done.stdout, shown


def test_several_questions_read_the_text_once(use, tmp_path):
    """With the answers of runs of their own: also where the text is read for each, as under a budget that is a share."""
    more = (), ("--no-chat",), ("--protect", "first+markers"), ("--policy", "full")
    shared = [((*RUN, *words), True) for words in more]
    for more, once in (*shared, (("--budget", "0.25"), False)):
        words = ("long.txt", "--ckpt", "heads", *more)
        report = ("--report", "{out}/r.json", "--max-new-tokens", "5")
        fresh = answers(use, *words)
        status, out, err = use("infer", *words, *report, *(f"--question={question}" for question in QUESTIONS))
        assert status == 0, err
        assert out == f"question: {QUESTIONS[0]}\n{fresh[0]}\nquestion: {QUESTIONS[1]}\n{fresh[1]}"
        first, second = json.loads((tmp_path / "r.json").read_text())["answers"]
        assert err.count(" 0 s left") == (1 if once else 2)
        assert (first["kept_rows"] == second["kept_rows"] or "full" in more) and (first["budget"] == 48) == once


def test_a_policy_that_sees_the_question_says_what_it_repeats(use):
    policy = "rereading-locret(tokens=12,window=4,kernel=3,first=2)"
    words = ("long.txt", "--ckpt", "heads", *RUN, "--policy", policy)
    assert use("read", *words, "-o", "{out}/b.locret")[0] == 0
    status, out, err = use("ask", "{out}/b.locret", QUESTIONS[0], "--max-new-tokens", "5")
    assert status == 0 and "reads passages again for each question" in err
    assert out == answers(use, *words)[0]


@pytest.mark.parametrize(("more", "policy"), [((), ASKED), (("--no-text",), "locret"), (("--policy", "h2o"), "h2o")])
def test_the_demos_heads_read_passages_again_where_the_text_is_kept(use, tmp_path, monkeypatch, more, policy):
    monkeypatch.setattr(demo, "HEADS", "heads")
    assert use("read", "long.txt", *RUN, *more, "-o", "{out}/b.locret")[0] == 0
    assert use("info", "{out}/b.locret")[1].count(f" {policy}\n") == 1


@pytest.fixture(scope="module", params=["locret", "ada-snapkv(6,3)"])
def page(request, place, tmp_path_factory) -> tuple[Document, str]:
    """A document, and its page; the heads keep as many tokens, and not as many."""
    folder = tmp_path_factory.mktemp("page")
    text, book, html = (folder / name for name in ("evil.txt", "b.locret", "page.html"))
    text.write_text(TEXT * 3 + EVIL + TEXT)
    words = ("-o", str(book), "--ckpt", "heads", "--policy", request.param, "--title", EVIL, *RUN, "--dtype", "float32")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        assert read([str(text), *words]) == kept([str(book), "-o", str(html)]) == 0
        model, tokenizer = load_backbone("backbone", dtype="float32")
        heads = RetainingHeads.from_pretrained("heads") if request.param == "locret" else None
    return Document.load(book, model, tokenizer, heads), html.read_text(encoding="utf-8")


def test_a_page_shows_what_each_head_kept(page):
    document, html = page
    data = json.loads(re.search(r'id="data">(.*?)</script>', html, re.DOTALL)[1])
    ids = document.prompt("")[: document.tokens]
    assert "".join(data["texts"]) == document.tokenizer.decode(ids) and data["seen"] == document.cache.get_seq_length()
    held = [
        [list(itertools.accumulate(gaps)) == head.tolist() for gaps, head in zip(mine, theirs[0], strict=True)]
        for mine, theirs in zip(data["kept"], map(document.cache.kept_positions, range(3)), strict=True)
    ]
    assert held == [[True, True]] * 3


def test_a_page_asks_for_nothing_and_escapes_everything(page):
    _, html = page
    assert html.count("</script>") == 2 and "<img" not in html and "{{" not in html
    assert not re.search(r"@import|url\(|\ssrc=|\shref=", html.replace("src=x", ""))
    assert "&lt;/script&gt;&lt;img src=x onerror=alert(1)&gt; &amp; &lt;b&gt;</h1>" in html


@pytest.mark.skipif(BROWSER is None, reason=f"none of {', '.join(BROWSERS)} to look with")
def test_a_page_in_a_browser(page, tmp_path):
    """One head of one layer is chosen: the shaded tokens are those that it holds. A word is found, and evicted text folded."""
    document, html = page
    texts = token_texts(document.tokenizer, document.prompt("")[: document.tokens])
    held = [texts[at] for at in document.cache.kept_positions(1)[0][1].tolist()]
    (tmp_path / "page.html").write_text(html, encoding="utf-8")
    with browsing(tmp_path) as tab:
        tab.open((tmp_path / "page.html").as_uri())
        for name in ("layer", "head"):
            node = f"document.querySelector('select[name={name}]')"
            tab.evaluate(f"{node}.value = '1'; {node}.dispatchEvent(new Event('change'))")
        spans = "[...document.querySelectorAll('#text span')]"
        assert tab.evaluate(f"{spans}.map((s) => s.textContent).join('')") == "".join(texts)
        shaded = f"{spans}.filter((s) => s.title.includes(' 1 of 1 heads')).map((s) => s.textContent).join('')"
        assert tab.evaluate(shaded) == "".join(held)
        tab.evaluate("word.value = 'ONERROR'; word.dispatchEvent(new KeyboardEvent('keydown', { key: 'Enter' }))")
        found, first = tab.evaluate("found"), "".join(texts).lower().index("onerror")
        assert len("".join(texts[:found])) <= first < len("".join(texts[: found + 1]))
        tab.evaluate("box.click()")
        assert tab.evaluate(f"{spans}.some((s) => / \u2026 \\d+ tokens \u2026 /.test(s.textContent))")
        assert tab.said == []


def test_a_text_that_is_read_with_each_question_keeps_nothing(use, tmp_path):
    short = str(tmp_path / "short.locret")
    assert use("read", "long.txt", "-o", short, "--ckpt", "heads", "--chunk", "1024", "--quiet")[0] == 0
    status, _, err = use("kept", short)
    assert status == 1 and "its cache is empty: a text this short is read with each question" in err


def test_kept_text_in_the_terminal(use, book):
    status, out, _ = use("kept", str(book), "--layer", "1", "--head", "0")
    assert status == 0 and out.startswith("long.txt: ") and "48 of 256 held (layer 1, head 0)" in out and " ... " in out
    with safe_open(book, "pt") as file:
        positions = file.get_tensor("layers.1.positions")[0, 0].tolist()
        ids = file.get_tensor("document.ids").tolist()
    texts = token_texts(tiny_tokenizer(), ids)
    runs = itertools.groupby(range(256), key=lambda at: at in positions)
    expected = "".join("".join(texts[at] for at in run) if kept else " ... " for kept, run in runs)
    assert out.split("\n\n", 1)[1] == expected + "\n"


BAD = [
    (("read", "--ckpt", "heads"), 1, "out=... is missing: a text from stdin or a pipe has no name"),
    (("read", "long.txt", "-o", "{out}/x", "--append"), 1, "/x' does not exist"),
    (("read", "long.txt", "-o", "{out}/no/x", "--ckpt", "heads"), 1, "its folder is missing"),
    (("read", "gone.txt", "-o", "{out}/x", "--ckpt", "heads"), 1, "gone.txt' cannot be read"),
    (("read", "gone.txt", "--ckpt", "heads"), 1, "gone.txt' cannot be read"),
    (("read", "long.txt", "-o", "{out}/x", "--no-chat", "--think"), 1, "--think has no effect with --no-chat"),
    (("read", "long.txt", "-o", "{book}", "--append", "--think"), 1, "--think has no effect with --append"),
    (
        ("read", "long.txt", "-o", "{out}/x", "--ckpt", "heads", "--policy", "rereading-locret", "--no-text"),
        1,
        "without its text",
    ),
    (("read", "-o", "{out}/x", "--ckpt", "heads"), 1, "stdin has no text"),
    (("info", "long.txt"), 1, "long.txt is no saved cache: locret-read makes one"),
    (("info", "{book}", "more.txt"), 2, "file is given twice"),
    (("kept", "{book}", "--layer", "3"), 1, "layer=3 must be from 0 to 2"),
    (("kept", "{book}", "-o", "{book}"), 1, "already exists"),
    (("kept", "{book}", "-o", "{book}", "--overwrite"), 1, "is the input file: name another"),
    (("kept", "{out}/loop", "-o", "{out}/x"), 1, "loop"),
    (("read", "long.txt", "-o", "./long.txt", "--overwrite", "--ckpt", "heads"), 1, "is the input file"),
    (("infer", "long.txt", "--report", "long.txt", "--question", "Who?"), 1, "is the input file"),
    (("kept", "{book}", "-o", "{out}/x", "--layer", "1"), 1, "--layer 1 has no effect with --out"),
    (("ask", "{book}"), 1, "ask something"),
    (("ask", "{book}", "Who?", "--model", "other"), 1, "model.weights"),
    (("ask", "{book}", "Who?", "--model", "./nowhere"), 1, "give their places with --model and --ckpt"),
    (("ask", "{book}", "--question-file", "gone"), 1, "question_file='gone': gone: No such file"),
    (("ask", "{book}", "Who?", "-n", "5"), 2, "unknown option '-n': names have two dashes"),
    (("infer", "{book}", "--question", "Who?"), 1, "holds tensors, not text: if locret-read wrote it, ask about it"),
    (("infer", "{out}", "--question", "Who?"), 1, "has no file with text"),
    (("read", "{out}", "-o", "x.locret"), 1, "has no file with text"),
    (("infer", "https://example.org/x.html", "--question", "Who?"), 1, "No such file or directory: download it first"),
]


@pytest.mark.parametrize(("words", "status", "said"), BAD, ids=[" ".join(words) for words, _, _ in BAD])
def test_bad_input_is_one_line(use, book, words, status, said):
    book.with_name("loop").symlink_to("loop")
    got, out, err = use(*(word.replace("{book}", str(book)) for word in words))
    assert (got, out) == (status, "") and err.count("\n") == 1, err
    assert err.startswith(f"locret-{words[0]}: ") and said in err, err
    assert not list(book.parent.glob(".*partial")) and not (book.parent / "x").exists()


def test_ctrl_c_leaves_nothing_and_the_old_file_whole(use, book, monkeypatch):
    """While the text is read, and while the file is written."""
    before = book.read_bytes()

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    for where in ("locret_kit.documents.document.prefill", "safetensors.torch.save"):
        with monkeypatch.context() as patch:
            patch.setattr(where, interrupted)
            status, _, err = use("read", "long.txt", "-o", str(book), "--overwrite", "--ckpt", "heads", *RUN)
            assert status == 130 and err.endswith("locret-read: stopped; nothing was written\n")
        assert [path.name for path in book.parent.iterdir()] == [book.name] and book.read_bytes() == before
