#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The unchanged `openai` package from PyPI draws, streams and edits on the HTTP port. It is looked
for in this Python and in build/tools/openai, where scripts/bootstrap --tests installs it."""

import argparse
import asyncio
import base64
import io
import json
import os
import pathlib
import sys
import tempfile
import typing
import unittest
import urllib.request
import zlib

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
try:
    import openai
except ImportError:
    own = ROOT / "build/tools/openai/bin/python"
    if own.exists() and pathlib.Path(sys.executable) != own:
        os.execv(own, [own, *sys.argv])
    print("skipped: there is no `openai` package; scripts/bootstrap --tests installs it from PyPI")
    sys.exit(77)

from running import Running

PNG = b"\x89PNG\r\n\x1a\n"


def alpha_png(width, rows):
    """A black PNG with an alpha channel, of one value for each row."""
    def chunk(kind, data):
        return (len(data).to_bytes(4, "big") + kind + data
                + zlib.crc32(kind + data).to_bytes(4, "big"))

    lines = b"".join(b"\0" + bytes([0, alpha]) * width for alpha in rows)
    header = width.to_bytes(4, "big") + len(rows).to_bytes(4, "big") + bytes([8, 4, 0, 0, 0])
    return (PNG + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines))
            + chunk(b"IEND", b""))


def literals(hint):
    """The values of all Literals in a type."""
    if typing.get_origin(hint) is typing.Literal:
        return list(typing.get_args(hint))
    return [value for argument in typing.get_args(hint) for value in literals(argument)]


# What is refused, as it would change the picture: nothing here is transparent, vectors or a film.
REFUSED = {"background": {"transparent"}, "output_format": {"gif", "svg"}}


class OpenAiTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.directory = tempfile.TemporaryDirectory()
        cls.server = Running(BINARY, "--model", f"digits={cls.directory.name}",
                             http_listen="127.0.0.1:0")
        cls.base = cls.server.wait_for("listening")["http"] + "/v1"
        cls.server.wait_for("serving")
        cls.client = openai.OpenAI(base_url=cls.base, api_key="none", max_retries=0)

    @classmethod
    def tearDownClass(cls):
        cls.server.__exit__()
        cls.directory.cleanup()

    def draw(self, prompt="7", **more):
        return self.client.images.generate(model="digits", prompt=prompt, **more)

    def test_generates(self):
        reply = self.draw(n=2, size="64x64", extra_body={"denoised": {"seed": 5}})
        self.assertEqual(len(reply.data), 2)
        self.assertEqual(reply.size, "64x64")
        first, second = (base64.b64decode(image.b64_json) for image in reply.data)
        self.assertTrue(first.startswith(PNG))
        again = self.draw(size="64x64", extra_body={"denoised": {"seed": 6}})
        self.assertEqual(base64.b64decode(again.data[0].b64_json), second, "image i has seed + i")
        self.assertTrue(reply._request_id)

    def test_other_formats(self):
        reply = self.draw(output_format="webp", output_compression=50, quality="high",
                          background="opaque", moderation="low", user="somebody")
        self.assertEqual(base64.b64decode(reply.data[0].b64_json)[8:12], b"WEBP")
        self.assertEqual(reply.output_format, "webp")

    def test_every_value_that_the_package_knows(self):
        """And replies are of its types, which it does not check itself."""
        types = openai.types
        image = base64.b64decode(self.draw().data[0].b64_json)

        def generate(**fields):
            return self.draw(**fields)

        def edit(**fields):
            return self.client.images.edit(model="digits", prompt="7", image=("a.png", image), **fields)

        for call, params, completed in (
                (generate, types.image_generate_params.ImageGenerateParamsBase, types.ImageGenCompletedEvent),
                (edit, types.image_edit_params.ImageEditParamsBase, types.ImageEditCompletedEvent)):
            hints = typing.get_type_hints(params)
            tried = 0
            for field, hint in hints.items():
                if field in ("model", "size"):
                    continue  # names and sizes are the server's own
                for value in literals(hint):
                    with self.subTest(call=call.__name__, field=field, value=value):
                        tried += 1
                        if value in REFUSED.get(field, ()):
                            with self.assertRaises(openai.BadRequestError) as raised:
                                call(**{field: value})
                            self.assertEqual(raised.exception.param, field)
                            continue
                        reply = call(**{field: value})
                        types.ImagesResponse.model_validate(reply.to_dict())
                        if field == "response_format":
                            continue
                        *_, last = call(stream=True, **{field: value})
                        completed.model_validate(last.to_dict())
            self.assertGreater(tried, 15)
            for field in ("safety_identifier", "user"):
                self.assertIn(field, hints)
                self.assertTrue(call(**{field: "somebody"}).data)

    def test_links(self):
        url = self.draw(response_format="url").data[0].url
        with urllib.request.urlopen(url) as file:  # without a token
            self.assertTrue(file.read().startswith(PNG))

    def test_streams_partial_images(self):
        # One that is not yet sent gives way to the next. A busy machine is given more time, and more than once.
        for steps in (300, 1000, 1000, 1000):
            options = {"extra_body": {"denoised": {"seed": 5, "steps": steps}}}
            events = list(self.draw(stream=True, partial_images=2, **options))
            self.assertEqual(events[-1].type, "image_generation.completed")
            partial = [event for event in events if event.type == "image_generation.partial_image"]
            if len(partial) == 2:
                break
        self.assertEqual([event.partial_image_index for event in partial], [0, 1])
        for event in events:
            self.assertTrue(base64.b64decode(event.b64_json).startswith(PNG))
        self.assertEqual(events[-1].usage.total_tokens, 0)
        whole = self.draw(**options)
        self.assertEqual(events[-1].b64_json, whole.data[0].b64_json, "the same bytes")

    def test_edits(self):
        image = base64.b64decode(self.draw().data[0].b64_json)
        named = io.BytesIO(image)
        named.name = "seven.png"
        options = {"model": "digits", "prompt": "7",
                   "extra_body": {"denoised": {"seed": 3, "strength": 0.5}}}
        reply = self.client.images.edit(image=named, **options)
        self.assertTrue(base64.b64decode(reply.data[0].b64_json).startswith(PNG))
        named.seek(0)
        events = list(self.client.images.edit(image=named, stream=True, partial_images=0, **options))
        self.assertEqual([event.type for event in events], ["image_edit.completed"])
        self.assertEqual(events[0].b64_json, reply.data[0].b64_json)

    def test_edits_with_a_mask(self):
        """The lower half is drawn anew, with the bytes of the same request in our own messages."""
        image = base64.b64decode(self.draw().data[0].b64_json)
        size = 32
        mask = alpha_png(size, [255] * (size // 2) + [0] * (size // 2))

        def edit(**more):
            return self.client.images.edit(model="digits", prompt="7", image=("a.png", image),
                                           extra_body={"denoised": {"seed": 3}}, **more)

        drawn = edit(mask=("mask.png", mask)).data[0].b64_json
        body = {"params": {"model": "digits", "seed": 3, "conditions": [{"class_label": 7}],
                           "init_image": {"encoded": base64.b64encode(image).decode()},
                           "mask": {"transparency": base64.b64encode(mask).decode()}}}
        request = urllib.request.Request(self.base + "/generate", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as reply:
            self.assertEqual(json.load(reply)["images"][0]["encoded"], drawn)
        self.assertNotEqual(edit().data[0].b64_json, drawn)
        for wrong, message in ((image, "no alpha channel"), (b"GIF89a", "no PNG"),
                               (alpha_png(2, [0, 0]), "same size")):
            with self.assertRaises(openai.BadRequestError) as raised:
                edit(mask=("mask.png", wrong))
            self.assertEqual(raised.exception.param, "mask")
            self.assertIn(message, raised.exception.message)

    def test_models(self):
        self.assertEqual([model.id for model in self.client.models.list()], ["digits"])
        self.assertEqual(self.client.models.retrieve("digits").owned_by, "denoised")

    def test_errors_are_its_exceptions(self):
        with self.assertRaises(openai.BadRequestError) as raised:
            self.draw("eleven")
        self.assertEqual(raised.exception.param, "prompt")
        self.assertEqual(raised.exception.code, "invalid_fields")
        with self.assertRaises(openai.NotFoundError) as raised:
            self.client.images.generate(model="dall-e-3", prompt="7")
        self.assertEqual(raised.exception.code, "model_not_found")
        with self.assertRaises(openai.BadRequestError):
            self.draw(stream=True, extra_body={"denoised": {"steps": 0}})

    def test_what_cannot_succeed_is_not_tried_again(self):
        patient = openai.OpenAI(base_url=self.base, api_key="none")  # it retries twice by default
        for prompt in ("1", "2"):
            options = {"model": "digits", "prompt": prompt, "extra_body": {"denoised": {"request_id": "taken"}}}
            if prompt == "1":
                patient.images.generate(**options)
                continue
            with self.assertRaises(openai.ConflictError):
                patient.images.generate(**options)
        last = self.draw()._request_id
        with self.server.news:
            # Each after its reply was sent, on its own thread.
            self.server.news.wait_for(lambda: all(any(text in line for line in self.server.lines)
                                                  for text in (last, '"ALREADY_EXISTS"')), 60)
            self.assertEqual(len([line for line in self.server.lines if '"ALREADY_EXISTS"' in line]), 1)

    def test_asyncio(self):
        async def draw():
            async with openai.AsyncOpenAI(base_url=self.base, api_key="none") as client:
                replies = await asyncio.gather(
                    *(client.images.generate(prompt=str(i)) for i in range(10)))
                return [reply.data[0].b64_json for reply in replies]

        self.assertEqual(len(set(asyncio.run(draw()))), 10)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", required=True)
    options, rest = parser.parse_known_args()
    BINARY = options.binary
    unittest.main(argv=[sys.argv[0]] + rest)
