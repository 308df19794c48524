"""The prefix tree: its nodes, walks, subscriptions of waiting sequences, and the events about stored blocks.

May import `request_metadata`, `packing`, `retention`, `counters` and `errors`.
"""
