"""The client side of transfers: requests, the state of a transfer batch, links to a peer."""
