"""Tests of Paceline. Each folder holds one kind of tests, for example unit, simulation or end-to-end tests."""
