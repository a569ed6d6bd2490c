"""Everything that needs real processes: each world is spawned once and runs all its checks."""

import pytest
from parallel.world import checks, outcome

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("check", checks("exchange_world"))
@pytest.mark.parametrize("size", [2, 4])
def test_exchange(size: int, check: str) -> None:
    outcome(size, "exchange_world", check)


@pytest.mark.parametrize("check", checks("scan_world"))
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_scan(size: int, check: str) -> None:
    outcome(size, "scan_world", check)
