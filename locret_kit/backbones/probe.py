"""A decoder's attention, measured on the decoder itself: nothing here depends on the name of an architecture.

The decoder reads a few tokens twice. The first run is unchanged, and its attention calls are recorded. In the second run every
rotary module answers for position 0, and attention returns the recorded results. So hidden states are equal, and queries and
keys differ by the rotation alone. A layer's rotation is the known form that turns the second queries and keys into the first at
every position. Windows are read from the mask of each layer. Attention of an unknown form is refused.
"""

import inspect
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn
from torch._subclasses.fake_tensor import is_fake
from transformers import PreTrainedConfig, PreTrainedModel

from .decoder_attention import (
    AttentionCall,
    DecoderAttention,
    Described,
    Rotation,
    frequencies_of,
    rotaries_of,
    rotate,
    unrotate,
)
from .decoder_modules import DecoderStack, decoder_of
from .fused_layers import REFERENCE, fuse_layers
from .libraries import ASKED_FOR_STATES, holds_states, layer_kinds
from .products import NotDense, projections
from .recording import (
    FARTHEST,
    IndexedCache,
    Reading,
    RecordedCall,
    RecordedRun,
    close,
    observed,
    rotations_of,
    same,
    window_of,
)
from .skipped_rotations import skip_rotations
from .spec import AttentionLayer, BackboneSpec, StateSize, UnsupportedArchitecture, activation_of, spec_of, text_config
from .states import States
from .undo import Undo
from .wrapped import unwrapped

# ---- shortcuts that a decoder allows --------------------------------------------------------------------------------

# Each is tried, and taken where the decoder gives what it gives by itself.


def with_shortcuts(reading: Reading, found: DecoderAttention) -> DecoderAttention:
    """The description ``found`` with the shortcuts that the decoder allows."""

    def run(change: Callable[..., None], *args: object, first_place: int = 0, **named: object) -> RecordedRun | None:
        undo = Undo()
        at_1T = first_place + torch.arange(TOKENS, device=reading.ids_1T.device)[None]
        try:
            change(undo, reading.decoder, *args, **named)
            return reading.again(**({"position_ids": at_1T} if first_place else {}))
        except (AttributeError, TypeError, ValueError, KeyError, IndexError, RuntimeError):
            return None
        finally:
            undo.run()

    if not any(rotation.module for rotation in found.rotations):
        return found
    unturned = run(unrotate, in_halves=True)
    answers = _is_unturned(unturned, reading, found)
    standard = answers and all(rotation.order is None for rotation in found.rotations)
    skips = standard and _is_unturned(run(skip_rotations, lambda *x: REFERENCE), reading, found)

    def fuse(undo: Undo, decoder: DecoderStack) -> None:
        unrotate(undo, decoder, in_halves=True)
        fuse_layers(undo, decoder, lambda *x: REFERENCE)

    fused = run(fuse) if skips else None
    fuses = _is_alike(fused, unturned)
    projects = fuses and fused is not None and _are_products(fused)
    scales = fuses and not _is_alike(run(unrotate, in_halves=True, first_place=FARTHEST), unturned)
    found = replace(found, answers_in_halves=answers, skips_rotation=skips, fuses_layers=fuses)
    return replace(found, projects=projects and not scales, scales_queries=scales)


def _are_products(run: RecordedRun) -> bool:
    """Whether queries, keys and values are products of a layer's normed input, in each call of ``run``."""
    for call in run.calls:
        if call.x is None:
            return False
        try:
            made = [product(call.x) for product in projections(call.module)]
        except (NotDense, AttributeError):
            return False
        if not all(close(a, b.transpose(1, 2).flatten(2)) for a, b in zip(made, (call.q, call.k, call.v), strict=True)):
            return False
    return True


def _is_alike(run: RecordedRun | None, first: RecordedRun | None) -> bool:
    """Whether two runs have equal hidden states, queries and keys."""
    if run is None or first is None:
        return False
    pairs = zip(run.calls, first.calls, strict=True)
    return close(run.hidden, first.hidden, 2) and all(close(a.q, b.q) and close(a.k, b.k) for a, b in pairs)


def _is_unturned(run: RecordedRun | None, reading: Reading, found: DecoderAttention) -> bool:
    """Whether queries and keys are those before the rotation."""
    if run is None:
        return False
    for call, a, b in zip(found.calls, run.calls, reading.first.calls, strict=True):
        rotation = found.require_rotations()[call.layer]
        order = list(range(a.q.shape[-1])) if rotation.order is None else list(rotation.order)
        rope = rotation.rope(reading.decoder, reading.config, TOKENS)
        for x, y, turn in ((a.q, b.q, rope.of_queries), (a.k, b.k, rope)):
            if x.shape != y.shape:
                return False
            cos, sin = turn.tables(torch.arange(x.shape[2], device=x.device), x.dtype)
            if not close(rotate(x[..., order], cos, sin), y[..., order]):
                return False
    return close(run.hidden, reading.first.hidden, 2)


def reads_pieces(reading: Reading, *, apart: bool = False) -> bool:
    """Whether ids [1, T] can be read in two pieces; with ``apart``, with a piece of another text between them. The hidden states
    must equal those of the first run."""
    begun, rest_1T = reading.run(reading.ids_1T[:, :5]), reading.ids_1T[:, 5:]
    if apart:
        reading.run(rest_1T.flip(1))
    ended = reading.run(rest_1T, cache=begun.cache)
    return close(torch.cat((begun.hidden, ended.hidden), 1), reading.first.hidden, 2)


# ---- what a decoder's attention is, measured on the decoder itself ----


TOKENS = 12
"""Tokens that are read."""


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


# ---- measuring -----------------------------------------------------------------------------------------------------------


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
    found = DecoderAttention(spec, calls, takes_positions=placed)
    try:
        found = replace(found, rotations=rotations_of(reading, found))
    except UnsupportedArchitecture as error:
        found = replace(found, unknown_rotation=str(error))
    sizes = _state_sizes(reading.first)
    # Layers of which neither attention nor a state was seen: an MLP alone, or modules that keep a state themselves.
    seen = {*(str(layer.index) for layer in spec.layers), *(size.name.split(".")[1] for size in sizes)}
    if len(seen) < config.num_hidden_layers and not reads_pieces(reading, apart=True):
        raise UnsupportedArchitecture("its modules keep the state of a text, which no cache holds")
    if spec.states:
        return replace(found, spec=replace(spec, state_sizes=sizes), in_pieces=reads_pieces(reading))
    return with_shortcuts(reading, found)


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
    if not close(hidden, reading.first.hidden, 2):
        raise UnsupportedArchitecture("it counts the positions of a text otherwise than from 0")
    return not close(moved, hidden)


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
