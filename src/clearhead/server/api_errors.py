"""ApiError: an error in the form that OpenAI's clients understand. Without HTTP and without torch.

raise invalid("n is 0; it must be a whole number from 1 to 64", param="n")
"""

from collections.abc import Mapping
from typing import Any

from clearhead.errors import shorten

_MAX_MESSAGE_CHARACTERS = 1000


class ApiError(Exception):
    """A request that is not answered, with its HTTP status.

    type and code: OpenAI's kinds of errors, such as invalid_request_error and context_length_exceeded. param: the field
    that is wrong.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.message = shorten(message, _MAX_MESSAGE_CHARACTERS)
        self.type, self.code, self.param = type, code, param
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object that clients read."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return the error for a request that must be changed."""
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str, retry_seconds: int = 5) -> ApiError:
    """Return the error for a server that is starting or ending."""
    headers = {"Retry-After": str(retry_seconds)}
    return ApiError(503, message, type="service_unavailable_error", code="unavailable", headers=headers)


def failed(message: str = "computing this request failed; the log of the server says why") -> ApiError:
    """Return the error for a fault of the server. It says nothing about the machine, which clients need not know."""
    return ApiError(500, message, type="server_error", code="internal_error")
