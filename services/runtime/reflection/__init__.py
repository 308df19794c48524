"""gRPC reflection. May import: grpc, grpc_reflection and protobuf."""
