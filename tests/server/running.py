# SPDX-License-Identifier: Apache-2.0
"""A denoised process for tests, on free ports, whose log is read as it comes."""

import json
import os
import subprocess
import threading


class Running:
    def __init__(self, binary, *flags, listen="127.0.0.1:0", http_listen="", metrics_listen="",
                 environment=None):
        self.process = subprocess.Popen(
            [binary, "--listen", listen, "--http-listen", http_listen, "--metrics-listen",
             metrics_listen, "--log-format", "json", *flags], stderr=subprocess.PIPE, text=True,
            env={**os.environ, **(environment or {})})
        self.lines = []
        self.ended = False
        self.news = threading.Condition()
        # Somebody must read, or the server waits for room in the pipe.
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self):
        for line in self.process.stderr:
            with self.news:
                self.lines.append(line)
                self.news.notify_all()
        with self.news:
            self.ended = True
            self.news.notify_all()

    def wait_for(self, message, seconds=60):
        """The first line of the log with this message; all before it must be JSON too."""
        found, seen = None, 0

        def come():
            nonlocal found, seen
            while found is None and seen < len(self.lines):
                text = self.lines[seen]
                assert text.startswith("{"), f"not a line of JSON: {text}"
                line = json.loads(text)
                seen += 1
                if line["message"] == message:
                    found = line
            return found or self.ended

        with self.news:
            self.news.wait_for(come, seconds)
            if found is None:
                raise AssertionError(f"no {message!r} in\n" + "".join(self.lines))
        return found

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.reader.join()
        self.process.stderr.close()
