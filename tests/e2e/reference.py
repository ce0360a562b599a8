"""The same weights under Hugging Face transformers: what text and logits have to equal."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


class Reference:
    """Tokenizer and model, loaded when first used (the model takes half a minute)."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @cached_property
    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._folder, gguf_file=GGUF)

    @cached_property
    def model(self) -> Any:
        import torch
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self._folder, gguf_file=GGUF, dtype=torch.float32).eval()

    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        """The next ``num_tokens`` token ids (fewer if the sequence ends) by generate()."""
        import torch

        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_tokens
            )
        return out[0, len(prompt) :].tolist()
