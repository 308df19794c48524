"""Which worker a request runs on."""
