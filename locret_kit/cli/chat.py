"""``locret-chat book.locret``: a conversation in a terminal, about a document or about anything."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from ..config.chat_options import CHAT, ChatOptions
from .command import entry
from .loading import check_run, choose, open_document
from .talk import COMMANDS, SAVED, Talk, check_file
from .terminal import check_sampling, check_saved, text_of


def run(args: ChatOptions) -> int:
    """Load, then talk. Raises ValueError or OSError with a one-line message."""
    file = check_file(args.file) if args.file is not None else None
    saved = file is not None and file.suffix == SAVED
    text: Iterable[str] = ()
    if file is not None:  # before torch is imported: a file that is wrong is said at once
        if saved:
            check_saved(file)
        else:
            text = text_of(str(file))
    sampling = check_sampling(args)
    from .screen import Pipes, Stopped, Terminal

    screen = Pipes()
    if sys.stdin.isatty() and (sys.stdout.isatty() or sys.stderr.isatty()):
        screen = Terminal(
            {f"/{name}": words.startswith("FILE") for name, (words, _) in COMMANDS.items()}, args.history_file
        )
    document = None
    screen.greet("loading the model ...")
    if saved:
        document, chosen = open_document(str(file), args, args.ckpt, args.model, args.adapter, args.policy)
        model, tokenizer = document.model, document.tokenizer
    else:
        chosen = choose(args.ckpt, args.model, args.adapter, args.policy, args.kv_bits)
        check_run(args.run, chosen.config)
        model, tokenizer = chosen.load(args)
    for line in chosen.warnings:
        screen.note(line)
    talk = Talk(args, chosen, model, tokenizer, sampling, screen)
    if document is not None:
        talk.begin(document)
    elif file is not None:
        try:
            with screen.working():
                talk.read_text(text, file.name)
        except Stopped:
            screen.note("stopped: nothing was read")
    screen.greet(f"{chosen.backbone}, policy {chosen.policy.name}; /help lists the commands")
    talk.hold()
    return screen.status


main = entry(CHAT, run, also=(RuntimeError,))
"""Exit status 0, also after Ctrl-D; 1 in a pipe after an error of any message."""


if __name__ == "__main__":
    sys.exit(main())
