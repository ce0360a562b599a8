"""The root of the ``tanghulu`` command: finds commands by name and maps typed errors to exit codes.

Commands are imported on use, so that ``tanghulu store ls`` does not load torch or FastAPI.
"""

from __future__ import annotations

import importlib
import io
import os
import signal
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import click

from tanghulu.errors import TanghuluError
from tanghulu.runtime.config import Setting, forget_service_variables, load_toml, refuse_unknown_variables
from tanghulu.runtime.limits import require_descriptors
from tanghulu.types import printable
from tanghulu.version import __version__

#: name -> (module, attribute, help); the help is here so that ``tanghulu --help`` imports nothing.
_COMMANDS = {
    "up": ("tanghulu.cli.up", "COMMAND", "Start the embedded cluster: master, node, workers, conductor."),
    "status": ("tanghulu.cli.status", "COMMAND", "Show the whole cluster at a glance."),
    "doctor": ("tanghulu.cli.doctor", "COMMAND", "Say what this machine can do and what is missing."),
    "certs": ("tanghulu.cli.certs", "COMMAND", "Make certificates for the processes of a cluster."),
    "secrets": ("tanghulu.cli.secure", "COMMAND", "Make the secrets of a cluster: certificates, tokens, an API key."),
    "bench": ("tanghulu.cli.bench", "COMMAND", "Measure a running cluster: its HTTP API or its store."),
    "keys": ("tanghulu.cli.keys", "COMMAND", "Make, list and revoke API keys of the HTTP API."),
    "chat": ("tanghulu.cli.chat", "COMMAND", "Talk to a running conductor."),
    "explain": ("tanghulu.cli.explain", "COMMAND", "Show why a prompt was not in the cache."),
    "store": ("tanghulu.cli.store", "COMMAND", "Inspect and administer the store."),
    "master": ("tanghulu.store.master.main", "COMMAND", "Run a master."),
    "node": ("tanghulu.store.node.main", "COMMAND", "Run a store node."),
    "conductor": ("tanghulu.conductor.main", "COMMAND", "Run a conductor (the HTTP API)."),
    "router": ("tanghulu.conductor.routing_service.main", "COMMAND", "Route over pools, or as a service."),
    "epp": ("tanghulu.conductor.endpoint_picker.main", "COMMAND", "Pick endpoints for an inference gateway."),
    "prefill": ("tanghulu.workers.main", "PREFILL", "Run a prefill worker."),
    "decode": ("tanghulu.workers.main", "DECODE", "Run a decode worker."),
    "worker": ("tanghulu.workers.main", "WORKER", "Run a worker that prefills and decodes (--role)."),
    "vllm-worker": ("tanghulu.engines.vllm_worker.main", "COMMAND", "Run a worker that computes with vLLM."),
    "drain": ("tanghulu.cli.drain", "COMMAND", "Have a worker, conductor or node finish or move what it has."),
    "topology": ("tanghulu.transfer_engine.topology_command", "COMMAND", "Show this machine's devices and transports."),
    "replay": ("tanghulu.conductor.replay.main", "COMMAND", "Replay request traces through the policies."),
    "plan": ("tanghulu.cli.plan", "COMMAND", "Forecast what another worker, memory or an SSD would do."),
    "curve": ("tanghulu.cli.curve", "COMMAND", "Show the hits that less or more memory would bring."),
}

_CONFIG = "TANGHULU_CONFIG"

#: Exit codes of typed errors, for scripts. 2 is click's own for an invalid command line.
EXIT_CODES = {
    "CHUNK_NOT_FOUND": 3,
    "MASTER_UNAVAILABLE": 4,
    "NOT_LEADER": 4,
    "MOVED": 4,
    "NODE_UNAVAILABLE": 4,
    "VERSION_MISMATCH": 4,
    "STORE_FULL": 5,
    "QUOTA_EXCEEDED": 5,
    "CHECKSUM_MISMATCH": 6,
    "INVALID_REQUEST": 7,
    "NODE_NOT_FOUND": 7,
    "CONFLICT": 7,
    "CONFIG_ERROR": 7,
    "UNAUTHORIZED": 8,
    "FORBIDDEN": 8,
    "DEADLINE_EXCEEDED": 9,
}


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return load_command(cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, _, text) in _COMMANDS.items()])


def load_command(name: str) -> click.Command | None:
    """Import and return the command called ``name``; None if there is none."""
    if name not in _COMMANDS:
        return None
    module, attribute, _ = _COMMANDS[name]
    loaded = getattr(importlib.import_module(module), attribute)
    assert isinstance(loaded, click.Command)
    return loaded


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="tanghulu")
@click.option("--config", type=click.Path(path_type=Path), envvar=_CONFIG, help="TOML file with options.")
@click.pass_context
def root(ctx: click.Context, config: Path | None) -> None:
    """A distributed KV-cache store with a conductor for LLM inference."""
    if ctx.obj is not None:
        ctx.obj()
    require_descriptors()
    forget_service_variables()
    settings = all_settings()
    refuse_unknown_variables({_CONFIG, *(each.variable for each in settings)})
    if config is not None:
        ctx.default_map = load_toml(config, settings)


def all_settings() -> list[Setting]:
    """Return the settings of all commands. They are in a file, because importing all commands takes seconds."""
    lines = resources.files("tanghulu.cli").joinpath("settings.txt").read_text().splitlines()
    return [Setting(*line.split()) for line in lines]


class OutputFailed(TanghuluError):
    """Standard output cannot be written: it is closed, or a file on a full disk."""

    code = "OUTPUT_FAILED"


class _Stdout(io.FileIO):
    """Standard output whose failures are typed errors. A pipe closed by its reader is click's to end quietly."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())  # discards what is left in buffers
            raise OutputFailed(f"cannot write to standard output: {error.strerror}") from error


def _mend_streams() -> None:
    """Make sure that all standard streams are open, however the process was started, and accept any text."""
    for number, mode in ((0, os.O_WRONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):  # wrong direction: using it is an error
        try:
            os.fstat(number)
        except OSError:
            os.dup2(os.open(os.devnull, mode), number)
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    encoding = sys.stdout.encoding if sys.stdout is not None else "utf-8"
    buffered = io.BufferedWriter(_Stdout(1, "w", closefd=False))
    sys.stdout = io.TextIOWrapper(buffered, encoding, "backslashreplace", line_buffering=os.isatty(1))
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def _log_to_stderr() -> None:
    """Keep the log out of the output of commands."""
    from tanghulu.runtime.telemetry import configure_log  # here: `tanghulu --help` does not need it

    configure_log("cli", "warning")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; exits with click's codes, or with that of a typed error."""
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its lines are not for the log; what matters is an error
    _mend_streams()
    try:
        try:
            root.main(args=arguments, prog_name="tanghulu", obj=_log_to_stderr)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(1)
    except TanghuluError as error:
        click.echo(f"tanghulu: {printable(error.message)}", err=True)
        sys.exit(EXIT_CODES.get(error.code, 1))
