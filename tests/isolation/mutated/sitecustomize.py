"""Removes a rule at each entry point of the processes that have this folder in PYTHONPATH: see ``test_isolation``."""

from __future__ import annotations

from types import SimpleNamespace

from tanghulu.auth.api_keys import KeyRight
from tanghulu.conductor import route_rights
from tanghulu.conductor.grpc_api import servicer
from tanghulu.conductor.inference.service import Service
from tanghulu.conductor.peers import wire
from tanghulu.conductor.routing_service import grpc_api
from tanghulu.discovery import membership
from tanghulu.runtime.metrics_server import MetricsAuthorizer
from tanghulu.session import messages
from tanghulu.store.gateway.gateway import Gateway
from tanghulu.store.protocol import methods
from tanghulu.transfer_engine.core import access
from tanghulu.web.access import Need
from tanghulu.workers.kv import peer_methods

for _rule in (
    methods.EVICT.rule,
    methods.ANNOUNCE.rule,
    membership.REGISTER.rule,
    peer_methods.EXPORT_PIN.rule,
    messages.DESCRIBE.rule,
    wire.FOLLOW.rule,
):
    object.__setattr__(_rule, "right", None)
object.__setattr__(methods.EXISTS.rule, "scope", None)
servicer.RIGHTS["/tanghulu.v1.Inference/Abort"] = None
grpc_api.RIGHTS["/tanghulu.v1.Router/ReportLoad"] = KeyRight.INFERENCE
_abort = Service.abort
Service.abort = lambda self, call_id, key=None: _abort(self, call_id)  # type: ignore[method-assign]
route_rights.CONDUCTOR.table["/debug/requests"] = Need.ANY_KEY
route_rights.POOL_ROUTER.table["/pools"] = Need.ANY_KEY
route_rights.ROUTING_SERVICE.table["/workers"] = Need.INFERENCE
Gateway.credentials_of = lambda self, request: self.config.master.credentials  # type: ignore[method-assign]
access.hmac = SimpleNamespace(compare_digest=lambda secret, shown: True)  # type: ignore[attr-defined]
MetricsAuthorizer.admit = lambda self, authorization: None  # type: ignore[method-assign]
