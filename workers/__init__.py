"""The workers: a model over a paged KV cache, continuous batching, prefill and decode, KV to and from the store.

Import it as ``tanghulu.workers``.
"""

if not __name__.startswith("tanghulu."):
    raise ImportError(
        f"import this package as tanghulu.workers, not as {__name__!r}: "
        "put src/ on the path (pip install -e .), not the checkout's root"
    )
