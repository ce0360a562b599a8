"""Giving back what a block has taken when the block fails, whatever ends it."""

from __future__ import annotations

from collections.abc import Callable


class undo_on_error:
    """Call ``undo`` if the block raises, also by an interrupt or a cancel: nobody else owns yet what it has taken."""

    def __init__(self, undo: Callable[[], object]) -> None:
        self._undo = undo

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None:
            self._undo()
