# SPDX-License-Identifier: Apache-2.0
"""What can go wrong: one class for each gRPC status code, all of them `DenoisedError`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Dict, Optional, Sequence, Tuple, Type

from google.protobuf.message import DecodeError

from denoised.rpc import error_details_pb2, status_pb2

DETAILS_KEY = "grpc-status-details-bin"


@dataclass(frozen=True)
class FieldViolation:
    """A field of a request that the server refused."""

    field: str
    """Path in the request: "params.steps"."""
    description: str
    """Its value, why it was refused, and the remedy."""


class DenoisedError(Exception):
    """A call that failed."""

    code: ClassVar[str] = "UNKNOWN"
    """Name of the gRPC status code."""

    def __init__(self, message: str, *, violations: Sequence[FieldViolation] = (),
                 retry_after: Optional[float] = None, reason: str = "", domain: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.violations: Tuple[FieldViolation, ...] = tuple(violations)
        """Every refused field."""
        self.retry_after = retry_after
        """Seconds after which the call may be made again, if the server said so."""
        self.reason = reason
        """For programs: "QUEUE_FULL"; empty if the server did not say."""
        self.domain = domain
        """"denoised" when the server itself refused; empty when the transport failed."""


class Cancelled(DenoisedError):
    """The caller or another client cancelled the job, or the client was closed."""
    code = "CANCELLED"


class Unknown(DenoisedError):
    """A status code that this version of the library does not know."""


class InvalidArgument(DenoisedError):
    """The request is wrong; `violations` names every field."""
    code = "INVALID_ARGUMENT"


class DeadlineExceeded(DenoisedError):
    """The timeout passed, or the server estimates that it would."""
    code = "DEADLINE_EXCEEDED"


class NotFound(DenoisedError):
    """No such model, job or service."""
    code = "NOT_FOUND"


class AlreadyExists(DenoisedError):
    """The request_id or the version belongs to something else."""
    code = "ALREADY_EXISTS"


class PermissionDenied(DenoisedError):
    """The caller may not do this."""
    code = "PERMISSION_DENIED"


class ResourceExhausted(DenoisedError):
    """The queue is full, a limit is reached, or memory is short."""
    code = "RESOURCE_EXHAUSTED"


class FailedPrecondition(DenoisedError):
    """Not possible in this state: the model is loading, for example."""
    code = "FAILED_PRECONDITION"


class Aborted(DenoisedError):
    """Something else changed the same thing at the same time."""
    code = "ABORTED"


class OutOfRange(DenoisedError):
    """A value is outside its range."""
    code = "OUT_OF_RANGE"


class Unimplemented(DenoisedError):
    """The server has no such call: it is older, or ModelAdmin is off."""
    code = "UNIMPLEMENTED"


class Internal(DenoisedError):
    """A fault of the server."""
    code = "INTERNAL"


class Unavailable(DenoisedError):
    """The server cannot be reached, drains or was lost, and retries did not help."""
    code = "UNAVAILABLE"


class DataLoss(DenoisedError):
    """The reply is incomplete."""
    code = "DATA_LOSS"


class Unauthenticated(DenoisedError):
    """The server does not know the caller: a token or certificate is missing or wrong."""
    code = "UNAUTHENTICATED"


_CLASSES: Dict[str, Type[DenoisedError]] = {
    cls.code: cls
    for cls in (Cancelled, Unknown, InvalidArgument, DeadlineExceeded, NotFound, AlreadyExists,
                PermissionDenied, ResourceExhausted, FailedPrecondition, Aborted, OutOfRange,
                Unimplemented, Internal, Unavailable, DataLoss, Unauthenticated)
}


def make_error(code: str, message: str, details: bytes = b"") -> DenoisedError:
    """The error of a status; `details` is a serialized google.rpc.Status, if there is one."""
    status = status_pb2.Status()
    try:
        status.ParseFromString(details)
    except DecodeError:
        status.Clear()
    violations: Tuple[FieldViolation, ...] = ()
    retry_after: Optional[float] = None
    info = error_details_pb2.ErrorInfo()
    for detail in status.details:
        # The type's own name on the wire is google.rpc.X; ours is a copy under another name.
        name = detail.type_url.rsplit(".", 1)[-1]
        try:
            if name == "BadRequest":
                bad = error_details_pb2.BadRequest.FromString(detail.value)
                violations = tuple(FieldViolation(v.field, v.description)
                                   for v in bad.field_violations)
            elif name == "RetryInfo":
                delay = error_details_pb2.RetryInfo.FromString(detail.value).retry_delay
                retry_after = max(0.0, delay.seconds + delay.nanos * 1e-9)
            elif name == "ErrorInfo":
                info = error_details_pb2.ErrorInfo.FromString(detail.value)
        except DecodeError:
            continue
    return _CLASSES.get(code, Unknown)(message, violations=violations, retry_after=retry_after,
                                       reason=info.reason, domain=info.domain)
