"""Authorization of callers of a process's methods, if it was started with ``--tokens``.

An authorizer is between the wire and the handlers: it gets the caller from HELLO, looks up the rule of the method,
rejects what the token does not allow, adds the tenant's scope to the keys of requests and removes it from those of
answers. Handlers are unaware of it, and a process without ``--tokens`` has none, so it costs nothing there. A method
without a rule is rejected.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from functools import partial
from types import CoroutineType
from typing import Any

import structlog

from tanghulu.auth.credentials import Credentials
from tanghulu.auth.tenants import Identity
from tanghulu.auth.tokens import Tokens
from tanghulu.errors import Forbidden, InvalidRequest, Unauthorized
from tanghulu.rpc.fast_server import AnswerStream, FastService, Handler, Peer
from tanghulu.rpc.methods import HELLO, Method, Rule

_log = structlog.get_logger(__name__)
REFRESH_S = 1.0


class Authorizer:
    """Authorizes the fast lane's calls: ``authorize`` a service with all its methods registered; ``watch`` revokes."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    def authorize(self, service: FastService) -> None:
        """Have every method of ``service`` check with this object first."""
        service.guarded = True
        for number, served in list(service.served.items()):
            method, handler = served.method, served.handler
            authorized = self._greeting(handler) if number == HELLO.number else _authorized(method, handler)
            service.served[number] = served._replace(handler=authorized)
            make = service.sinks.get(number)
            if make is not None:
                service.sinks[number] = _authorized(method, make)

    def _greeting(self, handler: Handler) -> Handler:
        def hello(peer: Peer, request: Any, attachment: memoryview) -> Any:
            if peer.identity is not None:
                raise InvalidRequest("HELLO comes once, in the first frame")
            peer.identity = self._tokens.authenticate(Credentials(request.tenant, request.token))
            return handler(peer, request, attachment)

        return hello

    async def watch(self, service: FastService) -> None:
        """Follow the tokens file, and disconnect peers whose token was revoked or has expired; runs until cancelled."""
        while True:
            await asyncio.sleep(REFRESH_S)
            await asyncio.to_thread(self._tokens.refresh)  # a busy disk may be slow
            now_unix_s = time.time()
            for peer in list(service.peers):
                identity = peer.identity
                if identity is not None and not self._tokens.table.still_stands(identity, now_unix_s):
                    _log.warning("authorizer.revoked", peer=peer.name, token=identity.token_name)
                    peer.hang_up()


def _authorized(method: Method[Any, Any], handler: Callable[[Peer, Any, Any], Any]) -> Callable[[Peer, Any, Any], Any]:
    """Authorize and scope each call of ``handler``, which may also be the maker of a payload sink."""
    rule = method.rule

    def authorized(peer: Peer, request: Any, payload: Any) -> Any:
        identity = peer.identity
        if identity is None:
            raise Unauthorized("this process requires a token in the first message (HELLO): pass token=... or --token")
        if rule is None:
            raise Forbidden(f"method {method.name} is not available to any token on a process with --tokens")
        answer = handler(peer, rule.admit(identity, request), payload)
        if isinstance(answer, AnswerStream):
            answer.view = partial(rule.answer, identity)
            return answer
        return _later(rule, identity, answer) if type(answer) is CoroutineType else rule.answer(identity, answer)

    return authorized


async def _later(rule: Rule, identity: Identity, answer: Coroutine[Any, Any, Any]) -> Any:
    return rule.answer(identity, await answer)
