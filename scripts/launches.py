"""Launches and bytes of one layer, by module and operator.

They are counted in a prefill chunk over a full cache, for a decoded token, and for the evictions of two layers at the end of
that chunk's forward.

    python scripts/launches.py [--model phi3-mini llama3.1-8b]

The model has its real sizes on PyTorch's meta device, so neither weights nor a GPU are needed. Bytes are those that must move;
views launch nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import partial
from math import prod
from typing import NamedTuple, Protocol
from unittest import mock

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.nn.modules import module as hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, PretrainedConfig

from locret_kernels import common
from locret_kernels.backend import function
from locret_kit import BoundedCache, HeadsConfig, RetainingHeads, attach
from locret_kit.backbones.decoder_modules import decoder_of
from locret_kit.backbones.libraries import forward
from locret_kit.backbones.spec import spec_of
from locret_kit.cache.pages import PagePool
from locret_kit.cli.plan import resolve
from locret_kit.planning.inference_plan import Setting
from locret_kit.runtime.drivers.graph import GraphDriver, TextsDriver
from locret_kit.settings import RunSettings

ALLOCATES = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "lift_fresh",
    "detach",
    "_unsafe_view",
}


class Launch(NamedTuple):
    """One launch."""

    scope: str
    """The innermost module's name in the layer, or its class."""
    operator: str
    nbytes: int


class Kernel(Protocol):
    """A Triton kernel."""

    __name__: str
    arg_names: Sequence[str]


class Recorder(TorchDispatchMode):
    """Collects launches inside one layer.

    Args:
        layer: one of the decoder's.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.names: Mapping[nn.Module, str] = {module: name or "layer" for name, module in layer.named_modules()}
        self.layer = layer
        self.within: list[nn.Module] = []
        self.launches: list[Launch] = []
        self.ends: list[Launch] = []
        """Launches after the layer, which is the last one, for all layers together."""
        self.rows = 0
        """Rows of a head that one token's attention reads."""

    @contextmanager
    def within_layer(self, n: int) -> Iterator[None]:
        """A layer of a step without modules; the second one counts."""
        self.within += [self.layer] * (n == 1)
        yield
        self.within.clear()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Modules and kernels are watched within the block."""
        entered = hooks.register_module_forward_pre_hook(lambda module, args: self.within.append(module))
        left = hooks.register_module_forward_hook(lambda module, args, out: self.leave(module))
        try:
            with self, mock.patch.object(common, "launch", self.launch):
                yield
        finally:
            entered.remove()
            left.remove()

    def leave(self, module: nn.Module) -> None:
        """A module has ended."""
        self.within.remove(module)
        if module is self.layer:
            self.ends.clear()

    def add(self, operator: str, nbytes: int) -> None:
        """A launch, if the layer is running, or all have run."""
        inner = self.within[-1] if self.within else self.layer
        if self.layer in self.within:
            self.launches.append(Launch(self.names.get(inner, type(inner).__name__), operator, nbytes))
        elif hasattr(inner, "layers"):
            self.ends.append(Launch("all layers", operator, nbytes))

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        out, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor) and x.numel()]
        if made and name not in ALLOCATES and not func.is_view:
            self.add(name, moved(name, [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)], made))
        return out

    def launch(self, kernel: Kernel, grid: tuple[int, ...], *args: object, **constants: object) -> None:
        """Substitute for ``locret_kernels.common.launch``."""
        given, name = dict(zip(kernel.arg_names, args, strict=False)) | constants, kernel.__name__.strip("_")
        # What stands in for a tensor that a kernel does not read is one of the others.
        nbytes = sum(map(extent, {id(x): x for x in args}.values()))
        if name == "compact_rows":  # rows that stay are read and written, whatever the buffer holds
            moving = 2 * given["like"].element_size() * given["D"] + given["index"].element_size()
            nbytes = grid[0] * given["K"] * moving + extent(given["table"])
        elif name == "ragged_decode":
            levels = [f"{x}_{level}" for x in ("key", "value") for level in ("step", "zero") if constants["BITS"] == 8]
            read = [given[x] for x in ("keys", "values", *levels)]
            nbytes = grid[0] * self.rows * sum(x.shape[-1] * x.element_size() for x in read)
        elif name == "enter_rows":  # keys and values are read and written; of the buffers it has all rows
            k, v, rows = given["k"], given["v"], given["k"].shape[0] * given["k"].shape[1]
            read = {id(x): x for x in (given["score"], given["fc2"]) if x is not k}.values()
            nbytes = 2 * (extent(k) + extent(v)) + sum(map(extent, read)) + rows * 4 * (2 + constants["X"])
        self.add(name, nbytes)


def extent(x: object) -> int:
    """Bytes of a tensor's different elements: an axis of stride 0 repeats what is there."""
    if not isinstance(x, Tensor):
        return 0
    return x.element_size() * prod(n for n, stride in zip(x.shape, x.stride(), strict=True) if stride)


def moved(name: str, given: Sequence[Tensor], made: Sequence[Tensor]) -> int:
    """Bytes that an operator of PyTorch must read and write."""
    if name in ("index", "gather", "index_select", "embedding"):
        return 2 * extent(made[0]) + sum(extent(x) for x in given[1:] if not x.is_floating_point())
    if name in ("index_put_", "scatter_", "index_copy_"):
        return 2 * extent(given[-1]) + sum(map(extent, given[1:-1]))
    if name in ("copy_", "fill_", "zero_"):  # what is written is not read
        return sum(map(extent, given[:2]))
    return sum(map(extent, [*given, *made]))


def on_meta(config: PretrainedConfig, setting: Setting) -> tuple[nn.Module, RetainingHeads]:
    """The model of two layers, and its heads. The second layer makes no tables that all layers share."""
    function("enter_rows", "triton")  # an error here where Triton is missing
    small = deepcopy(config)
    small.num_hidden_layers = 2
    with torch.device("meta"):
        dtype = getattr(torch, setting.dtype)
        model = AutoModelForCausalLM.from_config(small, dtype=dtype, attn_implementation="sdpa")
        heads = RetainingHeads(HeadsConfig.for_backbone(spec_of(small), "recorded", setting.width))
    return model.eval().requires_grad_(False), heads


def record(config: PretrainedConfig, setting: Setting) -> tuple[list[Launch], list[Launch], list[Launch]]:
    """Launches of a layer in a chunk that begins with a full cache, of the evictions of two layers at its end, and of a layer for
    a token decoded as a graph."""
    model, heads = on_meta(config, setting)
    chunk, tokens = setting.chunk, (-(-setting.budget // setting.chunk) + 2) * setting.chunk
    ids = torch.zeros(1, tokens, dtype=torch.int64, device="meta")
    recorder = Recorder(decoder_of(model).layers[1])
    with torch.no_grad(), attach(model):
        run = replace(setting.run, backend="triton", one_shot=False)
        cache = BoundedCache(run, setting.policy, heads, prompt_length=tokens)
        for start in range(0, tokens, chunk):
            if start == tokens - 2 * chunk:
                recorder.launches.clear()
            elif start == tokens - chunk:
                steady, ends = recorder.launches.copy(), recorder.ends.copy()
            with recorder.recording():
                forward(model, ids[:, start : start + chunk], cache, logits_to_keep=1)
        decoder = GraphDriver(model, cache)  # not while modules are watched, which then run
        recorder.rows = cache.kept_rows[1]
        recorder.launches.clear()
        step, watch = decoder.dense, recorder.within_layer
        assert step is not None, "the model's matrices are all of it"
        watched = partial(lambda layer, n, *rest: watch(n)(layer)(n, *rest), step.layer)
        with recorder.recording(), mock.patch.object(step, "layer", watched):
            decoder([cache], [0])
    return steady, ends, recorder.launches


def record_texts(config: PretrainedConfig, setting: Setting, texts: int) -> list[Launch]:
    """Launches of a layer for a token of each of several texts, whose rows are pages of one pool, decoded as a graph."""
    model, heads = on_meta(config, setting)
    recorder, pool = Recorder(decoder_of(model).layers[1]), PagePool(texts)
    ids = torch.zeros(1, setting.chunk, dtype=torch.int64, device="meta")
    with torch.no_grad(), attach(model), recorder.recording():
        run = replace(setting.run, backend="triton", one_shot=False)
        caches = [BoundedCache(run, setting.policy, heads, prompt_length=setting.chunk) for _ in range(texts)]
        for cache in caches:
            cache.bind(model)
            # Frequencies on this device cannot be compared: all texts have those of the first.
            cache.state.change_context(ropes=caches[0].context.ropes)
            pool.enter(cache)
            forward(model, ids, cache, logits_to_keep=1)
        recorder.launches.clear()
        TextsDriver(model, caches[0])(caches, [0] * texts)
    return recorder.launches


def setting_of(model: str, tokens: int = 131072, dtype: str = "bfloat16") -> tuple[PretrainedConfig, Setting]:
    """Configuration of a recipe's backbone, and the recipe's settings."""
    config, recipe = resolve(model)
    names = ("budget", "chunk", "stabilizers", "local_len")
    run = RunSettings.of({name: recipe.get(f"infer.{name}") for name in names})
    return config, Setting(tokens, run, dtype, recipe["heads.d_hidden"])


def table(launches: Sequence[Launch]) -> list[str]:
    """A line for each module and operator, in the order of their first launches."""
    count, nbytes = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for scope, operator, size in launches:
        count[scope, operator] += 1
        nbytes[scope, operator] += size
    lines = [f"  {scope:<28} {operator:<32} {count[scope, operator]:4} {size / 1e6:10.2f} MB"
             for (scope, operator), size in nbytes.items()]  # fmt: skip
    return [*lines, f"  {'all':<61} {len(launches):4} {nbytes.total() / 1e6:10.2f} MB"]


def main(argv: list[str] | None = None) -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--model", nargs="+", default=["phi3-mini", "llama3.1-8b"])
    for model in parser.parse_args(argv).model:
        config, setting = setting_of(model)
        steady, ends, token = record(config, setting)
        print(
            f"{model}, one layer, {setting}: a chunk of {setting.chunk} tokens",
            *table(steady),
            "evictions of two layers at its end",
            *table(ends),
            "a token",
            *table(token),
            sep="\n",
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
