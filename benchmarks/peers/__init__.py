"""What the comparing benchmarks share: peers' environments, worker processes, adapters, plain limits.

Workers, adapters and ``jsonlines`` run in the peers' own interpreters too: they import the standard library, and a
peer's package lazily in the one adapter that speaks to it.
"""
