# SPDX-License-Identifier: Apache-2.0
"""A progress bar and live previews in a notebook. Needs IPython, which every notebook has:

    from denoised import notebook
    result = notebook.watch(client.stream(labels=[7], count=16, previews=True))
"""

from __future__ import annotations

import html
import time
from typing import Any, Dict, Iterable

from .aio import AsyncStream
from .client import Stream
from .types import Completed, Event, Image, ImageReady, Preview, Progress, Queued, Result

_UPDATES_PER_SECOND = 10


def gallery(images: Iterable[Image], edge: int = 96) -> str:
    """HTML: the images beside each other, each with its seed and label."""
    figures = []
    for image in images:
        label = "" if image.label is None else f", label {image.label}"
        title = html.escape(f"seed {image.seed}{label}")
        figures.append(
            f'<img src="{image.data_uri()}" alt="{title}" title="{title}" height="{edge}" '
            f'style="image-rendering: {"pixelated" if image.height < edge else "auto"}; '
            'margin: 2px; display: inline-block">')
    return "<div>" + "".join(figures) + "</div>"


class View:
    """What is shown of a stream; `add` takes its events. For programs that read the stream
    themselves."""

    def __init__(self, edge: int = 96) -> None:
        from IPython.display import HTML, display
        self._html = HTML
        self._edge = edge
        self._images: Dict[int, Image] = {}
        self._done = self._total = 0
        self._text = "waiting"
        self._shown_at = time.monotonic()
        self._handle: Any = display(HTML(self.html()), display_id=True)

    def add(self, event: Event) -> None:
        """Shows what happened, at most ten times a second."""
        if isinstance(event, Queued):
            self._text = f"{event.images_ahead} images ahead" if event.images_ahead else "queued"
        elif isinstance(event, Progress):
            self._done, self._total = event.evaluations_done, event.evaluations_total
            self._text = f"{self._done} of {self._total} evaluations"
        elif isinstance(event, (Preview, ImageReady)):
            self._images[event.image.index] = event.image
        elif isinstance(event, Completed):
            self._done = self._total = max(self._total, 1)
            self._text = f"{len(self._images)} images in {event.timing.total_seconds:.2f} s"
        late = time.monotonic() - self._shown_at >= 1 / _UPDATES_PER_SECOND
        if late or isinstance(event, Completed):
            self._update()

    def failed(self, error: BaseException) -> None:
        """Says why the stream ended early."""
        self._text = f"{type(error).__name__}: {error}"
        self._update()

    def html(self) -> str:
        """What is shown now."""
        bar = f'<progress max="{max(self._total, 1)}" value="{self._done}"></progress>'
        images = [self._images[index] for index in sorted(self._images)]
        return f"<div>{bar} {html.escape(self._text)}</div>{gallery(images, self._edge)}"

    def _update(self) -> None:
        self._shown_at = time.monotonic()
        if self._handle is not None:  # None outside of a notebook
            self._handle.update(self._html(self.html()))


def watch(stream: Stream, *, edge: int = 96) -> Result:
    """Shows a stream until it ends, and returns its images. `edge`: height of an image on the screen.
    Interrupting the cell cancels the stream."""
    view = View(edge)
    with stream:
        try:
            for event in stream:
                view.add(event)
            return stream.result()
        except BaseException as error:
            view.failed(error)
            raise


async def watch_async(stream: AsyncStream, *, edge: int = 96) -> Result:
    """As `watch`, for `AsyncClient`."""
    view = View(edge)
    async with stream:
        try:
            async for event in stream:
                view.add(event)
            return await stream.result()
        except BaseException as error:
            view.failed(error)
            raise
