"""The display of ``tanghulu up``: one line per process during the start, then commands to try.

On a terminal it is a live display; elsewhere (a pipe, CI) plain lines, one per change.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any, Self, TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from tanghulu.runtime.telemetry import LossyStream

_WELCOME = """
[bold green]ready[/] {model} at {url}

  curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{{
    "model": "{model}", "stream": true, "temperature": 0,
    "messages": [{{"role": "user", "content": "What is a KV cache? Answer in two sentences."}}]}}'

  {program} chat --url {url}{chat}
  {program} status --master {master}{store}
  {url}/dashboard in a browser
{secure}
Ctrl-C ends everything."""

_SECURE = """
Each request shows the API key, and clients verify the certificates; with curl:
  -H "Authorization: Bearer $(cat {key})" --cacert {authority}
"""


class Board:
    """The live display; a context manager."""

    def __init__(self) -> None:
        terminal = sys.stdout  # a live display replaces it
        self.console = Console(file=cast(TextIO, LossyStream(lambda: terminal)))
        self._live = self.console.is_terminal  # until everything is ready; then changes are plain lines
        self._progress = Progress(
            SpinnerColumn(finished_text="[green]*"),
            TextColumn("{task.description:12}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[text]}"),
            TimeElapsedColumn(),
            console=self.console,
            disable=not self._live,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def add(self, name: str) -> None:
        self._tasks[name] = self._progress.add_task(name, total=1.0, text="waiting")

    def show(self, name: str, message: dict[str, Any]) -> None:
        text, fraction = _describe(message)
        self._progress.update(self._tasks[name], text=text, completed=fraction)
        if not self._live and message["event"] != "loading":
            self.say(f"{name:12} {text}")

    def stop(self) -> None:
        """Freeze the display: everything is ready."""
        self._progress.stop()
        self._live = False

    def say(self, text: str) -> None:
        """Print a separate line, above the display if it is live."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def _describe(message: dict[str, Any]) -> tuple[str, float]:
    match message["event"]:
        case "loading":
            return str(message["what"]), float(message["fraction"])
        case "ready":
            return f"ready at {message['address']}", 1.0
        case "failed":
            return f"failed: {message['message']}", 0.0
        case "exited":
            return f"exited with {message['code']}", 0.0
        case other:
            return str(other), 0.0


def program() -> str:
    """Return the command to type for this program: its name if on the PATH, else its path."""
    beside = Path(sys.executable).with_name("tanghulu")
    found = shutil.which("tanghulu")
    if found is not None and Path(found).resolve() == beside.resolve():
        return "tanghulu"
    here = Path.cwd()
    return str(beside.relative_to(here)) if beside.is_relative_to(here) else str(beside)


def welcome(
    board: Board, url: str, model: str, master: str, store_url: str, secure: tuple[Path, Path] | None = None
) -> None:
    """Report that the cluster serves, and what to try first.

    ``secure``: the files with the API key, and with the authority that verifies its certificates.
    """
    board.stop()
    files, chat = "", ""
    if secure is not None:
        key, authority = secure
        chat = f" --api-key @{key} --tls-ca {authority}"
        folder = key.parent
        files = _SECURE.format(key=key, authority=authority)
        master += f" --token @{folder}/operator.token --tls-ca {authority}"
        master += f" --tls-cert {folder}/certs/client.pem --tls-key {folder}/certs/client.key"
    store = f"\n  curl {store_url}/v1/stat" if store_url else ""
    board.console.print(
        _WELCOME.format(program=program(), url=url, model=model, master=master, store=store, chat=chat, secure=files),
        highlight=False,
        soft_wrap=True,
    )
