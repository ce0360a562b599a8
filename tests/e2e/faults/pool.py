"""A whole deployment: three masters on etcd, three nodes, two prefill and three decode workers, two conductors."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from tests.e2e.faults.parts import Part, Together, Worker
from tests.e2e.faults.standing import MOCK
from tests.store.elected_cluster import EtcdServer

WORKER_TIMEOUT_S = 6.0
#: Of the mock's timing at its own speed: a step of so many tokens takes under a second, so that none looks hung.
_STEP_TOKENS = 410


class Pool:
    """The processes of the deployment by their kind; a context manager."""

    def __init__(
        self,
        folder: Path,
        speedup: float = 5.0,
        grace_s: float = 10.0,
        engine: Sequence[str] = (),
        timeout_s: float = WORKER_TIMEOUT_S,
    ) -> None:
        """``engine``: flags of the workers instead of those of the mock engine at ``speedup``."""
        self.folder = folder
        self._etcd = EtcdServer()
        mock = (*MOCK, "--debug", f"mock_speedup={speedup}")
        mock += ("--max-num-batched-tokens", str(round(_STEP_TOKENS * speedup)))
        self._engine, self._grace_s, self._timeout_s = engine or mock, grace_s, timeout_s
        self._ends = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self.etcd = stack.enter_context(self._etcd)
            self._make()
            stack.enter_context(Together(*self.parts))
            self._ends = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._ends.close()

    def _make(self) -> None:
        self.finder = f"etcd://{self.etcd.address}"
        at = ("--master", self.finder)
        elected = ("--etcd", self.etcd.address, "--election-ttl-s", "2")
        self.masters = [Part(self.folder, f"master-{i}", "master", *elected) for i in range(3)]
        self.nodes = [Part(self.folder, f"node-{i}", "node", *at, "--memory", "64MiB") for i in range(3)]
        flags = (*at, *self._engine)
        self.prefill = [Worker(self.folder, f"prefill-{i}", "prefill", *flags) for i in range(2)]
        self.decode = [Worker(self.folder, f"decode-{i}", "decode", *flags) for i in range(3)]
        self.conductors = [self.conductor(f"conductor-{i}") for i in range(2)]

    def adopt(self, part: Part) -> None:
        """End ``part`` with the others."""
        self._ends.callback(part.end)

    def conductor(self, name: str, port: int = 0) -> Part:
        """A conductor that is not started yet, which shares ``port`` with others."""
        flags = ("--master", self.finder, "--reuse-port", "--worker-timeout-s", str(self._timeout_s))
        patient = ("--queue-timeout-s", "120", "--notice-s", "1", "--grace-s", str(self._grace_s))
        return Part(self.folder, name, "conductor", *flags, *patient, port=port)

    @property
    def workers(self) -> list[Worker]:
        return [*self.prefill, *self.decode]

    @property
    def parts(self) -> list[Part]:
        """All of them, those that others need first."""
        return [*self.masters, *self.nodes, *self.workers, *self.conductors]
