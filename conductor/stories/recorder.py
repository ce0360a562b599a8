"""Records requests as traces for ``tanghulu replay``: when they came, how long they were, what they had in common.

A line of a file is a request that has ended:

    {"timestamp": 1764333101123, "input_length": 150, "output_length": 87, "hash_ids": [52, 17], "answer_ids": [903],
     "block_tokens": 64, "cached_tokens": 64, "ttft_ms": 83.1, "tbt_ms": 21.07, "session": "9f1c"}

as in the traces that Mooncake published (FAST'25): milliseconds, tokens, and a number for each full block of the
prompt; ours also name those that the answer has filled, for later prompts that continue it, and say what the request
met: cached tokens, time to the first token, mean time between tokens. Equal numbers are equal prefixes up to there.
Numbers and sessions are keyed hashes with a key that is drawn for each file and never written: they say nothing about
the text, and files cannot be joined. Text, clients and models are not recorded; models with blocks of another size have
files of their own.

A file is a sequence of gzip members, one a batch: it can be read at any time, also after a crash. It is replaced when
it reaches FILE_BYTES. A thread compresses and writes. Requests are counted as dropped while the disk is full, or while
MAX_WAITING blocks wait because it is too slow.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import itertools
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import structlog

from tanghulu.errors import ConfigError
from tanghulu.runtime.telemetry import RareLog
from tanghulu.types import BlockHash

_log = structlog.get_logger(__name__)
#: Blocks of requests that wait to be written, some 60 bytes each; and the size at which a file is replaced.
MAX_WAITING: Final = 1 << 20
FILE_BYTES: Final = 64 << 20
_BATCH_S: Final = 1.0
#: Of gzip: numbers that are hashes hardly get smaller with more work.
_LEVEL: Final = 1
#: Bytes of a number: 48 bits, which every reader of JSON keeps.
_ID_BYTES: Final = 6


class EndedRequest(NamedTuple):
    """A request that has ended. ``arrived_s`` is Unix time; ``blocks`` names the full blocks of prompt and answer.

    ``cached_tokens`` of the prompt were not computed. ``ttft_s`` and ``tbt_s`` (the mean between two tokens) are 0
    where no such token came.
    """

    arrived_s: float
    prompt_tokens: int
    generated_tokens: int
    blocks: Sequence[BlockHash]
    block_tokens: int
    session: str = ""
    model: str = ""
    tenant: str = ""
    cached_tokens: int = 0
    ttft_s: float = 0.0
    tbt_s: float = 0.0


class _TraceFile:
    """One file, created at once; ``num_bytes`` have been written."""

    def __init__(self, path: Path) -> None:
        self._file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
        self._key = secrets.token_bytes(32)
        self.num_bytes = 0

    def write(self, requests: Sequence[EndedRequest]) -> None:
        """Append a batch. Raises OSError, and then leaves the file as it was."""
        member = gzip.compress(msgspec.json.Encoder().encode_lines([self._row(each) for each in requests]), _LEVEL)
        try:
            self._file.write(member)
            self._file.flush()
        except OSError:
            with contextlib.suppress(OSError):
                self._file.truncate(self.num_bytes)
            raise
        self.num_bytes += len(member)

    def close(self) -> None:
        self._file.close()

    def _row(self, request: EndedRequest) -> dict[str, object]:
        ids = [int.from_bytes(self._hidden(each), "big") for each in request.blocks]
        end = request.prompt_tokens // request.block_tokens
        row: dict[str, object] = {
            "timestamp": round(request.arrived_s * 1000),
            "input_length": request.prompt_tokens,
            "output_length": request.generated_tokens,
            "hash_ids": ids[:end],
            "answer_ids": ids[end:],
            "block_tokens": request.block_tokens,
            "cached_tokens": request.cached_tokens,
            "ttft_ms": round(1000 * request.ttft_s, 1),
            "tbt_ms": round(1000 * request.tbt_s, 2),
        }
        return row | {"session": self._hidden(request.session.encode()).hex()} if request.session else row

    def _hidden(self, name: bytes) -> bytes:
        return hashlib.blake2b(name, digest_size=_ID_BYTES, key=self._key).digest()


class Recorder:
    """Writes ended requests to files in ``folder``. ``count`` gets the numbers of written and dropped requests.

    Raises ConfigError if the folder cannot be written. `add` may be called by any thread and never blocks.
    """

    def __init__(self, folder: Path, count: Callable[[int, int], object], file_bytes: int = FILE_BYTES) -> None:
        self._folder, self._count, self._file_bytes = folder, count, file_bytes
        self._waiting: list[EndedRequest] = []
        self._num_waiting_blocks = self._num_dropped = 0
        self._changed = threading.Condition()
        self._closing = False
        self._files: dict[int, _TraceFile] = {}
        self._begun = time.strftime("%Y%m%dT%H%M%S", time.gmtime()) + "-" + secrets.token_hex(4)
        self._numbers = itertools.count()
        self._log = RareLog(_log, folder=str(folder))
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--record {folder}: the folder cannot be created: {error}") from None
        if not os.access(folder, os.W_OK | os.X_OK):
            raise ConfigError(f"--record {folder}: the folder is not writable")
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    def add(self, request: EndedRequest) -> None:
        """Record a request."""
        with self._changed:
            if self._num_waiting_blocks < MAX_WAITING:
                self._waiting.append(request)
                self._num_waiting_blocks += 1 + len(request.blocks)
            else:
                self._num_dropped += 1

    def close(self) -> None:
        """Write what waits, and end."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        closing = False
        while not closing:
            with self._changed:
                self._changed.wait_for(lambda: self._closing, _BATCH_S)
                closing = self._closing
                batch, self._waiting, self._num_waiting_blocks = self._waiting, [], 0
                num_dropped, self._num_dropped = self._num_dropped, 0
            if num_dropped:
                self._log.warning("recorder.too_slow", dropped=num_dropped)
            num_written = 0
            for block_tokens in {each.block_tokens for each in batch}:
                num_written += self._write(block_tokens, [each for each in batch if each.block_tokens == block_tokens])
            self._count(num_written, num_dropped + len(batch) - num_written)
        for block_tokens in list(self._files):
            self._replace(block_tokens)

    def _write(self, block_tokens: int, batch: Sequence[EndedRequest]) -> int:
        """Write requests with blocks of that size; return the number of those that are in the file."""
        try:
            if block_tokens not in self._files:
                name = f"requests-{self._begun}-{next(self._numbers)}.jsonl.gz"
                self._files[block_tokens] = _TraceFile(self._folder / name)
            file = self._files[block_tokens]
            file.write(batch)
        except OSError as error:
            self._log.warning("recorder.failed", error=str(error), dropped=len(batch))
            self._replace(block_tokens)
            return 0
        if file.num_bytes >= self._file_bytes:
            self._replace(block_tokens)
        return len(batch)

    def _replace(self, block_tokens: int) -> None:
        file = self._files.pop(block_tokens, None)
        if file is not None:
            with contextlib.suppress(OSError):  # of bytes that a failed write left in the buffer
                file.close()
