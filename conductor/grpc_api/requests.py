"""Request messages converted to HTTP bodies, so that the same bounds, defaults and errors apply.

A message field has the same name as in the body; different names are translated here. Independent of models.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from google.protobuf.message import Message as Protobuf
from pydantic import ValidationError

from tanghulu.conductor.inference.body import Body
from tanghulu.conductor.inference.json_marks import MAX_CHAT_MARKS, MAX_MARKS, marks_of
from tanghulu.conductor.inference.messages import MAX_MESSAGES, MAX_PARTS
from tanghulu.conductor.inference.schema import (
    MAX_SEQUENCES,
    MAX_TOOLS,
    ChatBody,
    CompletionBody,
    OpenAIBody,
    TokenizeBody,
)
from tanghulu.conductor.text.preparing import INLINE_BYTES, made_ready
from tanghulu.protos import inference_pb2 as pb
from tanghulu.web.errors import BadField, from_validation

B = TypeVar("B", bound=Body)
_PROMPT = "prompt"
_MESSAGE_MARKS = 16
#: The request fields that can hold the prompt.
_PROMPTS = ("text", "texts", "input_ids", "input_id_lists", "chat")


async def body_of(message: pb.GenerateRequest | pb.TokenizeRequest) -> Body:
    """Convert ``message`` to a body, in a thread if it is long. Raises BadField."""
    is_large = message.ByteSize() > INLINE_BYTES
    make: Callable[[Any], Body] = _generate_body if isinstance(message, pb.GenerateRequest) else _tokenize_body
    body = await made_ready(is_large, make, message)
    if is_large:
        body.set_large()
    return body


def num_marks(message: pb.GenerateRequest | pb.TokenizeRequest) -> int:
    """Return roughly the marks ``message`` would have as JSON: of its token ids, its messages and their calls."""
    messages = message.chat.messages
    calls = sum(len(each.tool_calls) for each in messages) if len(messages) <= MAX_MESSAGES else 0
    marks = _MESSAGE_MARKS * (min(len(messages), MAX_MESSAGES) + min(calls, MAX_PARTS))
    if isinstance(message, pb.GenerateRequest):
        lists = message.input_id_lists.lists[:MAX_SEQUENCES]
        marks += len(message.input_ids.ids) + sum(len(each.ids) for each in lists)
    return marks


def _generate_body(message: pb.GenerateRequest) -> OpenAIBody:
    """Build the body of a chat, or of a completion of texts or token ids."""
    fields = _given(message, but=(*_PROMPTS, "sampling")) | _sampling(message)
    match message.WhichOneof("prompt"):
        case "text":
            prompt: Any = message.text
        case "input_ids":
            prompt = _listed(message.input_ids.ids, _PROMPT, MAX_MARKS)
        case "texts":
            prompt = _listed(message.texts.texts, _PROMPT, MAX_SEQUENCES)
        case "input_id_lists":
            lists = _listed(message.input_id_lists.lists, _PROMPT, MAX_SEQUENCES)
            prompt = [_listed(each.ids, _PROMPT, MAX_MARKS) for each in lists]
        case "chat":
            if message.echo:
                raise BadField("echo does not work with a chat; leave it out", "echo")
            return _checked(ChatBody, _chat_names(fields) | _chat(message.chat))
        case _:
            raise BadField(f"the prompt is missing; give one of {', '.join(_PROMPTS)}", _PROMPT)
    return _checked(CompletionBody, fields | {_PROMPT: prompt})


def _tokenize_body(message: pb.TokenizeRequest) -> TokenizeBody:
    """Build the body of a text or a chat to tokenise."""
    fields = _given(message, but=("text", "chat"))
    match message.WhichOneof("prompt"):
        case "text":
            return _checked(TokenizeBody, fields | {_PROMPT: message.text})
        case "chat":
            return _checked(TokenizeBody, fields | _chat(message.chat))
    raise BadField("the prompt is missing; give text or chat", _PROMPT)


def _checked(kind: type[B], fields: dict[str, Any]) -> B:
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise from_validation(error) from None


def _given(message: Any, but: Iterable[str] = ()) -> dict[str, Any]:
    """Return the fields set in ``message``, by name."""
    left_out = set(but)
    return {f.name: _plain(value, f.name) for f, value in message.ListFields() if f.name not in left_out}


def _plain(value: Any, name: str) -> Any:
    if isinstance(value, Protobuf):
        return _given(value)
    if isinstance(value, Mapping):
        return dict(zip(map(str, value), _listed(value.values(), name, MAX_MESSAGES), strict=True))
    return _listed(value, name, MAX_MESSAGES) if isinstance(value, Sequence) and not isinstance(value, str) else value


def _listed(values: Collection[Any], name: str, most: int) -> list[Any]:
    """Return ``values`` of the field ``name``. Raises BadField for more than ``most``, before reading any."""
    if len(values) > most:
        raise BadField(f"{name} has {len(values)} values; the limit is {most}", name)
    return list(values)


def _sampling(message: pb.GenerateRequest) -> dict[str, Any]:
    fields = _given(message.sampling)
    if fields.pop("json_object", False):
        fields["response_format"] = {"type": "json_object"}
    return fields


def _chat_names(fields: dict[str, Any]) -> dict[str, Any]:
    """Return ``fields``, with log probabilities in the chat format."""
    count = fields.pop("logprobs", None)
    return fields if count is None else fields | {"logprobs": True, "top_logprobs": count}


def _chat(chat: pb.Chat) -> dict[str, Any]:
    fields = _given(chat, but=("messages", "tools", "tool_function", "chat_template_kwargs"))
    messages, tools = _listed(chat.messages, "messages", MAX_MESSAGES), _listed(chat.tools, "tools", MAX_TOOLS)
    texts = [chat.chat_template_kwargs, *(tool.parameters for tool in tools)]
    if sum(marks_of(text.encode()) for text in texts) > MAX_CHAT_MARKS:
        raise BadField(f"tools and chat_template_kwargs exceed {MAX_CHAT_MARKS} JSON values; shorten them", "tools")
    if (num_calls := sum(len(each.tool_calls) for each in messages)) > MAX_PARTS:
        raise BadField(f"messages have {num_calls} tool calls in total; the limit is {MAX_PARTS}", "messages")
    fields["messages"] = [_message(each) for each in messages]
    if tools:
        fields["tools"] = [{"type": "function", "function": _function(each)} for each in tools]
    if chat.tool_function:
        if chat.tool_choice:
            raise BadField("give either tool_choice or tool_function, not both", "tool_choice")
        fields["tool_choice"] = {"type": "function", "function": {"name": chat.tool_function}}
    if chat.chat_template_kwargs:
        fields["chat_template_kwargs"] = _object(chat.chat_template_kwargs, "chat_template_kwargs")
    return fields


def _message(message: pb.ChatMessage) -> dict[str, Any]:
    fields = _given(message, but=("tool_calls",))
    if message.tool_calls:
        fields["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return fields


def _function(tool: pb.ChatTool) -> dict[str, Any]:
    fields = _given(tool, but=("parameters",))
    if tool.parameters:
        fields["parameters"] = _object(tool.parameters, "tools")
    return fields


def _object(text: str, name: str) -> dict[str, Any]:
    """Parse the JSON object in the text field ``name``. Raises BadField."""
    try:
        value = msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadField(f"{name} must be a JSON object: {error}", name) from None
    return value
