"""The threads in which large prompts are made ready: parsed, rendered, tokenised.

They are few, so that such prompts take turns among themselves and not with the streams. What waits for a thread keeps
its place in the room for bodies, which bounds how much can wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

NUM_THREADS: Final = 2
#: Smaller bodies and texts are made ready in the event loop, where they take a few milliseconds at most.
INLINE_BYTES: Final = 32 << 10
#: Tokenising takes longer: a microsecond a character and more.
INLINE_CHARACTERS: Final = 2048

_pool = ThreadPoolExecutor(NUM_THREADS, "tanghulu-preparing")


async def made_ready(is_large: bool, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of ``function`` for a body: in the event loop, unless the body ``is_large``."""
    return await in_thread(function, *args, **kwargs) if is_large else function(*args, **kwargs)


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of ``function``, which runs in one of the threads and must not touch what the loop changes."""
    return await asyncio.get_running_loop().run_in_executor(_pool, lambda: function(*args, **kwargs))
