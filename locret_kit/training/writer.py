"""What the frozen backbone writes for its own training samples, kept in a file: a resumed run writes nothing again."""

import json
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path

from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..cache.bounded import BoundedCache
from ..files import locked, parse_json
from ..runtime.session import Answer
from ..text.template import SWITCHES, has_template, render_messages, takes
from ..text.tokens import stream_ids
from ..text.untrusted import defused

NEW = 128
"""Tokens of an answer, at most."""


class Writer:
    """Greedy answers of a backbone to requests about a document.

    Args:
        path: file of the answers, a JSON object per line. load: gives the backbone, once an answer is missing. model: its name;
            answers of others in the file are left aside.
    """

    def __init__(
        self, path: Path, tokenizer: PreTrainedTokenizerBase, load: Callable[[], PreTrainedModel], model: str = ""
    ) -> None:
        self.path, self.tokenizer, self.load, self.model = path, tokenizer, load, model

    def __getstate__(self) -> dict[str, object]:
        """Without the backbone: processes that prepare samples write nothing."""
        return self.__dict__ | {"load": None}

    def __call__(self, asked: Sequence[tuple[str, str]]) -> list[str]:
        """Answers to pairs of document and request. Processes that share the file wait for each other."""
        # Not of the prompt, in which a template may write the day.
        keys = [sha256("\0".join(one).encode("utf-8", "replace")).hexdigest() for one in asked]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with locked(self.path.with_name(f".{self.path.name}.lock"), f"{self.path} is being written", wait=-1):
            known = self._known()
            missing = {key: one for key, one in zip(keys, asked, strict=True) if key not in known}
            with self.path.open("a", encoding="utf-8") as file:
                for key, one in tqdm(missing.items(), "self-study", disable=None if missing else True):
                    known[key] = self._answer(self._prompt(*one))
                    file.write(json.dumps({"prompt": key, "model": self.model, "answer": known[key]}) + "\n")
                    file.flush()
        return [known[key] for key in keys]

    def _known(self) -> dict[str, str]:
        """Answers in the file. A line that a kill has cut is removed."""
        text = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            self.path.write_text(whole, encoding="utf-8")
        rows = (parse_json(line, str(self.path)) for line in whole.splitlines())
        mine = (row for row in rows if isinstance(row, dict) and row.get("model", self.model) == self.model)
        return {row["prompt"]: row["answer"] for row in mine}

    def _prompt(self, document: str, request: str) -> str:
        off = {name: False for name in SWITCHES if takes(self.tokenizer, name)}  # a thought would take all of NEW
        asked = [{"role": "user", "content": request}]
        before, after = render_messages(self.tokenizer, asked, about=True, arguments=off)
        return f"{before}{defused(self.tokenizer, document)}{after}"

    def _answer(self, prompt: str) -> str:
        model, ids = self.load(), list(stream_ids(self.tokenizer, [prompt], special=not has_template(self.tokenizer)))
        cache = BoundedCache(None, "full", prompt_length=len(ids))
        return str(Answer(model, self.tokenizer, ids, cache, max_new_tokens=NEW)).strip()
