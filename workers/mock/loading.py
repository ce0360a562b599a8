"""Loads the parts of a model that the mock engine needs: its tokenizer and context length, never its weights.

``--model mock`` is a byte-level tokenizer made here, so that a cluster can be loaded on a machine without a model.

Files may hold the engine before a step, so that tests can catch requests at a given moment and keep them there
(`HoldingRunner`). A file in the directory of ``--mock-hold`` names the step to stop before:

    step      the next one
    prefill   the next one that computes a prompt
    decode    the next one of a request with DECODE_TOKENS tokens or more

The engine renames the file to ``<name>.held`` and stops until that one is gone: its thread does nothing meanwhile, as
in a call to a GPU, and the rest of the process continues. Example: to stop a worker in the middle of an answer, ``touch
DIR/decode``, wait for ``DIR/decode.held``, and remove it to continue.
"""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog
import xxhash
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tanghulu.model_files.assets import TokenizerAssets
from tanghulu.model_files.fields import read_json
from tanghulu.types import Fingerprint
from tanghulu.workers.engine.engine import Computed, ModelRunner, WrappedRunner
from tanghulu.workers.engine.kv_layout import ITEM_BYTES, KvLayout
from tanghulu.workers.engine.step import ScheduledRun, StepPlan
from tanghulu.workers.loading.loaded_model import LoadedModel
from tanghulu.workers.mock.runner import TIMINGS, MockRunner
from tanghulu.workers.weights.hf_config import config_from_hf
from tanghulu.workers.weights.source import ModelSource, resolve_model
from tanghulu.workers.weights.tokenizer_assets import load_tokenizer_assets

if TYPE_CHECKING:
    from tanghulu.workers.config import WorkerConfig

_log = structlog.get_logger(__name__)

#: Generated tokens of a request in the middle of its answer.
DECODE_TOKENS: Final = 16
_POLL_S: Final = 0.002
#: Limit of an abandoned hold, as when its test was killed: a held engine keeps its process from ending.
MOST_S: Final = 300.0

NAME = "mock"
_MAX_CONTEXT = 131_072
_END = "<|end|>"
_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif -%}"
)


def load(config: WorkerConfig, progress: Callable[[float], None]) -> LoadedModel:
    """Load the mock of ``config.model``; raises ModelUnsupported if that cannot be found."""
    config = config.for_device(on_gpu=False)
    name, assets, max_context = _described(config.model)
    layout = KvLayout(1, config.block_tokens, 1, config.mock_kv_token_bytes // (2 * ITEM_BYTES["float32"]), "float32")
    layout.num_blocks_in(config.kv_memory)
    tokenizer = Tokenizer.from_buffer(assets.tokenizer_json)
    timing = dataclasses.replace(TIMINGS[config.mock_timing], speedup=config.mock_speedup)
    text_ids = _text_ids(tokenizer, assets)
    progress(1.0)

    def make_runner(buffer: memoryview) -> ModelRunner:
        runner = MockRunner(
            layout,
            buffer,
            timing,
            text_ids=text_ids,
            vocab=tokenizer.get_vocab_size(),
            max_context=max_context,
            deterministic=config.deterministic,
            checks=config.checks,
        )
        return runner if config.mock_hold is None else HoldingRunner(runner, config.mock_hold)

    return LoadedModel(config, name, layout, _fingerprint(assets, layout), assets, make_runner)


def _described(spec: str) -> tuple[str, TokenizerAssets, int]:
    """Return the name, the tokenizer and the context length of the model ``spec``."""
    if spec == NAME:
        return NAME, byte_level(), _MAX_CONTEXT
    folder = Path(spec).expanduser()
    if (folder / "config.json").is_file() and not any(folder.glob("*.safetensors")):
        shape = config_from_hf(read_json(folder / "config.json"))
        source = ModelSource(folder.resolve().name, shape, (), folder)
    else:
        source = resolve_model(spec)
    return source.name, load_tokenizer_assets(source), source.config.max_context


def byte_level() -> TokenizerAssets:
    """Make a tokenizer with a token for each byte and one that ends a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({text: index for index, text in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([_END])
    return TokenizerAssets(tokenizer.to_str().encode(), _TEMPLATE, None, _END, False, None, (len(alphabet),))


def _text_ids(tokenizer: Tokenizer, assets: TokenizerAssets) -> list[int]:
    """Find tokens that read as words: lower-case letters, preceded by a space if the tokenizer has such."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    spaced = sorted(index for text, index in vocabulary.items() if re.fullmatch("[Ġ▁][a-z]{2,}", text))
    letters = sorted(index for text, index in vocabulary.items() if re.fullmatch("[Ġ▁]?[a-z]*", text) and text)
    ending = set(assets.eos_ids)
    return spaced or letters or sorted(index for index in vocabulary.values() if index not in ending)


def _fingerprint(assets: TokenizerAssets, layout: KvLayout) -> Fingerprint:
    """Name the KV of mock workers of one tokenizer and layout, which may exchange it; never equal to a real model's."""
    shape = json.dumps(dataclasses.asdict(layout), sort_keys=True).encode()
    return Fingerprint(xxhash.xxh3_128_digest(b"mock/1" + shape + assets.tokenizer_json))


#: Names of files, and the runs before which they hold the engine.
_HOLDS: Final[dict[str, Callable[[ScheduledRun], bool]]] = {
    "step": lambda run: True,
    "prefill": lambda run: run.start < run.request.num_prompt_tokens,
    "decode": lambda run: run.start - run.request.num_prompt_tokens >= DECODE_TOKENS,
}


class HoldingRunner(WrappedRunner):
    """Steps of ``runner`` wait while a file in ``folder`` holds them."""

    def __init__(self, runner: ModelRunner, folder: Path, sleep: Callable[[float], None] = time.sleep) -> None:
        super().__init__(runner)
        self._folder = folder
        self._sleep = sleep

    def run(self, plan: StepPlan) -> Computed:
        """Run the step, at once or when its hold is gone."""
        for name, holds in _HOLDS.items():
            if any(map(holds, plan.runs)):
                self._wait(name)
        return self._runner.run(plan)

    def _wait(self, name: str) -> None:
        held = self._folder / f"{name}.held"
        try:
            (self._folder / name).rename(held)
        except FileNotFoundError:
            return
        _log.info("mock.held", before=name)
        polls_left = int(MOST_S / _POLL_S)
        while held.exists() and polls_left:
            polls_left -= 1
            self._sleep(_POLL_S)

    def __repr__(self) -> str:
        return f"HoldingRunner({self._runner!r}, {self._folder})"
