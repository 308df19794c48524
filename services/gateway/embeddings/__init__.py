"""/v1/embeddings: its schema, jobs and answers, and the vectors that the gRPC APIs give too.

May import what `openai` may, and `openai`.
"""
