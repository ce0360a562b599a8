"""TCP: several streams to a peer, received straight into the destination, optionally with TLS."""
