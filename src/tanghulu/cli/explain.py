"""``tanghulu explain``: where a request's prompt tokens came from, and why the others were computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import quote

import click
import httpx
from rich.console import Console
from rich.text import Text

from tanghulu.cli.chat import error_of
from tanghulu.cli.printing import print_json, wide_console
from tanghulu.errors import NodeUnavailable
from tanghulu.runtime.config import PREFIX
from tanghulu.runtime.master_options import TLS_CA_HELP, HttpClientOptions
from tanghulu.types import parse_url, printable

_ANSWER_S: Final = 10.0
_BAR_CHARACTERS: Final = 64
#: By source or cause: the character and the colour in the bar, and the words for it.
_SHOWN: Final = {
    "worker": ("█", "green", "in the worker's own cache"),
    "peer": ("█", "cyan", "loaded from another worker"),
    "store": ("█", "blue", "loaded from the store's memory"),
    "ssd": ("█", "magenta", "loaded from the store's SSD"),
    "new": ("n", "white", "new: nobody has requested this before"),
    "diverged": ("d", "red", "differs from an earlier prompt"),
    "evicted": ("e", "yellow", "evicted"),
    "not_kept": ("k", "yellow", "requested before, but not kept"),
    "other_name": ("o", "yellow", "cached under another name"),
    "load_failed": ("f", "red", "could not be loaded"),
    "not_worth_fetching": ("w", "white", "elsewhere, and faster to compute"),
    "tail": ("·", "bright_black", "the tail, which is always computed"),
}


def bar(runs: list[dict[str, Any]], num_tokens: int) -> Text:
    """Return a bar of the whole prompt, with at least one character a run."""
    text = Text()
    for run in runs:
        character, style, _ = _SHOWN[run.get("source") or run["cause"]]
        text.append(character * max(1, round(_BAR_CHARACTERS * run["tokens"] / num_tokens)), style)
    return text


def lines_of(run: Mapping[str, Any]) -> list[Text]:
    """Return the lines about one run: its tokens, what happened to them, and the text around a break."""
    name, detail = run.get("source") or run["cause"], run.get("detail", {})
    _, style, words = _SHOWN[name]
    lines = [Text.assemble(f"{run['start']:>7} +{run['tokens']:<6} ", (words, style), _about(name, detail))]
    if not run.get("certain", True):
        lines[0].append("  (not certain)", "bright_black")
    if "ours" in detail:
        for side in ("ours", "theirs"):
            quoted = [repr(printable(detail[part]))[1:-1] for part in ("before", side)]
            label = "this prompt" if side == "ours" else "earlier one"
            lines.append(Text.assemble(f"{'':16}{label}: …{quoted[0]}", (quoted[1], "bold red"), "…"))
    return lines


def _about(name: str, detail: Mapping[str, Any]) -> str:
    match name:
        case "diverged" if "token" in detail:
            place = f"message {detail['message']}" if detail.get("message") is not None else "text before the messages"
            kind = f" ({detail['kind']})" if detail.get("kind") in ("date", "reasoning") else ""
            return f" at token {detail['token']}" + (f", in {place}{kind}" if "message" in detail else "")
        case "diverged":
            return f" in block {detail['block']}"
    return "".join(f", {key} {value}" for key, value in detail.items())


def _show(story: Mapping[str, Any], console: Console) -> None:
    cache, names = story.get("cache"), f"{story['id']}  {story['name']}"
    if cache is None:
        console.print(f"{names}: nothing to explain; its prompt was not computed, or --explain-memory is 0")
        return
    runs, total = cache["runs"], cache["prompt_tokens"]
    cached = sum(run["tokens"] for run in runs if "source" in run)
    console.print(Text(printable(f"{names}  {story['model']}: {cached} of {total} prompt tokens cached"), "bold"))
    console.print(bar(runs, total))
    for run in runs:
        for line in lines_of(run):
            console.print(line)


@click.command("explain")
@click.argument("request_id")
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="the conductor's HTTP address")
@click.option("--api-key", default="", envvar=PREFIX + "API_KEY", help="API key for a conductor with --api-keys")
@click.option("--tls-ca", default="", envvar=PREFIX + "TLS_CA", metavar="FILE", help=TLS_CA_HELP)
@click.option("--json", "as_json", is_flag=True, help="print JSON for programs")
def COMMAND(request_id: str, url: str, api_key: str, tls_ca: str, as_json: bool) -> None:
    """Show where a request's prompt tokens came from, and why others were computed.

    REQUEST_ID is that of the answer, its x-request-id or its trace id. The conductor knows the last thousand requests.
    """
    options = HttpClientOptions(api_key=api_key, tls_ca=tls_ca)
    address = f"{parse_url(url, path=True)}/debug/requests/{quote(request_id, safe='')}"
    try:
        response = httpx.get(
            address, headers=options.shown, verify=options.verified_by, timeout=_ANSWER_S, trust_env=False
        )
    except httpx.HTTPError as error:
        raise NodeUnavailable(f"the conductor at {url} does not answer: {error}; is `tanghulu up` running?") from error
    if response.status_code != httpx.codes.OK:
        raise error_of(response)
    stories = response.json()["requests"]
    if as_json:
        print_json([story.get("cache") for story in stories])
        return
    for story in stories:
        _show(story, wide_console())
