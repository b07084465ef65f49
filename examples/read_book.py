"""Read a text once, ask about it often, and see how much of it each layer holds.

python examples/read_book.py long.txt "What is the pass key?" "Where is the grass?"
"""

import sys
from pathlib import Path

from locret_kit import Document, RetainingHeads
from locret_kit.backbones.load import load_backbone


def main(file: str, *questions: str, budget: int = 512) -> None:
    """Print an answer to each question, then the share of the text's tokens that a layer's heads hold."""
    model, tokenizer = load_backbone("checkpoints/SmolLM2-135M-Instruct")
    heads = RetainingHeads.from_pretrained("checkpoints/smollm2-135m-locret")
    book = Document.read(model, tokenizer, Path(file).read_text(encoding="utf-8"), budget, heads=heads)
    print(
        f"{book.tokens} tokens, of which a head holds {min(budget, book.tokens)}: {book.cache.nbytes / 2**20:.0f} MiB"
    )
    for question in questions:
        print(f"\n{question}")
        for piece in book.ask(question, max_new_tokens=32):
            print(piece, end="", flush=True)
        print()
    for layer in range(0, model.config.num_hidden_layers, 10):
        held = {position for head in book.cache.kept_positions(layer)[0] for position in head.tolist()}
        print(f"layer {layer}: {len(held) / book.tokens:.0%} of the text's tokens are held by some head")


if __name__ == "__main__":
    if len(sys.argv) < 3 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    main(*sys.argv[1:])
