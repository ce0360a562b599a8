"""Chat templates: the prompt is transformers', for real templates, and no template costs more than it may."""

from __future__ import annotations

from pathlib import Path

import pytest

from tanghulu.conductor.text.chat_template import ChatTemplate, TemplateTooCostly
from tanghulu.conductor.text.template_bounds import is_within
from tanghulu.errors import InvalidRequest, ModelUnsupported
from tanghulu.types import Role
from tests.conductor.cluster import running_cluster
from tests.conductor.fake_worker import FakeWorker

TEMPLATES = sorted((Path(__file__).parent / "templates").glob("*.jinja"))
FUNCTION = {
    "name": "get_weather",
    "description": "The <b>weather</b> of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "é"}}},
}
TOOLS = [{"type": "function", "function": FUNCTION}]
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Köln"}}}
CHATS = (
    [{"role": "user", "content": "hi"}],
    [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nhello"},
        {"role": "user", "content": "weather?"},
    ],
    [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "abcdefghi", "name": "get_weather", "content": "sunny"},
    ],
)


def _of_transformers(source: str, chat: list, tools: list | None, **variables: object) -> str | None:
    """The prompt as transformers gives it; None where the template refuses."""
    from transformers.utils.chat_template_utils import render_jinja_template

    variables |= {"bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": True}
    try:
        return render_jinja_template([chat], tools=tools, chat_template=source, **variables)[0][0]
    except Exception:  # noqa: BLE001 - templates raise what they like
        return None


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_real_templates_render_as_in_transformers(path: Path) -> None:
    source = path.read_text()
    template = ChatTemplate(source, "<s>", "</s>")
    rendered = 0
    for chat in CHATS:
        for tools in (None, TOOLS):
            for variables in ({}, {"enable_thinking": False}):
                wanted = _of_transformers(source, chat, tools, **variables)
                if wanted is None:
                    with pytest.raises(InvalidRequest):
                        template.render(chat, {"tools": tools, **variables})
                else:
                    assert template.render(chat, {"tools": tools, **variables}) == wanted
                    rendered += 1
    assert rendered >= 8


#: Each would take minutes, gigabytes, or raise what is no error of jinja's.
COSTLY = (
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "{% set n = namespace(x='a') %}{% for i in range(50) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x | length }}",
    "{% set n = namespace(x='a') %}{% for i in range(50) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x | length }}",
    "{% set n = namespace(x=9) %}{% for i in range(50) %}{% set n.x = n.x * n.x %}{% endfor %}{{ n.x }}",
    "{% set n0 = namespace() %}"
    + "".join(f"{{% set n{i + 1} = namespace(a=n{i}, b=n{i}) %}}" for i in range(40))
    + "{{ n40 }}",
    "{% set x %}{% for i in range(99999) %}{{ 'x' * 100000 }}{% endfor %}{% endset %}",
    "{% set x = 'x' * 1000000 %}" + "{% set y = x[1:] %}" * 100,
    "{{ 'a' * 10**10 }}",
    "{{ [1] * 10**10 }}",
    "{{ (10**900) ** 900 }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ '{:>1000000000}'.format(1) }}",
    "{{ '{:>{}}'.format(1, 1000000000) }}",
    "{{ ('{0}' * 100000).format('x' * 100000) | length }}",
    "{{ 'a'.center(10**10) }}",
    "{{ 'a'.ljust(width=10**10) }}",
    "{{ 'a\t'.expandtabs(10**10) }}",
    "{{ ('a' * 100000).replace('a', 'b' * 100000) | length }}",
    "{{ ('a' * 100000) | replace('a', 'b' * 100000) | length }}",
    "{{ ('a' * 100000).join(range(99999) | map('string')) | length }}",
    "{{ range(99999) | join('a' * 100000) | length }}",
    "{{ ([none] * 100000) | map('default', 'x' * 100000, true) | join | length }}",
    "{{ (['x' * 1000] * 100000) | string | length }}",
    "{{ [[1] * 99999] * 3 | sum(start=[]) }}",
    "{{ (1).to_bytes(10**10, 'big') }}",
    "{{ 'a'.translate({97: 'b' * 1000}) }}",
    "{{ {'a': [1]} | tojson(indent=1000000000) }}",
    "{{ 'a\n' | indent(1000000000) }}",
    "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "{% for x in [1] recursive %}{{ loop(range(99999)) }}{% endfor %}",
    "{% block a %}{{ self.a() }}{{ self.a() }}{% endblock %}",
    "{{ 1 / 0 }}",
    "{{ range(10**9) }}",
    "{{ lipsum(100000) }}",
    "{% include 'x' %}",
)
#: Three that only a long computation comes to the end of.
LONG = (
    "{% set n = namespace(x=[1]) %}{% for i in range(50) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% set x = [1] * 1000000 %}{% for i in range(99999) %}{% if x == x[0:] %}{% endif %}{% endfor %}",
)


@pytest.mark.parametrize("source", COSTLY)
def test_what_would_go_on_for_ever_is_refused(source: str) -> None:
    with pytest.raises(InvalidRequest):
        ChatTemplate(source, "", "").render(CHATS[0], {})


@pytest.mark.slow
@pytest.mark.parametrize("source", LONG)
def test_what_goes_on_for_long_is_refused(source: str) -> None:
    with pytest.raises(TemplateTooCostly):
        ChatTemplate(source, "", "").render(CHATS[0], {})


def test_the_work_grows_with_what_is_given() -> None:
    chat = [{"role": "user", "content": "long " * 200_000}] * 40
    source = (TEMPLATES[0].parent / "qwen2.5.jinja").read_text()
    assert len(ChatTemplate(source, "", "").render(chat, {"tools": TOOLS})) > 40_000_000


def test_a_template_that_cannot_be_compiled_is_the_model_s_fault() -> None:
    for source in ("{% for %}", "{{ " + "(" * 5000 + ")" * 5000 + " }}", "x" * (1 << 21)):
        with pytest.raises(ModelUnsupported):
            ChatTemplate(source, "", "")


async def test_a_costly_template_is_a_400_and_the_conductor_goes_on(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        worker = FakeWorker("both-0", Role.BOTH, tmp_path)
        worker.card = {"chat_template": COSTLY[0]}
        cluster.workers.append(worker)
        await worker.start(cluster.discovery)
        await cluster.until(lambda: any(each.usable for each in cluster.registry.workers.values()))
        for _ in range(2):  # first in the event loop, then in a thread
            answer = await cluster.http.post("/v1/chat/completions", json={"messages": CHATS[0], "max_tokens": 4})
            assert answer.status_code == 400
            assert "cannot be rendered" in answer.json()["error"]["message"]
        assert (await cluster.http.get("/live")).status_code == 200


def test_the_size_of_values_is_looked_at_no_further_than_it_matters():
    assert is_within({"a": ["bc", 1]}, 11)
    assert not is_within({"a": ["bc", 1]}, 10)
    endless: list[object] = []
    endless.append(endless)
    assert not is_within(endless, 1000)


def test_variables_nested_too_deep_are_refused() -> None:
    nested: list = []
    for _ in range(3000):
        nested = [nested]
    with pytest.raises(InvalidRequest, match="refuses these messages"):
        ChatTemplate("{{ messages }}", "<s>", "</s>").render([], {"documents": nested})
