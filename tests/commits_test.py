#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Figures and records name commits of this history. Skipped without git or the whole history."""

import json
import pathlib
import re
import subprocess
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent
KEYS = ("commit", "before", "source")  # of docs/**/*.json that may name commits


def git(*arguments):
    return subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True, check=False)


def named(value, key=""):
    """The commits that a JSON value names: "2617124", "28a2e8b and 043e867"."""
    if isinstance(value, dict):
        for inner_key, inner in value.items():
            yield from named(inner, inner_key)
    elif isinstance(value, list):
        for inner in value:
            yield from named(inner, key)
    elif isinstance(value, str) and key in KEYS:
        yield from re.findall(r"\b(?=[a-f]*\d)[0-9a-f]{7,40}\b", value)


def unknown(files, is_ancestor):
    """{file: commits that are no ancestors}"""
    found = {file: {commit for commit in named(value) if not is_ancestor(commit)}
             for file, value in files.items()}
    return {file: commits for file, commits in found.items() if commits}


class NamesTest(unittest.TestCase):
    def test_commits_are_found_in_what_figures_say(self):
        figures = {"context": {"commit": "28a2e8b and 043e867", "device": "abcdef1"},
                   "runs": [{"commit": "77132cf, but for a tuner", "before": "f8cdc7f"}],
                   "source": "converted from h200-2026-11-23.json at 117ef96"}
        self.assertEqual(set(named(figures)), {"28a2e8b", "043e867", "77132cf", "f8cdc7f", "117ef96"})

    def test_a_commit_of_another_history_is_seen(self):
        files = {"a.json": {"commit": "1111111"}, "b.json": {"commit": "2222222"}}
        self.assertEqual(unknown(files, lambda commit: commit == "1111111"), {"b.json": {"2222222"}})


class HistoryTest(unittest.TestCase):
    def test_figures_and_records_name_ancestors_of_this_commit(self):
        try:
            top, shallow = git("rev-parse", "--show-toplevel", "--is-shallow-repository").stdout.split("\n")[:2]
        except (FileNotFoundError, ValueError):
            self.skipTest("there is no git, or this is no repository")
        if shallow != "false" or pathlib.Path(top) != ROOT:
            self.skipTest("this is not a clone with the whole history")
        files = {file.relative_to(ROOT).as_posix(): json.loads(file.read_text(encoding="utf-8"))
                 for file in (ROOT / "docs").rglob("*.json")}
        self.assertGreater(sum(len(set(named(value))) for value in files.values()), 20)
        self.assertEqual(unknown(files, lambda commit: git(
            "merge-base", "--is-ancestor", commit, "HEAD").returncode == 0), {})


if __name__ == "__main__":
    unittest.main(verbosity=2)
