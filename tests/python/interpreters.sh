#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs the Python client with pip under every Python from 3.9 to 3.13 that there is, and runs its tests
# there. By hand: it downloads packages.
#
#   tests/python/interpreters.sh [build/dev]
set -uo pipefail
cd "$(dirname "$0")/../.." || exit
build=$PWD/${1:-build/dev}
export DENOISED_BINARY=$build/server/denoised DENOISE_BINARY=$build/client/denoise
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0 ran=0
cp -r client/python "$work/package"  # pip leaves files in it

find_python() {  # on PATH, or as pyenv keeps it
  local candidate
  for candidate in "$(command -v "python$1")" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/python; do
    if [[ -x "$candidate" && "$("$candidate" -c \
      'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" == "$1" ]]; then
      echo "$candidate"
      return
    fi
  done
  return 1
}

for version in ${VERSIONS:-3.9 3.10 3.11 3.12 3.13}; do
  if ! python=$(find_python "$version"); then
    echo "Python $version: there is none"
    continue
  fi
  environment=$work/$version
  if ! { "$python" -m venv "$environment" &&
    "$environment/bin/pip" install -q "$work/package[images]"; } >"$work/log" 2>&1; then
    tail "$work/log"
    echo "Python $version: FAILED to install"
    failed=1
    continue
  fi
  modules=$("$environment/bin/pip" list --format=freeze | grep -E '^(grpcio|protobuf)=' | paste -sd' ')
  for test in unit calls client; do
    ((++ran))
    if "$environment/bin/python" "tests/python/${test}_test.py" >"$work/log" 2>&1; then
      echo "Python $version, $modules: ${test}_test passed ($(grep -E '^Ran ' "$work/log"))"
    else
      tail -n 30 "$work/log"
      echo "Python $version, $modules: ${test}_test FAILED"
      failed=1
    fi
  done
done
((ran > 0)) || failed=1
exit "$failed"
