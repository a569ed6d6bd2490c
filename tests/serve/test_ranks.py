"""A parallel engine, in two processes over gloo; each world is spawned once and runs all its checks."""

import pytest
from parallel.world import checks, outcome

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("check", checks("serve_world"))
def test_two_ranks(check: str) -> None:
    outcome(2, "serve_world", check)
