"""A connector's options: written by users into the engine's configuration, checked once at its start."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

from tanghulu.arguments import above_zero, text, whole
from tanghulu.auth.cluster_secret import read_cluster_secret
from tanghulu.auth.credentials import NOTHING_TO_SHOW, Credentials, TlsFiles
from tanghulu.errors import ConfigError, InvalidRequest, TanghuluError
from tanghulu.masters import Masters
from tanghulu.store.client.block_store import LOAD_DEADLINE_S, SAVE_DEADLINE_S, BlockStore
from tanghulu.store.client.settings import ENGINE_ANSWER_S, MAX_DEADLINE_S, Settings
from tanghulu.store.client.signed_kv import KvClient
from tanghulu.types import parse_size

_log = logging.getLogger(__name__)

SAVE_CHOICES = ("all", "prompt", "none")


#: Upper bound of any number of threads or blocks.
MAX_COUNT = 1 << 20


def _size(name: str, value: Any) -> None:
    if isinstance(value, str):
        try:
            value = parse_size(value)
        except InvalidRequest as error:
            raise InvalidRequest(f"{name}: {error.message}") from None
    whole(name, value, 0, 1 << 62)


#: By the type of an option, its check: numbers are above 0, and times are finite.
_CHECKS: dict[str, Callable[[str, Any], object]] = {
    "str": text,
    "int": lambda name, value: whole(name, value, 1, MAX_COUNT),
    "float": lambda name, value: above_zero(name, value, MAX_DEADLINE_S),
    "int | str": _size,
}


@dataclass(frozen=True, kw_only=True)
class StoreOptions:
    """Address and credentials of the store, and the limits of its use; options of every connector."""

    master: str
    namespace: str = ""
    tenant: str = ""
    token: str = field(default="", repr=False)
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    cluster_secret: str = field(default="", repr=False)
    load_deadline_s: float = LOAD_DEADLINE_S
    save_deadline_s: float = SAVE_DEADLINE_S

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Self:
        """Return the options in ``values``; raises ConfigError naming an unknown key, or the fault of a value."""
        known = [each.name for each in fields(cls)]
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise ConfigError(
                f"unknown option {', '.join(map(repr, unknown))} of the connector; known: {', '.join(known)}"
            )
        if not values.get("master"):
            raise ConfigError(
                'the connector has no "master"; set it to the address of tanghulu\'s master, such as "host:7400"'
            )
        return cls(**values)

    def __post_init__(self) -> None:
        for each in fields(self):
            try:
                _CHECKS[str(each.type)](each.name, getattr(self, each.name))
            except InvalidRequest as error:
                raise ConfigError(error.message if each.repr else f"{each.name} is not a str") from None
        try:
            Masters.parse(self.master)
        except InvalidRequest as error:
            raise ConfigError(f"master: {error.message}") from None

    def open_client(self) -> KvClient:
        """Return a client that finds its master on first use, and anew after a failure: the store may be away."""
        shown = Credentials(self.tenant, self.token, TlsFiles(self.tls_cert, self.tls_key, self.tls_ca))
        masters = Masters.of(self.master)
        masters = masters.showing(shown) if shown != NOTHING_TO_SHOW else masters
        secret = read_cluster_secret(self.cluster_secret)
        return KvClient(Settings(master=masters, master_answer_s=ENGINE_ANSWER_S), secret)

    def open_store(self, connect_s: float = 2.0) -> BlockStore:
        """Connect within ``connect_s``, or later a request would wait for that. An absent store is retried later."""
        client = self.open_client()
        try:
            client.exists("kv/", deadline_s=connect_s)
        except TanghuluError as error:
            _log.warning("tanghulu: the store at %s does not answer and is retried later: %s", self.master, error)
        return BlockStore(client, self.load_deadline_s, self.save_deadline_s)


@dataclass(frozen=True, kw_only=True)
class ThreadedOptions(StoreOptions):
    """Options of connectors that move blocks in their own threads, some of which may be waiting."""

    threads: int = 2
    save_pending_bytes: int | str = "512MiB"

    @property
    def max_pending_bytes(self) -> int:
        return parse_size(self.save_pending_bytes)


@dataclass(frozen=True, kw_only=True)
class LevelOptions(ThreadedOptions):
    """Options of the store as a further level of an engine's own cache, queried in threads."""

    lookup_deadline_s: float = 1.0


@dataclass(frozen=True, kw_only=True)
class ConnectorOptions(ThreadedOptions):
    """See docs/engines/vllm.md; the names are those of the keys in ``kv_connector_extra_config``."""

    lookup_deadline_ms: float = 20.0
    save: str = "all"
    min_blocks: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.save not in SAVE_CHOICES:
            raise ConfigError(f"save={self.save!r} is unknown; known: {', '.join(SAVE_CHOICES)}")
