#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Holds the proto against the rules of `buf lint` (DEFAULT and COMMENTS) that apply to us, and of `buf
breaking`: what proto_contract.txt lists must stay. With a buf, on the PATH or from scripts/bootstrap --tests,
`buf lint` and `buf breaking` are run as well; the latter compares with proto_contract.binpb.

SERVICE_SUFFIX is not among the rules: the service is called ImageGeneration, without "Service". And
WatchJob streams the very events of StreamGenerate, so that one handler reads both.

  proto_style_test.py --protoc /usr/bin/protoc --root proto            compares
  proto_style_test.py --protoc /usr/bin/protoc --root proto --write    writes both files anew

Until the first release they may be written anew after any change; from then on only after one that adds.
"""

import argparse
import os
import pathlib
import re
import shutil
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
SOURCES = pathlib.Path(__file__).resolve().parents[2]
# First the version that the rules were tried with: what DEFAULT means depends on it.
BUF = shutil.which(SOURCES / "build/tools/buf/bin/buf") or shutil.which("buf")
WITHOUT_BUF = "there is no buf; run scripts/bootstrap --tests, or pip install buf-bin"
SHARED_RESPONSES = {"ImageGeneration.WatchJob": "StreamGenerateResponse"}
SNAKE = re.compile(r"^[a-z][a-z0-9]*(_[a-z0-9]+)*$")
PASCAL = re.compile(r"^[A-Z][A-Za-z0-9]*$")


def snake_of(pascal):
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", pascal).upper()


def run_protoc(root, files, output, *options):
    subprocess.run([PROTOC, f"--proto_path={root}", *options, f"--descriptor_set_out={output}", *files], check=True)
    return descriptor_pb2.FileDescriptorSet.FromString(pathlib.Path(output).read_bytes()).file


def compile_protos(root, files):
    with tempfile.TemporaryDirectory() as directory:
        return run_protoc(root, files, os.path.join(directory, "set.binpb"), "--include_source_info")


CONTRACT = pathlib.Path(__file__).with_name("proto_contract.txt")
IMAGE = CONTRACT.with_suffix(".binpb")  # the same, and all else that buf compares


def buf(*arguments):
    """What it prints: nothing if all is well."""
    with tempfile.TemporaryDirectory() as cache:  # without a home, buf's would be the folder it runs in
        run = subprocess.run([BUF, *arguments], capture_output=True, text=True, check=False,
                             env=os.environ | {"BUF_CACHE_DIR": cache})
    assert (run.returncode == 0) == (run.stdout + run.stderr == ""), run
    return run.stdout + run.stderr


def contract(files):
    """What clients depend on, a line each: fields by name, number and type, values, methods."""
    lines = []

    def enum(path, item):
        lines.extend(f"{path}.{item.name}.{value.name} = {value.number}" for value in item.value)

    def message(path, item):
        path = f"{path}.{item.name}"
        lines.append(f"message {path}")
        for field in item.field:
            kind = field.type_name or field.Type.Name(field.type)[len("TYPE_"):].lower()
            label = {1: "", 2: "required ", 3: "repeated "}[field.label]
            if field.proto3_optional:
                label = "optional "
            elif field.HasField("oneof_index"):
                label = f"oneof {item.oneof_decl[field.oneof_index].name} "
            lines.append(f"{path}.{field.name} = {field.number}: {label}{kind.lstrip('.')}")
        for nested in item.nested_type:
            message(path, nested)
        for nested in item.enum_type:
            enum(path, nested)

    for file in files:
        for item in file.message_type:
            message(file.package, item)
        for item in file.enum_type:
            enum(file.package, item)
        for service in file.service:
            for method in service.method:
                stream = ["stream " if streaming else ""
                          for streaming in (method.client_streaming, method.server_streaming)]
                lines.append(f"rpc {file.package}.{service.name}.{method.name}({stream[0]}"
                             f"{method.input_type.lstrip('.')}) -> {stream[1]}{method.output_type.lstrip('.')}")
    return sorted(lines)


def all_protos():
    return sorted(str(p.relative_to(ROOT)) for p in pathlib.Path(ROOT).rglob("*.proto"))


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

    def test_what_clients_depend_on_stays(self):
        now = contract(compile_protos(ROOT, all_protos()))
        known = CONTRACT.read_text().splitlines()
        hint = f"; if that is meant, run {pathlib.Path(__file__).name} --write"
        self.assertEqual(sorted(set(known) - set(now)), [], "gone from the contract" + hint)
        self.assertEqual(sorted(set(now) - set(known)), [], f"new, and not in {CONTRACT.name}" + hint)

    def test_the_contract_tells_each_change(self):
        first = """
syntax = "proto3";
package p;
enum Color { COLOR_UNSPECIFIED = 0; COLOR_RED = 1; }
message Thing {
  int32 size = 1;
  optional string name = 2;
  repeated Color colors = 3;
  oneof choice { bytes file = 4; }
}
service S { rpc Do(Thing) returns (stream Thing); }
"""
        def lines(text):
            with tempfile.TemporaryDirectory() as directory:
                pathlib.Path(directory, "p.proto").write_text(text)
                return set(contract(compile_protos(directory, ["p.proto"])))
        before = lines(first)
        for old, new in (("COLOR_RED = 1", "COLOR_RED = 2"), ("COLOR_RED = 1", "COLOR_BLUE = 1"),
                         ("int32 size = 1", "int32 size = 9"), ("int32 size", "int64 size"),
                         ("int32 size", "int32 extent"), ("optional string", "string"),
                         ("repeated Color", "Color"), ("oneof choice", "oneof other"),
                         ("oneof choice { bytes file = 4; }", "bytes file = 4;"),
                         ("rpc Do(Thing)", "rpc Do(stream Thing)"), ("(stream Thing)", "(Thing)"),
                         ("rpc Do", "rpc Make")):
            with self.subTest(old=old, new=new):
                self.assertTrue(before - lines(first.replace(old, new)))
                if BUF:
                    self.assertIn("p.proto:", self.breaks(first, first.replace(old, new)))
        more = first + "message More { bool is = 1; }"
        self.assertLess(before, lines(more))
        if BUF:
            self.assertEqual(self.breaks(first, more), "")

    def breaks(self, before, after):
        """What `buf breaking` says of the change, by the rules of our buf.yaml."""
        with tempfile.TemporaryDirectory() as directory:
            for name, text in (("before", before), ("after", after)):
                proto = pathlib.Path(directory, name, "proto")
                proto.mkdir(parents=True)
                proto.joinpath("p.proto").write_text(text)
            return buf("breaking", f"{directory}/after", "--against", f"{directory}/before",
                       "--config", SOURCES / "buf.yaml", "--against-config", SOURCES / "buf.yaml")

    def test_both_files_have_the_same_contract(self):
        image = descriptor_pb2.FileDescriptorSet.FromString(IMAGE.read_bytes()).file
        ours = [file for file in image if file.package != "google.protobuf"]
        self.assertEqual(contract(ours), CONTRACT.read_text().splitlines(), "run --write")

    @unittest.skipUnless(BUF, WITHOUT_BUF)
    def test_buf_lint(self):
        self.assertEqual(buf("lint", SOURCES), "")

    @unittest.skipUnless(BUF, WITHOUT_BUF)
    def test_buf_breaking(self):
        # Imports are protobuf's own files, and each protoc has its version of them.
        self.assertEqual(buf("breaking", SOURCES, "--against", IMAGE, "--exclude-imports"), "")

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
    parser.add_argument("--write", action="store_true", help=f"write {CONTRACT.name} and {IMAGE.name}")
    options, rest = parser.parse_known_args()
    PROTOC, ROOT = options.protoc, options.root
    if options.write:
        run_protoc(ROOT, all_protos(), IMAGE, "--include_imports")
        CONTRACT.write_text("\n".join(contract(compile_protos(ROOT, all_protos()))) + "\n")
        sys.exit(0)
    unittest.main(argv=[sys.argv[0]] + rest, verbosity=2)
