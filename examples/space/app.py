"""A page that reads a text in a budget, answers a question about it, and shades what was kept. On a CPU.

python examples/space/app.py
"""

import os
from functools import cache
from html import escape
from itertools import groupby

from locret_kit import Document, RetainingHeads
from locret_kit.backbones.load import load_backbone
from locret_kit.documents.kept import kept_of
from locret_kit.policies.grammar import parse_policy

MODEL = os.environ.get("LOCRET_MODEL", "checkpoints/SmolLM2-135M-Instruct")
HEADS = os.environ.get("LOCRET_HEADS", "checkpoints/smollm2-135m-locret")
POLICIES = ["lookahead-locret", "locret", "streaming", "h2o", "snapkv", "compactor"]
LARGEST = 20_000
"""Characters of a text: one that takes a CPU some ten seconds."""
STEPS = 5
"""Shades of a word."""
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
SAMPLE = FILLER * 30 + "The pass key is 71432. Remember it. 71432 is the pass key.\n" + FILLER * 50


@cache
def parts():
    """Backbone, tokenizer and heads; loaded once."""
    model, tokenizer = load_backbone(MODEL, device="cpu")
    return model, tokenizer, RetainingHeads.from_pretrained(HEADS, backbone=MODEL)


def read_and_ask(text: str, question: str, budget: float, policy: str) -> tuple[str, str, str]:
    """The answer, what was kept in a sentence, and the text as HTML with each token shaded by the heads that hold it."""
    if not text.strip() or not question.strip():
        return "Give a text and a question.", "", ""
    model, tokenizer, heads = parts()
    of_policy = heads if parse_policy(policy).needs_heads else None  # with the settings that they bring
    book = Document.read(model, tokenizer, text[:LARGEST], int(budget), policy, of_policy)
    answer = "".join(book.ask(question, max_new_tokens=48)).strip()
    kept = kept_of(book)
    counts, n_heads = kept.heads()
    tokens = kept.texts(tokenizer, 0, kept.seen)
    held = f"{counts.mean() / n_heads:.0%} of {book.tokens} tokens' slots are held, in {book.cache.nbytes / 2**20:.0f} MiB."
    cut = " The text was cut." if len(text) > LARGEST else ""
    return answer, held + cut, shaded(tokens, counts / n_heads)


def shaded(tokens: list[str], shares) -> str:
    """The tokens as HTML, the darker the more heads hold one."""
    steps = [round(STEPS * share) for share in shares.tolist()]
    pieces, words = [], iter(tokens)
    for step, run in groupby(steps):
        piece = escape("".join(next(words) for _ in run))
        pieces.append(f'<span style="background: rgba(0, 114, 178, {0.75 * step / STEPS:.2f})">{piece}</span>')
    return f'<div style="white-space: pre-wrap; max-height: 30rem; overflow-y: auto; line-height: 1.6">{"".join(pieces)}</div>'


def page():
    """The page, as Gradio's blocks."""
    import gradio

    with gradio.Blocks(title="locret_kit") as blocks:
        gradio.Markdown(
            "# A long text in a fixed budget\nA model of 135M parameters reads the text, keeps a *budget* of slots in each head, "
            "and answers from these alone. Below: which tokens it kept."
        )
        with gradio.Row():
            with gradio.Column():
                text = gradio.Textbox(SAMPLE, label="Text", lines=12, max_lines=12)
                question = gradio.Textbox("What is the pass key?", label="Question")
            with gradio.Column():
                budget = gradio.Slider(64, 1024, 512, step=64, label="Budget: slots per key/value head and layer")
                policy = gradio.Dropdown(POLICIES, value=POLICIES[0], label="Policy")
                button = gradio.Button("Read and ask", variant="primary")
                answer = gradio.Textbox(label="Answer")
                held = gradio.Textbox(label="Kept")
        shades = gradio.HTML(label="What was kept")
        button.click(read_and_ask, [text, question, budget, policy], [answer, held, shades], api_name="ask")
    return blocks


if __name__ == "__main__":
    page().launch()
