"""Parsers of tool calls and reasoning: each form, however the text is cut, and text that is nothing of the kind."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tanghulu.conductor.tools.call_reader import MAX_HELD_CHARACTERS
from tanghulu.conductor.tools.choosing import ParserNames, call_parser, form_of
from tanghulu.conductor.tools.events import (
    MAX_HELD_SPACE,
    AnswerParser,
    CallArguments,
    CallBegin,
    CallEnd,
    ContentText,
    ReasoningText,
    merged,
)
from tanghulu.conductor.tools.json_calls import FORCED, HERMES, LLAMA3, MISTRAL, JsonCallParser
from tanghulu.conductor.tools.json_scanner import JsonScanner
from tanghulu.conductor.tools.pythonic import MalformedCall, PythonicCallParser, parse_call
from tanghulu.conductor.tools.reasoning import ReasoningParser, is_open
from tests.conductor.text.test_templates import TEMPLATES

NAMES = ("f", "get_weather")


def _ids() -> Callable[[], str]:
    numbers = itertools.count()
    return lambda: f"call-{next(numbers)}"


PARSERS: dict[str, Callable[[], AnswerParser]] = {
    "hermes": lambda: JsonCallParser(HERMES, NAMES, _ids()),
    "llama3_json": lambda: JsonCallParser(LLAMA3, NAMES, _ids()),
    "mistral": lambda: JsonCallParser(MISTRAL, NAMES, _ids()),
    "pythonic": lambda: PythonicCallParser(NAMES, _ids()),
    "forced": lambda: JsonCallParser(FORCED, NAMES, _ids()),
    "named": lambda: JsonCallParser(FORCED, NAMES, _ids(), "f"),
    "think": lambda: ReasoningParser(JsonCallParser(HERMES, NAMES, _ids()), opened=False),
    "thinking": lambda: ReasoningParser(JsonCallParser(HERMES, NAMES, _ids()), opened=True),
}


def _parse(form: str, pieces: Iterable[str]) -> list:
    parser = PARSERS[form]()
    events = [event for piece in pieces for event in parser.feed(piece)]
    return merged([*events, *parser.finish()])


def _calls(events: list) -> list[tuple[str, str]]:
    """Name and arguments of each call."""
    names = {event.index: event.name for event in events if isinstance(event, CallBegin)}
    texts = {event.index: event.text for event in events if isinstance(event, CallArguments)}
    return [(name, texts.get(index, "")) for index, name in names.items()]


def _content(events: list) -> str:
    return "".join(event.text for event in events if isinstance(event, ContentText))


def _reasoning(events: list) -> str:
    return "".join(event.text for event in events if isinstance(event, ReasoningText))


CASES = [
    # form, text, content, calls
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", [("f", '{"a": 1}')]),
    ("hermes", 'Look.\n<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "Look.", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name":"f"}</tool_call>\n<tool_call>{"name":"g"}', "", [("f", "{}"), ("g", "{}")]),
    ("hermes", '<tool_call>{"name":"f"}\n{"name":"g"}</tool_call>', "", [("f", "{}"), ("g", "{}")]),
    ("hermes", '<tool_call>{"name":"f","arguments":"{\\"a\\": 2}"}</tool_call>', "", [("f", '{"a": 2}')]),
    ("hermes", '<tool_call>{"name":"f","arguments":null}</tool_call> done', " done", [("f", "{}")]),
    ("hermes", '<tool_call>{"name":"f","arguments":{"a":"x\ny"}}</tool_call>', "", [("f", '{"a":"x\\ny"}')]),
    ("hermes", '<tool_call>{"name":"f","arguments":{"a":1', "", [("f", '{"a":1')]),
    ("hermes", '<tool_call>oh<tool_call>{"name":"f"}</tool_call>', "<tool_call>oh", [("f", "{}")]),
    ("hermes", "<tool_call>{oh}</tool_call>", "<tool_call>{oh}</tool_call>", []),
    ("hermes", '<tool_call>{"name":"f","arguments":[1]}', '<tool_call>{"name":"f","arguments":[1]}', []),
    ("hermes", '<tool_call>{"name":"f","arguments":{"a":}} tail', "}} tail", [("f", '{"a":')]),
    ("hermes", "  a <tool_cal \n", "  a <tool_cal \n", []),
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
    ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {}}', "", [("f", "{}")]),
    (
        "llama3_json",
        '{"name":"f","parameters":{}}; {"name":"f","parameters":{"a":2}}',
        "",
        [("f", "{}"), ("f", '{"a":2}')],
    ),
    ("llama3_json", '{"name": "Ann", "parameters": {}}', '{"name": "Ann", "parameters": {}}', []),
    ("llama3_json", 'See {"name": "f", "parameters": {}}', 'See {"name": "f", "parameters": {}}', []),
    ("llama3_json", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]', "", [("f", '{"a": 1}')]),
    (
        "mistral",
        '[TOOL_CALLS][{"name":"f","arguments":{}},{"name":"g","arguments":{}}]',
        "",
        [("f", "{}"), ("g", "{}")],
    ),
    ("mistral", 'Hm.[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g{"b": 2}', "Hm.", [("f", '{"a": 1}'), ("g", '{"b": 2}')]),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{"a": 1}', "", [("f", '{"a": 1}')]),
    ("mistral", "[TOOL_CALLS] [] hm", "[TOOL_CALLS] [] hm", []),
    ("mistral", "[TOOL_CALLS]f(1)", "[TOOL_CALLS]f(1)", []),
    ("pythonic", '[f(a=1), get_weather(city="Köln")]', "", [("f", '{"a": 1}'), ("get_weather", '{"city": "Köln"}')]),
    (
        "pythonic",
        "<|python_start|>[f(a=[1.5, None], b={'k': ')'})]<|python_end|>",
        "",
        [("f", '{"a": [1.5, null], "b": {"k": ")"}}')],
    ),
    ("pythonic", "[f()]", "", [("f", "{}")]),
    ("pythonic", "[1, 2]", "[1, 2]", []),
    ("pythonic", "[g(a=1)]", "[g(a=1)]", []),
    ("pythonic", "[f(1)]", "[f(1)]", []),
    ("pythonic", "[f(a=open('x'))]", "[f(a=open('x'))]", []),
    ("pythonic", "[f(a=1), so]", ", so]", [("f", '{"a": 1}')]),
    (
        "forced",
        '[{"name": "f", "arguments": {"a": 1}}, {"name": "f", "arguments": {}}]',
        "",
        [("f", '{"a": 1}'), ("f", "{}")],
    ),
    ("named", '{"a": {"b": []}}', "", [("f", '{"a": {"b": []}}')]),
    ("named", "sorry", "sorry", []),
]


@pytest.mark.parametrize(("form", "text", "content", "calls"), CASES)
def test_each_form(form: str, text: str, content: str, calls: list) -> None:
    events = _parse(form, [text])
    assert (_content(events), _calls(events)) == (content, calls)
    begun = [event.index for event in events if isinstance(event, CallBegin)]
    ended = [event.index for event in events if isinstance(event, CallEnd)]
    assert begun == ended == list(range(len(calls)))


def test_a_list_of_calls_cut_anywhere_has_no_content_beside_its_calls() -> None:
    text = '[{"name": "f", "arguments": {"a": "}, {"}}, {"name": "f", "arguments": {}}]'
    for end in range(text.index("}}"), len(text) + 1):
        for form, opening in (("forced", ""), ("mistral", "[TOOL_CALLS] ")):
            events = _parse(form, [opening + text[:end]])
            assert not [event for event in events if isinstance(event, ContentText) and event.text], text[:end]


def test_reasoning_is_parted_from_the_answer() -> None:
    text = '<think>\nWhat\n now? </think>\n\n<tool_call>{"name": "f"}</tool_call>'
    events = _parse("think", [text])
    assert (_reasoning(events), _content(events), _calls(events)) == ("What\n now?", "", [("f", "{}")])
    events = _parse("thinking", ["hm</think>\n\nSo: <think> is a tag"])
    assert (_reasoning(events), _content(events)) == ("hm", "So: <think> is a tag")
    assert _content(_parse("think", [" no <think>"])) == " no <think>"
    assert _reasoning(_parse("think", ["<think>cut </thi"])) == "cut </thi"
    assert is_open("<|im_start|>assistant\n<think>\n")
    assert not is_open("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_arguments_come_as_they_are_written() -> None:
    parser = PARSERS["hermes"]()
    assert parser.feed('<tool_call>{"name": "f", "argum') == []
    assert parser.feed('ents": {"a"') == [CallBegin(0, "call-0", "f"), CallArguments(0, '{"a"')]
    assert parser.feed(": 1}") == [CallArguments(0, ": 1}")]
    assert parser.feed("}") == [CallEnd(0, complete=True)]


def test_content_is_not_held_back_for_long() -> None:
    parser = PARSERS["hermes"]()
    assert parser.feed("a < b <tool") == [ContentText("a < b")]
    assert parser.feed("s>") == [ContentText(" <tools>")]
    held = sum(len(event.text) for event in parser.feed(" " * 10 * MAX_HELD_SPACE))
    assert held >= 9 * MAX_HELD_SPACE


@pytest.mark.parametrize("form", ["hermes", "llama3_json", "mistral", "pythonic"])
def test_what_is_held_back_is_bounded(form: str) -> None:
    opening = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]", "pythonic": '[f(a="', "llama3_json": ""}[form]
    text = opening + ("x" if form == "pythonic" else '{"x": "' + "y") * 1 + "y" * (3 * MAX_HELD_CHARACTERS)
    parser, shown = PARSERS[form](), 0
    for position in range(0, len(text), 1000):
        shown += sum(len(event.text) for event in parser.feed(text[position : position + 1000]))
        assert position + 1000 - shown <= MAX_HELD_CHARACTERS + 2000
    assert shown + len(_content(parser.finish())) == len(text)


# --- cuts


def _value(random_: random.Random, depth: int = 0) -> object:
    kind = random_.randrange(7 if depth < 2 else 5)
    if kind == 5:
        return [_value(random_, depth + 1) for _ in range(random_.randrange(3))]
    if kind == 6:
        return {random_.choice("abé"): _value(random_, depth + 1) for _ in range(random_.randrange(3))}
    return (random_.randrange(-5, 99), random_.choice(['x"', "</tool_call>", "é\n", ")]", ""]), None, True, -1.5)[kind]


def _stream(form: str, random_: random.Random) -> str:
    """A text of some calls, sometimes spoilt."""
    calls = []
    for _ in range(random_.randrange(1, 3)):
        name = random_.choice(NAMES)
        arguments = {key: _value(random_) for key in random_.sample(["a", "b", "city"], random_.randrange(3))}
        key = "parameters" if form == "llama3_json" else "arguments"
        pairs = [("name", name), (key, arguments)]
        if random_.random() < 0.2:
            pairs.reverse()
        if form == "pythonic":
            calls.append(f"{name}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})")
        elif form == "named":
            calls.append(json.dumps(arguments, ensure_ascii=False))
        else:
            calls.append(json.dumps(dict(pairs), ensure_ascii=random_.random() < 0.5))
    text = _written(form, calls, random_)
    if random_.random() < 0.3:
        place = random_.randrange(len(text))
        text = text[:place] + random_.choice(["", "<", "{", '"', "]", "\\", ", ", "[TOOL_CALLS]"]) + text[place + 1 :]
    return random_.choice(["", "", " ", "Oh.\n"]) + text + random_.choice(["", "", "\n", " bye"])


def _written(form: str, calls: list[str], random_: random.Random) -> str:
    match form:
        case "llama3_json":
            return random_.choice(["", "<|python_tag|>"]) + random_.choice(["; ", ";", " "]).join(calls)
        case "mistral" if random_.random() < 0.5:
            return "".join(f"[TOOL_CALLS]{random_.choice(NAMES)}{random_.choice(['[ARGS]', ''])}{c}" for c in calls)
        case "mistral":
            return f"[TOOL_CALLS]{random_.choice(['', ' '])}[{', '.join(calls)}]"
        case "pythonic":
            return f"[{', '.join(calls)}]"
        case "forced":
            return f"[{', '.join(calls)}]"
        case "named":
            return calls[0]
    text = "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)
    if form == "hermes":
        return text
    return {"think": "<think>\n", "thinking": ""}[form] + "hm <think> \n" + "</think>\n\n" + text


@pytest.mark.parametrize("form", PARSERS)
def test_every_cut_of_a_stream_gives_the_same(form: str) -> None:
    random_ = random.Random(form)
    num_calls = 0
    for number in range(200):
        text = _stream(form, random_)
        whole = _parse(form, [text])
        num_calls += len(_calls(whole))
        assert _parse(form, text) == whole, text
        # All cuts in two for every tenth, and some in more pieces for each: all of all are the slow test's.
        cuts = range(1, len(text)) if number % 10 == 0 else random_.sample(range(len(text)), min(8, len(text)))
        for cut in cuts:
            assert _parse(form, [text[:cut], text[cut:]]) == whole, (text, cut)
    assert num_calls > 100


@pytest.mark.slow
@pytest.mark.parametrize("form", PARSERS)
def test_all_cuts_of_all_streams_give_the_same(form: str) -> None:
    random_ = random.Random(f"all {form}")
    for _ in range(200):
        text = _stream(form, random_)
        whole = _parse(form, [text])
        for cut in range(1, len(text)):
            assert _parse(form, [text[:cut], text[cut:]]) == whole, (text, cut)


WORDS = r"""
    <tool_call> </tool_call> <tool { } [ ] ( ) "name" "arguments" "parameters" : , ; "f" f get_weather a= 1 -0.5e3
    true null " ' \\ \u00e9 \ud800 [TOOL_CALLS] [ARGS] [CALL_ID] <|python_tag|> <|python_start|> <|python_end|>
    <think> </think> é 😀
"""
PIECES = st.lists(st.sampled_from([*WORDS.split(), " ", "\n"]) | st.text(max_size=3), max_size=25)


@settings(max_examples=150, deadline=None)
@given(PIECES, st.sampled_from(sorted(PARSERS)))
def test_no_text_breaks_a_parser(pieces: list[str], form: str) -> None:
    text = "".join(pieces)
    whole = _parse(form, [text])
    assert _parse(form, pieces) == whole
    assert _parse(form, text) == whole
    for event in whole:
        if isinstance(event, ContentText | ReasoningText | CallArguments):
            event.text.encode()
    if not _calls(whole) and not _reasoning(whole) and form not in ("think", "thinking"):
        assert _content(whole) == text


@settings(max_examples=50, deadline=None)
@given(st.recursive(st.none() | st.floats(allow_nan=False, allow_infinity=False) | st.text(), st.lists, max_leaves=5))
def test_the_scanner_knows_json(value: object) -> None:
    text = json.dumps([value])
    scanner = JsonScanner()
    assert scanner.feed(text + "x") == (len(text), text)
    assert (scanner.done, scanner.broken) == (True, False)


@settings(max_examples=150, deadline=None)
@given(st.text('{}[]",:1.e-tru \\', max_size=12))
def test_the_scanner_takes_what_json_takes(text: str) -> None:
    text = f"[{text}]"
    scanner = JsonScanner()
    consumed, _ = scanner.feed(text)
    try:
        json.loads(text)
        whole = True
    except ValueError:
        whole = False
    assert (scanner.done and consumed == len(text)) == whole


@pytest.mark.parametrize(
    "text",
    ["f", "f(", "f(a)", "f(a=b)", "f(a=1, a=2)", "f(a=1e999)", "f(a='", "f(a=" + "[" * 99, "f() + 1", "f(a={1: 2})"],
)
def test_what_is_no_call_of_literals_is_malformed(text: str) -> None:
    with pytest.raises(MalformedCall):
        parse_call(text)


# --- which parser


def test_the_parsers_are_told_from_the_template() -> None:
    forms = {path.stem: form_of(path.read_text(), ParserNames()) for path in TEMPLATES}
    assert {name: (form.tool_calls, form.reasoning) for name, form in forms.items()} == {
        "deepseek_r1_distill_qwen": ("hermes", "think"),
        "functionary_3.1": ("none", "none"),
        "granite_3.3": ("none", "think"),
        "mistral_nemo": ("mistral", "none"),
        "mistral_small_3.2": ("mistral", "none"),
        "phi_3.5_mini": ("hermes", "none"),
        "qwen2.5": ("hermes", "none"),
        "qwen3": ("hermes", "think"),
        "qwq": ("hermes", "think"),
        "smollm2": ("hermes", "none"),
    }
    assert not forms["smollm2"].shows_tools
    assert forms["qwen3"].shows_tools
    assert form_of("{{ tools }}<|python_tag|>", ParserNames()).tool_calls == "llama3_json"
    assert form_of("{{ tools }}[func_name1(params_name1=...)]", ParserNames()).tool_calls == "pythonic"
    told = form_of("{{ tools }}<tool_call>", ParserNames("pythonic", "none"))
    assert (told.tool_calls, told.reasoning) == ("pythonic", "none")


def test_ids_are_such_as_the_templates_take() -> None:
    events = call_parser("mistral", NAMES).feed('[TOOL_CALLS]f{"a": 1}')
    assert isinstance(events[0], CallBegin)
    assert len(events[0].id) == 9
    assert events[0].id.isalnum()
