# SPDX-License-Identifier: Apache-2.0
"""Topics of measure.py: whole text-to-image pipelines of published shapes and random weights, which are
written on the machine that measures. latent-errors is about their precision (peer_errors.py); in the others,
a server has a pipeline that synthetic-model wrote.

A load is what `denoise bench` sends over loopback, each request with a prompt of its own, and images
arrive as PNG. The client has an eighth of the cores to itself (serving.py).
"""
import contextlib
import json
import os
import pathlib
import re
import signal
import statistics
import subprocess
import tempfile
import time
import types
import urllib.request

import peer_sd_cpp
import serving
from cpu_rows import cpu_name
from turns import alternate

HERE = pathlib.Path(__file__).resolve().parent
MODELS = HERE.parent / "models"
TAESD = MODELS / "configs/taesd"
# By model: where its configs are, and those of the rehearsal on a CPU.
SOURCES = {"sd15": ("pipelines/sd15", "latent/sd1"), "sd21": ("pipelines/sd21", "latent/sd2"),
           "sdxl": ("pipelines/sdxl", "latent/sdxl"),
           "sdxl-lcm": ("pipelines/sdxl-lcm", "latent/lcm"),
           "sd-turbo": ("pipelines/sd-turbo", "latent/sd1")}
TINY_VAE = (TAESD, MODELS / "latent/tiny_vae/vae")
# Sizes that SDXL was trained on: all have about as many pixels, so their rows take as long.
SDXL_SIZES = ("1024x1024", "896x1152", "1152x896", "832x1216", "1216x832", "768x1344")
TINY_SIZES = ("16x16", "8x16", "16x8", "24x8", "8x24", "24x16")
GUIDED = "steps=20,guidance=5"
# Each of these at each size: evaluations mix samplers, steps, and rows with guidance and without.
MIXED_KINDS = ("steps=20,guidance=5,sampler=euler", "steps=30,guidance=7,sampler=dpm_solver",
               "steps=12..40,guidance=5,sampler=ddim", "steps=25,guidance=1,sampler=euler_ancestral",
               "steps=10,guidance=4,sampler=heun", "steps=16..24,guidance=6,sampler=uni_pc")
MIXED_IN_FLIGHT = 64  # in both queues
# Of latent-errors: a model and what of it.
ERRORS = ("sd15-text", "sd15-unet", "sd15-images", "sd21-text", "sd21-unet", "sd21-images", "sdxl-text",
          "sdxl-text_2", "sdxl-unet", "sdxl-vae", "sdxl-vae_large", "sdxl-vae_two", "sdxl-vae_encode",
          "sdxl-images", "sdxl-lcm-unet", "sd-turbo-images", "taesd-vae")
PEER = "diffusers' models, torch.compile, the whole picture in one CUDA graph"
REQUEST = "steps=20,guidance=7.5,sampler=ddim"
EMOJI, EMOJI_REQUEST = HERE.parent.parent / "models/emoji-64", "steps=16,guidance=2"  # its defaults
PREPARE_SECONDS, MEASURE_SECONDS = 300, 60


@contextlib.contextmanager
def server_options(session):
    """What serving.Server needs of serving.py's options."""
    cores = sorted(os.sched_getaffinity(0))
    clients = min(max(1, len(cores) // 8), len(cores) - 1)
    with tempfile.TemporaryDirectory(prefix="denoised-pipelines-", dir=session.args.work) as work:
        log = pathlib.Path(work) / "denoised.log"
        try:
            yield types.SimpleNamespace(
                denoised=session.program("denoised", "server"),
                denoise=session.program("denoise", "client"), work=log.parent,
                device=session.args.device, server_flag=session.args.server_flag,
                server_cores=cores[:len(cores) - clients], client_cores=cores[len(cores) - clients:])
        finally:
            if log.exists():
                with open(session.out / log.name, "ab") as all_topics:
                    all_topics.write(log.read_bytes())


def make_model(session, name, folder, parts=()):
    """A directory with random weights; in --keep-models it stays."""
    tiny = session.args.tiny
    kept = session.args.keep_models
    directory = pathlib.Path(kept or folder) / "-".join([name, *(part for part, _ in parts)])
    if not (directory / "model_index.json").exists():
        flags = [f"--part={part}={places[tiny]}" for part, places in parts]
        begin = time.monotonic()
        subprocess.run([str(each) for each in (
            session.program("synthetic-model"), "--dtype=f16", *flags, MODELS / SOURCES[name][tiny],
            directory)], check=True, timeout=session.left())
        session.say(f"{name}: made in {time.monotonic() - begin:.1f} s")
    return directory


def device_of(session):
    """As the tables name it."""
    if session.args.device == "cpu":
        return f"{cpu_name()}, {len(os.sched_getaffinity(0))} cores"
    done = subprocess.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
                          capture_output=True, text=True, check=False)
    return done.stdout.splitlines()[0] if done.stdout else session.args.device


def write(session, topic, content, peer=None):
    context = session.context({"device": device_of(session)}, peer or {})
    if session.args.tiny:
        context["source"] = "a rehearsal with tiny models"
    session.write(topic, {"context": context} | content)


COUNTERS = {"evaluations": "denoised_evaluation_seconds_count",
            "evaluation_seconds": "denoised_evaluation_seconds_sum",
            "rows": "denoised_evaluation_rows_sum", "padding_rows": "denoised_padding_rows_total",
            "prompts": "denoised_prompts_total"}


def counters_in(page):
    """Of the metrics page: sums over devices and models, and seconds of the stages by name."""
    found = {}
    for name, labels, value in re.findall(r"^(\w+)(\{[^}]*\})? (\S+)$", page, re.MULTILINE):
        for key, metric in COUNTERS.items():
            if name == metric:
                found[key] = found.get(key, 0) + float(value)
        stage = re.search(r'stage="(\w+)"', labels or "")
        if name == "denoised_stage_seconds_sum" and stage:
            key = f"{stage[1]}_seconds"
            found[key] = found.get(key, 0) + float(value)
    return found


def counters(server):
    with urllib.request.urlopen(f"http://{server.metrics}/metrics") as page:
        found = counters_in(page.read().decode())
    return found | {"time": time.monotonic(), "cpu_seconds": server.cpu_seconds()}


def load(server, mix, in_flight, warm_up, seconds, seed, stop=False):
    """(what denoise bench found, what the server's counters grew by after the warm-up). `stop`: what is
    under way in the end is cancelled, and not waited for."""
    file = server.options.work / "bench.json"
    command = [server.options.denoise, "bench", "--server", server.address, "--json", file, "-c",
               f"{in_flight}", "--warm-up", f"{warm_up}", "-d", f"{seconds}", "--seed", f"{seed}",
               "--connections", "4"]
    for kind in mix:
        command += ["-x", kind]
    begin = time.monotonic()
    bench = subprocess.Popen([str(each) for each in command], stdout=subprocess.DEVNULL,
                             preexec_fn=serving.on(server.client_cores))
    time.sleep(max(0, begin + warm_up - time.monotonic()))
    before = counters(server)
    time.sleep(max(0, begin + warm_up + seconds - time.monotonic()))
    after = counters(server)
    if stop:
        bench.send_signal(signal.SIGINT)
    bench.wait()
    found = json.loads(file.read_text())
    if found["failed"]:
        raise RuntimeError(f"{found['failed']} requests failed: {found['errors']}")
    return found, {key: value - before.get(key, 0) for key, value in after.items()}


def throughput(topic, model, mix, rows, in_flight, warm_up, seconds, parts=(), fp8=False):
    """Images per second of a full queue."""
    def run(session):
        args = session.args
        figures = {"model": model, "mix": mix, "max_rows": rows, "in_flight": in_flight,
                   "images_per_second": [], "rounds": []}
        with server_options(session) as options:
            directory = make_model(session, model, options.work, parts)
            flags = ["--max-rows", f"{rows}"]
            if fp8:
                begin = time.monotonic()
                subprocess.run([options.denoised, "--calibrate", directory, "--device", args.device],
                               check=True, stdout=subprocess.DEVNULL, timeout=session.left())
                session.say(f"{topic}: calibrated in {time.monotonic() - begin:.1f} s")
                flags.append("--precision=fp8")
            with serving.Server(options, directory, *flags, apart=True) as server:
                serves = server.seconds_to("serving")
                session.say(f"{topic}: serves after {serves:.1f} s")
                for turn in range(args.pipeline_rounds):
                    begin = time.monotonic()
                    found, grown = load(server, [mix], in_flight,
                                        args.pipeline_scale * (warm_up if turn == 0 else warm_up / 2),
                                        args.pipeline_scale * seconds, seed=turn + 1)
                    figures["images_per_second"].append(found["images_per_second"])
                    figures["rounds"].append({
                        "server": grown, "clocks": session.log.since(begin),
                        "client_cpu_seconds": found["client_cpu_seconds"], "images": found["images"],
                        "latency_seconds": found["latency_seconds"]})
                    session.say(f"{topic}: {found['images_per_second']:.2f} images/s; "
                                f"{grown['rows'] / max(1, grown['evaluations']):.1f} rows an evaluation, "
                                f"{1e3 * grown['evaluation_seconds'] / max(1, grown['evaluations']):.2f} "
                                f"ms; {json.dumps({k: round(v, 3) for k, v in grown.items()})}")
                    write(session, topic, {"figures": figures})
    return run


def mixed_queue(sizes):
    return [f"size={size},{kind}" for size in sizes for kind in MIXED_KINDS]


def mean_pixels(mix):
    """Of kinds of requests that are equally frequent at every size."""
    edges = [re.search(r"size=(\d+)x(\d+)", kind).groups() for kind in mix]
    return statistics.fmean(int(width) * int(height) for width, height in edges)


def device_memory(server):
    """MiB in use on the device, by whatever (None without nvidia-smi), and in the server's own account."""
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
    try:
        done = subprocess.run(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", gpu],
                              capture_output=True, text=True, check=True, timeout=20)
        used = int(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        used = None
    return {"MiB_device": used, "MiB_model": server.metric("denoised_model_memory_bytes") / (1 << 20)}


def sdxl_mixed(session):
    """Rows and pixels per second of a queue in which everything differs, over those of a uniform one, in turns.
    The server does not count pixels. A request's size does not depend on what else it asks for, so a row is
    counted with the mean size of its queue; the sizes differ by 3.5 %."""
    args, topic = session.args, "sdxl-mixed"
    sizes = TINY_SIZES if args.tiny else SDXL_SIZES
    queues = {"uniform": [f"size={sizes[0]},{GUIDED},sampler=euler"], "mixed": mixed_queue(sizes)}
    figures = {"model": "sdxl", **queues, "in_flight": MIXED_IN_FLIGHT, "pairs": [], "pixel_pairs": [],
               "memory": {}, "rounds": []}

    def log_memory(when):
        figures["memory"][when] = device_memory(server)
        session.say(f"{topic}, memory {when}: {json.dumps(figures['memory'][when])}")

    with server_options(session) as options:
        directory = make_model(session, "sdxl", options.work)
        with serving.Server(options, directory, "--max-rows", "16", apart=True) as server:
            log_memory("before")
            # A new size is captured when it is first needed, and on a new machine its kernels measured. With
            # 12 s of this, the measured seconds still had some of it.
            load(server, queues["mixed"], MIXED_IN_FLIGHT, 1, args.pipeline_scale * 36, seed=0, stop=True)
            server.wait_for_none()
            log_memory("warm")
            for turn in range(args.pipeline_rounds):
                rates = {}
                for name in sorted(queues, reverse=turn % 2 == 0):
                    begin = time.monotonic()
                    _, grown = load(server, queues[name], MIXED_IN_FLIGHT, args.pipeline_scale * 4,
                                    args.pipeline_scale * 7, seed=turn + 1, stop=True)
                    server.wait_for_none()
                    rates[name] = grown["rows"] / grown["time"]
                    figures["rounds"].append({"queue": name, "server": grown,
                                              "clocks": session.log.since(begin)})
                    session.say(f"{topic}, {name}: {rates[name]:.2f} rows/s, "
                                f"{grown['rows'] / max(1, grown['evaluations']):.1f} an evaluation")
                pair = [rates["mixed"], rates["uniform"]]
                figures["pairs"].append(pair)
                figures["pixel_pairs"].append([rate * mean_pixels(queues[name])
                                               for rate, name in zip(pair, ("mixed", "uniform"))])
                log_memory("after")
                write(session, topic, {"figures": figures})


class OneRequest:
    """A worker: "measure" is the median of some requests, one after the other, from the text to the last
    byte of the PNG at the client."""

    def __init__(self, server, requests):
        self.server, self.requests, self.seed = server, requests, 0

    def ask(self, _verb, _name, _seconds, mix=REQUEST):
        self.seed += 1
        found = self.server.bench("-c", "1", "-n", f"{self.requests}", "--warm-up", "0.3", "-x", mix,
                                  "--seed", f"{self.seed}")
        if found["failed"]:
            return {"error": f"{found['errors']}"[:300]}
        self.found = found
        return {"ms": 1e3 * found["latency_seconds"]["p50"]}


def prepared(peer, seconds):
    """What the peer answers when it has compiled and warmed up; or its first error, which ends this."""
    for verb in ("compile", "prepare"):
        details = peer.ask(verb, "", seconds)
        if "error" in details:
            break
    return details


def beside(session, row, label, ours, peer, details):
    """Both in turns, into the row. `details`: what the peer answered when it was prepared."""
    if "error" in details:
        row["left_out"][label] = details["error"]
        return
    result = alternate((ours, ""), (peer, ""), session.args.rounds, session.log, MEASURE_SECONDS)
    row["peers"][label] = result | {"details": details}
    if not result["pairs"]:
        row["left_out"][label] = result.get("error")


def sd15_request(session):
    """One request at an idle server, beside PyTorch in one CUDA graph; then its first preview."""
    args, topic = session.args, "sd15-request"
    row = {"name": "text to PNG", "unit": "ms", "peers": {}, "left_out": {}}
    with server_options(session) as options:
        directory = make_model(session, "sd15", options.work, [("vae_tiny", TINY_VAE)])
        peer = session.python("pipeline-peer", "bench/peer_pipeline.py", f"--model={directory}",
                              "--steps=20", "--guidance=7.5", f"--device={args.device}")
        peer_ready = peer.answer(PREPARE_SECONDS).get("ready", {})
        details = prepared(peer, min(PREPARE_SECONDS, session.left() - 40))
        session.say(f"{topic}, peer: {json.dumps(details)[:300]}")
        with serving.Server(options, directory) as server:
            ours = OneRequest(server, args.requests)
            ours.ask("warm", "", MEASURE_SECONDS)
            beside(session, row, PEER, ours, peer, details)
            session.stop(peer)
            alone, previews = [], []
            for _ in range(args.rounds):
                alone.append(ours.ask("measure", "", MEASURE_SECONDS)["ms"])
                before = counters(server)
                ours.ask("measure", "", MEASURE_SECONDS, mix=f"{REQUEST},previews=1")
                after = counters(server)
                grown = {key: after[key] - before.get(key, 0) for key in after}
                evaluation = grown["evaluation_seconds"] / grown["evaluations"]
                seconds = ours.found["first_preview_seconds"]["p50"]
                previews.append({"seconds": seconds, "evaluation_seconds": evaluation,
                                 "evaluations": seconds / evaluation})
            figures = {"row": row, "ms_alone": alone, "first_previews": previews}
            session.say(f"{topic}: {statistics.median(alone):.1f} ms; first preview after "
                        f"{statistics.median(each['evaluations'] for each in previews):.2f} evaluations "
                        f"({1e3 * statistics.median(each['seconds'] for each in previews):.1f} ms)")
            write(session, topic, {"figures": figures}, peer_ready)


def sd15_sd_cpp(session):
    """One request at an idle server, beside stable-diffusion.cpp."""
    args, topic = session.args, "sd15-sd-cpp"
    if not args.sd_cli:
        raise ValueError("--sd-cli must name the program of stable-diffusion.cpp")
    row = {"name": "text to PNG", "unit": "ms", "peers": {}, "left_out": {}}
    with server_options(session) as options:
        directory = make_model(session, "sd15", options.work)
        peer = peer_sd_cpp.StableDiffusionCpp(args.sd_cli, directory, args.requests, options.work,
                                              session.out / "workers.log")
        peer_ready = {"stable-diffusion.cpp": peer.version()}
        details = peer.ask("prepare", "", min(PREPARE_SECONDS, session.left() - 40))
        session.say(f"{topic}, peer: {json.dumps(details)}")
        with serving.Server(options, directory) as server:
            ours = OneRequest(server, args.requests)
            ours.ask("warm", "", MEASURE_SECONDS)
            beside(session, row, f"stable-diffusion.cpp {peer.way}".strip(), ours, peer, details)
        session.say(f"{topic}: {json.dumps(row)}")
        write(session, topic, {"figures": {"row": row}}, peer_ready)


def sdxl_start(session):
    """From the start of the process until it serves SDXL, whose weights are in the page cache."""
    topic, runs = "sdxl-start", []
    with server_options(session) as options:
        directory = make_model(session, "sdxl", options.work)
        weights = 0
        for file in directory.rglob("*.safetensors"):
            weights += file.stat().st_size
            with open(file, "rb") as stream:  # so that it is in the page cache
                while stream.read(1 << 26):
                    pass
        flags = ("--autotune-cache", options.work / "autotune")
        for _ in range(1 + session.args.rounds):  # the first measures kernels
            with serving.Server(options, directory, *flags) as server:
                runs.append({f"{event.replace(' ', '_')}_seconds": server.seconds_to(event)
                             for event in ("listening", "model ready", "serving")})
                first = OneRequest(server, 1)
                begin = time.monotonic()
                server.bench("-c", "1", "-n", "1", "--warm-up", "0", "-x", "steps=1,guidance=5")
                runs[-1]["first_request_seconds"] = time.monotonic() - begin
                runs[-1]["next_request_seconds"] = 1e-3 * first.ask(
                    "measure", "", MEASURE_SECONDS, mix="steps=1,guidance=5")["ms"]
            session.say(f"{topic}: {json.dumps(runs[-1])}")
            write(session, topic, {"figures": {"weights_bytes": weights, "runs": runs}})


def emoji_cpu(session):
    """One picture of models/emoji-64 with its defaults, at an idle server on two cores."""
    args, topic = session.args, "emoji-cpu"
    if args.device != "cpu":
        session.say(f"{topic}: left out, since it is about a CPU: --device=cpu")
        return
    with server_options(session) as options:
        options.server_cores = options.client_cores = sorted(os.sched_getaffinity(0))[:2]
        with serving.Server(options, EMOJI, apart=True) as server:
            ours, seconds = OneRequest(server, 1), []
            for turn in range(args.rounds + 1):
                found = ours.ask("measure", "", MEASURE_SECONDS, mix=EMOJI_REQUEST)["ms"]
                if turn > 0:  # after a warm-up
                    seconds.append(1e-3 * found)
            session.say(f"{topic}: {statistics.median(seconds):.2f} s")
            write(session, topic, {"figures": {"request": EMOJI_REQUEST, "cores": len(options.server_cores),
                                               "seconds": seconds}})


def latent_errors(session):
    """Errors in bf16 of denoised and of diffusers, beside each other."""
    args, topic, rows = session.args, "latent-errors", []
    with tempfile.TemporaryDirectory(prefix="denoised-errors-", dir=args.work) as work:
        worker = session.python("errors-peer", "bench/peer_errors.py", f"--work={work}",
                                f"--program={session.program('model-outputs')}",
                                f"--device={args.device}", *(["--tiny"] if args.tiny else []))
        peer_ready = worker.answer(PREPARE_SECONDS).get("ready", {})
        for name in ERRORS:
            rows.append({"name": name} | worker.ask("measure", name, max(0, session.left() - 5)))
            session.say(f"{topic}: {json.dumps(rows[-1])}")
            write(session, topic, {"rows": rows}, peer_ready)
        session.stop(worker)


TOPICS = {
    "sd15": throughput("sd15", "sd15", "steps=20,guidance=7.5,sampler=ddim", rows=64, in_flight=64,
                       warm_up=6, seconds=10),
    "sd15-fp8": throughput("sd15-fp8", "sd15", "steps=20,guidance=7.5,sampler=ddim", rows=64,
                           in_flight=64, warm_up=6, seconds=10, fp8=True),
    "sdxl": throughput("sdxl", "sdxl", f"{GUIDED},sampler=euler", rows=16, in_flight=16, warm_up=10,
                       seconds=12),
    "sdxl-fp8": throughput("sdxl-fp8", "sdxl", f"{GUIDED},sampler=euler", rows=16, in_flight=16,
                           warm_up=10, seconds=12, fp8=True),
    "sdxl-lcm": throughput("sdxl-lcm", "sdxl-lcm", "steps=4", rows=16, in_flight=32, warm_up=6,
                           seconds=10),
    "sd-turbo": throughput("sd-turbo", "sd-turbo", "steps=1,guidance=1", rows=64, in_flight=128,
                           warm_up=4, seconds=8),
    "sd-turbo-tiny": throughput("sd-turbo-tiny", "sd-turbo", "steps=1,guidance=1", rows=64,
                                in_flight=128, warm_up=4, seconds=8, parts=[("vae", TINY_VAE)]),
    "sdxl-mixed": sdxl_mixed, "sd15-request": sd15_request, "sd15-sd-cpp": sd15_sd_cpp,
    "sdxl-start": sdxl_start, "emoji-cpu": emoji_cpu, "latent-errors": latent_errors}


def add_flags(parser):
    parser.add_argument("--keep-models", type=pathlib.Path, metavar="FOLDER",
                        help="of pipelines: makes them here and keeps them for the next run")
    parser.add_argument("--work", type=pathlib.Path, help="where pipelines and logs are, while they are "
                        "measured; default: a temporary folder")
    parser.add_argument("--server-flag", action="append", default=[], help="of pipelines, repeatable")
    parser.add_argument("--sd-cli", type=pathlib.Path, metavar="FILE",
                        help="of sd15-sd-cpp: the program of stable-diffusion.cpp")
    parser.add_argument("--pipeline-rounds", type=int, default=2, help="of loads of pipelines")
    parser.add_argument("--pipeline-scale", type=float, default=1,
                        help="makes their loads so many times as long")
    parser.add_argument("--tiny", action="store_true",
                        help="rehearse pipelines with models of tests/models/latent")
