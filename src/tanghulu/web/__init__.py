"""The HTTP server shared by conductor, routers and gateway: keys, bodies, errors, connections."""
