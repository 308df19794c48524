"""The client's public name is paceline.client."""

from __future__ import annotations

import paceline.client
import services.client


def test_paceline_client_exports_the_names_of_services_client() -> None:
    assert paceline.client.__all__ == services.client.__all__
    assert paceline.client.PacelineClient is services.client.PacelineClient
