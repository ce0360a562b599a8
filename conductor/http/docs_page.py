"""The page at /docs: the routes and the fields of their bodies, and a form to try them.

It asks nobody but the conductor for anything, so it works where there is no internet.
"""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter
from starlette.responses import HTMLResponse

PAGE: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>tanghulu: HTTP API</title>
<meta name="viewport" content="width=device-width">
<style>
 body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
 details { border: 1px solid #ccc; border-radius: 4px; margin: .5rem 0; padding: .4rem .8rem }
 summary { cursor: pointer } code, pre, textarea { font: 13px/1.4 ui-monospace, monospace }
 b { display: inline-block; width: 4rem } td { padding: .1rem .8rem .1rem 0; vertical-align: top }
 textarea { width: 100%; height: 8rem } pre { background: #f5f5f5; padding: .6rem; overflow: auto; max-height: 30rem }
</style></head><body>
<h1>tanghulu: HTTP API</h1>
<p><a href="/openapi.json">openapi.json</a> · <a href="/v1/models">models</a> · <a href="/ready">ready</a> ·
<a href="/metrics">metrics</a></p>
<div id="routes">loading…</div>
<script>
const examples = {
  "/v1/chat/completions": {messages: [{role: "user", content: "What is a KV cache?"}], max_tokens: 64, stream: true},
  "/v1/completions": {prompt: "Once upon a time", max_tokens: 32},
  "/generate": {text: "Once upon a time", sampling_params: {max_new_tokens: 32}},
  "/tokenize": {prompt: "Once upon a time"}, "/detokenize": {tokens: [1, 2, 3]}, "/abort_request": {rid: "…"},
};
const make = (tag, text, ...inner) => {
  const e = document.createElement(tag); if (text) e.textContent = text; e.append(...inner); return e;
};
const kind = (s) => !s ? "" : s.$ref ? s.$ref.split("/").pop() : s.anyOf ? s.anyOf.map(kind).join(" | ")
  : s.enum ? s.enum.map((v) => JSON.stringify(v)).join(" | ") : s.const !== undefined ? JSON.stringify(s.const)
  : s.type === "array" ? "[" + kind(s.items) + "]" : s.type || "any";
const fields = (schema) => make("table", "", ...Object.entries(schema.properties || {}).map(([name, s]) =>
  make("tr", "", make("td", "", make("code", name)), make("td", kind(s)),
       make("td", (schema.required || []).includes(name) ? "required" : ""))));
async function send(method, path, body, out) {
  out.textContent = "";
  const init = {method, headers: body ? {"content-type": "application/json"} : {}, body: body || undefined};
  try {
    const answer = await fetch(path, init), reader = answer.body.getReader(), text = new TextDecoder();
    out.textContent = answer.status + " " + (answer.headers.get("warning") || "") + "\\n";
    for (let piece; !(piece = await reader.read()).done;)
      out.textContent += text.decode(piece.value, {stream: true});
  } catch (error) { out.textContent = String(error); }
}
function route(path, method, operation, schemas) {
  const out = make("pre"), button = make("button", "send"), area = make("textarea");
  const title = make("summary", "", make("b", method.toUpperCase()), make("code", path));
  title.append(" " + (operation.description || ""));
  const parts = [title];
  const content = operation.requestBody && operation.requestBody.content["application/json"];
  if (content) {
    const schema = schemas[content.schema.$ref.split("/").pop()];
    area.value = JSON.stringify(examples[path] || {}, null, 1);
    parts.push(fields(schema), area);
  }
  button.onclick = () => send(method.toUpperCase(), path, content ? area.value : "", out);
  if (!path.includes("{")) parts.push(make("p", "", button), out);
  return make("details", "", ...parts);
}
fetch("/openapi.json").then((r) => r.json()).then((api) => {
  const all = [];
  for (const [path, operations] of Object.entries(api.paths))
    for (const [method, operation] of Object.entries(operations))
      all.push(route(path, method, operation, api.components.schemas));
  document.getElementById("routes").replaceChildren(...all);
});
</script></body></html>
"""


def router() -> APIRouter:
    """The routes of the page."""
    api = APIRouter(include_in_schema=False)

    @api.get("/")
    @api.get("/docs")
    async def docs() -> HTMLResponse:
        """The page."""
        return HTMLResponse(PAGE)

    return api
