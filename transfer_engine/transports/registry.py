"""Every transport by name, the preferred first. A new one is a folder beside this file, and a line in the table."""

from __future__ import annotations

from collections.abc import Mapping

from tanghulu.transfer_engine.core.transport import Transport
from tanghulu.transfer_engine.transports.rdma import transport as rdma
from tanghulu.transfer_engine.transports.shm import transport as shm
from tanghulu.transfer_engine.transports.tcp import transport as tcp
from tanghulu.transfer_engine.transports.ucx import transport as ucx

TRANSPORTS: Mapping[str, Transport] = {
    shm.NAME: shm,
    rdma.NAME: rdma,
    ucx.NAME: ucx,
    tcp.NAME: tcp,
}
