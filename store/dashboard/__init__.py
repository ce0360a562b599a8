"""The page /dashboard and the figures of store nodes, for the gateway and for the conductor, whose page shows more."""
