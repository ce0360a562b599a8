"""Watch over peers' processes: reports when one has exited. Owns their pidfds; the caller decides what follows."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable


class ProcessWatch:
    """Reports, once per session, that a peer's process has exited."""

    def __init__(self, on_exit: Callable[[int], None]) -> None:
        self._on_exit = on_exit
        self._pidfds: dict[int, int] = {}

    def add(self, session_id: int, pidfd: int) -> None:
        """Watch ``pidfd`` for the session and own it; a second one for the same session is closed."""
        if session_id in self._pidfds:
            os.close(pidfd)
            return
        self._pidfds[session_id] = pidfd
        asyncio.get_running_loop().add_reader(pidfd, self._exited, session_id)

    def forget(self, session_id: int) -> None:
        """Stop watching; unknown sessions are fine."""
        pidfd = self._pidfds.pop(session_id, None)
        if pidfd is not None:
            asyncio.get_running_loop().remove_reader(pidfd)
            os.close(pidfd)

    @property
    def session_ids(self) -> list[int]:
        """The watched sessions."""
        return list(self._pidfds)

    def close(self) -> None:
        """Stop watching everything."""
        for session_id in self.session_ids:
            self.forget(session_id)

    def _exited(self, session_id: int) -> None:
        self.forget(session_id)
        self._on_exit(session_id)
