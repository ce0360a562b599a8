"""The client of the store: put and get chunks of bytes from any process."""

from tanghulu.store.checksums import Checksums
from tanghulu.store.client.chunk import Chunk
from tanghulu.store.client.client import Client, connect
from tanghulu.store.client.model import ChunkInfo, KeyInfo, NodeView, PutItem, Status

__all__ = ["Checksums", "Chunk", "ChunkInfo", "Client", "KeyInfo", "NodeView", "PutItem", "Status", "connect"]
