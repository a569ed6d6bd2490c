"""A server process: uvicorn, and a SIGTERM that lets running requests finish."""

import logging
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn

log = logging.getLogger("perilune.serve")


class Drains(uvicorn.Server):
    """On the first SIGTERM or SIGINT no request is taken any more; those running have `drain_seconds`, or until the
    second signal. Drained, the process ends with 0."""

    def __init__(self, config: uvicorn.Config, stop: Callable[[], None]) -> None:
        super().__init__(config)
        self._stop = stop

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - uvicorn's signature
        self.force_exit = self.should_exit
        self.should_exit = True
        self._stop()
        log.warning("signal %d: draining", sig)


def run(app: Any, host: str, port: int, drain_seconds: float, stop: Callable[[], None] = lambda: None) -> None:
    """Run an ASGI application until a signal, telling `stop` of it. Raises OSError where the address cannot be had."""
    listener = socket.create_server((host, port), backlog=2048)
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=max(1, round(drain_seconds)),
        timeout_keep_alive=75,
    )
    log.warning("serving at http://%s:%d", *listener.getsockname()[:2])
    Drains(config, stop).run(sockets=[listener])
