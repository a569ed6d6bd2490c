"""Where a session lives: rendezvous hashing (Thaler and Ravishankar 1998).

Every worker draws a number from (session, worker); the highest is the session's primary, the next its secondary. A
worker that joins or leaves moves only the sessions that it wins or held, one in n, and needs no table.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any


def placed(session: str, workers: Sequence[str], copies: int = 2) -> list[str]:
    """The session's workers, primary first; at most `copies`."""
    return sorted(workers, key=lambda worker: _draw(session, worker), reverse=True)[:copies]


def _draw(session: str, worker: str) -> bytes:
    return hashlib.blake2b(f"{worker}\0{session}".encode("utf-8", "replace"), digest_size=8).digest()


def session_of(body: Mapping[str, Any], headers: Mapping[str, str]) -> str:
    """What keeps a conversation together: its own key, else its beginning, which all its turns share.

    In order: `prompt_cache_key`, the x-session-id header, `user`, a hash of tools and messages up to the first user
    message, a hash of the prompt's first 2,048 characters or 512 ids.
    """
    for key in (body.get("prompt_cache_key"), headers.get("x-session-id"), body.get("user")):
        if isinstance(key, str) and key:
            return key
    messages = body.get("messages")
    if isinstance(messages, list):
        asked = [n for n, message in enumerate(messages) if isinstance(message, dict) and message.get("role") == "user"]
        beginning: Any = [body.get("tools"), messages[: asked[0] + 1 if asked else None]]
    else:
        prompt = body.get("prompt")
        beginning = prompt[: 2048 if isinstance(prompt, str) else 512] if isinstance(prompt, str | list) else None
    return hashlib.blake2b(json.dumps(beginning, sort_keys=True).encode(), digest_size=16).hexdigest()
