"""Groups of tasks over which papers give averages."""

from __future__ import annotations

_LONGBENCH = {
    "longbench-single-doc": ("narrativeqa", "qasper", "multifieldqa_en"),
    "longbench-multi-doc": ("hotpotqa", "2wikimqa", "musique"),
    "longbench-summarization": ("gov_report", "qmsum", "multi_news"),
    "longbench-few-shot": ("trec", "triviaqa", "samsum"),
    "longbench-synthetic": ("passage_count", "passage_retrieval_en"),
    "longbench-code": ("lcc", "repobench-p"),
}
"""LongBench's categories, in English."""
_ENGLISH = tuple(name for names in _LONGBENCH.values() for name in names)
_LOCRET = (
    "passkey", "number_string", "longbook_sum_eng", "longbook_qa_eng", "longbook_choice_eng", "longbook_qa_chn",
    "longdialogue_qa_eng", "code_debug", "math_find",
)  # fmt: skip
_LEVAL = ("codeU", "natural_question", "legal_contract_qa", "narrative_qa", "meeting_summ", "review_summ")
_NACL = ("passage_retrieval_zh", "passage_retrieval_en", "repobench-p", "hotpotqa", "narrativeqa", "triviaqa", "qmsum")

GROUPS = {
    "locret-infinitebench": tuple(f"infinitebench.{name}" for name in _LOCRET),
    "locret-leval": tuple(f"leval.{name}" for name in _LEVAL),
    **{group: tuple(f"longbench.{name}" for name in names) for group, names in _LONGBENCH.items()},
    "adakv-longbench": tuple(f"longbench.{name}" for name in _ENGLISH),
    "kvcrush-longbench": tuple(f"longbench.{name}" for name in _ENGLISH if name != "lcc"),
    "nacl-longbench": tuple(f"longbench.{name}" for name in _NACL),
}
"""Tasks of the averages in Locret, table 2 (nine and six), in LongBench, in Ada-KV, table 2 (sixteen), KVCrush, table III
(fifteen), and NaCl, table 2 (seven)."""

_NIAH = ("single", "single_uuid", "multikey", "multivalue", "multiquery", "multikey_line", "multikey_uuid")
MEANS = {**GROUPS, "ruler": (*(f"ruler.niah_{name}" for name in _NIAH), "ruler.vt", "ruler.cwe", "ruler.fwe")}
"""Tasks of every average in the table of all tasks: those of the papers, and of RULER's synthetic tasks."""
