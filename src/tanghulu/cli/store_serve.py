"""``tanghulu store serve``: the store over HTTP. What it runs is imported when it runs."""

from __future__ import annotations

from tanghulu.runtime.config import command
from tanghulu.runtime.process import run
from tanghulu.store.gateway.config import GatewayConfig
from tanghulu.types import Role


def _run(config: GatewayConfig) -> None:
    from tanghulu.store.gateway.main import serve

    run(Role.GATEWAY, config, serve)


COMMAND = command(
    "serve",
    GatewayConfig,
    _run,
    "Serve the store over HTTP: values, listings, administration, events. Requests act by the token that they bring.",
)
COMMAND.short_help = "Serve the store over HTTP."
