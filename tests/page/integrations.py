#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What docs/integrations.md says of tools from PyPI, tried against a server. By hand: it needs them installed.

  pip install openai litellm griptape pillow
  tests/page/integrations.py http://127.0.0.1:8080 mnist-32
"""

import base64
import importlib.metadata
import io
import sys

BASE, MODEL = sys.argv[1] + "/v1", sys.argv[2]
ACCESS = {"api_key": "none"}


def png(data):
    data = base64.b64decode(data) if isinstance(data, str) else data
    assert data.startswith(b"\x89PNG\r\n\x1a\n"), data[:40]
    return data


def client():
    from openai import OpenAI
    return OpenAI(base_url=BASE, **ACCESS)


def openai():
    images = client().images
    assert MODEL in [model.id for model in client().models.list()]
    first, second = (images.generate(model=MODEL, prompt="seven", extra_body={"denoised": {"seed": 7}})
                     for _ in range(2))
    assert png(first.data[0].b64_json) == png(second.data[0].b64_json)
    events = [event.type for event in
              images.generate(model=MODEL, prompt="seven", stream=True, partial_images=2)]
    assert events == ["image_generation.partial_image"] * 2 + ["image_generation.completed"], events
    edited = images.edit(model=MODEL, prompt="eight",
                         image=("start.png", png(first.data[0].b64_json), "image/png"))
    png(edited.data[0].b64_json)


def litellm():
    import litellm
    access = {"api_base": BASE, **ACCESS}
    drawn = litellm.image_generation(model=f"openai/{MODEL}", prompt="seven", **access)
    start = io.BytesIO(png(drawn.data[0].b64_json))
    start.name = "start.png"
    png(litellm.image_edit(model=f"openai/{MODEL}", prompt="eight", image=start, **access).data[0].b64_json)


def griptape():
    from griptape.drivers.image_generation.openai import OpenAiImageGenerationDriver
    driver = OpenAiImageGenerationDriver(model=MODEL, base_url=BASE, image_size=None, **ACCESS)
    png(driver.try_text_to_image(prompts=["seven"]).value)


def main():
    failed = False
    for attempt in (openai, litellm, griptape):
        try:
            version = importlib.metadata.version(attempt.__name__)
        except importlib.metadata.PackageNotFoundError:
            print(f"{attempt.__name__}: not installed")
            continue
        try:
            attempt()
            print(f"{attempt.__name__} {version}: works")
        except Exception as error:  # whatever a tool raises
            failed = True
            print(f"{attempt.__name__} {version}: FAILED: {type(error).__name__}: {error}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
