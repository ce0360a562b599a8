"""Orders of several calls, written once and driven by the blocking client or by the asyncio one.

An order is a generator: it yields a question to a client (a function of it) or a ``Pause``, and receives the answer or
the typed error. Its return value is the order's result.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeVar

from tanghulu.errors import TanghuluError
from tanghulu.store.client.aio import AsyncClient
from tanghulu.store.client.client import Client

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Pause:
    """An instruction to let ``seconds`` pass."""

    seconds: float


#: Either client: both have the same methods.
Question = Callable[[Any], Any]
Order = Generator[Question | Pause, Any, T]


def perform(store: Client, order: Order[T]) -> T:
    """Drive ``order`` with the blocking client; return its result or raise its error."""
    try:
        step = next(order)
        while True:
            try:
                answer = _answer(store, step)
            except TanghuluError as error:
                step = order.throw(error)
            else:
                step = order.send(answer)
    except StopIteration as end:
        result: T = end.value
        return result


def _answer(store: Client, step: Question | Pause) -> Any:
    if isinstance(step, Pause):
        time.sleep(step.seconds)
        return None
    return step(store)


async def perform_async(store: AsyncClient, order: Order[T]) -> T:
    """Drive ``order`` with the asyncio client; return its result or raise its error."""
    try:
        step = next(order)
        while True:
            try:
                answer = await _answer_async(store, step)
            except TanghuluError as error:
                step = order.throw(error)
            else:
                step = order.send(answer)
    except StopIteration as end:
        result: T = end.value
        return result


async def _answer_async(store: AsyncClient, step: Question | Pause) -> Any:
    if isinstance(step, Pause):
        await asyncio.sleep(step.seconds)
        return None
    return await step(store)


def asking(method: str, *arguments: Any, **options: Any) -> Question:
    """Return the question that calls one ``method`` of a client."""

    def question(store: Any) -> Any:
        return getattr(store, method)(*arguments, **options)

    return question
