"""Words of ``locret-train`` that there were, and what does their work. No torch."""

from __future__ import annotations

_TRIED = """gates trains=end_to_end data.queries data.replay_chunk heads.form target.window target.values target.queries
target.kind=log_mass recipe=smollm2-135m-end-to-end recipe=smollm2-135m-fast-kvzip recipe=smollm2-135m-indexmem
recipe=smollm2-135m-kvpop recipe=smollm2-135m-kvzap recipe=smollm2-135m-trim-kv"""
_LOSSES = "loss.budgets loss.temperature loss.kind=mse loss.kind=bce_rank loss.kind=bce_mass loss.kind=boundary"
_CONSTANTS = "target.floor loss.top_fraction data.repetitive optim.betas trainer.log_every pool.gate"
_AUTO = """recipe=deepseek-v2-lite recipe=lfm2-1.2b recipe=nemotron3-nano-30b-a3b recipe=olmo3-7b recipe=qwen3-30b-a3b
recipe=qwen3.5-35b-a3b recipe=smollm3-3b"""
RETIRED = {
    **dict.fromkeys(
        _TRIED.split(), "tried and left (docs/explanation/targets.md); commit 4ec06cb is the last that has it"
    ),
    **dict.fromkeys(
        _LOSSES.split(), "loss.kind=NAME with plugin=FILE.py brings a loss of your own (docs/tutorials/train.md)"
    ),
    **dict.fromkeys(_CONSTANTS.split(), "nobody changed it, and it has its default"),
    **dict.fromkeys(_AUTO.split(), "model=ID, its id on the Hub, takes recipe=auto, as it did"),
    "loss.beta": "loss.kind=smooth_l1(beta=0.5)",
    "trials": "run locret-train once for each setting, with an out of its own",
    "recipe=smollm2-135m-lora": "recipe=smollm2-135m backbone.adapter=ADAPTER infer.policy=null",
    "recipe=phi3-mini-narrow": "recipe=phi3-mini heads.d_hidden=256",
    "recipe=phi3-mini-longalign": "recipe=phi3-mini data.sources=[THUDM/LongAlign-10k]",
    "recipe=phi3-mini-antihaystack": "recipe=phi3-mini data.sources=[wenbopan/anti-haystack] data.val_samples=0 optim.steps=2424",
}
"""By key, section, or ``key=value``."""
