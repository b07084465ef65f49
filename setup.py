"""Packages of the wheel: those found in two folders, `recipes/` as `locret_recipes` and `examples/` as `locret_examples`."""

from setuptools import find_packages, setup

# `kernels/` has no `__init__.py`: as a package it would shadow the `kernels` package that transformers probes.
setup(
    packages=[*find_packages(include=["locret_kit*"]), *find_packages("kernels"), "locret_recipes", "locret_examples"],
    package_dir={
        "locret_kernels": "kernels/locret_kernels",
        "locret_recipes": "recipes",
        "locret_examples": "examples",
    },
)
