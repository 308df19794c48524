"""OpenAI's Responses API: requests become chats, output becomes items and numbered events, and responses are stored.

May import `openai`, `store` and what these import.
"""
