# SPDX-License-Identifier: Apache-2.0
"""The page in a real browser: the distribution's Chromium, without a window. Importing this ends the test with 77 if
there is none."""

import os
import pathlib
import shutil
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "server" / "http" / "page"
sys.path[:0] = [str(ROOT / "tests" / "server")]

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
try:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service
    from selenium.webdriver.common.action_chains import ActionChains
except ImportError:
    webdriver = None
if not (CHROMIUM and DRIVER and webdriver):
    print("skipped: no Chromium; install chromium, chromium-driver and python3-selenium")
    sys.exit(77)


class Browser:
    def __init__(self, width=1360, height=860, dark=False, scale=1, site_data=True):
        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM
        # Containers have neither the kernel features of the sandbox nor a large /dev/shm.
        for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu",
                         "--hide-scrollbars", "--no-first-run", "--disable-background-networking",
                         "--proxy-server=direct://", f"--window-size={width},{height}"):
            options.add_argument(argument)
        if not site_data:
            options.add_experimental_option("prefs", {"profile.default_content_setting_values.cookies": 2})
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.driver = webdriver.Chrome(service=Service(DRIVER), options=options)
        self.driver.set_script_timeout(300)
        # What the Content-Security-Policy of a page has kept it from, from its first byte on.
        self.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": """
            window.violations = [];
            document.addEventListener("securitypolicyviolation", (event) =>
              window.violations.push(`${event.effectiveDirective} ${event.blockedURI}`));"""})
        self.resize(width, height, scale)
        self.colours(dark)

    def resize(self, width=1360, height=860, scale=1):
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {
            "width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 800})

    def colours(self, dark):
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]})

    def close(self):
        self.driver.quit()

    def js(self, script, *arguments):
        return self.driver.execute_script(script, *arguments)

    def wait(self, expression, seconds=300):
        """Until a JavaScript expression is true; returns it."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            value = self.js(f"return {expression}")
            if value:
                return value
            time.sleep(0.02)
        raise AssertionError(f"never true: {expression}\n{self.js('return document.body.innerText')}\n"
                             f"{self.problems()[-10:]}")

    def open(self, url):
        self.driver.get(url)
        self.wait("document.body.dataset.ready !== undefined")

    def draw(self, **fields):
        """Fills in fields of the form and draws; the latest card is then the first."""
        before = self.js("return document.querySelectorAll('.card').length")
        self.js("""
            const form = document.getElementById("form");
            for (const [name, value] of Object.entries(arguments[0])) {
              if (name === "labels") {
                for (const box of form.querySelectorAll("[name=label]")) {
                  if (box.checked !== value.includes(Number(box.value))) box.click();
                }
              } else {
                form.elements[name].value = value;
              }
            }
            form.requestSubmit();""", fields)
        self.wait(f"document.querySelectorAll('.card').length > {before}")

    def state(self):
        return self.js("return document.querySelector('.card').dataset.state")

    def wait_for_state(self, *states):
        return self.wait(f"{list(states)}.includes(document.querySelector('.card').dataset.state) && "
                         "document.querySelector('.card').dataset.state")

    def pictures(self):
        """The bytes of the first card's pictures, as the page has them."""
        return [bytes(picture) for picture in self.driver.execute_async_script("""
            const done = arguments[0];
            Promise.all(document.querySelector(".card").job.images.map((image) => image.blob.arrayBuffer()
              .then((bytes) => [...new Uint8Array(bytes)]))).then(done);""")]

    def click(self, text, within="body"):
        self.js("""
            [...document.querySelector(arguments[1]).querySelectorAll("button, summary, a")]
              .find((each) => each.textContent.trim() === arguments[0]).click();""", text, within)

    def press(self, key, *more):
        """Real keys, where the focus is: one, or the last while those before it are held."""
        *held, last = [key, *more]
        actions = ActionChains(self.driver)
        for each in held:
            actions.key_down(each)
        actions.send_keys(last)
        for each in held:
            actions.key_up(each)
        actions.perform()

    def problems(self):
        """What the console complained of since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser")
                if entry["level"] in ("SEVERE", "WARNING")]


def binary():
    return os.environ["DENOISED_BINARY"]
