"""The tables of the docs, written from the kept results, so that no figure there was typed by hand.

    python -m benchmarks.common.doc_tables            # write them anew
    python -m benchmarks.common.doc_tables --check    # fail if they differ from what is kept (part of ``make check``)

A table stands between ``<!-- table NAME -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks.common.report import RESULTS, ROOT

PAGES = (ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "engines" / "vllm.md")
SIZES = ("4KiB", "64KiB", "1MiB", "16MiB", "256MiB")
BATCH_OF = 32
_TABLE = re.compile(r"(<!-- table ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_STORES = ("tanghulu shm", "tanghulu tcp", "mooncake", "redis")

Row = dict[str, Any]


def kept(name: str) -> Row | None:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def figure(us: float) -> str:
    """Three digits or a few more: 18.6, 232, 14,304."""
    return f"{us:,.0f}" if us >= 100 else f"{us:.1f}"


def spaced(size: str) -> str:
    return size.replace("KiB", " KiB").replace("MiB", " MiB")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]]) + "\n"


def _store_row(size: str, label: str, of: dict[str, Row]) -> list[str]:
    p50 = {who: row["p50_us"] for who, row in of.items()}
    cpu = {who: row["client_cpu_us"] + row["server_cpu_us"] for who, row in of.items()}
    ours = [p50[who] / p50["mooncake"] for who in _STORES[:2]]
    return [
        size,
        label,
        *(figure(p50[who]) for who in _STORES),
        *(f"{ratio:.2f}" for ratio in ours),
        *(f"{cpu[who]:,.0f}" for who in ("tanghulu shm", "mooncake")),
    ]


def _by_operation(record: Row) -> dict[str, dict[str, Row]]:
    operations: dict[str, dict[str, Row]] = {}
    for row in record["rows"]:
        operations.setdefault(row["op"], {})[row["who"]] = row
    return operations


def store() -> str:
    rows = []
    for size in SIZES:
        for name, label in ((f"store_compare-{size}", "{}"), (f"store_compare-{size}-batch", "{}, 32 keys")):
            operations = _by_operation(kept(name) or {"rows": []})
            rows += [
                _store_row(spaced(size), label.format(op), of) for op, of in operations.items() if "mooncake" in of
            ]
    for op, of in _by_operation(kept("store_compare-exists") or {"rows": []}).items():
        if "mooncake" in of:
            rows.append(_store_row("", {"exists_many": "exists, 1,000 keys"}.get(op, op), of))
    started = _by_operation(kept("store_compare-start") or {"rows": []}).get("start", {})
    if started:
        seconds = {who: row["p50_us"] / 1e6 for who, row in started.items()}
        cells = [f"{seconds[who]:.2f}" for who in ("tanghulu", "mooncake", "redis")]
        rows.append(["", "start-up, s", cells[0], "", *cells[1:], f"{seconds['tanghulu'] / seconds['mooncake']:.2f}"])
        rows[-1] += ["", "", ""]
    head = ("size", "call", "tanghulu shm", "tanghulu tcp", "Mooncake", "redis")
    return table((*head, "shm : Mooncake", "tcp : Mooncake", "CPU: shm", "CPU: Mooncake"), rows)


def store_limits() -> str:
    rows = []
    for size in SIZES:
        of = _by_operation(kept(f"store_compare-{size}") or {"rows": []}).get("limit", {})
        if of:
            rows.append(
                [spaced(size), *(figure(of[who]["p50_us"]) for who in ("memcpy", "stream", "stream_up", "echo"))]
            )
    return table(("size", "memmove", "plain stream down", "up", "echo of 100 B"), rows)


def transfer() -> str:
    rows = []
    for size in SIZES:
        record = kept(f"transfer-{size}") or {"rows": []}
        of = {(row["who"], row["op"], row["callers"]): row for row in record["rows"]}
        order = ("memmove", "tanghulu shm", "NIXL shm", "one stream", "tanghulu tcp")
        known = {who for who, _, _ in of}
        for who in sorted(known, key=lambda who: (order.index(who) if who in order else len(order), who)):
            rows.append(
                [spaced(size), who, *(cell for op in ("READ", "WRITE") for cell in _transfer_cells(of, who, op))]
            )
    head = ("READ us", "READ GB/s", "CPU s/GB", "WRITE us", "WRITE GB/s", "CPU s/GB")
    return table(("size", "", *head), rows)


def _transfer_cells(of: dict[tuple[str, str, int], Row], who: str, op: str) -> list[str]:
    callers = sorted(number for name, kind, number in of if (name, kind) == (who, op))
    one = of[who, op, callers[0]]
    rates = " / ".join(f"{of[who, op, number]['gb_s']:.2f}" for number in callers)
    return [figure(one["p50_us"]), rates, f"{one['mover_cpu_s_per_gb']:.2f} + {one['owner_cpu_s_per_gb']:.2f}"]


def _loads(prefix: str) -> str:
    """Load averages, dates and rounds of the runs behind a table."""
    names = sorted(path.stem for path in RESULTS.glob(f"{prefix}-*.json"))
    names.sort(key=lambda name: (*(name.count(size) == 0 for size in SIZES), name))
    rows = []
    for name in names:
        record = kept(name)
        assert record is not None, "it was just listed"
        rounds = max((row.get("rounds", 1) for row in record["rows"]), default=0)
        rows.append([name.removeprefix(f"{prefix}-"), record["date"], str(rounds), f"{record['load_average'][0]:.1f}"])
    return table(("run", "date", "rounds", "load average"), rows)


_CONNECTORS = {
    "none": "none",
    "tanghulu": "`TanghuluConnector`",
    "tanghulu-tier": "offloading, `TanghuluTier`",
    "vllm-files": "offloading, files in memory (`fs`)",
    "lmcache": "LMCache's server",
    "mooncake": "Mooncake's store",
}


def connectors() -> str:
    rows = []
    record = kept("connectors") or {"summary": [], "left_out": {}}
    names = ("cold_s", "other_s", "other_s_of_cold", "cold_cpu_s", "other_cpu_s", "other_cpu_s_of_cold")
    for row in record["summary"]:
        rows.append(
            [
                _CONNECTORS[row["connector"]],
                *(f"{row[name]:.2f}" if name in row else "–" for name in names),
                f"{row['cached_tokens']:.0f}" if "cached_tokens" in row else "–",
                " / ".join(f"{value:.0f}" for value in row["cpu_s"]),
                " / ".join(f"{value:.1f}" for value in row["servers_cpu_s"]),
                "–" if row["held_mb"] is None else f"{row['held_mb']:.0f}",
            ]
        )
    # Why, the kept file says.
    rows += [[_CONNECTORS[name], "left out", *[""] * 9] for name in record["left_out"]]
    head = (
        "connector",
        "cold, s",
        "other process, s",
        "ratio",
        "cold, CPU s",
        "other, CPU s",
        "ratio",
        "tokens cached",
    )
    return table((*head, "CPU s of each process", "of the servers", "MB kept"), rows)


def connectors_cold() -> str:
    record = kept("connectors_cold") or {"summary": {}, "rows": []}
    shown = {"ttft_cpu_s": "to the first token", "whole_cpu_s": "until all is saved"}
    rows = [
        [shown[name], f"{line['without']:.2f}", f"{line['with']:.2f}", f"{line['ratio']:.3f}"]
        for name, line in record["summary"].items()
    ]
    num_each = len(record["rows"]) // 2
    return table((f"CPU seconds, medians of {num_each} prompts each", "without", "with the connector", "ratio"), rows)


TABLES: dict[str, Callable[[], str]] = {
    "connectors": connectors,
    "connectors-cold": connectors_cold,
    "store": store,
    "store-limits": store_limits,
    "store-runs": lambda: _loads("store_compare"),
    "transfer": transfer,
    "transfer-runs": lambda: _loads("transfer"),
}


def written(page: str) -> str:
    return _TABLE.sub(lambda found: found[1] + TABLES[found[2]]() + found[3], page)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    is_check = parser.parse_args().check
    failed = False
    for page in PAGES:
        before = page.read_text()
        after = written(before)
        if is_check and before != after:
            name = page.relative_to(ROOT)
            text = f"{name} differs from benchmarks/results: run `python -m benchmarks.common.doc_tables`"
            print(text, file=sys.stderr)
            failed = True
        elif not is_check:
            page.write_text(after)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
