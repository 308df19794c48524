"""The public gRPC API, `InferenceService.Generate`.

May import every other room of the gateway.
"""
