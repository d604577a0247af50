"""The error tree of the project, with what each class becomes at the HTTP border.

    ServingError                        status  OpenAI type             code                     retry
    ├── InvalidRequest                  400     invalid_request_error   invalid_request_error    no
    │   ├── ContextLengthExceeded       400     invalid_request_error   context_length_exceeded  no
    │   └── RequestTooLarge             413     invalid_request_error   request_too_large        no
    ├── NotAuthenticated                401     authentication_error    invalid_api_key          no
    ├── ModelNotFound                   404     invalid_request_error   model_not_found          no
    ├── HandoffRefused                  409     handoff_error           handoff_refused          no
    ├── Overloaded                      429     rate_limit_error        overloaded               yes
    ├── InternalError                   500     server_error            internal_error           no
    ├── UpstreamFailed                  502     server_error            upstream_failed          yes
    ├── NotReady                        503     server_error            not_ready                yes
    └── DeadlineExceeded                504     server_error            timeout                  no
    TransferError                       never reaches HTTP: a failed fetch is recomputed or becomes HandoffRefused
    └── StaleBlock                      the pages read have a new owner
    SettingsError                       never reaches HTTP: start-up, exit code 2

Library errors become these where I/O enters the process; these become a status in `openai_error_body` alone.
"""

from __future__ import annotations

from typing import Any, ClassVar


class ServingError(Exception):
    """Anything that a client may be told. `param` names the offending request field, or is None."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str] = "internal_error"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, param: str | None = None, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after = retry_after


class InvalidRequest(ServingError):
    status = 400
    type = "invalid_request_error"
    code = "invalid_request_error"


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"


class RequestTooLarge(InvalidRequest):
    status = 413
    code = "request_too_large"


class NotAuthenticated(ServingError):
    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class ModelNotFound(ServingError):
    status = 404
    type = "invalid_request_error"
    code = "model_not_found"


class HandoffRefused(ServingError):
    status = 409
    type = "handoff_error"
    code = "handoff_refused"


class Overloaded(ServingError):
    status = 429
    type = "rate_limit_error"
    code = "overloaded"
    retryable = True


class InternalError(ServingError):
    pass


class UpstreamFailed(ServingError):
    status = 502
    code = "upstream_failed"
    retryable = True


class NotReady(ServingError):
    status = 503
    code = "not_ready"
    retryable = True


class DeadlineExceeded(ServingError):
    status = 504
    code = "timeout"


class TransferError(Exception):
    """KV bytes could not be fetched, or arrived wrong. The caller recomputes."""


class StaleBlock(TransferError):
    """A page was given to a new owner while, or before, it was read."""


class SettingsError(ValueError):
    """Bad configuration. `problems` are (path, message) pairs, all that were found."""

    def __init__(self, problems: list[tuple[str, str]]) -> None:
        self.problems = problems
        super().__init__("\n".join(f"{path}: {message}" for path, message in problems))


def openai_error_body(error: ServingError) -> dict[str, Any]:
    """The body of every error response: the four keys that OpenAI clients read are always present."""
    return {
        "error": {
            "message": error.message,
            "type": error.type,
            "param": error.param,
            "code": error.code,
        }
    }


SERVING_ERRORS: dict[str, type[ServingError]] = {
    cls.code: cls
    for cls in (
        InvalidRequest,
        ContextLengthExceeded,
        RequestTooLarge,
        NotAuthenticated,
        ModelNotFound,
        HandoffRefused,
        Overloaded,
        InternalError,
        UpstreamFailed,
        NotReady,
        DeadlineExceeded,
    )
}
"""Class by `code`, for errors that cross a process border as (code, message, param)."""
