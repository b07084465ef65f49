"""The same question under several policies and one budget: answer, and whether the sentence was kept.

    python examples/compare_policies.py checkpoints/SmolLM2-135M-Instruct streaming snapkv compactor

For figures take `locret-eval`, with many examples; this is the same thing by hand, to look at one.
"""

import sys

from locret_kit import BoundedCache
from locret_kit.backbones.load import load_backbone
from locret_kit.runtime.session import Answer

FACT = "The pass key is 71432."
TEXT = " ".join(["The grass is green. The sky is blue. The sun is yellow. Here we go."] * 40)


def main(name: str, *policies: str, budget: int = 256) -> None:
    """Print a line per policy: its answer, and the share of heads that hold each token of the fact, on average."""
    model, tokenizer = load_backbone(name)
    before = f"{TEXT}\n{FACT}\n"
    prompt = f"{before}{TEXT}\n\nWhat is the pass key? The pass key is"
    ids = tokenizer(prompt).input_ids
    start, end = (len(tokenizer(text).input_ids) for text in (f"{TEXT}\n", before))
    for policy in policies:
        cache = BoundedCache(budget=budget, chunk=128, policy=policy, prompt_length=len(ids))
        answer = str(Answer(model, tokenizer, ids, cache, max_new_tokens=8))
        heads = [head for layer in range(len(cache.layers)) for head in cache.kept_positions(layer)[0]]
        kept = sum(int(((head >= start) & (head < end)).sum()) for head in heads) / (len(heads) * (end - start))
        print(f"{policy:<20} {answer.strip()[:40]!r:<44} the fact: {kept:.0%} kept")


if __name__ == "__main__":
    if len(sys.argv) < 3 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    main(*sys.argv[1:])
