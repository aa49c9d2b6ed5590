#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the Debian package, installs it in a bare Debian 12 with apt-get, runs it there as its unit
# would, draws, drains, and removes it. Needs root, mmdebstrap and dpkg-dev.
#
#   deploy/test/deb.sh
#   WORK=/var/tmp/denoised …     keeps the base image and the package there
set -euo pipefail
cd "$(dirname "$0")/../.."

# The mounts below are undone when this script ends.
[[ -n "${DENOISED_UNSHARED:-}" ]] || DENOISED_UNSHARED=1 exec unshare --mount "$0" "$@"

work=${WORK:-/var/tmp/denoised-deb-test}
mkdir -p "$work"
step() { printf '\n== %s\n' "$*"; }
fail() {
  echo "FAILED: $*" >&2
  exit 1
}

step "Build"
scripts/build -DCMAKE_INSTALL_PREFIX=/usr -DDENOISED_PORTABLE=OFF -DDENOISED_BUILD_TESTS=OFF \
  release denoised denoise denoise-train | tail -n 1
rm -f "$work"/*.deb
cpack --config build/release/CPackConfig.cmake -B "$work" >"$work/cpack.log" 2>&1 ||
  { cat "$work/cpack.log"; fail "cpack"; }
deb=$(ls "$work"/*.deb)
dpkg-deb --info "$deb" | grep -E '^ (Package|Version|Architecture|Installed-Size|Depends)'
dpkg-deb --contents "$deb" | awk '$1 !~ /^d/ {print $3, $6}' | tee "$work/contents"
for file in doc/denoised/copyright doc/denoised/NOTICE man/man1/denoise.1.gz \
  man/man1/denoise-generate.1.gz bash-completion/completions/denoise \
  zsh/vendor-completions/_denoise fish/vendor_completions.d/denoise.fish; do
  grep -q " ./usr/share/$file$" "$work/contents" || fail "the package lacks $file"
done

step "Install in a bare Debian 12"
[[ -e "$work/base.tar" ]] || deploy/test/base_image.sh "$work/base.tar"
root=$(mktemp -d "$work/root.XXXX")
pid=
cleanup() {
  [[ -z "$pid" ]] || kill "$pid" 2>/dev/null || true
  umount "$root/proc" 2>/dev/null || true
  rm -rf --one-file-system "$root"
}
trap cleanup EXIT
tar -xf "$work/base.tar" -C "$root"
cp /etc/resolv.conf "$root/etc/"
mount -t proc proc "$root/proc"
in_root() { chroot "$root" env DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8 "$@"; }
cp "$deb" "$root/tmp/denoised.deb"
{
  in_root apt-get -q update
  in_root apt-get -q -y install --no-install-recommends systemd /tmp/denoised.deb
} >"$work/apt.log" 2>&1 || { tail "$work/apt.log"; fail "apt-get install"; }
in_root dpkg-query -W denoised
in_root denoised --version
in_root denoise-train --version

step "The unit"
unit=/usr/lib/systemd/system/denoised.service
in_root systemd-analyze verify --man=no "$unit" || fail "systemd-analyze verify"
in_root systemd-analyze security --offline=true "$unit" | tail -n 1
mapfile -t environment < <(sed -n 's/^Environment=//p' "$root$unit" | sed 's:%C:/var/cache:')
command=$(sed -n 's/^ExecStart=//p' "$root$unit")

step "Run $command as the unit does, as nobody"
server=127.0.0.1:$((20000 + $$ % 10000))
chroot --userspec=nobody:nogroup "$root" env -i "${environment[@]}" "DENOISED_LISTEN=$server" \
  "$command" --metrics-listen "" 2>"$work/denoised.log" &
pid=$!
in_root denoise health --server "$server" --wait 60 || { cat "$work/denoised.log"; fail "health"; }
in_root denoise generate --server "$server" --labels 3 --seed 1 --grid 2x2 --out /tmp/three.png
cmp -n 8 "$root/tmp/three.png" <(printf '\x89PNG\r\n\x1a\n') || fail "three.png is no PNG"
kill -TERM "$pid"
code=0
wait "$pid" || code=$?
pid=
((code == 0)) || { cat "$work/denoised.log"; fail "exit code $code"; }
echo "exit code $code; its last line:"
tail -n 1 "$work/denoised.log"

step "Remove"
in_root apt-get -q -y purge denoised >"$work/apt.log" 2>&1 || { cat "$work/apt.log"; fail "purge"; }
left=$(find "$root/usr" "$root/etc" -name '*denoise*')
[[ -z "$left" ]] || fail "left behind: $left"

printf '\nAll passed.\n'
