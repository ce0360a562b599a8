"""What runners around another runner have in common: they show its shape, and change how its steps are run."""

from __future__ import annotations

from tanghulu.workers.engine.engine import ModelRunner
from tanghulu.workers.engine.kv_layout import KvBlocks, KvLayout


class WrappedRunner:
    """Everything of a ModelRunner but ``run``, as ``runner`` has it."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    @property
    def layout(self) -> KvLayout:
        """The shape of a block."""
        return self._runner.layout

    @property
    def cache(self) -> KvBlocks:
        """The blocks."""
        return self._runner.cache

    @property
    def vocab(self) -> int:
        """Token ids are below this."""
        return self._runner.vocab

    @property
    def max_context(self) -> int:
        """Tokens that the model was trained to attend to."""
        return self._runner.max_context
