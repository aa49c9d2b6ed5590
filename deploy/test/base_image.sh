#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes a tar file of a bare Debian 12, as small as debian:bookworm-slim. container.sh uses it as the
# base image and deb.sh as the machine, so that neither needs a registry.
#
#   deploy/test/base_image.sh FILE.tar
set -euo pipefail
# shellcheck disable=SC2016  # mmdebstrap gives the hook the directory as $1
exec mmdebstrap --variant=minbase --mode=root --include=ca-certificates \
  --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
  --dpkgopt='path-exclude=/usr/share/info/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
  --customize-hook='rm -rf "$1"/var/lib/apt/lists/* "$1"/var/cache/apt/*.bin' \
  bookworm "${1:?usage: deploy/test/base_image.sh FILE.tar}"
