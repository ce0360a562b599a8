"""What operators ask of a store and tell it, written once for the command line and for HTTP."""
