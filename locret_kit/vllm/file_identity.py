"""Identity of the model that vLLM serves, from its files: vLLM's own weights are joined and split, those of the files are not."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PretrainedConfig

from ..backbones.identity import identity_of
from ..backbones.load import resolve_model
from ..hub import pull


class Files:
    """A model as ``identity_of`` reads one: its configuration, and its weights in the order of transformers' own.

    Raises:
        ValueError: the weights are no ``.safetensors`` files with transformers' names.
    """

    def __init__(self, name: str, config: PretrainedConfig) -> None:
        from transformers import AutoModelForCausalLM

        self.config, self.name = config, name
        with torch.device("meta"):
            made = AutoModelForCausalLM.from_config(deepcopy(config), dtype=torch.float32)
        self.names = [weight for weight, _ in made.named_parameters()]

    def parameters(self) -> Iterator[Tensor]:
        """The weights, one at a time."""
        where: dict[str, Path] = {}
        folder = Path(resolve_model(self.name))
        for path in sorted(folder.glob("*.safetensors")) if folder.exists() else pull(self.name, _weights):
            with self._opened(path) as file:
                where |= dict.fromkeys(file.keys(), path)
        for name in self.names:
            if name not in where:
                raise ValueError(
                    f"documents: {self.name} holds no weight {name}: no document can be compared with this model"
                )
            with self._opened(where[name]) as file:
                yield file.get_tensor(name)

    @staticmethod
    def _opened(path: Path) -> safe_open:
        try:
            return safe_open(path, framework="pt")
        except SafetensorError as error:
            raise ValueError(f"documents: {path} cannot be read: {error}") from error


def _weights(names: list[str]) -> list[str]:
    return [name for name in names if name.endswith(".safetensors")]


def identity_of_files(name: str, config: PretrainedConfig) -> dict[str, object]:
    """``backbones.identity.identity_of`` the model in a folder or in the Hub's cache."""
    return identity_of(Files(name, config))  # type: ignore[arg-type]
