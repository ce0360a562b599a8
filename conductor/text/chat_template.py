"""A model's chat template, rendered as by Hugging Face's apply_chat_template.

Sandboxed, with transformers' settings (trim_blocks, lstrip_blocks, loop controls, ``tojson`` without HTML escapes,
``raise_exception``, ``strftime_now``), so that a template written for it renders the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser

from tanghulu.conductor.text.template_bounds import (
    MAX_SOURCE_CHARACTERS,
    MOST,
    Allowance,
    BoundedEnvironment,
    Work,
    WorkExceeded,
    bounded,
    size_of,
)
from tanghulu.errors import InvalidRequest, ModelUnsupported


class _Generation(jinja2.ext.Extension):
    """``{% generation %}…{% endgeneration %}`` marks the assistant's text for training; here only its body matters."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> BoundedEnvironment:
    environment = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.set_filters({"tojson": _tojson})
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


#: Errors a template may raise: its own, and Python's from operations on values. All are refusals.
_REFUSALS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RecursionError,
    AssertionError,
    MemoryError,
)


class TemplateTooCostly(InvalidRequest):
    """Rendering the model's chat template would exceed its bounds."""


class ChatTemplate:
    """One model's template, compiled once. If ``source`` is empty, chat is refused."""

    def __init__(self, source: str, bos_token: str, eos_token: str) -> None:
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        if len(source) > MAX_SOURCE_CHARACTERS:
            raise ModelUnsupported(f"the model's chat template has more than {MAX_SOURCE_CHARACTERS} characters")
        try:
            self._template = _environment().from_string(source) if source else None
        except (*_REFUSALS, SyntaxError) as error:
            raise ModelUnsupported(f"the model's chat template cannot be compiled: {error}") from error

    def render(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], allowance: Allowance = MOST
    ) -> str:
        """Return the prompt, with the assistant's turn opened.

        Raises InvalidRequest if the template refuses the messages, and TemplateTooCostly if it would exceed
        ``allowance`` plus the work for its input characters.
        """
        if self._template is None:
            raise InvalidRequest("this model has no chat template; use /v1/completions")
        template = self._template
        values = {"add_generation_prompt": True, "tools": None, "documents": None, **self._tokens, **variables}
        values["messages"] = list(messages)
        try:
            return bounded(Work(allowance, size_of(values)), lambda: template.render(values))
        except WorkExceeded as error:
            raise TemplateTooCostly(f"the model's chat template cannot be rendered: {error}") from error
        except _REFUSALS as error:
            raise InvalidRequest(f"the model's chat template refuses these messages: {error}") from error
