# SPDX-License-Identifier: Apache-2.0
"""Draws images on a denoised server:

    import denoised

    with denoised.Client("127.0.0.1:50051") as client:
        for image in client.generate(labels=[7], count=16):
            image.save(f"{image.seed}.png")

`AsyncClient` has the same calls for asyncio, `denoised.notebook` shows streams in a notebook.
"""

from ._connection import TLS
from .aio import AsyncClient, AsyncStream
from .client import Client, Stream
from .errors import (Aborted, AlreadyExists, Cancelled, DataLoss, DeadlineExceeded, DenoisedError,
                     FailedPrecondition, FieldViolation, Internal, InvalidArgument, NotFound,
                     OutOfRange, PermissionDenied, ResourceExhausted, Unauthenticated, Unavailable,
                     Unimplemented, Unknown)
from .retry import RetryPolicy
from .types import (Completed, Device, Event, Image, ImageReady, Job, Model, ModelCapabilities,
                    ModelDefaults, ModelLimits, Params, Preview, Previews, Progress, Prompt, Queued,
                    Result, ServerInfo, Started, TimelineEntry, Timing)

__version__ = "0.1.0"

__all__ = [
    "Aborted", "AlreadyExists", "AsyncClient", "AsyncStream", "Cancelled", "Client", "Completed",
    "DataLoss", "DeadlineExceeded", "DenoisedError", "Device", "Event", "FailedPrecondition",
    "FieldViolation", "Image", "ImageReady", "Internal", "InvalidArgument", "Job", "Model",
    "ModelCapabilities", "ModelDefaults", "ModelLimits", "NotFound", "OutOfRange", "Params",
    "PermissionDenied", "Preview", "Previews", "Progress", "Prompt", "Queued", "ResourceExhausted", "Result", "RetryPolicy",
    "ServerInfo", "Started", "Stream", "TLS", "TimelineEntry", "Timing", "Unauthenticated", "Unavailable",
    "Unimplemented", "Unknown",
]
