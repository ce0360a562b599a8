"""Which keys a regular expression is found in, tried in a process of its own.

An expression such as ``(a+)+$`` can take longer than the universe is old, and nothing in a Python process can interrupt
it: the gateway would stand still for everybody. So it is tried where it can be ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys
from collections.abc import Sequence

from tanghulu.errors import InvalidRequest

_MAX_PATTERN = 4096
_TRY = """
import json, re, sys
pattern, keys = json.load(sys.stdin)
found = re.compile(pattern).search
json.dump([index for index, key in enumerate(keys) if found(key)], sys.stdout)
"""


def validate(pattern: str) -> str:
    """``pattern``; raises InvalidRequest if it is no regular expression."""
    if len(pattern) > _MAX_PATTERN:
        raise InvalidRequest(f"a pattern of {len(pattern)} characters is longer than {_MAX_PATTERN}")
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise InvalidRequest(f"{pattern!r} is no regular expression: {error}") from None
    return pattern


async def matching(pattern: str, keys: Sequence[str], within_s: float) -> list[str]:
    """Those of ``keys`` that ``pattern`` is found in; raises InvalidRequest if it takes longer than ``within_s``."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-S", "-c", _TRY, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(within_s):
            output, _ = await process.communicate(json.dumps([pattern, list(keys)]).encode())
    except TimeoutError:
        raise InvalidRequest(f"{pattern!r} takes longer than {within_s:g} s on {len(keys)} keys; simplify it") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    return [keys[index] for index in json.loads(output)]
