"""The wording of synthetic samples: ``wording.yaml``, whose comments say what is what. What begins with HELD is for validation
alone."""

from __future__ import annotations

from importlib import resources

import yaml

_TABLE: dict[str, list] = yaml.safe_load(
    resources.files(__package__).joinpath("wording.yaml").read_text(encoding="utf-8")
)
NAMES, THINGS, PLACES, PROJECTS = (_TABLE[name] for name in ("names", "things", "places", "projects"))
COLOURS, JOBS, MONTHS, WORDS = (_TABLE[name] for name in ("colours", "jobs", "months", "words"))
QUOTES, HELD_QUOTES, NEEDLES = _TABLE["quotes"], _TABLE["held_quotes"], _TABLE["needles"]
SENTENCES, HELD_SENTENCES = tuple(_TABLE["sentences"]), tuple(_TABLE["held_sentences"])
PROMPTS, HELD_PROMPTS = tuple(_TABLE["prompts"]), tuple(_TABLE["held_prompts"])
FACTS, HELD_FACTS = tuple(_TABLE["facts"]), tuple(_TABLE["held_facts"])
"""Facts, each a list of texts: see ``facts.Template``."""
