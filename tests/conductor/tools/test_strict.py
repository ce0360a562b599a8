"""The grammars of answers whose calls keep to their schemas, by the library that workers keep to them with."""

from __future__ import annotations

import datetime
import enum
import json
import uuid
from decimal import Decimal
from typing import Annotated, Literal

import pytest
from pydantic import AnyUrl, BaseModel, ConfigDict, Field
from tokenizers import AddedToken, Tokenizer

from tanghulu.conductor.tools.schemas import (
    MAX_FORCED_CALLS,
    StrictTool,
    arguments_schema,
    calls_schema,
    grammar_of,
    strict_grammar,
)
from tests.conductor.fake_worker import EOS, TOKENIZER

llguidance = pytest.importorskip("llguidance", reason="llguidance is not installed: pip install 'tanghulu[worker]'")

MARKERS = ("[TOOL_CALLS]", "[ARGS]", "<|python_tag|>")
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/n"}},
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {"n": {"type": "integer"}},
}
TOOLS = (StrictTool("f", PARAMETERS), StrictTool("g", None))


def _tokenizer(special: bool) -> Tokenizer:
    tokenizer = Tokenizer.from_str(TOKENIZER.to_str())
    if special:
        tokenizer.add_special_tokens([AddedToken(marker, special=True) for marker in MARKERS])
    return tokenizer


def _taken(grammar: str, tokenizer: Tokenizer, text: str) -> bool:
    """Whether all of ``text`` may come, and the answer may end behind it."""
    known = llguidance.LLTokenizer(tokenizer.to_str(), eos_token=[EOS])
    matcher = llguidance.LLMatcher(known, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


HERMES = {
    "hi <b>": True,
    '<tool_call>\n{"name": "f", "arguments": {"a": 3}}\n</tool_call>': True,
    'Hm.\n<tool_call>{"name": "g", "arguments": {"x": []}}</tool_call>\n<tool_call>{"name": "f", "arguments": {"a": 1}}'
    "</tool_call>": True,
    '<tool_call>{"name": "f", "arguments": {"b": 3}}</tool_call>': False,
    '<tool_call>{"name": "h", "arguments": {}}</tool_call>': False,
    "<tool_call>no": False,
}
LLAMA = {
    "": True,
    "hi {": True,
    '{"name": "f", "parameters": {"a": 3}}; {"name": "g", "parameters": {}}': True,
    '{"name": "f", "parameters": {"b": 3}}': False,
    ' {"x"': False,
}
MISTRAL = {
    "hi": True,
    'Hm.[TOOL_CALLS] [{"name": "f", "arguments": {"a": 3}}, {"name": "g", "arguments": {}}]': True,
    '[TOOL_CALLS][{"name": "f", "arguments": {"b": 3}}]': False,
}
MISTRAL_PREFIXED = {
    "hi": True,
    '[TOOL_CALLS]f[ARGS]{"a": 3}[TOOL_CALLS]g[ARGS]{}': True,
    '[TOOL_CALLS]f[ARGS]{"b": 3}': False,
}


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize(
    ("form", "prefixed", "texts"),
    [
        ("hermes", False, HERMES),
        ("llama3_json", False, LLAMA),
        ("mistral", False, MISTRAL),
        ("mistral", True, MISTRAL_PREFIXED),
    ],
)
def test_calls_keep_to_their_schemas_and_the_rest_is_free(form, prefixed, texts, special):
    tokenizer = _tokenizer(special)
    text = strict_grammar(form, TOOLS, tokenizer.token_to_id, prefixed)
    grammar = llguidance.LLMatcher.grammar_from_lark(text)
    assert {text: _taken(grammar, tokenizer, text) for text in texts} == texts


def test_a_forced_answer_is_a_list_of_calls():
    grammar = llguidance.LLMatcher.grammar_from_json_schema(calls_schema([("f", PARAMETERS), ("g", None)]))
    call = '{"name": "f", "arguments": {"a": 3}}'
    texts = {
        f"[{call}]": True,
        f'[{call}, {{"name": "g", "arguments": {{}}}}]': True,
        f'[{call}, {{"name": "g", "arguments": {{"x": 1}}}}]': False,
        "[]": False,
        '[{"name": "f", "arguments": {}}]': False,
        '[{"name": "h", "arguments": {}}]': False,
        f"[{', '.join([call] * (MAX_FORCED_CALLS + 1))}]": False,
    }
    tokenizer = _tokenizer(special=False)
    assert {text: _taken(grammar, tokenizer, text) for text in texts} == texts


class Color(enum.Enum):
    RED = "red"


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: Annotated[int, Field(ge=1, le=9)]


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"


class Order(BaseModel):
    """What an application describes by pydantic."""

    model_config = ConfigDict(extra="forbid")
    tags: set[str]
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]
    when: datetime.datetime
    data: Annotated[bytes, Field(json_schema_extra={"format": "byte"})]
    id: uuid.UUID
    site: AnyUrl
    price: Decimal
    size: tuple[int, str]
    color: Color | None = None
    counts: dict[Annotated[str, Field(pattern="^[a-z]+$")], int]
    parent: Order | None = None


#: What zod, MCP servers and people write that a grammar can hold a part of.
ORDINARY = {
    "a set": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
    "an unknown format": {"type": "string", "format": "uri-template"},
    "oneOf": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    "propertyNames": {"type": "object", "propertyNames": {"pattern": "^a"}},
    "not": {"type": "integer", "not": {"const": 3}},
    "if": {"type": "object", "if": {"properties": {"a": {"const": 1}}}, "then": {"required": ["b"]}},
    "look-ahead": {"type": "string", "format": "email", "pattern": r"^(?!\.)(?!.*\.\.)[a-z]+@[a-z]+$"},
    "look-ahead in names": {
        "type": "object",
        "patternProperties": {"^(?!x)a": {"type": "integer"}},
        "additionalProperties": False,
    },
    "a reference in a pattern": {"type": "string", "pattern": r"^(a)\1$"},
    "contains": {"type": "array", "contains": {"type": "integer"}, "minContains": 1},
    "dependentRequired": {"type": "object", "properties": {"a": {}}, "dependentRequired": {"a": ["b"]}},
    "large floats": {"type": "number", "minimum": -3.4e38, "exclusiveMaximum": 1.7976931348623157e308},
}


def _error(text: str) -> str:
    known = llguidance.LLTokenizer(TOKENIZER.to_str(), eos_token=[EOS])
    matcher = llguidance.LLMatcher(known, llguidance.LLMatcher.grammar_from_json_schema(text), log_level=0)
    return matcher.get_error() if matcher.is_error() else ""


@pytest.mark.parametrize("schema", [Order.model_json_schema(), *ORDINARY.values()], ids=["pydantic", *ORDINARY])
def test_ordinary_schemas_are_held_as_far_as_grammars_can(schema):
    parameters = {"type": "object", "properties": {"u": schema}, "required": ["u"], "$defs": schema.get("$defs", {})}
    for text in (calls_schema([("f", parameters)]), arguments_schema(parameters), grammar_of(schema, strict=False)):
        assert not _error(text)


@pytest.mark.parametrize("kind", [kind for kind in ORDINARY if kind != "oneOf"])
def test_strict_schemas_are_refused_where_a_grammar_holds_less(kind):
    assert _error(grammar_of(ORDINARY[kind], strict=True))
    tools = [("f", {"type": "object", "properties": {"u": ORDINARY[kind]}})]
    assert _error(calls_schema(tools, strict=True))


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(("least", "most"), [(-(2**63), 2**63 - 1), (0, 2**64 - 1)])
def test_integers_of_64_bits_are_held(strict, least, most):
    text = grammar_of({"type": "integer", "minimum": least, "maximum": most}, strict)
    grammar = llguidance.LLMatcher.grammar_from_json_schema(text)
    tokenizer = _tokenizer(special=False)
    assert all(_taken(grammar, tokenizer, str(number)) for number in (0, 2**62, max(least, -(2**62))))
    assert not any(_taken(grammar, tokenizer, str(number)) for number in (2**64, least - 1, 10**30))


@pytest.mark.parametrize("strict", [True, False])
def test_options_of_the_compiler_are_not_the_client_s(strict):
    given = {"type": "integer", "x-guidance": {"lenient": True, "whitespace_pattern": "x*"}}
    shown = json.loads(grammar_of(given, strict))["x-guidance"]
    assert shown.pop("whitespace_pattern") != "x*"
    assert shown == {"coerce_one_of": True, "lenient": not strict}
    assert given["x-guidance"]["lenient"]


@pytest.mark.parametrize("schema", [True, {"type": "object"}, {"type": ["object", "array"]}])
@pytest.mark.parametrize("strict", [True, False])
def test_json_is_indented_as_people_do_and_not_without_end(schema, strict):
    grammar = llguidance.LLMatcher.grammar_from_json_schema(grammar_of(schema, strict))
    tokenizer = _tokenizer(special=False)
    data = {"a": {"b": [1, {"c": []}], "d": {}}}
    texts = [
        json.dumps(data, indent=indent, separators=pair) for indent in (None, 1, 8, "\t") for pair in (None, (",", ":"))
    ]
    assert all(_taken(grammar, tokenizer, text) for text in [*texts, '{\r\n\n  "a" : 1\r\n}', "{ }"])
    assert not any(_taken(grammar, tokenizer, "{" + blank * 200 + "}") for blank in (" ", "\n", "\t", " \n", "\n  "))


def test_a_named_function_s_answer_is_its_arguments():
    grammar = llguidance.LLMatcher.grammar_from_json_schema(arguments_schema(PARAMETERS))
    tokenizer = _tokenizer(special=False)
    assert _taken(grammar, tokenizer, '{"a": 3}')
    assert not _taken(grammar, tokenizer, '{"b": 3}')


@pytest.mark.parametrize("parameters", [None, {}, {"type": "object", "properties": {}}])
def test_a_function_without_parameters_takes_no_arguments(parameters):
    tokenizer = _tokenizer(special=False)
    named = llguidance.LLMatcher.grammar_from_json_schema(arguments_schema(parameters))
    assert _taken(named, tokenizer, "{}")
    assert not _taken(named, tokenizer, '{"a": 3}')


def test_a_strict_function_without_parameters_takes_no_arguments():
    tokenizer = _tokenizer(special=False)
    text = strict_grammar("hermes", [StrictTool("f", {})], tokenizer.token_to_id, prefixed=False)
    grammar = llguidance.LLMatcher.grammar_from_lark(text)
    call = '<tool_call>{"name": "f", "arguments": %s}</tool_call>'
    assert _taken(grammar, tokenizer, call % "{}")
    assert not _taken(grammar, tokenizer, call % '{"a": 3}')


def test_data_in_a_schema_is_left_alone():
    parameters = {"properties": {"$ref": {"enum": ["#", {"$ref": "#"}]}, "self": {"$ref": "#"}}}
    moved = json.loads(calls_schema([("f", parameters)]))["$defs"]["t0"]
    assert moved["properties"] == {"$ref": {"enum": ["#", {"$ref": "#"}]}, "self": {"$ref": "#/$defs/t0"}}


class TestObjectsThatListTheirPropertiesAreClosed:
    def test_wherever_they_stand(self):
        inner = {"type": "object", "properties": {"if": {"type": "string"}}}
        given = {
            "properties": {
                "a": inner,
                "b": {"type": "array", "items": inner},
                "c": {"anyOf": [inner, {"type": "null"}]},
            },
            "$defs": {"not": inner},
        }
        before = json.dumps(given)
        made = json.loads(arguments_schema(given))
        closed = inner | {"additionalProperties": False}
        assert made["additionalProperties"] is False
        assert made["properties"]["a"] == made["properties"]["b"]["items"] == made["$defs"]["not"] == closed
        assert made["properties"]["c"]["anyOf"] == [closed, {"type": "null"}]
        assert json.dumps(given) == before
        assert json.loads(calls_schema([("f", given)]))["$defs"]["t0"]["properties"]["a"] == closed

    @pytest.mark.parametrize(
        "own",
        [
            {"additionalProperties": True},
            {"additionalProperties": {"type": "string"}},
            {"patternProperties": {"^x": {}}},
            {"allOf": [{"properties": {"b": {}}}]},
            {"anyOf": [{"properties": {"b": {}}}]},
            {"$ref": "#/$defs/B", "$defs": {"B": {"properties": {"b": {}}}}},
            {"default": {"properties": {"b": 1}}, "additionalProperties": True},
        ],
        ids=lambda own: next(iter(own)),
    )
    def test_but_where_they_say_what_else_they_have(self, own):
        given = {"type": "object", "properties": {"a": {"type": "string"}}, **own}
        made = json.loads(arguments_schema(given))
        assert {name: made[name] for name in given} == given
        assert made.get("additionalProperties") == own.get("additionalProperties")

    def test_nothing_is_invented_by_the_grammar(self):
        grammar = llguidance.LLMatcher.grammar_from_json_schema(
            arguments_schema({"type": "object", "properties": {"city": {"type": "string"}}})
        )
        tokenizer = _tokenizer(special=False)
        assert _taken(grammar, tokenizer, '{"city": "Rome"}')
        assert not _taken(grammar, tokenizer, '{"city": "Rome", "type": "string"}')
