"""Print a long text with digits hidden in it and the question about them; the digits themselves go to stderr.

python scripts/make_long_text.py --tokens 131072 | locret-infer --ckpt checkpoints/smollm2-135m-locret --budget 1024
"""

from __future__ import annotations

import argparse
import sys

from locret_kit.backbones import demo
from locret_kit.backbones.load import load_tokenizer
from locret_kit.naming import first_line
from locret_kit.samples.haystack import load_text, make_needle


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--tokens", type=int, required=True, help="length, tokens of --tokenizer, within 1%%")
    parser.add_argument("--seed", type=int, default=0, help="picks the key and the piece of text")
    parser.add_argument("--depth", type=float, default=0.35, help="where the key is: 0 the beginning, 1 the end")
    parser.add_argument("--task", default="R.PassKey", help="R.PassKey or R.Number")
    parser.add_argument(
        "--haystack", default="repeated", help="repeated (five sentences), pydoc, jargon, or a file or folder of text"
    )
    parser.add_argument(
        "--document-only", action="store_true", help="leave the question out, for locret-infer --question"
    )
    parser.add_argument("--tokenizer", default="checkpoints/SmolLM2-135M-Instruct", help="folder or Hub id")
    args = parser.parse_args(argv)
    try:
        demo.provide(args.tokenizer)
        tokenizer = load_tokenizer(args.tokenizer)
        text = None if args.haystack == "repeated" else load_text(args.haystack)
        needle = make_needle(
            args.task, tokenizer, n_tokens=args.tokens, depth=args.depth, seed=args.seed, haystack=text
        )
        print(f"expected answer: {needle.answer} ({needle.n_tokens} tokens, depth {needle.depth:.2f})", file=sys.stderr)
        # No line break at the end: the model continues the prompt's last words.
        print(needle.document if args.document_only else needle.prompt, end="", flush=True)
    except BrokenPipeError:  # the reader is gone, and says why itself
        sys.stderr.close()
        return 1
    except (ValueError, OSError) as error:
        print(f"error: {first_line(error)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
