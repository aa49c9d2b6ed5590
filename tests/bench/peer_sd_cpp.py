# SPDX-License-Identifier: Apache-2.0
"""A text-to-image request as stable-diffusion.cpp draws it fastest, by its own log. For pipelines.py.

Its program, sd-cli, reads the weights that the server reads, in fp16. It draws some pictures of 512×512 in 20
guided steps of DDIM and ends. A picture's time is what it logs for sampling and decoding. Left out are the text
encoder, the PNG and the first picture, in which it loads the weights.
"""
import json
import math
import re
import shutil
import statistics
import struct
import subprocess
import time

# Further flags. All are tried, and the fastest are measured.
WAYS = ("", "--diffusion-fa", "--fa", "--fa --vae-conv-direct", "--fa --diffusion-conv-direct")
REQUEST = ("-W", "512", "-H", "512", "--steps", "20", "--cfg-scale", "7.5", "--sampling-method",
           "ddim_trailing", "-s", "1", "-p", "a small red apple beside the wooden birds")
SAMPLING = re.compile(r"sampling completed, taking ([\d.]+)s")
DECODING = re.compile(r"latent \d+ decoded, taking ([\d.]+)s")


def write_for_sd_cli(model, directory):
    """A directory with the model's weights. The text encoder's names have a prefix, as in older files of
    transformers: sd-cli knows no others."""
    (directory / "text_encoder").mkdir(parents=True)
    for part in ("unet", "vae"):
        (directory / part).symlink_to((model / part).resolve())
    file = "text_encoder/model.safetensors"
    with open(model / file, "rb") as read, open(directory / file, "wb") as written:
        (size,) = struct.unpack("<Q", read.read(8))
        tensors = {f"text_model.{name.removeprefix('text_model.')}": tensor
                   for name, tensor in json.loads(read.read(size)).items() if name != "__metadata__"}
        header = json.dumps(tensors).encode()
        header += b" " * (-len(header) % 8)
        written.write(struct.pack("<Q", len(header)) + header)
        shutil.copyfileobj(read, written)


class StableDiffusionCpp:
    """A worker (turns.py): "prepare" finds the fastest way, "measure" is the median of some pictures."""

    def __init__(self, program, model, pictures, work, log):
        self.program, self.pictures, self.log = program, pictures, log
        self.model, self.picture, self.way = work / "sd-cpp", work / "sd-cpp.png", WAYS[0]
        write_for_sd_cli(model, self.model)

    def version(self):
        said = subprocess.run([str(self.program), "--version"], capture_output=True, text=True, check=True)
        return re.search(r"commit (\w+)", said.stdout)[1]

    def draw(self, way, pictures, seconds):
        command = (self.program, "-m", self.model, *REQUEST, "-b", 1 + pictures, "-o", self.picture,
                   *way.split())
        try:
            done = subprocess.run([str(each) for each in command], stdout=subprocess.PIPE,
                                  stderr=subprocess.STDOUT, text=True, errors="replace", check=False,
                                  timeout=max(0, seconds))
        except (OSError, subprocess.TimeoutExpired) as error:
            return {"error": f"{error}"[-300:]}
        with open(self.log, "a", encoding="utf-8") as log:
            log.write(done.stdout)
        sampling, decoding = ([1e3 * float(each) for each in line.findall(done.stdout)][1:]
                              for line in (SAMPLING, DECODING))
        if done.returncode or not len(sampling) == len(decoding) == pictures:
            return {"error": f"sd-cli {way}: exit status {done.returncode}, {len(sampling)} pictures sampled "
                             f"and {len(decoding)} decoded after the first; see workers.log"}
        return {"ms": statistics.median(map(sum, zip(sampling, decoding))),
                "ms_sampling": statistics.median(sampling), "ms_decoding": statistics.median(decoding)}

    def ask(self, verb, _name, seconds):
        if verb == "measure":
            return self.draw(self.way, self.pictures, seconds)
        end = time.monotonic() + seconds
        ways = {way: self.draw(way, 1, end - time.monotonic()) for way in WAYS}
        self.way = min(WAYS, key=lambda way: ways[way].get("ms", math.inf))
        if "error" in ways[self.way]:
            return ways[self.way]
        return {"fastest": self.way, "ways": ways}
