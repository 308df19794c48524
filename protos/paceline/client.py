"""The Python client: `from paceline.client import PacelineClient`. `services.client` is the same client under its older
name, which stays valid."""

from services.client import *  # noqa: F403
from services.client import __all__ as __all__
