"""Record docs/pictures/session.svg: a real session with a cluster on the real model, as an animated drawing.

Usage: python tools/recording.py. What is shown was printed by the commands shown; only waits are shortened.
"""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

FILE = Path(__file__).parents[1] / "docs" / "pictures" / "session.svg"
COLUMNS = 130
PROMPT = "$ "
#: The longest wait that is kept, and how long the end stays, in seconds.
LONGEST_S, LAST_S = 1.2, 6.0
_LINE_PX, _CHARACTER_PX = 18, 7.9
COMMANDS = (
    "tanghulu chat --message 'What is the capital of France?' --temperature 0",
    "echo hello | tanghulu store put greeting -",
    "tanghulu store get greeting",
    "tanghulu store stat",
    "tanghulu status",
)
Line = tuple[float, str]


def session() -> Iterator[Line]:
    """(seconds since the beginning, line) of everything typed and printed."""
    program = Path(sys.executable).with_name("tanghulu")
    with tempfile.TemporaryDirectory(prefix="th-") as folder:
        path = f"{folder}:{os.environ['PATH']}"
        Path(folder, "tanghulu").symlink_to(program)
        environment = os.environ | {"PATH": path, "COLUMNS": str(COLUMNS), "TERM": "dumb"}
        up = subprocess.Popen(
            [program, "up", "--state-dir", f"{folder}/state"],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert up.stdout is not None
        began_s = time.monotonic()
        yield 0.0, PROMPT + "tanghulu up &"
        try:
            for line in up.stdout:
                yield time.monotonic() - began_s, line.rstrip()
                if "Ctrl-C ends everything" in line:
                    break
            threading.Thread(target=up.stdout.read, daemon=True).start()
            for command in COMMANDS:
                yield time.monotonic() - began_s, PROMPT + command
                done = subprocess.run(["/bin/bash", "-c", command], env=environment, capture_output=True, text=True)
                assert done.returncode == 0, done.stderr
                for line in done.stdout.rstrip().splitlines():
                    yield time.monotonic() - began_s, line.rstrip()
        finally:
            up.terminate()
            up.wait()


def shortened(lines: list[Line]) -> list[Line]:
    """The lines with waits of at most ``LONGEST_S``, without escape sequences, empty lines or what is too long."""
    shown: list[Line] = []
    at_s = before_s = 0.0
    for when_s, line in lines:
        at_s += min(when_s - before_s, LONGEST_S)
        before_s = when_s
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line)
        shown += [(at_s, text[at : at + COLUMNS]) for at in range(0, len(text), COLUMNS)]
    return shown


def drawn(lines: list[Line]) -> str:
    """The lines as an SVG in which each appears at its time, again and again."""
    whole_s = lines[-1][0] + LAST_S
    width, height = COLUMNS * _CHARACTER_PX + 28, _LINE_PX * (len(lines) + 2)
    rows = []
    for number, (at_s, _) in enumerate(lines):
        share = 100 * at_s / whole_s
        rows.append(
            f"@keyframes l{number} {{ 0%, {share:.2f}% {{ opacity: 0 }} {share + 0.01:.2f}%, 100% {{ opacity: 1 }} }}"
        )
        rows.append(f".l{number} {{ animation: l{number} {whole_s:.1f}s step-end infinite }}")
    style = "\n".join(rows)
    texts = "\n".join(
        f'<text class="l{number}{" typed" if text.startswith(PROMPT) else ""}" x="14" y="{_LINE_PX * (number + 2)}" '
        f'xml:space="preserve">{html.escape(text)}</text>'
        for number, (_, text) in enumerate(lines)
    )
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" role="img">
<title>A session: tanghulu up, a question, a chunk put and read, the cluster's status</title>
<style>
text {{ font: 13px ui-monospace, Menlo, Consolas, monospace; fill: #e8e4df }}
.typed {{ fill: #ff8a7a; font-weight: 600 }}
@media (prefers-reduced-motion: reduce) {{ text {{ animation: none !important }} }}
{style}
</style>
<rect width="100%" height="100%" rx="8" fill="#1b1a19"/>
{texts}
</svg>
"""


def main() -> None:
    """Record, and write the file."""
    text = drawn(shortened(list(session())))
    FILE.write_text(text)
    print(f"{FILE}: {len(text) >> 10} KiB")


if __name__ == "__main__":
    main()
