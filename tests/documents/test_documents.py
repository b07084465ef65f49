"""Documents: read once, asked often. The oracle is a fresh run over the whole prompt."""

from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest
import torch
from pairwise import one_of
from policy_runs import FITTED, by_kind
from read_texts import QUESTIONS, REREADING, SETTINGS, heads_for, kept, load, parts, read, text_of
from tiny_tokenizer import byte_level, chatting
from tokenizers import Regex, pre_tokenizers

from locret_kit import BoundedCache, Document, attach
from locret_kit.policies.registry import policies
from locret_kit.runtime.session import Answer
from locret_kit.settings import RunSettings
from locret_kit.text.template import protected_spans, render_prompt

EVERY = [REREADING if "reread" in name else FITTED.get(name, name) for name in policies() if name != "focused-locret"]
FAMILIES = ("llama", "gemma3")


def ids_of(tokenizer, text: str, question: str) -> list[int]:
    """The prompt as one call of the tokenizer."""
    before, after = render_prompt(tokenizer, question)
    return tokenizer(before + text + after, add_special_tokens=False).input_ids


def fresh(family: str, policy: str, text: str, question: str, **settings) -> tuple[list[int], list, torch.Tensor]:
    """Tokens, kept positions and the keys of the first layer, of a run that has seen nothing before."""
    model, tokenizer, _ = parts(family)
    ids = ids_of(tokenizer, text, question)
    budget, heads = settings.pop("budget", 24), heads_for(policy, family)
    cache = BoundedCache(budget, policy, heads, prompt_length=len(ids), **settings)
    tokens = generate_ids(model, tokenizer, ids, cache)
    return tokens, kept(cache), cache


def generate_ids(model, tokenizer, ids, cache) -> str:
    return str(Answer(model, tokenizer, ids, cache, max_new_tokens=6))


def same(answer, expected) -> bool:
    (tokens, positions, cache), said, mine = expected, str(answer), answer.cache
    names = ("keys", "values", "scores")
    layers = [(a, b) for a, b in zip(mine.bounded, cache.bounded, strict=True) if a.rows]
    equal = all(torch.equal(a.slots(name), b.slots(name)) for a, b in layers for name in names)
    return said == tokens and kept(mine) == positions and equal


def check_equal(tmp_path, family: str, policy: str, words: int = 160, **settings) -> None:
    """A question to a document, and another to its file, give what a fresh run gives."""
    text = text_of(words)
    document = read(family, policy, text, **settings)
    document.save(tmp_path / "text.locret")
    loaded = load(tmp_path / "text.locret", policy, family)
    assert loaded.cache.nbytes <= document.cache.nbytes and kept(loaded.cache) == kept(document.cache)
    for one, question in zip((document, loaded), QUESTIONS, strict=True):
        assert same(one.ask(question, max_new_tokens=6), fresh(family, policy, text, question, **settings))
    assert document.reads == loaded.reads == 0 and document.cache.get_seq_length() >= 3 * 64


@pytest.mark.parametrize("policy", by_kind(EVERY))
def test_answers_equal_fresh_runs_bit_for_bit(policy, tmp_path):
    """With one family by lot; batches (test_batch.py) have the other."""
    check_equal(tmp_path, one_of(FAMILIES, policy, turn=1), policy, **SETTINGS)


@pytest.mark.parametrize("policy", ["h2o", "roco", "snapkv(6,3)", "streaming", "compactor(block=8)"])
def test_a_prepared_document_reads_little_more_than_the_question(policy):
    """Of policies whose scores do not tie."""
    family = one_of(FAMILIES, policy, turn=1)
    unprepared = read(family, policy, text_of(310), **SETTINGS).cache.get_seq_length()
    ahead, document = (read(family, policy, text_of(310), **SETTINGS, ahead=ahead) for ahead in (True, False))
    document.prepare()
    assert unprepared + 20 < document.cache.get_seq_length() == ahead.cache.get_seq_length()
    for question in (*QUESTIONS, "?"):
        said, positions, cache = fresh(family, policy, text_of(310), question, **SETTINGS)
        for one in (ahead, document):
            answer = one.ask(question, max_new_tokens=6)
            assert str(answer) == said and kept(answer.cache) == positions
            for a, b in zip(answer.cache.bounded, cache.bounded, strict=True):
                torch.testing.assert_close(a.slots("keys"), b.slots("keys"), rtol=1e-9, atol=1e-9)
    assert document.reads == ahead.reads == 0
    document.append(" More of it." * 20)
    longer = text_of(310) + " More of it." * 20
    assert str(document.ask("Who?", max_new_tokens=6)) == fresh(family, policy, longer, "Who?", **SETTINGS)[0]


@pytest.mark.parametrize("policy", ["locret", "ada-snapkv(6,3)"])
def test_protected_markers_are_pinned_as_in_a_fresh_run(policy, tmp_path):
    model, tokenizer, _ = parts()
    settings = {**SETTINGS, "protect": "first+markers"}
    document = read("llama", policy, text_of(), **settings)
    document.save(tmp_path / "text.locret")
    for one in (document, load(tmp_path / "text.locret", policy)):
        ids = ids_of(tokenizer, text_of(), QUESTIONS[0])
        cache = BoundedCache(RunSettings.of(settings), policy, heads_for(policy), prompt_length=len(ids))
        for span in protected_spans(tokenizer, ids, settings["protect"]):
            cache.pin(*span)
        answer = one.ask(QUESTIONS[0], max_new_tokens=6)
        assert str(answer) == generate_ids(model, tokenizer, ids, cache)
        assert answer.cache.pins == cache.pins and kept(answer.cache) == kept(cache) and len(cache.pins) == 2


@pytest.mark.parametrize(
    ("family", "policy", "words", "settings"),
    [
        *(("gemma3", one, 160, {"kv_bits": bits}) for one, bits in (("locret", 4), ("sirllm", 2), ("h2o", 4))),
        *(("llama", one, 420, {"one_shot": True}) for one in ("snapkv(6,3)", "h2o", "ada-snapkv(6,3)")),
    ],
)
def test_answers_equal_fresh_runs_in_few_bits_and_in_one_shot(family, policy, words, settings, tmp_path):
    """A one-shot document evicts with the question."""
    given = {"budget": 48} if "one_shot" in settings else SETTINGS
    check_equal(tmp_path, family, policy, words, **given, **settings)


@pytest.mark.parametrize("policy", ["nacl(proxies=0.1)", "pyramidkv(6,3,beta=3)"])
def test_a_text_that_would_be_read_otherwise_is_read_anew(policy):
    one_shot = "nacl" in policy
    settings = dict(budget=48, one_shot=True) if one_shot else dict(SETTINGS, budget=900)
    text = text_of(420)
    document = read("llama", policy, text, **settings)
    assert same(document.ask(QUESTIONS[1], max_new_tokens=6), fresh("llama", policy, text, QUESTIONS[1], **settings))
    assert document.reads == 1


@pytest.mark.parametrize(("policy", "bits"), [("ada-locret", None), *product(["locret", "sirllm"], [None, 4])])
def test_appended_text_is_read_as_if_it_had_been_there(policy, bits):
    text = text_of(260)
    cut = text.index(" ", len(text) // 2)
    document = read("llama", policy, text[:cut], **SETTINGS, kv_bits=bits)
    before = document.cache.get_seq_length()
    document.append(text[cut:])
    assert document.cache.get_seq_length() > before
    expected = fresh("llama", policy, text, QUESTIONS[0], **SETTINGS, kv_bits=bits)
    assert same(document.ask(QUESTIONS[0], max_new_tokens=6), expected)


@pytest.mark.parametrize(
    ("text", "more"),
    [("The boats", "\n\nnets"), ("The boats\n", "nets"), ("# File: a.py\nboats\n", "\n\n# File: more.txt\nnets")],
)
def test_a_file_is_appended_on_a_line_of_its_own(text, more, tmp_path):
    """After the files of a folder it has a heading as they have."""
    (tmp_path / "more.txt").write_text("nets")
    document = read("llama", "streaming", text)
    document.append(tmp_path / "more.txt")
    assert document.tokenizer.decode(document.ids[document.span[0] :]) == text + more


@pytest.mark.parametrize("policy", ["locret", "h2o", "ada-locret", "merge", "expected-attention(future=9)"])
def test_without_its_text_a_document_answers_alike(policy, tmp_path):
    """Rows after the last boundary were read in other pieces: equal to rounding."""
    text = text_of(260) + "\n"
    document = read("llama", policy, text, **SETTINGS)
    document.save(tmp_path / "text.locret", text=False)
    words = (tmp_path / "text.locret").read_bytes()
    assert b"harbour" not in words and b"document.ids" not in words
    loaded = load(tmp_path / "text.locret", policy)
    for question in QUESTIONS:  # both are longer than local_len
        mine, expected = loaded.ask(question, max_new_tokens=6), fresh("llama", policy, text, question, **SETTINGS)
        assert str(mine) == expected[0] and kept(mine.cache) == expected[1]
        close = 1e-6 if policy == "merge" else 1e-12  # slots are merged by scores, which are float32
        for a, b in zip(mine.cache.bounded, expected[2].bounded, strict=True):
            torch.testing.assert_close(a.slots("keys"), b.slots("keys"), atol=close, rtol=0)
            torch.testing.assert_close(a.slots("values"), b.slots("values"), atol=close, rtol=0)
    loaded.append(text_of(60, seed=4))
    assert loaded.tokens > document.tokens and str(loaded.ask(QUESTIONS[0], max_new_tokens=2)) is not None


JOINED = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""Words of Qwen's and Llama 3's tokenizers, which have line ends after a full stop in its token."""


@pytest.mark.parametrize("end", [".", ".\n", '."\n\n', ""])
def test_a_full_stop_in_one_token_with_what_follows_is_saved_without_the_text(end, tmp_path):
    bpe = byte_level(["They came.\n\nWho came?\n"] * 9, 400, words=pre_tokenizers.Split(Regex(JOINED), "isolated"))
    (model, *_), tokenizer, path = parts(), chatting(bpe), tmp_path / "text.locret"
    assert len(tokenizer(".\n\n").input_ids) == 1
    document = Document.read(model, tokenizer, text_of(200).removesuffix(".") + end, **SETTINGS, policy="h2o")
    document.save(path, text=False)
    assert b"harbour" not in path.read_bytes()
    loaded = Document.load(path, model, tokenizer)
    for question in QUESTIONS:
        mine, expected = (one.ask(question, max_new_tokens=6) for one in (loaded, document))
        assert str(mine) == str(expected) and kept(mine.cache) == kept(expected.cache)


@pytest.mark.parametrize(("policy", "words"), [("locret", 60), ("h2o", 5)])
def test_text_added_to_a_file_without_its_text_is_in_the_next_file(policy, words, tmp_path):
    """And nobody can read it there."""
    text, more, path = text_of(260), " " + text_of(words, seed=4), tmp_path / "text.locret"
    read("llama", policy, text, **SETTINGS).save(path, text=False)
    longer = load(path, policy)
    longer.append(more)
    for _ in range(2):  # the second time nothing is new
        longer.save(path)
        assert not any(word in path.read_bytes() for word in (b"harbour", b"boats", b"colour", b"nobody"))
        loaded = load(path, policy)
        assert loaded.tokens == longer.tokens and not loaded.has_text
        for question in QUESTIONS:
            expected = fresh("llama", policy, text + more, question, **SETTINGS)
            mine = loaded.ask(question, max_new_tokens=6)
            assert str(mine) == expected[0] and kept(mine.cache) == expected[1]
        longer = loaded


def test_a_short_question_without_the_text_holds_back_itself(tmp_path):
    text, settings = text_of(260), dict(SETTINGS, local_len=40)
    document = read("llama", "locret", text, **settings)
    document.save(tmp_path / "text.locret", text=False)
    loaded = load(tmp_path / "text.locret", "locret")
    prompt = len(loaded.prompt("Why?"))
    held = prompt - loaded.cache.get_seq_length() - 1
    assert held < 40
    expected = fresh("llama", "locret", text, "Why?", **dict(settings, local_len=held))
    answer = loaded.ask("Why?", max_new_tokens=6)
    assert str(answer) == expected[0] and kept(answer.cache) == expected[1]


def test_what_cannot_be_saved_without_its_text_says_so(tmp_path):
    document = read("llama", REREADING, text_of(120), **SETTINGS)
    with pytest.raises(ValueError, match="reads passages of the text again: it cannot be saved without its text"):
        document.save(tmp_path / "text.locret", text=False)
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_added_to_keeps_its_names_and_no_share_of_the_text(tmp_path):
    document, path = read("llama", "h2o", text_of(260), budget=0.1, chunk=64), tmp_path / "a.locret"
    names = {"model": "a"}
    assert document.cache.settings.budget == int(0.1 * document.tokens) and document.share == 0.1
    document.save(path, names=names)
    for share in (0.1, None):
        loaded = load(path, "h2o")
        assert (loaded.share, loaded.names) == (share, names)
        loaded.append(" More of it.")
        loaded.save(path)


def test_threads_ask_one_document_and_answers_are_written_by_turns():
    model = parts("llama")[0]
    document = read("llama", "locret", text_of(240), **SETTINGS, kv_bits=4)
    alone = [str(document.ask(question, max_new_tokens=6)) for question in QUESTIONS]
    with attach(model), ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda question: str(document.ask(question, max_new_tokens=6)), QUESTIONS * 3))
    assert found == alone * 3
    first, second = (document.ask(question, max_new_tokens=6) for question in QUESTIONS)
    pieces = ["".join(said) for said in zip(*zip(first, second, strict=False), strict=True)]
    assert [str(first), str(second)] == alone and all(a.startswith(b) for a, b in zip(alone, pieces, strict=True))
    assert model.config._attn_implementation != "locret"  # nobody writes any more


def test_a_short_text_is_read_with_each_question(tmp_path):
    document = read("llama", "h2o", text_of(20), **SETTINGS)
    document.save(tmp_path / "text.locret")
    for one in (document, load(tmp_path / "text.locret", "h2o")):
        assert one.cache.get_seq_length() == 0 and one.tokens > 50
        assert [one.cache.kept_positions(layer).shape[-1] for layer in range(len(one.cache.layers))] == [0, 0, 0]
        answer = one.ask(QUESTIONS[0], max_new_tokens=6)
        assert same(answer, fresh("llama", "h2o", text_of(20), QUESTIONS[0], **SETTINGS))


def test_a_text_without_blanks_is_read_ahead():
    text = "".join(chr(0x4E00 + (7 * i * i + i) % 2000) for i in range(900))
    document = read("llama", "h2o", text, **SETTINGS)
    assert document.cache.get_seq_length() >= 3 * 64
    assert same(document.ask(QUESTIONS[0], max_new_tokens=6), fresh("llama", "h2o", text, QUESTIONS[0], **SETTINGS))


def test_errors_before_any_work():
    model, tokenizer, _ = parts("llama")
    document = read("llama", "h2o", text_of(60), **SETTINGS)
    for question in ("", " \n"):
        with pytest.raises(ValueError, match="the question is empty"):
            document.ask(question)
    for lone in ("\ud800", "\udfff?"):
        with pytest.raises(ValueError, match="half of a surrogate pair"):
            document.ask(lone)
    for wrong, said in ((b"The boats", "84"), ([5, 6], "5"), (["The", None], "None")):
        with pytest.raises(TypeError, match=f"text holds {said}, which must be a string"):
            Document.read(model, tokenizer, wrong, 64, "streaming")
    for add in (lambda text: Document.read(model, tokenizer, text, 48, "h2o"), document.append):
        with pytest.raises(ValueError, match=r"is the name of a file: give Path\("):
            add(__file__)
    with pytest.raises(ValueError, match="the document holds no text"):
        Document.read(model, tokenizer, " \n ", 48, "h2o")
    for blank in ("", " \n", [], ["", "\t"]):
        with pytest.raises(ValueError, match="the text that is appended has no words"):
            document.append(blank)
    assert document.ids == read("llama", "h2o", text_of(60), **SETTINGS).ids
