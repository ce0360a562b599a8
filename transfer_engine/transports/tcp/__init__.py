"""TCP: several streams to a peer, received straight into the destination, with TLS where wanted."""
