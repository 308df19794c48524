"""Compares placement rules in simulation and on real workers."""
