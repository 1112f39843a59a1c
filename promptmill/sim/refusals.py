"""The server's error bodies, in the three shapes that 0.5.23 has."""

from __future__ import annotations

from typing import Any


class Refusal(Exception):
    """An answer that is an error: its status and body."""

    def __init__(self, status: int, body: dict[str, Any], message: str = "") -> None:
        super().__init__(message or str(body))
        self.status = status
        self.body = body
        self.message = message
        """Set where the server logs it and where a stream can carry it."""


def value_error(message: str) -> Refusal:
    """A value that the request manager refuses."""
    return Refusal(400, {"error": {"message": message}}, message)


def gate_error(message: str) -> Refusal:
    """A key or a type that the strict gate of 0.5.23 refuses; never inside a stream."""
    return Refusal(400, {"error": message})


def http_error(status: int, message: str, kind: str | None = None) -> Refusal:
    """What FastAPI's handlers make of an HTTPException."""
    body = {"object": "error", "message": message, "type": kind or str(status), "param": None, "code": status}
    return Refusal(status, body)


def validation_error(endpoint: str, path: str, line: int, errors: list[dict[str, Any]]) -> Refusal:
    """A body that is no JSON, or not the shape that the endpoint wants."""
    listed = "\n".join(f"  {error}" for error in errors)
    return http_error(
        400,
        f"{len(errors)} validation error:\n{listed}\n\n"
        f'  File "site-packages/sglang/srt/entrypoints/http_server.py", line {line}, in {endpoint}\n'
        f"    POST {path} {errors}",
        "Bad Request",
    )


def invalid_json(endpoint: str, path: str, line: int, position: int, what: str) -> Refusal:
    error = {
        "type": "json_invalid",
        "loc": ("body", position),
        "msg": "JSON decode error",
        "input": {},
        "ctx": {"error": what},
    }
    return validation_error(endpoint, path, line, [error])


def missing_field(endpoint: str, path: str, line: int, field: str, given: dict[str, Any]) -> Refusal:
    error = {"type": "missing", "loc": ("body", field), "msg": "Field required", "input": given}
    return validation_error(endpoint, path, line, [error])
