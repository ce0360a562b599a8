"""Administration of a store, written once for the command line and for HTTP: orders, checks, rows of answers."""
