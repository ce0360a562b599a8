"""UCX through NIXL's Python API: an optional extra."""
