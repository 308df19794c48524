"""The systems that Paceline is compared with, each in its own environment."""
