"""What a request is told when it cannot be answered, in OpenAI's shape."""

from typing import Any

from moepack.tools.reporting import note

__all__ = ["ApiError", "invalid", "not_loaded", "too_long"]

TYPES = {401: "authentication_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An HTTP status and the object that goes with it; `param` names the field at fault."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    def as_map(self) -> dict[str, Any]:
        """The body."""
        default = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {
                "message": self.message,
                "type": TYPES.get(self.status, default),
                "param": self.param,
                "code": self.code,
            }
        }


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that is wrong in itself: 400."""
    return ApiError(400, message, param=param, code=code)


def not_loaded(name: str, reason: str) -> ApiError:
    """A model that did not load: the reason, which has paths, is a line in the log."""
    note(f"{name}: {reason}")
    text = f"model {name!r} did not load; the server's log says why"
    return ApiError(503, text, code="model_not_loaded")


def too_long(message: str, param: str) -> ApiError:
    """A prompt that does not fit the context."""
    return invalid(message, param, "context_length_exceeded")
