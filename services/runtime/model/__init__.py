"""What services know of a model without loading it: where its files are, its identity, its grammars.

Imports no other module of the runtime.
"""
