"""Ten families of models that think and call tools: their chat templates in small, their tokens, and an answer of each.

The forms are those of the published templates: Qwen3, Qwen3.5, Qwen3-Coder, gpt-oss, DeepSeek-R1, GLM-4.5, Magistral, SmolLM3,
Granite 4.0 and Nemotron 3.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from real_templates import QWEN3
from tiny_text import PROSE
from tiny_tokenizer import byte_level, controlled

from locret_kit.answers.reader import Event, Reader

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from locret_kit.serving.constraint import Grammar

TOOL = {
    "type": "function",
    "function": {
        "name": "depth", "description": "How deep a harbour is", "parameters": {
            "type": "object", "required": ["place"],
            "properties": {"place": {"type": "string"}, "days": {"type": "integer"}, "tide": {"type": "boolean"}},
        },
    },
}  # fmt: skip
ARGUMENTS = {"place": 'north "bay"', "days": 3, "tide": True}
JSON = '{"place": "north \\"bay\\"", "days": 3, "tide": true}'
THOUGHT = "The harbour is asked for.\n\nI call a tool."
TEXT = "I look: 2 < 3."
XML = (
    "<tool_call>\n<function=depth>\n<parameter=place>\nnorth \"bay\"\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    "<parameter=tide>\ntrue\n</parameter>\n</function>\n</tool_call>"
)  # fmt: skip
PAIRS = (
    "<tool_call>depth\n<arg_key>place</arg_key>\n<arg_value>north \"bay\"</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>3</arg_value>\n<arg_key>tide</arg_key>\n<arg_value>true</arg_value>\n</tool_call>"
)  # fmt: skip
HERMES = f'<tool_call>\n{{"name": "depth", "arguments": {JSON}}}\n</tool_call>'
BAR, LOW = "\uff5c", "\u2581"
DEEP = {
    name: f"<{BAR}{name.replace(' ', LOW)}{BAR}>"
    for name in (
        "begin of sentence", "end of sentence", "User", "Assistant", "tool calls begin", "tool calls end", "tool call begin",
        "tool call end", "tool sep",
    )
}  # fmt: skip


def chatml(assistant: str, opened: str = "", tools: str = "<tool_call>") -> str:
    """A template in the manner of Qwen: ``assistant`` writes an answer, ``opened`` begins the next one."""
    return (
        "{%- if tools %}{{- '<|im_start|>system\n# Tools\n' + (tools | tojson) + '\n" + tools + "<|im_end|>\n' }}{%- endif %}"
        "{%- for m in messages %}{%- if m.role == 'assistant' %}{{- '<|im_start|>assistant\n' }}" + assistant
        + "{{- '<|im_end|>\n' }}"
        "{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n" + opened + "' }}{%- endif %}"
    )  # fmt: skip


XML_CALLS = (
    "{{- m.content }}{%- for call in m.tool_calls or [] %}{{- '\n<tool_call>\n<function=' + call.function.name + '>\n' }}"
    "{%- for key, value in call.function.arguments.items() %}"
    "{{- '<parameter=' + key + '>\n' + (value | string) + '\n</parameter>\n' }}"
    "{%- endfor %}{{- '</function>\n</tool_call>' }}{%- endfor %}"
)
THINKS = "{%- if m.reasoning_content %}{{- '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{%- endif %}"
HERMES_CALLS = (
    "{{- m.content }}{%- for call in m.tool_calls or [] %}"
    "{{- '\n<tool_call>\n' + (call.function | tojson) + '\n</tool_call>' }}{%- endfor %}"
)
GPT_OSS = (
    "{{- '<|start|>system<|message|>You are a model.<|end|>' }}{%- if tools %}{{- '<|start|>developer<|message|># Tools\n"
    "namespace functions ' + (tools | tojson) + '<|end|>' }}{%- endif %}{%- for m in messages %}{%- if m.role == 'assistant' %}"
    "{%- if m.tool_calls %}{%- if m.thinking %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}"
    "{%- endif %}{{- '<|start|>assistant to=functions.' + m.tool_calls[0].function.name + '<|channel|>commentary json<|message|>'"
    " + (m.tool_calls[0].function.arguments | tojson) + '<|call|>' }}"
    "{%- else %}{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}{%- endif %}"
    "{%- else %}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"
)
R1 = (
    "{{- bos_token }}{%- for m in messages %}{%- if m.role == 'user' %}{{- 'USER' + m.content }}{%- elif m.role == 'assistant' %}"
    "{%- if m.tool_calls %}{%- for call in m.tool_calls %}{{- 'ASSISTANT<{b}tool calls begin{b}>' }}{%- endfor %}{%- endif %}"
    "{%- set content = m.content %}{%- if '</think>' in content %}{%- set content = content.split('</think>')[-1] %}{%- endif %}"
    "{{- 'ASSISTANT' + content + 'END' }}{%- else %}{{- m.content }}{%- endif %}{%- endfor %}{# tools CALL #}"
    "{%- if add_generation_prompt %}{{- 'ASSISTANT<think>\n' }}{%- endif %}"
).replace("<{b}tool calls begin{b}>", DEEP["tool calls begin"])
for _word, _token in (
    ("USER", "User"),
    ("ASSISTANT", "Assistant"),
    ("END", "end of sentence"),
    ("CALL", "tool call begin"),
):
    R1 = R1.replace(_word, DEEP[_token])
GLM = (
    "[gMASK]<sop>{%- if tools %}<|system|>\n# Tools\n{{ tools | tojson }}\n<tool_call>name\n<arg_key>key</arg_key>{%- endif %}"
    "{%- for m in messages %}{%- if m.role == 'assistant' %}<|assistant|>\n<think>{{ m.reasoning_content or '' }}</think>\n"
    "{{ m.content }}{%- else %}<|{{ m.role }}|>\n{{ m.content }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}<|assistant|>{%- endif %}"
)
MAGISTRAL = (
    "{{- bos_token }}[SYSTEM_PROMPT]First draft your thinking: [THINK]thoughts[/THINK]Here, an answer.[/SYSTEM_PROMPT]"
    "{%- if tools %}{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}{%- for m in messages %}"
    "{%- if m.role == 'assistant' %}{%- if m.reasoning_content %}{{- '[THINK]' + m.reasoning_content + '[/THINK]' }}{%- endif %}"
    "{{- m.content }}{%- for call in m.tool_calls or [] %}{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]'"
    " + (call.function.arguments | tojson) }}{%- endfor %}{{- eos_token }}"
    "{%- else %}{{- '[INST]' + m.content + '[/INST]' }}{%- endif %}{%- endfor %}"
)
IM = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
TAGGED = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


@dataclass(frozen=True)
class Family:
    """A family.

    Attributes:
        special, added: its tokens, special ones and others. answer: of a thought, text and a call, in its own order.
        reasoning, tools: names of vLLM's parsers; '' for none. thinks: whether the prompt begins the thought.
        events: kinds of the answer's events, in their order.
    """

    template: str
    special: tuple[str, ...]
    added: tuple[str, ...]
    answer: str
    reasoning: str
    tools: str
    thinks: bool = False
    events: tuple[str, ...] = ("thought", "text", "call", "arguments")


THINKING = f"<think>\n{THOUGHT}\n</think>\n\n{TEXT}\n"
FAMILIES = {
    "qwen3": Family(QWEN3 + "{# tools #}", IM, TAGGED, f"{THINKING}{HERMES}", "qwen3", "hermes"),
    "qwen3.5": Family(
        chatml(THINKS + XML_CALLS, "<think>\n", "<function=name>"), IM, TAGGED,
        f"{THOUGHT}\n</think>\n\n{TEXT}\n\n{XML}", "qwen3", "qwen3_coder", thinks=True,
    ),
    "qwen3-coder": Family(
        chatml(XML_CALLS, tools="<function=name>"), IM, TAGGED, f"{TEXT}\n{XML}", "", "qwen3_coder",
        events=("text", "call", "arguments"),
    ),
    "gpt-oss": Family(
        GPT_OSS,
        ("<|startoftext|>", "<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>"),
        (), f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant<|channel|>commentary<|message|>{TEXT}<|end|>"
        f"<|start|>assistant<|channel|>commentary to=functions.depth <|constrain|>json<|message|>{JSON}<|call|>", "", "",
    ),
    "deepseek-r1": Family(
        R1, (DEEP["begin of sentence"], DEEP["end of sentence"], DEEP["User"], DEEP["Assistant"]),
        ("<think>", "</think>", *list(DEEP.values())[4:]),
        f"{THOUGHT}\n</think>\n\n{TEXT}{DEEP['tool calls begin']}{DEEP['tool call begin']}function{DEEP['tool sep']}depth\n"
        f"```json\n{JSON}\n```{DEEP['tool call end']}{DEEP['tool calls end']}", "deepseek_r1", "deepseek_v3", thinks=True,
    ),
    "glm-4.5": Family(
        GLM, ("<|endoftext|>", "<|user|>", "[gMASK]", "<sop>", "<|system|>", "<|assistant|>", "<|observation|>"),
        (*TAGGED, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"), f"\n<think>{THOUGHT}</think>\n{TEXT}\n{PAIRS}",
        "glm45", "glm45",
    ),
    "magistral": Family(
        MAGISTRAL, ("<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[AVAILABLE_TOOLS]",
                    "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"),
        (), f"[THINK]{THOUGHT}[/THINK]{TEXT}[TOOL_CALLS]depth[ARGS]{JSON}", "mistral", "mistral",
    ),
    "smollm3": Family(
        chatml(HERMES_CALLS, tools="<tool_call>").replace("<think>", "") + "{# <think> </think> #}", IM, TAGGED,
        f"{THINKING}{HERMES}", "qwen3", "hermes",
    ),
    "granite-4": Family(
        chatml(HERMES_CALLS).replace("<|im_start|>", "<|start_of_role|>").replace("<|im_end|>", "<|end_of_text|>"),
        ("<|start_of_role|>", "<|end_of_text|>", "<|end_of_role|>"), TAGGED[2:], f"{TEXT}\n{HERMES}", "", "granite4",
        events=("text", "call", "arguments"),
    ),
    "nemotron": Family(
        chatml(THINKS + XML_CALLS, "<think>\n", "<function=name>"), ("<s>", *IM), TAGGED,
        f"{THOUGHT}\n</think>\n{TEXT}\n{XML}\n", "nemotron_v3", "qwen3_coder", thinks=True,
    ),
}  # fmt: skip


@lru_cache(maxsize=16)
def family_tokenizer(name: str):
    """A tokenizer of some 600 tokens with a family's template and tokens."""
    family = FAMILIES[name]
    return controlled(byte_level([PROSE * 3], 400, ()), family.special, family.added, family.template)


def joined(events: Sequence[Event]) -> list[tuple[str, str]]:
    """Kinds and texts of events, those of one kind in a row as one."""
    runs = list[tuple[str, str]]()
    for event in events:
        if runs and runs[-1][0] == event.kind and event.kind != "call":
            runs[-1] = event.kind, runs[-1][1] + event.text
        else:
            runs.append((event.kind, event.text))
    return runs


def follows(grammar: Grammar, tokenizer: PreTrainedTokenizerBase, text: str) -> bool:
    """Whether a grammar allows a text and its end."""
    for token in [*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id]:
        if not grammar.allowed(len(tokenizer))[token]:
            return False
        grammar.take(token)
    return True


def read_pieces(reader: Reader, pieces: Iterable[str]) -> list[tuple[str, str]]:
    """The events of an answer that comes in these pieces, see ``joined``."""
    return joined([event for piece in pieces for event in reader.feed(piece)] + reader.end())
