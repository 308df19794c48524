"""`paceline completion`: scripts with which shells complete commands and flags.

`parsers` collects the parsers of all commands, and `main` prints the script that shtab makes of them.
"""
