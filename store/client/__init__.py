"""The client of the store: put and get chunks of bytes from any process."""

from tanghulu.store.client.chunk import Chunk
from tanghulu.store.client.client import Client, connect
from tanghulu.store.client.model import KeyInfo, NodeView, PutItem, Status
from tanghulu.store.protocol.checksums import Checksums
from tanghulu.store.protocol.messages import ChunkInfo

__all__ = ["Checksums", "Chunk", "ChunkInfo", "Client", "KeyInfo", "NodeView", "PutItem", "Status", "connect"]
