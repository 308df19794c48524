"""The public gRPC APIs: `InferenceService`, and the contracts of other systems (vLLM, SGLang, KServe).

May import every other room of the gateway.
"""
