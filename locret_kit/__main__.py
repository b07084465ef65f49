"""``python -m locret_kit``: the version and the commands that there are."""

from . import __version__

COMMANDS = {
    "locret-infer": "answer from a long text",
    "locret-read": "read a text once, into a file",
    "locret-ask": "ask what was read",
    "locret-chat": "a conversation, also about what was read",
    "locret-info": "what a file of a read text holds",
    "locret-kept": "which words were kept",
    "locret-serve": "a server of OpenAI's protocol",
    "locret-vllm": "vLLM with a fixed cache for each request",
    "locret-eval": "compare policies",
    "locret-plan": "memory and speed before a run",
    "locret-train": "train heads",
    "locret-publish": "heads to the Hub",
}

if __name__ == "__main__":
    print(f"locret_kit {__version__}\n")
    print("\n".join(f"{name:<15} {says}" for name, says in COMMANDS.items()))
    print("\nEach says more with --help.")
