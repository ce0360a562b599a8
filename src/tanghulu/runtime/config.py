"""All configuration: one frozen dataclass per process, filled from flags, variables and TOML.

A field ``node_memory`` of a config class is the flag ``--node-memory``, the variable ``TANGHULU_NODE_MEMORY`` and the
TOML key ``node_memory`` (in the table of the command, or at the top for all commands), in this order of
precedence. A process with unknown TOML keys or TANGHULU_* variables, or with bad values, names them and does not start.
Fields for developers have no flag each: ``--debug KEY=VALUE`` (repeatable; a list in TOML) sets them.
Variables set by Kubernetes for a Service named like this program are not options, and are ignored.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_type_hints

import click

from tanghulu.errors import ConfigError, InvalidRequest, TanghuluError
from tanghulu.masters import Masters
from tanghulu.types import Address, Place, check_host, format_size, parse_size

C = TypeVar("C")
PREFIX = "TANGHULU_"
_OPTION = "tanghulu.option"
#: Upper bounds of options without their own: of a count or of seconds, of a size, of a port.
MOST, MOST_BYTES, MOST_PORT = 1e9, 1 << 50, 65535
_MOST_FILE_BYTES = 16 << 20
#: Variables set by Kubernetes in every container for a Service called ``tanghulu`` or ``tanghulu-...``.
_SERVICE_VARIABLE = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")
_SERVICE_VALUE = re.compile(r"(tcp|udp|sctp)://")


def option(
    default: Any,
    help: str,
    *,
    size: bool = False,
    choices: tuple[str, ...] = (),
    metavar: str = "",
    least: float = 0,
    above: float | None = None,
    most: float = MOST,
    debug: bool = False,
    hidden: bool = False,
    shown: str = "",
) -> Any:
    """Return a dataclass field with its help text. ``size`` reads ``64MiB``; ``choices`` bounds a string.

    A ``debug`` field is set by ``--debug KEY=VALUE``; ``hidden`` ones are in no help.
    ``shown`` describes a default that depends on the machine. A field of type ``tuple[str, ...]`` is repeatable.

    A number must be from ``least`` to ``most`` and more than ``above``: see ``check_bounds``. A size is at most
    ``MOST_BYTES``, a port at most ``MOST_PORT``; fields called ``host`` or ``..._host`` are names or addresses.
    """
    bounds = {"least": least, "above": above, "most": MOST_BYTES if size and most == MOST else most}
    shape = {"help": help, "size": size, "choices": choices, "metavar": metavar, "shown": shown}
    kind = {"debug": debug, "hidden": hidden}
    return dataclasses.field(default=default, metadata={_OPTION: {**shape, **kind, **bounds}})


def check_bounds(config: Any) -> None:
    """Raise ConfigError naming the flag if a number or host of ``config`` is outside the bounds of its option."""
    _check_values(type(config), vars(config))


def _check_values(config_class: type[Any], values: Mapping[str, Any]) -> None:
    for field in dataclasses.fields(config_class):
        bounds, value = field.metadata.get(_OPTION), values.get(field.name)
        if bounds is None:
            continue
        rule = ""
        if isinstance(value, str) and not _is_text(value):
            raise ConfigError(f"--{field.name.replace('_', '-')} is not UTF-8")
        if isinstance(value, int | float) and not isinstance(value, bool):
            rule = _broken_rule(field.name, bounds, value)
        elif isinstance(value, str) and (value or field.default) and _is_called(field.name, "host"):
            try:
                check_host(value)
            except InvalidRequest as error:
                raise ConfigError(f"--{field.name.replace('_', '-')}: {error.message}") from None
        if rule:
            raise ConfigError(f"--{field.name.replace('_', '-')} is {value}; it {rule}")


def _is_text(value: str) -> bool:
    """Return whether ``value`` was valid UTF-8; Python represents other bytes of a command line as surrogates."""
    return not any("\ud800" <= character <= "\udfff" for character in value)


def _broken_rule(name: str, bounds: Mapping[str, Any], value: float) -> str:
    least, above = bounds["least"], bounds["above"]
    most = MOST_PORT if _is_called(name, "port") else bounds["most"]
    if above is not None and not value > above:
        return f"must be above {above:g}"
    if not value >= least:
        return f"must be at least {least:g}" if least else "cannot be negative"
    if not value <= most:
        return f"must be at most {format_size(most) if bounds['size'] else format(most, '.15g')}"
    return ""


def _is_called(name: str, kind: str) -> bool:
    return name == kind or name.endswith(f"_{kind}")


class FiniteRange(click.FloatRange):
    """A click type of numbers within bounds; unlike click's, it rejects NaN."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if number is not None and not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return number


class _Typed(click.ParamType[Any]):
    """A click type for one of our parsers, so that a bad value names its flag."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except TanghuluError as error:
            self.fail(error.message, param, ctx)


_TYPES: dict[Any, click.ParamType[Any]] = {
    Address: _Typed("host:port", Address.parse),
    Address | None: _Typed("host:port", Address.parse),
    Masters: _Typed("host:port[,...]", Masters.parse),
    Place: _Typed("zone/rack/host", Place.parse),
    Path: click.Path(path_type=Path),
    Path | None: click.Path(path_type=Path),
}
_SIZE = _Typed("size", parse_size)


def _parameter(field: dataclasses.Field[Any], hint: Any) -> click.Option:
    meta = field.metadata[_OPTION]
    kind: Any = _SIZE if meta["size"] else click.Choice(meta["choices"]) if meta["choices"] else _TYPES.get(hint, hint)
    flag = "--" + field.name.replace("_", "-")
    is_many = hint == tuple[str, ...]
    return click.Option(
        [f"{flag}/--no-{flag[2:]}" if hint is bool else flag, field.name],
        type=None if hint is bool else str if is_many else kind,
        multiple=is_many,
        is_flag=True if hint is bool else None,
        default=field.default,
        show_default=meta["shown"] or _shown_default(field.default, meta["size"]),
        envvar=PREFIX + field.name.upper(),
        show_envvar=True,
        help=meta["help"],
        metavar=meta["metavar"] or None,
        hidden=meta["hidden"],
    )


def _shown_default(default: Any, is_size: bool) -> bool | str:
    if default in (None, "", ()):
        return False
    return format_size(default) if is_size else True


def options_of(config_class: type[Any]) -> list[click.Parameter]:
    """Return a click option for each ``option`` field of ``config_class``, and --debug for those of developers."""
    parameters = _parameters(config_class, debug=False)
    switches = _parameters(config_class, debug=True)
    if switches:
        keys = "; ".join(f"{each.name}: {each.help}" for each in switches)
        parameters.append(
            click.Option(["--debug"], multiple=True, metavar="KEY=VALUE", help=f"switches for developers. {keys}")
        )
    return [*parameters]


def _parameters(config_class: type[Any], *, debug: bool) -> list[click.Option]:
    hints = get_type_hints(config_class)
    fields = [each for each in dataclasses.fields(config_class) if _OPTION in each.metadata]
    return [_parameter(each, hints[each.name]) for each in fields if each.metadata[_OPTION]["debug"] is debug]


def _debug_values(config_class: type[Any], given: Iterable[str]) -> dict[str, Any]:
    """Return the fields set by ``--debug KEY=VALUE``. Raises ConfigError for an unknown key or a bad value."""
    switches = {each.name or "": each for each in _parameters(config_class, debug=True)}
    values = {}
    for text in given:
        key, _, value = text.partition("=")
        if key not in switches:
            raise ConfigError(f"--debug {text}: {key!r} is not one of {', '.join(sorted(switches))}")
        try:
            values[key] = switches[key].type.convert(value, None, None)
        except click.BadParameter as error:
            raise ConfigError(f"--debug {text}: {error.message}") from None
    return values


def command(name: str, config_class: type[C], run: Callable[[C], None], help: str) -> click.Command:
    """Return the CLI command that fills ``config_class`` and calls ``run`` with it."""

    def callback(**values: Any) -> None:
        values |= _debug_values(config_class, values.pop("debug", ()))
        _check_values(config_class, values)
        run(config_class(**values))

    epilog = f"Each option is also a key, with underscores, in the table [{name}] of the file that --config names."
    return click.Command(name, params=options_of(config_class), callback=callback, help=help, epilog=epilog)


def from_variables(config_class: type[C]) -> C:
    """Return the options set by variables alone, for code that runs in other programs. Raises ConfigError."""
    try:
        context = click.Command(config_class.__name__, params=options_of(config_class)).make_context("", [])
    except click.UsageError as error:
        raise ConfigError(error.format_message()) from None
    return config_class(**context.params)


def configuration_file() -> Path | None:
    """Return the TOML file of the current command; None if it has none."""
    context = click.get_current_context(silent=True)
    return context.find_root().params.get("config") if context is not None else None


def read_table(path: Path, what: str = "configuration", *, is_json: bool = False) -> Any:
    """Return the contents of a TOML or JSON file, UTF-8 in every locale. Raises ConfigError stating what is wrong."""
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_FILE_BYTES + 1)
        if len(data) > _MOST_FILE_BYTES:
            raise ConfigError(f"cannot read {what} {path}: it has more than {format_size(_MOST_FILE_BYTES)}")
        text = data.decode("utf-8-sig")
        return json.loads(text) if is_json else tomllib.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {what} {path}: {error}") from error


def variables() -> set[str]:
    """Return the set TANGHULU_* variables."""
    return {key for key in os.environ if key.startswith(PREFIX)}


def forget_service_variables() -> None:
    """Remove Kubernetes' Service variables, for this process and its children: ``TANGHULU_PORT=tcp://10.0.0.1:80``."""
    for key in variables():
        if _SERVICE_VARIABLE.search(key, len(PREFIX) - 1) or _SERVICE_VALUE.match(os.environ[key]):
            del os.environ[key]


class Setting(NamedTuple):
    """An option of a command that a configuration file can set."""

    command: str  #: for example ``node``, or ``store.serve`` in a group
    key: str
    form: str  #: of its values: ``flag``, ``list`` or ``text``
    variable: str = ""


def settings_of(commands: Mapping[str, click.Command], group: str = "") -> Iterator[Setting]:
    """Yield the settings of ``commands``; in groups only options with a variable, because the rest is for one call."""
    for name, each in commands.items():
        if isinstance(each, click.Group):
            yield from settings_of(each.commands, f"{group}{name}.")
            continue
        for parameter in each.params:
            variable = parameter.envvar if isinstance(parameter.envvar, str) else ""
            if parameter.name and (variable or not group):
                yield Setting(f"{group}{name}", parameter.name, _form(parameter), variable)


def _form(parameter: click.Parameter) -> str:
    if not isinstance(parameter, click.Option):
        return "text"
    return "flag" if parameter.is_flag else "list" if parameter.multiple else "text"


def refuse_unknown_variables(known: set[str]) -> None:
    """Raise ConfigError naming a set TANGHULU_* variable that is not ``known``."""
    for key in sorted(variables() - known):
        raise ConfigError(f"environment variable {key} is unknown{_hint(key, known)}")


def load_toml(path: Path, settings: Iterable[Setting]) -> dict[str, Any]:
    """Return click's ``default_map`` from a TOML file: top-level keys for all commands that have them, tables for one.

    The table of a command in a group is ``[store.serve]``.

    Raises ConfigError for an unreadable file, for a key that no command, or not that one, has, and for a value of a
    type that the option does not accept. Numbers become text, which is parsed as on a command line.
    """
    data = read_table(path)
    known: dict[_Words, dict[str, Setting]] = {}
    for setting in settings:
        known.setdefault(tuple(setting.command.split(".")), {})[setting.key] = setting
    everywhere = {key for keys in known.values() for key in keys}
    defaults: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, dict):
            _take_table(path, (key,), value, known, defaults)
        elif key not in everywhere:
            raise ConfigError(f"{path}: key {key!r} is unknown{_hint(key, everywhere)}")
        else:
            for words in (words for words, keys in known.items() if key in keys):
                _table_of(defaults, words).setdefault(key, _as_given(path, known[words][key], value))
    return defaults


def _as_given(path: Path, setting: Setting, value: Any) -> Any:
    """Convert ``value`` to the form its option takes."""
    is_flag, is_list = setting.form == "flag", setting.form == "list"
    given: list[Any] = value if is_list and isinstance(value, list) else [value]
    if not {type(each) for each in given} <= ({str, bool} if is_flag else {str, int, float}):
        wanted = "true or false" if is_flag else "text or a number"
        raise ConfigError(f"{path}: {setting.key} is {json.dumps(value, default=str)}; it must be {wanted}")
    texts = [each if isinstance(each, str | bool) else str(each) for each in given]
    return texts if is_list else texts[0]


#: The words of a command line, such as ("store", "serve").
_Words = tuple[str, ...]


def _table_of(defaults: dict[str, Any], words: _Words) -> dict[str, Any]:
    for word in words:
        defaults = defaults.setdefault(word, {})
    return defaults


def _take_table(
    path: Path,
    words: _Words,
    values: dict[str, Any],
    known: Mapping[_Words, Mapping[str, Setting]],
    defaults: dict[str, Any],
) -> None:
    table = ".".join(words)
    below = {each[len(words)] for each in known if each[: len(words)] == words and len(each) > len(words)}
    if words not in known and not below:
        names = {".".join(each) for each in known}
        raise ConfigError(f"{path}: table [{table}] is unknown{_hint(table, names)}")
    settings = known.get(words, {})
    keys = settings.keys() | below
    for key, value in values.items():
        if key not in keys or isinstance(value, dict) != (key in below):
            raise ConfigError(f"{path}: key {key!r} in [{table}] is unknown{_hint(key, keys)}")
        if key in below:
            _take_table(path, (*words, key), value, known, defaults)
        else:
            _table_of(defaults, words)[key] = _as_given(path, settings[key], value)


def _hint(name: str, known: set[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def describe(config: Any) -> dict[str, Any]:
    """Return the values of ``config`` for the one line printed at a process's start; secrets are masked."""
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    return {k: "***" if _is_secret(k) and v and isinstance(v, str) else _plain(v) for k, v in values.items()}


def _is_secret(name: str) -> bool:
    return "token" in name or "secret" in name or name == "api_key"


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return value if isinstance(value, int | float | str | bool | None) else str(value)
