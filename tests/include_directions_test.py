#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Includes go one way: every #include of engine/, flags/, server/, client/ and trainer/ leads to a room that its
own room may see. docs/architecture.md draws the same picture. Run: tests/include_directions_test.py"""

import pathlib
import re
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent
SOURCES = {".h", ".cc", ".cu", ".cuh"}

# Which room a path belongs to, for files of the repository and for what they include. The first
# prefix that fits decides; files right under engine/ implement engine.h.
ROOMS = [
    ("engine/core/", "core"),
    ("engine/backend/open.cc", "backend choice"),  # the one place that names both backends
    ("engine/backend/cpu/", "cpu"),
    ("engine/backend/cuda/", "cuda"),
    ("engine/backend/", "backend"),
    ("engine/io/", "io"),
    ("engine/text/", "text"),
    ("engine/sampling/", "sampling"),
    ("engine/nn/", "nn"),
    ("engine/models/", "models"),
    ("engine/pipelines/", "pipelines"),
    ("engine/batching/", "batching"),
    ("engine/training/cpu/", "training cpu"),
    ("engine/training/cuda/", "training cuda"),
    ("engine/training/", "training"),
    ("engine/images/", "images"),
    ("engine/engine.h", "engine.h"),
    ("engine/job.h", "job.h"),  # the other half of the public interface, which batching/ implements
    ("server/version.h", "server version"),  # generated
    ("server/status/", "server status"),
    ("server/telemetry/", "telemetry"),
    ("server/security/", "security"),
    ("server/models/", "server models"),
    ("server/jobs/", "jobs"),
    ("server/api/", "api"),
    ("server/http/", "http"),
    ("server/", "server"),
    ("flags/", "flags"),
    ("client/", "client"),
    ("trainer/version.h", "trainer version"),  # generated
    ("trainer/data/", "trainer data"),
    ("trainer/", "trainer"),
    ("proto/", "proto"),
    ("denoised/v1/", "proto"),  # generated from proto/
    ("inference/", "proto"),
    ("google/rpc/", "proto"),
    ("denoised/rpc/", "proto"),  # the client's copies of google/rpc/ and grpc/health/
    ("denoised/health/", "proto"),
    ("denoised/", "client"),  # client/denoised/, as an installed client is included
    ("command/", "client"),  # client/command/
    ("grpc", "gRPC"),
    ("google/protobuf/", "gRPC"),
    ("prometheus/", "prometheus-cpp"),
    ("boost/", "Boost"),
    ("openssl/", "OpenSSL"),
    ("oneapi/", "oneDNN"),
    ("dnnl", "oneDNN"),
    ("utf8proc", "utf8proc"),
    ("cuda", "CUDA"),
    ("cublas", "CUDA"),
    ("nvml", "CUDA"),
]

# room: what its files may include, besides the room itself, the standard library and libraries that
# no room has to itself.
ALLOWED = {
    "core": set(),
    "backend": {"core"},
    "cpu": {"core", "backend", "oneDNN"},
    "cuda": {"core", "backend", "CUDA"},
    "backend choice": {"core", "backend", "cpu", "cuda"},
    "io": {"core"},
    "text": {"core", "utf8proc"},
    "sampling": {"core"},
    "nn": {"core", "backend", "io"},
    "models": {"core", "backend", "io", "nn"},
    "pipelines": {"core", "backend", "io", "text", "nn", "models", "sampling", "job.h"},
    "job.h": {"core", "sampling"},
    "batching": {"core", "backend", "io", "nn", "models", "sampling", "job.h"},
    # The network's config, and ops that serving does not have; serving never includes training.
    "training": {"core", "backend", "io", "nn", "models", "sampling"},
    "training cpu": {"core", "backend", "cpu", "oneDNN", "training"},
    "training cuda": {"core", "backend", "cuda", "CUDA", "training"},
    "images": {"core"},
    "engine.h": {"core", "sampling", "job.h"},
    "engine": {"core", "backend", "io", "nn", "models", "sampling", "pipelines", "batching",
               "engine.h", "job.h"},
    "server status": {"core", "engine.h", "proto", "gRPC"},
    "telemetry": {"core", "engine.h", "proto", "gRPC", "prometheus-cpp", "server status"},
    "security": {"core", "proto", "gRPC", "OpenSSL", "server status", "telemetry"},
    "server models": {"core", "engine.h", "proto", "gRPC", "server status", "telemetry"},
    "jobs": {"core", "sampling", "engine.h", "proto", "gRPC", "OpenSSL", "server version"}
    | {"server status", "telemetry", "images", "security"},
    "api": {"core", "sampling", "engine.h", "proto", "gRPC", "server version"}
    | {"server status", "telemetry", "images", "security", "server models", "jobs"},
    "http": {"core", "engine.h", "proto", "gRPC", "server version", "OpenSSL", "Boost"}
    | {"server status", "telemetry", "security", "server models", "jobs", "api"},
    "server": {"core", "sampling", "engine.h", "proto", "gRPC", "prometheus-cpp", "http"}
    | {"server version", "server status", "telemetry", "images", "security", "server models"}
    | {"jobs", "api", "flags"},
    "flags": set(),
    "client": {"proto", "gRPC", "OpenSSL", "flags"},
    "trainer data": {"core", "images", "training"},
    "trainer": {"core", "io", "images", "models", "sampling", "text", "pipelines", "engine.h", "job.h"}
    | {"training", "trainer data", "trainer version", "prometheus-cpp", "flags"},
}

DIRECTIVE = re.compile(r"^\s*#\s*include\b(.*)$", re.MULTILINE)
TARGET = re.compile(r'^\s*(?:<([^>]+)>|"([^"]+)")')


def room_of(path):
    for prefix, room in ROOMS:
        if path.startswith(prefix):
            # A folder of server/ or trainer/ that has no row must get one.
            return "no room" if room in ("server", "trainer") and path.count("/") > 1 else room
    if path.startswith("engine/"):
        return "engine" if path.count("/") == 1 else "no room"
    return None


def complaints(path, text):
    """What is wrong with the includes of one file: its path from the root, and its content."""
    room = room_of(path)
    if room not in ALLOWED:
        yield f"{path}: belongs to no room; add it to ROOMS and ALLOWED"
        return
    for directive in DIRECTIVE.findall(text):
        target = TARGET.match(directive)
        if not target:
            yield f"{path}: cannot read `#include{directive}`; write the file's name out"
            continue
        included = target[1] or target[2]
        if target[2] and "/" not in included:
            yield f'{path}: "{included}" is relative; write its path from the root'
            continue
        other = room_of(included)
        if other and other != room and other not in ALLOWED[room]:
            seen = ", ".join(sorted(ALLOWED[room])) or "nothing else"
            yield f"{path}: includes {included} of {other}, but {room} may only see {seen}"


class IncludeDirections(unittest.TestCase):
    def test_repository(self):
        files = [
            file
            for folder in ("engine", "flags", "server", "client", "trainer")
            for file in sorted((ROOT / folder).rglob("*"))
            if file.suffix in SOURCES
        ]
        self.assertGreater(len(files), 10, "the sources were not found")
        found = [
            complaint
            for file in files
            for complaint in complaints(
                file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8")
            )
        ]
        self.assertEqual(found, [], "\n" + "\n".join(found))

    def test_planted_includes_are_caught(self):
        for path, line in [
            ("engine/core/tensor.h", '#include "engine/backend/backend.h"'),
            ("engine/core/tensor.cc", "  #  include <grpcpp/grpcpp.h>"),
            ("engine/backend/backend.h", '#include "engine/backend/cpu/cpu_backend.h"'),
            ("engine/backend/cpu/conv.cc", '#include "engine/backend/cuda/cuda_backend.h"'),
            ("engine/backend/cuda/conv2d.cu", '#include "engine/io/weights.h"'),
            ("engine/backend/check.cc", "#include <cuda_runtime.h>"),
            ("engine/io/weights.cc", '#include "engine/nn/linear.h"'),
            ("engine/sampling/sampler.h", '#include "engine/io/weights.h"'),
            ("engine/text/clip_tokenizer.cc", '#include "engine/io/safetensors.h"'),
            ("engine/models/clip_text.cc", "#include <utf8proc.h>"),
            ("engine/nn/conv.cc", "#include <oneapi/dnnl/dnnl.hpp>"),
            ("engine/batching/slot.h", '#include "engine/training/backend.h"'),
            ("engine/backend/backend.h", '#include "engine/training/backend.h"'),
            ("engine/training/trainer.cc", "#include <oneapi/dnnl/dnnl.hpp>"),
            ("trainer/run.cc", '#include "server/telemetry/log.h"'),
            ("trainer/new_room/thing.h", ""),
            ("engine/models/unet2d.cc", '#include "engine/batching/step_batcher.h"'),
            ("engine/batching/slot.h", '#include "engine/engine.h"'),
            ("engine/engine.cc", '#include "denoised/v1/image_generation.pb.h"'),
            ("engine/engine.cc", "#include <google/protobuf/message.h>"),
            ("engine/engine.h", '#include "engine/models/unet2d.h"'),
            ("engine/engine.h", '#include "engine/batching/job_queue.h"'),
            ("engine/job.h", '#include "engine/batching/admission.h"'),
            ("engine/resolve.cc", '#include "flags/flags.h"'),
            ("flags/flags.cc", '#include "engine/core/status.h"'),
            ("server/main.cc", '#include "engine/batching/step_batcher.h"'),
            ("server/main.cc", '#include "engine/resolve.h"'),
            ("server/main.cc", '#include "command/terminal.h"'),
            ("server/main.cc", '#include "denoised/client.h"'),
            ("server/api/service.cc", '#include "server/config.h"'),
            ("server/jobs/generation.h", '#include "server/api/translate.h"'),
            ("server/jobs/jobs.cc", '#include "server/server.h"'),
            ("server/jobs/jobs.cc", '#include "server/models/catalog.h"'),
            ("server/models/catalog.h", '#include "server/jobs/jobs.h"'),
            ("server/models/catalog.cc", '#include "server/security/clients.h"'),
            ("server/security/clients.h", '#include "server/config.h"'),
            ("server/security/acceptor.cc", '#include "server/models/catalog.h"'),
            ("server/telemetry/metrics.cc", '#include "server/models/catalog.h"'),
            ("engine/images/png.cc", '#include "server/telemetry/log.h"'),
            ("engine/images/png.cc", "#include <grpcpp/grpcpp.h>"),
            ("server/status/name.h", '#include "server/telemetry/log.h"'),
            ("server/jobs/jobs.h", "#include <prometheus/registry.h>"),
            ("server/new_room/thing.h", ""),
            ("client/denoised/client.h", '#include "engine/core/status.h"'),
            ("client/command/main.cc", '#include "server/config.h"'),
            ("engine/core/arena.cc", '#include "arena.h"'),
            ("engine/core/arena.cc", "#include ARENA_HEADER"),
            ("engine/utils/strings.cc", ""),
        ]:
            with self.subTest(path=path, line=line):
                self.assertEqual(len(list(complaints(path, f"#pragma once\n{line}\n"))), 1)

    def test_allowed_includes_pass(self):
        for path, line in [
            ("engine/core/arena.cc", '#include "engine/core/arena.h"'),
            ("engine/backend/open.cc", '#include "engine/backend/cuda/cuda_backend.h"'),
            ("engine/backend/cuda/conv2d.cu", "#include <cuda_bf16.h>"),
            ("engine/models/unet2d.cc", '#include "engine/nn/conv2d.h"'),
            ("server/api/service.h", "#include <grpcpp/grpcpp.h>"),
            ("server/api/service.h", '#include "server/jobs/jobs.h"'),
            ("server/jobs/jobs.h", '#include "server/security/clients.h"'),
            ("server/server.cc", '#include "server/api/service.h"'),
            ("server/main.cc", '#include "engine/engine.h"'),
            ("client/denoised/client.h", '#include "denoised/v1/image_generation.pb.h"'),
            ("client/denoised/client.h", '#include "absl/status/status.h"  // IWYU pragma: export'),
        ]:
            with self.subTest(path=path, line=line):
                self.assertEqual(list(complaints(path, line)), [])


if __name__ == "__main__":
    sys.exit(unittest.main(verbosity=1))
