"""The client's public name is paceline.client."""

from __future__ import annotations

import paceline.client
import services.client


def test_it_exports_what_services_client_exports() -> None:
    assert paceline.client.__all__ == services.client.__all__
    assert paceline.client.PacelineClient is services.client.PacelineClient
