"""The HTTP server that conductor, routers and gateway share: keys, bodies, errors, connections."""
