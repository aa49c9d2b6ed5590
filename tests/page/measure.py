#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures the page on loopback and makes the pictures of it in docs/images.

  tests/page/measure.py --binary build/release/server/denoised
  tests/page/measure.py --binary build/release/server/denoised --pictures docs/images

Prints, of each of --runs loads and requests, medians and the worst: how long until the page could be used (the form
is there and answers; from the start of the navigation, by the browser's own clock), and how many evaluations an image
had when its first preview was in the page.
"""

import argparse
import io
import os
import pathlib
import statistics
import sys
import time

import browser

sys.path.insert(0, str(browser.ROOT / "tests" / "server"))
from page_test import free_port, serve  # noqa: E402


def measure(url, runs):
    page = browser.Browser()
    try:
        times, first, milliseconds = [], [], []
        for run in range(runs + 1):
            page.driver.execute_cdp_cmd("Network.clearBrowserCache", {})
            page.driver.get("about:blank")
            page.driver.get(url)
            page.wait("performance.getEntriesByName('interactive').length")
            if run:  # the first one starts the browser's processes
                times.append(page.js("return performance.getEntriesByName('interactive')[0].startTime"))
        for run in range(runs):
            begin = page.js("return performance.now()")
            page.draw(count=1, steps=20, seed=run)
            page.wait_for_state("done")
            first.append(int(page.js("return document.querySelector('.card').dataset.firstPreview")))
            milliseconds.append(page.js("return performance.getEntriesByType('mark').at(-1).startTime") - begin)
        print(f"{page.driver.capabilities['browserName']} {page.driver.capabilities['browserVersion']}, {runs} runs")
        print(f"page can be used after: median {statistics.median(times):.0f} ms, worst {max(times):.0f} ms")
        print(f"evaluations when the first preview is in the page: median {statistics.median(first):.0f}, "
              f"worst {max(first)}; {statistics.median(milliseconds):.0f} ms after the click")
        print(f"size: {sum(path.stat().st_size for path in browser.PAGE.iterdir())} bytes")
    finally:
        page.close()


def save(page, path, width):
    from PIL import Image
    picture = Image.open(io.BytesIO(page.driver.get_screenshot_as_png())).convert("RGB")
    picture = picture.resize((width, picture.height * width // picture.width), Image.LANCZOS)
    picture.save(path, "WEBP", quality=86, method=6)
    print(f"{path}: {path.stat().st_size} bytes")


def pictures(url, folder):
    for name, width, height, dark, scale in (("page", 1280, 800, False, 1.5), ("page-dark", 1280, 800, True, 1.5),
                                             ("page-phone", 390, 780, True, 2)):
        page = browser.Browser(width, height, dark, scale)
        try:
            page.open(url)
            page.draw(labels=[0, 2, 3, 5, 7, 8], count=12 if width > 800 else 4, seed=3, steps=20)
            page.wait_for_state("done")
            page.draw(labels=[3, 7], count=4, steps=120, seed=21)
            page.wait("document.querySelector('.card progress').value > 0.12")
            time.sleep(0.3)
            save(page, folder / f"{name}.webp", min(width, 1280))
            if name == "page":
                page.wait_for_state("done")
                page.draw(labels=[], count=6, steps=600)
                page.draw(labels=[], count=30, steps=200)
                page.js("document.getElementById('tab-operate').click()")
                time.sleep(6)
                save(page, folder / "page-operate.webp", 1280)
        finally:
            page.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", required=True)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--pictures", type=pathlib.Path, help="write the pictures into this folder")
    flags = parser.parse_args()
    os.environ["DENOISED_BINARY"] = flags.binary
    port = free_port()
    with serve(port):
        url = f"http://127.0.0.1:{port}/"
        if flags.pictures:
            pictures(url, flags.pictures)
        else:
            measure(url, flags.runs)


if __name__ == "__main__":
    main()
