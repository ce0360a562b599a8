"""Generate the committed protobuf code from protos/*.proto, or check that it is up to date (``--check``)."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

PROTOS = Path(__file__).parent


def generate(out: Path) -> list[Path]:
    """Write *_pb2.py, *_pb2.pyi and *_pb2_grpc.py under ``out``/tanghulu/protos; returns them."""
    sources = sorted(PROTOS.glob("*.proto"))
    services = [f"tanghulu/protos/{s.name}" for s in sources if "\nservice " in s.read_text()]
    messages = [f"tanghulu/protos/{s.name}" for s in sources]
    base = [sys.executable, "-m", "grpc_tools.protoc", f"-Itanghulu/protos={PROTOS}"]
    subprocess.run([*base, f"--python_out={out}", f"--pyi_out={out}", *messages], check=True, cwd=PROTOS.parent)
    subprocess.run([*base, f"--grpc_python_out={out}", *services], check=True, cwd=PROTOS.parent)
    return sorted((out / "tanghulu" / "protos").iterdir())


def main() -> int:
    """Regenerate in place; with --check only compare, and fail if anything differs."""
    check = "--check" in sys.argv[1:]
    with tempfile.TemporaryDirectory() as scratch:
        fresh = generate(Path(scratch))
        stale = [f.name for f in fresh if not _same(PROTOS / f.name, f)]
        extra = {p.name for p in PROTOS.glob("*_pb2*")} - {f.name for f in fresh}
        if check:
            for name in [*stale, *sorted(extra)]:
                print(f"protos/{name} is not what protos/*.proto say: run `make protos`", file=sys.stderr)
            return 1 if stale or extra else 0
        for file in fresh:
            (PROTOS / file.name).write_bytes(file.read_bytes())
        for name in extra:
            (PROTOS / name).unlink()
        print(f"{len(fresh)} files, {len(stale)} changed")
    return 0


def _same(old: Path, new: Path) -> bool:
    return old.exists() and old.read_bytes() == new.read_bytes()


if __name__ == "__main__":
    sys.exit(main())
