"""Measurements, room by room as the code is; run one from a clone: ``python -m benchmarks.store.store_bench``."""
