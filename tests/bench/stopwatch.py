# SPDX-License-Identifier: Apache-2.0
import contextlib
import time


class Stopwatch:
    """The seconds since it was made, without those that a process waited for others."""

    def __init__(self):
        self.begin, self.waited = time.monotonic(), 0.0

    def seconds(self):
        return time.monotonic() - self.begin - self.waited

    @contextlib.contextmanager
    def but_not_before(self, context):
        """Enters `context`, for example a lock; the time until it is entered does not count."""
        begin = time.monotonic()
        with context:
            self.waited += time.monotonic() - begin
            yield
