"""Pages of docs/reference/ that are read off the code, a module each."""
