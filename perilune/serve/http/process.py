"""A server process: uvicorn, and a SIGTERM that lets running requests finish."""

import logging
import socket
from types import FrameType

import uvicorn

from perilune.serve.http.app import create_app
from perilune.serve.http.service import Service

log = logging.getLogger("perilune.serve")


class Drains(uvicorn.Server):
    """On the first SIGTERM or SIGINT no request is taken any more; those running have `drain_seconds`, or until the
    second signal. Drained, the process ends with 0."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - uvicorn's signature
        self.force_exit = self.should_exit
        self._service.worker.draining = self.should_exit = True
        log.warning("signal %d: draining", sig)


def serve(service: Service, host: str, port: int) -> None:
    """Serve until a signal. Raises OSError where the address cannot be had."""
    listener = socket.create_server((host, port), backlog=2048, reuse_port=False)
    config = uvicorn.Config(
        create_app(service),
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=max(1, round(service.options.drain_seconds)),
        timeout_keep_alive=75,
    )
    log.warning("serving %s at http://%s:%d", service.options.name, *listener.getsockname()[:2])
    Drains(config, service).run(sockets=[listener])
