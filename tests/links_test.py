#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Links of the Markdown files resolve: files exist, anchors are headings, and the repository has the paths that stand
in code spans. So do pages of docs/ that sources name. Links to other hosts are not followed."""

import pathlib
import re
import subprocess
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent
ROOMS = {"client", "cmake", "deploy", "docs", "engine", "models", "proto", "scripts", "server", "tests", "trainer"}
MADE_BY_READERS = {"deploy/secrets"}


def without_code_blocks(text):
    return re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(text):
    """The anchors that GitHub gives to headings."""
    seen = {}
    for heading in re.findall(r"^#+ (.*)$", without_code_blocks(text), flags=re.MULTILINE):
        heading = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        seen[slug] = seen.get(slug, -1) + 1
        yield f"{slug}-{seen[slug]}" if seen[slug] else slug


def broken(page, text, known, read):
    """Says what of a page points nowhere. `known`: all files and folders; `read(path)`: a file's text."""
    prose = without_code_blocks(text)
    links = re.findall(r"\]\(([^)\s]+)\)", prose) + re.findall(r'(?:src|srcset|href)="([^"]+)"', prose)
    for link in links:
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        path = (ROOT / page).parent.joinpath(name).resolve() if name else ROOT / page
        if not path.is_relative_to(ROOT) or str(path.relative_to(ROOT)) not in known:
            yield f"{page}: {link} does not exist"
        elif anchor and anchor not in anchors(read(path)):
            yield f"{page}: {link}: there is no such heading"
    for span in re.findall(r"`([\w.-]+/[\w./-]+)`", prose):
        path = span.rstrip("/")
        if span.split("/")[0] in ROOMS and path not in known | MADE_BY_READERS:
            yield f"{page}: `{span}` does not exist"


def broken_in_source(source, text, known, read):
    for name, anchor in re.findall(r"\b(docs/[\w-]+\.md)(?:#([\w-]+))?", text):
        if name not in known:
            yield f"{source}: {name} does not exist"
        elif anchor and anchor not in anchors(read(ROOT / name)):
            yield f"{source}: {name}#{anchor}: there is no such heading"


class LinksTest(unittest.TestCase):
    def test_resolve(self):
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
        files = [name for name in listed.stdout.split("\0") if name]
        known = set(files) | {str(parent) for name in files for parent in pathlib.PurePath(name).parents}
        found = []
        for name in files:
            path = ROOT / name
            if not path.is_file() or path.stat().st_size > 2**20 or path == pathlib.Path(__file__).resolve():
                continue
            text = path.read_text(encoding="utf-8", errors="ignore")
            check = broken if path.suffix == ".md" else broken_in_source
            found += check(name, text, known, lambda path: path.read_text(encoding="utf-8"))
        self.assertEqual(found, [], "\n" + "\n".join(found))

    def test_finds_what_is_broken(self):
        known = {"docs/a.md", "docs"}
        text = "# A title: `x`\n[1](a.md#a-title-x) [2](a.md#a) [3](b.md) [4](https://x.y/z) `docs/c.md` `docs` `a/b`\n"
        self.assertEqual(len(list(broken("docs/a.md", text, known, lambda path: text))), 3)
        source = "// docs/a.md#a-title-x, docs/a.md, docs/a.md#b, docs/b.md"
        self.assertEqual(len(list(broken_in_source("x.cc", source, known, lambda path: text))), 2)


if __name__ == "__main__":
    sys.exit(unittest.main())
