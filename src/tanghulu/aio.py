"""The store for asyncio: ``async with tanghulu.aio.connect("127.0.0.1:7400") as client``."""

from tanghulu.store.client.aio import AsyncClient, connect

__all__ = ["AsyncClient", "connect"]
