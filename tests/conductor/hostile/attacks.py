"""Requests that cost much: what a body, a message or a header can carry, as large and as odd as its bytes allow.

Each is a function of a random generator, so a seed repeats it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from random import Random
from typing import Any, Final

#: Bytes of the largest bodies; a conductor reads 32 MiB.
MOST_BYTES: Final = 30 << 20
#: Values of the largest lists, a little more than a body may have.
MOST_VALUES: Final = 1_100_000
PATHS: Final = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/generate",
    "/tokenize",
    "/detokenize",
    "/route",
    "/abort_request",
)
_USER: Final = {"role": "user", "content": "hi"}


def _names(text: str) -> list[str]:
    return text.split()


_SAMPLING: Final = _names(
    "stop stop_token_ids stop_regex logit_bias temperature top_p seed n min_tokens regex json_schema ebnf"
)
_OPENAI: Final = _names(
    "model user stream_options response_format guided_json guided_regex guided_choice structured_outputs request_id "
    "cache_salt extra_key prompt_cache_key routing bad_words allowed_token_ids metadata logprobs prompt_logprobs "
    "truncate_prompt_tokens unknown_name"
)
_CHAT: Final = _names(
    "messages tools tool_choice documents chat_template_kwargs reasoning_effort functions parallel_tool_calls"
)
_FIELDS: Final[dict[str, list[str]]] = {
    "/v1/chat/completions": [*_SAMPLING, *_OPENAI, *_CHAT],
    "/v1/completions": [*_SAMPLING, *_OPENAI, "prompt", "suffix"],
    "/v1/responses": _names(
        "input instructions tools tool_choice include metadata text reasoning previous_response_id user model"
    ),
    "/v1/messages": _names(
        "messages system tools tool_choice thinking output_config cache_control stop_sequences metadata user model"
    ),
    "/generate": _names("text input_ids sampling_params rid return_logprob token_ids_logprob model"),
    "/tokenize": _names("prompt messages model unknown_name"),
    "/detokenize": _names("tokens model"),
    "/route": [*_SAMPLING, *_OPENAI, *_CHAT, "prompt"],
    "/abort_request": _names("rid abort_all unknown_name"),
}
_BASES: Final[dict[str, dict[str, Any]]] = {
    "/v1/chat/completions": {"messages": [_USER], "max_tokens": 2},
    "/v1/completions": {"prompt": "x", "max_tokens": 2},
    "/v1/responses": {"input": "x", "max_output_tokens": 2},
    "/v1/messages": {"messages": [_USER], "max_tokens": 2},
    "/generate": {"text": "x", "sampling_params": {"max_new_tokens": 2}},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1]},
    "/route": {"prompt": "x"},
    "/abort_request": {"rid": "x"},
}


def _count(random: Random, most: int) -> int:
    """A number up to ``most``, each order of magnitude alike."""
    return max(1, int(most ** random.random()))


def text(random: Random, most: int = MOST_BYTES) -> str:
    """A text of up to ``most`` bytes of JSON."""
    piece = random.choice(
        ["a", ".", "a ", "\\", '"', "\n", "é", "語", "🍡", "9", "[[],", "{},", "<|im_start|>", "(", "the ", "\0", " "]
    )
    return piece * max(1, _count(random, most) // len(json.dumps(piece)))


def values(random: Random, depth: int = 0) -> Any:
    """A value of any kind, maybe a list or an object of very many."""
    kind = random.randrange(13 if depth < 2 else 5)
    count = _count(random, MOST_VALUES if depth == 0 else 2000)
    match kind:
        case 0:
            return text(random, MOST_BYTES if depth == 0 else 1 << 16)
        case 1:
            return random.choice([0, 1, -1, 2**31, 2**63, 10**4000, 1.5, 1e300, True, False, None])
        case 2:
            return [random.choice([1, 255, 300, "a", "", "9" * 5000, [], {}, None, True, 0.5])] * count
        case 3:
            return {f"{index}": random.choice([1, "a", []]) for index in range(count // 2)}
        case 4:
            return _nested(random, count)
        case 5:
            return [values(random, depth + 1) for _ in range(random.randrange(1, 9))]
        case 6:
            return {f"k{index}": values(random, depth + 1) for index in range(random.randrange(1, 9))}
        case 7:
            return [text(random, MOST_BYTES // 256) for _ in range(random.randrange(1, 260))]
        case _:
            return special(random)


def _nested(random: Random, count: int) -> Any:
    opening, closing = random.choice([("[", "]"), ('{"a":', "}"), ('{"properties":{"a":', "}}")])
    depth = min(count, random.choice([50, 100, 300]))
    return json.loads(opening * depth + "1" + closing * depth)


def pattern(random: Random) -> str:
    """A regular expression that is dear to build or to look for."""
    many = "".join(chr(0x4E00 + index) for index in range(random.randrange(1, 980)))
    letter = random.choice("abcxyz")
    return random.choice(
        [
            f"(?i)[{many}]{{{random.randrange(1, 2100)}}}",
            f"[{letter}-z]{{{random.randrange(1, 2000)}}}",
            f"({letter}|[b-z]|H|e|l|o){{{random.randrange(1, 300)}}}q",
            f".{{{random.randrange(1, 2000)}}}q",
            f"({letter}*)*" * random.randrange(1, 100),
            "(" * random.randrange(1, 500) + letter + ")" * random.randrange(1, 500),
            f"(({letter}{{9}}){{9}}){{9}}",
            letter * random.randrange(1, 1024),
        ]
    )


def schema(random: Random) -> Any:
    """A JSON schema of many parts."""
    count = _count(random, 40_000)
    return random.choice(
        [
            {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(count)}},
            {"anyOf": [{"const": i} for i in range(count)]},
            {"enum": list(range(count))},
            {"type": "string", "pattern": pattern(random)},
            {"$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)}, "$ref": "#/$defs/d0"},
            {"type": "object", "required": ["a"] * count},
            _nested(random, 1000),
        ]
    )


def _arguments(random: Random) -> str:
    count = _count(random, 160_000)
    piece = random.choice(["[]", "1", '"a"', "{}", '{"a":1}', "[[]]"])
    return random.choice(['{"a": [' + ",".join([piece] * count) + "]}", "[" * count, '{"a":' * count, text(random)])


def _call(random: Random) -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": "f", "arguments": _arguments(random)}}


def special(random: Random) -> Any:
    """A value that some field takes, of a size that none should."""
    many = _count(random, 300)
    parts = [{"type": "text", "text": random.choice(["", "a"])}] * _count(random, 200_000)
    bare_calls = [{"function": {"name": "f"}}] * _count(random, 120_000)
    function = {"type": "function", "function": {"name": "f", "parameters": schema(random)}}
    item = {"type": "function_call", "call_id": "c", "name": "f", "arguments": _arguments(random)}
    return random.choice(
        [
            lambda: [{"role": "user", "content": parts}],
            lambda: [{"role": "assistant", "tool_calls": [_call(random)] * many}, _USER],
            lambda: [{"role": "assistant", "tool_calls": bare_calls}, _USER],
            lambda: [_USER] * _count(random, 50_000),
            lambda: [{"role": "user", "content": "x", "extra": values(random, 1)}] * many,
            lambda: [function | {"function": {"name": f"f{i}", "parameters": schema(random)}} for i in range(3)],
            lambda: [function] * many,
            lambda: [{"type": "function", "name": "f", "parameters": schema(random)}] * many,
            lambda: [item] * many,
            lambda: [{"type": "message", "role": "user", "content": text(random, 1 << 20)}] * min(many, 30),
            lambda: {"type": "json_schema", "json_schema": {"name": "x", "schema": schema(random)}},
            lambda: {"format": {"type": "json_schema", "name": "x", "schema": schema(random)}},
            lambda: {"json": schema(random)},
            lambda: {"choice": [text(random, 1 << 17)] * many},
            lambda: [text(random, 1 << 17)] * many,
            lambda: [pattern(random) for _ in range(random.randrange(1, 5))],
            lambda: {str(i): 1.0 for i in range(_count(random, 3000))},
            lambda: {"9" * 5000: 1.0},
            lambda: [[1] * _count(random, 9000)] * min(many, 128),
            lambda: ["a" * _count(random, 2048)] * min(many, 128),
            lambda: [{"max_new_tokens": 1, "stop": ["a" * 1024] * 64}] * min(many, 128),
            lambda: [{"max_new_tokens": 1, "stop_regex": [pattern(random)]} for _ in range(min(many, 128))],
            lambda: {"weights": {f"w{i}": 1 for i in range(_count(random, 100_000))}},
            lambda: schema(random),
            lambda: json.dumps(schema(random)),
        ]
    )()


def body(random: Random) -> tuple[str, bytes]:
    """A path and a body for it, of which one to three fields are hostile."""
    path = random.choice(PATHS)
    given = dict(_BASES[path])
    for name in random.choices(_FIELDS[path], k=random.choice([1, 1, 2, 3])):
        given[name] = values(random)
    if random.random() < 0.3 and "prompt" in given:
        given |= {"prompt": ["a"] * 128, "stop_regex": [pattern(random) for _ in range(4)]}
    if random.random() < 0.1:
        given = {name: given.get("missing", value) for name, value in given.items()} | {
            f"u{i}": 1 for i in range(_count(random, 100_000))
        }
    encoded = json.dumps(given, ensure_ascii=random.random() < 0.5).encode("utf-8", "replace")
    return path, encoded[:MOST_BYTES]


def costly(random: Random) -> Iterator[tuple[str, bytes]]:
    """Paths and bodies that are let in, or nearly, and whose work or answer is as large as it may be."""
    words = "".join(random.choice(["the ", "in ", "é", "ab, ", "x\n"]) for _ in range(2000))
    ids = [random.randrange(250) for _ in range(8000)]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    tool["function"]["parameters"]["properties"] = {f"p{i}": {"type": "string"} for i in range(900)}  # type: ignore[index]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    block, used = {"type": "text", "text": ""}, {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}
    messages = "/v1/messages"
    chat, completions, generate = "/v1/chat/completions", "/v1/completions", "/generate"
    stops = [{"max_new_tokens": 20, "stop": [f"{i}{j}{words[:900]}" for j in range(64)]} for i in range(64)]
    cases: list[tuple[str, dict[str, Any]]] = [
        (completions, {"prompt": [ids] * 128, "max_tokens": 1}),
        (completions, {"prompt": [words] * 128, "max_tokens": 1, "echo": True}),
        (completions, {"prompt": [words[:1000]] * 10, "max_tokens": 1, "echo": True, "logprobs": 5}),
        (completions, {"prompt": ids, "max_tokens": 1, "prompt_logprobs": 20}),
        (completions, {"prompt": ids, "max_tokens": 1, "echo": True, "logprobs": 20, "stream": True}),
        (generate, {"input_ids": ids, "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 20}),
        (completions, {"prompt": ["a"] * 128, "max_tokens": 100, "ignore_eos": True, "logprobs": 20}),
        (generate, {"text": ["a"] * 64, "sampling_params": stops}),
        (generate, {"text": ["a"] * 128, "stream": True, "sampling_params": {"max_new_tokens": 200}}),
        (completions, {"prompt": "x", "max_tokens": 500, "stop_regex": [f"[a-z, H!ö{c}]{{2000}}q" for c in "abcd"]}),
        (completions, {"prompt": ["x"] * 128, "max_tokens": 100, "stop_regex": "[a-z, H!ö]{60}q"}),
        (chat, {"messages": [{"role": "user", "content": "x"}] * 2000, "max_tokens": 1}),
        (chat, {"messages": [{"role": "assistant", "tool_calls": [call] * 500}, _USER], "max_tokens": 1}),
        (chat, {"messages": [_USER], "tools": [tool], "tool_choice": "required", "max_tokens": 1}),
        (chat, {"messages": [_USER], "chat_template_kwargs": {f"k{i}": i for i in range(40_000)}, "max_tokens": 1}),
        ("/tokenize", {"prompt": [words] * 128}),
        ("/detokenize", {"tokens": ids * 120}),
        ("/v1/responses", {"input": [{"role": "user", "content": "x"}] * 1000, "max_output_tokens": 1}),
        (messages, {"messages": [{"role": "user", "content": [block] * 14_000}], "max_tokens": 1}),
        (messages, {"messages": [{"role": "user", "content": "x" * 7000}] * 4000, "max_tokens": 1}),
        (messages, {"messages": [{"role": "assistant", "content": [used] * 500}, _USER] * 12, "max_tokens": 1}),
        (f"{messages}/count_tokens", {"messages": [_USER], "system": [block] * 14_000}),
    ]
    yield from ((path, json.dumps(given).encode()) for path, given in cases)


def _head(path: str, *fields: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: x", "content-type: application/json", *fields, "", ""]
    return "\r\n".join(lines).encode()


def raw(random: Random) -> Iterator[bytes]:
    """The pieces of a request that is odd as HTTP."""
    count = _count(random, 1_000_000)
    chat = json.dumps(_BASES["/v1/chat/completions"]).encode()
    length = f"content-length: {len(chat)}"
    chunked = _head("/v1/chat/completions", "transfer-encoding: chunked")
    kinds: list[Callable[[], list[bytes]]] = [
        lambda: [b"GET /live HTTP/1.1\r\nhost: x\r\nx-a: " + b"y" * count] + [b"y" * 65_536] * random.randrange(200),
        lambda: [b"GET /live HTTP/1.1\r\nhost: x\r\n" + b"a:b\r\n" * count + b"\r\n"],
        lambda: [b"GET /route?prompt=" + b"y" * count + b" HTTP/1.1\r\nhost: x\r\n\r\n"],
        lambda: [b"GET /v1/models/" + b"%41" * (count // 3) + b" HTTP/1.1\r\nhost: x\r\n\r\n"],
        lambda: [b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n" * (count // 30)],
        lambda: [b"\r\n" * count],
        lambda: [chunked, b"1\r\n \r\n" * min(count, 300_000), b"%x\r\n%b\r\n0\r\n\r\n" % (len(chat), chat)],
        lambda: [chunked, b"%x\r\n%b\r\n0\r\n" % (len(chat), chat), b"x: y\r\n" * count, b"\r\n"],
        lambda: [chunked, b"%x\r\n%b\r\n0\r\nx: " % (len(chat), chat), b"y" * count, b"\r\n\r\n"],
        lambda: [chunked, b"1;" + b"x" * count + b"\r\n \r\n"],
        lambda: [_head("/v1/chat/completions", length, "x-request-id: " + "z" * 60_000), chat],
        lambda: [_head("/v1/chat/completions", length, "authorization: " + "z" * 60_000), chat],
        lambda: [
            _head("/v1/chat/completions", length, *["traceparent: 00-1-1-01"] * 900),
            chat,
        ],
        lambda: [b"GET /live HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n", b"z" * count],
    ]
    yield from random.choice(kinds)()
