"""A decoder's attention, measured on the decoder itself: nothing here depends on the name of an architecture.

The decoder reads a few tokens twice. The first run is unchanged, and its attention calls are recorded. In the second run every
rotary module answers for position 0, and attention returns the recorded results. So hidden states are equal, and queries and
keys differ by the rotation alone. A layer's rotation is the known form that turns the second queries and keys into the first at
every position. Windows are read from the mask of each layer. Attention of an unknown form is refused.
"""

import inspect
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn
from torch._subclasses.fake_tensor import is_fake
from transformers import PreTrainedConfig, PreTrainedModel

from .decoder_attention import AttentionCall, DecoderAttention, Described, Rotation, frequencies_of, rotaries_of
from .decoder_modules import DecoderStack, decoder_of
from .libraries import ASKED_FOR_STATES, holds_states, layer_kinds
from .recording import TOKENS, IndexedCache, Reading, RecordedCall, RecordedRun, observed, same, window_of
from .rotations import fits, rotations_of
from .shortcuts import keeps_apart, reads_pieces, with_shortcuts
from .spec import AttentionLayer, BackboneSpec, StateSize, UnsupportedArchitecture, activation_of, spec_of, text_config
from .states import States
from .wrapped import unwrapped


def describe(model: PreTrainedModel) -> DecoderAttention:
    """The description of a model's decoder, measured once per class and configuration: less than a second.

    Raises:
        UnsupportedArchitecture: attention that the kit cannot meet, in one sentence.
    """
    if isinstance(model, Described):
        return model.description
    model = unwrapped(model)
    if (processes := getattr(model, "_tp_size", None) or 1) > 1:
        advice = "serve it inside vLLM, see docs/howto/scale.md"
        raise UnsupportedArchitecture(f"tp_plan has split this model over {processes} processes: {advice}")
    decoder, config = decoder_of(model), text_config(model)
    key = _key(decoder, config)
    with _LOCK:
        if key not in _KNOWN:  # what is refused is measured again: other weights may be taken
            _KNOWN[key] = _measured(decoder, config)
        return _KNOWN[key]


_LOCK = threading.RLock()
_KNOWN: dict[tuple[object, ...], DecoderAttention] = {}


def _key(decoder: DecoderStack, config: PreTrainedConfig) -> tuple[object, ...]:
    words = {name: x for name, x in config.to_dict().items() if not name.startswith(("_", "transformers_version"))}
    modules = []
    for path, module in decoder.named_modules(remove_duplicate=False):
        # Numbers and words by which a layer computes.
        own = module.__dict__.items() if hasattr(module, "layer_idx") else ()
        told = {name: x for name, x in own if isinstance(x, str | float | int) and name != "training"}
        modules.append((path, type(module).__qualname__, told))
    return type(decoder), json.dumps([words, modules], sort_keys=True, default=str), _has_even_norms(decoder)


def _has_even_norms(decoder: nn.Module) -> bool:
    """Whether a norm within attention has one weight for all channels, as an untrained one. Then it may come before a rotation
    or after it. False if the weights have no numbers (meta, fake or sharded)."""
    named = decoder.named_parameters()
    weight = next((w for path, w in named if w.dim() == 1 and w.numel() and "norm" in path and "att" in path), None)
    return weight is not None and not (weight.is_meta or is_fake(weight)) and bool((weight == weight[0]).all())


def _measured(decoder: DecoderStack, config: PreTrainedConfig) -> DecoderAttention:
    """The description of a decoder. Raises UnsupportedArchitecture that starts with its model type."""
    with _read_by(decoder, config):
        if all(weight.is_meta or is_fake(weight) for weight in decoder.parameters()):
            return assumed(config, getattr(decoder, "rotary_emb", None))
        with torch.no_grad(), observed(decoder, config):
            return _description(decoder, config)


@contextmanager
def _read_by(decoder: DecoderStack, config: PreTrainedConfig) -> Iterator[None]:
    """A block for reading tokens with a decoder. Its errors are UnsupportedArchitecture and start with the model type."""
    name = f"model_type={config.model_type!r}"
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedArchitecture(f"{name} is an encoder and a decoder: a bounded cache is for decoders alone")
    if getattr(config, "cross_attention_layers", None):
        raise UnsupportedArchitecture(f"{name} has layers of cross-attention, whose keys are an image's")
    try:
        yield
    except UnsupportedArchitecture as error:
        raise UnsupportedArchitecture(f"{name}: {error}") from error
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        said = (str(error).splitlines() or [""])[-1].replace(str(IndexedCache), "DynamicCache")[:160]
        raise UnsupportedArchitecture(
            f"{name} does not run over transformers' own cache as a decoder of text does ({type(error).__name__}: {said})"
        ) from error


def outlined(model: PreTrainedModel) -> BackboneSpec:
    """Dimensions of a model on the meta device, whose numbers are nothing: those of a forward there, or the words of its
    configuration where a forward needs numbers (experts that are looped over).

    Raises:
        UnsupportedArchitecture: attention that is not supported, as far as shapes show it.
    """
    decoder, config = decoder_of(model), text_config(model)
    reading = Reading(decoder, config, torch.zeros(1, TOKENS, dtype=torch.long, device="meta"))
    with _read_by(decoder, config), torch.no_grad(), observed(decoder, config):
        try:
            spec, _ = _layers(reading)
            return replace(spec, state_sizes=_state_sizes(reading.first))
        except RuntimeError:  # what an operator that needs numbers raises
            return spec_of(config)


def assumed(config: PreTrainedConfig, rotary: nn.Module | None) -> DecoderAttention:
    """The description of a decoder that cannot be measured, from its configuration. All else is assumed to be as Llama's. It is
    for decoders without weights, which plans run for their shapes, and for families that an engine's tests cover."""
    spec = spec_of(config)
    types = getattr(config, "layer_types", None) or [""] * config.num_hidden_layers
    buffers = [] if rotary is None else frequencies_of(rotary)
    rotations = [
        Rotation("rotary_emb", next((name for name in buffers if name.startswith(types[layer.index])), buffers[0]))
        for layer in spec.layers
        if buffers
    ]
    calls = tuple(AttentionCall(f"layers.{one.index}.self_attn", i, False, True) for i, one in enumerate(spec.layers))
    unknown, like_llama = "" if rotations else "there is no rotary module", bool(buffers)
    found = DecoderAttention(spec, calls, tuple(rotations), unknown)
    return replace(found, skips_rotation=like_llama, fuses_layers=like_llama, projects=like_llama)


def _description(decoder: DecoderStack, config: PreTrainedConfig) -> DecoderAttention:
    if not ASKED_FOR_STATES and any(kind.holds_state for kind in layer_kinds(config)):
        raise UnsupportedArchitecture("layers that hold a state need transformers 5.21")
    words = max(3, min(getattr(config, "vocab_size", None) or 1000, 1000))
    ids_1T = torch.randint(2, words, (1, TOKENS), generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    reading = Reading(decoder, config, ids_1T.to(next(decoder.parameters()).device))
    spec, calls = _layers(reading)
    placed = bool(rotaries_of(decoder)) or _takes_positions(reading)
    found = DecoderAttention(spec, calls, takes_positions=placed, places=_places(decoder, config))
    try:
        found = replace(found, rotations=rotations_of(reading, found))
    except UnsupportedArchitecture as error:
        found = replace(found, unknown_rotation=str(error))
    sizes = _state_sizes(reading.first)
    # Layers of which neither attention nor a state was seen: an MLP alone, or modules that keep a state themselves.
    seen = {*(str(layer.index) for layer in spec.layers), *(size.name.split(".")[1] for size in sizes)}
    if len(seen) < config.num_hidden_layers and not (keeps_apart(reading) and reads_pieces(reading)):
        raise UnsupportedArchitecture("its modules keep the state of a text, which no cache holds")
    if spec.states:
        return replace(found, spec=replace(spec, state_sizes=sizes), in_pieces=reads_pieces(reading))
    return with_shortcuts(reading, found)


def _places(decoder: DecoderStack, config: PreTrainedConfig) -> int | None:
    """Positions in a decoder's table, in which some begin with one or two of padding; None without a table."""
    places, words = getattr(config, "max_position_embeddings", None), decoder.get_input_embeddings()
    if not places or rotaries_of(decoder):
        return None
    tables = [m.weight for m in decoder.modules() if isinstance(m, nn.Embedding) and m is not words]
    known = any(x.dim() == 2 and places <= len(x) <= places + 2 for x in (*tables, *decoder.buffers()))
    return places if known else None


def _takes_positions(reading: Reading) -> bool:
    """Whether a decoder without a rotation uses position ids.

    Raises:
        UnsupportedArchitecture: without position ids it does not count from 0, as encoders that reserve places for padding.
            Then ``generate`` and a plain forward differ.
    """
    if "position_ids" not in inspect.signature(reading.decoder.forward).parameters:
        return False
    at_1T = torch.arange(TOKENS, device=reading.ids_1T.device)[None]
    hidden, moved = (reading.again(position_ids=at).hidden for at in (at_1T, at_1T.flip(1)))
    if not fits(hidden, reading.first.hidden):
        raise UnsupportedArchitecture("it counts the positions of a text otherwise than from 0")
    return not fits(moved, hidden)


def _layers(reading: Reading) -> tuple[BackboneSpec, tuple[AttentionCall, ...]]:
    """Layers with rows, and the calls that read them."""
    run, config = reading.first, reading.config
    if not run.calls:
        raise UnsupportedArchitecture("no attention call comes through transformers' interface")
    if not any(x.is_meta or x.any() for call in run.calls for x in (call.q, call.k)):
        raise UnsupportedArchitecture("its weights make queries and keys of zeros: load them first")
    paths = {id(module): path for path, module in reading.decoder.named_modules()}
    rows, calls, homes = list[AttentionLayer](), list[AttentionCall](), list[RecordedCall]()
    for call in run.calls:
        path, plain = paths[id(call.module)], call.softmax.is_plain
        where = f"attention of {path!r}"
        if call.unknown:
            raise UnsupportedArchitecture(f"{where} is given {call.unknown!r}, which the kit does not know")
        _, Q, T, D = call.q.shape
        if T > 1 and getattr(call.module, "is_causal", None) is False:
            raise UnsupportedArchitecture(f"{where} is not causal: tokens of a prompt see those after them")
        window, chunked = window_of(call, config, where)
        if call.index is not None:
            if any(one.index == call.index for one in rows):
                raise UnsupportedArchitecture(f"layer {call.index} calls attention more than once")
            if call.k.shape[2] != T or call.v.shape[2] != T:
                raise UnsupportedArchitecture(f"{where} has {T} queries and {call.k.shape[2]} new keys")
            calls.append(AttentionCall(path, len(rows), False, plain))
            rows.append(AttentionLayer(Q, call.k.shape[1], D, call.v.shape[-1], window, chunked, call.index))
            homes.append(call)
            continue
        read = [i for i, home in enumerate(homes) if same(home.k, call.k) and same(home.v, call.v)]
        if not read:
            raise UnsupportedArchitecture(f"{where} reads keys that are in no cache")
        home = rows[read[-1]]
        if (window, chunked) != (home.window, home.chunked):
            raise UnsupportedArchitecture(f"{where} reads the keys of a layer with another window")
        calls.append(AttentionCall(path, read[-1], True, plain))
    states, shared = holds_states(run.cache), any(call.shared for call in calls)
    return BackboneSpec(config.model_type, tuple(rows), activation_of(config), states, shared), tuple(calls)


def _state_sizes(run: RecordedRun) -> tuple[StateSize, ...]:
    """Sizes of the states after a run."""
    return tuple(
        StateSize(name, tuple(state.shape), None if state.dtype == run.hidden.dtype else state.dtype)
        for name, state in States(run.cache).tensors().items()
    )
