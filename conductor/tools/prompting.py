"""Tools for a model whose chat template knows none: told in the system message, in the form of Hermes and Qwen.

Calls and results of earlier turns become plain text in the same form, so that any template which takes system, user and
assistant messages will do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

_INSTRUCTIONS: Final = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def with_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """``messages`` with ``tools`` in the system message; those of earlier calls as text."""
    out = [dict(message) for message in plain_messages(messages)]
    if tools:
        text = _INSTRUCTIONS.format(tools="\n".join(_dumps(tool) for tool in tools))
        if out and out[0]["role"] == "system":
            out[0]["content"] = f"{out[0].get('content') or ''}\n\n{text}".lstrip()
        else:
            out.insert(0, {"role": "system", "content": text})
    return out


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """``messages`` without calls and results: both are text. Results in a row share one message of the user's."""
    out: list[dict[str, Any]] = []
    previous = ""
    for message in messages:
        if message["role"] == "tool":
            text = f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"
            if previous == "tool":
                out[-1]["content"] += f"\n{text}"
            else:
                out.append({"role": "user", "content": text})
        elif message.get("tool_calls"):
            calls = [_call_text(call["function"]) for call in message["tool_calls"]]
            parts = [message["content"]] if message.get("content") else []
            out.append({"role": message["role"], "content": "\n".join([*parts, *calls])})
        else:
            out.append(dict(message))
        previous = message["role"]
    return out


def _call_text(function: Mapping[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{_dumps(call)}\n</tool_call>"


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
