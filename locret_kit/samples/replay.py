"""Replay: the prompt is repeated after itself, and the queries of the repetition ask for its slots.

Source: KVzip, arXiv 2505.23416, section 3.2: chunk by chunk, each after a request that quotes the end of the chunk before. There
a chunk attends to its own part of the cache; here, as in the model's own reading, to everything before it.
"""

from __future__ import annotations

from ..text.spans import Span
from .sample import Sample

FIRST = "\n\nRepeat the previous context:\n\n"
NEXT = "\n\nRepeat the part of the previous context that follows these words:"
QUOTED = 8
"""Tokens of the chunk before that a request quotes."""


def with_replay(tokenizer, sample: Sample, chunk: int, *, answers: bool) -> Sample:
    """The sample with its prompt repeated, ``chunk`` tokens per request. The repetitions are its answers; with ``answers``
    its own ones stay. Scored is the prompt, as it was."""
    end = sample.prompt_len
    ids, spans = (list(sample.ids), list[Span](sample.answers)) if answers else (list(sample.ids[:end]), [])
    replayed = len(ids)
    first, following = (tokenizer(text, add_special_tokens=False).input_ids for text in (FIRST, NEXT))
    for start in range(0, end, chunk):
        ids += [*following, *sample.ids[max(0, start - QUOTED) : start]] if start else first
        again = sample.ids[start : min(end, start + chunk)]
        spans.append((len(ids), len(ids) + len(again)))
        ids += again
    return Sample(tuple(ids), tuple(spans), scored=end, replayed=replayed)
