"""What a client on another host gets: tries the doors that are named on standard input, prints what came of each."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any

import httpx

from tanghulu.auth.credentials import Credentials, TlsFiles
from tanghulu.auth.tls import client_context
from tanghulu.errors import TanghuluError
from tanghulu.rpc.fast_client import FastConnection
from tanghulu.rpc.greeting import greet_blocking
from tanghulu.session.messages import DESCRIBE, DescribeRequest
from tanghulu.store.client import connect
from tanghulu.types import Address

DEADLINE_S = 20.0


def unix(name: str) -> str:
    """What comes of connecting to a Unix socket; an abstract name begins with @."""
    with socket.socket(socket.AF_UNIX) as there:
        there.settimeout(DEADLINE_S)
        try:
            there.connect("\0" + name[1:] if name.startswith("@") else name)
        except OSError as error:
            return type(error).__name__
    return "connected"


def memory(pids: list[int]) -> list[str]:
    """Memory files of these processes that can be opened here."""
    return [str(each) for pid in pids for each in Path(f"/proc/{pid}/fd").glob("*")]


def tcp(address: str) -> str:
    """Whether anybody listens there for this host."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=DEADLINE_S).close()
    except OSError as error:
        return type(error).__name__
    return "connected"


def get(url: str, tls: dict[str, str] | None = None, **headers: str) -> tuple[int | str, Any]:
    """(status, JSON or text) of GET; the error's name instead where there is no answer."""
    verify = client_context(TlsFiles(**tls)) if tls is not None else False
    try:
        with httpx.Client(verify=verify, trust_env=False, timeout=DEADLINE_S) as http:
            answer = http.get(url, headers=headers)
    except httpx.HTTPError as error:
        return type(error).__name__, ""
    is_json = answer.headers.get("content-type", "").startswith("application/json")
    return answer.status_code, answer.json() if is_json else answer.text


def nodes(master: str, token: str, tls: dict[str, str]) -> str:
    """What a client of the store gets who asks for the nodes."""
    shown = {f"tls_{name}": path for name, path in tls.items()}
    try:
        with connect(master, token=token, deadline_s=DEADLINE_S, **shown) as store:
            return f"{len(store.nodes())} nodes"
    except TanghuluError as error:
        return type(error).__name__


def describe(worker: str, tls: dict[str, str], token: str) -> str:
    """What a worker says of itself."""
    try:
        connection = FastConnection(Address.parse(worker), tls=TlsFiles(**tls))
        greet_blocking(connection, Credentials(token=token), DEADLINE_S)
        connection.call(DESCRIBE.number, DescribeRequest(), DESCRIBE.reply, deadline_s=DEADLINE_S)
    except TanghuluError as error:
        return error.code
    return "described"


CALLS = {each.__name__: each for each in (unix, memory, tcp, get, nodes, describe)}

if __name__ == "__main__":
    tries = json.load(sys.stdin)
    print(json.dumps([CALLS[name](*arguments, **named) for name, arguments, named in tries]))
