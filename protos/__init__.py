"""What other programs speak over gRPC: inference, routing, the public store service; and etcd.

Import it as ``tanghulu.protos``.
"""

if not __name__.startswith("tanghulu."):
    raise ImportError(
        f"import this package as tanghulu.protos, not as {__name__!r}: "
        "put src/ on the path (pip install -e .), not the checkout's root"
    )
