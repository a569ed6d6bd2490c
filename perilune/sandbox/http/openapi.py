"""The OpenAPI document, written from the routes themselves: it cannot forget one."""

import re
from typing import Any

from aiohttp import web

from perilune import __version__


def _schema(summary: str) -> dict[str, Any]:
    """Of the body that a route's summary names: {needed, optional?, one | other}."""
    named = re.findall(r"(\w+)(\??)", summary.partition("{")[2].partition("}")[0])
    schema: dict[str, Any] = {"type": "object", "properties": {name: {} for name, _ in named}}
    if needed := [name for name, optional in named if not optional and "|" not in summary]:
        schema["required"] = needed
    return schema


def document(app: web.Application) -> dict[str, Any]:
    """OpenAPI 3.1 of every control-plane route."""
    paths: dict[str, dict[str, Any]] = {}
    for route in app.router.routes():
        if route.method == "HEAD" or route.resource is None:
            continue
        path = route.resource.canonical
        names = re.findall(r"{(\w+)}", path)
        parameters = [{"name": n, "in": "path", "required": True, "schema": {"type": "string"}} for n in names]
        summary = (route.handler.__doc__ or "").strip().splitlines()
        operation: dict[str, Any] = {
            "summary": summary[0] if summary else path,
            "responses": {"2XX": {"description": "done"}, "default": {"$ref": "#/components/responses/Error"}},
        }
        if parameters:
            operation["parameters"] = parameters
        if route.method in ("POST", "PUT", "PATCH"):
            operation["requestBody"] = {"content": {"application/json": {"schema": _schema(operation["summary"])}}}
        paths.setdefault(path, {})[route.method.lower()] = operation
    error = {"type": "object", "properties": {"code": {"type": "integer"}, "message": {"type": "string"}}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Perilune sandboxes, compatible with E2B", "version": __version__},
        "security": [{"key": []}],
        "paths": paths,
        "components": {
            "securitySchemes": {"key": {"type": "apiKey", "in": "header", "name": "X-API-Key"}},
            "responses": {
                "Error": {"description": "an error", "content": {"application/json": {"schema": error}}},
            },
        },
    }
