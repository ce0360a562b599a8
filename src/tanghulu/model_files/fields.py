"""Typed access to the small objects of a checkpoint: config.json, GGUF metadata, adapter and tokenizer configs.

An error names the file, the key and the value. Keys that are read count as implemented; `Fields.refuse_others` raises
for the first key that was neither read nor is known to be without effect, so an unknown key cannot change a model's
results unnoticed.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any, Final

from tanghulu.errors import ModelUnsupported

#: Above every count that a model can have: heads, layers, positions, tokens of a vocabulary.
MAX_COUNT: Final = 1 << 24
MAX_LAYERS: Final = 10_000
_MAX_NUMBER: Final = 1e300
_MAX_SHOWN = 80
_ABSENT: Final = object()
_REQUIRED: Final = object()


class Fields:
    """The fields of one object, named ``where`` in messages; ``prefix`` is prepended to each name."""

    def __init__(self, values: object, where: str, prefix: str = "") -> None:
        if not isinstance(values, Mapping):
            raise ModelUnsupported(f"{where} is {shown(values)}; it must be an object")
        self._values: Mapping[str, Any] = values
        self._where, self._prefix = where, prefix
        self._read: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return self._values.get(self._prefix + name) is not None

    def integer(self, name: str, default: object = _REQUIRED, *, least: int = 1, most: int = MAX_COUNT) -> int:
        """Return an integer from ``least`` to ``most``."""
        value = self._get(name, default)
        if not is_integer(value, least, most):
            raise self.unusable(name, f"it must be an integer from {least} to {most}")
        return int(value)

    def optional_integer(self, name: str, default: int | None = None, *, least: int = 1) -> int | None:
        """Return an integer, or None for null; ``default`` if the key is absent."""
        value = self._get(name, default)
        return None if value is None else self.integer(name, value, least=least)

    def number(self, name: str, default: object = _REQUIRED, *, least: float = 0) -> float:
        """Return a number above 0, and from ``least`` on."""
        value = self._get(name, default)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 < value < _MAX_NUMBER
            or value < least
        ):
            raise self.unusable(
                name, f"it must be a number from {least} on" if least else "it must be a number above 0"
            )
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """Return a boolean; ``default`` for null."""
        value = self._get(name, default)
        if value is not None and not isinstance(value, bool):
            raise self.unusable(name, "it must be true or false")
        return default if value is None else value

    def text(self, name: str, default: object = _REQUIRED) -> str:
        """Return a string."""
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self.unusable(name, "it must be a string")
        return value

    def is_text(self, name: str) -> bool:
        """Return whether the value is a string."""
        return isinstance(self._values.get(self._prefix + name), str)

    def optional_text(self, name: str) -> str | None:
        """Return a string, or None for null or no key."""
        return None if self._get(name, None) is None else self.text(name)

    def items(self, name: str, kind: type, *, required: bool = False) -> list[Any]:
        """Return a list of ``kind``; an empty one for null or no key unless it is ``required``."""
        value = self._get(name, _REQUIRED if required else None)
        value = [] if value is None and not required else value
        is_kind = is_integer if kind is int else lambda item: isinstance(item, kind)
        if not isinstance(value, list) or not all(map(is_kind, value)):
            raise self.unusable(name, f"it must be a list of {kind.__name__}")
        return value

    def ids(self, name: str) -> frozenset[int]:
        """Return token ids: null, one, or a list."""
        value = self._get(name, None)
        found = value if isinstance(value, list) else [] if value is None else [value]
        if not all(is_integer(item, 0) for item in found):
            raise self.unusable(name, "it must be a token id or a list of token ids")
        return frozenset(found)

    def only(self, name: str, *computed: object) -> None:
        """Raise ModelUnsupported unless the key is absent or has one of the values ``computed``."""
        value = self._get(name, _ABSENT)
        if value is not _ABSENT and not any(_same(value, each) for each in computed):
            raise self._not_computed(self._prefix + name, f"; supported: {', '.join(map(str, computed))}")

    def section(self, name: str) -> Fields | None:
        """Return the fields of an object; None for null, an empty object or no key."""
        value = self._get(name, None)
        return None if value in (None, {}) else Fields(value, f"{self._where}, {self._prefix + name}")

    def names_of_values(self, name: str) -> list[str]:
        """Return the values, each once and in order, of an object that maps names to names."""
        value = self._get(name, _REQUIRED)
        if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
            raise self.unusable(name, "it must map names to names")
        return sorted(set(value.values()))

    def refuse_others(self, harmless: Container[str] = ()) -> None:
        """Raise ModelUnsupported for a key with the prefix that was neither read nor is ``harmless`` or empty."""
        for key, value in self._values.items():
            is_known = key in self._read or key.removeprefix(self._prefix) in harmless
            is_empty = value is None or value is False or value in ("", [], {})
            if key.startswith(self._prefix) and not is_known and not is_empty:
                raise self._not_computed(key)

    def unusable(self, name: str, wanted: str) -> ModelUnsupported:
        """Make the error for a value of ``name`` that is not as ``wanted``."""
        key = self._prefix + name
        if key not in self._values:
            return ModelUnsupported(f"{self._where} has no {key!r}; {wanted}")
        return ModelUnsupported(f"{self._where} has {key!r} = {shown(self._values[key])}; {wanted}")

    def _not_computed(self, key: str, more: str = "") -> ModelUnsupported:
        return ModelUnsupported(
            f"{self._where} has {key!r} = {shown(self._values[key])}, which this worker does not support{more}"
        )

    def _get(self, name: str, default: object) -> Any:
        key = self._prefix + name
        self._read.add(key)
        return self._values.get(key, default)


def is_integer(value: object, least: int = -MAX_COUNT, most: int = MAX_COUNT) -> bool:
    """Return whether ``value`` is an integer, not a boolean, from ``least`` to ``most``."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def shown(value: object) -> str:
    """Return ``value`` formatted for a message."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def names_in(text: str) -> frozenset[str]:
    """Return the names listed in ``text``, separated by white space."""
    return frozenset(text.split())


def read_text(path: Path) -> str:
    """Return the text in ``path``; raises ModelUnsupported that names the file if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelUnsupported(f"cannot read {path}: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in ``path``; raises ModelUnsupported that names the file if there is none."""
    try:
        value = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise ModelUnsupported(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ModelUnsupported(f"{path} contains no JSON object")
    return value


def _same(value: object, other: object) -> bool:
    """Return whether the values are equal, distinguishing true from 1."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other
