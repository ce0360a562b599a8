"""The fast lane: frames of MessagePack over TCP or a Unix socket, with clients and servers; and the edge to gRPC."""
