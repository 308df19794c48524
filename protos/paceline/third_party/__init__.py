"""Contracts of other systems, generated from the .proto files here: engines of smg, and the Open Inference Protocol."""
