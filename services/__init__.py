"""The services besides scheduler, cache and worker: the gateway, the command line, the Python client, and the runtime."""
