# SPDX-License-Identifier: Apache-2.0
"""Programs that measure in turns, and a log of the GPU's clock and power meanwhile.

The protocol is that of turns.h: a program writes one line of JSON when it has started and one for
each line that it reads, "VERB NAME".
"""
import contextlib
import json
import os
import pty
import queue
import statistics
import subprocess
import threading
import time

CLOCKS = {"sm_mhz": "clocks.sm", "watts": "power.draw.instant", "celsius": "temperature.gpu"}
CLOCKS_EVERY_MS = 50


class Worker:
    """A program that answers requests. After a request that it did not answer in time it is ended,
    and answers everything with an error."""

    def __init__(self, name, command, log, environment=None):
        self.name, self.error = name, None
        self.log = open(log, "ab")
        self.lines = queue.SimpleQueue()
        try:
            self.process = subprocess.Popen(
                [str(part) for part in command], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=self.log, env=environment, text=True, bufsize=1)
        except OSError as error:
            self.process, self.error = None, f"{name}: {error}"
            return
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self):
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def _fail(self, why):
        self.error = f"{self.name}: {why}; see workers.log"
        self.process.kill()

    def answer(self, seconds):
        """The next line as a dict; {"error": …} where there is none."""
        if self.error:
            return {"error": self.error}
        try:
            line = self.lines.get(timeout=max(0.0, seconds))
        except queue.Empty:
            self._fail(f"no answer within {seconds:.0f} s")
            return {"error": self.error}
        if line is None:
            self._fail("ended")
            return {"error": self.error}
        try:
            return json.loads(line)
        except ValueError:
            self._fail(f"wrote no JSON: {line[:100]!r}")
            return {"error": self.error}

    def has_answer(self):
        """Whether answer() would return at once, if only an error."""
        return bool(self.error) or not self.lines.empty()

    def send(self, verb, name=""):
        if self.error:
            return
        try:
            self.process.stdin.write(f"{verb} {name}".rstrip() + "\n")
            self.process.stdin.flush()
        except OSError:
            self._fail("ended")

    def ask(self, verb, name, seconds):
        self.send(verb, name)
        return self.answer(seconds)

    def close(self):
        if self.process is None:
            self.log.close()
            return
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.reader.join(timeout=10)
        self.process.stdout.close()
        self.log.close()


class GpuLog:
    """nvidia-smi in a loop. Without it, or on a machine without a GPU, nothing is logged."""

    def __init__(self):
        self.samples, self.process = [], None
        gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
        command = ["nvidia-smi", f"--query-gpu={','.join(CLOCKS.values())}",
                   "--format=csv,noheader,nounits", "-i", gpu]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=20)
            # On a pipe lines could wait in its buffer; on a terminal they come as they are written.
            ours, its = pty.openpty()
            self.process = subprocess.Popen([*command, "-lms", str(CLOCKS_EVERY_MS)], stdout=its)
            os.close(its)
        except (OSError, subprocess.SubprocessError):
            return
        threading.Thread(target=self._read, args=(ours,), daemon=True).start()

    def _read(self, terminal):
        with os.fdopen(terminal) as lines, contextlib.suppress(OSError):  # at the end of the program
            for line in lines:
                with contextlib.suppress(ValueError):
                    self.samples.append((time.monotonic(), [float(v) for v in line.split(",")]))

    def since(self, begin):
        """Medians of what was logged since then; None without samples."""
        return self.between(begin, float("inf"))

    def between(self, begin, end):
        """The same until `end`. Both are times of the monotonic clock, which all processes share."""
        values = [value for at, value in list(self.samples) if begin <= at <= end]
        if not values:
            return None
        return {name: statistics.median(column) for name, column in zip(CLOCKS, zip(*values))}

    def close(self):
        if self.process:
            self.process.kill()
            self.process.wait()


def alternate(ours, peer, rounds, log, seconds):
    """Asks two (worker, name) to measure in turns: ours, peer, peer, ours, ours, peer, … Who is
    first alternates, so that neither always finds the GPU as the other has left it.

    Returns {"pairs": [[ours, peer], …], "clocks": {"ours": …, "peer": …}} and, where a worker
    failed, "error". The unit is that of the answers, "ms" or "us".
    """
    pairs, clocks, extra = [], {"ours": [], "peer": []}, {}
    result = {"pairs": pairs}
    for i in range(rounds):
        pair = {}
        sides = [("ours", ours), ("peer", peer)]
        for side, (worker, name) in sides if i % 2 == 0 else reversed(sides):
            begin = time.monotonic()
            answer = worker.ask("measure", name, seconds)
            if "error" in answer:
                result["error"] = answer["error"]
                break
            clocks[side].append(log.since(begin))
            pair[side] = answer.pop("ms") if "ms" in answer else answer.pop("us")
            for key, value in answer.items():
                extra.setdefault(side, {}).setdefault(key, []).append(value)
        if len(pair) < 2:
            break
        pairs.append([pair["ours"], pair["peer"]])
    result["clocks"] = {
        side: {name: statistics.median(each[name] for each in logged) for name in CLOCKS}
        for side, logged in ((side, [each for each in some if each]) for side, some in
                             clocks.items()) if logged}
    return result | ({"extra": extra} if extra else {})
