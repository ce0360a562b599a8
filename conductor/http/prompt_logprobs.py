"""Log probabilities of a prompt's own tokens, in each API's format.

OpenAI's text completions with ``echo`` put them before those of the text; vLLM's ``prompt_logprobs`` are a list with an
entry for each token of the prompt; SGLang's are input lists next to the output lists. In all formats the first token
has null, as no token precedes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tanghulu.conductor.http.openai_format import CompletionLogprobs, token_text
from tanghulu.conductor.inference.generation import Generation, GenerationCall, scored_tokens
from tanghulu.session.outputs import TokenLogprobs


class EchoedLogprobs(CompletionLogprobs):
    """``logprobs`` of a choice that echoes its prompt: the first call includes those of the prompt."""

    def __init__(self, generation: Generation, num_top: int, skip_special_tokens: bool) -> None:
        super().__init__(generation.model, skip_special_tokens)
        self._num_top = num_top
        self._unshown: Generation | None = generation

    def of(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        generation, self._unshown = self._unshown, None
        prompt = self._of_prompt(generation) if generation is not None else None
        shown = super().of(logprobs)
        return shown if prompt is None else {name: values + shown[name] for name, values in prompt.items()}

    def _of_prompt(self, generation: Generation) -> dict[str, list[Any]]:
        tokens = generation.request.prompt.tolist()
        values: list[float | None] = [None] * len(tokens)
        tops: list[dict[str, float] | None] = [None] * len(tokens)
        for one in scored_tokens(tokens, generation.prompt_scores):
            values[one.position] = one.logprob
            tops[one.position] = self._top([*one.top[: self._num_top], (one.token, one.logprob)])
        offsets = self._offsets(tokens)
        self._offset += len(self._detokenizer.flush())
        self._detokenizer = self._new_detokenizer()  # the answer is a separate text
        texts = [token_text(self._model, token) for token in tokens]
        return {"tokens": texts, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


def vllm_prompt_logprobs(generation: Generation, num_top: int) -> list[dict[str, Any] | None]:
    """Return a sequence's ``prompt_logprobs``: for each token of its prompt, the entries by token id."""
    model = generation.model
    shown: list[dict[str, Any] | None] = [None] * generation.num_prompt_tokens
    for one in scored_tokens(generation.request.prompt.tolist(), generation.prompt_scores):
        ranked = [(one.token, one.logprob, one.rank)]
        ranked += [(token, logprob, rank) for rank, (token, logprob) in enumerate(one.top[:num_top], 1)]
        shown[one.position] = {
            str(token): {"logprob": logprob, "rank": rank, "decoded_token": token_text(model, token)}
            for token, logprob, rank in reversed(ranked)
        }
    return shown


def with_prompt_logprobs(answer: dict[str, Any], call: GenerationCall, num_top: int | None) -> dict[str, Any]:
    """Return ``answer`` with vLLM's ``prompt_logprobs`` if requested: per text choice, or for the whole chat."""
    if num_top is None:
        return answer
    if answer["object"] == "chat.completion":
        return {**answer, "prompt_logprobs": vllm_prompt_logprobs(call.generations[0], num_top)}
    for choice, generation in zip(answer["choices"], call.generations, strict=True):
        choice["prompt_logprobs"] = vllm_prompt_logprobs(generation, num_top)
    return answer


def sglang_input_logprobs(generation: Generation, with_text: bool) -> dict[str, list[Any]]:
    """Return SGLang's lists of the prompt's log probabilities, starting before the first scored token.

    The prompt's own, the most likely, and those requested by id; entries are [logprob, id, text], the first has none.
    """
    model, sampling = generation.model, generation.request.sampling
    prompt = generation.request.prompt.tolist()

    def entry(logprob: float | None, token: int) -> list[Any]:
        return [logprob, token, token_text(model, token) if with_text else None]

    scoring = generation.request.scoring
    if scoring is None:
        return {}
    own: list[Any] = [entry(None, prompt[scoring.start - 1])]
    top: list[Any] = [None]
    requested: list[Any] = [None]
    for one in scored_tokens(prompt, generation.prompt_scores):
        own.append(entry(one.logprob, one.token))
        top.append([entry(logprob, token) for token, logprob in one.top])
        pairs = zip(sampling.logprob_token_ids, one.requested, strict=True)
        requested.append([entry(logprob, token) for token, logprob in pairs])
    return {"token": own, "top": top, "token_ids": requested}
