"""Errors of requests, in the form that OpenAI's clients expect."""

from __future__ import annotations

from functools import partial
from typing import Any

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
"""The type of the error of a status; other statuses have the type of 400, and 5xx ``server_error``."""


class ApiError(Exception):
    """An error that a response reports.

    Args:
        status: the HTTP status.
        message: what is wrong, the value received, and the remedy.
        param: the parameter concerned.
        code: a name of the error for programs.
        retry_after: seconds after which the client may try again.

    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after = retry_after

    def __reduce__(self) -> tuple[Any, ...]:
        make = partial(ApiError, param=self.param, code=self.code, retry_after=self.retry_after)
        return make, (self.status, self.message)

    def body(self) -> dict[str, Any]:
        """Return the body of the response."""
        usual = "server_error" if self.status >= 500 else TYPES[400]
        found = {"message": self.message, "type": TYPES.get(self.status, usual)}
        return {"error": {**found, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """Return the headers of the response."""
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return headers


def shown(value: object, *, most: int = 60) -> str:
    """Return a value for a message, truncated to ``most`` characters."""
    text = repr(value[: most + 1]) if isinstance(value, str | list) else repr(value)
    return text if len(text) <= most else f"{text[:most]}…"
