"""The conductor: the HTTP and gRPC APIs, the prefix index, routing, dispatch and migration of requests.

Import it as ``tanghulu.conductor``.
"""

if not __name__.startswith("tanghulu."):
    raise ImportError(
        f"import this package as tanghulu.conductor, not as {__name__!r}: "
        "put src/ on the path (pip install -e .), not the checkout's root"
    )
