"""The decoder: its configuration, weights, matrix products, and other operations of a layer."""
