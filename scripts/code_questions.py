"""Write questions about a folder's Python files, as L-Eval's records, for ``locret-eval tasks=FILE.jsonl``.

    python scripts/code_questions.py FOLDER OUT.jsonl --model MODEL --tokens 4096 --samples 10 [--held] [--seed 0]

Each record has a text of stretches of files and several questions about it. ``--held`` asks the kinds of questions that the
source ``code`` never trains on.
"""

import argparse
import json
import random
import sys
from pathlib import Path

from locret_kit.backbones.load import load_tokenizer
from locret_kit.files import write_text
from locret_kit.naming import first_line
from locret_kit.samples.code import HELD_KINDS, WORDINGS, code_text, read_code


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", required=True, help="whose tokenizer counts")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of a text")
    parser.add_argument("--samples", type=int, default=10, help="texts")
    parser.add_argument("--held", action="store_true", help="kinds of questions that are not trained on")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    try:
        tokenizer, files, lines = load_tokenizer(args.model), read_code(args.folder), []
        for number in range(args.samples):
            rng = random.Random(f"{args.seed}:{number}")
            text, asked = code_text(tokenizer, files, args.tokens, rng, HELD_KINDS if args.held else tuple(WORDINGS))
            fields = {"instructions": [one.question for one in asked], "outputs": [one.value for one in asked]}
            lines.append(json.dumps({"input": text.rstrip(), **fields}) + "\n")
        write_text(args.out, "".join(lines))
    except (ValueError, OSError) as error:
        print(f"error: {first_line(error)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
