"""The OpenAPI document, and what is behind it: bodies of its schemas get no 500 and no status that is not in it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tanghulu.conductor.http.app import docs_page
from tanghulu.conductor.http.openapi_document import BODIES, STREAMS
from tanghulu.conductor.inference.body import IGNORED, UNSUPPORTED
from tanghulu.conductor.route_rights import CONDUCTOR
from tanghulu.web.access import Need

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-9, 9) | st.text(max_size=4) | st.just(1 << 70),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)
NO_PROXY = {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
NAMES = sorted({*UNSUPPORTED, *IGNORED, *(name for body in BODIES.values() for name in body.model_fields), "bogus"})
LIMITS = {name for name in NAMES if name.endswith("_timeout")}
"""A request that gives itself next to no time gets its 504."""
DEFINITIONS = {body.__name__: body.model_json_schema(ref_template="{model}") for body in BODIES.values()}


def mostly(good: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """``good`` values, and now and then one of any kind."""
    return st.integers(0, 15).flatmap(lambda dice: ANYTHING if dice == 0 else good)


def values(schema: dict[str, Any], definitions: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values that a JSON schema allows, most of them small, and some that it does not."""
    if "$ref" in schema:
        return st.deferred(lambda: values(definitions[schema["$ref"]], definitions))
    if "anyOf" in schema:
        return st.one_of([values(one, definitions) for one in schema["anyOf"]])
    if "enum" in schema or "const" in schema:
        return mostly(st.sampled_from(schema.get("enum", [schema.get("const")])))
    kind = schema.get("type")
    if kind == "object":
        return mostly(_objects(schema, definitions))
    if kind == "array":
        items = values(schema.get("items", {}), definitions)
        return mostly(st.lists(items, min_size=schema.get("minItems", 0), max_size=4))
    if kind in ("integer", "number"):
        low, high = schema.get("minimum", -3), min(schema.get("maximum", 40), 40)
        number = st.integers(int(low), max(int(high), int(low)))
        most = st.just(schema.get("maximum", 1 << 63))
        return mostly(number | most if kind == "integer" else number | st.floats(0, 1))
    plain = {"string": st.text("ab{}() .\n\0é", min_size=1, max_size=8), "boolean": st.booleans(), "null": st.none()}
    return mostly(plain[kind]) if kind in plain else ANYTHING


def _objects(schema: dict[str, Any], definitions: dict[str, Any]) -> st.SearchStrategy[Any]:
    properties = {name: values(inner, definitions) for name, inner in schema.get("properties", {}).items()}
    required = {name: properties.pop(name) for name in schema.get("required", ())}
    if not properties and not required:
        return st.dictionaries(st.text(max_size=4), ANYTHING, max_size=3)
    some = st.sets(st.sampled_from(sorted(properties)), max_size=6) if properties else st.just(set())
    return some.flatmap(lambda chosen: st.fixed_dictionaries({**required, **{n: properties[n] for n in chosen}}))


def bodies(path: str) -> st.SearchStrategy[dict[str, Any]]:
    """Bodies for a route: of its schema, with now and then a field of another API."""
    schema = DEFINITIONS[BODIES[path].__name__]
    foreign = st.dictionaries(st.sampled_from(NAMES), ANYTHING, max_size=1)
    return st.tuples(_objects(schema, schema.get("$defs", {})), foreign).map(lambda pair: {**pair[0], **pair[1]})


async def _check(cluster, path: str, body: Any) -> None:
    if not cluster.workers:
        await cluster.add()
        cluster.document = (await cluster.http.get("/openapi.json")).json()
    response = await cluster.http.post(path, content=json.dumps(body))
    documented = cluster.document["paths"][path]["post"]["responses"]
    assert str(response.status_code) in documented, (body, response.text)
    assert response.status_code < 500 or (response.status_code == 504 and LIMITS & body.keys()), (body, response.text)
    if response.status_code != 200:
        error, of_anthropic = response.json()["error"], path.startswith("/v1/messages")
        assert set(error) == ({"message", "type", "details"} if of_anthropic else {"message", "type", "code", "param"})
        assert error["message"]
    if response.headers["content-type"].startswith("text/event-stream"):
        assert response.text.endswith(("data: [DONE]\n\n", 'data: {"type":"message_stop"}\n\n'))
    await cluster.until(lambda: cluster.dispatcher.num_requests == 0)


FUZZED = settings(
    deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@pytest.mark.parametrize("path", sorted(BODIES))
@settings(FUZZED, max_examples=15, derandomize=True)
@given(data=st.data())
async def test_no_500_and_no_status_that_is_not_documented(cluster, path, data):
    await _check(cluster, path, data.draw(bodies(path)))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", [*sorted(BODIES), "others"])
async def test_schemathesis_finds_nothing(cluster, path, tmp_path):
    """Its cases at the edges of every schema, and some at random: no 500, no status or type that is not documented.

    A 504 is what a client gets that gives its request no time.
    """
    pytest.importorskip("schemathesis", reason="extra: schemathesis is not installed")
    await cluster.add()
    chosen = f"^{path}$" if path != "others" else f"^(?!({'|'.join(BODIES)})$)"
    config = tmp_path / "schemathesis.toml"
    config.write_text('[checks]\nnot_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", 504]\n')
    command = [sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()"]
    command += ["--config-file", str(config), "run"]
    command += [f"http://{cluster.conductor.address}/openapi.json", "--phases", "coverage,fuzzing", "--seed", "1"]
    command += ["--max-examples", "20", "--include-path-regex", chosen, "--suppress-health-check", "all", "--no-color"]
    command += ["--checks", "not_a_server_error,status_code_conformance,content_type_conformance"]
    pipe, environment = asyncio.subprocess.PIPE, os.environ | NO_PROXY
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, env=environment, cwd=tmp_path)
    said, _ = await process.communicate()
    assert process.returncode == 0, said.decode()
    await cluster.until(lambda: cluster.dispatcher.num_requests == 0)


async def test_the_document_has_bodies_and_answers(cluster):
    document = (await cluster.http.get("/openapi.json")).json()
    schemas = document["components"]["schemas"]
    for path, body in BODIES.items():
        operation = document["paths"][path]["post"]
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        assert schema == {"$ref": f"#/components/schemas/{body.__name__}"}
        assert {"200", "400", "404", "408", "413", "415", "429", "503"} <= operation["responses"].keys()
    assert {"messages", "temperature"} <= schemas["ChatBody"]["properties"].keys()
    answers_422 = {path for path, each in document["paths"].items() for o in each.values() if "422" in o["responses"]}
    assert answers_422 == set(STREAMS), "FastAPI's own are answered with 400"
    told = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document)))
    assert told <= schemas.keys()


async def test_every_route_that_counts_for_a_key_says_that_it_may_have_had_its_share(cluster):
    document = (await cluster.http.get("/openapi.json")).json()
    counted = {path for path in document["paths"] if CONDUCTOR.of(path) is Need.INFERENCE}
    told = {path for path, each in document["paths"].items() if all("429" in one["responses"] for one in each.values())}
    assert counted == told
    assert "/v1/responses/{response_id}" in counted


async def test_the_page_asks_no_other_host(cluster):
    for path in ("/", "/docs"):
        response = await cluster.http.get(path)
        assert response.headers["content-type"].startswith("text/html")
        assert response.text == docs_page()
    assert not re.search(r"https?://|//[a-z]", docs_page())
