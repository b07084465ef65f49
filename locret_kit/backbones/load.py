"""Load a frozen backbone and its tokenizer; every failure is one line that says what to do."""

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.configuration_utils import PreTrainedConfig
from transformers.utils import logging

from ..files import pointer_note
from ..naming import first_line, prefixed_errors
from . import demo, index, warn_of_newer
from .bfloat16 import lacks_bfloat16
from .gguf import bare_name, is_gguf
from .gguf.gguf_config import config_of
from .gguf.gguf_file import GgufFile, open_gguf, pull_gguf
from .gguf.gguf_model import model_of
from .spec import check_config, text_config
from .weight_bits import quantisation


@dataclass(frozen=True)
class Precision:
    """A type and the reason for it."""

    dtype: torch.dtype
    reason: str

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}: {self.reason}"


def choose_precision(device: torch.device) -> Precision:
    """The precision of a backbone on a device, by the processor alone: what was saved can be loaded after the next start."""
    if device.type == "cpu" and lacks_bfloat16():
        return Precision(torch.float32, "this processor widens bfloat16 to it")
    return Precision(torch.bfloat16, f"{device.type} computes in it")


M = TypeVar("M", bound=nn.Module)
GGUF_ADVICE = {
    "adapter": "merge it into the float model first, and convert that",
    "weight_bits": "choose a file of other bits, or give the float model",
    "device_map": "leave it out, or give the float model",
}
"""Alternatives to options that GGUF weights do not support, by option."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def pick_device(device: str | None) -> torch.device:
    """The named device, or the best there is."""
    if device in (None, "auto"):
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        where = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device={device!r} must be one of PyTorch's, such as cpu, cuda, cuda:1 or mps") from error
    if where.type == "meta":
        raise ValueError(f"device={device!r} stores no data: name one that computes, such as cpu or cuda")
    if where.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={device!r}: PyTorch sees no CUDA device here")
    if where.type == "cuda" and (where.index or 0) >= (seen := torch.cuda.device_count()) > 0:
        raise ValueError(f"device={device!r}: PyTorch sees the CUDA devices up to cuda:{seen - 1}")
    if where.type not in ("cpu", "cuda"):
        with prefixed_errors(f"device={device!r} cannot be used here", Exception):  # of a kind for each
            torch.empty(0, dtype=torch.uint8, device=where)
    return where


def pick_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """The type of a name; of ``auto`` the one that suits a device."""
    if dtype == "auto":
        return choose_precision(device).dtype
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r} must be one of: auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def resolve_model(name: str, field: str = "model") -> str:
    """The folder or Hub id to load: the folder as given, the same relative path next to the installed project, or
    the id unchanged. For the demo's backbone, its downloaded folder.

    Raises:
        FileNotFoundError: a relative path under ``checkpoints/`` that is in neither place; has ``field``.
    """
    if Path(name).exists():
        return name
    places = [index.INSTALLED / name, *([demo.backbone_folder()] if name == demo.BACKBONE else [])]
    if there := [place for place in places if place.exists()]:
        return str(there[0])
    if name.startswith(("checkpoints/", "./", "/")):
        hint = f": locret-infer FILE fetches it once; on the Hub it is {demo.REPO}" if name == demo.BACKBONE else ""
        raise FileNotFoundError(f"{field}={name!r}: no such folder{hint}")
    return name


def _gguf(name: str, revision: str | None) -> GgufFile:
    path = Path(resolve_model(name))
    return open_gguf(path if path.is_file() else pull_gguf(name, revision))


@contextmanager
def _reading(what: str, folder: str = "", kind: type[Exception] = FileNotFoundError) -> Iterator[None]:
    """Read on the CPU, whatever the default device, and turn the many errors of transformers, PyTorch and PEFT over damaged files
    of a ``folder`` into one line that begins with ``what``."""
    try:
        with torch.device("cpu"):
            yield
    except (FileNotFoundError, ImportError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        said = first_line(error).rstrip()
        if said.endswith(":"):  # the reason follows
            said = " ".join(str(error).split())[:300]
        if "couldn't connect to" in said:
            said = "the Hub cannot be reached, and its cache lacks it: go online once, or name a folder that holds it"
        name = "" if isinstance(error, OSError | ValueError | SafetensorError) else f"{type(error).__name__}: "
        raise kind(f"{what}: {name}{said}{pointer_note(Path(folder)) if folder else ''}") from error


def load_config(name: str, revision: str | None = None, *, whole: bool = False) -> PreTrainedConfig:
    """The configuration of a backbone's text model, or the ``whole``, by folder or Hub id. Code that comes with it is never run.

    Raises:
        FileNotFoundError: there is none that can be read, or a field's value is impossible.
    """
    if is_gguf(name):
        with _reading(f"model={name!r} cannot be loaded"):
            config = config_of(_gguf(name, revision), name)
            check_config(config.to_dict())
            return config
    path = resolve_model(name)
    with _reading(f"model={name!r} cannot be loaded: config.json", path):
        fields, _ = PreTrainedConfig.get_config_dict(path, revision=revision)
        if str(fields.get("format")).startswith("locret_kit.heads"):  # its model_type would make a model of billions
            raise ValueError("it holds retaining heads, not a backbone: give it as --ckpt")
        check_config(fields.get("text_config") or fields)
        config = AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=False)
    return config if whole else config.get_text_config(decoder=True)


def load_tokenizer(name: str, revision: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer of a backbone, by folder or Hub id, without its weights and without tokens that the backbone's embedding
    has no row for. Code that comes with it is never run.

    Raises:
        FileNotFoundError: there is none that can be read, or it adds such a token to each text.
    """
    rows = None
    with suppress(FileNotFoundError):  # a tokenizer alone, or beside code that is not run
        rows = getattr(load_config(name, revision), "vocab_size", None)
    if is_gguf(name):
        from .gguf.gguf_tokenizer import tokenizer_of  # it alone needs transformers 5.18

        with _reading(f"model={name!r} cannot be loaded: tokenizer"):
            return within_rows(tokenizer_of(_gguf(name, revision)), rows)
    path = resolve_model(name)
    with _reading(f"model={name!r} cannot be loaded: tokenizer", path):
        try:
            tokenizer = AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=False)
            if not isinstance(tokenizer.model_max_length, int | float):
                raise ValueError(f"model_max_length={tokenizer.model_max_length!r:.60} must be a number")
            return within_rows(tokenizer, rows)
        except ValueError as error:
            if first_line(error).rstrip().endswith(":"):  # the list that would follow is of ways to make one
                raise FileNotFoundError(f"model={name!r} cannot be loaded: it holds no tokenizer") from error
            raise


def within_rows(tokenizer: PreTrainedTokenizerBase, rows: int | None) -> PreTrainedTokenizerBase:
    """The tokenizer, changed so that texts become tokens from 0 to ``rows - 1`` only: a token beyond an embedding's rows is spelt
    by others. Many have more: a pad token that was added after training, an image token of a model that is exported for text. A
    row beyond the last would end a GPU's context for everybody. ``rows=None`` is no bound.

    Raises:
        ValueError: the tokenizer adds such a token to each text, or is a slow one with such tokens.
    """
    if rows is None or max([*tokenizer.added_tokens_decoder, tokenizer.vocab_size - 1]) < rows:
        return tokenizer
    if not tokenizer.is_fast:
        raise ValueError(f"{len(tokenizer)} tokens must be at most {rows}, the rows of the model's embedding")
    made = json.loads(tokenizer.backend_tokenizer.to_str())  # type: ignore[attr-defined]  # of fast tokenizers
    made["added_tokens"] = [token for token in made["added_tokens"] if token["id"] < rows]
    model = made["model"]
    if isinstance(model["vocab"], list):  # Unigram
        model["vocab"] = model["vocab"][:rows]
    else:
        model["vocab"] = {text: token for text, token in model["vocab"].items() if token < rows}
        if "merges" in model:
            prefix = model.get("continuing_subword_prefix") or ""
            merges = [pair if isinstance(pair, list) else pair.split(" ") for pair in model["merges"]]
            model["merges"] = [[a, b] for a, b in merges if {a, b, a + b.removeprefix(prefix)} <= model["vocab"].keys()]
    tokenizer._tokenizer = type(tokenizer.backend_tokenizer).from_str(json.dumps(made))  # type: ignore[attr-defined]
    known = tokenizer.get_vocab()
    for name, text in tokenizer.special_tokens_map.items():
        if str(text) not in known:
            setattr(tokenizer, name, None)
    tokenizer.extra_special_tokens = [text for text in tokenizer.extra_special_tokens if str(text) in known]
    if beyond := [token for token in tokenizer("a").input_ids if token >= rows]:
        said = f"which must be below {rows}, the rows of the model's embedding"
        raise ValueError(f"it adds token {beyond[0]} to a text, {said}")
    return tokenizer


def load_backbone(
    name: str,
    *,
    dtype: str = "auto",
    device: str | None = None,
    adapter: str | None = None,
    revision: str | None = None,
    device_map: str | dict[str, int | str] | None = None,
    gpu_memory: str | None = None,
    weight_bits: int | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load ``(model, tokenizer)``: frozen, in evaluation mode, on ``device``, with a PEFT adapter merged in if one
    is named.

    Matrices of a GGUF file (see ``gguf``) stay packed, and ``dtype`` applies to the other weights.

    Args:
        weight_bits: 4 or 8 quantises the layers' matrices while loading, see ``quantisation``.
        device_map: 'auto' and similar, or accelerate's map of module to device. It spreads the model over GPUs and
            CPU memory instead of ``device``. gpu_memory: limit of the weights per GPU, such as 18GiB.
        tokenizer: returned unchanged; loaded by default.
    """
    warn_of_newer()
    logging.set_verbosity_error()  # bars and warnings of loading are noise: what matters is checked
    logging.disable_progress_bar()
    where, path = pick_device(device), resolve_model(name)
    if is_gguf(name):
        for field, value in (("adapter", adapter), ("weight_bits", weight_bits), ("device_map", device_map)):
            if value is not None:
                said = f"does not act on the packed weights of {name!r}: {GGUF_ADVICE[field]}"
                raise ValueError(f"{field}={value!r} {said}")
        fields = load_config(name, revision)
        with _reading(f"model={name!r} cannot be loaded"):
            packed: Any = model_of(_gguf(name, revision), fields, pick_dtype(dtype, where))
        return freeze(packed.to(where)), tokenizer or load_tokenizer(name, revision)
    spread: dict[str, object] = {}
    if device_map is not None:
        spread = {"device_map": device_map, "max_memory": _limits(gpu_memory)}
    config = load_config(name, revision, whole=True)
    precision = pick_dtype(dtype, where)
    if weight_bits is not None:
        if adapter:
            raise ValueError(
                f"adapter={adapter!r} would be rounded where it is merged into weights of {weight_bits} bits: merge it first "
                "and name the merged model"
            )
        if getattr(config, "quantization_config", None):  # which transformers takes instead
            raise ValueError(f"weight_bits={weight_bits}: the weights of {name!r} are quantised already: leave it out")
        bitsandbytes = quantisation(weight_bits, precision, where)
        spread = {"device_map": {"": where}} | spread | {"quantization_config": bitsandbytes}
    bits = "" if weight_bits is None else f" with weight_bits={weight_bits}"
    autos: Any = (AutoModelForCausalLM, AutoModelForImageTextToText)
    auto = next((one for one in autos if type(config) in one._model_mapping), AutoModelForCausalLM)
    # An unknown architecture; truncated weights; a pickle.
    with _reading(f"model={name!r} cannot be loaded{bits}", path):
        loaded: Any = auto.from_pretrained(
            path, config=config, dtype=precision, revision=revision, trust_remote_code=False, output_loading_info=True,
            ignore_mismatched_sizes=True, **spread,
        )  # fmt: skip
    model, found = loaded
    if absent := [*found["missing_keys"], *(key for key, *_ in found["mismatched_keys"])]:
        some = ", ".join(sorted(absent)[:3]) + (f" and {len(absent) - 3} more" if len(absent) > 3 else "")
        raise ValueError(f"model={name!r}: its files lack weights, or hold them in another shape: {some}")
    weights = dict(model.named_parameters())
    if scales := sorted(key for key in found["unexpected_keys"] if key.partition("_scale")[0] in weights):
        raise ValueError(f"model={name!r}: its weights are quantised, and transformers does not apply {scales[0]}")
    tokenizer = tokenizer or load_tokenizer(name, revision)
    if adapter:
        if any(weight.is_meta for weight in model.parameters()):
            raise ValueError(
                f"adapter={adapter!r} cannot be merged into weights that device_map={device_map!r} has moved off the GPUs: "
                "merge it first and name the merged model"
            )
        model = merge_adapter(model, adapter)
    return freeze(model if spread else model.to(where)), tokenizer


def _limits(gpu_memory: str | None) -> dict[int | str, int | str] | None:
    """accelerate's ``max_memory`` with every GPU limited to ``gpu_memory``; None leaves all to accelerate."""
    from accelerate.utils import get_max_memory

    if gpu_memory is None:
        return None
    return {place: size if place == "cpu" else gpu_memory for place, size in get_max_memory().items()}


def merge_adapter(model: PreTrainedModel, adapter: str) -> PreTrainedModel:
    """The model with a PEFT adapter (a folder or a Hub id) merged into its weights.

    Raises:
        ValueError: it cannot be read, does not fit the model, or is of a kind that has no merged form.
    """
    from peft import PeftModel

    folder, said = resolve_model(adapter, "adapter"), f"adapter={adapter!r} cannot be put on {type(model).__name__}"
    with _reading(said, folder, ValueError), warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*missing adapter keys.*")  # weights for other layers' names
        warnings.filterwarnings("ignore", category=FutureWarning)  # peft asks transformers by an old name
        wrapped = PeftModel.from_pretrained(model, folder)
        if getattr(wrapped.peft_config["default"], "layer_replication", None):
            raise ValueError("it repeats layers, whose copies share the weights that it would be merged into")
        if hasattr(wrapped.base_model, "merge_and_unload"):
            if extra := wrapped.load_adapter(folder, "default").unexpected_keys:  # which from_pretrained does not tell
                raise ValueError(f"the model has no module for {extra[0]}")
            _untie(model)
            return wrapped.merge_and_unload()
    kind = str(wrapped.peft_config["default"].peft_type).removeprefix("PeftType.")
    raise ValueError(f"adapter={adapter!r} is {kind}, which cannot be merged into weights, as LoRA can")


def _untie(model: PreTrainedModel) -> None:
    """Give the last layer a copy of the embedding table that it shares, if an adapter lies on either: a merge changes both."""
    modules: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
    table, last = (getattr(module, "base_layer", module) for module in modules)
    if [table, last] != modules and getattr(last, "weight", None) is table.weight:
        last.weight = nn.Parameter(last.weight.detach().clone(), requires_grad=False)
        for config in (model.config, text_config(model)):
            config.tie_word_embeddings = False


def choose_adapter(recorded: str | None, given: str | None) -> tuple[str | None, str | None]:
    """``(adapter to load, warning)``: the one the heads were trained with, unless the user names another or ``none``."""
    adapter = recorded if given is None else None if given == "none" else given
    if adapter == recorded or (adapter and recorded and _same_folder(adapter, recorded)):
        return adapter, None
    trained = f"with adapter={recorded!r}" if recorded else "without an adapter"
    runs = f"with adapter={adapter!r}" if adapter else "without it"
    return adapter, f"warning: the heads were trained {trained}, and this runs {runs}: their scores may be off"


def other_backbone(recorded: str, name: str) -> str | None:
    """A warning if heads run on another backbone than they were trained on, which may have the same shapes."""
    if bare_name(name) == bare_name(recorded) or _same_folder(name, recorded):
        return None
    return f"warning: the heads were trained on {recorded!r}, and this runs {name!r}: their scores may be off"


def _same_folder(a: str, b: str) -> bool:
    try:
        first, second = (Path(resolve_model(name)) for name in (a, b))
    except FileNotFoundError:
        return False
    return first.exists() and second.exists() and first.samefile(second)


def freeze(model: M) -> M:
    """Evaluation mode, no gradients."""
    return model.eval().requires_grad_(False)
