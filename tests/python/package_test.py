#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The Python package as users install it: its wheel, and its types as mypy --strict sees them."""

import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest
import zipfile

import support

if not all(map(importlib.util.find_spec, ("mypy", "pip", "setuptools", "wheel"))):
    print("skipped: install mypy, python3-pip, python3-setuptools and python3-wheel")
    sys.exit(77)

import mypy.api

USE = """
import denoised
from denoised import notebook

client = denoised.Client("images:50051", tls=denoised.TLS(ca="ca.pem"))
result = client.generate(labels=["seven", 3], count=2, sampler="heun", size=(32, 32))
seeds: list[int] = [image.seed for image in result]
for event in client.stream(previews=denoised.Previews(max_edge=64)):
    if isinstance(event, denoised.Preview):
        done: int = event.evaluation

async def main() -> denoised.Result:
    async with denoised.AsyncClient() as fast:
        return await fast.stream(labels=7).result()
"""


class PackageTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = pathlib.Path(folder.name)
        # Away from the source: the build leaves files beside it.
        source = cls.folder / "source"
        shutil.copytree(support.PACKAGE, source, ignore=shutil.ignore_patterns(
            "build", "*.egg-info", "__pycache__", ".mypy_cache"))
        subprocess.run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index",
                        "--no-build-isolation", "--wheel-dir", str(cls.folder), str(source)], check=True)
        cls.wheel, = cls.folder.glob("denoised-*-py3-none-any.whl")
        cls.installed = cls.folder / "installed"
        with zipfile.ZipFile(cls.wheel) as wheel_file:
            cls.names = wheel_file.namelist()
            wheel_file.extractall(cls.installed)

    def check(self, *arguments):
        output, problems, status = mypy.api.run(
            ["--strict", "--config-file", str(support.PACKAGE / "pyproject.toml"),
             "--cache-dir", str(self.folder / "cache"), *arguments])
        return status, output + problems

    def test_the_wheel_has_everything(self):
        source = support.PACKAGE / "src"
        expected = {str(path.relative_to(source)) for suffix in ("py", "pyi", "typed")
                    for path in (source / "denoised").rglob(f"*.{suffix}")}
        self.assertIn("denoised/v1/image_generation_pb2.pyi", expected)
        self.assertEqual({name for name in self.names if ".dist-info/" not in name}, expected)
        program = "import denoised; print(denoised.__version__, denoised.__file__)"
        output = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True,
                                text=True, cwd=self.folder,
                                env={**os.environ, "PYTHONPATH": str(self.installed)}).stdout
        version, file = output.split()
        self.assertTrue(file.startswith(str(self.installed)))
        self.assertIn(f"denoised-{version}.dist-info/METADATA", self.names)

    def test_the_version_is_that_of_the_project(self):
        project = (support.ROOT / "CMakeLists.txt").read_text()
        version = project.split("project(denoised VERSION ")[1].split()[0]
        self.assertTrue(self.wheel.name.startswith(f"denoised-{version}-"), self.wheel.name)

    def test_strict_types(self):
        package = self.folder / "source" / "src" / "denoised"
        status, output = self.check("--python-version", "3.9", str(package))
        self.assertEqual(status, 0, output)
        (self.folder / "use.py").write_text(USE)
        os.environ["MYPYPATH"] = str(self.folder / "source" / "src")
        status, output = self.check(str(self.folder / "use.py"))
        self.assertEqual(status, 0, output)
        (self.folder / "misuse.py").write_text(USE.replace('"heun"', '"best"').replace(
            "labels=7", "labls=7"))
        status, output = self.check(str(self.folder / "misuse.py"))
        self.assertIn('"sampler"', output)
        self.assertIn('"labls"', output)
        self.assertEqual(status, 1)


if __name__ == "__main__":
    sys.exit(unittest.main())
