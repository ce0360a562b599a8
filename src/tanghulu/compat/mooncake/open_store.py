"""An open store of Mooncake's API: the client, the tenant's names, and perhaps a node that lives as long as it."""

from __future__ import annotations

import contextlib
import random
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tanghulu.compat.mooncake.embedded_node import EmbeddedNode
from tanghulu.compat.mooncake.memory import buffers_at
from tanghulu.compat.mooncake.options import DEFAULT_TENANT, SetupOptions
from tanghulu.errors import InvalidRequest, TanghuluError
from tanghulu.masters import Masters
from tanghulu.runtime.config import from_variables
from tanghulu.runtime.master_options import MasterOptions
from tanghulu.runtime.process import ProcessConfig
from tanghulu.store.client.block_store import BlockStore
from tanghulu.store.client.client import Client
from tanghulu.store.client.settings import ENGINE_ANSWER_S, Settings
from tanghulu.store.protocol.messages import ChunkInfo

#: Seconds that opening waits for a master that knows all keys, and seconds of calls that are no transfers.
OPEN_S, CALL_S = 5.0, 5.0
#: Ports from which Mooncake picks one for a host name without a port, which programs may rely on.
_PORTS = range(12300, 14301)


@dataclass(frozen=True, kw_only=True)
class _Variables(MasterOptions, ProcessConfig):
    """The options that the TANGHULU_* variables set here and, for a node, in its process."""


def _unused_port() -> int:
    """Return one of `_PORTS` on which nothing listens; 0, which lets the system choose, if none of some is."""
    for port in random.sample(_PORTS, 20):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    return 0


class OpenStore:
    """The open store. Raises TanghuluError if it cannot be opened; ``blocks`` has the calls for data, by ``key``."""

    def __init__(self, setup: SetupOptions) -> None:
        self.key, self._prefix = setup.key, setup.prefix
        given = from_variables(_Variables)
        shown = given.credentials
        if shown.token and setup.global_segment_size and given.tokens is None:
            raise InvalidRequest(
                "a node for global_segment_size would serve everybody: with TANGHULU_TOKEN, set TANGHULU_TOKENS to the "
                "nodes' file of tokens, too, or global_segment_size to 0"
            )
        if shown.token and setup.tenant_id != DEFAULT_TENANT:
            shown = replace(shown, tenant=setup.tenant_id)
        masters = Masters.parse(setup.master_server_addr).showing(shown)
        with Client(Settings(master=masters)) as patient:  # waits for a master that is rebuilding its directory
            patient.exists("mooncake/", deadline_s=OPEN_S)
        self.client = Client(Settings(master=masters, master_answer_s=ENGINE_ANSWER_S))
        self.blocks = BlockStore(self.client)
        self._node: EmbeddedNode | None = None
        port = _unused_port()
        self.hostname = setup.local_hostname if setup.host != setup.local_hostname else f"{setup.host}:{port}"
        try:
            if setup.global_segment_size:
                self._node = EmbeddedNode(setup.master_server_addr, setup.host, port, setup.global_segment_size)
        except BaseException:  # an interrupt, too: connections would stay open
            self.client.close()
            raise

    def ping(self) -> None:
        """Raise MasterUnavailable unless the master answers."""
        self.client.nodes(deadline_s=CALL_S)

    def node_called(self, segment: str) -> str | None:
        """Return the id of the node of ``segment``; None if there is none, which leaves the choice to the store."""
        if self._node is not None and segment == self.hostname:
            return self._node.id
        nodes = self.client.nodes(deadline_s=CALL_S) if segment else []
        return next((each.id for each in nodes if segment in (each.address, each.id)), None)

    def stat(self, key: str) -> ChunkInfo:
        """Return the store's description of a value; raises ChunkNotFound."""
        return self.client.stat(self.key(key), deadline_s=CALL_S)

    def read_parts(self, row: tuple[str, Sequence[int], Sequence[int], Sequence[int]]) -> int:
        """Read parts of one value: its key, and the address, size and offset of each part; return the bytes read."""
        key, addresses, sizes, offsets = row
        if len(offsets) != len(addresses):
            raise InvalidRequest(f"{len(addresses)} addresses and {len(offsets)} offsets; give one offset for each")
        read, name = self.client.get_into, self.key(key)
        parts = zip(buffers_at(addresses, sizes), offsets, strict=True)
        return sum(read(name, part, offset=at, length=part.size_bytes, deadline_s=CALL_S) for part, at in parts)

    def remove_matching(self, wanted: re.Pattern[str]) -> int:
        """Remove the tenant's values whose keys match anywhere; return their number, or raise the first error."""
        begin = len(self._prefix)
        listed = self.client.list_keys(self._prefix, deadline_s=CALL_S)
        outcomes = self.blocks.discard([each.key for each in listed if wanted.search(each.key[begin:])])
        for each in outcomes:
            if isinstance(each, TanghuluError):
                raise each
        return sum(map(bool, outcomes))

    def close(self) -> None:
        """Close the client, and end the node."""
        self.client.close()
        if self._node is not None:
            self._node.close()
