"""What every process stands on: its configuration, log, metrics, clock, event loop and adaptive busy polling."""
