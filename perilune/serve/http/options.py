"""What a server is told at its start."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ServeOptions:
    """Limits, manners and defaults of one server.

    name: the model's name in the API. api_keys: any of them opens /v1; none leaves it open.
    max_requests: requests in flight before 429. max_body: bytes of a request before 413.
    max_choices: the largest `n`. max_tokens: the answer's length where a request names none (the rest of the context
    by default). temperature, top_p: the released model's defaults. strict_vendor: refuse sampling parameters that the
    hosted API fixes. drain_seconds: how long running requests may finish after SIGTERM.
    """

    name: str = "perilune"
    api_keys: frozenset[str] = frozenset()
    max_requests: int = 1024
    max_body: int = 32 << 20
    max_choices: int = 16
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 0.95
    strict_vendor: bool = False
    drain_seconds: float = 60.0
