"""Anthropic's Messages API: `/v1/messages` and `/v1/messages/count_tokens`.

A request is converted to a chat of `openai`, and admitted and run as one. May import `openai` and the rooms below it.
"""
