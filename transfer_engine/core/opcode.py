"""The two things one can do with a remote range. Owns the word, nothing else."""

from __future__ import annotations

from enum import IntEnum


class Opcode(IntEnum):
    """Direction of a transfer as the caller sees it; the value travels on the wire."""

    #: From the segment into the caller's buffer.
    READ = 1
    #: From the caller's buffer into the segment.
    WRITE = 2
