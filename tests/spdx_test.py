#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every source file says its licence, and scripts/spdx notices one that does not."""

import pathlib
import subprocess
import sys
import tempfile
import unittest

SCRIPT = pathlib.Path(__file__).resolve().parent.parent / "scripts" / "spdx"


def spdx(*arguments):
    return subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True)


class Spdx(unittest.TestCase):
    def test_every_source_file_says_its_licence(self):
        result = spdx()
        self.assertEqual(result.returncode, 0, result.stdout[-3000:])

    def test_missing_lines_are_noticed_and_written(self):
        line = "SPDX-License-Identifier: Apache-2.0\n"
        sources = {
            "a.h": ("#pragma once\n", f"// {line}#pragma once\n"),
            "b.cu": (f"// {line}int x;\n", f"// {line}int x;\n"),
            "c.sh": ("#!/bin/sh\nls\n", f"#!/bin/sh\n# {line}ls\n"),
            "script": ("#!/usr/bin/env bash\n# Words.\n", f"#!/usr/bin/env bash\n# {line}# Words.\n"),
            "CMakeLists.txt": ("project(x)\n", f"# {line}project(x)\n"),
            "empty.py": ("", f"# {line}"),
            "text.md": ("Words.\n", "Words.\n"),
            "late.cc": (f"int x;\n// {line}", f"// {line}int x;\n// {line}"),
        }
        with tempfile.TemporaryDirectory() as directory:
            root = pathlib.Path(directory)
            subprocess.run(["git", "init", "-q", root], check=True)
            for name, (before, _) in sources.items():
                (root / name).write_text(before)
            subprocess.run(["git", "-C", root, "add", "."], check=True)
            found = spdx("--root", root)
            self.assertEqual(found.returncode, 1)
            lacking = {text.split(":")[0] for text in found.stdout.splitlines()[:-1]}
            changed = {name for name, (before, after) in sources.items() if before != after}
            self.assertEqual(lacking, changed)
            self.assertEqual(spdx("--root", root, "--fix").returncode, 0)
            for name, (_, after) in sources.items():
                self.assertEqual((root / name).read_text(), after, name)
            self.assertEqual(spdx("--root", root).returncode, 0)


if __name__ == "__main__":
    unittest.main()
