"""A request that is not served: one status, one code for programs, one line for people, and nothing from inside.

Errors of the package carry paths, names and numbers that are no client's business, so their text never leaves the
process: each kind is translated here into words of the service.
"""

from mettle.errors import (
    DataError,
    GalleryError,
    GalleryLocked,
    GalleryUnavailable,
    InputError,
    MettleError,
    NumericError,
    OutcomeUnknown,
    RunError,
    UnknownIdentity,
)


class ApiError(Exception):
    """An answer other than the one asked for; raised anywhere below the door, sent by it."""

    def __init__(self, status: int, code: str, message: str, *, retry_after: float | None = None):
        super().__init__(code)
        self.status, self.code, self.message, self.retry_after = status, code, message, retry_after


def to_api_error(error: MettleError) -> ApiError:
    """What a client may know about an error of the package."""
    if isinstance(error, UnknownIdentity):
        return ApiError(404, "unknown-identity", "nobody of that name is enrolled")
    if isinstance(error, OutcomeUnknown):
        unsure = "whether the change was made is not known: send it again under the same request name to settle it"
        return ApiError(503, "outcome-unknown", unsure, retry_after=5)
    if isinstance(error, GalleryUnavailable | GalleryLocked):
        return ApiError(503, "unavailable", "the gallery is not available; nothing was changed", retry_after=5)
    if isinstance(error, GalleryError):
        return ApiError(503, "gallery", "the gallery cannot do this now; its operator must look at it", retry_after=60)
    if isinstance(error, InputError | NumericError):
        return ApiError(422, "bad-input", "what was sent does not fit this gallery; GET /v1/info says what does")
    if isinstance(error, DataError):
        return ApiError(422, "bad-image", "a picture cannot be read")
    if isinstance(error, RunError):
        return ApiError(503, "model", "the model cannot be loaded; its operator must look at the run", retry_after=60)
    return ApiError(503, "unavailable", "the service cannot do this now", retry_after=60)


def unknown_path_error() -> ApiError:
    """There is no such place."""
    return ApiError(404, "not-found", "no such resource; GET /docs lists what there is")


def internal_error() -> ApiError:
    """A fault of ours."""
    return ApiError(500, "internal", "the service failed; nothing was accepted")
