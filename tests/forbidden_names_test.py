#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Some names of the standard library and of the system are for one file only; everything else uses what that
file offers. Run: tests/forbidden_names_test.py"""

import pathlib
import re
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent
ROOMS = ["engine", "flags", "server", "client", "trainer"]
SOURCES = {".h", ".cc", ".cu", ".cuh"}

# (what, why and what instead, files that may have it)
RULES = [
    (
        re.compile(r"\bstd::(?:(?:recursive_|shared_|timed_)*mutex|lock_guard|unique_lock|scoped_lock|shared_lock)\b"),
        "clang does not check its locks: use Mutex and MutexLock of engine/core/mutex.h, or client/denoised/mutex.h",
        {"engine/core/mutex.h", "client/denoised/mutex.h"},
    ),
    (
        re.compile(r"\bstd::condition_variable\b"),
        "it needs a std::mutex: use ConditionVariable of engine/core/condition_variable.h; in the client, "
        "std::condition_variable_any",
        set(),
    ),
    (
        re.compile(r"\b(?:hardware_concurrency|get_nprocs(?:_conf)?|omp_get_num_procs|_SC_NPROCESSORS_\w+)\b"),
        "it ignores the quota of the control group: use AvailableCores() of engine/core/available_cores.h",
        {"engine/core/available_cores.cc"},
    ),
]


def without_comments(text):
    """The text with comments and string literals as blanks, lines kept."""
    pattern = r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"'
    return re.sub(pattern, lambda match: re.sub(r"[^\n]", " ", match.group()), text, flags=re.DOTALL)


def complaints(path, text):
    found = []
    for number, line in enumerate(without_comments(text).splitlines(), 1):
        for pattern, reason, allowed in RULES:
            match = pattern.search(line)
            if match and path not in allowed:
                found.append(f"{path}:{number}: {match.group()}: {reason}")
    return found


class ForbiddenNames(unittest.TestCase):
    def test_no_file_has_one(self):
        files = [file for room in ROOMS for file in (ROOT / room).rglob("*") if file.suffix in SOURCES]
        self.assertGreater(len(files), 300)
        found = []
        for file in files:
            found += complaints(file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8"))
        self.assertEqual(found, [], "\n".join(found))

    def test_planted_ones_are_found(self):
        for line in [
            "  std::mutex mutex_;",
            "std::shared_mutex m;",
            "const std::lock_guard lock(m);",
            "std::unique_lock<std::mutex> lock(m);",
            "std::condition_variable changed_;",
            "int n = std::thread::hardware_concurrency();",
            "sysconf(_SC_NPROCESSORS_ONLN)",
        ]:
            self.assertEqual(len(complaints("server/server.cc", f"// A comment.\n{line}\n")), 1, line)
        for line in [
            "// unlike std::mutex",
            '"std::mutex"',
            "std::condition_variable_any changed_;",
            "MutexLock lock(&mutex_);",
            "AvailableCores()",
        ]:
            self.assertEqual(complaints("server/server.cc", line), [], line)
        self.assertEqual(complaints("engine/core/mutex.h", "std::mutex mutex_;"), [])
        self.assertEqual(len(complaints("engine/core/mutex.h", "std::thread::hardware_concurrency()")), 1)


if __name__ == "__main__":
    unittest.main()
