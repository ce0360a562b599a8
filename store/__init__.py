"""The store: masters with the directory, nodes with the chunks, the client, the gateway and administration.

Import it as ``tanghulu.store``.
"""

if not __name__.startswith("tanghulu."):
    raise ImportError(
        f"import this package as tanghulu.store, not as {__name__!r}: "
        "put src/ on the path (pip install -e .), not the checkout's root"
    )
