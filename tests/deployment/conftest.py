"""What the tests of the chart share."""

from __future__ import annotations

from typing import Any

import pytest

from tests.deployment.chart import EVERY, objects


@pytest.fixture(params=EVERY)
def made(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return list(objects(EVERY[request.param]))
