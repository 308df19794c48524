"""Exit statuses of the services, which say whether a supervisor should start the process again."""

from __future__ import annotations

FAILED = 1
# The settings name something that cannot be used. The process cannot run until the settings change.
CONFIGURATION_ERROR = 2
# The scheduler refused the worker: its model, data type or block size is not that of the attached workers (or of the
# live requests), or a size in its registration is out of range.
REFUSED = 3
# The model does not fit into the memory that is available.
NO_MEMORY = 4
# EX_TEMPFAIL of sysexits.h: the process wants to be started again.
RESTART = 75
