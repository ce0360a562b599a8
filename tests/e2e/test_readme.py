"""What README, docs/index.md, docs/requests.md and docs/tools.md show runs as it stands, only with other ports."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parents[2] / "README.md").read_text()
REQUESTS = (Path(__file__).parents[2] / "docs" / "requests.md").read_text()
TOOLS = (Path(__file__).parents[2] / "docs" / "tools.md").read_text()
START = (Path(__file__).parents[2] / "docs" / "index.md").read_text()


def _block(language: str, marker: str) -> str:
    blocks = re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)
    return next(b for b in blocks if marker in b)


def _run(cluster, *command: str, stdin: str = "") -> str:
    # The console script stands beside the interpreter, as it does for somebody who followed the README.
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "TANGHULU_MASTER": cluster.master}
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr + cluster.logs()
    return done.stdout


def _here(cluster, text: str) -> str:
    return text.replace("http://127.0.0.1:8000", cluster.url).replace("127.0.0.1:7400", cluster.master)


def test_the_curl_request_streams_english(cluster):
    output = _run(cluster, "bash", "-c", _here(cluster, _block("sh", "chat/completions")))
    chunks = [json.loads(line[6:]) for line in output.splitlines() if line.startswith("data: {")]
    text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks)
    assert output.rstrip().endswith("data: [DONE]")
    assert len(chunks) > 5, "it streams"
    assert len(re.findall(r"\b(the|a|is|of|and|to|in)\b", text.lower())) >= 3, text


@pytest.mark.parametrize("marker", ["OpenAI(", "tanghulu.connect("])
def test_the_python_examples_run(cluster, marker):
    code = _here(cluster, _block("python", marker))
    output = _run(cluster, sys.executable, "-W", "error", "-c", code)
    expected = {"OpenAI(": "Paris", "tanghulu.connect(": "b'forty-two'\nFalse 1"}[marker]
    assert expected in output


def test_the_example_of_anthropics_sdk_runs(cluster):
    pytest.importorskip("anthropic", reason="extra: anthropic is not installed")
    (code,) = re.findall(r"```python\n(.*?)```", REQUESTS, re.DOTALL)
    assert re.fullmatch(r".*\w.* \d+\n", _run(cluster, sys.executable, "-c", _here(cluster, code)), re.DOTALL)


def test_the_example_of_a_tool_call_runs(cluster):
    (code,) = re.findall(r"```python\n(.*?)```", TOOLS, re.DOTALL)
    code = _here(cluster, code) + "print(call.function.name, call.function.arguments)"
    name, arguments = _run(cluster, sys.executable, "-W", "error", "-c", code).split(maxsplit=1)
    assert (name, list(json.loads(arguments))) == ("get_weather", ["city"])


def test_the_start_page_runs(cluster):
    curl = re.search(r"^    curl .*?\n\n", START, re.DOTALL | re.MULTILINE)
    answer = json.loads(_run(cluster, "bash", "-c", _here(cluster, curl[0])))
    assert answer["choices"][0]["message"]["content"]
    code = re.search(r"```python\n(.*?)```", START, re.DOTALL)
    assert _run(cluster, sys.executable, "-W", "error", "-c", _here(cluster, code[1])) == "b'hello'\n"


def test_a_long_prompt_of_the_start_page_is_cached_the_second_time(cluster, tmp_path):
    commands = re.search(r"```sh\n(.*?)```", START, re.DOTALL)
    output = _run(cluster, "bash", "-c", f"cd {tmp_path}\n" + _here(cluster, commands[1]))
    usages = [json.loads(line)["usage"] for line in output.splitlines()]
    first, second = (usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert first == 0
    assert second > usages[1]["prompt_tokens"] - 2 * 64


def test_chat_answers_one_message(cluster):
    ask = ["--message", "What is the capital of France?", "--temperature", "0", "--max-tokens", "12"]
    assert "Paris" in _run(cluster, "tanghulu", "chat", "--url", cluster.url, *ask)
    assert "Paris" in _run(cluster, "tanghulu", "chat", "--url", cluster.url, *ask[2:], stdin=ask[1])


def test_the_store_commands_round_trip(cluster, tmp_path):
    value = "hello\n"
    assert "greeting is on 1 node" in _run(cluster, "tanghulu", "store", "put", "greeting", "-", stdin=value)
    assert _run(cluster, "tanghulu", "store", "get", "greeting") == value
    _run(cluster, "tanghulu", "store", "get", "greeting", "-o", str(tmp_path / "value"))
    assert (tmp_path / "value").read_text() == value
    assert [k["key"] for k in json.loads(_run(cluster, "tanghulu", "store", "ls", "greet", "--json"))] == ["greeting"]
    assert "greeting" in _run(cluster, "tanghulu", "store", "ls", "greet")
    assert json.loads(_run(cluster, "tanghulu", "store", "stat", "greeting", "--json"))["size_bytes"] == len(value)
    assert json.loads(_run(cluster, "tanghulu", "store", "stat", "--json"))["num_nodes"] == 1
    assert list(json.loads(_run(cluster, "tanghulu", "store", "policy", "sieve", "--json")).values()) == ["sieve"]
    assert list(json.loads(_run(cluster, "tanghulu", "store", "policy", "lru", "--json")).values()) == ["lru"]
    assert json.loads(_run(cluster, "tanghulu", "store", "rm", "greeting", "--json"))["num_removed"] == 1
    gone = subprocess.run(
        [sys.executable, "-m", "tanghulu", "store", "get", "greeting", "--master", cluster.master],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert gone.returncode == 3
    assert "greeting" in gone.stderr
