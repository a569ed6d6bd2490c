"""A parallel engine, in two and four processes over gloo; each world is spawned once and runs all its checks."""

import pytest
from parallel.world import checks, outcome

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("check", checks("serve_world"))
def test_two_ranks(check: str) -> None:
    outcome(2, "serve_world", check)


@pytest.mark.parametrize("check", checks("latents_world"))
@pytest.mark.parametrize("size", [2, 4])
def test_latents_shared_out(size: int, check: str) -> None:
    outcome(size, "latents_world", check)
