"""Measurements: `make bench`. Figures go to bench/results/ as JSON; a table goes to the terminal."""
