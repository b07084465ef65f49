"""`transformers.pipeline` with a bounded cache: the pipeline is transformers' own, the cache is given with the call.

python examples/pipeline.py checkpoints/SmolLM2-135M-Instruct snapkv 512
"""

import sys

from transformers import pipeline

from locret_kit import CACHE, BoundedCache, RetainingHeads, attach
from locret_kit.backbones.load import load_backbone

TEXT = "The grass is green. The sky is blue. The sun is yellow. Here we go. " * 60


def main(name: str, policy: str = "snapkv", budget: int = 512, ckpt: str | None = None) -> str:
    """Print and return the answer to a question about a long message."""
    model, tokenizer = load_backbone(name)
    ask = pipeline("text-generation", model=model, tokenizer=tokenizer)
    content = f"{TEXT}\nThe pass key is 71432. Remember it.\n{TEXT}\n\nWhat is the pass key?"
    messages = [{"role": "user", "content": content}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    heads = RetainingHeads.from_pretrained(ckpt) if ckpt else None
    cache = BoundedCache(budget, policy, heads, prompt_length=len(ids))
    with attach(model):  # everything is restored when the block ends
        (said,) = ask(messages, **{CACHE: cache}, max_new_tokens=24, do_sample=False, return_full_text=False)
    print(said["generated_text"])
    return said["generated_text"]


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    main(*sys.argv[1:3], *map(int, sys.argv[3:4]), *sys.argv[4:5])
