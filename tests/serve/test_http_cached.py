"""The engine's prefix cache through the API: usage, salts, metrics."""

from typing import Any

from serve.live import Live, serving, toy_model

from perilune.serve.engine import Engine
from perilune.serve.request import EngineOptions


def test_a_conversation_is_cached() -> None:
    """Turn two finds turn one's prompt in the pool, and says so where both dialects look."""
    with serving(Engine(toy_model(), EngineOptions(block_tokens=16))) as live:
        _converse(live)


def _converse(live: Live) -> None:
    messages: list[Any] = [{"role": "user", "content": "the moon is near and the sea is far, " * 20}]
    first = live.openai.chat.completions.create(model="toy", messages=messages, max_tokens=8, temperature=0)
    messages += [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "and now?"}]
    second = live.openai.chat.completions.create(model="toy", messages=messages, max_tokens=8)
    assert first.usage is not None and second.usage is not None and second.usage.prompt_tokens_details is not None
    cached = second.usage.prompt_tokens_details.cached_tokens or 0
    assert cached > first.usage.prompt_tokens - 64
    assert second.usage.cached_tokens == cached  # type: ignore[attr-defined]
    salted = live.openai.chat.completions.create(
        model="toy", messages=messages, max_tokens=8, extra_body={"cache_salt": "other"}
    )
    assert salted.usage is not None and salted.usage.cached_tokens == 0  # type: ignore[attr-defined]
    metrics = live.http.get("/metrics").text
    assert f'perilune_hit_tokens_total{{tier="pool"}} {float(cached)}' in metrics
    assert "perilune_match_tokens 16.0" in metrics
