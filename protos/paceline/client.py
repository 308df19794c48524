"""The Python client: `from paceline.client import PacelineClient`. `services.client` is the same, and stays."""

from services.client import *  # noqa: F403
from services.client import __all__ as __all__
