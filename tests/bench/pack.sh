#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Packs a build's programs with the shared libraries that they need, to measure on a machine that has
# none of them, such as a GPU machine without a network.
#
#   tests/bench/pack.sh [--build=build/cuda] [--out=out/bench.tar.xz] [PROGRAM…]
#
# Default: all that measure.py starts and that was built. Each program is a script that finds its
# libraries beside it; the C and C++ runtimes and the driver's libraries are the machine's own, and
# cuBLASLt is PyTorch's. Unpack it and let measure.py --build name the folder.
set -euo pipefail
cd "$(dirname "$0")/../.."
build=build/cuda out=out/bench.tar.xz programs=()
for argument in "$@"; do
  case $argument in
    --build=*) build=${argument#*=} ;;
    --out=*) out=${argument#*=} ;;
    --*) echo "unknown flag '$argument'; see the head of tests/bench/pack.sh" >&2; exit 2 ;;
    *) programs+=("$argument") ;;
  esac
done
if ((${#programs[@]} == 0)); then
  programs=(server/denoised client/denoise)
  for name in denoised-bench backend-throughput cublaslt-search splits-bench engine-throughput \
    synthetic-model model-outputs scheduling-bench train-bench training-throughput; do
    programs+=("tests/bench/$name")
  done
fi

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mkdir "$folder/bin" "$folder/lib"
own='^(libc|libm|libdl|librt|libpthread|libresolv|libgcc_s|libstdc\+\+|libcuda|libcublas|libcublasLt)\.so'
packed=0
for program in "${programs[@]}"; do
  name=$(basename "$program")
  if [[ ! -x $build/$program ]]; then
    echo "left out: there is no $build/$program" >&2
    continue
  fi
  strip -o "$folder/bin/$name" "$build/$program"
  while read -r library path; do
    [[ $library =~ $own ]] || cp -nL "$path" "$folder/lib/$library"
  done < <(ldd "$build/$program" | awk '$2 == "=>" && $3 ~ /^\// {print $1, $3}')
  cat > "$folder/$name" <<'END'
#!/bin/sh
here=$(dirname "$(readlink -f "$0")")
export LD_LIBRARY_PATH="$here/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
exec "$here/bin/$(basename "$0")" "$@"
END
  chmod +x "$folder/$name"
  packed=$((packed + 1))
done
((packed)) || exit 1
mkdir -p "$(dirname "$out")"
tar -C "$folder" -cJf "$out" .
echo "$out: $packed programs, $(du -h "$out" | cut -f1)"
