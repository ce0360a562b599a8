"""KV at other workers, which tests name as ``address|unix path``."""

from __future__ import annotations

from tanghulu.runtime.process import host_id
from tanghulu.session.outputs import KvSource, PrefixHolder
from tanghulu.types import InstanceId


def export_at(instance: str, export_id: int, num_tokens: int) -> KvSource:
    """An export of the worker ``instance``."""
    address, _, unix_path = instance.partition("|")
    return KvSource(InstanceId(address), address, unix_path, export_id, num_tokens, host_id())


def prefix_at(instance: str, num_blocks: int) -> PrefixHolder:
    """A prefix in the cache of the worker ``instance``."""
    address, _, unix_path = instance.partition("|")
    return PrefixHolder(address, unix_path, num_blocks, host_id())
