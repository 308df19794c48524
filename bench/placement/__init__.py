"""Placement rules compared, in simulation and on real workers."""
