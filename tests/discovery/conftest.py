"""The contract's three sources. A source makes discoveries, and processes that register and are killed."""

from __future__ import annotations

import sys
from pathlib import Path

# The master for tests lives beside the master's own.
sys.path.insert(0, str(Path(__file__).parent.parent / "master"))
