"""Matching keys against a regular expression, in a process of its own.

An expression such as ``(a+)+$`` can take longer than the universe is old, and nothing in a Python process can interrupt
it: the gateway would stand still for everybody. So the expression is tried in a process that can be ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Sequence

from tanghulu.errors import InvalidRequest

MAX_PATTERN = 4096
_TRY = """
import json, re, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
resource.setrlimit(resource.RLIMIT_CPU, (int(sys.argv[1]), int(sys.argv[1])))
pattern, keys = json.load(sys.stdin)
try:
    found = re.compile(pattern).search
    told = [index for index, key in enumerate(keys) if found(key)]
except (re.error, OverflowError, RecursionError, MemoryError) as error:
    told = str(error) or type(error).__name__
json.dump(told, sys.stdout)
"""


async def matching(pattern: str, keys: Sequence[str], within_s: float) -> list[str]:
    """The ``keys`` that ``pattern`` is found in.

    Raises InvalidRequest for a pattern that is no regular expression, or takes longer than ``within_s``.
    """
    if len(pattern) > MAX_PATTERN:
        raise InvalidRequest(f"a pattern of {len(pattern)} characters is longer than {MAX_PATTERN}")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", "-c", _TRY, str(int(within_s) + 2)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={},  # a token may stand in this process's
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
    told = json.loads(output) if process.returncode == 0 else "it ended the process that tried it"
    if isinstance(told, str):
        raise InvalidRequest(f"{pattern!r} is no regular expression: {told}")
    return [keys[index] for index in told]
