"""Packages of the wheel: those found in two folders, `recipes/` as `locret_recipes`, `examples/` as `locret_examples` and the
demo's heads as `locret_demo`; and its description, which is the README."""

import re
from pathlib import Path

from setuptools import find_packages, setup


def description() -> str:
    """The README for a package index, where the repository's files are not: their links become names, their picture goes."""
    text = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"!\[[^\]]*\]\((?!https://)[^)]*\)\n\n", "", text)
    return re.sub(r"\[`?([^\]`]*)`?\]\((?!https://)([^)#]*)[^)]*\)", name_of, text)


def name_of(link: "re.Match[str]") -> str:
    """What stands for a link to a file: its text, and the file's name where that says something else."""
    text, file = link.groups()
    return f"`{file}`" if text == file or file.endswith(f"/{text}") else f"{text} (`{file}`)"


FOLDERS = {
    "locret_recipes": "recipes",
    "locret_examples": "examples",
    "locret_demo": "checkpoints/smollm2-135m-locret",  # weights, configuration and card alone: 13 MB
}
# `kernels/` has no `__init__.py`: as a package it would shadow the `kernels` package that transformers probes.
setup(
    packages=[*find_packages(include=["locret_kit*"]), *find_packages("kernels"), *FOLDERS],
    package_dir={"locret_kernels": "kernels/locret_kernels", **FOLDERS},
    long_description=description(),
    long_description_content_type="text/markdown",
)
