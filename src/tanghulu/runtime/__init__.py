"""The runtime of every process: configuration, log, metrics, clock, event loop."""
