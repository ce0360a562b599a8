"""The transfer engine: memory segments, transfers cut into slices, paths over several devices, transports.

Import it as ``tanghulu.transfer_engine``.
"""

if not __name__.startswith("tanghulu."):
    raise ImportError(
        f"import this package as tanghulu.transfer_engine, not as {__name__!r}: "
        "put src/ on the path (pip install -e .), not the checkout's root"
    )
