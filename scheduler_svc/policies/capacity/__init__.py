"""Which requests may hold blocks."""
