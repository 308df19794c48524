"""Fields of HTTP requests as clients of OpenAI and vLLM send them: chat messages, numbers, fields of other servers.

May import `engine`, `parsing`, `grammars`, `text` and `errors`, and pydantic.
"""
