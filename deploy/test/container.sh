#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the images from a local base image with buildah and runs the CPU one with podman as an
# operator would: it must become healthy, draw, be scraped by Prometheus and drain on SIGTERM. Needs
# root, buildah, podman, runc, mmdebstrap, prometheus, curl and openssl, and no registry.
#
#   deploy/test/container.sh            both variants; the GPU one where /usr/local/cuda has nvcc
#   WORK=/var/tmp/denoised …            keeps the base image, layers and compiler cache there
#   CUDA_ARCHITECTURES=80-real …        kernels for another GPU than the H100 and H200
#   STORAGE_DRIVER=vfs …                where there is no overlay; several times slower
set -euo pipefail
cd "$(dirname "$0")/../.."

work=${WORK:-/var/tmp/denoised-container-test}
architectures=${CUDA_ARCHITECTURES:-90a-real}
storage=(--root "$work/storage" --runroot "$work/run" --storage-driver "${STORAGE_DRIVER:-overlay}")
limit=$((250 * 1000 * 1000))
mkdir -p "$work"

step() { printf '\n== %s\n' "$*"; }
fail() {
  echo "FAILED: $*" >&2
  exit 1
}
for tool in buildah podman runc mmdebstrap prometheus promtool curl openssl python3; do
  command -v "$tool" >/dev/null || fail "$tool is missing; install the package that has it"
done

bud() {
  buildah "${storage[@]}" bud --isolation chroot --format docker --pull=never "$@" >"$work/build.log" 2>&1 ||
    { tail -n 30 "$work/build.log"; fail "buildah, see $work/build.log"; }
}
podman() { command podman --log-level fatal "${storage[@]}" --cgroup-manager cgroupfs --runtime runc "$@"; }
# As in docs/deploy.md, but with the host's network, and limits that a nested machine may set.
run() {
  podman run --network host --ulimit nofile=4096:4096 --ulimit nproc=4096:4096 \
    --read-only --cap-drop all --security-opt no-new-privileges "$@"
}
# As often as the image's HEALTHCHECK says, as a container runtime would run it.
healthcheck() {
  podman healthcheck run "$name" || podman healthcheck run "$name" ||
    podman healthcheck run "$name" || fail "the image's HEALTHCHECK"
}
size() { podman image inspect --format '{{.Size}}' "$1"; }

name=denoised-test-$$
server=127.0.0.1:$((20000 + $$ % 10000))
metrics=127.0.0.1:$((30000 + $$ % 10000))
prometheus=127.0.0.1:$((40000 + $$ % 10000))
scratch=$(mktemp -d)
chmod 755 "$scratch"
prometheus_pid=
cleanup() {
  [[ -z "$prometheus_pid" ]] || kill "$prometheus_pid" 2>/dev/null || true
  podman rm --force --ignore "$name" >/dev/null 2>&1 || true
  rm -rf "$scratch"
}
trap cleanup EXIT

step "Base image"
[[ -e "$work/base.tar" ]] || deploy/test/base_image.sh "$work/base.tar"
cat >"$work/Dockerfile" <<'END'
FROM scratch
ADD base.tar /
END
podman image exists localhost/denoised-base || bud --layers=false -t localhost/denoised-base "$work"
echo "denoised-base: $(size localhost/denoised-base) bytes"

build() { # target variant tag [buildah options]
  local target=$1 variant=$2 tag=$3
  shift 3
  bud -f deploy/Dockerfile --layers --target "$target" -t "$tag" --build-arg "VARIANT=$variant" \
    --build-arg CPU_BUILD_BASE=localhost/denoised-base --build-arg CPU_BASE=localhost/denoised-base \
    --build-arg GPU_BUILD_BASE=localhost/denoised-base --build-arg GPU_BASE=localhost/denoised-base \
    --build-arg "REVISION=$(git rev-parse HEAD)" "$@" .
}

step "CPU image"
build server cpu localhost/denoised:cpu
build demo cpu localhost/denoised:demo
echo "denoised:cpu: $(size localhost/denoised:cpu) bytes, denoised:demo: $(size localhost/denoised:demo)"
(($(size localhost/denoised:cpu) <= limit)) || fail "the CPU image is larger than $limit bytes"

step "GPU image"
if [[ -x /usr/local/cuda/bin/nvcc ]]; then
  # Mounts the toolkit into the build, as there is no development image of CUDA.
  build server gpu localhost/denoised:gpu --volume /usr/local/cuda:/usr/local/cuda:ro \
    --volume "$(realpath /usr/local/cuda):$(realpath /usr/local/cuda):ro" \
    --build-arg "CMAKE_OPTIONS=-DDENOISED_CUDA_ARCHITECTURES=$architectures"
  over=$(($(size localhost/denoised:gpu) - $(size localhost/denoised-base)))
  echo "denoised:gpu: $over bytes over its base, kernels for $architectures"
  ((over <= limit)) || fail "the GPU image is more than $limit bytes larger than its base"
else
  echo "not built: there is no /usr/local/cuda/bin/nvcc"
fi

step "Run it: read-only, no capabilities, uid 10001"
run --detach --name "$name" --volume "$PWD/models:/models:ro" \
  --env "DENOISED_LISTEN=$server" --env "DENOISE_SERVER=$server" \
  --env "DENOISED_METRICS_LISTEN=$metrics" --env DENOISED_GRACE_SECONDS=300 \
  localhost/denoised:cpu >/dev/null
podman exec "$name" denoise health --wait 60
healthcheck
status=$(cat "/proc/$(podman inspect --format '{{.State.Pid}}' "$name")/status")
grep -E '^(Uid|CapEff|NoNewPrivs)' <<<"$status"
grep -qP '^Uid:\t10001\t' <<<"$status" || fail "it does not run as uid 10001"
grep -qP '^CapEff:\t0+$' <<<"$status" || fail "it has capabilities"
podman exec "$name" touch /usr/local/x 2>/dev/null && fail "the root can be written to"

step "A picture, through the client of another container"
mkdir -m 777 "$scratch/out"
client() {
  run --rm --volume "$scratch/out:/out" --workdir /out --entrypoint denoise \
    localhost/denoised:cpu "$@" --server "$server"
}
client generate --model mnist-32 --labels 7 --seed 1 --out seven.png
cmp -n 8 "$scratch/out/seven.png" <(printf '\x89PNG\r\n\x1a\n') || fail "seven.png is no PNG"
client generate --model mnist-32 --labels 7 --seed 1 --out again.png >/dev/null 2>&1
cmp "$scratch/out/seven.png" "$scratch/out/again.png" || fail "one request gave two pictures"

step "Prometheus, with the rules of deploy/prometheus"
cp deploy/prometheus/rules.yml "$scratch/"
sed "s/denoised:9090/$metrics/; s/_interval: .*/_interval: 1s/" deploy/prometheus/prometheus.yml \
  >"$scratch/prometheus.yml"
grep -q "$metrics" "$scratch/prometheus.yml" || fail "prometheus.yml does not name denoised:9090"
promtool check config "$scratch/prometheus.yml"
prometheus --config.file="$scratch/prometheus.yml" --storage.tsdb.path="$scratch/tsdb" \
  --web.listen-address="$prometheus" --log.level=error &
prometheus_pid=$!
query() {
  curl -s --retry 20 --retry-connrefused --retry-delay 1 --data-urlencode "query=$1" \
    "http://$prometheus/api/v1/query" |
    python3 -c 'import json,sys; r = json.load(sys.stdin)["data"]["result"]; print(r[0]["value"][1] if r else "")'
}
for ((attempt = 0; attempt < 60; ++attempt)); do
  [[ "$(query 'sum(denoised_images_total)')" == 2 ]] && break
  sleep 1
done
echo "up: $(query 'up{job="denoised"}'), denoised_images_total: $(query 'sum(denoised_images_total)')"
[[ "$(query 'sum(denoised_images_total)')" == 2 ]] || fail "Prometheus did not see 2 images"
curl -sS "http://$metrics/metrics" >"$scratch/metrics.txt"
promtool check metrics <"$scratch/metrics.txt"
echo "promtool check metrics: no complaint"
tests/expressions_test.py --prometheus "http://$prometheus"

step "SIGTERM drains: a request that runs is finished, then exit 0"
client generate --model mnist-32 --count 4 --steps 20 --seed 2 --grid 2x2 --out drained.png \
  >"$scratch/drained.log" 2>&1 &
request=$!
for ((attempt = 0; attempt < 1000; ++attempt)); do
  active=$(curl -sS "http://$metrics/metrics" | sed -n 's/^denoised_active_images{.*model="mnist-32".*} //p')
  [[ "$active" == 4 ]] && break
  sleep 0.02
done
((attempt < 1000)) || fail "the request did not start"
begin=$(date +%s.%N)
podman stop --time 310 "$name" >/dev/null
echo "stopped after $(python3 -c "import time; print(f'{time.time() - $begin:.1f}')") s"
wait "$request" || { cat "$scratch/drained.log"; fail "the request was lost"; }
[[ -s "$scratch/out/drained.png" ]] || fail "no drained.png"
code=$(podman inspect --format '{{.State.ExitCode}}' "$name")
echo "exit code $code; its last lines:"
podman logs "$name" 2>&1 | tail -n 3
((code == 0)) || fail "exit code $code"
podman logs "$name" 2>&1 | sed -n '/"draining"/,$p' | grep -q '"method":"StreamGenerate","code":"OK"' ||
  fail "no request was finished while it drained"

step "TLS and tokens, on the demo image"
podman rm "$name" >/dev/null
mkdir "$scratch/secrets"
openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=denoised \
  -addext subjectAltName=DNS:denoised -keyout "$scratch/secrets/tls.key" \
  -out "$scratch/secrets/tls.crt" 2>/dev/null
made=$(run --rm localhost/denoised:demo --make-token tester)
grep -o 'denoised_[0-9a-f]*' <<<"$made" >"$scratch/secrets/token"
echo "{$(grep -o '"tester".*' <<<"$made")}" >"$scratch/secrets/clients.json"
chmod -R a+rX "$scratch/secrets"
run --detach --name "$name" --volume "$scratch/secrets:/etc/denoised:ro" \
  --env "DENOISED_LISTEN=$server" --env "DENOISED_METRICS_LISTEN=$metrics" \
  --env DENOISED_TLS_CERT=/etc/denoised/tls.crt --env DENOISED_TLS_KEY=/etc/denoised/tls.key \
  --env DENOISED_CLIENTS=/etc/denoised/clients.json --env "DENOISE_SERVER=$server" \
  --env DENOISE_TLS_CA=/etc/denoised/tls.crt --env DENOISE_TLS_SERVER_NAME=denoised \
  localhost/denoised:demo >/dev/null
podman exec "$name" denoise health --wait 60
healthcheck
podman exec "$name" denoise models && fail "no token was asked for"
podman exec --env DENOISE_TOKEN_FILE=/etc/denoised/token "$name" denoise models

printf '\nAll passed.\n'
