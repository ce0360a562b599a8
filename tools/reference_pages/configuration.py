"""The page of all options: every field of the configuration of every process."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePath

import click

_HEAD = """\
An option is set by the first of these that has it: a flag of the command, an environment variable, the file that
`--config FILE` (or `TANGHULU_CONFIG`) names. In the file, a key in the table of a command is for that command, one
above all tables for all commands that have it. `tanghulu up` hands the tables of its parts on. An unknown flag,
variable or key refuses to start and names itself.

```toml
master = "10.0.0.1:7400"    # for all commands
[node]
memory = "64GiB"
ssd_path = "/var/lib/tanghulu/tier"
[store.serve]
port = 8081
```

The variable is `TANGHULU_` and the key in capitals. Sizes are written `64MiB`, switches `true` or `false`, in
variables `1` or `0`.
"""


@dataclass(frozen=True)
class Option:
    """One option as it stands in the table of a command."""

    key: str
    flags: str
    variable: str
    default: str
    text: str


#: Commands whose options are the same but for a few.
_ALIKE = ("prefill", "decode", "worker")
#: An option that processes have and other commands have not.
_MARK = "run_dir"


def page(commands: Iterable[tuple[str, click.Command]]) -> str:
    """The whole page; what several processes have in common is told once."""
    tables = {name: _options(command) for name, command in commands}
    processes = {name: set(options) for name, options in tables.items() if _MARK in {each.key for each in options}}
    common = functools.reduce(set.intersection, processes.values())
    shared = [each for each in tables["node"] if each in common]
    lines = [_HEAD, "## Of all processes", "", f"{_names(processes)} have these.", "", *_table(shared)]
    alike = functools.reduce(set.intersection, (processes[name] for name in _ALIKE)) - common
    lines += ["## Of workers", "", f"{_names(_ALIKE)} have these, too.", ""]
    lines += _table(each for each in tables[_ALIKE[0]] if each in alike)
    for name, options in tables.items():
        told = (common if name in processes else set()) | (alike if name in _ALIKE else set())
        own = [each for each in options if each not in told]
        lines += [f"## [{name}]", "", *(_table(own) if own else ["Nothing more.", ""])]
    return "\n".join(lines).rstrip() + "\n"


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`[{name}]`" for name in names)


def _options(command: click.Command) -> list[Option]:
    return [_option(each) for each in command.params if isinstance(each, click.Option) and isinstance(each.envvar, str)]


def _option(option: click.Option) -> Option:
    shown = option.show_default if isinstance(option.show_default, str) else option.default
    default = "" if shown in (None, "", ()) else f"`{shown}`"
    if isinstance(option.default, bool):
        default = f"`{str(option.default).lower()}`"
    elif not isinstance(shown, str | int | float | PurePath | None) and not str(shown):
        default = ""
    choices = (
        f"; one of {', '.join(filter(None, option.type.choices))}" if isinstance(option.type, click.Choice) else ""
    )
    flags = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    assert option.name is not None
    return Option(option.name, flags, str(option.envvar), default, (option.help or "") + choices)


def _table(options: Iterable[Option]) -> Iterator[str]:
    yield "| key | flag | variable | default | |"
    yield "|---|---|---|---|---|"
    for each in options:
        text = each.text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")
        yield f"| `{each.key}` | {each.flags} | `{each.variable}` | {each.default} | {text} |"
    yield ""
