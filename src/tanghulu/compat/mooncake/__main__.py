"""``python -m tanghulu.compat.mooncake``: print the folder that provides ``mooncake.store``, for PYTHONPATH."""

from pathlib import Path

if __name__ == "__main__":
    print(Path(__file__).parent / "shim")
