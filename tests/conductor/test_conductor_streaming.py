from __future__ import annotations

import json

TEXT = "Hello, wörld! "
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


def events(text: str) -> list[dict]:
    lines = [line for line in text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


async def test_a_chat_streams(cluster):
    await cluster.add()
    body = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
    response = await cluster.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    chunks = events(response.text)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[:-1]) == TEXT
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]][-1] == "stop"
    assert chunks[-1]["choices"] == []
    usage = chunks[-1]["usage"]
    assert usage["completion_tokens"] == 15
    assert usage["total_tokens"] == usage["prompt_tokens"] + 15
    assert all(c["usage"] is None for c in chunks[:-1])
