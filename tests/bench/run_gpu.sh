#!/usr/bin/env bash
# Measures denoised on this machine's GPU beside PyTorch, in one go, and prints a table.
#
#   tests/bench/run_gpu.sh [--bin=build/release/tests/bench] [--out=build/bench]
#                          [--kernels=REGEX] [--seconds=SECONDS]
#                          [--models=cifar10-32:1:64,adm-64:1 | all]
#                          [--ways=eager,reduce-overhead,max-autotune] [--limit=SECONDS]
#                          [--earlier-peers=FILE] [--generic]
#
# --bin            where denoised-bench and backend-throughput are
# --out            where the raw figures go, as JSON
# --kernels        which ops of backend-throughput: a regular expression; "all" are the default when
#                  no models are named. Three minutes for all.
# --seconds        for PyTorch's ops, 150 by default; those that are left then are left out
# --models         whole forwards of these models of tests/models/configs, of so many rows; "all" are
#                  those of the table in docs/benchmarks.md
# --ways           of PyTorch: eager, in a CUDA graph, and modes of torch.compile. Default:
#                  eager,reduce-overhead. max-autotune takes 2 to 6 minutes for each model and count
#                  of rows, of which each GPU does one at a time; the others compile side by side
# --limit          for compiling, 600 by default; what takes longer is left out
# --earlier-peers  a peer_models.json from a GPU of the same kind instead of running PyTorch on the
#                  models again; the table marks its figures
# --generic        denoised's kernels for any chip, also on one that has its own
#
# Needs python3 (or $PYTHON) with PyTorch for CUDA and, for models, diffusers; PYTHONPATH may name
# their wheels. Let nothing else use the GPU.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
bin=$root/build/release/tests/bench out=$root/build/bench
kernels="" seconds=150 models="" ways=eager,reduce-overhead limit=600 earlier="" python=${PYTHON:-python3}
device=(--device=cuda)
for flag in "$@"; do
  case $flag in
    --bin=*) bin=${flag#*=} ;;
    --out=*) out=${flag#*=} ;;
    --kernels=*) kernels=${flag#*=} ;;
    --seconds=*) seconds=${flag#*=} ;;
    --models=*) models=${flag#*=} ;;
    --ways=*) ways=${flag#*=} ;;
    --limit=*) limit=${flag#*=} ;;
    --earlier-peers=*) earlier=${flag#*=} ;;
    --generic) device+=(--generic) ;;
    *) echo "unknown flag '$flag'; see the head of tests/bench/run_gpu.sh" >&2; exit 2 ;;
  esac
done
[[ -n "$kernels$models" ]] || kernels=all
[[ "$models" == all ]] && models=cifar10-32:1:16:64:256,adm-64:1:64,celebahq-256:16

for each in ${models//,/ }; do
  [[ "$each" =~ ^[^:]+(:[1-9][0-9]*)+$ ]] && continue
  echo "--models has '$each': name the rows of an evaluation as well, as in ${each%%:*}:1:16" >&2
  exit 2
done

# What is missing is said now, not after minutes of measuring.
peer_models=$models
[[ -z "$earlier" ]] || peer_models=""
modules=${peer_models:+torch diffusers}
lacking=()
for module in ${modules:-${kernels:+torch}}; do
  "$python" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$module') is None)" ||
    lacking+=("$module")
done
if ((${#lacking[@]})); then
  echo "$python lacks ${lacking[*]}: install with pip, or let PYTHON name another Python or PYTHONPATH" \
    "the folder where they are. PyTorch's times of models can also come from --earlier-peers." >&2
  exit 1
fi
for program in ${kernels:+backend-throughput} ${models:+denoised-bench}; do
  [[ -x "$bin/$program" ]] && continue
  echo "There is no $bin/$program: build it with scripts/build -DDENOISED_BUILD_TESTS=ON release" \
    "$program, or let --bin name its folder." >&2
  exit 1
done

mkdir -p "$out"
ours=() peers=() status=0

if [[ -n "$kernels" ]]; then
  [[ "$kernels" == all ]] && kernels=.
  echo "Ops: denoised, then PyTorch" >&2
  "$bin/backend-throughput" "${device[@]}" "--benchmark_filter=$kernels" \
    "--benchmark_out=$out/kernels.json" --benchmark_out_format=json >"$out/kernels.txt"
  "$bin/backend-throughput" "${device[@]}" "--benchmark_filter=$kernels" --benchmark_list_tests |
    "$python" "$here/peer_kernels.py" "--seconds=$seconds" "--out=$out/peer_kernels.json"
  ours+=("$out/kernels.json") peers+=("$out/peer_kernels.json")
fi

for each in ${models//,/ }; do
  IFS=: read -r model rows <<<"$each"
  echo "$model: denoised" >&2
  "$bin/denoised-bench" "${device[@]}" "--config=$root/tests/models/configs/$model/config.json" \
    "--rows=${rows//:/,}" "--benchmark_out=$out/$model.json" --benchmark_out_format=json \
    >"$out/$model.txt"
  ours+=("$out/$model.json")
done
if [[ -n "$peer_models" ]]; then
  echo "Models: PyTorch" >&2
  rm -f "$out/peer_models.json"  # which there is not where all fail
  "$python" "$here/peer_models.py" "--models=$models" "--ways=$ways" "--limit=$limit" \
    "--out=$out/peer_models.json" >&2 || status=1
  if [[ -f "$out/peer_models.json" ]]; then peers+=("$out/peer_models.json"); fi
fi

join() { local IFS=,; echo "$*"; }
"$python" "$here/compare_peer.py" "--ours=$(join "${ours[@]}")" "--peers=$(join "${peers[@]}")" \
  "--earlier-peers=$earlier" | tee "$out/table.md"
exit $status
