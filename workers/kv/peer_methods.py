"""The fast-lane methods of workers, by which one reads another's KV; numbers are told apart from the store's too."""

from __future__ import annotations

from tanghulu.protos import session_pb2
from tanghulu.rpc.methods import Method

EXPORT_PIN = Method(50, "export_pin", session_pb2.ExportPinRequest, session_pb2.ExportPinReply)
EXPORT_RELEASE = Method(51, "export_release", session_pb2.ExportReleaseRequest, session_pb2.ExportReleaseReply)
PREFIX_PIN = Method(52, "prefix_pin", session_pb2.PrefixPinRequest, session_pb2.ExportPinReply)
