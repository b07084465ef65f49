"""Retaining heads: one small network per layer from a token's q, k, v (before RoPE) to its predicted importance.

Source: Locret, section 3.2.
A head depends on one token alone, so a score is computed once, when the token enters. Its files: a folder (safetensors and
config.json), one ``.pt`` file, the published flat ``.bin``, the Hub.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal, Unpack

import torch
from annotated_types import Ge
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN

from . import hub
from .backbones import index
from .backbones.gguf import bare_name
from .backbones.handlers import Linear
from .backbones.identity import fingerprint
from .backbones.spec import AttentionLayer, BackboneSpec, spec_of
from .files import CONFIG, HASH, WEIGHTS, as_object, read_folder, read_json, read_weights, write_beside, write_folder
from .naming import prefixed_errors
from .settings import RunSettings
from .validation import Description, annotations_of, build, validate, validate_fields

FORMAT = "locret_kit.heads.v1"
PUBLISHED: dict[str, tuple[str, dict[str, object]]] = {
    "hyx21/Locret-phi-3-mini-128K": (
        "microsoft/Phi-3-mini-128k-instruct",
        {"budget": 6000, "chunk": 3072, "stabilizers": 2500, "local_len": 100, "positions": "compact"},
    ),
    "hyx21/Locret-llama-3.1-8B-instruct": (
        "meta-llama/Llama-3.1-8B-Instruct",
        {"budget": 16384, "chunk": 1024, "stabilizers": 2500, "local_len": 100, "positions": "compact"},
    ),
}
"""Repositories of the paper's authors, whose files say nothing of them: backbone, and the settings of the paper's experiments."""

SHIPPED = {
    "checkpoints/smollm2-135m-locret": "locret_demo",
    "checkpoints/gemma3-270m-locret": "locret_gemma3_270m",
}
"""Names of the heads that ship, in ``checkpoints/`` of a clone, and of their folders in a wheel, next to the kit. Gemma's are in
clones only, because of their terms of use."""
EMBEDDING = "model.embed_tokens.weight"
HEAD = re.compile(r"model\.layers\.\d+\.self_attn\.fc\d\.weight")
"""Names of weights in a checkpoint of the authors' training: of the backbone's first, and of a head."""


@dataclass(frozen=True)
class Stored:
    """A checkpoint as it was read, not yet checked."""

    state: dict[str, Tensor]
    """Weights by their published names."""
    path: Path
    """The file or folder, for messages."""
    config: dict[str, object] | None = None
    """Fields of the configuration by name; None if the file does not name its backbone."""
    backbone: str | None = None
    """The backbone of a known repository whose file does not name it."""
    inference: dict[str, object] = field(default_factory=dict)
    """The settings of such a repository."""


def heads_folder(name: str) -> Path:
    """Folder of heads: a path as it is, and a name in ``SHIPPED`` wherever its files are."""
    if name not in SHIPPED or Path(name).exists():
        return Path(name)
    return clone if (clone := index.INSTALLED / name).is_dir() else index.INSTALLED / SHIPPED[name]


def shipped_for(model: str) -> str | None:
    """Name of the heads that ship for a backbone, in float or packed form; None if there are none."""
    for name in SHIPPED:
        config = heads_folder(name) / CONFIG
        if config.is_file() and bare_name(str(as_object(read_json(config), name)["backbone"])) == bare_name(model):
            return name
    return None


KEPT = re.compile(r"^recall=(\d\.\d{4})-step=(\d+)$")
"""Name of heads in the folder ``best`` of a training."""


def rank_of(name: str) -> tuple[float, int]:
    """Recall and step of heads by such a name."""
    recall, step = KEPT.findall(name)[0]
    return float(recall), int(step)


def kept_in(folder: Path) -> list[str]:
    """Names of the whole heads in the folder ``best`` of a training. A full disk or a kill leaves a folder without weights."""
    return [one.name for one in folder.glob("*") if KEPT.match(one.name) and (one / WEIGHTS).is_file()]


def best_of(folder: Path) -> Path:
    """The best heads in the folder ``best`` of a training; another folder itself."""
    return folder / max(names, key=rank_of) if (names := kept_in(folder)) else folder


def read_checkpoint(source: Path | str, **access: Unpack[hub.Access]) -> Stored:
    """Read a folder, a ``.pt``, ``.bin`` or ``.safetensors`` file, or a repository of the Hub (with ``access``). Of the folder
    ``best`` of a training the best heads are read.

    Raises:
        FileNotFoundError: nothing is there. ValueError: it is no checkpoint of heads, or damaged.
    """
    path = heads_folder(str(source))
    if path.is_dir():
        path = best_of(path)
        config, state = read_folder(path, "heads")
        return Stored(state, path, config)
    if path.is_file():
        beside = path.with_name(CONFIG)
        if path.suffix == ".safetensors":
            named = as_object(read_json(beside), f"{path}: a configuration of heads") if beside.exists() else None
            return Stored(read_weights(path), path, named)
        return _read_torch_file(path)
    name = str(source)
    if path.suffix in (".pt", ".bin", ".safetensors") or name.startswith((".", "/")) or name.count("/") != 1:
        raise FileNotFoundError(f"ckpt={name!r}: no such file or folder")

    def choose(names: list[str]) -> list[str]:
        if WEIGHTS in names:
            return [WEIGHTS, *(name for name in names if name == CONFIG)]
        bins = [name for name in names if name.endswith(".bin")]
        if len(bins) != 1:
            raise ValueError(f"{source} holds neither {WEIGHTS} nor one .bin file")
        return bins

    file = hub.pull(name, choose, **access)[0]
    if file.name == WEIGHTS:
        return read_checkpoint(file.parent)
    backbone, inference = PUBLISHED.get(name, (None, {}))
    return replace(_read_torch_file(file), backbone=backbone, inference=inference)


def _read_torch_file(path: Path) -> Stored:
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        foreign = "weights_only" in str(error).lower()
        reason = "it holds more than tensors" if foreign else "it is truncated or no torch file"
        raise ValueError(f"ckpt={str(path)!r} cannot be read safely: {reason}") from error
    if isinstance(loaded, dict) and isinstance(loaded.get("config"), dict) and "state" in loaded:
        return Stored(loaded["state"], path, loaded["config"])
    if not isinstance(loaded, dict) or not any(str(name).endswith(".self_attn.fc1.weight") for name in loaded):
        raise ValueError(f"ckpt={str(path)!r} is not a heads checkpoint: no model.layers.*.self_attn.fc1.weight in it")
    if EMBEDDING in loaded:  # a complete model, as the paper's training writes it
        loaded = {name: weight for name, weight in loaded.items() if HEAD.fullmatch(str(name))}
    return Stored(loaded, path)


DIMENSIONS = ("model_type", "n_layers", "n_heads", "n_kv_heads", "head_dim")
"""Dimensions that retaining heads and their backbone share, beside the sizes of layers that differ."""
LARGEST = 1e12
"""Largest weight: the product of two such, of a head's width and of large inputs stays finite in float32."""
Size = Annotated[int, Ge(1)]


@dataclass(frozen=True)
class HeadsConfig:
    """Description of retaining heads: their backbone, sizes, and the settings they were made for.

    ``RetainingHeads.from_pretrained`` reads it from ``config.json``; ``for_backbone`` makes it for new heads.

    Attributes:
        backbone: Hub id or path of the model that the heads were trained on. model_type: its type in transformers.
        n_layers, n_heads, n_kv_heads, head_dim: its layers; query heads, key/value heads and their size in each.
        activation: the activation of the heads' hidden layer, the backbone's own. d_hidden: the width of that layer.
        target: unit of the scores. sizes: sizes of each layer, if layers differ. adapter: LoRA of the training, if any.
        inference: default settings, fields of ``RunSettings`` and ``policy``.

    Raises:
        ValueError: a field of another type or out of its bound; it is named.
    """

    backbone: str
    """Hub id (or path) of the backbone the heads were trained on."""
    model_type: str
    n_layers: Size
    n_heads: Size
    n_kv_heads: Size
    head_dim: Size
    activation: str
    d_hidden: Size
    """Width of the hidden layer (d_R in the paper)."""
    target: Literal["logit", "log_prob"] = "logit"
    """The unit of the scores: 'logit' (of no scale that heads share) or 'log_prob'."""
    sizes: list[list[Size]] | None = None
    """Query heads, key/value heads, channels of a key and of a value of every layer, where they are not those above."""
    adapter: str | None = None
    """PEFT adapter on the backbone while the heads were trained."""
    inference: Annotated[dict[str, object], Description("settings by name")] = field(default_factory=dict)
    """Settings used when the caller gives none: fields of ``RunSettings``, and ``policy``."""

    def __post_init__(self) -> None:
        validate_fields(self)
        if self.sizes is not None and (len(self.sizes) != self.n_layers or any(len(one) != 4 for one in self.sizes)):
            raise ValueError(f"sizes: {len(self.sizes)} must be {self.n_layers} lists of four numbers, one a layer")
        known = {**annotations_of(RunSettings), "policy": str | None}
        for name, value in self.inference.items():
            if name not in known:
                raise ValueError(f"inference.{name} is unknown; there are: {', '.join(known)}")
            if value is not None:
                validate(f"inference.{name}", known[name], value)

    @classmethod
    def for_backbone(cls, spec: BackboneSpec, backbone: str, d_hidden: int, **rest: object) -> HeadsConfig:
        """The configuration of heads of width ``d_hidden`` for a backbone."""
        dimensions = {name: getattr(spec, name) for name in (*DIMENSIONS, "activation")}
        sizes = sizes_of(spec)
        return build(cls, {"backbone": backbone, "d_hidden": d_hidden, **dimensions, "sizes": sizes, **rest})

    @property
    def layers(self) -> list[AttentionLayer]:
        """Sizes of every layer."""
        if self.sizes is None:
            return [AttentionLayer(self.n_heads, self.n_kv_heads, self.head_dim, self.head_dim)] * self.n_layers
        return [AttentionLayer(Q, H, key, value) for Q, H, key, value in self.sizes]

    @property
    def policy(self) -> str:
        """The policy that they were published with."""
        return str(self.inference.get("policy") or "locret")


class RetainingHead(nn.Module):
    """``fc2(act(fc1([q; k; v])))`` without biases; ``[B, heads, T, D]`` inputs to predicted CIS ``[B, H, T]``."""

    def __init__(self, config: HeadsConfig, layer: AttentionLayer) -> None:
        super().__init__()
        self.fc1 = nn.Linear(layer.qkv_dim, config.d_hidden, bias=False, dtype=torch.float32)
        self.fc2 = nn.Linear(config.d_hidden, layer.n_kv_heads, bias=False, dtype=torch.float32)
        self.act = ACT2FN[config.activation].float()

    def forward(self, q_BQTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, linear: Linear = F.linear) -> Tensor:
        return self.fc2(self.act(self.hidden(q_BQTD, k_BHTD, v_BHTD, linear))).transpose(1, 2).float()

    def hidden(self, q_BQTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, linear: Linear = F.linear) -> Tensor:
        """The first product ``[B, T, d_hidden]``, before the activation."""
        return linear(_side_by_side(q_BQTD, k_BHTD, v_BHTD).to(self.fc1.weight.dtype), self.fc1.weight)


def _side_by_side(*parts_BXTD: Tensor) -> Tensor:
    """``[B, T, E]``: the heads of all parts, one after another. Where they lie so already (a fused projection's output), nothing
    is copied."""
    first, at = parts_BXTD[0], parts_BXTD[0].storage_offset()
    B, _, T, D = first.shape
    if any(x.shape[-1] != D for x in parts_BXTD):
        return torch.cat([x.transpose(1, 2).flatten(2) for x in parts_BXTD], dim=-1)
    width = D * sum(x.shape[1] for x in parts_BXTD)
    for x in parts_BXTD:
        follows = x.untyped_storage()._cdata == first.untyped_storage()._cdata and x.storage_offset() == at
        # The stride of an axis of one element says nothing.
        lies = all(
            n == 1 or a == b for n, a, b in zip(x.shape, x.stride(), (first.stride(0), D, width, 1), strict=True)
        )
        if not (follows and lies) or x.requires_grad:
            return torch.cat([x.transpose(1, 2).flatten(2) for x in parts_BXTD], dim=-1)
        at += x.shape[1] * D
    return first.as_strided((B, T, width), (first.stride(0), width, 1))


class RetainingHeads(nn.Module):
    """The retaining heads of every layer of one backbone, and their configuration ``config``.

    ``RetainingHeads(config)`` has random weights; ``from_pretrained`` loads trained ones. ``heads[i](q, k, v)`` predicts
    the importance ``[B, H, T]`` (float32) of ``T`` tokens in layer ``i``: from queries ``[B, Q, T, D]``, keys and values
    ``[B, H, T, D]`` before RoPE. A larger score is kept.
    """

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__()
        self.config = config
        self._exact: str | None = None
        self.layers = nn.ModuleList(RetainingHead(config, layer) for layer in config.layers)

    def __getitem__(self, layer: int) -> nn.Module:
        return self.layers[layer]

    @property
    def fingerprint(self) -> str:
        """Hash of the weights, which saved caches compare. A cast to float16, which rounds them, leaves it unchanged."""
        return self._exact or fingerprint(self.parameters())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RetainingHeads:
        """Apply ``fn``, which keeps a weight's shape, to every weight: ``to``, ``half``, ``cuda`` and others end here."""
        first = next(self.parameters()).detach()
        if fn(first[:0]).dtype != torch.float16:
            self._exact = None
        elif first.dtype != torch.float16:
            self._exact = fingerprint(self.parameters())
        return super()._apply(fn, recurse)

    def check_backbone(self, spec: BackboneSpec) -> None:
        """Raise ValueError with every dimension of ``spec`` that differs from the heads' backbone."""
        pairs = [(n, getattr(self.config, n), getattr(spec, n)) for n in DIMENSIONS]
        if self.config.sizes != sizes_of(spec):
            pairs.append(("sizes", self.config.sizes, sizes_of(spec)))
        if wrong := [f"{n}: heads have {mine}, the backbone has {its}" for n, mine, its in pairs if mine != its]:
            raise ValueError(f"these heads are for {self.config.backbone}: " + "; ".join(wrong))

    def named_weights(self) -> dict[str, nn.Parameter]:
        """Weights by their published names."""
        return {
            f"model.layers.{i}.self_attn.{name}": weight
            for i, head in enumerate(self.layers)
            for name, weight in head.named_parameters()
        }

    @classmethod
    def from_pretrained(
        cls, source: str | Path, *, backbone: str | None = None, **access: Unpack[hub.Access]
    ) -> RetainingHeads:
        """Load from a folder, a ``.pt`` file, a published ``.bin`` or a Hub repository.

        Args:
            backbone: folder or Hub id. Its configuration gives the sizes if the file has none, as in a ``.bin``.
                Repositories of the paper's authors are known by name (``PUBLISHED``).
            access: arguments of ``huggingface_hub``: ``revision``, ``token``, ``cache_dir`` and
                ``local_files_only``.

        Raises:
            FileNotFoundError: no such file. ValueError: no heads, or names and shapes that do not fit; each is
                named.
        """
        stored = read_checkpoint(source, **access)
        return _build(_config_of(stored, backbone), stored)

    def save_pretrained(self, target: str | Path, dtype: torch.dtype | None = None) -> None:
        """Write ``model.safetensors`` and ``config.json`` into a folder, or one file if ``target`` ends in ``.pt``.

        By default nothing is rounded: weights are bfloat16 if that is exact, otherwise float32.
        """
        exact = all(torch.equal(weight.to(torch.bfloat16).to(weight.dtype), weight) for weight in self.parameters())
        dtype = dtype or (torch.bfloat16 if exact else torch.float32)
        config, state, path = {"format": FORMAT, **asdict(self.config)}, state_of(self, dtype), Path(target)
        if path.suffix == ".pt":
            write_beside(path, lambda beside: torch.save({"config": config, "state": state}, beside))
        else:
            write_folder(path, config, state)


def sizes_of(spec: BackboneSpec) -> list[list[int]] | None:
    """``HeadsConfig.sizes`` of a backbone; None where its layers are alike."""
    if spec.is_uniform:
        return None
    return [[one.n_heads, one.n_kv_heads, one.key_size, one.value_size] for one in spec.layers]


def loaded(heads: RetainingHeads | str | Path | None) -> RetainingHeads | None:
    """Retaining heads as they are, or from their folder, file or Hub repository; None stays None.

    Raises:
        FileNotFoundError: there are no heads at that place. ValueError: they are damaged or do not fit.
    """
    return RetainingHeads.from_pretrained(heads) if isinstance(heads, str | Path) else heads


def state_of(heads: RetainingHeads, dtype: torch.dtype) -> dict[str, Tensor]:
    """Weights by their published names, in each parameter's shape: contiguous, in ``dtype``, on the CPU."""
    return {name: weight.detach().to("cpu", dtype).contiguous() for name, weight in heads.named_weights().items()}


def _config_of(stored: Stored, backbone: str | None) -> HeadsConfig:
    raw, named = stored.config, backbone or stored.backbone
    path = stored.path / CONFIG if stored.path.is_dir() else stored.path
    if raw is None and named is not None:
        from .backbones.load import load_config

        spec = spec_of(load_config(named))
        width = next((weight.shape[0] for name, weight in stored.state.items() if name.endswith("fc1.weight")), 1)
        inference = stored.inference or next((own for base, own in PUBLISHED.values() if base == named), {})
        return HeadsConfig.for_backbone(spec, stored.backbone or named, width, inference=inference)
    if raw is None:
        path = path.with_name(CONFIG)
        if not path.exists():
            raise ValueError(f"{stored.path} does not name its backbone: give it (--model, or backbone=)")
        raw = as_object(read_json(path), f"{path}: a configuration of heads")
    with prefixed_errors(str(path), ValueError):
        if "architectures" in raw:
            raise ValueError("it is a backbone, not retaining heads: give it as --model (or model=)")
        if raw.get("format", FORMAT) != FORMAT:
            raise ValueError(f"format={raw['format']!r} must be {FORMAT!r}")
        known = (("form", "mlp"), ("format", FORMAT))  # other forms were tried and lost to the paper's MLP
        own = {name: value for name, value in raw.items() if (name, value) not in known and name != HASH}
        return build(HeadsConfig, own, "field")


def _build(config: HeadsConfig, stored: Stored) -> RetainingHeads:
    """Strict: every head there, none extra, every shape and type right."""
    state, path = stored.state, stored.path
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(f"{path} must hold tensors by name")
    if config.n_layers > len(state):  # before anything of the size that a file names is built
        raise ValueError(f"{path} holds {len(state)} tensors: most of its n_layers={config.n_layers} heads are missing")
    with (
        prefixed_errors(f"{path}: its configuration builds no heads", KeyError, TypeError, RuntimeError),
        torch.device("meta"),
    ):
        heads = RetainingHeads(config)
    wanted = heads.named_weights()
    wrong = [f"{name} is not expected" for name in state if name not in wanted]
    for name, weight in wanted.items():
        found = state.get(name)
        if found is None:
            wrong.append(f"{name} is missing")
        elif found.shape != weight.shape:
            wrong.append(f"{name} is {tuple(found.shape)}, expected {tuple(weight.shape)}")
        elif not found.is_floating_point():
            wrong.append(f"{name} is {found.dtype}, expected floating point")
        elif not found.isfinite().all():
            wrong.append(f"{name} is not finite")
        elif (largest := float(found.float().abs().max())) > LARGEST:
            wrong.append(f"{name} holds {largest:.0e}, above {LARGEST:.0e}: scores would overflow")
    if wrong:
        more = f" (and {len(wrong) - 4} more)" if len(wrong) > 4 else ""
        raise ValueError(f"{path} does not fit {config.backbone}: " + "; ".join(wrong[:4]) + more)
    heads.to_empty(device="cpu")
    for head in heads.layers:
        head.act = ACT2FN[config.activation].float()  # xIELU has buffers, which no file holds
    with torch.no_grad():
        for name, parameter in heads.named_weights().items():
            parameter.copy_(state[name])
    return heads
