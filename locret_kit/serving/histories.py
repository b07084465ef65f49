"""Conversations of real clients for chat templates that take less: for strict ones by a short list of known repairs; for those
that know no tools, in words.

A template gets a conversation unchanged if it takes it and shows its texts. Otherwise the repairs are applied one after another,
until it does; then those without which it does so too are undone. A repair changes only what it names, so that the next turn's
prompt begins as this one's.
"""

import hashlib
import json
import operator
import re
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, reduce
from itertools import compress
from typing import cast

from transformers import PreTrainedTokenizerBase

from ..answers.forms import CLOSE, OPEN
from ..answers.values import nested
from ..text.template import Refusal, render_traced
from ..text.untrusted import FIRST, OTHERS, Traced
from .messages import JsonObject, Message, Tool, placed

Turn = Mapping[str, object]
"""A message in the form of chat templates, with its ``place`` in the body."""
Turns = Sequence[Turn]
Repair = Callable[[Turns], list[Turn]]
REFUSED = 1 << 30
"""Loss of a conversation that the template refuses: more than any number of texts."""
MISTRALS = re.compile(r"[A-Za-z0-9]{9}")
"""Identifiers that Mistral's templates take."""


def render(tokenizer: PreTrainedTokenizerBase, turns: Turns, **more: object) -> str:
    """``template.render``, of the conversation as it is or with the repairs that the template needs.

    Raises:
        Refusal: the template refuses it with any of them; its message is named. ValueError: see ``render_traced``.
    """

    def shown(turns: Turns, **changed: object) -> Traced:
        bare = [{name: value for name, value in turn.items() if name != "place"} for turn in turns]
        return render_traced(tokenizer, bare, **{**more, **changed})  # type: ignore[arg-type]

    def tried(chain: Sequence[Repair]) -> tuple[int, str]:
        """Number of texts that the template does not show, and the rendering; or ``REFUSED``, and why."""
        try:
            text = shown(repaired := applied(chain, turns))
            first = [with_calls(turn, calls_of(turn)[:1]) for turn in repaired]  # some templates show no more
            alone = not same(first, repaired) and shown(first) == text
            return lost(repaired, text) + alone, str.__str__(text)
        except Refusal as error:
            return REFUSED, str(error)

    def refused(size: int) -> bool:
        try:
            shown(repaired[:size], continued=False)
        except Refusal:
            return True
        return False

    chain: tuple[Repair, ...] = ()
    (loss, text), longer = tried(chain), chain
    for longer in chains(turns) if loss else ():
        if (new := tried(longer))[0] < loss:
            chain, (loss, text) = longer, new
        if not loss:
            break
    for repair in reversed(chain):
        fewer = tuple(one for one in chain if one is not repair)
        if (new := tried(fewer))[0] <= loss:
            chain, (loss, text) = fewer, new
    if loss < REFUSED:
        return text
    why = tried(longer)[1]
    repaired = turns if why == text else applied(longer, turns)
    wrong = repaired[bisect_left(range(1, len(repaired)), True, key=refused)]
    raise Refusal(f"{wrong.get('place') or 'a message'} ({wrong['role']}): {why}")


def chains(turns: Turns) -> Iterator[tuple[Repair, ...]]:
    """Repairs that change a conversation, each time with one more; then the same for templates that write arguments as texts, and
    all with calls in words."""
    for repairs in ((objects, *REPAIRS), (texts, *REPAIRS)):
        chain, made = tuple[Repair, ...](), turns
        for repair in repairs:
            if not same(new := repair(made), made):
                chain, made = (*chain, repair), new
                yield chain
    yield (objects, *REPAIRS, in_words)


def applied(chain: Sequence[Repair], turns: Turns) -> Turns:
    """The conversation after these repairs."""
    return reduce(lambda turns, repair: repair(turns), chain, turns)


def same(some: Turns, others: Turns) -> bool:
    """Whether two conversations have the same turns; nothing in them is compared, which may be deep."""
    return len(some) == len(others) and all(map(operator.is_, some, others))


def lost(turns: Turns, text: Traced) -> int:
    """Number of texts of a conversation that a rendering lacks. What it shows of an answer is the template's matter, but for
    arguments that are no object."""
    wanted = list[str]()
    for at, turn in enumerate(turns):
        if turn["role"] != "assistant" and chr(FIRST + at) not in text.origin:
            wanted.append(content_of(turn))
        arguments = (nested(call, "function", "arguments") for call in calls_of(turn))
        wanted += (one for one in arguments if isinstance(one, str))
    if not any(wanted):
        return 0
    rest = "".join(compress(text, (origin == OTHERS for origin in text.origin)))  # such as JSON, which has no origins
    number = at = 0
    for said in map(str.strip, wanted):
        forms = (said, json.dumps(said)[1:-1], json.dumps(said, ensure_ascii=False)[1:-1])
        places = (rest.find(form, start) for start in (at, 0) for form in forms)  # texts mostly stand in their order
        found = next((place for place in places if place >= 0), None)
        number, at = number + (found is None), at if found is None else found
    return number


def content_of(turn: Turn) -> str:
    """A turn's text."""
    return str(turn.get("content") or "")


def calls_of(turn: Turn) -> list[JsonObject]:
    """A turn's calls."""
    return cast(list[JsonObject], turn.get("tool_calls") or [])


def with_calls(turn: Turn, calls: list[JsonObject]) -> Turn:
    """A turn with other calls; itself where they are its own."""
    return turn if same(calls, calls_of(turn)) else {**turn, "tool_calls": calls}


# ---- arguments and identifiers ---------------------------------------------------------------------------------------


def with_arguments(turns: Turns, change: Callable[[object], object]) -> list[Turn]:
    """Turns whose calls have other arguments."""

    def changed(call: JsonObject) -> JsonObject:
        function = cast(JsonObject, call["function"])
        made = change(given := function["arguments"])
        return call if made is given else {**call, "function": {**function, "arguments": made}}

    return [with_calls(turn, list(map(changed, calls_of(turn)))) for turn in turns]


def objects(turns: Turns) -> list[Turn]:
    """Arguments that are no object, such as half of one, stand in one."""

    def wrapped(given: object) -> object:
        empty = given is None or given == [] or (isinstance(given, str) and not given.strip())
        return given if isinstance(given, dict) else {} if empty else {"arguments": given}

    return with_arguments(turns, wrapped)


def texts(turns: Turns) -> list[Turn]:
    """Arguments as texts of JSON."""
    return with_arguments(turns, lambda one: one if isinstance(one, str) else json.dumps(one, ensure_ascii=False))


def identifiers(turns: Turns) -> list[Turn]:
    """Identifiers of nine letters and digits, made of the given ones. A result without one has that of the first call before it
    that has no result."""
    made, waiting = list[Turn](), dict[object, None]()

    def short(given: object) -> object:
        fits = MISTRALS.fullmatch(str(given))
        return given if fits else hashlib.sha256(str(given).encode("utf-8", "replace")).hexdigest()[:9]

    for number, turn in enumerate(turns):
        calls = list[JsonObject]()
        for at, call in enumerate(calls_of(turn)):
            new = short(given := call.get("id") or f"{number}.{at}")
            calls.append(call if new is given else {**call, "id": new})
            waiting[new] = None
        turn = with_calls(turn, calls)
        if turn["role"] == "tool":
            given = turn.get("tool_call_id")
            new = short(given) if given else next(iter(waiting), short(number))
            waiting.pop(new, None)
            turn = turn if new is given else {**turn, "tool_call_id": new}
        made.append(turn)
    return made


# ---- turns that are moved, merged and wrapped ------------------------------------------------------------------------


def joined(turns: Turns) -> Turn:
    """Turns as one, of the first's role."""
    made: JsonObject = {name: value for turn in reversed(turns) for name, value in turn.items()}
    for name in ("content", "reasoning_content"):
        if texts := [str(turn[name]) for turn in turns if turn.get(name)]:
            made[name] = "\n\n".join(texts)
    if calls := [call for turn in turns for call in calls_of(turn)]:
        made["tool_calls"] = calls
    return made


def merged(turns: Turns, together: Callable[[Turn, Turn, Turn], bool]) -> list[Turn]:
    """Turns, in which those of a row are one: ``together`` takes the first and the last of a row, and the next."""
    rows = list[list[Turn]]()
    for turn in turns:
        if rows and together(rows[-1][0], rows[-1][-1], turn):
            rows[-1].append(turn)
        else:
            rows.append([turn])
    return [joined(row) if len(row) > 1 else row[0] for row in rows]


def one_system(turns: Turns) -> list[Turn]:
    """System messages in a row as one."""
    return merged(turns, lambda _, last, turn: last["role"] == turn["role"] == "system")


def later_systems(turns: Turns) -> list[Turn]:
    """A system message after the beginning becomes a user's, in its place: at the front it would change all that follows."""
    begin = next((at for at, turn in enumerate(turns) if turn["role"] != "system"), len(turns))
    late = [{**turn, "role": "user"} if turn["role"] == "system" else turn for turn in turns[begin:]]
    return [*turns[:begin], *late]


def no_system(turns: Turns) -> list[Turn]:
    """The system message stands before the first user message, in one with it, or becomes one; later ones become ones."""
    first, *rest = later_systems(one_system(turns))
    if first["role"] != "system":
        return [*turns]
    first = {**first, "role": "user"}
    return merged([first, *rest], lambda _, last, turn: last is first and turn["role"] == "user")


def no_empty(turns: Turns) -> list[Turn]:
    """Messages without a content are left out, but for the last and for results."""
    *before, last = turns
    names = ("content", "tool_calls", "reasoning_content")
    said = (any(str(turn.get(name) or "").strip() for name in names) for turn in before)
    return [turn for turn, full in zip(before, said, strict=True) if full or turn["role"] == "tool"] + [last]


def parts(turns: Turns) -> list[Turn]:
    """An answer's text and each of its calls as messages of their own, each call before its result."""
    made, left = list[Turn](), deque(turns)
    while left:
        turn = left.popleft()
        calls, results = calls_of(turn), defaultdict[object, list[Turn]](list)
        if not calls or (len(calls) == 1 and not content_of(turn)):
            made.append(turn)
            continue
        while left and left[0]["role"] == "tool":
            results[left[0].get("tool_call_id")].append(left.popleft())
        bare = {name: value for name, value in turn.items() if name not in ("tool_calls", "reasoning_content")}
        made += [bare] if content_of(turn) else []
        for number, call in enumerate(calls):
            made.append({**(bare if number else turn), "content": "", "tool_calls": [call]})
            made += results.pop(call.get("id"), [])
        made += [one for others in results.values() for one in others]
    return made


def neighbours(turns: Turns) -> list[Turn]:
    """Messages of one role in a row as one, but for results and for a text after calls."""

    def together(_: Turn, last: Turn, turn: Turn) -> bool:
        return last["role"] == turn["role"] != "tool" and not (calls_of(last) and not calls_of(turn))

    return merged(turns, together)


def after_results(turns: Turns) -> list[Turn]:
    """A user's text right after a tool's result stands at the result's end."""
    return merged(turns, lambda first, _, turn: (first["role"], turn["role"]) == ("tool", "user"))


def user_first(turns: Turns) -> list[Turn]:
    """An empty user message before an answer that begins the conversation."""
    begin = next((at for at, turn in enumerate(turns) if turn["role"] != "system"), len(turns))
    first = begin < len(turns) and turns[begin]["role"] == "assistant"
    return [*turns[:begin], *([{"role": "user", "content": ""}] if first else []), *turns[begin:]]


def told(turns: Turns, *, pairs: bool) -> list[Turn]:
    """Calls and results in words, as for a template that knows no tools; without ``pairs`` those alone that lack the other."""
    calls = {call.get("id") for turn in turns for call in calls_of(turn)}
    results = {turn.get("tool_call_id") for turn in turns if turn["role"] == "tool"}
    names, made = calls | results if pairs else calls ^ results, list[Turn]()
    for turn in turns:
        if turn["role"] == "tool" and turn.get("tool_call_id") in names:
            result = f"<tool_response>\n{content_of(turn)}\n</tool_response>"
            turn = {"role": "user", "content": result, "place": turn.get("place")}
        elif words := [call_text(call) for call in calls_of(turn) if call.get("id") in names]:
            others = [call for call in calls_of(turn) if call.get("id") not in names]
            turn = {**turn, "content": "\n".join(filter(None, (content_of(turn), *words))), "tool_calls": others}
            turn = turn if others else {name: value for name, value in turn.items() if name != "tool_calls"}
        made.append(turn)
    return made


def in_words(turns: Turns) -> list[Turn]:
    """All calls and results in words."""
    return neighbours(told(turns, pairs=True))


REPAIRS: tuple[Repair, ...] = (
    identifiers, one_system, later_systems, no_empty, parts, partial(told, pairs=False), neighbours, after_results, no_system,
    user_first,
)  # fmt: skip
"""After those of arguments, from the repairs that change the least."""


# ---- templates that know no tools: these stand in the system prompt, calls and results in the form of Qwen and Hermes ----------


WORDS = """You may call functions. Each is described by its name, its purpose and the JSON schema of its arguments:
{tools}
To call one, answer with nothing but
<tool_call>
{{"name": "its name", "arguments": {{"an argument": "its value"}}}}
</tool_call>"""


def call_text(call: Mapping[str, object]) -> str:
    """A call in words."""
    return f"{OPEN}\n{json.dumps(call['function'], ensure_ascii=False)}\n{CLOSE}"


def rewritten(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """The conversation for a template that knows no tools."""
    made = [placed(str(turn["place"]), turn) for turn in told([one.rendered() for one in messages], pairs=True)]
    if tools:
        lines = (json.dumps(tool.function.model_dump(), ensure_ascii=False) for tool in tools)
        before = f"{made.pop(0).content}\n\n" if made and made[0].role == "system" else ""
        made.insert(0, Message(role="system", content=before + WORDS.format(tools="\n".join(lines))))
    return made


def asked(messages: Sequence[Message]) -> list[Message]:
    """Messages about a document, starting with a user's. System messages before it are merged into it.

    Raises:
        ValueError: an answer or a tool's result comes first.
    """
    first = next((at for at, message in enumerate(messages) if message.role != "system"), len(messages))
    if first == len(messages) or messages[first].role != "user":
        raise ValueError("with document_id, the first message beside system ones must be a user's")
    content = "\n\n".join(filter(None, (message.content for message in messages[: first + 1])))
    return [Message(role="user", content=content), *messages[first + 1 :]]
