#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures the page on loopback, and makes the pictures of it in docs/images.

  tests/page/measure.py --binary build/release/server/denoised --json docs/benchmarks/page.json
  tests/page/measure.py --binary build/release/server/denoised --pictures docs/images

Of each of --runs loads with an empty cache, in milliseconds from the start of the navigation by the browser's clock:

  dom_content_loaded   the document is parsed and its scripts have run (the end of DOMContentLoaded)
  first_paint          First Contentful Paint
  usable               the model list and the server's state are there, and the form can be sent
  interactive          Time to Interactive: the latest of these three and of the end of the last long task (above 50 ms)
                       that began before. What the page polls afterwards is not waited for.

Of each of --runs requests of 1 and of 16 pictures: how many evaluations an image has, by the latest event, when its
first preview is decoded and in a frame, and the milliseconds from the click to then. It takes an idle machine; the
load average is written down.
"""

import argparse
import datetime
import io
import json
import os
import pathlib
import statistics
import subprocess
import time

import browser
from page_test import free_port, serve


NAVIGATION = """
    const done = arguments[0], tasks = [];
    const observer = new PerformanceObserver((list) => tasks.push(...list.getEntries()));
    observer.observe({type: "longtask", buffered: true});
    setTimeout(() => {
      tasks.push(...observer.takeRecords());
      const [navigation] = performance.getEntriesByType("navigation");
      const [paint] = performance.getEntriesByName("first-contentful-paint");
      const [usable] = performance.getEntriesByName("interactive");
      const figures = {dom_content_loaded: navigation.domContentLoadedEventEnd, first_paint: paint.startTime,
        usable: usable.startTime};
      const last = Math.max(...Object.values(figures));
      const ends = tasks.filter((each) => each.startTime < last).map((each) => each.startTime + each.duration);
      done({...figures, interactive: Math.max(last, ...ends)});
    }, 100);"""


def load(page, url):
    page.driver.execute_cdp_cmd("Network.clearBrowserCache", {})
    page.driver.get("about:blank")
    page.driver.get(url)
    page.wait("performance.getEntriesByName('interactive').length && "
              "performance.getEntriesByName('first-contentful-paint').length")
    if not page.js("return document.querySelector('#form [type=submit]:enabled')"):
        raise SystemExit("the page says that it can be used, but its form cannot be sent")
    return page.driver.execute_async_script(NAVIGATION)


def first_preview(page, count, seed):
    begin = page.js("return performance.now()")
    page.draw(count=count, steps=20, seed=seed)
    page.wait_for_state("done")
    shown = page.js("""
        const {job, firstPreview} = document.querySelector(".card").dataset;
        return firstPreview && [Number(firstPreview), performance.getEntriesByName(`first-preview ${job}`)[0].startTime];""")
    if not shown:
        raise SystemExit("no preview was shown before the picture")
    return {"count": count, "evaluations": shown[0], "milliseconds": shown[1] - begin}


def measure(url, runs):
    page = browser.Browser()
    try:
        context = {
            "date": datetime.date.today().isoformat(),
            "commit": subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=browser.ROOT, text=True,
                                     capture_output=True, check=False).stdout.strip(),
            "device": f"{processor()}, {os.cpu_count()} threads",
            "peers": {"Chromium": page.driver.capabilities["browserVersion"]},
            "rounds": runs,
            "load_average": f"{os.getloadavg()[0]:.1f}",
        }
        load(page, url)  # starts the browser's processes
        loads = [load(page, url) for _ in range(runs)]
        first_preview(page, 16, 0)
        previews = [first_preview(page, count, seed) for count in (1, 16) for seed in range(runs)]
        return {"context": context, "loads": loads, "previews": previews,
                "page_bytes": sum(path.stat().st_size for path in browser.PAGE.iterdir())}
    finally:
        page.close()


def processor():
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return "unknown"


def show(figures):
    def line(what, values):
        print(f"{what}: {min(values):.0f} / {statistics.median(values):.0f} / {max(values):.0f}")

    print(f"{figures['context']}\nleast / median / most of {len(figures['loads'])}:")
    for name in figures["loads"][0]:
        line(f"{name}, ms", [each[name] for each in figures["loads"]])
    for count in (1, 16):
        some = [each for each in figures["previews"] if each["count"] == count]
        line(f"first preview of {count}, evaluations", [each["evaluations"] for each in some])
        line(f"first preview of {count}, ms", [each["milliseconds"] for each in some])
    print(f"page: {figures['page_bytes']} bytes")


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
    parser.add_argument("--json", type=pathlib.Path, help="write the figures into this file too")
    parser.add_argument("--pictures", type=pathlib.Path, help="write the pictures into this folder")
    flags = parser.parse_args()
    os.environ["DENOISED_BINARY"] = flags.binary
    port = free_port()
    with serve(port):
        url = f"http://127.0.0.1:{port}/"
        if flags.pictures:
            pictures(url, flags.pictures)
        else:
            figures = measure(url, flags.runs)
            show(figures)
            if flags.json:
                flags.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
