"""Prints denoised's figures beside its peers' as a table in Markdown.

usage: compare_peer.py --ours=kernels.json,models.json --peers=peer_kernels.json[,…]
       [--earlier-peers=peer_models.json]

`ours` are Google Benchmark's files, `peers` those of peer_kernels.py and peer_models.py. The ceilings
are the ones that peer_kernels.py measured. A ratio is the time of the fastest peer over denoised's:
above 1 denoised is faster. In brackets: the time of a pass that only reads and writes as much, over
denoised's. Earlier peers must come from a GPU of the same kind, and are marked.
"""
import argparse
import json
import re
import sys
from pathlib import Path

MILLISECONDS = {"us": 1e-3, "ms": 1.0, "ns": 1e-6, "s": 1e3}


def name_of(benchmark):
    """What both sides call it: without how Google Benchmark ran it and where a config lies."""
    name = re.sub(r"/(iterations:\d+|manual_time)", "", benchmark["name"])
    return re.sub(r".*?([^/]+)/config\.json", r"\1", name)


def shown(ms):
    return f"{ms * 1e3:.1f} µs" if ms < 0.5 else f"{ms:.2f} ms"


def read(paths):
    return [json.loads(Path(path).read_text()) for path in paths.split(",") if path]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ours", required=True)
    parser.add_argument("--peers", default="")
    parser.add_argument("--earlier-peers", default="")
    args = parser.parse_args()
    ours = read(args.ours)
    device = ours[0]["context"]["device"]
    print(f"denoised on {device}, {ours[0]['context']['date']}\n")

    peers, ceilings = {}, {}
    for files, earlier in ((read(args.earlier_peers), True), (read(args.peers), False)):
        for file in files:
            context = file["context"]
            if context["gpu"] not in device:
                sys.exit(f"The peers were measured on {context['gpu']}, denoised on {device}: "
                         "leave the earlier file out and let the peers be measured again.")
            ceilings |= file.get("ceilings", {})
            for benchmark in file["benchmarks"]:
                peers[benchmark["name"]] = benchmark | {"earlier": earlier}
            print(f"{'Earlier peers (°)' if earlier else 'Peers'}: PyTorch {context['torch']}, "
                  f"cuDNN {context['cudnn']}, {context['gpu']}, {context['date']}\n")
    if ceilings:
        print(f"Ceilings: bf16 GEMM of 8192³ {ceilings['flop_per_s'] * 1e-12:.0f} TFLOP/s, "
              f"copy {ceilings['bytes_per_s'] * 1e-12:.2f} TB/s\n")

    print("| What | denoised | per second | of the ceiling | fastest peer | ratio | memory, MiB |")
    print("|---|---|---|---|---|---|---|")
    failed = False
    for benchmark in (b for file in ours for b in file["benchmarks"]):
        name = name_of(benchmark)
        if benchmark.get("error_occurred"):
            print(f"| {name} | {benchmark['error_message']} | | | | | |")
            failed = True
            continue
        ms = benchmark["real_time"] * MILLISECONDS[benchmark["time_unit"]]
        flop, moved = benchmark.get("FLOP/s"), benchmark.get("B/s")
        rate = f"{flop * 1e-12:.1f} TFLOP" if flop else f"{moved * 1e-9:.0f} GB"
        ceiling = ceilings.get("flop_per_s" if flop else "bytes_per_s")
        share = f"{100 * (flop or moved) / ceiling:.0f} %" if ceiling else ""
        best = ratio = memory = ""
        peer = peers.get(name)
        if peer and "pass" in peer:
            share += f" ({100 * peer['pass'] * MILLISECONDS[peer['unit']] / ms:.0f} % of a pass)"
        if peer and peer["peers"]:
            label, time = min(peer["peers"].items(), key=lambda item: item[1])
            peer_ms = time * MILLISECONDS[peer["unit"]]
            best = f"{shown(peer_ms)} {label}{' °' if peer['earlier'] else ''}"
            ratio = f"{peer_ms / ms:.2f}"
            if "MiB_device" in benchmark:
                memory = (f"{benchmark['MiB_device']:.0f}; "
                          f"peer {peer['details'][label]['MiB_reserved']}")
        print(f"| {name} | {shown(ms)} | {rate} | {share} | {best} | {ratio} | {memory} |")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
