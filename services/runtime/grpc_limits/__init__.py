"""Limits of a gRPC server: messages that it receives at once, and streams that stay open. May import only grpc."""
