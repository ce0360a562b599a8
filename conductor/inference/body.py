"""The base of all bodies, and the treatment of fields that a body does not have.

Each supported field is declared in a body's class, with its type, its bounds and a one-line description: the
documentation's table and the OpenAPI document are generated from these. Of the other fields of the supported APIs,
those in ``UNSUPPORTED`` would change the answer, so they are refused with the reason; ``IGNORED`` ones cannot change
it. All other names are unknown: clients get a warning, or a refusal if the conductor is configured to be strict.
"""

from __future__ import annotations

import difflib
import re
from typing import Annotated, Any, ClassVar, Final

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator

from tanghulu.conductor.inference.json_marks import MAX_CHAT_MARKS
from tanghulu.web.errors import BadField

MAX_NAME_CHARS: Final = 1024
Name = Annotated[str, Field(max_length=MAX_NAME_CHARS)]
_TEXT_ONLY: Final = "models read and write text only"
_OWN_CODE: Final = "code of a request's own is not run; use logit_bias, a grammar or a stop rule"
_NO_CFG: Final = "context-free grammars are not compiled here; use json_schema or regex"
_NO_ADAPTERS: Final = "no adapters are served; start workers with the merged model and name it in model"
_TOKENS: Final = "prompts are texts or token ids"
_PATTERNS: Final = "whitespace is as the grammar's compiler has it; write a regex"

#: Fields that would change the answer -> suggested alternative.
UNSUPPORTED: Final = {
    "chat_template": "templates come with the model; use chat_template_kwargs",
    "continue_final_message": "the last message is closed; use /v1/completions to continue it",
    "functions": "the old name; use tools",
    "function_call": "the old name; use tool_choice",
    "prompt": "a prompt is messages of a chat, input of /v1/responses, text of /generate",
    "input_ids": "send token ids to /generate, or as the prompt of /v1/completions",
    "conversation": "conversations are not kept; use previous_response_id",
    "session_params": "prompts are not kept; send the whole, its prefix is cached",
    "background": "an answer is not computed for later; leave it out",
    "echo": "only /v1/completions repeats its prompt",
    "mcp_servers": "no other server is called; describe its functions in tools",
    "container": "no code is run; describe functions in tools",
    "truncation": "nothing is left out of an input; shorten it",
    "suffix": "text is only written behind the prompt",
    "web_search_options": "nothing is searched; give what was found in messages",
    "use_beam_search": "there is no beam search; use n with temperature",
    "allowed_token_ids": "use guided_choice or guided_regex, or logit_bias",
    "bad_words": "only logit_bias acts on single tokens; use it with -100",
    **dict.fromkeys(("prompt_embeds", "input_embeds", "positional_embed_overrides"), _TOKENS),
    **dict.fromkeys(("image_data", "video_data", "audio_data", "audio", "image", "modalities"), _TEXT_ONLY),
    **dict.fromkeys(("logits_processors", "custom_logit_processor", "custom_params", "vllm_xargs"), _OWN_CODE),
    **dict.fromkeys(("grammar", "guided_grammar", "ebnf", "structural_tag"), _NO_CFG),
    **dict.fromkeys(("guided_whitespace_pattern", "whitespace_pattern"), _PATTERNS),
    **dict.fromkeys(("lora_path", "lora_id"), _NO_ADAPTERS),
}
#: Fields sent by clients that cannot affect the answer.
IGNORED: Final = frozenset(
    """
    store metadata service_tier safety_identifier prediction stream_options max_tool_calls description
    prompt_cache_retention prompt_cache_options routing_key conversation_id no_logs log_metrics custom_labels
    external_trace_header received_time separate_reasoning stream_reasoning include_reasoning include_obfuscation
    stream_interval spaces_between_special_tokens guided_decoding_backend disable_fallback disable_any_whitespace
    disable_additional_properties return_cached_tokens_details diagnostics inference_geo speed user_profile_id
    """.split()  # noqa: SIM905
)
#: Values requesting the default behaviour, besides null, false and empty values.
_NEUTRAL: Final = {
    "modalities": (["text"],),
    "function_call": ("none",),
    "verbosity": ("medium",),
    "length_penalty": (1,),
    "truncation": ("disabled",),
}
#: Integers up to here are exact as floats.
_EXACT: Final = 1 << 53
#: Most unknown fields named in a warning.
_MOST_NAMES: Final = 8
_MOST_NAME_CHARACTERS: Final = 64
_UNPRINTABLE: Final = re.compile(r"[^A-Za-z0-9_.\-]")


class Body(BaseModel):
    """A body, or an object in one. A null counts as absent, and 16.0 is the integer it is in JSON.

    A body that ``is_large`` is prepared in a thread, not in the event loop.
    """

    model_config = ConfigDict(strict=True, extra="allow", use_attribute_docstrings=True)
    #: Most values in such a body; only lists of token ids need many.
    max_marks: ClassVar[int] = MAX_CHAT_MARKS
    #: Fields that can have the prompt, of which one is set.
    prompt_fields: ClassVar[tuple[str, ...]] = ()
    #: Fields for which null is a value.
    nullable: ClassVar[frozenset[str]] = frozenset()
    _unknown: tuple[str, ...] = PrivateAttr(())
    _is_large: bool = PrivateAttr(False)

    @model_validator(mode="before")
    @classmethod
    def _normalised(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {
            name: int(value) if type(value) is float and abs(value) < _EXACT and value.is_integer() else value
            for name, value in given.items()
            if value is not None or name in cls.nullable
        }

    @property
    def prompt_field(self) -> str | None:
        """Name of the field with the prompt, for errors about it; None for a body without one."""
        return next((name for name in self.prompt_fields if getattr(self, name, None) is not None), None)

    @property
    def unknown(self) -> tuple[str, ...]:
        """Names of the client's fields that `drop_foreign` found to be unknown."""
        return self._unknown

    def drop_foreign(self) -> None:
        """Drop the fields this body does not have. Raises BadField for an unsupported one."""
        self._unknown = tuple(self._foreign(""))

    def _foreign(self, path: str) -> list[str]:
        extra = self.__pydantic_extra__ or {}
        found = [f"{path}{name}" for name, value in extra.items() if _is_unknown(path, name, value)]
        given = self.model_fields_set
        for name, value in vars(self).items():
            if name not in given:
                continue
            if isinstance(value, Body):
                found += value._foreign(f"{path}{name}.")
            elif isinstance(value, list) and value and isinstance(value[0], Body):
                for number, each in enumerate(value):
                    found += each._foreign(f"{path}{name}.{number}.")
        extra.clear()
        return found

    @property
    def is_large(self) -> bool:
        return self._is_large

    def set_large(self) -> None:
        self._is_large = True

    def refusal(self) -> BadField:
        """Return the error for the first unknown field, with a similarly spelt known field."""
        first = self.unknown[0]
        name = first.rpartition(".")[2][:_MOST_NAME_CHARACTERS]
        near = difflib.get_close_matches(name, type(self).model_fields, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return BadField(f"unknown field {shown(first)}{hint}", shown(first).partition(".")[0])

    def warning(self) -> str:
        """Return the value of a Warning header (RFC 7234, code 299) naming the unknown fields."""
        names, rest = self.unknown[:_MOST_NAMES], len(self.unknown) - _MOST_NAMES
        more = f" and {rest} more" if rest > 0 else ""
        return f'299 tanghulu "unknown fields have no effect: {", ".join(map(shown, names))}{more}"'


def _is_unknown(path: str, name: str, value: Any) -> bool:
    """Return whether a foreign field is neither ignored nor set to no effect. Raises BadField if it is unsupported."""
    if name in IGNORED or _is_neutral(value) or value in _NEUTRAL.get(name, ()):
        return False
    if name in UNSUPPORTED:
        if value == {}:
            return False
        raise BadField(f"{path}{name} is not supported: {UNSUPPORTED[name]}", path.partition(".")[0] or name)
    return True


def _is_neutral(value: Any) -> bool:
    """Return whether ``value`` is one that clients send in place of omitting a field."""
    if isinstance(value, list):
        return all(item is None or item is False for item in value)
    return value is None or value is False or value == ""


def shown(name: str) -> str:
    """Return a client's field name made safe for a header: short, and of harmless characters."""
    return _UNPRINTABLE.sub("?", name[:_MOST_NAME_CHARACTERS])
