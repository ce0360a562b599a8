"""The fast lane: frames of MessagePack over TCP or a Unix socket, its clients and servers; and the edge to gRPC."""
