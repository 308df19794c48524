"""A run as JSON, as tables of a terminal, and as one HTML file that works offline. Also two runs side by side."""
