"""The engine servers named by a user: ``vllm=http://host:8000,model=/models/m``, on the command line or in a file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import structs

from tanghulu.auth.credentials import read_token
from tanghulu.auth.private_file import WatchedFile
from tanghulu.errors import ConfigError, InvalidRequest
from tanghulu.runtime.kv_endpoints import NO_EVENTS, EventEndpoints
from tanghulu.types import Address, InstanceId, Role, parse_url

_OFFERED: Final = (
    "engines are vllm and sglang, options model, template, key, events, role (both, prefill, decode) and seeds (given, "
    "always, no)"
)
#: Fields that no user sets.
_OURS: Final = {"address", "id", "adapter"}
_ROLES: Final = {"both": Role.BOTH, "prefill": Role.PREFILL, "decode": Role.DECODE}
HELP: Final = (
    "a vLLM or SGLang server to use as a worker: vllm=http://host:8000 or sglang=http://host:30000, then options such "
    "as ,model=/models/m (the model's folder); a host name stands for all its addresses; repeatable"
)
FILE_HELP: Final = "file (JSON or TOML) with a list of engine servers; read again when it changes"
_NOWHERE: Final = Address("", 0)
_NOBODY: Final = InstanceId("")
_FORM: Final = "give ENGINE=URL[,model=FOLDER][,OPTION=VALUE…], such as vllm=http://gpu1:8000,model=/models/m"


class EngineServer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One server, or several behind one host name.

    ``model`` is the folder with the model's tokenizer ("": the server's own path to it), ``template`` a file that
    replaces its chat template, ``key`` a file with the server's API key. ``events`` is
    ``tcp://host:port[|tcp://host:port]`` where the server does not publish its endpoints ("no" ignores its events).
    ``seeds`` says which reach it: those ``given`` by clients, ``always`` one (then draws go on where a request moves,
    with vLLM's runner for GPUs), or ``no``: vLLM's engine for CPUs ends at a seed of a prompt that takes several steps.
    ``address`` and ``id`` are set for one server of a name's, ``adapter`` for a LoRA.
    """

    engine: Literal["vllm", "sglang"]
    url: str
    model: str = ""
    template: str = ""
    key: str = ""
    events: str = ""
    role: Literal["both", "prefill", "decode"] = "both"
    seeds: Literal["given", "always", "no"] = "given"
    address: Address = _NOWHERE
    id: InstanceId = _NOBODY
    adapter: str = ""

    @property
    def host_port(self) -> Address:
        """Host and port of the URL."""
        parts = urlsplit(self.url)
        return Address(parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80))

    @property
    def instance_role(self) -> Role:
        """The phases for which the server is used."""
        return _ROLES[self.role]

    @property
    def base_url(self) -> str:
        """The URL with the address in place of the name."""
        return urlsplit(self.url)._replace(netloc=str(self.address)).geturl()

    @property
    def event_endpoints(self) -> EventEndpoints:
        """The given addresses of events. Raises ConfigError."""
        return NO_EVENTS if self.events in ("", "no") else EventEndpoints.parse(self.events, "events")

    def at(self, address: Address, name: str) -> EngineServer:
        """Return this server at one address of its name, known to clients as ``name``."""
        return structs.replace(self, address=address, id=InstanceId(name))


def parse_server(text: str) -> EngineServer:
    """Parse one value of --engine. Raises ConfigError stating what is wrong."""
    first, *more = text.split(",")
    engine, separator, url = first.partition("=")
    given = {"engine": engine, "url": url}
    for part in more:
        name, equals, value = part.partition("=")
        if not equals:
            raise ConfigError(f"--engine {text!r}: {part!r} is not OPTION=VALUE; {_FORM}")
        if name in given:
            raise ConfigError(f"--engine {text!r}: {name} is given twice; give it once")
        given[name] = value
    if not separator:
        raise ConfigError(f"--engine {text!r} lacks the engine or the URL; {_FORM}")
    return _checked(given, f"--engine {text!r}")


def servers_file(path: Path, given: Sequence[EngineServer] = ()) -> WatchedFile[Any, list[EngineServer]]:
    """Return a file of servers, whose table has those ``given`` elsewhere as well.

    It has a list: values as of --engine, or tables with its options; in TOML it is called ``engines``. Raises
    ConfigError naming the file and the entry.
    """
    return WatchedFile(path, f"engine servers {path}", Any, lambda found: distinct([*given, *_servers_in(found)]))


def _servers_in(found: Any) -> Iterator[EngineServer]:
    entries = found.get("engines") if isinstance(found, dict) else found
    if not isinstance(entries, list):
        raise ConfigError("there is no list of engine servers; give a JSON list, or engines = [ … ] in TOML")
    for number, entry in enumerate(entries):
        if not isinstance(entry, str | dict):
            raise ConfigError(f"entry {number} is {entry!r}; it must be text or a table of options")
        yield parse_server(entry) if isinstance(entry, str) else _checked(entry, f"entry {number}")


def distinct(servers: Iterable[EngineServer]) -> list[EngineServer]:
    """Return ``servers`` as a list. Raises ConfigError if two have one URL."""
    known: dict[Address, EngineServer] = {}
    for server in servers:
        if server.host_port in known:
            raise ConfigError(f"engine server {server.url} is given twice; give it once")
        known[server.host_port] = server
    return list(known.values())


def _checked(given: Mapping[str, Any], where: str) -> EngineServer:
    try:
        server = msgspec.convert({name: value for name, value in given.items() if name not in _OURS}, EngineServer)
        server = structs.replace(server, url=parse_url(server.url, path=True))
        read_token(f"@{server.key}" if server.key else "")
        _ = server.event_endpoints
    except (msgspec.ValidationError, InvalidRequest, ConfigError) as error:
        raise ConfigError(f"{where}: {error}; {_OFFERED}") from None
    if server.role != "both" and server.engine != "vllm":
        raise ConfigError(f"{where}: role={server.role} is supported for vllm alone; leave it out")
    if unknown := _OURS & given.keys():
        raise ConfigError(f"{where}: {', '.join(unknown)} cannot be set")
    return server
