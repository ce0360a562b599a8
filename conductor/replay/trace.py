"""Reading traces: gzip or plain JSON lines, one request each, in the format of Mooncake's FAST'25 release.

``timestamp`` (ms), ``input_length``, ``output_length`` (tokens), ``hash_ids`` (one id for each block, of which the last
may be partial; equal ids = equal prefix up to there), and ``session`` if the trace has it. Blocks have 512 tokens, or
``block_tokens``, the same in all requests. ``answer_ids`` are the ids of the blocks that the answer has filled, if
known, and ``ttft_ms``, ``tbt_ms`` and ``cached_tokens`` what the request met (``conductor/stories/recorder.py``).
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tanghulu.errors import InvalidRequest

#: Tokens per block of a trace that does not say otherwise.
BLOCK_TOKENS = 512
#: Upper limits of a request's numbers: milliseconds, also since 1970, and tokens.
_MOST = {"timestamp": 1e14, "input_length": 1e8, "output_length": 1e8}
_MEASURED = {"ttft_ms": 1e14, "tbt_ms": 1e14, "cached_tokens": 1e8}


class Measured(NamedTuple):
    """A recorded request's own times, in seconds, and cached tokens."""

    ttft_s: float
    tbt_s: float
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace; ``arrival_s`` from the start of the replay. ``counted``: it is part of the report."""

    arrival_s: float
    num_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    session: str
    counted: bool
    block_tokens: int = BLOCK_TOKENS
    answer_blocks: tuple[int, ...] = ()
    measured: Measured | None = None


def read_trace(path: Path, speedup: float, warmup: str, limit: int = 0) -> list[TraceRequest]:
    """Return the requests of ``path`` in order of time, ``speedup`` times as fast; at most ``limit`` unless it is 0.

    ``warmup`` selects requests replayed without being counted: an initial share of the time span, such as ``0.5``, or
    another trace's path. Raises InvalidRequest for a file that cannot be read or a line that is not a request.
    """
    share = _share(warmup)
    rows = [(row, True) for row in _rows(path)]
    if share is None:
        rows += [(row, False) for row in _rows(Path(warmup))]
    rows.sort(key=lambda pair: pair[0]["timestamp"])
    rows = rows[:limit] if limit else rows
    if not rows:
        raise InvalidRequest(f"trace {path} has no requests; it needs at least one line")
    sizes = {row.get("block_tokens", BLOCK_TOKENS) for row, _ in rows}
    if len(sizes) > 1:
        raise InvalidRequest(f"trace {path} has blocks of {sorted(sizes)} tokens; replay one size at a time")
    first, last = rows[0][0]["timestamp"], rows[-1][0]["timestamp"]
    begin = first + (last - first) * (share or 0.0)
    return [_request(row, first, speedup, counted and row["timestamp"] >= begin) for row, counted in rows]


def _share(warmup: str) -> float | None:
    try:
        share = float(warmup)
    except ValueError:
        return None
    if not 0 <= share < 1:
        raise InvalidRequest(f"warm-up share {warmup} is not in 0 ≤ share < 1")
    return share


def _request(row: dict[str, Any], first_ms: float, speedup: float, counted: bool) -> TraceRequest:
    return TraceRequest(
        arrival_s=(row["timestamp"] - first_ms) / 1000 / speedup,
        num_tokens=row["input_length"],
        output_tokens=max(1, row["output_length"]),
        blocks=tuple(row["hash_ids"]),
        session=str(row.get("session", "")),
        counted=counted,
        block_tokens=row.get("block_tokens", BLOCK_TOKENS),
        answer_blocks=tuple(row.get("answer_ids", ())),
        measured=Measured(row["ttft_ms"] / 1000, row.get("tbt_ms", 0) / 1000, row.get("cached_tokens", 0))
        if row.get("ttft_ms")
        else None,
    )


def _rows(path: Path) -> Sequence[dict[str, Any]]:
    try:
        return list(_parsed(path))
    except (OSError, EOFError, zlib.error) as error:
        raise InvalidRequest(f"cannot read trace {path}: {error}") from error


def _parsed(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or a number that is too long
                raise InvalidRequest(f"{path}:{number} is not JSON: {error}") from error
            yield _checked(row, f"{path}:{number}")


def _checked(row: Any, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise InvalidRequest(f"{where} is not an object")
    for name, most in (*_MOST.items(), *((each, _MEASURED[each]) for each in _MEASURED.keys() & row.keys())):
        value = row.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= most:
            raise InvalidRequest(f"{where}: {name!r} is {value!r:.80}, not a number from 0 to {most:g}")
    size = row.get("block_tokens", BLOCK_TOKENS)
    if type(size) is not int or not 0 < size <= _MOST["input_length"]:
        raise InvalidRequest(f"{where}: 'block_tokens' is {size!r:.80}, not a whole number above 0")
    for name, ids in (("hash_ids", row.get("hash_ids")), ("answer_ids", row.get("answer_ids", []))):
        if not isinstance(ids, list) or not all(isinstance(each, int) for each in ids):
            raise InvalidRequest(f"{where}: {name!r} is {ids!r:.80}, not a list of whole numbers")
    row["input_length"] = max(1, row["input_length"])
    return row
