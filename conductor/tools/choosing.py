"""The parsers by name, and the choice of one for a model by the markers in its chat template."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from tanghulu.conductor.tools import json_calls, pythonic
from tanghulu.conductor.tools.call_reader import ARGUMENTS_MARK, ID_MARK
from tanghulu.conductor.tools.events import AnswerParser
from tanghulu.conductor.tools.json_calls import JsonCallParser, JsonForm
from tanghulu.conductor.tools.pythonic import PythonicCallParser
from tanghulu.conductor.tools.reasoning import CLOSING, OPENING, PlainAnswer

AUTO: Final = "auto"
NONE: Final = "none"
_FORMS: Final[dict[str, JsonForm]] = {
    "hermes": json_calls.HERMES,
    "llama3_json": json_calls.LLAMA3,
    "mistral": json_calls.MISTRAL,
}
_PYTHONIC: Final = "pythonic"
TOOL_CALL_PARSERS: Final = (AUTO, *_FORMS, _PYTHONIC, NONE)
_THINK: Final = "think"
REASONING_PARSERS: Final = (AUTO, _THINK, NONE)
#: A template containing the first has the form of the second; the first match counts.
_MARKERS: Final = (
    ("[TOOL_CALLS]", "mistral"),
    ("<function=", NONE),  # Qwen 3 Coder's own form inside <tool_call>
    ("<arg_key>", NONE),  # GLM's
    ("<tool_call>", "hermes"),
    ("<|python_start|>", _PYTHONIC),
    ("func_name1(", _PYTHONIC),
    ("<|python_tag|>", "llama3_json"),
    ("<|start_header_id|>ipython", "llama3_json"),
    ('"parameters": dictionary of argument name', "llama3_json"),
)
#: Mistral's templates reject ids of any other length.
_MISTRAL_ID_CHARACTERS: Final = 9
_ALPHANUMERIC: Final = string.ascii_letters + string.digits
_USES_TOOLS = re.compile(r"\btools\b")


@dataclass(frozen=True)
class ParserNames:
    """The parsers of a conductor, as set by its options."""

    tool_calls: str = AUTO
    reasoning: str = AUTO


@dataclass(frozen=True)
class AnswerForm:
    """A model's notation for everything other than plain text.

    ``shows_tools``: its chat template includes tools; ``shows_calls``: it also includes earlier calls.
    """

    tool_calls: str
    reasoning: str
    shows_tools: bool
    shows_calls: bool

    @property
    def markers(self) -> tuple[str, ...]:
        """Special tokens needed by its parsers."""
        found: tuple[str, ...] = (OPENING, CLOSING) if self.reasoning == _THINK else ()
        form = _FORMS.get(self.tool_calls)
        if self.tool_calls == _PYTHONIC:
            found += (pythonic.OPENING, pythonic.CLOSING)
        elif form is not None:
            found += (form.opening, form.closing)
            found += (ARGUMENTS_MARK, ID_MARK) if form.named else ()
        return tuple(marker for marker in found if marker)


@lru_cache(64)
def form_of(template: str, parsers: ParserNames) -> AnswerForm:
    """Return the form of a model, by the names of ``parsers``; if these are auto, by its chat ``template``.

    A model whose template does not support tools is shown them in Hermes' form, so it answers in that form.
    """
    shows_tools = _USES_TOOLS.search(template) is not None
    tool_calls, reasoning = parsers.tool_calls, parsers.reasoning
    if tool_calls == AUTO:
        tool_calls = next((name for marker, name in _MARKERS if marker in template), NONE) if shows_tools else "hermes"
    if reasoning == AUTO:
        reasoning = _THINK if OPENING in template or CLOSING in template else NONE
    return AnswerForm(tool_calls, reasoning, shows_tools, shows_tools or "tool_calls" in template)


def call_parser(name: str, names: Collection[str]) -> AnswerParser:
    """Return the parser called ``name``, for an answer that may call the functions ``names``."""
    if name == _PYTHONIC:
        return PythonicCallParser(names, _new_id)
    if name == NONE:
        return PlainAnswer()
    return JsonCallParser(_FORMS[name], names, _new_mistral_id if name == "mistral" else _new_id)


def forced_parser(form: str, names: Collection[str], only: str | None) -> AnswerParser:
    """Return the parser of an answer under `schemas.calls_schema`, or of one with only the arguments of ``only``."""
    new_id = _new_mistral_id if form == "mistral" else _new_id
    return JsonCallParser(json_calls.FORCED, names, new_id, only)


def _new_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _new_mistral_id() -> str:
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(_MISTRAL_ID_CHARACTERS))
