"""Packages of the wheel: those found in two folders, and `recipes/` under the name `locret_recipes`."""

from setuptools import find_packages, setup

# `kernels/` has no `__init__.py`: as a package it would shadow the `kernels` package that transformers probes.
setup(
    packages=[*find_packages(include=["locret_kit*"]), *find_packages("kernels"), "locret_recipes"],
    package_dir={"locret_kernels": "kernels/locret_kernels", "locret_recipes": "recipes"},
)
