#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Stands for stable-diffusion.cpp's sd-cli, in tests of peer_sd_cpp.py: logs as it does and draws nothing.

Flash attention takes less time, but not in the decoder; with a direct convolution it fails.
"""
import json
import pathlib
import struct
import sys

if sys.argv[1:] == ["--version"]:
    print("stable-diffusion.cpp version unknown, commit abc1234")
    sys.exit()
model = pathlib.Path(sys.argv[sys.argv.index("-m") + 1])
names = []
for part in "unet/diffusion_pytorch_model", "vae/diffusion_pytorch_model", "text_encoder/model":
    with open(model / f"{part}.safetensors", "rb") as file:
        names += json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
if "text_model.embeddings.token_embedding.weight" not in names:
    sys.exit("[ERROR] get sd version from file failed")
if "--fa" in sys.argv and "--vae-conv-direct" in sys.argv:
    sys.exit("[ERROR] generate failed")
pictures = int(sys.argv[sys.argv.index("-b") + 1])
sampling = 0.5 - 0.1 * ("--diffusion-fa" in sys.argv or "--fa" in sys.argv)
decoding = 0.1 + 0.2 * ("--fa" in sys.argv)
for i in range(pictures):  # the first loads the weights
    taking = sampling + 0.01 * i + 9 * (i == 0)
    print(f"[INFO ] stable-diffusion.cpp:5711 - sampling completed, taking {taking:.2f}s")
for i in range(pictures):
    taking = decoding + 9 * (i == 0)
    print(f"[INFO ] stable-diffusion.cpp:5387 - latent {i + 1} decoded, taking {taking:.2f}s")
print("[INFO ] stable-diffusion.cpp:5391 - decode_first_stage completed, taking 9.99s")
