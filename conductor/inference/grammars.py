"""Grammars in request bodies, under the names of OpenAI and vLLM."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, Self

import msgspec
from pydantic import AfterValidator, Field, model_validator

from tanghulu.conductor.inference.body import Body, Name
from tanghulu.conductor.tools.schemas import grammar_of
from tanghulu.web.errors import BadField

MAX_GRAMMAR_CHARS = 65_536
MAX_CHOICE_TEXTS = 256
_ESCAPES = {ord(character): f"\\{character}" for character in r"\.+*?()|[]{}^$"}


def _fit_in_a_grammar(texts: list[str]) -> list[str]:
    if (length := sum(map(len, texts)) + len(texts)) > MAX_GRAMMAR_CHARS:
        raise ValueError(f"the texts have {length} characters in total; the limit is {MAX_GRAMMAR_CHARS}")
    return texts


GrammarText = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARS)]
ChoiceTexts = Annotated[
    list[GrammarText],
    Field(min_length=1, max_length=MAX_CHOICE_TEXTS, fail_fast=True),
    AfterValidator(_fit_in_a_grammar),
]
JsonText = GrammarText | dict[str, Any] | bool


class StructuredOutputs(Body):
    """``structured_outputs``, the name of a grammar in vLLM; one of them is given."""

    json_: Annotated[JsonText | None, Field(alias="json")] = None
    """As guided_json."""
    regex: GrammarText | None = None
    """As guided_regex."""
    choice: ChoiceTexts | None = None
    """As guided_choice."""
    json_object: bool = False
    """Any JSON object."""


def json_text(name: str, schema: JsonText, strict: bool = False) -> str:
    """Return the grammar text of ``schema``, the value of the field ``name``. Raises BadField."""
    try:
        given = msgspec.json.decode(schema, type=dict[str, Any] | bool) if isinstance(schema, str) else schema
        length = 0 if isinstance(schema, str) else len(msgspec.json.encode(schema))
        if length > MAX_GRAMMAR_CHARS:
            raise BadField(f"{name} has {length} characters; the limit is {MAX_GRAMMAR_CHARS}", name.partition(".")[0])
        return grammar_of(given, strict)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadField(f"{name} is not a JSON schema: {error}", name.partition(".")[0]) from None


def one_of(texts: list[str]) -> str:
    """Return the expression that matches exactly ``texts``."""
    return "|".join(text.translate(_ESCAPES) for text in texts)


#: JSON schema of any object.
ANY_OBJECT: Final = grammar_of({"type": "object"}, strict=False)


class JsonSchema(Body):
    """``json_schema`` of a response format."""

    name: Name = ""
    """Not shown to the model."""
    strict: bool | None = None
    """Reject a schema that cannot be enforced completely."""
    schema_: dict[str, Any] | bool = Field(default_factory=dict, alias="schema")
    """Default: any JSON."""


class ResponseFormat(Body):
    """The format of the text: free, JSON, or JSON matching a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    """With type json_schema."""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("type json_schema requires the field json_schema with the schema")
        return self

    @property
    def schema_text(self) -> str | None:
        """JSON schema required of the text; None for free text."""
        if self.type == "json_schema" and self.json_schema is not None:
            return json_text("response_format", self.json_schema.schema_, bool(self.json_schema.strict))
        return ANY_OBJECT if self.type == "json_object" else None
