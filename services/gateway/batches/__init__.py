"""OpenAI's files and batches: stored files of requests, which any gateway runs line by line as offline work.

May import `openai` and below. A batch calls the endpoints of other APIs as plain functions, which the server passes in.
"""
