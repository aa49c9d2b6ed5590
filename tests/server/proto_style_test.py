#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Holds the proto against the rules of `buf lint` (DEFAULT and COMMENTS) that apply to us.

SERVICE_SUFFIX is not among them: the service is called ImageGeneration, without "Service". And
WatchJob streams the very events of StreamGenerate, so that one handler reads both.

  proto_style_test.py --protoc /usr/bin/protoc --root proto
"""

import argparse
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

try:
    from google.protobuf import descriptor_pb2
except ImportError as error:
    print(f"skipped: {error}; install python3-protobuf")
    sys.exit(77)

PROTOC = ROOT = None
SHARED_RESPONSES = {"ImageGeneration.WatchJob": "StreamGenerateResponse"}
SNAKE = re.compile(r"^[a-z][a-z0-9]*(_[a-z0-9]+)*$")
PASCAL = re.compile(r"^[A-Z][A-Za-z0-9]*$")


def snake_of(pascal):
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", pascal).upper()


def compile_protos(root, files):
    with tempfile.TemporaryDirectory() as directory:
        output = os.path.join(directory, "set.bin")
        subprocess.run([PROTOC, f"--proto_path={root}", "--include_source_info",
                        f"--descriptor_set_out={output}", *files], check=True)
        data = pathlib.Path(output).read_bytes()
    return descriptor_pb2.FileDescriptorSet.FromString(data).file


def complaints(file):
    """Everything in `file` that breaks a rule, as text."""
    found = []
    commented = {tuple(l.path) for l in file.source_code_info.location if l.leading_comments.strip()}

    def check(condition, text):
        if not condition:
            found.append(f"{file.name}: {text}")

    def comment(path, name):
        check(tuple(path) in commented, f"{name} has no comment")

    check(file.syntax == "proto3", "is not proto3")
    check(re.search(r"\.v\d+$", file.package), f"package {file.package} has no version")
    check(os.path.dirname(file.name) == file.package.replace(".", "/"),
          f"package {file.package} is not in its directory")

    def enum(path, item):
        check(PASCAL.match(item.name), f"enum {item.name} is not PascalCase")
        comment(path, item.name)
        prefix = snake_of(item.name) + "_"
        for index, value in enumerate(item.value):
            comment([*path, 2, index], value.name)
            check(value.name.startswith(prefix), f"{value.name} does not begin with {prefix}")
        check(item.value[0].number == 0 and item.value[0].name == prefix + "UNSPECIFIED",
              f"the zero value of {item.name} is not {prefix}UNSPECIFIED")

    def message(path, item):
        check(PASCAL.match(item.name), f"message {item.name} is not PascalCase")
        comment(path, item.name)
        synthetic = {f.oneof_index for f in item.field if f.proto3_optional}
        for index, field in enumerate(item.field):
            check(SNAKE.match(field.name), f"{item.name}.{field.name} is not snake_case")
            comment([*path, 2, index], f"{item.name}.{field.name}")
        for index, oneof in enumerate(item.oneof_decl):
            if index not in synthetic:
                check(SNAKE.match(oneof.name), f"{item.name}.{oneof.name} is not snake_case")
                comment([*path, 8, index], f"{item.name}.{oneof.name}")
        for index, nested in enumerate(item.nested_type):
            if not nested.options.map_entry:
                message([*path, 3, index], nested)
        for index, nested in enumerate(item.enum_type):
            enum([*path, 4, index], nested)

    for index, item in enumerate(file.message_type):
        message([4, index], item)
    for index, item in enumerate(file.enum_type):
        enum([5, index], item)
    used = {}
    for index, service in enumerate(file.service):
        comment([6, index], service.name)
        for number, method in enumerate(service.method):
            name = f"{service.name}.{method.name}"
            comment([6, index, 2, number], name)
            check(PASCAL.match(method.name), f"rpc {name} is not PascalCase")
            package = f".{file.package}."
            check(method.input_type == package + method.name + "Request",
                  f"{name} takes {method.input_type}, not {method.name}Request")
            response = SHARED_RESPONSES.get(name, method.name + "Response")
            check(method.output_type == package + response,
                  f"{name} returns {method.output_type}, not {response}")
            kinds = (method.input_type, method.output_type)
            for kind in kinds[:1] if name in SHARED_RESPONSES else kinds:
                check(kind not in used, f"{name} shares {kind} with {used.get(kind)}")
                used[kind] = name
    return found


class ProtoStyleTest(unittest.TestCase):
    def test_our_protos_keep_the_rules(self):
        files = sorted(str(p.relative_to(ROOT)) for p in pathlib.Path(ROOT, "denoised").rglob("*.proto"))
        self.assertTrue(files)
        for file in compile_protos(ROOT, files):
            self.assertEqual(complaints(file), [])

    def test_every_rule_catches_its_breach(self):
        bad = """
syntax = "proto3";
package bad;
// Commented.
service S {
  rpc Do(Thing) returns (Thing);
}
// Commented.
enum Color { RED = 0; }
// Commented.
message Thing {
  int32 camelCase = 1;
  oneof choice { 
    // Commented.
    int32 a = 2; 
  }
  // Commented.
  optional int32 fine = 3;
}
message bare {}
"""
        with tempfile.TemporaryDirectory() as directory:
            pathlib.Path(directory, "bad.proto").write_text(bad)
            text = "\n".join(complaints(compile_protos(directory, ["bad.proto"])[0]))
        for expected in ("package bad has no version", "is not in its directory",
                         "S.Do has no comment", "takes .bad.Thing", "returns .bad.Thing",
                         "shares .bad.Thing", "RED has no comment", "RED does not begin with COLOR_",
                         "not COLOR_UNSPECIFIED", "Thing.camelCase is not snake_case",
                         "Thing.camelCase has no comment", "Thing.choice has no comment",
                         "message bare is not PascalCase", "bare has no comment"):
            self.assertIn(expected, text)
        self.assertNotIn("_fine", text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--protoc", default="protoc")
    parser.add_argument("--root", required=True, help="the proto directory")
    options, rest = parser.parse_known_args()
    PROTOC, ROOT = options.protoc, options.root
    unittest.main(argv=[sys.argv[0]] + rest)
