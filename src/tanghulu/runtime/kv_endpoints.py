"""Addresses of KV events in vLLM's format, common to publishers and followers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tanghulu.errors import ConfigError, InvalidRequest
from tanghulu.types import Address

#: Number of the last message of a replay; message numbers have 8 bytes.
END: Final = (-1).to_bytes(8, "big", signed=True)
_WILDCARDS: Final = ("*", "0.0.0.0", "[::]", "::")


@dataclass(frozen=True, slots=True)
class EventEndpoints:
    """The addresses of events and of their replay, in ZeroMQ's form; "" for none."""

    events: str = ""
    replay: str = ""

    @classmethod
    def parse(cls, text: str, what: str) -> EventEndpoints:
        """Parse ``tcp://HOST:PORT[|tcp://HOST:PORT]``, the second for replays; ``*`` is every interface.

        Raises ConfigError that begins with ``what``, the option with the text.
        """
        events, separator, replay = text.partition("|")
        for each in (events, replay) if separator else (events,):
            scheme, _, where = each.partition("://")
            try:
                port = Address.parse(where.replace("*", "0.0.0.0")).port if scheme == "tcp" else len(where)
                if scheme not in ("tcp", "ipc") or not port:
                    raise InvalidRequest("a TCP port or an IPC path is missing")
            except InvalidRequest as error:
                raise ConfigError(
                    f"{what}: {each!r} is not of the form tcp://HOST:PORT ({error.message}); write tcp://*:5557, or "
                    "tcp://*:5557|tcp://*:5657 with an address for replays"
                ) from None
        if events == replay:
            raise ConfigError(f"{what}: events and replays need an address each")
        return cls(events, replay)

    def __bool__(self) -> bool:
        return bool(self.events)

    def at(self, host: str) -> EventEndpoints:
        """Return the addresses as reached from elsewhere: ``host`` in place of wildcards, "" for all but TCP's."""
        return EventEndpoints(_reached(self.events, host), _reached(self.replay, host))

    @property
    def local(self) -> EventEndpoints:
        """The addresses under which this host reaches them."""
        return EventEndpoints(*(each.replace("//*:", "//127.0.0.1:") for each in (self.events, self.replay)))


def _reached(endpoint: str, own: str) -> str:
    scheme, _, where = endpoint.partition("://")
    host, _, port = where.rpartition(":")
    if scheme != "tcp" or not port.isdecimal():
        return ""
    return f"tcp://{Address(own, int(port)) if host in _WILDCARDS else where}"


#: Of a publisher that publishes nothing.
NO_EVENTS: Final = EventEndpoints()
