#!/usr/bin/env bash
# Makes a bare Debian 12 as a tar file, as small as debian:bookworm-slim: what container.sh takes as
# base image and deb.sh as machine, so that neither asks a registry.
#
#   deploy/test/base_image.sh FILE.tar
set -euo pipefail
# shellcheck disable=SC2016  # mmdebstrap gives the hook the directory as $1
exec mmdebstrap --variant=minbase --mode=root --include=ca-certificates \
  --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
  --dpkgopt='path-exclude=/usr/share/info/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
  --customize-hook='rm -rf "$1"/var/lib/apt/lists/* "$1"/var/cache/apt/*.bin' \
  bookworm "${1:?usage: deploy/test/base_image.sh FILE.tar}"
