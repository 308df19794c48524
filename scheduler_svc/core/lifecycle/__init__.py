"""A request's phases, from accepted to ended, also after the loss of a worker or of the cache; beam searches.

May import `admission`, `cache`, `output` and the packages that these may import.
"""
