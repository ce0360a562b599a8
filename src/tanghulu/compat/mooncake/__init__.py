"""Mooncake's Python store API over tanghulu's store.

Programs that import ``mooncake.store`` use it unchanged with the folder printed by ``python -m
tanghulu.compat.mooncake`` at the front of PYTHONPATH.
"""
