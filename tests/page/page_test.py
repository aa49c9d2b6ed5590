#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The page draws, shows previews, cancels, asks for a token, and survives broken connections and a server that
drains or restarts: mnist-32 on the CPU, in Chromium."""

import base64
import hashlib
import importlib.util
import json
import os
import pathlib
import shutil
import signal
import random
import re
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import unittest
import urllib.parse
import urllib.request
import uuid
import zlib

import browser

from selenium.webdriver.common.keys import Keys

from free_port import free_port
from proxy import Proxy
from running import Running

MODEL = f"digits={browser.ROOT / 'models' / 'mnist-32'}"
WORDS = f"words={browser.ROOT / 'tests' / 'models' / 'latent' / 'sd1'}"  # small, and reads prompts

# Steps of a picture whose preview a test waits for. When the picture is there its previews are not sent any more, and
# a busy machine may be late with the first.
LONG = 300

POLICY = ("default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
          "manifest-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'")


def serve(port, *flags):
    server = Running(browser.binary(), "--model", MODEL, *flags, http_listen=f"127.0.0.1:{port}")
    server.wait_for("serving", seconds=300)
    return server


def ask(port, path, body=None, method=None, **headers):
    """The reply, still to be read."""
    return urllib.request.urlopen(urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", data=None if body is None else json.dumps(body).encode(), method=method,
        headers={"Content-Type": "application/json", **headers}), timeout=300)


def call(port, path, body=None):
    with ask(port, path, body) as reply:
        return json.load(reply)


def draw(port, **params):
    """What the server draws for somebody else."""
    reply = call(port, "/v1/generate", {"params": {"model": "digits", **params}})
    return [base64.b64decode(image["encoded"]) for image in reply["images"]]


def occupy(port, priority="PRIORITY_INTERACTIVE"):
    """Starts a request of somebody else, of 64,000 evaluations with one slot: it ends when cancel() ends it. Returns
    its id."""
    job = f"long-{uuid.uuid4()}"
    params = {"model": "digits", "request_id": job, "count": 64, "steps": 1000, "priority": priority,
              "disconnect_policy": "DISCONNECT_POLICY_CONTINUE"}
    with ask(port, "/v1/generate", {"params": params}, Accept="text/event-stream") as reply:
        reply.readline()
    return job


def cancel(port, job):
    call(port, f"/v1/jobs/{job}/cancel", {})


def end_of(port, job):
    """The state in which a job ends, when it does."""
    with ask(port, f"/v1/jobs/{job}/events") as reply:
        reply.read()
    return call(port, f"/v1/jobs/{job}")["job"]["state"]


class Holding(Proxy):
    """Holds the first stream of events back after its first preview, until release() or cut(). What a test does then
    does not depend on how fast a server draws."""

    def __init__(self, target):
        self.first, self.released = True, threading.Event()
        super().__init__(target)

    def _copy(self, source, sink):
        try:
            if source.getpeername() == self.target:
                self._hold(source, sink)
        except OSError:
            pass  # cut; the base class tells the other end
        super()._copy(source, sink)

    def _hold(self, source, sink):
        """Forwards what a server says, until the stream has been held back."""
        seen = b""
        while self.first and (data := source.recv(65536)):
            seen += data
            found = re.search(rb"event: preview\r?\n.*?\n\r?\n", seen, re.DOTALL)
            now = len(data) - (len(seen) - found.end() if found else 0)
            sink.sendall(data[:now])
            if found:
                self.first = False
                self.released.wait()
                sink.sendall(data[now:])

    def release(self):
        self.released.set()

    def cut(self):
        super().cut()
        self.released.set()


def noise(width, height=None):
    """A PNG of random pixels, which compression does not make smaller: 3 bytes each. A square without `height`."""
    height = height or width
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"".join(b"\0" + random.Random(row).randbytes(3 * width) for row in range(height))
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)) +
            chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b""))


def with_exif(jpeg, orientation):
    """The same JPEG with EXIF that says how it is to be turned."""
    def big(value, size):
        return value.to_bytes(size, "big")

    exif = (b"Exif\0\0MM" + big(42, 2) + big(8, 4) + big(1, 2) + big(0x112, 2) + big(3, 2) + big(1, 4) +
            big(orientation, 2) + big(0, 6))
    return jpeg[:2] + b"\xff\xe1" + big(len(exif) + 2, 2) + exif + jpeg[2:]


# Texts whose contrast with what is behind them is below WCAG's AA, each with the contrast.
FAINT = """
    const context = Object.assign(document.createElement("canvas"), {width: 1, height: 1})
      .getContext("2d", {willReadFrequently: true});
    const rgba = (color) => {
      context.clearRect(0, 0, 1, 1);
      context.fillStyle = color;
      context.fillRect(0, 0, 1, 1);
      const [r, g, b, a] = context.getImageData(0, 0, 1, 1).data;
      return [r, g, b, a / 255];
    };
    const over = ([r, g, b, a], below) => [r, g, b].map((value, i) => value * a + below[i] * (1 - a));
    const ancestors = (element) => element ? [...ancestors(element.parentElement), element] : [];
    const behind = (element) => ancestors(element).reduce(
      (below, each) => over(rgba(getComputedStyle(each).backgroundColor), below), [255, 255, 255]);
    const luminance = (color) => color.map((value) => value / 255)
      .map((value) => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4)
      .reduce((sum, value, i) => sum + value * [0.2126, 0.7152, 0.0722][i], 0);
    const faint = [];
    const look = (element, style, text) => {
      const below = behind(element), [dark, light] = [over(rgba(style.color), below), below].map(luminance)
        .sort((a, b) => a - b);
      const size = parseFloat(style.fontSize), large = size >= 24 || size >= 18.66 && style.fontWeight >= 700;
      const contrast = (light + 0.05) / (dark + 0.05);
      if (contrast < (large ? 3 : 4.5)) faint.push(`${text.trim().slice(0, 30)}: ${contrast.toFixed(2)}`);
    };
    for (const element of document.querySelectorAll("body, body *")) {
      // What cannot be pressed needs no contrast; captions lie on pictures.
      if (!element.checkVisibility() || element.closest(":disabled, .hidden, .skip, .caption, option")) continue;
      if (ancestors(element).some((each) => getComputedStyle(each).opacity < 1)) continue;
      const own = [...element.childNodes].filter((each) => each.nodeType === Node.TEXT_NODE).map((each) => each.data).join("");
      if (own.trim()) look(element, getComputedStyle(element), own);
      if (element.matches("select")) look(element, getComputedStyle(element), element.name);
      if (element.placeholder && !element.value) look(element, getComputedStyle(element, "::placeholder"), element.placeholder);
    }
    return [...new Set(faint)];"""


def event(kind, **fields):
    return f"id: {kind}\nevent: {kind}\ndata: {json.dumps({kind: fields})}\n\n"


def error(status, retry=None):
    """The fields of a refusal; `retry`: RetryInfo, "2.5s"."""
    return {"status": status, "message": "no", "details": [{"retry_delay": retry}] if retry else []}


def setUpModule():
    global chromium
    chromium = browser.Browser()
    unittest.addModuleCleanup(chromium.close)


class PageTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.browser = chromium
        cls.port = free_port()
        cls.server = serve(cls.port, "--model", WORDS)
        cls.addClassCleanup(cls.server.__exit__)

    def setUp(self):
        self.browser.problems()
        self.browser.open(f"http://127.0.0.1:{self.port}/")

    def tearDown(self):
        self.assertEqual(self.browser.js("return window.violations"), [])

    def through_proxy(self, port=None):
        """The page of a server, whose first stream is held back after its first preview."""
        proxy = Holding(f"127.0.0.1:{port or self.port}")
        self.addCleanup(proxy.close)
        self.browser.open(f"http://{proxy.address}/")
        return proxy

    def test_the_page_is_small_and_whole(self):
        b = self.browser
        # What the browser has loaded is all of the page, and nothing else.
        b.wait("performance.getEntriesByName('interactive').length")
        files = {path.name: path for path in browser.PAGE.iterdir() if path.is_file()}
        loaded = b.js("return performance.getEntriesByType('resource').map((each) => each.name)")
        names = {urllib.parse.urlsplit(each).path[1:] for each in loaded if "/v1/" not in each}
        self.assertEqual(names | {"icon.svg"}, set(files) - {"index.html"})
        for each in loaded:
            self.assertTrue(each.startswith(f"http://127.0.0.1:{self.port}/"), each)
        served = 0
        for name in ["", *names]:
            with ask(self.port, f"/{name}") as reply:
                served += len(reply.read())
                self.assertEqual(reply.headers["Content-Security-Policy"], POLICY)
        self.assertLess(served, 150_000)
        # Every test looks for violations of the policy. Here is one.
        self.assertEqual(b.js("return window.violations"), [])
        b.js("document.body.append(Object.assign(new Image(), {src: 'http://127.0.0.1:9/a.png'}))")
        b.wait("window.violations.length")
        self.assertEqual(b.js("return window.violations.splice(0)"), ["img-src http://127.0.0.1:9/a.png"])
        for path in files.values():
            text = path.read_text()
            self.assertNotIn("innerHTML", text, path)
            for word in ("http://", "https://", "//cdn"):
                for line in text.splitlines():
                    if word in line:
                        self.assertIn("www.w3.org", line, f"{path}: nothing comes from elsewhere")

    def test_draws_and_shows_previews(self):
        b = self.browser
        proxy = self.through_proxy()
        b.js("""
            window.repeated = 0;
            new MutationObserver((records) => {
              const latest = new Map();  // of each <img>: what it showed before
              for (const {target, oldValue} of records) {
                window.repeated += latest.has(target) && latest.get(target) === oldValue;
                latest.set(target, oldValue);
              }
              for (const [target, before] of latest) window.repeated += target.getAttribute("src") === before;
            }).observe(document.getElementById("feed"), {attributeFilter: ["src"], attributeOldValue: true, subtree: true});""")
        b.draw(labels=[3, 7], count=4, steps=10, seed=41)
        b.wait("document.querySelector('.tile[data-state=emerging] img')?.naturalWidth > 0")
        self.assertEqual(b.state(), "running")
        b.js("document.querySelector('.tile[data-state=emerging]').click()")
        b.wait("document.querySelector('#picture .large').src.startsWith('data:')")
        proxy.release()
        b.wait_for_state("done")
        # What is looked at goes on to emerge.
        b.wait("document.querySelector('#picture .large').src.startsWith('blob:')")
        b.click("Close", "#picture")
        self.assertEqual(b.js("return window.repeated"), 0, "pictures are decoded again and again")
        # The page's pictures are the bytes that everybody gets.
        expected = draw(self.port, conditions=[{"class_label": 3}, {"class_label": 7}] * 2, count=4, steps=10,
                        seed=41)
        self.assertEqual(b.pictures(), expected)
        self.assertIn("4 pictures drawn", b.js("return document.getElementById('live').textContent"))
        # Repeating gives them again; other seeds give others.
        b.click("Repeat", ".card")
        b.wait("document.querySelectorAll('.card').length === 2")
        b.wait_for_state("done")
        self.assertEqual(b.pictures(), expected)
        b.click("New seeds", ".card")
        b.wait("document.querySelectorAll('.card').length === 3")
        b.wait_for_state("done")
        self.assertNotEqual(b.pictures(), expected)
        self.assertEqual(b.problems(), [])

    def test_a_preview_is_on_the_screen_within_three_evaluations(self):
        b = self.browser
        # Evaluations of as many rows as there may be: their time and that of a frame grow alike on a busy machine.
        b.draw(count=64, steps=1000)
        shown = b.wait("document.querySelector('.card').dataset.firstPreview")
        b.click("Cancel", ".card")
        b.wait_for_state("cancelled")
        self.assertIn(int(shown), (1, 2, 3))

    def test_starts_from_a_result(self):
        b = self.browser
        b.draw(labels=[1], count=1, seed=5, steps=10)
        b.wait_for_state("done")
        picture, = b.pictures()
        b.js("document.querySelector('.card .tile').click()")
        self.assertIn("Seed5", b.js("return document.querySelector('#picture dl').textContent"))
        b.click("Start from this", "#picture")
        b.wait("document.querySelector('.started img')?.naturalWidth === 32")
        b.draw(labels=[7], count=1, seed=6, steps=10, strength=0.75)
        b.wait_for_state("done")
        self.assertEqual(b.pictures(), draw(
            self.port, conditions=[{"class_label": 7}], seed=6, steps=10, count=1,
            init_image={"encoded": base64.b64encode(picture).decode(), "strength": 0.75}))
        self.assertEqual(b.problems(), [])

    def test_results_and_files_are_dropped(self):
        b = self.browser
        b.draw(labels=[1], count=1, seed=5, steps=5)
        b.wait_for_state("done")
        drop = """
            const data = new DataTransfer(), image = document.querySelector(".card .tile img");
            if (arguments[0] === "file") data.items.add(new File([document.querySelector(".card").job.images[0].blob],
              "a.png", {type: "image/png"}));
            else image.dispatchEvent(new DragEvent("dragstart", {dataTransfer: data, bubbles: true}));
            document.querySelector(".start").dispatchEvent(new DragEvent("drop", {dataTransfer: data, bubbles: true}));"""
        for what in ("result", "file"):
            b.js(drop, what)
            b.wait("document.querySelector('.started img')?.naturalWidth === 32")
            b.click("Remove", ".started")
            b.wait("!document.querySelector('.started')")
        self.assertEqual(b.problems(), [])

    def test_a_model_that_reads_prompts(self):
        b = self.browser
        self.choose("words")
        self.assertIsNone(b.js("return document.querySelector('.chip')"))
        b.draw(prompt="a cat", negative="", count=1, steps=2, seed=1)
        b.wait_for_state("done")
        cat = [{"text": "a cat"}]
        self.assertEqual(b.pictures(), draw(self.port, model="words", conditions=cat, count=1, steps=2, seed=1))
        # A part of it is drawn anew.
        b.js("document.querySelector('.card .tile').click()")
        b.click("Start from this", "#picture")
        b.wait("document.querySelector('.started img')?.naturalWidth")
        self.paint_mask()
        b.draw(prompt="a dog", count=1, steps=2, seed=2)
        b.wait_for_state("done")
        sent = b.js("return document.querySelector('.card').job.params")
        self.assertEqual(sent["init_image"]["strength"], 1)
        self.assertEqual(b.pictures(), draw(
            self.port, model="words", conditions=[{"text": "a dog"}], count=1, steps=2, seed=2,
            init_image=sent["init_image"], mask=sent["mask"]))
        # The sizes on offer are sizes that the model draws.
        sizes = b.js("return [...document.getElementById('form').elements.size.options].map((each) => each.value)")
        self.assertGreater(len(sizes), 2)
        for size in sizes:
            if "x" in size:
                width, height = map(int, size.split("x"))
                draw(self.port, model="words", conditions=cat, width=width, height=height, steps=1)
        self.assertEqual(b.problems(), [])

    def test_edit_settings_restores_start_mask_and_strength(self):
        b = self.browser
        self.choose("words")

        def drawn():
            b.wait_for_state("done")
            params = b.js("return document.querySelector('.card').job.params")
            return params.pop("request_id"), params, b.pictures()

        b.draw(prompt="a cat", count=1, steps=2, seed=1)
        plain, *without = drawn()
        self.drop(noise(40))
        self.paint_mask()
        b.js("""const strength = document.getElementById("strength");
            strength.value = 0.35; strength.dispatchEvent(new Event("input", {bubbles: true}));""")
        b.draw(prompt="a dog", count=1, steps=10, seed=2)
        started, *with_start = drawn()
        self.assertEqual(with_start[0]["init_image"]["strength"], 0.35)
        edit = """
            for (const job of arguments) {
              [...document.querySelectorAll(`.card[data-job="${job}"] button`)]
                .find((each) => each.textContent === "Edit settings").click();
            }"""
        b.js(edit, plain)
        b.wait("!document.querySelector('.started')")
        b.draw()
        self.assertEqual(list(drawn()[1:]), without)
        b.js(edit, started)
        b.wait("document.querySelector('.veil')")
        b.draw()
        self.assertEqual(list(drawn()[1:]), with_start)
        # A side that is not typed follows the picture, which is square.
        b.js("""const {elements} = document.getElementById("form");
            for (const [name, value] of [["size", "own"], ["width", 24]]) {
              elements[name].value = value;
              elements[name].dispatchEvent(new Event("change", {bubbles: true}));
            }""")
        self.drop(noise(40))
        b.draw(seed=3)
        _, params, _ = drawn()
        self.assertEqual((params["width"], params["height"]), (24, 24))
        # The later one counts, although the picture of the one before is still being decoded.
        b.js("""
            const {decode} = Image.prototype;
            Image.prototype.decode = function () {
              Image.prototype.decode = decode;
              return new Promise((go) => (window.decoded = () => decode.call(this).then(go)));
            };""")
        b.js(edit, started, plain)
        b.driver.execute_async_script("window.decoded().then(() => setTimeout(arguments[0], 0))")
        self.assertFalse(b.js("return Boolean(document.querySelector('.started'))"))
        self.assertEqual(b.problems(), [])

    def test_a_mask_is_painted_with_keys(self):
        b = self.browser
        b.js("""
            const canvas = Object.assign(document.createElement("canvas"), {width: 40, height: 20});
            canvas.toBlob((blob) => import("/mask.js").then(({paintMask}) =>
              paintMask({url: URL.createObjectURL(blob), width: 40, height: 20}, null)).then(createImageBitmap)
              .then((mask) => {
                const context = canvas.getContext("2d");
                context.drawImage(mask, 0, 0);
                window.painted = {width: mask.width, height: mask.height,
                  pixels: [[0, 0], [20, 10], [2, 10]].map(([x, y]) => [...context.getImageData(x, y, 1, 1).data])};
              }));""")
        b.wait("document.getElementById('mask-dialog').open && document.activeElement.className === 'paint'")
        b.js("""document.activeElement.dispatchEvent(new KeyboardEvent("keydown", {key: " ", bubbles: true}));""")
        b.click("Use it", "#mask-dialog")
        painted = b.wait("window.painted")
        self.assertEqual((painted["width"], painted["height"]), (40, 20))
        self.assertEqual(painted["pixels"], [[0, 0, 0, 255], [255, 255, 255, 255], [0, 0, 0, 255]])

    def test_enter_uses_a_mask_and_cancel_leaves_it(self):
        b = self.browser
        self.choose("words")
        self.drop(noise(40))

        def paint(verb):
            b.click(verb, ".started")
            b.wait("document.getElementById('mask-dialog').open && document.activeElement.className === 'paint'")
            b.press(Keys.SPACE)
            b.js("document.getElementById('brush').focus()")

        paint("Paint a mask")
        b.press(Keys.ENTER)
        b.wait("document.querySelector('.veil')")
        mask = b.js("return document.querySelector('.veil').style.maskImage")
        paint("Change the mask")
        b.click("Clear", "#mask-dialog")
        b.click("Cancel", "#mask-dialog")
        self.assertFalse(b.js("return document.getElementById('mask-dialog').open"))
        self.assertEqual(b.js("return document.querySelector('.veil').style.maskImage"), mask)
        self.assertEqual(b.problems(), [])

    def test_pictures_have_the_size_of_the_one_they_start_from(self):
        b = self.browser
        self.choose("words")
        first = "return document.getElementById('form').elements.size.options[0].textContent"
        native = b.js(first)
        # The second one is larger than the model draws.
        largest = b.js("return Number(document.getElementById('form').elements.width.max)")
        self.assertTrue(24 < largest < 1000)
        for edge, drawn in ((24, 24), (1000, largest)):
            self.drop(noise(edge))
            b.wait(f"document.querySelector('.started img')?.naturalWidth === {edge}")
            self.assertEqual(b.js(first), "as the picture")
            b.draw(prompt="a cat", count=1, steps=2, seed=1)
            b.wait_for_state("done")
            picture, = b.pictures()
            self.assertEqual([int.from_bytes(picture[at:at + 4], "big") for at in (16, 20)], [drawn, drawn])
            b.click("Remove", ".started")
            self.assertEqual(b.js(first), native)
        self.assertEqual(b.problems(), [])

    def test_a_side_that_is_not_typed_follows_the_start_picture(self):
        b = self.browser
        self.choose("words")
        placeholder = "return document.getElementById('form').elements.height.placeholder"
        own = b.js(placeholder)
        self.drop(noise(48, 24))
        b.wait("document.querySelector('.started img')?.naturalWidth === 48")
        self.assertEqual(b.js(placeholder), "as the picture")
        for width, height, drawn in (("32", "", [32, 16]), ("", "24", [48, 24]), ("32", "32", [32, 32])):
            b.draw(prompt="a cat", count=1, steps=2, seed=1, size="own", width=width, height=height)
            b.wait_for_state("done")
            picture, = b.pictures()
            self.assertEqual([int.from_bytes(picture[at:at + 4], "big") for at in (16, 20)], drawn)
        b.click("Remove", ".started")
        self.assertEqual(b.js(placeholder), own)
        self.assertEqual(b.problems(), [])

    def test_photos_start_as_they_are_seen(self):
        """The page and the server agree on the size of a photo that is stored on its side."""
        b = self.browser
        self.choose("words")
        jpeg = bytes(b.driver.execute_async_script("""
            const done = arguments[0], canvas = Object.assign(document.createElement("canvas"), {width: 60, height: 40});
            const context = canvas.getContext("2d");
            context.fillStyle = "#c22";
            context.fillRect(0, 0, 30, 40);
            canvas.toBlob((blob) => blob.arrayBuffer().then((bytes) => done([...new Uint8Array(bytes)])), "image/jpeg");"""))
        self.drop(with_exif(jpeg, 6))
        self.assertEqual(b.js("const {naturalWidth: width, naturalHeight: height} = document.querySelector('.started img');"
                              "return [width, height]"), [40, 60])
        self.paint_mask()
        b.draw(prompt="a dog", count=1, steps=2, seed=2)
        b.wait_for_state("done")
        self.assertEqual(b.problems(), [])

    def test_a_wrong_value_that_is_hidden_bars_nothing(self):
        b = self.browser
        self.choose("words")

        def fill(name, value):
            b.js("""const field = document.getElementById("form").elements[arguments[0]];
                field.value = arguments[1]; field.dispatchEvent(new Event("change"));""", name, value)

        def shown(name):
            return b.js("""const field = document.getElementById("form").elements[arguments[0]];
                return !field.disabled && !field.closest("[hidden]")""", name)

        fill("sampler", "SAMPLER_UNI_PC")
        self.assertTrue(shown("solver_order"))
        most = """return document.getElementById("form").elements.steps.max"""
        self.assertEqual(b.js(most), "", "the limit of another sampler is not known here")
        fill("solver_order", 9)
        fill("sampler", "")
        self.assertGreater(int(b.js(most)), 0)
        self.assertFalse(shown("solver_order"))
        fill("size", "own")
        self.assertTrue(shown("width"))
        fill("width", 33)
        fill("size", "")
        b.draw(prompt="a cat", count=1, steps=2, seed=1)
        b.wait_for_state("done")
        self.assertEqual(b.pictures(), draw(self.port, model="words", conditions=[{"text": "a cat"}], count=1, steps=2,
                                            seed=1))
        # A size of one's own stays with another model, and stays to be seen.
        fill("size", "own")
        fill("width", 64)
        self.choose("digits")
        self.assertEqual(b.js("const {size, width} = document.getElementById('form').elements;"
                              "return [size.value, width.value]"), ["own", "64"])
        self.assertTrue(shown("width"))
        self.assertEqual(b.problems(), [])

    def test_what_is_wrong_is_said_at_its_field(self):
        b = self.browser
        b.js("for (const each of document.querySelectorAll('#form input')) each.removeAttribute('max')")
        b.draw(steps=5000)
        b.wait_for_state("failed")
        text = b.wait("[...document.querySelectorAll('[data-field=steps] .wrong')]"
                      ".find((each) => !each.hidden)?.textContent")
        self.assertIn("5000", text)
        self.assertEqual(b.js("return document.activeElement.name"), "steps")
        # There are no pictures to wait for.
        self.assertEqual(b.js("return document.querySelector('.tiles').offsetHeight"), 0)

    def test_cancels(self):
        b = self.browser
        b.draw(count=64, steps=1000)
        b.wait("document.querySelector('.tile[data-state=emerging]')")
        job = b.js("return document.querySelector('.card').dataset.job")
        b.click("Cancel", ".card")
        b.wait_for_state("cancelled")
        self.assertEqual(call(self.port, f"/v1/jobs/{job}")["job"]["state"], "JOB_STATE_CANCELLED")

    def test_site_data_may_be_blocked(self):
        b = browser.Browser(site_data=False)
        self.addCleanup(b.close)
        b.open(f"http://127.0.0.1:{self.port}/")
        b.draw(labels=[3], count=1, steps=5, seed=41)
        b.wait_for_state("done")
        self.assertEqual(b.pictures(), draw(self.port, conditions=[{"class_label": 3}], count=1, steps=5, seed=41))
        for theme in ("dark", "light"):
            b.js("document.getElementById('theme').click()")
            self.assertEqual(b.js("return document.documentElement.dataset.theme"), theme)
        self.assertEqual(b.driver.execute_async_script("""
            import("/api.js").then(({token}) => { token.set("abc"); arguments[0](token.get()); });"""), "abc")
        self.assertEqual(b.problems(), [])

    def test_tabs_leave_a_connection_to_cancel(self):
        b = self.browser
        first = b.driver.current_window_handle
        for _ in range(4):
            b.draw(count=64, steps=1000)
        b.wait("document.querySelectorAll('.card:is([data-state=queued], [data-state=running])').length === 4")
        b.driver.switch_to.new_window("tab")
        try:
            b.open(f"http://127.0.0.1:{self.port}/")
            for _ in range(3):
                b.draw(count=64, steps=1000)
            b.click("Cancel", ".card:last-of-type")
            b.wait("document.querySelector('.card:last-of-type').dataset.state === 'cancelled'", 60)
            # A slot that is free again is taken, whichever tab had it.
            b.driver.switch_to.window(first)
            b.click("Cancel", ".card")
            b.wait_for_state("cancelled")
            b.driver.switch_to.window(b.driver.window_handles[-1])
            b.wait("document.querySelector('.card:is([data-state=queued], [data-state=running])')", 60)
            b.driver.get("about:blank")
        finally:
            b.driver.close()
            b.driver.switch_to.window(first)
        b.driver.get("about:blank")  # which cancels the rest

    def test_a_cancel_that_fails_is_no_cancel(self):
        b = self.browser
        b.js("""const {fetch} = window;
            window.fetch = (path, options) => !/cancel$/.test(path) || !window.refusal ? fetch(path, options)
              : window.refusal === "lost" ? Promise.reject(new TypeError("lost"))
              : Promise.resolve(new Response(JSON.stringify({error: {status: "UNAVAILABLE", message: "no time"}}),
                  {status: 503}));
            window.refusal = "busy";""")
        b.draw(count=64, steps=1000)
        b.wait("document.querySelector('.tile[data-state=emerging]')")
        job = b.js("return document.querySelector('.card').dataset.job")
        for refusal, message in (("busy", "No time."), ("lost", "The server cannot be reached.")):
            b.js("window.refusal = arguments[0]", refusal)
            b.click("Cancel", ".card")
            b.wait(f"document.querySelector('.card .status').textContent.includes('Not cancelled: {message}')")
            self.assertEqual(b.js("return document.querySelector('.card').dataset.state"), "running")
            b.wait("document.getElementById('live').textContent.startsWith('Not cancelled')")
        self.assertEqual(call(self.port, f"/v1/jobs/{job}")["job"]["state"], "JOB_STATE_RUNNING")
        b.js("window.refusal = ''")
        b.click("Cancel", ".card")
        b.wait_for_state("cancelled")
        self.assertEqual(end_of(self.port, job), "JOB_STATE_CANCELLED")

    def test_a_cancel_without_a_server_says_so(self):
        proxy = self.through_proxy()
        b = self.browser
        b.draw(count=64, steps=1000)
        b.wait("document.querySelector('.tile[data-state=emerging]')")
        job = b.js("return document.querySelector('.card').dataset.job")
        proxy.listener.shutdown(socket.SHUT_RDWR)  # close() alone would let one more connection in
        proxy.cut()
        b.wait_for_state("waiting")
        b.click("Cancel", ".card")
        b.wait_for_state("failed")
        self.assertIn("may still draw", b.js("return document.querySelector('.card .wrong').textContent"))
        self.assertEqual(call(self.port, f"/v1/jobs/{job}")["job"]["state"], "JOB_STATE_RUNNING")
        cancel(self.port, job)
        b.problems()  # of connections that are refused

    def test_a_server_that_does_not_answer_is_told(self):
        b = self.browser
        b.js("""const late = new AbortController();
            AbortSignal.timeout = (milliseconds) => {
              window.patience = milliseconds;
              return late.signal;
            };
            window.pass = () => late.abort(new DOMException("", "TimeoutError"));""")
        b.draw(count=64, steps=1000)
        b.wait("document.querySelector('.tile[data-state=emerging]')")
        job = b.js("return document.querySelector('.card').dataset.job")
        self.server.process.send_signal(signal.SIGSTOP)
        self.addCleanup(self.server.process.send_signal, signal.SIGCONT)
        os.waitpid(self.server.process.pid, os.WUNTRACED)  # until it stands still
        b.click("Cancel", ".card")
        b.wait("document.querySelector('.card .status').textContent === 'Cancelling…'")
        b.js("window.pass()")
        b.wait("document.querySelector('.card .status').textContent.includes('Not cancelled: The server does not answer.')")
        self.assertEqual(b.js("return window.patience"), 10000)
        self.assertEqual(b.state(), "running")
        b.js("""const newer = window.fetch;
            window.fetch = (...request) => newer(...request).catch((error) => {  // as Chromium 123
              throw error.name === "TimeoutError" ? new DOMException("", "AbortError") : error;
            });""")
        b.js("document.dispatchEvent(new Event('visibilitychange'))")  # the page looks at the server
        b.wait("document.getElementById('notice').textContent === 'The server does not answer. Trying again…'")
        # What is still being sent has no stream that could go on.
        b.draw(count=1, steps=1)
        b.wait("document.querySelector('.card .status').textContent === 'Sending'")
        b.click("Cancel", ".card")
        b.wait_for_state("failed")
        self.assertIn("may still draw", b.js("return document.querySelector('.card .wrong').textContent"))
        self.server.process.send_signal(signal.SIGCONT)
        cancel(self.port, job)
        b.wait("document.querySelector('.card:last-of-type').dataset.state === 'cancelled'")

    def test_leaving_the_page_cancels(self):
        b = self.browser
        b.draw(count=64, steps=1000)
        b.wait("document.querySelector('.tile[data-state=emerging]')")
        job = b.js("return document.querySelector('.card').dataset.job")
        b.driver.get("about:blank")
        self.assertEqual(end_of(self.port, job), "JOB_STATE_CANCELLED")

    def choose(self, model):
        self.browser.js("""const select = document.getElementById("form").elements.model;
            select.value = arguments[0]; select.dispatchEvent(new Event("change"));""", model)

    def drop(self, data):
        """Drops a PNG file on the form."""
        self.browser.js("""
            const data = new DataTransfer();
            data.items.add(new File([Uint8Array.from(atob(arguments[0]), (each) => each.charCodeAt(0))], "a.png",
              {type: "image/png"}));
            document.querySelector(".start").dispatchEvent(new DragEvent("drop", {dataTransfer: data, bubbles: true}));
            """, base64.b64encode(data).decode())
        self.browser.wait("document.querySelector('.started img')?.naturalWidth")

    def paint_mask(self):
        """A spot in the middle."""
        b = self.browser
        b.click("Paint a mask", ".started")
        b.wait("document.getElementById('mask-dialog').open && document.activeElement.className === 'paint'")
        b.js("""document.activeElement.dispatchEvent(new KeyboardEvent("keydown", {key: " ", bubbles: true}));""")
        b.click("Use it", "#mask-dialog")
        b.wait("document.querySelector('.veil')")

    def copies(self, within):
        """What the buttons of "Copy as" put into the clipboard: {"curl": …}."""
        b = self.browser
        b.js("window.copied = []; Object.defineProperty(navigator, 'clipboard', {configurable: true, value: "
             "{writeText: async (text) => window.copied.push(text)}})")
        names = ["curl", "grpcurl", "denoise", "Python"]
        for name in names:
            b.click(name, f"{within} .menu")
        return dict(zip(names, b.wait(f"window.copied.length === {len(names)} && window.copied")))

    def run_copies(self, copied, expected, **files):
        """Each in a shell, in a folder that has the files: all save the expected pictures."""
        listening = self.server.wait_for("listening")["address"]
        client = browser.ROOT / "client" / "python" / "src"
        for name, text in copied.items():
            self.assertNotIn("request_id", text)
            # The page takes gRPC's usual port for granted; this server's is another.
            text = text.replace("127.0.0.1:50051", listening)
            with self.subTest(name), tempfile.TemporaryDirectory() as folder:
                if name == "Python" and not importlib.util.find_spec("grpc"):
                    self.skipTest("needs the module grpc")
                if name == "grpcurl" and not shutil.which("grpcurl"):
                    self.skipTest("needs grpcurl, which is no package of the distribution; its JSON is curl's")
                folder = pathlib.Path(folder)
                for file, data in files.items():
                    (folder / f"{file}.png").write_bytes(data)
                command = [sys.executable, "-c", text] if name == "Python" else ["sh", "-c", text]
                if name == "denoise":
                    (folder / "bin").mkdir()
                    (folder / "bin" / "denoise").symlink_to(os.environ["DENOISE_BINARY"])
                ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, env={
                    **os.environ, "PYTHONPATH": str(client), "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"})
                self.assertEqual(ran.returncode, 0, f"{text}\n{ran.stderr}")
                drawn = {path.read_bytes() for path in folder.iterdir()
                         if path.is_file() and path.stem not in files}
                self.assertEqual(drawn, set(expected), text)
        body = {name: re.search(r"(?:printf %s|-d) (.*?) \\\n", copied[name])[1] for name in ("curl", "grpcurl")}
        self.assertEqual(body["curl"], body["grpcurl"])

    @unittest.skipUnless(shutil.which("curl") and shutil.which("jq"), "needs curl and jq")
    def test_what_is_copied_draws_the_same(self):
        b = self.browser
        b.draw(labels=[3, 7], count=2, steps=10, seed=9)
        b.wait_for_state("done")
        copied = self.copies(".card")
        self.assertIn("denoise generate -m digits -l 3,7 -n 2 --seed 9 --steps 10", copied["denoise"])
        self.assertIn('labels=[3, 7], model="digits", count=2, seed=9, steps=10', copied["Python"])
        self.run_copies(copied, b.pictures())
        b.js("document.querySelectorAll('.card .tile')[1].click()")
        self.run_copies(self.copies("#picture"), b.pictures()[1:])
        b.click("Close", "#picture")
        # A prompt that looks like a flag, and words that a shell would read; a part of another picture, as JPEG.
        self.choose("words")
        b.draw(prompt="a cat", count=1, steps=2, seed=1, size="own", width=32, height="")
        b.wait_for_state("done")
        self.run_copies(self.copies(".card"), b.pictures())
        start = noise(260)
        self.assertGreater(len(start), 200_000)  # in base64 twice what Linux allows in one argument
        self.drop(start)
        self.paint_mask()
        b.draw(prompt="--it's \"a\" $dog \"@BASE64\"", negative="-x", count=1, steps=2, seed=str(2**64 - 1),
               sampler="SAMPLER_DDIM", **{"output.format": "IMAGE_FORMAT_JPEG"})
        b.wait_for_state("done")
        mask = base64.b64decode(b.js("return document.querySelector('.card').job.params.mask.encoded"))
        self.run_copies(self.copies(".card"), b.pictures(), start=start, mask=mask)

    def test_operators_see_devices_and_change_models(self):
        b = self.browser
        b.draw(count=64, steps=1000)
        b.wait("document.querySelector('.tile[data-state=emerging]')")
        b.js("document.getElementById('tab-operate').click()")
        b.wait("/Busy: [1-9]/.test(document.querySelector('.spark')?.getAttribute('aria-label'))")
        self.assertIn("serving", b.js("return document.querySelector('.box.server').textContent"))
        self.assertIn("running", b.js("return document.querySelector('.box.jobs').textContent"))
        b.click("Cancel", ".box.jobs")
        b.wait("document.querySelector('.box.jobs').textContent.includes('cancelled')")
        b.click("Reload", ".box.models")
        b.click("Reload", "#confirm")
        b.wait("document.querySelector('.box.models').textContent.includes('digits@2')")
        b.wait("!document.querySelector('.box.models').textContent.includes('digits@1')")
        self.assertEqual(b.problems(), [])

    def test_operators_load_and_unload_models(self):
        b = self.browser
        b.js("document.getElementById('tab-operate').click()")
        b.wait("document.querySelector('.box.models .load')")

        def load(**fields):
            b.js("""
                const form = document.querySelector(".load");
                form.closest("details").open = true;
                for (const [name, value] of Object.entries(arguments[0])) form.elements[name].value = value;
                form.requestSubmit();""", fields)

        def models():
            return {f"{each['name']}@{each['version']}" for each in call(self.port, "/v1/models")["models"]}

        before = models()
        # What is wrong stays on the page, until the next attempt.
        load(name="more", directory="/nowhere")
        b.wait("document.querySelector('#operate > .notice:not([hidden])')?.textContent.includes('/nowhere')")
        b.js("window.pressed = document.querySelector('[data-key^=reload]'); window.pressed.focus()")
        b.js("performance.clearResourceTimings()")
        b.wait("performance.getEntriesByType('resource').filter((each) => each.name.endsWith('/metrics')).length > 1")
        # A click takes time; its button must not be another one meanwhile.
        self.assertTrue(b.js("return window.pressed.isConnected && document.activeElement === window.pressed"))
        self.assertIn("/nowhere", b.js("return document.querySelector('#operate > .notice:not([hidden])')?.textContent"))
        self.assertTrue(b.problems())  # the browser logs each refusal
        load(name="more", directory=str(browser.ROOT / "models" / "mnist-32"), version="7")
        b.wait("document.querySelector('.box.models').textContent.includes('more@7')")
        b.wait("[...document.querySelectorAll('.box.models tr')].find((row) => row.textContent.includes('more@7'))"
               ".querySelector('[data-state=available]')")
        self.assertTrue(b.js("return document.querySelector('#operate > .notice').hidden"))
        self.assertEqual(models(), before | {"more@7"})
        # It can be chosen and draws.
        b.js("document.getElementById('tab-draw').click()")
        self.choose("more")
        b.draw(labels=[3], count=1, steps=5, seed=1)
        b.wait_for_state("done")
        self.assertEqual(b.pictures(), draw(self.port, model="more", conditions=[{"class_label": 3}], steps=5, seed=1))
        b.js("document.getElementById('tab-operate').click()")
        b.wait("document.querySelector('[data-key=\"unload more@7\"]')")
        b.js("document.querySelector('[data-key=\"unload more@7\"]').click()")
        b.click("Unload", "#confirm")
        b.wait("!document.querySelector('.box.models').textContent.includes('more@7')")
        self.assertEqual(models(), before)
        b.wait("![...document.getElementById('form').elements.model.options].some((each) => each.value === 'more')")
        self.assertEqual(b.problems(), [])

    def test_a_server_that_counts_anew_shows_no_negative_shares(self):
        b = self.browser
        b.js("""
            const {fetch} = window, counters = ["rows_count", "rows_sum", "seconds_sum"];
            Object.assign(window, {count: 1000, looks: 0, fetch: (path, options) => {
              if (path !== "/metrics") return fetch(path, options);
              ++window.looks;
              return Promise.resolve(new Response(counters.map((name) =>
                `denoised_evaluation_${name}{device="cpu"} ${window.count}\n`).join("")));
            }});
            document.getElementById("tab-operate").click();""")
        b.wait("window.looks > 1")
        b.js("window.count = 10; window.looks = 0")
        seen = set()
        while b.js("return window.looks") < 3:
            seen.update(b.js("return [document.querySelector('.spark').getAttribute('aria-label'), "
                             "...[...document.querySelectorAll('.box.devices dd')].map((each) => each.innerText)]"))
        self.assertNotRegex("\n".join(seen), r"-\d")

    def test_without_a_model_there_is_nothing_to_fill_in(self):
        port = free_port()
        server = serve(port)
        self.addCleanup(server.__exit__)
        b = self.browser
        b.open(f"http://127.0.0.1:{port}/")
        b.draw(count=1, steps=2)
        b.wait_for_state("done")
        ask(port, "/v1/models/digits", method="DELETE").close()
        b.wait("document.getElementById('form').textContent.includes('No model is ready')")
        b.click("Edit settings", ".card")
        b.js("document.querySelector('.card .tile').click()")
        b.click("Start from this", "#picture")
        b.driver.execute_async_script("setTimeout(arguments[0], 100)")
        self.assertEqual(b.problems(), [])

    def test_the_queue_and_its_estimate_are_shown(self):
        port = free_port()
        server = serve(port, "--max-slots", "1")
        self.addCleanup(server.__exit__)
        draw(port, count=1, steps=20)  # the estimates are of what was measured
        others = [occupy(port), occupy(port)]
        b = self.browser
        b.open(f"http://127.0.0.1:{port}/")
        b.draw(count=64, steps=1000)  # as much as theirs: less would be drawn before them
        b.wait_for_state("queued")
        job = b.js("return document.querySelector('.card').dataset.job")

        def look():
            """What the server tells, and the page shows: the same, unless the queue moves in between."""
            for _ in range(100):
                with ask(port, f"/v1/jobs/{job}/events") as reply:
                    queued = next(json.loads(line[5:]) for line in reply if line.startswith(b"data:"))["queued"]
                text = b.js("return document.querySelector('.card .status').textContent")
                if f"({queued['images_ahead']} picture" in text:
                    return queued, text
            raise AssertionError(f"{queued} is not {text}")

        # One picture is being drawn; at first 63 of its request and 64 of the other one wait.
        queued, text = look()
        self.assertTrue(64 < queued["images_ahead"] <= 127, queued)
        self.assertEqual(text.split(" (")[0], "Queued behind 2 requests")
        # The times count down from what the server said, and are rounded to a unit or a tenth of one.
        units = {"s": 1, "min": 60, "h": 3600, "days": 86400}
        for word, field in (("starts", "estimated_start_seconds"), ("done", "estimated_total_seconds")):
            number, unit = re.search(rf"{word} in ([\d.]+) (\w+)", text).groups()
            self.assertLessEqual((float(number) - 0.5) * units[unit], queued[field])
        self.assertEqual(b.js("return document.getElementById('live').textContent").strip(), "In the queue")
        # The place moves.
        cancel(port, others[1])
        b.wait("document.querySelector('.card .status').textContent.startsWith('Queued behind 1 request (')")
        self.assertLess(look()[0]["images_ahead"], 64)
        cancel(port, others[0])
        b.wait_for_state("running")
        b.click("Cancel", ".card")
        b.wait_for_state("cancelled")
        self.assertEqual(b.problems(), [])

    def test_keyboard_and_names(self):
        b = self.browser
        nameless = b.js("""
            for (const each of document.querySelectorAll("details")) each.open = true;
            return [...document.querySelectorAll("#form input, #form select, #form textarea, button")].filter((each) =>
              !each.labels?.length && !each.getAttribute("aria-label") && !each.textContent.trim())
              .map((each) => each.outerHTML);""")
        self.assertEqual(nameless, [])
        b.js("""const tab = document.getElementById("tab-draw"); tab.focus();
            tab.dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowRight", bubbles: true}));""")
        self.assertFalse(b.js("return document.getElementById('operate').hidden"))
        self.assertEqual(b.js("return document.activeElement.id"), "tab-operate")
        b.js("document.getElementById('tab-draw').click()")
        b.draw(count=3, steps=2, seed=1)
        b.wait_for_state("done")
        b.js("document.querySelector('.card .tile').click()")
        for seed in (2, 3):
            b.press(Keys.ARROW_RIGHT)
            self.assertIn(f"Seed{seed}", b.js("return document.querySelector('#picture dl').textContent"))
        b.press(Keys.ARROW_LEFT)
        self.assertIn("Seed2", b.js("return document.querySelector('#picture dl').textContent"))
        b.press(Keys.ESCAPE)
        self.assertFalse(b.js("return document.getElementById('picture').open"))

    def test_dark_and_light_can_be_read(self):
        b = self.browser
        self.addCleanup(b.colours, False)

        def colours(dark):
            """And waits for colours that turn slowly into others."""
            b.colours(dark)
            b.driver.execute_async_script("""
                const done = arguments[0];
                requestAnimationFrame(() => Promise.all(document.getAnimations()
                  .filter((each) => each instanceof CSSTransition).map((each) => each.finished)).then(done, done));""")

        def look(where):
            for dark in (False, True):
                colours(dark)
                with self.subTest(where, dark=dark):
                    self.assertEqual(b.js(FAINT), [])

        self.choose("words")
        b.js("for (const each of document.querySelectorAll('details')) each.open = true;")
        look("an empty form")
        b.js("for (const each of document.querySelectorAll('#form input')) each.removeAttribute('max')")
        b.draw(prompt="a cat", steps=5000)
        b.wait_for_state("failed")
        self.choose("digits")
        b.draw(labels=[1, 2], count=2, steps=2)
        b.wait_for_state("done")
        look("requests")
        b.js("document.querySelector('.card .tile').click()")
        look("a picture")
        b.click("Start from this", "#picture")
        b.wait("document.querySelector('.started img')?.naturalWidth")
        b.click("Paint a mask", ".started")
        b.wait("document.getElementById('mask-dialog').open")
        look("a mask")
        b.click("Cancel", "#mask-dialog")
        b.js("document.getElementById('tab-operate').click()")
        b.wait("document.querySelector('.box.jobs table')")
        b.js("document.querySelector('.loader').open = true")
        look("Operate")
        b.js("document.getElementById('token-dialog').showModal()")
        look("a token")
        b.js("document.getElementById('token-dialog').close(); document.getElementById('tab-draw').click()")
        # What only shows where the browser takes light-dark() as it is written.
        x, y = b.js("""const box = [...document.querySelectorAll("#form button")].at(-1).getBoundingClientRect();
            return [box.x + box.width / 2, box.y + box.height / 2];""")
        b.driver.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": "mouseMoved", "x": x, "y": y})
        shadows = set()
        for dark in (False, True):
            colours(dark)
            for element in ("document.querySelector('.card')", "document.querySelector('button:hover')"):
                shadow = b.js(f"return getComputedStyle({element}).boxShadow")
                self.assertNotEqual(shadow, "none")
                shadows.add(shadow)
        self.assertEqual(len(shadows), 4)
        # The button chooses by itself, and the next visit remembers it.
        colours(False)
        self.addCleanup(b.js, "localStorage.removeItem('denoised-theme')")
        back = "return getComputedStyle(document.body).backgroundColor"
        light = b.js(back)
        b.js("document.getElementById('theme').click()")
        self.assertNotEqual(b.js(back), light)
        b.open(f"http://127.0.0.1:{self.port}/")
        self.assertNotEqual(b.js(back), light)
        b.js("document.getElementById('theme').click()")
        self.assertEqual(b.js(back), light)
        b.problems()  # of the refused request

    def test_a_wrong_field_that_is_folded_away_is_shown(self):
        b = self.browser
        b.js("""const {steps, count} = document.getElementById("form").elements;
            document.getElementById("more").open = false; steps.value = 5000; count.focus();""")
        for press in (lambda: b.press(Keys.ENTER), lambda: b.press(Keys.CONTROL, Keys.ENTER)):
            press()
            self.assertEqual(b.js("return [document.getElementById('more').open, document.activeElement.name]"),
                             [True, "steps"])
        self.assertEqual(b.js("return document.querySelectorAll('.card').length"), 0)
        self.assertEqual(b.problems(), [])

    def test_what_others_say_is_no_markup(self):
        b = self.browser
        self.choose("words")
        markup = "<img src=x onerror='window.hacked = 1'><script>window.hacked = 1</script>&amp;"
        b.draw(prompt=markup, negative=markup, count=1, steps=2, seed=1)
        b.wait_for_state("done")
        b.js("document.querySelector('.card .tile').click()")
        self.assertEqual(b.js("return document.querySelector('.card h2').textContent"), markup)
        self.assertIn(markup, b.js("return document.querySelector('#picture dl').textContent"))
        # So are the errors of the server, which quote the request.
        b.js("""document.getElementById("picture").close();
            const {model} = document.getElementById("form").elements;
            window.fetch = ((fetch) => (path, options) => fetch(path, path !== "/v1/generate" ? options : {...options,
              body: options.body.replace(/"model":"[^"]*"/, () => `"model":${JSON.stringify(arguments[0])}`)}))(window.fetch);
            """, markup)
        b.draw(prompt="a cat")
        b.wait_for_state("failed")
        self.assertIn("<img src=x", b.js("return document.querySelector('.card .wrong').textContent"))
        self.assertEqual(b.js("return [document.querySelectorAll('[src=x], body script').length, window.hacked ?? null]"),
                         [0, None])

    def test_a_model_that_comes_disturbs_nobody(self):
        b = self.browser
        self.choose("words")
        b.js("""window.prompt = document.getElementById("form").elements.prompt;
            document.getElementById("more").open = true; window.prompt.focus();""")
        b.press("a ")
        call(self.port, "/v1/models", {"name": "a-guest", "directory": str(browser.ROOT / "models" / "mnist-32")})
        listed = "[...document.getElementById('form').elements.model.options].some((each) => each.value === 'a-guest')"
        b.wait(listed)
        b.press("cat")
        self.assertEqual(b.js("""const {model, prompt} = document.getElementById("form").elements;
            return [model.value, prompt.value, prompt === window.prompt, document.getElementById("more").open];"""),
                         ["words", "a cat", True, True])
        # One that is chosen and goes leaves the form to another one.
        self.choose("a-guest")
        with ask(self.port, "/v1/models/a-guest", method="DELETE"):
            b.wait(f"!{listed}")
        self.assertEqual(b.js("return document.getElementById('form').elements.model.value"), "digits")

    def test_what_is_removed_is_freed(self):
        b = self.browser
        b.js("""
            const {createObjectURL, revokeObjectURL} = URL;
            window.kept = new Set();
            URL.createObjectURL = (blob) => {
              const url = createObjectURL(blob);
              window.kept.add(url);
              return url;
            };
            URL.revokeObjectURL = (url) => {
              window.kept.delete(url);
              revokeObjectURL(url);
            };""")
        self.choose("words")
        b.draw(prompt="a cat", count=2, steps=2, seed=1)
        b.wait_for_state("done")
        b.js("document.querySelector('.card .tile').click()")
        b.click("Start from this", "#picture")
        b.wait("document.querySelector('.started img')?.naturalWidth")
        self.paint_mask()
        self.assertEqual(b.js("return window.kept.size"), 4)
        self.assertEqual(b.js("return document.querySelector('.card').job.images.filter((each) => each.preview).length"), 0)
        b.click("Remove", ".started")
        b.click("Remove", ".card")
        self.assertEqual(b.js("return [window.kept.size, document.activeElement.id]"), [0, "feed"])

    def test_a_reply_that_breaks_off_is_a_lost_server(self):
        b = self.browser
        b.js("""
            const {fetch} = window;
            window.fetch = async (...asked) => {
              const reply = await fetch(...asked);
              return window.broken ? new Response(new ReadableStream({start: (stream) => stream.error(new TypeError())})) : reply;
            };
            window.broken = true;
            document.dispatchEvent(new Event("visibilitychange"));""")
        b.wait("document.getElementById('notice').textContent.includes('connection broke')")
        self.assertEqual(b.js("return document.getElementById('state').textContent"), "not connected")
        b.js("window.broken = false; document.dispatchEvent(new Event('visibilitychange'))")
        b.wait("document.getElementById('notice').hidden && !document.getElementById('state').textContent")
        self.assertEqual(b.problems(), [])

    def test_one_picture_of_a_request(self):
        made = self.browser.driver.execute_async_script("""
            const done = arguments[0];
            import("/feed.js").then(({single}) => done([
              single({params: {seed: "18446744073709551615", count: 2, conditions: [{text: "a"}]}, images: [{}, {}]}, 1),
              single({params: {seed: "1", count: 2, conditions: [{class_vector: [1]}, {class_vector: [2]}]},
                      images: [{}, {}]}, 1),
              single({params: {seed: "1", count: 2}, images: [{}, {seed: "2", label: 7}]}, 1)]));""")
        self.assertEqual(made, [{"seed": "0", "count": 1, "conditions": [{"text": "a"}]},
                                {"seed": "2", "count": 1, "conditions": [{"class_vector": [2]}]},
                                {"seed": "2", "count": 1, "conditions": [{"class_label": 7}]}])

    def test_a_label_may_have_commas(self):
        named = self.browser.driver.execute_async_script("""
            const done = arguments[0], labels = ["tench, Tinca tinca", "goldfish", "crane", "tench", "crane"];
            import("/form.js").then(({classesOf}) => done(
              ["tench, Tinca tinca", "Tench,tinca Tinca , goldfish", "goldfish, tench, 2", "crane, whale,", " "]
                .map((text) => classesOf(text, labels))));""")
        self.assertEqual(named, [[0], [0, 1], [1, 3, "2"], [2, "whale"], []])

    def test_a_small_screen_scrolls_in_one_direction(self):
        b = self.browser
        b.resize(360, 640)
        self.addCleanup(b.resize)
        b.open(f"http://127.0.0.1:{self.port}/")
        b.draw(count=4, steps=5)
        b.wait_for_state("done")
        self.assertLessEqual(b.js("return document.documentElement.scrollWidth"), 360)
        b.js("document.getElementById('tab-operate').click()")
        b.wait("document.querySelector('.box.jobs table')")
        self.assertLessEqual(b.js("return document.documentElement.scrollWidth"), 360)

    def run_job(self, *replies):
        """A job whose requests get these replies, each {"status", "headers", "body"}, and then the last one again.
        The page's clock does not wait; the 201st request is refused, so that every job ends.
        Returns {"state", "methods": of the requests, "pauses": seconds before each retry}."""
        return self.browser.driver.execute_async_script("""
            const [replies, done] = arguments, {fetch, setTimeout} = window, methods = [], pauses = [];
            window.fetch = async (path, options) => {
              if (!/generate|jobs/.test(path)) return fetch(path, options);
              const {body, ...rest} = replies[Math.min(methods.length, replies.length - 1)];
              methods.push(options.method);
              return methods.length > 200 ? new Response("", {status: 400}) : new Response(body, rest);
            };
            window.setTimeout = (wake, milliseconds) => {
              if (milliseconds >= 45000) return setTimeout(wake, milliseconds);  // a stream that is silent
              pauses.push(milliseconds / 1000);
              return setTimeout(wake, 0);
            };
            import("/job.js").then(async ({Job}) => {
              const job = new Job({model: "digits", seed: "1"}, {onchange: () => {}, onsignin: async () => false});
              await job.run();
              Object.assign(window, {fetch, setTimeout});
              done({state: job.state, methods, pauses});
            });""", list(replies))

    def test_only_what_may_pass_is_tried_again(self):
        begun = event("queued", position=0) + event("started")
        done = {"body": begun + event("completed", params={}, timing={})}

        def refused(http, status, retry=None, **headers):
            return {"status": http, "headers": headers, "body": json.dumps({"error": error(status, retry)})}

        def ended(status, retry=None, evaluations=1):
            return {"body": begun + event("progress", evaluations_done=evaluations) +
                            event("error", **error(status, retry))}

        for name, replies, state, requests in (
                ("a job that does not fit", [ended("RESOURCE_EXHAUSTED")], "failed", 1),
                ("a request that is too large", [refused(429, "RESOURCE_EXHAUSTED")], "failed", 1),
                ("a full queue", [refused(429, "RESOURCE_EXHAUSTED", "2.5s", **{"Retry-After": "3"}),
                                  ended("RESOURCE_EXHAUSTED", "1s"), done], "done", 3),
                ("a model that loads", [refused(503, "FAILED_PRECONDITION", **{"Retry-After": "1"}), done], "done", 2),
                ("each server loses the job", [ended("UNAVAILABLE")], "failed", 90),
                ("each comes further", [*(ended("UNAVAILABLE", None, n) for n in range(1, 101)), done], "done", 101)):
            with self.subTest(name):
                ran = self.run_job(*replies)
                self.assertEqual((ran["state"], ran["methods"]), (state, ["POST"] * requests))
                if name == "a full queue":
                    self.assertGreaterEqual(ran["pauses"][0], 2.5)
                    self.assertLess(ran["pauses"][0], 3)
                    self.assertGreaterEqual(ran["pauses"][1], 1)
        ran = self.run_job({"body": begun}, done)
        self.assertEqual((ran["state"], ran["methods"]), ("done", ["POST", "GET"]))

    def test_a_broken_connection_goes_on(self):
        proxy = self.through_proxy()
        b = self.browser
        b.draw(labels=[2], count=1, steps=LONG, seed=77)
        b.wait("document.querySelector('.tile[data-state=emerging]')")
        proxy.cut()
        b.wait_for_state("done")
        self.assertEqual(b.js("return document.querySelector('.card').dataset.restarts"), "0")
        self.assertEqual(b.pictures(), draw(self.port, conditions=[{"class_label": 2}], count=1, steps=LONG, seed=77))

    def test_a_server_that_restarts_draws_the_same(self):
        port = free_port()
        first = serve(port)
        self.addCleanup(first.__exit__)
        b = self.browser
        proxy = self.through_proxy(port)
        b.draw(labels=[4], count=1, steps=LONG, seed=78)
        b.wait("document.querySelector('.tile[data-state=emerging]')")
        first.process.send_signal(signal.SIGKILL)
        first.process.wait()
        proxy.cut()
        b.wait_for_state("waiting")
        second = serve(port)
        self.addCleanup(second.__exit__)
        b.wait_for_state("done")
        self.assertEqual(b.js("return document.querySelector('.card').dataset.restarts"), "1")
        self.assertEqual(b.pictures(), draw(self.port, conditions=[{"class_label": 4}], count=1, steps=LONG, seed=78))

    def test_a_drain_finishes_what_runs_and_refuses_the_rest(self):
        port = free_port()
        first = serve(port, "--lame-duck-seconds", "0", "--grace-seconds", "3600", "--max-slots", "2")
        self.addCleanup(first.__exit__)
        other = occupy(port, "PRIORITY_BATCH")  # while it runs, the drain is not over
        b = self.browser
        proxy = self.through_proxy(port)
        b.draw(labels=[5], count=1, steps=LONG, seed=79)
        b.wait("document.querySelector('.tile[data-state=emerging]')")
        b.js("window.running = document.querySelector('.card')")
        first.process.send_signal(signal.SIGTERM)
        first.wait_for("draining")
        b.draw(labels=[6], count=1, steps=5, seed=80)
        b.wait_for_state("waiting")
        status = b.js("return document.querySelector('.card .status').textContent")
        self.assertIn("shutting down", status)
        self.assertIn("Trying again", status)
        b.wait("document.getElementById('notice').textContent.includes('refuses new requests')")
        b.js("document.getElementById('tab-operate').click()")
        b.wait("/draining.*must be over in/s.test(document.querySelector('.box.server').textContent)")
        b.js("document.getElementById('tab-draw').click()")
        self.assertEqual(b.js("return window.running.dataset.state"), "running")
        proxy.release()
        # The picture that was running arrives from the old server, which then ends in order.
        b.wait("window.running.dataset.state === 'done'")
        self.assertEqual(b.js("return window.running.dataset.restarts"), "0")
        cancel(port, other)
        self.assertEqual(first.process.wait(300), 0)
        b.wait("document.getElementById('state').textContent === 'not connected'")
        self.assertEqual(b.state(), "waiting")
        second = serve(port)
        self.addCleanup(second.__exit__)
        b.wait_for_state("done")
        self.assertEqual(b.pictures(), draw(self.port, conditions=[{"class_label": 6}], count=1, steps=5, seed=80))
        b.js("document.getElementById('feed').append(document.querySelector('.card'))")
        self.assertEqual(b.pictures(), draw(self.port, conditions=[{"class_label": 5}], count=1, steps=LONG, seed=79))
        b.wait("document.getElementById('notice').hidden && !document.getElementById('state').textContent")


class TokenTest(unittest.TestCase):
    def test_without_a_token_nothing_is_drawn(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        clients = pathlib.Path(folder.name) / "clients.json"
        clients.write_text(json.dumps({
            "studio": {"token_sha256": [hashlib.sha256(b"open-sesame").hexdigest()]}}))
        port = free_port()
        server = serve(port, "--clients", str(clients), "--allow-plaintext-tokens")
        self.addCleanup(server.__exit__)
        b = chromium
        b.open(f"http://127.0.0.1:{port}/")
        b.wait("document.getElementById('token-dialog').open")

        def enter(token):
            b.js("document.getElementById('token-field').value = arguments[0];"
                 "document.getElementById('token-save').click()", token)

        enter("guess")
        b.wait("document.getElementById('token-dialog').open && "
               "document.getElementById('token-why').textContent.includes('does not know')")
        self.assertIsNone(b.js("return document.getElementById('form').elements.count || null"))
        enter("open-sesame")
        b.wait("document.getElementById('token').textContent === 'studio'")
        b.draw(count=1, steps=5)
        b.wait_for_state("done")
        # It is in this tab's storage alone: in no address and in nothing that outlives the tab.
        self.assertNotIn("sesame", b.driver.current_url + b.js("return JSON.stringify({...localStorage})"))
        self.assertNotIn("sesame", str(b.js(
            "return performance.getEntriesByType('resource').map((each) => each.name)")))
        b.open(f"http://127.0.0.1:{port}/")
        self.assertFalse(b.js("return document.getElementById('token-dialog').open"))


if __name__ == "__main__":
    sys.exit(unittest.main(verbosity=2))
