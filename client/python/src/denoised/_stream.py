# SPDX-License-Identifier: Apache-2.0
"""What a stream of events needs beside its connection: what was received, and how it goes on after a
break. Without input and output, so that both kinds of client share it."""

from __future__ import annotations

import enum
from typing import Any, Dict, Optional, Set, Tuple

from denoised.v1 import image_generation_pb2 as pb

from . import _convert
from ._connection import Headers
from .errors import Cancelled, DataLoss, DenoisedError, Unavailable
from .retry import Attempts
from .types import Completed, Event, Image, ImageReady, Params, Preview, Progress, Queued, Result
from .types import Started


class News(enum.Enum):
    """What an event says that was not known."""

    NONE = 0
    PLACE = 1
    """Another place in the queue, but none further in front than any before."""
    FURTHER = 2
    """The request has come further."""


class SeenEvents:
    """The events that the caller has received. A stream that is retried repeats them."""

    def __init__(self) -> None:
        self._started = False
        self._place: Optional[Tuple[int, int]] = None  # requests and images in front
        self._foremost: Optional[Tuple[int, int]] = None
        self._evaluations_done = -1
        self._previews: Dict[int, int] = {}  # latest evaluation by image
        self._images: Set[int] = set()

    def add(self, event: Event) -> News:
        """What `event` says that was not known; it is known from then on. Progress and previews of a
        second server are not new until it is further than the first one was."""
        if not isinstance(event, Queued):
            return News.FURTHER if self._is_further(event) else News.NONE
        place = (event.position, event.images_ahead)
        if self._started or place == self._place:
            return News.NONE
        self._place = place
        if self._foremost is not None and place >= self._foremost:
            return News.PLACE
        self._foremost = place
        return News.FURTHER

    def _is_further(self, event: Event) -> bool:
        if isinstance(event, Started):
            new, self._started = not self._started, True
            return new
        if isinstance(event, Progress):
            new = event.evaluations_done > self._evaluations_done
            self._evaluations_done = max(self._evaluations_done, event.evaluations_done)
            return new
        if isinstance(event, Preview):
            index = event.image.index
            if index in self._images or event.evaluation <= self._previews.get(index, -1):
                return False
            self._previews[index] = event.evaluation
            return True
        if isinstance(event, ImageReady):
            new = event.image.index not in self._images
            self._images.add(event.image.index)
            return new
        return True


class StreamState:
    """One stream with its retries. `watch` follows a job; without it, `generate`, which is set before the
    first attempt, starts one."""

    def __init__(self, attempts: Attempts, headers: Headers,
                 watch: Optional[pb.WatchJobRequest] = None) -> None:
        self.attempts = attempts
        self.headers = headers
        self.generate: Optional[pb.StreamGenerateRequest] = None
        self._watch = watch or pb.WatchJobRequest()
        self._seen = SeenEvents()
        self._received = False  # in any attempt
        self._completed: Optional[Completed] = None
        self._images: Dict[int, Image] = {}
        self.params: Optional[Params] = None

    @property
    def request_id(self) -> str:
        """Empty while it is the server's to choose."""
        asked = self.generate.params.request_id if self.generate is not None else ""
        return self._watch.request_id or asked

    def call(self) -> Tuple[str, Any]:
        """The method and message of the next attempt."""
        if self.generate is not None:
            return "StreamGenerate", self.generate
        return "WatchJob", self._watch

    def received(self, message: pb.StreamGenerateResponse) -> Optional[Event]:
        """The event to pass on, or None."""
        self._received = True
        self._watch.request_id = message.request_id
        self._watch.after_sequence = message.sequence
        event = _convert.event(message, self.params)
        if event is None:
            return None
        if isinstance(event, (Queued, Completed)):
            self.params = event.params
        news = self._seen.add(event)
        if news is News.NONE:
            return None
        if news is News.FURTHER:
            self.attempts.renew()
        if isinstance(event, ImageReady):
            self._images[event.image.index] = event.image
        if isinstance(event, Completed):
            self._completed = event
        return event

    def ended(self, error: Optional[DenoisedError]) -> Optional[float]:
        """Returns seconds to wait before the next attempt, or None at the good end. Raises what the
        caller gets."""
        if error is None and self._completed is None:
            error = DataLoss("the stream ended without its last event; see the server's log")
        elif isinstance(error, (Unavailable, Cancelled)) and self._completed is not None:
            error = None  # the connection was lost or closed after the last event
        if error is None:
            self.attempts.succeeded()
            return None
        delay = self.attempts.failed(error)
        # An error with details is how the job ended; watching it again would only return the same.
        final = self.generate is None and self._received and error.domain != ""
        if delay is None or final:
            raise error
        return delay

    def result(self) -> Result:
        """After the good end."""
        assert self._completed is not None
        return Result(images=[self._images[i] for i in sorted(self._images)],
                      params=self._completed.params, timing=self._completed.timing,
                      timeline=self._completed.timeline)
