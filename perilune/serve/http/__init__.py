"""The OpenAI-shaped API over an engine: `create_app(Service(...))`, or `serve(...)` for a whole process."""

from perilune.serve.http.app import create_app
from perilune.serve.http.options import ServeOptions
from perilune.serve.http.process import serve
from perilune.serve.http.service import Service

__all__ = ["ServeOptions", "Service", "create_app", "serve"]
