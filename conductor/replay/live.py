"""Live replay: send a trace's requests to a running conductor at their times, and measure what a client sees.

TTFT counts from the time at which a request was due, so waiting for a free connection is included. A request ends in
one of four ways: answered, refused (429), failed, or in progress when the replay was interrupted.

Traces identify the blocks of their prompts by ids and contain no text. Equal ids become equal tokens, so prompts share
exactly the prefixes they shared when the trace was recorded: with ids (7, 8, 9) and 1,100 tokens a prompt is the 512
tokens of 7, the 512 of 8 and the first 76 of 9; at a scale of 4 it is 128 + 128 + 19 tokens.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
import xxhash

from tanghulu.conductor.replay.model import Job
from tanghulu.conductor.replay.trace import TraceRequest
from tanghulu.errors import InvalidRequest, NodeUnavailable
from tanghulu.runtime.master_options import HttpClientOptions
from tanghulu.web.event_stream import EventReader

#: Text tokenised to get ids for prompts: ordinary tokens of any served tokenizer, none of them special.
_ALPHABET = (
    "".join(map(chr, range(33, 127))) + " the of and to in is that for it as was with be by on not he this are or his"
)
_TIMEOUT = httpx.Timeout(600, connect=10, pool=None)
#: Timeout in seconds of the queries before the first request.
_ANSWER_S = 10.0


def scaled(requests: Sequence[TraceRequest], scale: int) -> list[TraceRequest]:
    """Return ``requests`` with prompts and answers 1 / ``scale`` as long (one token or more); ``scale``: 1 to 512."""

    def shorter(request: TraceRequest) -> TraceRequest:
        block_tokens = request.block_tokens // scale
        if not block_tokens:
            raise InvalidRequest(
                f"--scale {scale} is more than the {request.block_tokens} tokens of the trace's blocks"
            )
        blocks, rest = divmod(request.num_tokens, request.block_tokens)
        tokens, answer_tokens = max(1, blocks * block_tokens + rest // scale), max(1, request.output_tokens // scale)
        return dataclasses.replace(request, num_tokens=tokens, output_tokens=answer_tokens, block_tokens=block_tokens)

    return [shorter(request) for request in requests]


def check_lengths(requests: Sequence[TraceRequest], context_tokens: int, scale: int) -> None:
    """Raise InvalidRequest, naming a sufficient scale, if any request exceeds the model's context."""
    longest = max(request.num_tokens + request.output_tokens for request in requests)
    if longest > context_tokens:
        enough = -(-longest * scale // context_tokens)
        raise InvalidRequest(
            f"the trace's longest request has {longest} tokens at --scale {scale}, but the model takes at most "
            f"{context_tokens}; use --scale {enough} or more"
        )


class Prompts:
    """Token ids for the prompts of one run, determined by ``seed``, ``run`` (its name) and the trace's ids alone.

    ``vocabulary``: the token ids to draw from. Runs with different names share no prefix, so none hits the cache of
    another.
    """

    def __init__(self, vocabulary: Sequence[int], seed: int, run: str) -> None:
        assert vocabulary
        self._vocabulary = np.array(vocabulary, dtype=np.uint32)
        self._salt = f"{seed}/{run}"

    def tokens(self, request: TraceRequest, number: int) -> list[int]:
        """Return the prompt of ``request`` (from ``scaled``), the trace's ``number``-th; unnamed blocks are unique."""
        blocks = [self._block(name, request.block_tokens) for name in self._names(request, number)]
        found: list[int] = np.concatenate(blocks)[: request.num_tokens].tolist()
        return found

    def _names(self, request: TraceRequest, number: int) -> Iterator[str]:
        for position in range(-(-request.num_tokens // request.block_tokens)):
            known = position < len(request.blocks)
            yield f"id {request.blocks[position]}" if known else f"request {number} block {position}"

    def _block(self, name: str, num_tokens: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
        draw = np.random.default_rng(xxhash.xxh3_64_intdigest(f"{self._salt}/{name}".encode()))
        return self._vocabulary[draw.integers(len(self._vocabulary), size=num_tokens)]


@dataclass(frozen=True, kw_only=True)
class LiveConfig:
    """``policy``: the requested policy; "" leaves it to the conductor. ``connections``: upper limit of open ones.

    ``client``: credentials and TLS options.
    """

    url: str
    policy: str = ""
    scale: int = 1
    seed: int = 0
    connections: int = 256
    client: HttpClientOptions = field(default_factory=HttpClientOptions)


@dataclass(slots=True)
class LiveResult:
    """Ended jobs in order of completion, and whether the replay was interrupted before its end."""

    jobs: list[Job] = field(default_factory=list)
    interrupted: bool = False


@dataclass(frozen=True, slots=True)
class ServedTarget:
    """The model under test: ``vocabulary`` are ids of its ordinary tokens."""

    model: str
    context_tokens: int
    vocabulary: list[int]


def replay_live(
    config: LiveConfig, requests: Sequence[TraceRequest], progress: Callable[[int], None] = lambda done: None
) -> LiveResult:
    """Send ``requests``; ``progress`` gets the number that have ended. Ctrl-C stops early and keeps the results so far.

    Raises NodeUnavailable if ``config.url`` does not answer, InvalidRequest for requests the model cannot accept.
    """
    result = LiveResult()
    try:
        asyncio.run(_replay(config, scaled(requests, config.scale), result, progress))
    except KeyboardInterrupt:
        result.interrupted = True
    return result


async def _replay(
    config: LiveConfig, requests: Sequence[TraceRequest], result: LiveResult, progress: Callable[[int], None]
) -> None:
    limits = httpx.Limits(max_connections=config.connections)
    async with httpx.AsyncClient(
        base_url=config.url,
        timeout=_TIMEOUT,
        limits=limits,
        trust_env=False,
        headers=config.client.shown,
        verify=config.client.verified_by,
    ) as http:
        target = await find_target(http, config.url)
        check_lengths(requests, target.context_tokens, config.scale)
        await _Sender(http, config, target, result, progress).send_all(requests)


async def find_target(http: httpx.AsyncClient, url: str) -> ServedTarget:
    """Return the first served model, and ids that its tokenizer produces for ordinary text."""
    try:
        model = (await http.get("/v1/models", timeout=_ANSWER_S)).raise_for_status().json()["data"][0]
        asked = {"model": model["id"], "prompt": _ALPHABET, "add_special_tokens": False}
        ids = (await http.post("/tokenize", json=asked, timeout=_ANSWER_S)).raise_for_status().json()["tokens"]
        return ServedTarget(model["id"], int(model["max_model_len"]), sorted(set(ids)))
    except (httpx.HTTPError, httpx.InvalidURL, LookupError, TypeError, ValueError) as error:
        raise NodeUnavailable(f"no model answers at {url}: {error!r}; is `tanghulu up` running?") from error


class _Sender:
    """Sends requests when they are due, at most ``connections`` at a time."""

    def __init__(
        self,
        http: httpx.AsyncClient,
        config: LiveConfig,
        target: ServedTarget,
        result: LiveResult,
        progress: Callable[[int], None],
    ) -> None:
        self._http, self._config, self._target = http, config, target
        self._result, self._progress = result, progress
        self._prompts = Prompts(target.vocabulary, config.seed, config.policy)
        self._slots = asyncio.Semaphore(config.connections)

    async def send_all(self, requests: Sequence[TraceRequest]) -> None:
        """Send all requests when they are due; return when all have ended."""
        clock = asyncio.get_running_loop().time
        start_s = clock()
        async with asyncio.TaskGroup() as group:
            for number, request in enumerate(requests):
                body = json.dumps(self._body(request, number)).encode()
                due_s = start_s + request.arrival_s
                await asyncio.sleep(max(0.0, due_s - clock()))
                await self._slots.acquire()
                group.create_task(self._send(Job(request, number), body, start_s))

    def _body(self, request: TraceRequest, number: int) -> dict[str, Any]:
        body = {
            "model": self._target.model,
            "prompt": self._prompts.tokens(request, number),
            "max_tokens": request.output_tokens,
            "ignore_eos": True,
            "seed": self._config.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if request.session:
            body["prompt_cache_key"] = request.session[:256]
        if self._config.policy:
            body["routing"] = {"policy": self._config.policy}
        return body

    async def _send(self, job: Job, body: bytes, start_s: float) -> None:
        seen = SeenAnswer()
        headers = {"content-type": "application/json"}
        try:
            async with self._http.stream("POST", "/v1/completions", content=body, headers=headers) as response:
                if response.status_code == 200:
                    await seen.read(response)
                    job.failed = not seen.is_whole
                else:
                    job.rejected = response.status_code == 429
                    job.failed = not job.rejected
        except (httpx.HTTPError, ValueError):
            job.failed = True
        finally:
            self._slots.release()
        if not (job.failed or job.rejected):
            seen.tell(job, start_s)
        self._result.jobs.append(job)
        self._progress(len(self._result.jobs))


class SeenAnswer:
    """One streamed answer as seen by a client; times are the event loop's, in seconds."""

    def __init__(self) -> None:
        self.times_s: list[float] = []
        self.usage: dict[str, Any] = {}
        self._has_error = False

    @property
    def is_whole(self) -> bool:
        """Whether the stream ended with its usage and without an error."""
        return bool(self.times_s and self.usage) and not self._has_error

    async def read(self, response: httpx.Response) -> None:
        """Read the stream to its end. Raises ValueError for an event that is not JSON, httpx.HTTPError if it breaks."""
        clock, events = asyncio.get_running_loop().time, EventReader()
        async for piece in response.aiter_bytes():
            for data in events.feed(piece):
                self._take(json.loads(data), clock())

    def _take(self, event: dict[str, Any], now_s: float) -> None:
        self._has_error = self._has_error or "error" in event
        self.usage = event.get("usage") or self.usage
        # A last token without text shows only in the end of the choice.
        if any(choice.get("text") or not self.times_s for choice in event.get("choices") or ()):
            self.times_s.append(now_s)

    def tell(self, job: Job, start_s: float) -> None:
        """Record the answer in ``job``, which belongs to a replay that began at ``start_s``."""
        first_s, last_s = self.times_s[0] - start_s, self.times_s[-1] - start_s
        job.first_s, job.ttft_s = first_s, first_s - job.request.arrival_s
        job.tbt_s = (last_s - first_s) / max(1, self.usage["completion_tokens"] - 1)
        job.worst_tbt_s = _worst(self.times_s)
        job.hit_tokens = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def _worst(times_s: Sequence[float]) -> float:
    """Return the mean of the longest tenth of the gaps; 0 without any."""
    gaps = sorted((later - earlier for earlier, later in itertools.pairwise(times_s)), reverse=True)
    worst = gaps[: math.ceil(len(gaps) / 10)]
    return sum(worst) / len(worst) if worst else 0.0
