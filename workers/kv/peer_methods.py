"""The methods of workers and what a caller's token has to allow; the fast lane's, by which one worker reads another's
KV, have numbers apart from the store's.
"""

from __future__ import annotations

from tanghulu.auth.tenants import Right
from tanghulu.protos import session_pb2
from tanghulu.rpc import methods as rpc
from tanghulu.rpc.methods import Method, Rule
from tanghulu.transfer_engine.core.segment import SegmentHello, SegmentWelcome


def _of_the_cluster(name: str) -> Rule:
    """What a method needs that is for processes of the cluster only."""
    return Rule(name, Right.JOIN)


HELLO = Method(rpc.HELLO.number, rpc.HELLO.name, SegmentHello, SegmentWelcome)
EXPORT_PIN = Method(
    50, "export_pin", session_pb2.ExportPinRequest, session_pb2.ExportPinReply, _of_the_cluster("export_pin")
)
EXPORT_RELEASE = Method(
    51,
    "export_release",
    session_pb2.ExportReleaseRequest,
    session_pb2.ExportReleaseReply,
    _of_the_cluster("export_release"),
)
PREFIX_PIN = Method(
    52, "prefix_pin", session_pb2.PrefixPinRequest, session_pb2.ExportPinReply, _of_the_cluster("prefix_pin")
)
EXPORT_WATCH = Method(
    53, "export_watch", session_pb2.ExportWatchRequest, session_pb2.ExportWatchReply, _of_the_cluster("export_watch")
)

#: By full method name: what gRPC's calls of a worker need.
WORKER_GRPC_RULES = {
    f"/tanghulu.v1.Worker/{name}": _of_the_cluster(name) for name in ("Describe", "DropCache", "Drain", "Probe")
}
