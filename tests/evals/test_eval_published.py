"""Our figures beside those of the benchmarks' own scripts.

The outputs and answers are written for this test: corners of each benchmark's normalisation. The numbers were printed by
the published functions (run from checkouts, nothing of them is kept here):

- OpenBMB/InfiniteBench 88b3daa, src/compute_scores.py, get_score_one
- OpenLMLab/LEval cd34b05, Evaluation/auto_eval.py with em.py and f1.py; ROUGE by rouge-score 0.1.2 as in rouge.py
- THUDM/LongBench 2e00731, LongBench/eval.py and metrics.py with fuzzywuzzy 0.18.0, rouge 1.0.1, jieba 0.42.1
"""

# ruff: noqa: RUF001

import pytest

from locret_kit.evals.metrics import get_metric
from locret_kit.evals.tasks.document_tasks import entries

CLASSES = {
    "longbench.trec": ["Food", "Food and drink", "Group", "Group of people", "Other"],
    "longbench.lsht": ["体育", "体育竞赛", "经济"],
}
CASES = [
    ("infinitebench.passkey", "Key 007, or 7", "007", 1),
    ("infinitebench.passkey", "It is ４２ or 42.", "42", 1),
    ("infinitebench.number_string", "The digits are 1122 3344", "11223344", 0),
    ("infinitebench.kv_retrieval", "{\"k\": 'ab-12'}", "ab-12", 1),
    ("infinitebench.kv_retrieval", "value=ab-12", "ab-12", 0),
    ("infinitebench.kv_retrieval", "(ab-12)", "ab-12", 0),
    ("infinitebench.longbook_sum_eng", "She sails north.\nA storm comes.", ["A storm comes.\nShe sails north."], 1),
    ("infinitebench.longbook_sum_eng", "She sails north. A storm comes.", ["A storm comes.\nShe sails north."], 1),
    ("infinitebench.longbook_choice_eng", "Dora did it", ["Dora", "B"], 0),
    ("infinitebench.longbook_choice_eng", "the option is Dora", ["Dora", "B"], 1),
    ("infinitebench.longbook_choice_eng", "Hence the answer is (B)", ["Dora", "B"], 0),
    ("infinitebench.longbook_choice_eng", "Hence the answer is:  B", ["Dora", "B"], 1),
    ("infinitebench.longbook_choice_eng", "My answer:B", ["Dora", "B"], 0),
    ("infinitebench.longbook_choice_eng", "either AB or B", ["Dora", "B"], 0),
    ("infinitebench.longbook_qa_eng", "The theatre, an old one.", ["old theatre one", "theatre"], 1),
    ("infinitebench.longbook_qa_eng", "well-known", ["well known"], 0),
    ("infinitebench.longbook_qa_chn", "“茶馆”，在 北京", ["北京的茶馆"], 0.8),
    ("infinitebench.longdialogue_qa_eng", "Dr. Jane-Ann", ["JANE-ANN", "JANE"], 1),
    ("infinitebench.longdialogue_qa_eng", "(jane)", ["JANE"], 0),
    ("infinitebench.math_find", "-4", 4, 1),
    ("infinitebench.math_find", "0.50", 0.5, 1),
    ("infinitebench.math_find", "3", 3.0, 1),
    ("infinitebench.math_calc", "[3, -5, 8, 1]", [3, 5, 8, 2], 0.75),
    ("infinitebench.math_calc", "", [3, 5], 0),
    ("infinitebench.code_run", "returns 12.5", 5, 1),
    ("infinitebench.code_run", "x = +7", 7, 1),
    ("infinitebench.code_run", "7 \n", 7, 1),
    ("infinitebench.code_run", "(-7)", -7, 0),
    ("infinitebench.code_debug", "B) merge", ["merge", "B"], 0),
    ("infinitebench.code_debug", "B: anything", ["merge", "B"], 1),
    ("infinitebench.code_debug", "The correct option is: **B**", ["merge", "B"], 1),
    ("infinitebench.code_debug", "The bug is: `merge_all`", ["merge", "B"], 1),
    ("infinitebench.code_debug", "The answer is: C, the right answer: B", ["merge", "B"], 0),
    ("leval.quality", "It is C, not B", "(B) Because", 0),
    ("leval.quality", "none of them", "A", 1),
    ("leval.tpo", "\n", "B", 0),
    ("leval.coursera", "B and C", "BC", 0.25),
    ("leval.coursera", "B. one C. two D) three", "BCD", 1),
    ("leval.coursera", "so:DB", "BD", 0.25),
    ("leval.coursera", "A. Question 2: C. D.", "AC", 0.25),
    ("leval.coursera", "CBA", "AB", 0),
    ("leval.coursera", "(A, C)", "AC", 0.25),
    ("leval.topic_retrieval_longchat", 'The topic was "Deep Sea  Fish".', "deep sea fish", 1),
    ("leval.topic_retrieval_longchat", "a deep-sea fish", "deep sea fish", 0),
    ("leval.gsm100", "The answer is $1,200.50.", "1200", 1),
    ("leval.gsm100", "7 left, 9 gone\n\nThe end: 4", "9", 1),
    ("leval.gsm100", "no number", "9", 0),
    ("leval.gsm100", "it is nine", "nine", 1),
    ("leval.gsm100", "it is 9", "nine", 0),
    ("leval.codeU", "the final output will be [ [1, 2], [3] ] I think so", "[[1 2] [3]]", 1),
    ("leval.codeU", "10.0, 20.0 is printed", "10 20", 1),
    ("leval.codeU", "40 is not 4 at all, and then come many more words", "40", 0),
    ("leval.codeU", "[]", "[]", 1),
    ("leval.codeU", "the final output is []", "[]", 1),
    ("leval.codeU", 'x = "CAB"', "ABC", 0),
    ("leval.codeU", "CAB", "ABC", 0.25),
    ("leval.codeU", "so the list is []", "[]", 0),
    ("leval.codeU", "5.0", "5", 1),
    ("leval.sci_fi", "It is untrue, so false. [fact: true]", "True [fact: True]", 1),
    ("leval.sci_fi", "[fact: true]", "True [fact: True]", 0),
    ("leval.narrative_qa", "An apple; the APPLE a day", "apple a day", 0.8),
    ("leval.news_summ", "The cats' 3 hats.\nThey fell", "They fell: the cats' hats", 0.5455),
    ("longbench.narrativeqa", "the answer", ["an answer!", "nothing"], 1),
    ("longbench.multifieldqa_zh", "他在北京大学读书。", ["北京大学", "清华"], 0.4),
    ("longbench.dureader", "今天天气很好，出去走走", ["今天天气好，我们出去走走"], 0.8333),
    ("longbench.gov_report", "a b a b c. d", ["a b c. d a"], 1),
    ("longbench.gov_report", ".", ["a b"], 0),
    ("longbench.trec", "\nFood and drink\nGroup", ["Food and drink"], 1),
    ("longbench.trec", "Group of people or Food", ["Group of people"], 0.5),
    ("longbench.trec", "Group of people, Other", ["Group"], 0.3333),
    ("longbench.lsht", "体育竞赛", ["体育竞赛"], 1),
    ("longbench.lsht", "体育竞赛 经济", ["体育"], 0.3333),
    ("longbench.triviaqa", "\n\nThe Nile\nPassage: the Nile", ["Nile river", "the nile"], 1),
    ("longbench.samsum", "Ann will call.\nBob too.", ["Ann calls. Bob will call too."], 0.6667),
    ("longbench.passage_count", "12 or 2, not 2", ["2"], 0.6667),
    ("longbench.passage_count", "two", ["2"], 0),
    ("longbench.passage_retrieval_en", "Paragraph 3, i.e. 03", ["Paragraph 3"], 0.5),
    ("longbench.passage_retrieval_zh", "段落5和段落15", ["段落5"], 0.5),
    ("longbench.lcc", "\n    # first\n    for key in sorted(seen):\n", ["        for name in sorted(names):"], 0.74),
    ("longbench.lcc", "return total / len(values)", ["return sum(values)"], 0.68),
    ("longbench.lcc", "    if (count > limit) { stop(); }", ["    while (limit < count) { go(count); }"], 0.43),
    ("longbench.repobench-p", "from pathlib import Path, PurePath", ["import pathlib.PurePath as P"], 0.55),
    ("longbench.repobench-p", "// a\n", ["x"], 0),
]


@pytest.mark.parametrize(("task", "output", "answer", "published"), CASES)
def test_corners_of_the_published_scripts(task, output, answer, published):
    entry = entries()[task]
    extra = {"classes": CLASSES[task]} if task in CLASSES else entry.extra
    figures = get_metric(entry.metric)(output, answer, extra)
    assert next(iter(figures.values())) == pytest.approx(published, abs=5e-4)


def test_every_metric_of_the_three_benchmarks_is_compared():
    used = {entry.metric for name, entry in entries().items() if "." in name}
    assert used == {entries()[task].metric for task, *_ in CASES}
