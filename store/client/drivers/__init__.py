"""The drivers of the client's logic: one with blocking sockets, one on asyncio."""
