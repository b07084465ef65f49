"""Features that parts of the kit lack with a policy, its rows or a backbone: one table of sentences, asked in one way."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ..backbones.decoder_attention import DecoderAttention
from . import Policy


class Subject(NamedTuple):
    """A run to check: policy, model and settings."""

    policy: Policy
    description: DecoderAttention | None = None
    """The backbone's description, if the check concerns one."""
    kv_bits: int | str | None = None
    stages: int = 0
    """Stages besides those of the policy."""


PARTS = ("merge", "recall", "reread", "sparse", "prefill_mask")
"""Optional parts of a policy."""


def traits(subject: Subject) -> Iterator[tuple[str, object]]:
    """Traits of a subject with a value, which a reason can show as ``{value}``."""
    policy, description, bits, stages = subject
    yield "stages", stages
    yield from ((name, getattr(policy, name) is not None) for name in PARTS)
    yield from {"ragged": policy.ragged, "grows": policy.keeps_everything, "logits": policy.score.needs_logits}.items()
    yield "recall by the tail", policy.recall is not None and not policy.recall.reading
    yield "memory", policy.score.memory(1 << 20)
    yield from {"bits": bits is not None, "codes": bits not in (None, 8)}.items()
    yield "merge in bits", bits is not None and policy.merge is not None
    yield "ragged in bits", bits is not None and policy.ragged
    if description is None:
        return
    capped, uneven = not all(call.plain for call in description.calls), not description.spec.is_uniform
    yield from {"unlike": description.unlike_llama, "states": not description.packs_texts}.items()
    yield from {"capped": capped, "uneven": uneven, "scaled": description.scales_queries}.items()
    # One at most attends to chosen blocks: a policy with both is refused when it is made.
    blocks = next((name for name in ("recall", "sparse") if getattr(policy, name) is not None), None)
    yield from {"blocks capped": capped and blocks, "blocks shared": description.spec.shared and blocks}.items()
    yield "blocks uneven", uneven and (blocks or policy.merge is not None)


_VLLM = "policy={policy!r}: with vLLM "
_VLLM_PART = _VLLM + "slots are kept or dropped, and it has a part {trait}"
_STAGES = "stages={value} besides those of the policy"
_PAGE = "policy={policy!r} has rows of its own kind ({trait})"
_POOL = "pool.policy={policy} must evict, keep as many slots in every head, and merge nothing itself, such as h2o"
CANNOT: Mapping[str, Mapping[str, str]] = {
    "graph": {
        "unlike": "the backbone is not of the form that graphs take: {value}",
        "scaled": "queries of the backbone are scaled by their positions",
        "codes": "kv_bits={bits}: rows are quantised when the host says",
        "ragged": "policy={policy!r} has heads of different lengths, which the host lays out",
        "grows": "policy={policy!r} has buffers that grow",
        "logits": "policy={policy!r} has scores from the backbone's logits",
        "merge": "policy={policy!r} has merging, head by head",
        "recall": "policy={policy!r} has blocks that come back from the host",
        "stages": _STAGES,
    },
    "compiled call": {
        "unlike": "the backbone is not of the form that the compiled call takes: {value}",
        "logits": "policy={policy!r} scores tokens by the backbone's logits",
        "merge": "policy={policy!r} merges slots",
        "recall": "policy={policy!r} brings evicted slots back",
        "stages": _STAGES,
    },
    "few bits": {
        "merge in bits": "kv_bits={bits} stores a slot once; policy={policy!r} merges evicted slots into it: leave one out",
        "ragged in bits": "kv_bits={bits} is for heads of one length; those of policy={policy!r} differ: take one whose heads "
        "are equal, such as locret, snapkv or h2o",
    },
    "backbone": {
        "blocks capped": "policy={policy!r} computes attention over chosen blocks ({value}), which knows no sinks and no cap on "
        "logits, as {model} has them",
        "blocks shared": "policy={policy!r} ({value}) is not for layers that read another's rows, as {model} has them",
        "blocks uneven": "policy={policy!r} needs keys and values of one size in all layers, and those of {model} differ",
    },
    "batch of generate": dict.fromkeys(
        ("logits", "reread"),
        "policy={policy!r} is not for model.generate with a batch: use locret_kit.runtime.engine.run",
    ),
    "forward of several texts": {
        "states": "model_type={model!r}: its layers hold states, read each other's rows, or place tokens in a way of their "
        "own, so each text is a forward of its own: use locret_kit.runtime.engine.run"
    },
    "prompt of unknown length": dict.fromkeys(
        ("prefill_mask", "recall by the tail"),
        "policy={policy!r} reads the prompt otherwise than what follows: pass prompt_length=",
    ),
    "page": dict.fromkeys(
        ("ragged", "grows", "merge", "recall", "sparse", "prefill_mask", "bits", "states", "capped", "uneven"), _PAGE
    )
    | {"stages": _STAGES},
    "file": {"stages": f"{_STAGES}: no file can name them"},
    "vllm": {
        "grows": _VLLM + "a request has a page of one size, and it evicts nothing",
        "ragged": _VLLM + "all heads of a layer hold as many slots, and its heads differ",
        "logits": _VLLM + "evictions happen within a layer, and it scores by the model's probabilities",
        **dict.fromkeys(PARTS, _VLLM_PART),
        "memory": _VLLM + "a request has a page alone, and its score remembers more",
    },
    "training of a pool": dict.fromkeys(("grows", "ragged", "merge"), _POOL),
}
"""Unsupported traits and the reason, per driver or use. Their order is that of the checks."""


def reason(who: str, subject: Subject) -> str | None:
    """Reason why a driver or use of ``CANNOT`` cannot run a subject; None if it can."""
    policy, description, bits, _ = subject
    found = dict(traits(subject))
    for trait, sentence in CANNOT[who].items():
        if value := found.get(trait):
            model = None if description is None else description.spec.model_type
            return sentence.format(policy=policy.name, bits=bits, model=model, trait=trait, value=value)
    return None


def refuse(who: str, subject: Subject) -> None:
    """Raise ValueError with the ``reason``, if there is one."""
    if (why := reason(who, subject)) is not None:
        raise ValueError(why)
