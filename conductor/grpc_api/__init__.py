"""Inference over gRPC: the same requests and answers as over HTTP, as messages of protos/inference.proto."""
