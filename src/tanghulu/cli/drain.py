"""``tanghulu drain``: have a worker, a conductor or a store node finish or move its work, and exit."""

from __future__ import annotations

import asyncio
from typing import Any

import click

from tanghulu.auth.certificate_roles import CONDUCTOR, WORKER
from tanghulu.cli.printing import counted, print_outcome, store_options
from tanghulu.conductor.peers.group import ATTRIBUTE as PEERS
from tanghulu.discovery.base import Instance
from tanghulu.discovery.open import HELP, instances_now
from tanghulu.errors import InvalidRequest
from tanghulu.masters import Masters
from tanghulu.rpc import greeting
from tanghulu.rpc.methods import END, EndReply, EndRequest
from tanghulu.store.admin import orders
from tanghulu.store.admin.orders import perform
from tanghulu.store.client import connect
from tanghulu.types import Address, Role

_DEADLINE_S = 10.0
_ROLES = (Role.CONDUCTOR, Role.PREFILL, Role.DECODE, Role.BOTH, Role.NODE)


@click.command("drain", short_help="Have a worker, conductor or node finish or move what it has.")
@click.argument("instance")
@click.option("--discovery", default="master", show_default=True, help=HELP)
@click.option("--namespace", default="default", show_default=True, help="the namespace of the instance")
@store_options
def COMMAND(instance: str, discovery: str, namespace: str, master: Masters, as_json: bool) -> None:
    """Drain INSTANCE, a worker, conductor or store node, by its id or its address.

    A worker accepts no new requests; requests that have not finished within its --grace-s move to other workers. A
    conductor fails /ready, accepts requests for another --notice-s, and finishes answers within its --grace-s. Then the
    process exits; with a supervisor that restarts it this is a rolling restart. A node moves its chunks to other nodes,
    as with `tanghulu store drain`, and keeps running.
    """
    found = asyncio.run(_find(instance, discovery, namespace, master))
    if found.role is Role.NODE:
        with connect(master) as store:
            perform(orders.drain, store, found.id, wait=True)
        outcome: dict[str, Any] = {"id": found.id, "drained": True}
        text = f"{found.id} is drained: safe to stop"
    else:
        reply = asyncio.run(_end(found, master))
        outcome = {"id": found.id, "num_requests": reply.num_requests, "grace_s": reply.grace_s}
        text = f"{found.id} ends within {reply.grace_s:g} s; {counted(reply.num_requests, 'request')} under way there"
    print_outcome(as_json, outcome, text)


async def _find(wanted: str, discovery: str, namespace: str, master: Masters) -> Instance:
    """Return the instance with that id or address. Raises InvalidRequest listing the existing ones."""
    there = await instances_now(discovery, master, *_ROLES, namespace=namespace, deadline_s=_DEADLINE_S)
    for instance in there:
        if wanted in (instance.id, str(instance.address)):
            return instance
    raise InvalidRequest(f"no instance {wanted!r} is registered; there are: {', '.join(i.id for i in there) or 'none'}")


async def _end(instance: Instance, master: Masters) -> EndReply:
    """End the process in order. Raises NodeUnavailable, DeadlineExceeded, Unauthorized."""
    address, role = instance.address, WORKER
    if instance.role is Role.CONDUCTOR:
        address, role = Address.parse(instance.attributes[PEERS]), CONDUCTOR
    connection = await greeting.connect(address, master.credentials.to(address), role, _DEADLINE_S)
    try:
        return (await connection.call(END.number, EndRequest(), END.reply, deadline_s=_DEADLINE_S)).message
    finally:
        await connection.close()
