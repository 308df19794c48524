"""Anthropic's Messages API: `/v1/messages` and `/v1/messages/count_tokens`.

A request is converted to a chat of `openai`. The chat is then admitted and run like any other chat. May import `openai`
and the rooms below it.
"""
