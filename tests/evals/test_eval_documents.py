"""Tasks with documents of their own: prompts, cutting, answers, and where the files come from."""

import json
import zipfile
from dataclasses import replace

import pytest
from tiny_text import tiny_tokenizer

from locret_kit.evals.metrics import get_metric
from locret_kit.evals.tasks import Example, document_tasks, find_tasks, row_names
from locret_kit.evals.tasks.document_tasks import entries
from locret_kit.evals.tasks.task import count_ids

BOOK = " ".join(f"Sentence number {i} of the book." for i in range(300))
RECORDS = {
    "infinitebench.passkey": {"context": BOOK, "input": "What is the pass key?", "answer": ["123"]},
    "infinitebench.number_string": {"context": BOOK, "input": "What?", "answer": "123"},
    "infinitebench.kv_retrieval": {"context": BOOK, "input": "Key", "answer": "v"},
    "infinitebench.longbook_sum_eng": {"context": BOOK, "input": "", "answer": ["A summary."]},
    "infinitebench.longbook_choice_eng": {"context": BOOK, "input": "Who?", "options": ["w", "x", "y", "z"], "answer": ["y"]},
    "infinitebench.longbook_qa_eng": {"context": BOOK, "input": "Who?", "answer": ["me", "I"]},
    "infinitebench.longbook_qa_chn": {"context": BOOK, "input": "谁", "answer": ["我"]},
    "infinitebench.longdialogue_qa_eng": {"context": BOOK, "input": "", "answer": ["JANE"]},
    "infinitebench.math_find": {"context": "[1, 2]", "input": "The second largest number of the list is: ", "answer": 1},
    "infinitebench.math_calc": {"context": "1 + 2", "input": "", "answer": [3]},
    "infinitebench.code_run": {"context": BOOK, "input": "give func_12(-3) please", "answer": 4},
    "infinitebench.code_debug": {"context": BOOK, "input": "", "options": ["f", "g", "h", "i"], "answer": "g"},
}  # fmt: skip


def example(name: str, folder, sample: int = 0, length: int = 512, chat: str = "auto", tokenizer=None):
    (task,) = find_tasks([name], data=[str(folder)], samples=50)
    return task, task.make(Example(task, tokenizer or tiny_tokenizer(), length, sample, 0, chat))


def write(folder, name: str, *records: dict) -> None:
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


@pytest.mark.parametrize("name", sorted(name for name in entries() if name.startswith(("infinitebench", "longbench"))))
def test_long_documents_lose_their_middle(name, tmp_path):
    record = RECORDS.get(name) or {
        "context": BOOK, "input": "What now?", "answers": ["1"], "all_classes": ["1", "2"], "length": 3000,
    }  # fmt: skip
    write(tmp_path, entries()[name].file, record)
    task, made = example(name, tmp_path, length=1024)
    size = count_ids(tiny_tokenizer(), made.prompt, made.special)
    assert size <= 1024
    if BOOK in json.dumps(record):
        assert size >= 1010 and made.cut > 1000
        assert "number 0 of" in made.prompt and "number 299 of" in made.prompt and "number 150 of" not in made.prompt
    whole = example(name, tmp_path, length=20_000)[1]
    assert whole.cut == 0 and record["context"] in whole.prompt
    assert whole.prompt.startswith("<|im_start|>") == entries()[name].chat
    assert task.max_new_tokens == entries()[name].max_new_tokens


def test_prompts_are_the_published_ones(tmp_path):
    for name, record in RECORDS.items():
        write(tmp_path, entries()[name].file, record)
    get = lambda name: example(f"infinitebench.{name}", tmp_path, length=30_000)[1]  # noqa: E731
    assert get("longbook_qa_eng").prompt == (
        f"Read the book and answer the question. Be very concise in your answer.\n\n{BOOK}\n\nQuestion: Who?\nAnswer:"
    )
    assert get("longbook_choice_eng").prompt.endswith("\nB. x\nC. y\nD. z\n\nThe letter of the correct answer is")
    assert get("longbook_choice_eng").answer == ["y", "C"] and get("code_debug").answer == ["g", "B"]
    found, run = get("math_find").prompt, get("code_run").prompt
    assert found.startswith("What is the second largest number in the following list?\n\n[1, 2]\n\nThe")
    assert run.startswith("There is a function called func_12 in")
    assert run.endswith("Please compute the exact value of func_12(-3). The value of func_12(-3) is")


LEVAL = [
    {"input": "First book. " + BOOK, "instructions": ["Q1?", "Q2?"], "outputs": ["A", "B"], "evaluation": "exam"},
    {"input": "Second book. " + BOOK, "instructions": ["Q3?"], "outputs": ["C D"], "evaluation": "exam"},
]


def test_leval_asks_every_document_before_it_asks_one_again(tmp_path):
    write(tmp_path, "coursera", *LEVAL, {**LEVAL[1], "evaluation": "LLM"})  # the last is for a model to judge
    asked = [example("leval.coursera", tmp_path, i, 30_000)[1] for i in range(3)]
    assert [made.answer for made in asked] == ["A", "C D", "B"]
    assert ["First book." in made.prompt for made in asked] == [True, False, True]
    assert [made.document for made in asked] == [0, 1, 0]
    assert "Question: Q3?." in asked[1].prompt and asked[0].extra == {"several": True}
    assert [find_tasks(["leval.coursera"], data=[str(tmp_path)], samples=n)[0].size for n in (2, 9)] == [2, 3]


def test_leval_documents_lose_their_end_and_the_answer_begins_as_published(tmp_path):
    write(tmp_path, "quality", *LEVAL)
    for chat in ("auto", "never"):
        made = example("leval.quality", tmp_path, chat=chat)[1]
        assert "First book. Sentence number 0 of" in made.prompt and "number 299" not in made.prompt
        assert 500 <= count_ids(tiny_tokenizer(), made.prompt, made.special) <= 512
        assert made.prompt.endswith("\nAnswer:") and made.special == (chat == "never")
        assert "<|im_start|>assistant\n\nAnswer:" in made.prompt or chat == "never"


def test_leval_summaries_name_the_answer_s_length(tmp_path):
    write(tmp_path, "review_summ", {**LEVAL[1], "outputs": ["one two three"]})
    assert "Answer this question with 3 words." in example("leval.review_summ", tmp_path)[1].prompt


def test_code_loses_its_beginning(tmp_path):
    write(tmp_path, "codeU", *LEVAL)
    made = example("leval.codeU", tmp_path)[1]
    assert "number 299 of" in made.prompt and "First book" not in made.prompt


def test_gsm8k_has_shots_in_front_and_is_never_cut(tmp_path):
    folder = tmp_path / "gsm8k"
    folder.mkdir()
    write(folder, "train", *({"question": f"T{i}?", "answer": f"so\n#### {i}"} for i in range(9)))
    write(folder, "test", {"question": "How many?", "answer": "#### 7"})
    made = example("gsm8k", tmp_path, length=4096)[1]
    assert made.prompt.startswith("Question: T0?\nAnswer: so\n#### 0\n\n") and made.prompt.count("Question:") == 6
    assert made.prompt.endswith("Question: How many?\nAnswer:")
    with pytest.raises(ValueError, match=r"length=20 must be at least \d+: gsm8k is never cut"):
        example("gsm8k", tmp_path, length=20)


def test_summaries_and_likelihood_of_short_texts(tmp_path):
    write(tmp_path, "xsum", {"document": BOOK, "summary": "S"})
    write(tmp_path, "openwebtext", {"text": BOOK})
    assert example("xsum", tmp_path)[1].cut > 0
    for bos in (False, True):
        task, made = example("openwebtext", tmp_path, tokenizer=tiny_tokenizer(bos=bos))
        assert task.kind == "nll" and made.prompt + made.continuation in BOOK
        assert count_ids(made.tokenizer, made.prompt, made.special) in range(508, 513)
    task, made = example("openwebtext_prefill", tmp_path)
    assert task.kind == "nll_prefill" and BOOK.startswith(made.prompt)


@pytest.mark.parametrize("shard", ["train-{:05}-of-00002", "train-{:05}-of-00002-0b1c2d", "train/{:04}"])
def test_all_shards_of_the_hub_s_layout_are_read_in_order(tmp_path, shard):
    """OpenWebText's only split is 'train'. Hidden files are none of it."""
    folder = tmp_path / "openwebtext" / "plain_text"
    for place in (folder / "train", tmp_path / ".cache", folder / ".cache"):
        place.mkdir(parents=True)
        write(place, "openwebtext" if place.parent == tmp_path else "._train", {"text": "hidden"})
    for number in (1, 0):
        write(folder, shard.format(number), *({"text": f"Text {2 * number + i}. {BOOK}"} for i in range(2)))
    task = example("openwebtext", tmp_path)[0]
    assert task.size == 4
    prompts = [example("openwebtext", tmp_path, i)[1].prompt for i in range(4)]
    assert [prompt[:7] for prompt in prompts] == [f"Text {i}." for i in range(4)]


def test_a_data_set_s_other_files_are_not_shards(tmp_path):
    for version in ("1.0.0", "3.0.0"):
        folder = tmp_path / "cnn_dailymail" / version
        folder.mkdir(parents=True)
        for split, n in (("test", 2), ("test_other", 1), ("train", 1)):
            write(folder, split, *({"article": BOOK, "highlights": f"{version} {split} {i}"} for i in range(n)))
    made = [example("cnn_dailymail", tmp_path, i)[1].answer for i in range(2)]
    assert example("cnn_dailymail", tmp_path)[0].size == 2 and made == ["3.0.0 test 0", "3.0.0 test 1"]


def test_the_hub_s_zip_is_read_as_the_tables_name_it(tmp_path, monkeypatch):
    """LongBench's files lie in a zip; the same call on a local zip."""
    record = {"context": "c", "input": "q", "answers": ["a"], "all_classes": None, "length": 1}
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as file:
        file.writestr("data/qasper.jsonl", json.dumps(record) + "\n")
    entry = entries()["longbench.qasper"]
    where = {**entry.hub, "data_files": entry.hub["data_files"].replace("hf://datasets/THUDM/LongBench", str(tmp_path))}
    monkeypatch.setitem(document_tasks.entries(), "longbench.qasper", replace(entry, hub=where))
    (task,) = find_tasks(["longbench.qasper"])
    assert task.size == 1 and task.make(Example(task, tiny_tokenizer(), 1000, 0)).answer == ["a"]


@pytest.mark.parametrize("accepted", ["answers", "answer"])
def test_a_file_of_questions_is_a_task(tmp_path, accepted):
    """Each of an L-Eval record's instructions is a question; the best of several accepted answers counts."""
    several = {"input": BOOK, "instructions": ["Who?", "When?"], "outputs": ["The baker.", "At noon."]}
    write(tmp_path, "mine", {"context": BOOK, "question": "Who?", accepted: ["a baker", "Ann"]}, several)
    path = str(tmp_path / "mine.jsonl")
    (task,) = find_tasks([path])
    requests = [Example(task, tiny_tokenizer(), 512, sample) for sample in range(3)]
    made = [task.make(request) for request in requests]
    assert (task.name, task.size, row_names(f"fidelity:{path}")) == ("mine.jsonl", 3, ["fidelity:mine.jsonl"])
    assert [example.answer for example in made] == [["a baker", "Ann"], ["The baker."], ["At noon."]]
    assert ["Who?" in example.prompt for example in made] == [True, True, False]
    assert [example.document for example in made] == [0, 1, 1] and task.begins_alike  # a text is read once
    for example in made:
        size = count_ids(tiny_tokenizer(), example.prompt, example.special)
        assert 490 <= size <= 512 and example.cut and example.prompt.startswith("<|im_start|>")
    assert get_metric(task.metric)("It was Ann.", made[0].answer, {}) == {"contains": 1.0, "f1": 0.5}
    assert find_tasks([path], metric="qa_f1")[0].metric == "qa_f1"
    wrong = {"contain": "'contain' is unknown. Did you mean 'contains'", "gsm8k": "metric=gsm8k needs more than"}
    wrong |= {"has_name": "metric=has_name needs more than"}  # it counts the first accepted answer alone
    for metric, said in wrong.items():
        with pytest.raises(ValueError, match=said):
            find_tasks([path], metric=metric)
    with pytest.raises(ValueError, match="metric=qa_f1 is for files of questions, and tasks=passkey has none"):
        find_tasks(["passkey"], metric="qa_f1")
    assert [task.name for task in find_tasks([f"agreement:{path}", path])] == ["agreement:mine.jsonl", "mine.jsonl"]


def test_the_path_of_a_file_of_questions_may_have_colons(tmp_path):
    folder = tmp_path / "2026-11-30T10:15"
    folder.mkdir()
    write(folder, "mine", {"context": "c", "question": "q", "answer": "a"})
    path = str(folder / "mine.jsonl")
    assert [task.name for task in find_tasks([path, f"fidelity:{path}"])] == ["mine.jsonl", "fidelity:mine.jsonl"]
    assert row_names(path) == ["mine.jsonl"]
    for name in (f"fidelty:{path}", "fidelty:passkey", ":passkey"):
        with pytest.raises(ValueError, match="prefix='(fidelty)?' is unknown"):
            find_tasks([name])


def test_a_conversation_that_ends_with_a_question_is_asked_its_last_answered_one(tmp_path):
    turns = [("user", f"{BOOK}\n\nWho?"), ("assistant", "Ann."), ("user", "Thanks. When?")]
    write(tmp_path, "mine", {"messages": [{"role": role, "content": content} for role, content in turns]})
    _, made = example(str(tmp_path / "mine.jsonl"), tmp_path, length=20_000)
    assert made.answer == ["Ann."] and "Who?" in made.prompt
    assert "Thanks" not in made.prompt and "Ann." not in made.prompt


def test_a_file_of_questions_that_is_none_is_refused(tmp_path):
    asked, several = {"context": "c", "question": "q"}, {"input": "x", "instructions": ["q"], "outputs": ["a"]}
    for name, second in (("mine", {"summary": "s"}), ("null", {**asked, "answers": ["a", None]})):
        write(tmp_path, name, {**asked, "answer": "a"}, second)
    write(tmp_path, "two", {**several, "answers": ["a", "b"]})
    for names, error, said in (
        (["there/mine.jsonl"], FileNotFoundError, "task=there/mine.jsonl: there is no such file"),
        ([str(tmp_path / "mine.jsonl")], ValueError, r"mine.jsonl: record 1: no known schema has the keys"),
        ([str(tmp_path / "null.jsonl")], ValueError, r"null.jsonl: record 1: answers=\['a', None\] must be strings"),
        (
            [str(tmp_path / "two.jsonl")],
            ValueError,
            "two.jsonl: record 0: answers does not say which of the instructions",
        ),
        (["a/mine.jsonl", "fidelity:b/mine.jsonl"], ValueError, "tasks=a/mine.jsonl and b/mine.jsonl have one name"),
    ):
        with pytest.raises(error, match=said):
            find_tasks(names)


def test_errors_name_file_folder_and_field(tmp_path, monkeypatch):
    import datasets

    def refuse(*args, **kwargs):
        raise ConnectionError("no connection")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    said = r"task=leval.tpo: no tpo\{.json,.jsonl,.parquet\} in .*no connection; get hf://.*tpo"
    with pytest.raises(FileNotFoundError, match=said):
        find_tasks(["leval.tpo"], data=[str(tmp_path)])
    with pytest.raises(FileNotFoundError, match="data=nowhere is no folder"):
        find_tasks(["leval.tpo"], data=["nowhere"])
    write(tmp_path, "tpo", {"input": "x", "instructions": ["q"], "answers": ["a"]})
    with pytest.raises(ValueError, match="task=leval.tpo: a record has no 'outputs'"):
        find_tasks(["leval.tpo"], data=[str(tmp_path)])
    write(tmp_path, "xsum", {"document": BOOK, "summary": "S"})
    with pytest.raises(ValueError, match="length=10 is too short for the task xsum"):
        example("xsum", tmp_path, length=10)
