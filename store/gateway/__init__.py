"""The store over HTTP: a gateway process that is a client of master and nodes."""
