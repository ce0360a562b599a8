"""The threads in which large prompts are prepared: parsed, rendered, tokenised.

They are few, so that such prompts take turns among themselves and not with the streams. A prompt waiting for a thread
keeps its place in the room for bodies, which bounds the amount waiting.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

NUM_THREADS: Final = 2
#: Smaller bodies and texts are prepared in the event loop, in a few milliseconds at most.
INLINE_BYTES: Final = 32 << 10
#: Tokenising takes longer: a microsecond per character and more.
INLINE_CHARACTERS: Final = 2048

_pool = ThreadPoolExecutor(NUM_THREADS, "tanghulu-preparing")


async def made_ready(is_large: bool, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return the result of ``function`` for a body: in the event loop, unless the body ``is_large``."""
    return await in_thread(function, *args, **kwargs) if is_large else function(*args, **kwargs)


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return the result of ``function``, run in one of the threads; it must not touch state changed by the loop."""
    return await asyncio.get_running_loop().run_in_executor(_pool, lambda: function(*args, **kwargs))
