"""The OpenAI-shaped API over an engine: `create_app(Service(...))`, or `serve(...)` for a whole process."""

from perilune.serve.http.app import create_app
from perilune.serve.http.options import ServeOptions
from perilune.serve.http.process import run
from perilune.serve.http.service import Service

__all__ = ["ServeOptions", "Service", "create_app", "serve"]


def serve(service: Service, host: str, port: int) -> None:
    """Serve until a signal; then running requests finish. Raises OSError where the address cannot be had."""
    run(create_app(service), host, port, service.options.drain_seconds, service.worker.drain)
