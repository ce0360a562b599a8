"""The routes of the Responses API, and the responses kept for later turns, in this process only."""

from __future__ import annotations

import hashlib
import uuid
from collections import Counter
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from tanghulu.conductor.http.reply import note_sender, reading, reply
from tanghulu.conductor.http.responses.answering import ResponseReader
from tanghulu.conductor.http.responses.bodies import ResponsesBody, messages_of, with_instructions
from tanghulu.conductor.inference.preprocess import parse_chat
from tanghulu.conductor.inference.schema import ChatBody
from tanghulu.conductor.inference.service import Service
from tanghulu.conductor.text.preparing import made_ready
from tanghulu.web.errors import BadField, ResponseNotFound

#: Total size of all kept responses.
MAX_KEPT_BYTES: Final = 64 << 20
#: Memory of a field besides its JSON.
FIELD_BYTES: Final = 128


@dataclass(frozen=True, slots=True)
class KeptResponse:
    """A response as its client saw it, and the ``messages`` of the conversation up to its end.

    ``owner`` identifies the key of the request, "" without one.
    """

    response: dict[str, Any]
    messages: list[dict[str, Any]]
    owner: str


class KeptResponses:
    """Responses by owner and id, up to ``max_bytes`` in total; the owner of the most bytes loses its oldest first."""

    def __init__(self, max_bytes: int = MAX_KEPT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._kept: dict[str, dict[str, tuple[KeptResponse, int]]] = {}
        #: By owner.
        self._num_bytes = Counter[str]()

    def __len__(self) -> int:
        return sum(map(len, self._kept.values()))

    def add(self, kept: KeptResponse) -> None:
        """Keep a response, unless it is too large on its own."""
        encoded = msgspec.json.encode([kept.response, kept.messages])
        size = len(encoded) + FIELD_BYTES * encoded.count(b'":')
        if size > self._max_bytes:
            return
        self._kept.setdefault(kept.owner, {})[kept.response["id"]] = (kept, size)
        self._num_bytes[kept.owner] += size
        while self._num_bytes.total() > self._max_bytes:
            ((owner, _),) = self._num_bytes.most_common(1)
            self.remove(next(iter(self._kept[owner])), owner)

    def find(self, response_id: str, owner: str) -> KeptResponse | None:
        """Return the response of that id requested by ``owner``, and count it as used now."""
        own = self._kept.get(owner, {})
        if response_id not in own:
            return None
        own[response_id] = own.pop(response_id)
        return own[response_id][0]

    def remove(self, response_id: str, owner: str) -> bool:
        """Forget a response; False if there is none."""
        own = self._kept.get(owner, {})
        if response_id not in own:
            return False
        self._num_bytes[owner] -= own.pop(response_id)[1]
        if not own:
            del self._kept[owner], self._num_bytes[owner]
        return True

    def check(self) -> None:
        sums = {owner: sum(size for _, size in own.values()) for owner, own in self._kept.items()}
        assert self._num_bytes == sums
        assert sum(sums.values()) <= self._max_bytes


def router(service: Service) -> APIRouter:
    """Build the routes; kept responses are stored with them."""
    api = APIRouter()
    kept = KeptResponses()

    @api.post("/v1/responses")
    async def create(request: Request) -> Response:
        """Create a response to an input and the turns before it."""
        owner = _owner(request)
        async with reading(request, service, ResponsesBody) as body:
            model = await service.find_model(body.model)
            is_large, earlier = body.is_large or body.previous_response_id is not None, _earlier(kept, body, owner)
            conversation, chat = await made_ready(is_large, _chat, body, earlier)
            note_sender(chat, request)
            parsed = await parse_chat(chat, model, service.parsers)
        call = service.start(f"resp_{uuid.uuid4().hex}", parsed)

        def keep(response: dict[str, Any], messages: list[dict[str, Any]]) -> None:
            if body.store:
                kept.add(KeptResponse(response, conversation + messages, owner))

        reader = ResponseReader(call, parsed, body, keep)
        return reply(service, call, reader, body.stream)

    @api.get("/v1/responses/{response_id}")
    async def read(response_id: str, request: Request) -> dict[str, Any]:
        """Return a response that is still kept."""
        found = kept.find(response_id, _owner(request))
        if found is None:
            raise _gone(response_id)
        return found.response

    @api.delete("/v1/responses/{response_id}")
    async def delete(response_id: str, request: Request) -> dict[str, Any]:
        """Delete a kept response."""
        if not kept.remove(response_id, _owner(request)):
            raise _gone(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    return api


def _gone(response_id: str) -> ResponseNotFound:
    return ResponseNotFound(
        f"response {response_id[:64]!r} is not stored on this conductor, or no longer; send the whole "
        "conversation as input"
    )


def _earlier(kept: KeptResponses, body: ResponsesBody, owner: str) -> list[dict[str, Any]]:
    """Return the messages of the conversation that ``body`` continues."""
    if body.previous_response_id is None:
        return []
    found = kept.find(body.previous_response_id, owner)
    if found is None:
        raise BadField(_gone(body.previous_response_id).message, "previous_response_id")
    return found.messages


def _chat(body: ResponsesBody, earlier: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], ChatBody]:
    """Return the conversation extended by ``body``, and the chat to run."""
    conversation = [*earlier, *messages_of(body.input)]
    return conversation, body.chat(with_instructions(body.instructions, conversation))


def _owner(request: Request) -> str:
    """Return the owner allowed to refer to a response again, by API key or token. No secret is kept."""
    key = request.scope.get("state", {}).get("api_key")
    if key is not None:
        return str(key.client)
    token = request.headers.get("authorization", "")
    return hashlib.blake2b(token.encode(), digest_size=16).hexdigest() if token else ""
