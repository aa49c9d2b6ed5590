#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""/openapi.json against what the HTTP port answers: every reply fits its schema, and every path that
is described is there."""

import argparse
import json
import sys
import tempfile
import unittest
import urllib.error
import urllib.request

try:
    import jsonschema
except ImportError:
    print("skipped: there is no python3-jsonschema; scripts/bootstrap --tests installs it")
    sys.exit(77)

from running import Running


class OpenApiTest(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.model = directory.name
        self.server = Running(BINARY, "--model", f"digits={directory.name}",
                              "--model-roots", directory.name, http_listen="127.0.0.1:0")
        self.addCleanup(self.server.__exit__)
        self.base = self.server.wait_for("listening")["http"]
        self.server.wait_for("serving")
        self.document = self.ask("GET", "/openapi.json")[1]

    def ask(self, method, path, body=None, accept=None):
        """Status and JSON, or the data of all events."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.base + path, data=data, method=method)
        if data is not None:
            request.add_header("Content-Type", "application/json")
        if accept:
            request.add_header("Accept", accept)
        try:
            with urllib.request.urlopen(request, timeout=30) as reply:
                text, status = reply.read().decode(), reply.status
        except urllib.error.HTTPError as error:
            text, status = error.read().decode(), error.code
        if accept and status == 200:
            return status, [json.loads(line[6:]) for line in text.splitlines()
                            if line.startswith("data: ")]
        return status, json.loads(text)

    def check(self, value, schema):
        # The schemas refer to each other from the root of the document.
        schema = {**schema, "components": self.document["components"]}
        jsonschema.Draft202012Validator(schema).validate(value)

    def answer(self, method, template, body=None, status=200, accept=None, **names):
        operation = self.document["paths"][template][method.lower()]
        path = template
        for name, value in names.items():
            path = path.replace("{" + name + "}", value)
        if body is not None:
            self.check(body, operation["requestBody"]["content"]["application/json"]["schema"])
        got, reply = self.ask(method, path, body, accept)
        self.assertEqual(got, status, reply)
        key = "200" if status == 200 else "default"
        kind = accept if accept and status == 200 else "application/json"
        schema = operation["responses"][key]["content"][kind]["schema"]
        for one in reply if isinstance(reply, list) else [reply]:
            self.check(one, schema)
        self.seen.add((method, template))
        return reply

    def test_replies_fit(self):
        self.seen = set()
        params = {"request_id": "mine", "seed": "1", "steps": 3, "include_timings": True,
                  "conditions": [{"class_label": 3}]}
        self.answer("POST", "/v1/generate", {"params": params})
        events = self.answer("POST", "/v1/generate", {"params": {"steps": 50}, "preview": {}},
                             accept="text/event-stream")
        self.assertIn("completed", events[-1])
        self.answer("POST", "/v1/generate", {"params": {"steps": 0}}, status=400)
        self.answer("GET", "/v1/jobs")
        self.answer("GET", "/v1/jobs/{request_id}", request_id="mine")
        self.answer("GET", "/v1/jobs/{request_id}/events", request_id="mine",
                    accept="text/event-stream")
        self.answer("GET", "/v1/jobs/{request_id}", request_id="other", status=404)
        self.answer("POST", "/v1/jobs/{request_id}/cancel", request_id="mine")
        self.answer("GET", "/v1/models")
        self.answer("GET", "/v1/models/{name}", name="digits")
        self.answer("GET", "/v1/server")
        self.answer("POST", "/v1/models", {"name": "more", "directory": self.model})
        self.answer("PUT", "/v1/aliases/{alias}", {"target": "more"}, alias="best")
        self.answer("DELETE", "/v1/aliases/{alias}", alias="best")
        self.answer("DELETE", "/v1/models/{name}", name="more")
        self.answer("POST", "/v1/images/generations", {"prompt": "3", "model": "digits", "n": 2})
        self.answer("POST", "/v1/images/generations", {"prompt": "x", "model": "digits"}, status=400)
        image = self.ask("POST", "/v1/images/generations", {"prompt": "3"})[1]["data"][0]["b64_json"]
        self.answer("POST", "/v1/images/edits",
                    {"prompt": "3", "images": [{"image_url": "data:image/png;base64," + image}]})
        partial = {"prompt": "3", "stream": True, "partial_images": 2, "denoised": {"steps": 50}}
        for path, more in (("/v1/images/generations", {}),
                           ("/v1/images/edits",
                            {"images": [{"image_url": "data:image/png;base64," + image}]})):
            events = self.answer("POST", path, {**partial, **more}, accept="text/event-stream")
            self.assertIn("usage", events[-1])
        json_paths = {
            (method.upper(), path)
            for path, operations in self.document["paths"].items()
            for method, operation in operations.items()
            if "application/json" in operation["responses"]["200"].get("content", {})
            or "text/event-stream" in operation["responses"]["200"].get("content", {})
        }
        self.assertEqual(json_paths - self.seen, {("GET", "/openapi.json")}, "not tried")

    def test_headers_are_described(self):
        def headers(method, path):
            return {parameter["name"]
                    for parameter in self.document["paths"][path][method]["parameters"]
                    if parameter["in"] == "header"}
        self.assertEqual(headers("get", "/v1/jobs/{request_id}/events"),
                         {"Last-Event-ID", "Request-Timeout"})
        self.assertEqual(headers("post", "/v1/images/edits"), {"Request-Timeout"})

    def test_a_wrong_reply_is_found(self):
        schema = {"$ref": "#/components/schemas/GenerateResponse"}
        with self.assertRaises(jsonschema.ValidationError):
            self.check({"images": []}, schema)
        content = self.document["paths"]["/v1/images/edits"]["post"]["responses"]["200"]["content"]
        with self.assertRaises(jsonschema.ValidationError):
            self.check({"type": "image_edit.completed", "b64_json": ""},
                       content["text/event-stream"]["schema"])
        for wrong in ({"seed": 1.5}, {"sampler": "ddim"}, {"stepps": 3}):
            with self.assertRaises(jsonschema.ValidationError):
                self.check(wrong, {"$ref": "#/components/schemas/GenerationParams"})

    def test_the_document_is_openapi(self):
        self.assertRegex(self.document["openapi"], r"^3\.1\.")
        for schema in self.document["components"]["schemas"].values():
            jsonschema.Draft202012Validator.check_schema(schema)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", required=True)
    options, rest = parser.parse_known_args()
    BINARY = options.binary
    unittest.main(argv=[sys.argv[0]] + rest)
