"""Take the pictures of docs/pictures/: dashboards of a conductor and of a store alone, of real clusters under load.

Usage: python tools/pictures.py [dashboard] [store]. Needs Debian's chromium. Each is taken 1280 and 390 pixels wide,
light and dark.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
from playwright.sync_api import sync_playwright

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
LOAD_S = 75.0
NUM_CLIENTS = 6


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


@contextlib.contextmanager
def running(url: str, *words: str) -> Iterator[None]:
    """The command until the block ends, from when it is ready."""
    with subprocess.Popen([sys.executable, "-m", "tanghulu", *words], stdout=subprocess.DEVNULL) as process:
        try:
            until_s = time.monotonic() + 120
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    if httpx.get(f"{url}/ready", trust_env=False).status_code == 200:
                        break
                assert process.poll() is None, f"{words} ended"
                assert time.monotonic() < until_s, f"{words} is not ready"
                time.sleep(0.2)
            yield
        finally:
            process.terminate()


@contextlib.contextmanager
def under_load(ask: Callable[[httpx.Client, random.Random], None]) -> Iterator[None]:
    """Several clients that call ``ask`` all the time, for a while before the block and inside it."""
    ended = threading.Event()

    def client(number: int) -> None:
        chosen = random.Random(number)
        with httpx.Client(trust_env=False, timeout=60) as http:
            while not ended.is_set():
                ask(http, chosen)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(NUM_CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def photograph(url: str, name: str, ready: str) -> None:
    """All four pictures, after the page was watched for ``LOAD_S``."""
    with sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=flags)
        watching = browser.new_page()
        watching.goto(url)
        watching.wait_for_selector(ready)
        time.sleep(LOAD_S)
        for scheme in ("light", "dark"):
            for width in (1280, 390):
                context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)  # type: ignore[arg-type]
                page = context.new_page()
                page.goto(url)
                page.wait_for_selector(ready)
                time.sleep(2)
                page.screenshot(path=FOLDER / f"{name}-{scheme}-{width}.png", full_page=True)
                context.close()
        browser.close()


def dashboard(folder: Path) -> None:
    """Of a conductor with mock workers."""
    port, master = free_port(), free_port()
    url = f"http://127.0.0.1:{port}"
    words = ("up", "--engine", "mock", "--model", "mock", "--debug", "mock_speedup=2")
    words += ("--prefill", "2", "--decode", "2")
    ports = ("--port", str(port), "--master-port", str(master), "--state-dir", str(folder / "state"))

    def ask(http: httpx.Client, chosen: random.Random) -> None:
        prompt = f"{'a system prompt that many share ' * 60}{chosen.randrange(8)} {chosen.random()}"
        body = {"prompt": prompt, "max_tokens": chosen.randrange(20, 200)}
        http.post(f"{url}/v1/completions", json=body)
        time.sleep(chosen.random())

    with running(url, *words, "--nodes", "2", *ports), under_load(ask):
        photograph(f"{url}/dashboard", "dashboard", "#workers table")


def store(folder: Path) -> None:
    """Of a store alone: a master, two nodes of which one has an SSD tier, and the gateway."""
    port, master = free_port(), free_port()
    url, where = f"http://127.0.0.1:{port}", ("--master", f"127.0.0.1:{master}")

    def ask(http: httpx.Client, chosen: random.Random) -> None:
        key = f"{url}/v1/values/demo/{min(int(chosen.expovariate(1 / 150)), 2000)}"
        if http.get(key).status_code == 404:
            http.put(key, content=os.urandom(chosen.randrange(1 << 12, 1 << 19)))
        time.sleep(0.05 * chosen.random())

    with contextlib.ExitStack() as parts:
        commands = [("master", "--port", str(master)), ("node", "--port", "0", "--memory", "64MiB", *where)]
        commands.append((*commands[1], "--ssd-path", str(folder), "--ssd-size", "256MiB"))
        for words in commands:
            process = subprocess.Popen([sys.executable, "-m", "tanghulu", *words], stdout=subprocess.DEVNULL)
            parts.callback(process.wait)
            parts.callback(process.terminate)
        parts.enter_context(running(url, "store", "serve", "--port", str(port), *where))
        parts.enter_context(under_load(ask))
        photograph(f"{url}/dashboard", "store", "#nodes table")


def main() -> None:
    """Take those that are named, or all."""
    for name, take in (("dashboard", dashboard), ("store", store)):
        if name in (sys.argv[1:] or (name,)):
            with tempfile.TemporaryDirectory(prefix="th-") as folder:
                take(Path(folder))


if __name__ == "__main__":
    main()
