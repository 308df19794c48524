"""Who may hold blocks."""
