"""Chat templates that refuse or lose what others take, in small: they behave as the published ones of these families do."""

from copy import deepcopy

from read_texts import parts

MISTRAL = (
    "{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}{%- set turns = messages[1:] %}"
    "{%- else %}{%- set turns = messages %}{%- endif %}{%- set ns = namespace(index=0) %}"
    "{%- for m in turns %}{%- if not (m.role == 'tool' or (m.tool_calls is defined and m.tool_calls is not none)) %}"
    "{%- if (m.role == 'user') != (ns.index % 2 == 0) %}{{- raise_exception('conversation roles must alternate') }}{%- endif %}"
    "{%- set ns.index = ns.index + 1 %}{%- endif %}{%- endfor %}"
    "{%- for m in turns %}{%- if m.role == 'user' %}"
    "{%- if tools is not none %}{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}"
    "{%- if loop.last and system is defined %}{{- '[INST] ' + system + '\n\n' + m.content + '[/INST]' }}"
    "{%- else %}{{- '[INST] ' + m.content + '[/INST]' }}{%- endif %}"
    "{%- elif m.tool_calls is defined and m.tool_calls is not none %}{{- '[TOOL_CALLS] [' }}{%- for call in m.tool_calls %}"
    "{%- if call.id is not defined or call.id | length != 9 %}"
    "{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{%- endif %}"
    "{{- (call.function | tojson)[:-1] + ', \"id\": \"' + call.id + '\"}' + (', ' if not loop.last else ']</s>') }}{%- endfor %}"
    "{%- elif m.role == 'assistant' %}{{- ' ' + m.content | trim + '</s>' }}"
    "{%- elif m.role == 'tool' %}{%- if m.tool_call_id is not defined or m.tool_call_id | length != 9 %}"
    "{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{%- endif %}"
    "{{- '[TOOL_RESULTS] {\"content\": ' + (m.content | tojson) + ', \"call_id\": \"' + m.tool_call_id + '\"}[/TOOL_RESULTS]' }}"
    "{%- else %}{{- raise_exception('Only user and assistant roles are supported, with an initial system message') }}{%- endif %}"
    "{%- endfor %}"
)
"""Turns alternate, identifiers have nine characters; the system prompt is shown where a user's message is the last."""
QWEN35 = (
    "{%- set ns = namespace(asked=false) %}{%- for m in messages %}{%- if m.role == 'user' and not"
    " (m.content.startswith('<tool_response>') and m.content.endswith('</tool_response>')) %}{%- set ns.asked = true %}"
    "{%- endif %}{%- endfor %}{%- if not ns.asked %}{{- raise_exception('No user query found in messages.') }}{%- endif %}"
    "{%- if tools %}{{- '<|im_start|>system\n' + (tools | tojson) + '\n<function=name>' }}"
    "{%- if messages[0].role == 'system' %}{{- '\n\n' + messages[0].content }}{%- endif %}{{- '<|im_end|>\n' }}"
    "{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{%- endif %}"
    "{%- for m in messages %}{%- if m.role == 'system' %}"
    "{%- if not loop.first %}{{- raise_exception('System message must be at the beginning.') }}{%- endif %}"
    "{%- elif m.role == 'user' %}{{- '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}"
    "{%- elif m.role == 'assistant' %}{{- '<|im_start|>assistant\n<think>\n' + (m.reasoning_content or '') | trim"
    " + '\n</think>\n\n' + m.content }}"
    "{%- for call in m.tool_calls or [] %}{{- '\n<tool_call>\n<function=' + call.function.name + '>\n' }}"
    "{%- for key, value in call.function.arguments | items %}{{- '<parameter=' + key + '>\n' }}"
    "{{- value if value is string else value | tojson }}{{- '\n</parameter>\n' }}{%- endfor %}"
    "{{- '</function>\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\n' }}"
    "{%- elif m.role == 'tool' %}{{- '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}"
    "{%- else %}{{- raise_exception('Unexpected message role.') }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n' }}{%- endif %}"
)
"""One system message, the first; arguments are objects; somebody asks."""
GEMMA = (
    "{%- if messages[0].role == 'system' %}{{- raise_exception('System role not supported') }}{%- endif %}"
    "{%- for m in messages %}{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{%- endif %}"
    "{%- set role = 'model' if m.role == 'assistant' else m.role %}"
    "{{- '<start_of_turn>' + role + '\n' + m.content | trim + '<end_of_turn>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{%- endif %}"
)
"""No system message, no tools, turns that alternate."""
LLAMA31 = (
    "{%- if tools %}{{- tools | tojson }}<|python_tag|>{%- endif %}{%- for m in messages %}"
    "{%- if m.tool_calls is defined %}{%- if m.tool_calls | length != 1 %}"
    "{{- raise_exception('This model only supports single tool-calls at once!') }}{%- endif %}"
    "{{- '<|im_start|>assistant\n' + (m.tool_calls[0].function | tojson) + '<|im_end|>' }}"
    "{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}{%- endif %}{%- endfor %}"
)
"""One call for each answer, without a text beside it."""
GPT_OSS = (
    "{%- if tools %}{{- tools | tojson }}{%- endif %}{%- set ns = namespace(call=none) %}{%- for m in messages %}"
    "{%- if m.role == 'assistant' and m.tool_calls %}{%- if m.content and m.thinking %}"
    "{{- raise_exception('Cannot pass both content and thinking in an assistant message with tool calls!') }}{%- endif %}"
    "{%- set ns.call = m.tool_calls[0].function.name %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + (m.content or"
    " m.thinking or '') + '<|end|><|start|>assistant to=functions.' + ns.call + '<|channel|>commentary<|message|>'"
    " + (m.tool_calls[0].function.arguments | tojson) + '<|call|>' }}"
    "{%- elif m.role == 'tool' %}{%- if ns.call is none %}{{- raise_exception('Message has tool role, but there was no previous"
    " assistant message with a tool call!') }}{%- endif %}"
    "{{- '<|start|>functions.' + ns.call + ' to=assistant<|message|>' + (m.content | tojson) + '<|end|>' }}"
    "{%- else %}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{%- endif %}{%- endfor %}"
    "{{- '<|start|>assistant' }}"
)
"""The first of several calls alone is shown, a result needs a call, and calls have no text beside a thought."""
DEEPSEEK = (
    "{%- if tools %}{{- tools | tojson }}{%- endif %}{%- set ns = namespace(system='') %}{%- for m in messages %}"
    "{%- if m.role == 'system' %}{%- set ns.system = m.content %}{%- endif %}{%- endfor %}{{- ns.system }}"
    "{%- for m in messages %}{%- if m.role == 'user' %}{{- '<|User|>' + m.content }}"
    "{%- elif m.role == 'tool' %}{{- '<|tool|>' + m.content }}"
    "{%- elif m.role == 'assistant' %}{{- '<|Assistant|>' + m.content }}{%- for call in m.tool_calls or [] %}"
    "{{- '<|call|>' + call.function.name + '\n```json\n' + call.function.arguments + '\n```' }}{%- endfor %}"
    "{%- endif %}{%- endfor %}"
)
"""Arguments are texts, and of several system messages the last alone is shown."""


def tokenizer_of(template: str):
    """A tokenizer with a template, by its name among these or as it is."""
    made = deepcopy(parts()[1])
    made.chat_template = globals().get(template, template)
    return made
