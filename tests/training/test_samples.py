"""Text to token ids: answer spans, schemas, needles and synthetic samples. No download: the tokenizer is made here."""

import gzip
import itertools
import json
import random
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_tokenizers import BARE, CHAT, HAYSTACK, PARAGRAPH, TOK, TRIM, make_tokenizer

from locret_kit.samples import Sample, encode_chat, haystack, synthetic
from locret_kit.samples.haystack import TASKS, make_needle
from locret_kit.samples.records import read_records, to_messages


def chat(*contents):
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


def spans(tokenizer, sample):
    return [tokenizer.decode(sample.ids[a:b]) for a, b in sample.answers]


# --- chat


def test_spans_of_every_turn_with_end_token():
    sample = encode_chat(TOK, chat("Say 42. Then 42 again.", "42", "42? Once more: 42", "No. 42", "why", "42"))
    assert spans(TOK, sample) == ["42<|im_end|>", "No. 42<|im_end|>", "42<|im_end|>"]
    assert TOK.decode(sample.ids[: sample.prompt_len]).endswith("why<|im_end|>\n<|im_start|>assistant\n")


words = st.sampled_from(["assistant", "<|im_start|>", "user\nwhy", "42"])
words |= st.text(alphabet="ab1 .\né日", min_size=1, max_size=12).filter(str.strip)


@given(st.lists(st.tuples(words, words), min_size=1, max_size=4))
def test_spans_are_exact(turns):
    messages = chat(*itertools.chain(*turns))
    sample = encode_chat(TOK, messages)
    assert spans(TOK, sample) == [f"{answer}<|im_end|>" for _, answer in turns]
    assert TOK.decode(sample.ids) == TOK.apply_chat_template(messages, tokenize=False)


@pytest.mark.parametrize("now", ["strftime_now('%H:%M:%S.%f')", "range(99999) | random"])
def test_a_template_that_says_something_else_each_time(now):
    changing = make_tokenizer(f"{{{{ {now} }}}} {CHAT}")
    sample = encode_chat(changing, chat("why", "one", "so?", "two"))
    assert spans(changing, sample) == ["one<|im_end|>", "two<|im_end|>"]


def test_thoughts_that_the_template_leaves_out():
    """The tokens are the tokenizer's own, and an answer's are what the template shows of it."""
    cut = CHAT.replace("m['content']", "m['content'].split('</think>')[-1].strip()")
    thinking = make_tokenizer(cut)
    thinking.add_tokens(["<think>", "</think>"])
    messages = chat("why", "<think>\nhm\n</think>\n\none", "so?", "two")
    sample = encode_chat(thinking, messages)
    assert [*sample.ids] == thinking(thinking.apply_chat_template(messages, tokenize=False)).input_ids
    assert spans(thinking, sample) == ["one<|im_end|>", "two<|im_end|>"]


def test_template_that_trims_and_adds_blocks():
    sample = encode_chat(TRIM, chat("q", " one ", "one", "two"))
    assert [span.strip() for span in spans(TRIM, sample)] == ["one <|im_end|>", "two <|im_end|>"]
    assert TRIM.decode(sample.ids[: sample.prompt_len]).rstrip().endswith("<think></think>")


def test_no_template():
    sample = encode_chat(BARE, chat("one two", "two", "x", "two"))
    assert BARE.decode(sample.ids) == "one two\ntwo\nx\ntwo\n"
    assert spans(BARE, sample) == ["two", "two"]


@pytest.mark.parametrize("spare", [0, 1, 50, 200])
@pytest.mark.parametrize("cut", ["middle", "end"])
def test_truncation_cuts_the_longest_user_message(cut, spare):
    """In its middle, or at its end, as Locret's published code cuts prompts."""
    messages = chat("short", "first answer", "HEAD " + "The sky is blue. " * 60 + "TAIL", "second answer")
    whole = encode_chat(TOK, messages)
    shorter = encode_chat(TOK, messages, max_tokens=len(whole.ids) - spare, cut=cut)
    assert any(shorter.ids == whole.ids[:at] + whole.ids[at + spare :] for at in range(len(whole.ids)))
    assert spans(TOK, shorter) == spans(TOK, whole)
    decoded = TOK.decode(shorter.ids)
    assert "HEAD" in decoded and "short" in decoded and ("TAIL" in decoded) == (cut == "middle" or not spare)


def test_truncation_that_would_cut_answers():
    messages = chat("q", "a long answer " * 30)
    size = len(encode_chat(TOK, messages).ids)
    with pytest.raises(ValueError, match=rf"max_tokens=50 must be at least \d+: the conversation has {size} tokens"):
        encode_chat(TOK, messages, max_tokens=50)


def test_chat_errors():
    with pytest.raises(ValueError, match="the chat template refuses the conversation: roles must alternate"):
        encode_chat(make_tokenizer("{{ raise_exception('roles must alternate') }}"), chat("q", "a"))
    assert Sample((1, 2, 3), ()).prompt_len == 3


# --- records

LACKING = dict.fromkeys(("messages", "instruction", "input", "output", "document", "context", "query", "answer"))
"""Fields that a row of a table lacks where other rows have other schemas."""


@pytest.mark.parametrize(
    "record, index, expected",
    [
        ({"instruction": "q", "output": "a", "input": ""}, 0, chat("q", "a")),
        ({"instruction": "q", "output": "a", "input": "doc", "file": "x"}, 0, chat("q\n\ndoc", "a")),
        ({"messages": chat("q", "a", "r", "b"), "length": 3}, 0, chat("q", "a", "r", "b")),
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, 0, chat("q", "a")),
        ({"document": "d", "question": "q", "answer": "a"}, 0, chat("d\n\nq", "a")),
        ({"context": "d", "query": "q", "answers": ["a", "b"]}, 0, chat("d\n\nq", "a")),
        (LACKING | {"context": "d", "question": "q", "answers": ["a"]}, 0, chat("d\n\nq", "a")),
        (LACKING | {"instruction": "q", "output": "a"}, 0, chat("q", "a")),
        ({"input": "d", "instructions": ["p", "q"], "outputs": ["a", "b"]}, 1, chat("d\n\nq", "b")),
        ({"input": "d", "instructions": ["p", "q"], "outputs": ["a", "b"]}, 4, chat("d\n\np", "a")),
    ],
)
def test_schemas(record, index, expected):
    assert to_messages(record, index=index) == expected


def test_a_record_of_no_schema_is_told_of_all():
    with pytest.raises(ValueError, match=r"no known schema has the keys \['bar', 'foo'\]") as error:
        to_messages({"foo": 1, "bar": 2})
    assert all(name in str(error.value) for name in ("LongAlpaca", "LongAlign", "anti-haystack", "L-Eval", "from"))


def test_read_files(tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = [{"instruction": f"q{i}", "output": "é"} for i in range(3)]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    (tmp_path / "b.jsonl").write_text("\n\n".join(json.dumps(row) for row in rows))
    (tmp_path / "c.json").write_text("\n".join(json.dumps(row) for row in rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "d.parquet")
    (tmp_path / "readme.txt").write_text("no records")
    (tmp_path / ".settings").mkdir()
    for hidden in ("._a.jsonl", ".settings/a.json"):  # of macOS, of an editor
        (tmp_path / hidden).write_bytes(b"\xff")
    for name in ("a.json", "b.jsonl", "c.json", "d.parquet"):
        assert list(read_records(tmp_path / name)) == rows
    assert list(read_records(str(tmp_path))) == rows * 4


def test_read_what_datasets_saved(tmp_path):
    import datasets

    rows = [{"instruction": f"q{i}", "output": "é"} for i in range(3)]
    saved = datasets.Dataset.from_list(rows)
    saved.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=saved, test=saved.select([2])).save_to_disk(tmp_path / "two")
    assert list(read_records(tmp_path / "one")) == list(read_records(tmp_path / "two")) == rows
    assert list(read_records(tmp_path / "two", split="test")) == rows[2:]
    with pytest.raises(ValueError, match=r"split=tset must be one that .*two has: train, test\. Did you mean 'test'"):
        list(read_records(tmp_path / "two", split="tset"))
    (tmp_path / "one" / "state.json").write_text("{")
    with pytest.raises(ValueError, match="one cannot be read: "):
        list(read_records(tmp_path / "one"))


def test_half_a_character_is_a_question_mark_and_a_mark_at_the_beginning_is_none(tmp_path):
    rows = [{"instruction": "a \ud83d b", "output": "\U0001f389"}]
    (tmp_path / "a.jsonl").write_text("\ufeff" + json.dumps(rows[0]))
    (tmp_path / "b.json").write_text("\ufeff" + "\n" * 200 + json.dumps(rows))
    for name in ("a.jsonl", "b.json"):
        assert list(read_records(tmp_path / name)) == [{"instruction": "a ? b", "output": "\U0001f389"}]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("bad.jsonl", b'{"a": 1}\n\n{"a": \n', r"bad\.jsonl, line 3 is not JSON"),
        ("bad.json", b'{"a": 1,\n "b": }', r"bad\.json is not JSON: .*line 2"),
        ("two.json", b'[{"a": 1}]\n[{"a": 2}]', r"two\.json: text after the array's end: '\["),
        ("deep.jsonl", b'{"a": 1}\n' + b"[" * 200_000 + b"\n", r"deep\.jsonl, line 2 is n"),
        ("latin.jsonl", b'{"a": "\xe9"}', r"latin\.jsonl is not UTF-8"),
        ("cut.parquet", b"PAR1 and no more", r"cut\.parquet cannot be read"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_read_errors(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=said):
        list(read_records(tmp_path / name))
    with pytest.raises(FileNotFoundError, match="missing.jsonl does not exist"):
        read_records(tmp_path / "missing.jsonl")


def test_hub_is_streamed(monkeypatch):
    import datasets

    def load(name, split, streaming):
        if name == "no/where":
            raise ConnectionError("offline")
        if name == "lab/script":
            raise RuntimeError("Dataset scripts are no longer supported, but found script.py")
        assert (name, split, streaming) == ("owner/name", "test", True)
        return there[0]

    there: list[object] = [None]
    monkeypatch.setattr(datasets, "load_dataset", load)
    kept = datasets.Dataset.from_list([{"a": 1}])
    for made in ([{"a": 1}], kept, kept.to_iterable_dataset()):
        for there[0] in (made, {"test": made, "train": []}):
            assert list(read_records("owner/name", split="test")) == [{"a": 1}]
    there[0] = {"train": []}
    with pytest.raises(ValueError, match="split=test must be one that owner/name has: train"):
        list(read_records("owner/name", split="test"))
    for name, reason in (("no/where", "offline"), ("lab/script", "Dataset scripts are no longer supported")):
        with pytest.raises(ValueError, match=f"{name} is no local path, and cannot be read from the Hub: {reason}"):
            list(read_records(name))


# --- text


def byte_tokenizer():
    """A token a byte: nothing is trained, so nothing depends on a version."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=bpe)


def test_the_jargon_file_and_needles_in_it_are_the_same_bytes_everywhere(monkeypatch):
    monkeypatch.delenv("LOCRET_JARGON", raising=False)
    read = haystack.load_text("jargon")
    assert sha256(read.encode()).hexdigest() == "40dfb4b98191a670a09a183d5798d50f243d23fdbd1495dcc0aca2ce5895ba97"
    needle = make_needle("R.PassKey", byte_tokenizer(), n_tokens=4000, depth=0.5, seed="bytes", haystack=read)
    assert (sha256(needle.prompt.encode()).hexdigest()[:16], needle.answer) == ("b28db7a016a19cee", "30534")


def test_load_text(tmp_path, monkeypatch):
    assert haystack.load_text("pydoc").count(" the ") > 1000
    (tmp_path / "a.jsonl").write_text('{"input": "one"}\n{"input": "two"}\n')
    (tmp_path / "t.txt.gz").write_bytes(gzip.compress("zipped é".encode()))
    (tmp_path / "._a.jsonl").write_bytes(b"\xff")
    assert haystack.load_text(tmp_path / "a.jsonl") == haystack.load_text(tmp_path) == "one\n\ntwo"
    monkeypatch.setenv("LOCRET_JARGON", str(tmp_path / "t.txt.gz"))
    assert haystack.load_text("jargon") == "zipped é"
    monkeypatch.setenv("LOCRET_JARGON", str(tmp_path / "none.txt"))
    with pytest.raises(FileNotFoundError, match="apt-get install jargon-text"):
        haystack.load_text("jargon")
    (tmp_path / "texts" / "folder.txt").mkdir(parents=True)
    (tmp_path / "texts" / "folder.txt" / "one.txt").write_text("one")
    (tmp_path / "texts" / ".notes").mkdir()
    (tmp_path / "texts" / ".notes" / "settings.json").write_text("{}")
    assert haystack.load_text(tmp_path / "texts") == "one"
    (tmp_path / "b.jsonl").write_text('{"output": "one"}\n')
    with pytest.raises(ValueError, match=r"b.jsonl, record 0: must have a string `input`, has \['output'\]"):
        haystack.load_text(tmp_path / "b.jsonl")


@given(
    st.sampled_from([HAYSTACK, PARAGRAPH, "Ein Satz, größer. 日本語のテキスト。 Ja!\n"]),
    st.integers(1, 700) | st.integers(700, 4000),
    st.integers(0, 99),
)
def test_cut_length_and_start(source, n_tokens, seed):
    piece = haystack.cut(source, TOK, n_tokens, random.Random(seed))
    assert abs(haystack.count(TOK, piece) - n_tokens) <= max(2, 0.01 * n_tokens)  # 2: a character may take three tokens
    beginnings = [source[at:] for at in haystack.starts(source)]
    head = piece[:10]
    assert any(line.startswith(head[: len(line)]) for line in beginnings)


# --- needles


@given(
    st.sampled_from(sorted(TASKS)),
    st.integers(220, 3000),
    st.floats(0, 1),
    st.integers(0, 99),
    st.sampled_from([None, HAYSTACK]),
    st.sampled_from(["infinitebench", "open"]),
)
def test_needle(task, n_tokens, depth, seed, haystack, ending):
    needle = make_needle(task, TOK, n_tokens=n_tokens, depth=depth, seed=seed, haystack=haystack, ending=ending)
    words = TASKS[task]
    assert needle.n_tokens == len(TOK(needle.prompt)["input_ids"]) <= n_tokens
    assert needle.n_tokens >= 0.99 * n_tokens - 1
    blank = "" if ending == "open" else "\n\n"
    assert needle.prompt == f"{needle.document}\n\n{needle.question}{blank}{needle.prefix}"
    assert needle.prefix == ("" if ending == "open" else words.prefix)
    assert needle.prompt.count("\n" + words.needle.format(key=needle.answer)) == 1
    assert needle.prompt.count(needle.answer) == 2
    assert len(needle.answer) == 5 + words.repeats
    assert abs(needle.depth - depth) <= max(0.02, 30 / (n_tokens - 150))  # half a sentence


# --- synthetic


@pytest.mark.parametrize("n_tokens, repetitive", [(700, 0.3), (1500, 0.0), (1500, 1.0)])
def test_synthetic_samples(n_tokens, repetitive, monkeypatch):
    monkeypatch.setattr(synthetic, "REPETITIVE", repetitive)
    chats = 0
    for i in range(40):
        sample = synthetic.synthetic_sample(TOK, [HAYSTACK, PARAGRAPH * 9], n_tokens, 5, i)
        assert 0.9 * n_tokens <= len(sample.ids) <= n_tokens
        ((start, end),) = sample.answers
        prompt, answer = TOK.decode(sample.ids[:start]), TOK.decode(sample.ids[start:end])
        chats += answer.endswith("<|im_end|>")
        assert prompt.endswith("<|im_start|>assistant\n") == answer.endswith("<|im_end|>")
        answer = answer.removesuffix("<|im_end|>")
        assert answer.startswith(" ") != prompt.endswith("\n")
        # the last word of the answer is in the text
        assert answer.split()[-1].rstrip(".") in prompt
    assert 8 < chats < 32
