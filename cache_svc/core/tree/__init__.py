"""The prefix tree: its nodes, walks, subscriptions of waiting sequences, and the events about stored blocks.

May import `retention`, `request_metadata` and `errors`.
"""
