"""Runs in SGLang's environment: SGLang's own backend of Mooncake's store, under SGLang's own controller.

The argument is the master's address. Prints, as JSON, what two controllers with a pool each have saved, found and
loaded, and whether the bytes are the same.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "engines" / "sglang"))

import stand_ins

stand_ins.install()

import controller as real  # noqa: E402

MASTER, TENANT = sys.argv[1], sys.argv[2]
PAGES = 8
EXTRA = {
    "master_server_address": MASTER,
    "metadata_server": "P2PHANDSHAKE",
    "local_hostname": "localhost",
    "global_segment_size": 0,
    "protocol": "tcp",
    "tenant_id": TENANT,
    "enable_ssd_offload": True,
}


def round_trip(layout: str) -> dict[str, object]:
    """Pages leave one pool and come into other places of another."""
    first, second = real.host_pool(layout), real.host_pool(layout)
    tokens = list(range(PAGES * real.PAGE_TOKENS))
    with real.attached(first, MASTER, backend="mooncake", **EXTRA) as one:
        before = len(real.find(one, tokens))
        saved = real.save(one, tokens, list(range(PAGES)))
        with real.attached(second, MASTER, backend="mooncake", **EXTRA) as two:
            names, moved = real.find(two, tokens), list(range(15, 7, -1))
            loaded = real.load(two, names, moved)
        pairs = zip(range(PAGES), moved, strict=True)
        same = [bool((real.contents(first, at) == real.contents(second, to)).all()) for at, to in pairs]
        backend = one.storage_backend
        backend.clear()
        after = len(real.find(one, tokens))
    return {
        "backend": type(backend).__name__,
        "counts": [before, saved, len(names), loaded, after],
        "same": all(same),
    }


if __name__ == "__main__":
    print("\nanswer " + json.dumps([round_trip(layout) for layout in ("page_first", "page_first_direct")]))
