"""The profile file: costs of prefill and decode on a model's workers, until they report their measurements.

    {"smollm2": {"prefill": {"fixed_s": 0.02, "token_s": 9.5e-5, "pair_s": 2.1e-9, "load_s": 0},
                 "decode": {"fixed_s": 0.02, "sequence_s": 1e-4, "token_s": 2.9e-8}},
     "*": {"prefill": {"token_s": 5e-4}}}

Keys are names of models, "*" is any other one; constants are seconds, and omitted ones are 0. TOML of the same shape is
also accepted (``[smollm2.prefill]``). `session/load.py` defines the constants.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tanghulu.errors import ConfigError
from tanghulu.runtime.config import read_table
from tanghulu.session.load import DecodeProfile, PrefillProfile

ANY_MODEL = "*"
P = TypeVar("P", PrefillProfile, DecodeProfile)


@dataclass(frozen=True, slots=True)
class Profiles:
    """Assumed costs of one worker's work; None where unknown."""

    prefill: PrefillProfile | None = None
    decode: DecodeProfile | None = None


NOTHING_KNOWN = Profiles()


@dataclass(frozen=True, slots=True)
class ProfileFile:
    """Profiles by the model's name."""

    by_model: Mapping[str, Profiles] = field(default_factory=dict)

    def of(self, model: str) -> Profiles:
        """Return the profiles of ``model``, else those of any model, else none."""
        return self.by_model.get(model) or self.by_model.get(ANY_MODEL, NOTHING_KNOWN)


NO_FILE = ProfileFile()


def read_profiles(path: Path | None) -> ProfileFile:
    """Read the file at ``path``, or return an empty one; raises ConfigError with the fault and its position."""
    if path is None:
        return NO_FILE
    given = read_table(path, "the profiles in", is_json=path.suffix != ".toml")
    return ProfileFile({model: _profiles(f"{path}: {model}", each) for model, each in _table(str(path), given).items()})


def _profiles(where: str, given: Any) -> Profiles:
    parts = _table(where, given)
    _refuse_others(where, parts, ("prefill", "decode"))
    prefill, decode = parts.get("prefill"), parts.get("decode")
    return Profiles(
        _profile(f"{where}.prefill", prefill, PrefillProfile) if prefill is not None else None,
        _profile(f"{where}.decode", decode, DecodeProfile) if decode is not None else None,
    )


def _profile(where: str, given: Any, kind: type[P]) -> P:
    constants = _table(where, given)
    _refuse_others(where, constants, kind.__struct_fields__)
    for name, value in constants.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise ConfigError(f"{where}.{name} is {value!r}; it must be seconds of at least 0")
    if not any(constants.values()):
        raise ConfigError(f"{where} has no constant above 0, so every decision would cost nothing; set at least one")
    return kind(**{name: float(value) for name, value in constants.items()})


def _table(where: str, given: Any) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise ConfigError(f"{where} is not a table of names and values")
    return given


def _refuse_others(where: str, given: Mapping[str, Any], known: Any) -> None:
    for name in given:
        if name not in known:
            raise ConfigError(f"{where}.{name} is unknown; known: {', '.join(known)}")
