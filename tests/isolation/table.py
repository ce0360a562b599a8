"""The table: a row for each method of each entry point. A method without a row fails ``test_isolation``.

A row says what a caller needs, and how to make the call in a way that names something of tenant acme's (the first
target) or something that does not exist (the second).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from google.protobuf.message import Message

from tanghulu.conductor.peers import wire as peers
from tanghulu.discovery import membership
from tanghulu.discovery.instance_wire import InstanceEntry
from tanghulu.protos import (
    inference_pb2,
    router_pb2,
    store_pb2,
)
from tanghulu.rpc import methods as rpc_methods
from tanghulu.rpc.methods import PROTOCOL_VERSION
from tanghulu.session import messages as session
from tanghulu.store.protocol import directory_messages as d
from tanghulu.store.protocol import messages as m
from tanghulu.store.protocol import methods as store
from tanghulu.store.protocol.announcements import NodeAnnouncement
from tanghulu.store.protocol.checksums import NO_CHECKSUMS
from tanghulu.store.protocol.directory_events import EventsRequest
from tanghulu.store.protocol.types import ClientCommit, NewChunk
from tanghulu.types import ChunkKey
from tanghulu.workers.kv import peer_methods as worker
from tests.isolation.world import Answer, Caller, World, data, fast, http, rpc, unix


class Needs(Enum):
    """What a caller needs to be served."""

    NOTHING = "nothing"  # probes
    KNOWN = "a token or key"  # whoever is known gets an answer, which tells nothing of others
    OWN = "a token or key, and the thing must be its own"
    OPERATOR = "a right that only operators have"
    SECRET = "the secret of a session, which only its client has"


@dataclass(frozen=True)
class Row:
    """One method. ``target`` names the kind of thing that is named in the call; "" names nothing."""

    point: str
    method: str
    needs: Needs
    call: Callable[[World, Caller, str], Answer]
    target: str = ""

    def __str__(self) -> str:
        return f"{self.point} {self.method}"


#: Names of things that do not exist, by kind; ``World.victims`` has those of acme's.
ABSENT = {
    "": "",
    "key": "no-such-thing-key",
    "scoped": "@acme/no-such-thing-key",
    "lease": str((1 << 40) + 7),
    "node": "node-no-such",
    "request": "no-such-thing-request",
    "response": "resp_00000000000000000000000000000000",
    "worker": "no-such-worker",
    "export": str((1 << 40) + 9),
}


def chunk(key: str) -> NewChunk:
    """Three bytes to be put."""
    return NewChunk(ChunkKey(key), 7, 3, NO_CHECKSUMS)


def _fast(role: str, method: Any, request: Callable[[World, str], Any]) -> Callable[[World, Caller, str], Answer]:
    return lambda world, caller, target: fast(world, caller, world.address(role), method, request(world, target))


def fast_rows() -> Iterator[Row]:
    """Of the fast lane: nodes, masters, workers, and conductors among themselves."""
    for role in ("master", "node", "prefill", "decode", "peers"):
        hello = m.NodeHello(PROTOCOL_VERSION, client_id="x")
        yield Row(f"fast lane of {role}", "hello", Needs.KNOWN, _fast(role, rpc_methods.HELLO, lambda *_, h=hello: h))

    def of(role: str, needs: Needs, method: Any, request: Callable[[World, str], Any], target: str = "") -> Row:
        suffix = f" ({target})" if target else ""
        return Row(f"fast lane of {role}", method.name + suffix, needs, _fast(role, method, request), target)

    own, operator, known = Needs.OWN, Needs.OPERATOR, Needs.KNOWN
    for kind in ("key", "scoped"):
        yield of("node", own, store.PUT, lambda w, t: m.PutRequest([chunk(t)], False, 1000), kind)
        yield of("node", own, store.RESERVE, lambda w, t: m.ReserveRequest([chunk(t)], 0), kind)
        yield of("node", own, store.GET, lambda w, t: m.GetRequest([t], 1 << 16), kind)
        yield of("node", own, store.EXISTS, lambda w, t: m.KeysRequest([t]), kind)
        yield of("node", own, store.REMOVE, lambda w, t: m.RemoveRequest([t]), kind)
        yield of("node", own, store.CHUNK_STAT, lambda w, t: m.KeysRequest([t]), kind)
        yield of("master", own, store.LOCATE, lambda w, t: m.LocateRequest([t], False), kind)
        yield of("master", own, store.LIST_KEYS, lambda w, t: d.ListKeysRequest(t), kind)
        yield of("master", own, store.COMMIT_KEYS, lambda w, t: m.CommitKeysRequest([_commit(w, t)]), kind)
        yield of("master", own, store.EVENTS, lambda w, t: EventsRequest(t), kind)
        yield of("master", own, store.WAIT, lambda w, t: d.WaitRequest([t]), kind)
        yield of("master", own, store.REPLICATE, lambda w, t: d.ReplicateRequest([t], 2, 1.0), kind)
    yield of("node", own, store.COMMIT, lambda w, t: m.CommitRequest([], [int(t)], False, 1000), "lease")
    yield of("node", own, store.UNPIN, lambda w, t: m.UnpinRequest([int(t)]), "lease")
    yield of("node", known, store.EVICTION, lambda w, t: m.EvictionPolicy(""))
    yield of("node", operator, store.DRAIN, lambda w, t: m.DrainRequest(True))
    yield of("node", operator, store.EVICT, lambda w, t: m.EvictRequest([t], 1), "scoped")
    yield of("node", operator, store.VERIFY, lambda w, t: m.VerifyRequest(t), "key")
    yield of("node", known, store.TENANTS, lambda w, t: m.TenantsRequest())
    yield of("node", known, store.OPEN_BUFFER, lambda w, t: m.OpenBufferRequest(1 << 16))
    yield of("master", operator, store.ANNOUNCE, lambda w, t: NodeAnnouncement(t, 1), "node")
    yield of("master", known, store.PLACE, lambda w, t: d.PlaceRequest(1))
    yield of("master", known, store.NODES, lambda w, t: d.NodesRequest())
    yield of("master", known, store.MASTERS, lambda w, t: m.MastersRequest())
    yield of("master", known, store.PROVE, lambda w, t: m.ProveRequest())
    yield of(
        "master", operator, membership.REGISTER, lambda w, t: membership.RegisterRequest(_instance(t), 60_000), "node"
    )
    yield of("master", operator, membership.KEEP_ALIVE, lambda w, t: membership.LeaseRequest(1, t), "node")
    yield of("master", operator, membership.DEREGISTER, lambda w, t: membership.LeaseRequest(1, t), "node")
    yield of("master", known, membership.WATCH, lambda w, t: membership.WatchRequest())
    yield of("peers", operator, peers.FOLLOW, lambda w, t: peers.FollowRequest())
    yield of("peers", operator, peers.ABORT, lambda w, t: peers.AbortRequest(t), "request")
    yield of("peers", operator, rpc_methods.END, lambda w, t: rpc_methods.EndRequest())
    begin = session.ToWorker(session.SessionHello("x", 1))
    for role in ("prefill", "decode"):
        yield of(role, operator, session.SESSION, lambda w, t: begin)
        yield of(role, operator, session.DESCRIBE, lambda w, t: session.DescribeRequest())
        yield of(role, operator, session.DROP_CACHE, lambda w, t: session.DropCacheRequest())
        yield of(role, operator, session.PROBE, lambda w, t: session.ProbeRequest(1))
        yield of(role, operator, rpc_methods.END, lambda w, t: rpc_methods.EndRequest())
        yield of(role, operator, worker.EXPORT_PIN, lambda w, t: worker.ExportPinRequest(int(t)), "export")
        yield of(
            role,
            operator,
            worker.EXPORT_RELEASE,
            lambda w, t: worker.ExportReleaseRequest(int(t)),
            "export",
        )
        yield of(role, operator, worker.EXPORT_WATCH, lambda w, t: worker.ExportWatchRequest(int(t)), "export")
        yield of(role, operator, worker.SHARED_CACHE, lambda w, t: worker.SharedCacheRequest())
        yield of(role, operator, worker.EXPORT_CONFIRM, lambda w, t: worker.ExportConfirmRequest([1]))
        yield of(role, operator, worker.PREFIX_PIN, lambda w, t: worker.PrefixPinRequest([b"x" * 16]))


def _commit(world: World, key: str) -> ClientCommit:
    return ClientCommit(world.victims["node"], 1, ChunkKey(key), 7, 3)


def _instance(node: str) -> InstanceEntry:
    return InstanceEntry(node, "decode", "127.0.0.1:9")


#: gRPC's methods by their full names: what they need, the kind of their target, and the request.
_GRPC: dict[str, tuple[Needs, str, Callable[[World, str], Message]]] = {
    "Store/Put": (Needs.KNOWN, "key", lambda w, t: store_pb2.PutRequest(key=t, value=b"xyz")),
    "Store/Get": (Needs.OWN, "key", lambda w, t: store_pb2.GetRequest(key=t)),
    "Store/Exists": (Needs.OWN, "key", lambda w, t: store_pb2.Keys(keys=[t])),
    "Store/Remove": (Needs.OWN, "key", lambda w, t: store_pb2.Keys(keys=[t])),
    "Store/Stat": (Needs.OWN, "key", lambda w, t: store_pb2.StatRequest(key=t)),
    "Store/List": (Needs.OWN, "key", lambda w, t: store_pb2.ListRequest(prefix=t)),
    "Inference/Generate": (
        Needs.KNOWN,
        "request",
        lambda w, t: inference_pb2.GenerateRequest(
            text="hello", request_id=t, sampling=inference_pb2.SamplingOptions(max_tokens=2, temperature=0)
        ),
    ),
    "Inference/Tokenize": (Needs.KNOWN, "", lambda w, t: inference_pb2.TokenizeRequest(text="hello")),
    "Inference/ListModels": (Needs.KNOWN, "", lambda w, t: inference_pb2.ListModelsRequest()),
    "Inference/Abort": (Needs.OWN, "request", lambda w, t: inference_pb2.AbortRequest(request_id=t)),
    "Router/PutWorker": (Needs.OPERATOR, "worker", lambda w, t: router_pb2.RouterWorker(worker=t)),
    "Router/RemoveWorker": (Needs.OPERATOR, "worker", lambda w, t: router_pb2.RouterWorkerName(worker=t)),
    "Router/ReportLoad": (Needs.OPERATOR, "worker", lambda w, t: router_pb2.RouterLoad(worker=t)),
    "Router/PublishEvents": (Needs.OPERATOR, "worker", lambda w, t: router_pb2.RouterEvents(worker=t, cleared=True)),
    "Router/BestWorker": (Needs.KNOWN, "", lambda w, t: router_pb2.RouterQuestion(num_tokens=1)),
    "Router/AddRequest": (
        Needs.KNOWN,
        "routed before",
        lambda w, t: router_pb2.RouterAddRequest(
            question=router_pb2.RouterQuestion(request_id=t, num_tokens=9), prefill_worker="w1"
        ),
    ),
    "Router/PrefillCompleted": (Needs.OWN, "routed", lambda w, t: router_pb2.RouterRequestName(request_id=t)),
    "Router/Free": (Needs.OWN, "routed", lambda w, t: router_pb2.RouterRequestName(request_id=t)),
    "Router/Overlaps": (Needs.OWN, "tokens", lambda w, t: router_pb2.RouterQuestion(tokens=bytes.fromhex(t))),
    "Router/PotentialLoads": (Needs.OWN, "tokens", lambda w, t: router_pb2.RouterQuestion(tokens=bytes.fromhex(t))),
    "Router/Generate": (Needs.KNOWN, "", lambda w, t: router_pb2.RouterGenerate(body=b'{"input_ids": [1]}')),
    "Router/DumpEvents": (Needs.OPERATOR, "", lambda w, t: router_pb2.RouterDumpRequest()),
}
ABSENT |= {"routed": "no-such-thing-routed", "routed before": "no-such-thing-before", "tokens": "07000000" * 256}
_GRPC_MODULES = (inference_pb2, router_pb2, store_pb2)


def grpc_methods() -> set[str]:
    """All that our protos define, as Service/Method."""
    services = [each for module in _GRPC_MODULES for each in module.DESCRIPTOR.services_by_name.values()]
    return {f"{service.name}/{method.name}" for service in services for method in service.methods}


def grpc_rows() -> Iterator[Row]:
    """Of gRPC: inference, the routing service, the store at its gateway, and processes among themselves."""
    for name, (needs, target, request) in _GRPC.items():
        service = name.partition("/")[0]
        yield Row(f"gRPC {service}", name.partition("/")[2], needs, _grpc(name, request), target)


def _grpc(name: str, request: Callable[[World, str], Message]) -> Callable[[World, Caller, str], Answer]:
    service, method = name.split("/")
    services = (module.DESCRIPTOR.services_by_name.get(service) for module in _GRPC_MODULES)
    described = next(each for each in services if each is not None).methods_by_name[method]

    def call(world: World, caller: Caller, target: str) -> Answer:
        address = {
            "Inference": lambda: f"127.0.0.1:{world.grpc_port}",
            "Router": lambda: world.service_grpc,
            "Store": lambda: f"127.0.0.1:{world.gateway_grpc}",
        }[service]()
        secret = caller.key if service in ("Inference", "Router") else caller.token
        shown = (("authorization", f"Bearer {secret}"),) if secret else ()
        return rpc(world, shown, address, described, request(world, target))

    return call


_ASK = {"model": "", "prompt": "hello", "max_tokens": 2}
_CHAT = {"model": "", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
_K, _I, _M, _A, _N, _O = (
    Needs.KNOWN,
    Needs.KNOWN,
    Needs.OPERATOR,
    Needs.OPERATOR,
    Needs.NOTHING,
    Needs.OWN,
)
#: (method, path as the application has it): what it needs, the kind of its target, path and body with the target.
_Http = dict[tuple[str, str], tuple[Needs, str, str, Any]]
_PROBES: _Http = {("GET", "/live"): (_N, "", "/live", None), ("GET", "/ready"): (_N, "", "/ready", None)}
_PAGES: _Http = {
    ("GET", path): (_K, "", path, None) for path in ("/docs", "/openapi.json", "/docs/oauth2-redirect", "/redoc")
}
_INFERENCE: _Http = {
    ("GET", "/health"): (_K, "", "/health", None),
    ("GET", "/metrics"): (_M, "", "/metrics", None),
    ("GET", "/v1/models"): (_K, "", "/v1/models", None),
    ("GET", "/v1/models/{name:path}"): (_K, "", "/v1/models/x", None),
    ("GET", "/model_info"): (_K, "", "/model_info", None),
    ("GET", "/get_model_info"): (_K, "", "/get_model_info", None),
    ("GET", "/server_info"): (_K, "", "/server_info", None),
    ("GET", "/get_server_info"): (_K, "", "/get_server_info", None),
    ("POST", "/v1/chat/completions"): (_I, "", "/v1/chat/completions", _CHAT),
    ("POST", "/v1/completions"): (_I, "", "/v1/completions", _ASK),
    ("POST", "/v1/responses"): (
        _O,
        "response",
        "/v1/responses",
        {"model": "", "input": "hello", "max_output_tokens": 2, "previous_response_id": "{target}"},
    ),
    ("GET", "/v1/responses/{response_id}"): (_O, "response", "/v1/responses/{target}", None),
    ("DELETE", "/v1/responses/{response_id}"): (_O, "response", "/v1/responses/{target}", None),
    ("POST", "/v1/messages"): (_I, "", "/v1/messages", _CHAT),
    ("POST", "/v1/messages/count_tokens"): (_I, "", "/v1/messages/count_tokens", {"messages": _CHAT["messages"]}),
    ("POST", "/generate"): (_I, "", "/generate", {"text": "hello", "sampling_params": {"max_new_tokens": 2}}),
    ("POST", "/abort_request"): (_O, "request", "/abort_request", {"rid": "{target}"}),
    ("POST", "/tokenize"): (_I, "", "/tokenize", {"prompt": "hello"}),
    ("POST", "/detokenize"): (_I, "", "/detokenize", {"tokens": [1]}),
    ("POST", "/route"): (_O, "tokens", "/route", {"prompt": "{token_ids}"}),
}
CONDUCTOR: _Http = {
    **_PROBES,
    **_INFERENCE,
    ("GET", "/docs"): (_K, "", "/docs", None),
    ("GET", "/openapi.json"): (_K, "", "/openapi.json", None),
    ("GET", "/"): (_K, "", "/", None),
    ("GET", "/health_generate"): (_M, "", "/health_generate", None),
    ("GET", "/dashboard"): (_M, "", "/dashboard", None),
    ("GET", "/dashboard/state"): (_M, "", "/dashboard/state", None),
    ("GET", "/dashboard/events"): (_M, "", "/dashboard/events", None),
    ("GET", "/debug/curve"): (_M, "", "/debug/curve", None),
    ("GET", "/debug/requests"): (_M, "", "/debug/requests", None),
    ("GET", "/debug/requests/{name:path}"): (_M, "request", "/debug/requests/{target}", None),
    ("POST", "/flush_cache"): (_A, "", "/flush_cache", None),
}
POOL_ROUTER: _Http = {**_PROBES, **_PAGES, **_INFERENCE, ("GET", "/pools"): (_M, "", "/pools", None)}
_QUESTION = {"tokens": "{token_ids}"}
SERVICE: _Http = {
    **_PROBES,
    **_PAGES,
    ("GET", "/health"): (_K, "", "/health", None),
    ("GET", "/metrics"): (_M, "", "/metrics", None),
    ("GET", "/workers"): (_A, "", "/workers", None),
    ("PUT", "/workers"): (_A, "worker", "/workers", {"worker": "{target}"}),
    ("DELETE", "/workers/{worker:rest}"): (_A, "worker", "/workers/{target}", None),
    ("POST", "/report_load"): (_A, "worker", "/report_load", {"worker": "{target}"}),
    ("POST", "/publish_events"): (_A, "worker", "/publish_events", {"worker": "{target}", "cleared": True}),
    ("GET", "/dump_events"): (_A, "", "/dump_events", None),
    ("POST", "/generate"): (_I, "", "/generate", {"input_ids": [1]}),
    ("POST", "/best_worker"): (_I, "", "/best_worker", {"num_tokens": 1}),
    ("POST", "/add_request"): (
        _I,
        "routed before",
        "/add_request",
        {"request_id": "http-{target}", "num_tokens": 9, "prefill_worker": "w1"},
    ),
    ("POST", "/prefill_completed"): (_O, "routed", "/prefill_completed", {"request_id": "{target}"}),
    ("POST", "/free"): (_O, "routed", "/free", {"request_id": "{target}"}),
    ("POST", "/overlaps"): (_O, "tokens", "/overlaps", _QUESTION),
    ("POST", "/potential_loads"): (_O, "tokens", "/potential_loads", _QUESTION),
}
GATEWAY: _Http = {
    **_PROBES,
    **{route: (_N, *rest) for route, (_, *rest) in _PAGES.items()},
    ("GET", "/health"): (_N, "", "/health", None),
    ("GET", "/v1/chunks"): (_O, "key", "/v1/chunks?prefix={target}", None),
    ("GET", "/v1/chunks/{key:rest}"): (_O, "key", "/v1/chunks/{target}", None),
    ("DELETE", "/v1/chunks"): (_O, "key", "/v1/chunks?prefix={target}", None),
    ("DELETE", "/v1/chunks/{key:rest}"): (_O, "scoped", "/v1/chunks/{target}", None),
    ("GET", "/v1/values/{key:rest}"): (_O, "scoped", "/v1/values/{target}", None),
    ("HEAD", "/v1/values/{key:rest}"): (_O, "key", "/v1/values/{target}", None),
    ("PUT", "/v1/values/{key:rest}"): (_O, "key", "/v1/values/{target}", b"xyz"),
    ("GET", "/v1/events"): (_O, "key", "/v1/events?prefix={target}", None),
    ("GET", "/v1/nodes"): (_K, "", "/v1/nodes", None),
    ("GET", "/v1/stat"): (_K, "", "/v1/stat", None),
    ("GET", "/v1/tenants"): (_K, "", "/v1/tenants", None),
    ("GET", "/v1/policy"): (_K, "", "/v1/policy", None),
    ("PUT", "/v1/policy"): (_A, "", "/v1/policy", {"name": "fifo"}),
    ("POST", "/v1/replicate"): (_O, "key", "/v1/replicate", {"keys": ["{target}"], "holders": 2}),
    ("POST", "/v1/check"): (_A, "", "/v1/check", {}),
    ("POST", "/v1/evict"): (_A, "", "/v1/evict", {"bytes": "1KiB"}),
    ("POST", "/v1/nodes/{node}/drain"): (_A, "", "/v1/nodes/{node}/drain", {}),
    ("POST", "/v1/nodes/{node}/undrain"): (_A, "", "/v1/nodes/{node}/undrain", {}),
    ("POST", "/v1/nodes/{node}/evict"): (_A, "", "/v1/nodes/{node}/evict", {"bytes": "1KiB"}),
    ("GET", "/dashboard"): (_N, "", "/dashboard", None),
    ("GET", "/dashboard/state"): (_K, "", "/dashboard/state", None),
    ("GET", "/dashboard/events"): (_K, "", "/dashboard/events", None),
}
HTTP = {"conductor": CONDUCTOR, "pool router": POOL_ROUTER, "routing service": SERVICE, "gateway": GATEWAY}


def http_rows() -> Iterator[Row]:
    """Of HTTP: conductors, both kinds of router, the gateway, and the metrics of every process."""
    for point, routes in HTTP.items():
        for (method, _), (needs, target, path, body) in routes.items():
            yield Row(f"HTTP of {point}", f"{method} {path}", needs, _http(point, method, path, body), target)
    for role in ("master", "node", "prefill", "decode", "conductor", "gateway"):
        for path, needs in (("/metrics", Needs.OPERATOR), ("/live", Needs.NOTHING)):
            yield Row(f"metrics of {role}", path, needs, _metrics(role, path))


def _http(point: str, method: str, path: str, body: Any) -> Callable[[World, Caller, str], Answer]:
    def call(world: World, caller: Caller, target: str) -> Answer:
        url = {
            "conductor": lambda: world.address("conductor"),
            "pool router": lambda: world.pool_router,
            "routing service": lambda: world.service,
            "gateway": lambda: f"127.0.0.1:{world.gateway_port}",
        }[point]()
        filled = body
        if isinstance(body, dict):
            text = json.dumps(body).replace("{target}", target)
            filled = json.loads(text)
            for name in (name for name, value in filled.items() if value == "{token_ids}"):
                filled[name] = np.frombuffer(bytes.fromhex(target), "<u4").tolist()
        secret = caller.token if point == "gateway" else caller.key
        return http(
            world,
            url,
            method,
            path.replace("{target}", target).replace("{node}", world.victims["node"]),
            caller.headers(secret),
            filled,
        )

    return call


def _metrics(role: str, path: str) -> Callable[[World, Caller, str], Answer]:
    def call(world: World, caller: Caller, target: str) -> Answer:
        address = world.processes(role)[0]["metrics_address"]
        return http(world, address, "GET", path, caller.headers(caller.token))

    return call


def data_rows() -> Iterator[Row]:
    """Of the ports of transfers, and of the Unix socket beside a port."""
    for role in ("node", "prefill"):
        yield Row(
            f"data port of {role}",
            "hello",
            Needs.SECRET,
            lambda w, c, t, role=role: data(w, c, role, int(t), 1),  # type: ignore[misc]
            f"{role} session",
        )
    yield Row("data port of node", "read", Needs.OWN, lambda w, c, t: data(w, c, "node", 0, int(t)), "lease")
    yield Row(
        "Unix socket of node",
        "exists",
        Needs.OWN,
        lambda w, c, t: unix(w, c, "node", store.EXISTS, m.KeysRequest([t])),
        "scoped",
    )


ABSENT |= {"node session": str((1 << 50) + 3), "prefill session": str((1 << 50) + 5)}


def rows() -> list[Row]:
    """All of them."""
    return [*fast_rows(), *grpc_rows(), *data_rows(), *http_rows()]


__all__ = ["ABSENT", "GATEWAY", "HTTP", "Needs", "Row", "grpc_methods", "rows"]
