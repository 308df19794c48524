"""The gateway, the command line, the Python client, and the runtime that all services share."""
