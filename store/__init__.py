"""The store component of tanghulu; import it as ``tanghulu.store``."""

if not __name__.startswith("tanghulu."):
    raise ImportError(
        f"import this package as tanghulu.store, not as {__name__!r}: "
        "put src/ on the path (pip install -e .), not the checkout's root"
    )
