"""How the server turns its settings into the core's configuration."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from scheduler_svc.core.types import SchedulerConfig
from scheduler_svc.server import config_of
from scheduler_svc.settings import SchedulerSettings

OTHER_NAME = "stall_s"
NO_SETTING = "stuck_decisions"


def test_every_field_of_the_cores_configuration_is_a_setting() -> None:
    names = {field.name for field in fields(SchedulerConfig)} - {OTHER_NAME, NO_SETTING}
    given: dict[str, Any] = {name: object() for name in names}
    settings = SchedulerSettings.model_construct(**given, heartbeat_timeout_s=7.0)
    config = config_of(settings)
    assert {name: getattr(config, name) for name in names} == given
    assert config.stall_s == 7.0


def test_the_longest_ngram_is_not_shorter_than_the_shortest() -> None:
    assert SchedulerSettings(speculative_ngram_max=3, speculative_ngram_min=3).speculative_ngram_max == 3
    with pytest.raises(ValueError, match="--speculative-ngram-max 1 is less than --speculative-ngram-min 2"):
        SchedulerSettings(speculative_ngram_max=1)
