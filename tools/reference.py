"""Write docs/reference/: what the code itself says of its commands, options, errors, messages, Python API and metrics.

Writes also the list of all settings, with which every command checks environment variables and configuration files.

python tools/reference.py               # all but the metrics
python tools/reference.py --check       # fail if these are not what the code says
python tools/reference.py --metrics     # also the metrics, off the pages of a running cluster of mock workers
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import click
import httpx
from prometheus_client.parser import text_string_to_metric_families
from reference_pages import configuration, protos, python_api

from tanghulu import errors
from tanghulu.cli.main import EXIT_CODES, load_command, root
from tanghulu.runtime.config import settings_of
from tanghulu.web.errors import status_of

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs/reference"
SETTINGS = ROOT / "src/tanghulu/cli/settings.txt"
_NOTE = "<!-- Written by tools/reference.py. -->\n"
_START_S = 120.0
#: Of another program (python_*, process_*): its page says what they are.
_PREFIX = "tanghulu_"


def commands() -> str:
    """Every command with its options."""
    lines = ["# Command line", "", _NOTE, "Each option is also an environment variable, where one is named, and a key"]
    lines += [
        "(with underscores) in the command's table of the file that `--config` names. A flag goes before a variable,"
    ]
    lines += ["a variable before the file.", ""]
    with click.Context(root, info_name="tanghulu") as context:
        for name in root.list_commands(context):
            command = load_command(name)
            assert command is not None
            lines += _command(command, f"tanghulu {name}")
    return "\n".join(lines).rstrip() + "\n"


def settings() -> str:
    """The settings of all commands, a line each."""
    with click.Context(root) as context:
        found = {name: load_command(name) for name in root.list_commands(context)}
    listed = settings_of({name: command for name, command in found.items() if command is not None})
    return "".join(f"{' '.join(each).rstrip()}\n" for each in sorted(listed))


def processes() -> Iterator[tuple[str, click.Command]]:
    """The commands that a configuration file has tables for, by the name of the table."""
    for name in ("up", "master", "node", "prefill", "decode", "worker", "vllm-worker", "conductor", "router", "chat"):
        command = load_command(name)
        assert command is not None
        yield name, command
    store = load_command("store")
    assert isinstance(store, click.Group)
    yield "store.serve", store.commands["serve"]


def _titled(title: str, text: str) -> str:
    return f"# {title}\n\n{_NOTE}\n{text}"


def _command(command: click.Command, words: str) -> list[str]:
    lines = [f"## {words}", "", (command.help or "").strip().replace("\n    ", "\n"), ""]
    if isinstance(command, click.Group):
        for name, each in command.commands.items():
            lines += _command(each, f"{words} {name}")
        return lines
    arguments = [each for each in command.params if isinstance(each, click.Argument)]
    if arguments:
        lines += [f"Arguments: {' '.join(f'`{each.make_metavar(click.Context(command))}`' for each in arguments)}", ""]
    options = [each for each in command.params if isinstance(each, click.Option)]
    if options:
        lines += ["| option | default | variable | |", "|---|---|---|---|"]
        lines += [_option(each) for each in options]
        lines.append("")
    return lines


def _option(option: click.Option) -> str:
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    choices = (
        f" One of {', '.join(filter(None, option.type.choices))}." if isinstance(option.type, click.Choice) else ""
    )
    shown = option.show_default if isinstance(option.show_default, str) else option.default
    default = "" if shown in (None, "", ()) or not isinstance(shown, str | int | float) else f"`{shown}`"
    if option.is_flag and option.default is False:
        default = "no"
    variable = f"`{option.envvar}`" if isinstance(option.envvar, str) else ""
    return f"| {names} | {default} | {variable} | {_cell((option.help or '') + '.' + choices)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("..", ".").replace("<", "&lt;").strip().removeprefix(".")


def typed_errors() -> str:
    """Every typed error: its code, and what it becomes at the edges."""
    found = sorted(_below(errors.TanghuluError), key=lambda each: each.code)
    lines = [
        "# Errors",
        "",
        _NOTE,
        "One tree of typed errors, in `tanghulu.errors`; `code` is the same in both protocols, in HTTP",
    ]
    lines += ["answers (lower case) and in logs. Those that are *retryable* may succeed unchanged a little later.", ""]
    lines += ["| code | class | retryable | HTTP | exit code | |", "|---|---|---|---|---|---|"]
    for each in found:
        status, code = status_of(each("")), EXIT_CODES.get(each.code, 1)
        text = _cell(" ".join((each.__doc__ or "").split()))
        lines.append(
            f"| `{each.code}` | {each.__name__} | {'yes' if each.retryable else ''} | {status} | {code} | {text} |"
        )
    return "\n".join(lines) + "\n"


def _below(kind: type[errors.TanghuluError]) -> Iterator[type[errors.TanghuluError]]:
    yield kind
    for each in kind.__subclasses__():
        if each.__module__ == errors.__name__:
            yield from _below(each)


def metrics() -> str:
    """Every metric that the processes of a cluster show, and which of them do."""
    found: dict[str, tuple[str, str, set[str], set[str]]] = {}
    with tempfile.TemporaryDirectory() as folder, _cluster(Path(folder)) as entries:
        for entry in entries:
            text = httpx.get(f"http://{entry['metrics_address']}/metrics", trust_env=False).text
            for family in text_string_to_metric_families(text):
                labels = {label for sample in family.samples for label in sample.labels} - {"le"}
                name = family.name + "_total" * (family.type == "counter")
                if name.startswith(_PREFIX):
                    known = found.setdefault(name, (family.type, family.documentation, set(), set()))
                    known[2].add(entry["role"])
                    known[3].update(labels)
    lines = [
        "# Metrics",
        "",
        _NOTE,
        "In Prometheus' text format on every process's `--metrics-port`, and at /metrics of the conductor.",
    ]
    lines += ["Besides, `process_*` and `python_*` as the Prometheus client shows them.", ""]
    lines += ["| metric | type | labels | shown by | |", "|---|---|---|---|---|"]
    for name, (kind, text, roles, labels) in sorted(found.items()):
        names = ", ".join(sorted(labels))
        lines.append(f"| `{name}` | {kind} | {names} | {', '.join(sorted(roles))} | {_cell(text)} |")
    return "\n".join(lines) + "\n"


@contextlib.contextmanager
def _cluster(folder: Path) -> Iterator[list[dict[str, str]]]:
    """A cluster of mock workers; what its cluster.json says once every process is ready."""
    flags = ["--engine", "mock", "--model", "mock", "--port", "0", "--master-port", "0", "--state-dir", str(folder)]
    up = subprocess.Popen([sys.executable, "-m", "tanghulu", "up", *flags], stdout=subprocess.PIPE, text=True)
    try:
        assert up.stdout is not None
        until_s = time.monotonic() + _START_S
        while "Ctrl-C" not in up.stdout.readline():
            assert up.poll() is None, "the cluster did not start"
            assert time.monotonic() < until_s, "the cluster did not become ready"
        entries = json.loads((folder / "cluster.json").read_text())
        url = f"http://{next(each['address'] for each in entries if each['role'] == 'conductor')}/v1/completions"
        body = {"prompt": "some words " * 200, "max_tokens": 4}
        for _ in range(3):  # some metrics have no labels before something happens
            httpx.post(url, json=body, trust_env=False, timeout=60).raise_for_status()
        yield entries
    finally:
        up.send_signal(signal.SIGINT)
        up.communicate(timeout=60)


def _kept(page: Path) -> str:
    return page.read_text() if page.exists() else ""


def main(arguments: list[str]) -> int:
    """Write, or compare; returns the exit code."""
    pages = {
        FOLDER / "cli.md": commands(),
        FOLDER / "configuration.md": _titled("Configuration", configuration.page(processes())),
        FOLDER / "errors.md": typed_errors(),
        FOLDER / "protos.md": _titled("Messages over gRPC", protos.page(ROOT / "protos")),
        FOLDER / "python.md": _titled("Python API", python_api.page()),
        SETTINGS: settings(),
    }
    if "--check" in arguments:
        stale = [page.relative_to(ROOT) for page, text in pages.items() if _kept(page) != text]
        for name in stale:
            print(f"{name} is not what the code says: python tools/reference.py", file=sys.stderr)
        return 1 if stale else 0
    if "--metrics" in arguments:
        pages[FOLDER / "metrics.md"] = metrics()
    FOLDER.mkdir(exist_ok=True)
    for page, text in pages.items():
        page.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
