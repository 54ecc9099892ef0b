#!/usr/bin/env bash
# Installs the Debian packages that hutch needs and that are missing. Does nothing,
# and needs no network, where all are there.
set -euo pipefail

# package:program that shows that it is there
needs=(
  xfsprogs:mkfs.xfs
  e2fsprogs:mke2fs
  erofs-utils:mkfs.erofs
  mmdebstrap:mmdebstrap
  util-linux:unshare
  mount:losetup
  iproute2:ip
  nftables:nft
  procps:pgrep
  kmod:modprobe
  openssh-client:ssh-keygen
  git:git
  make:make
)

export PATH="$PATH:/usr/sbin:/sbin"
missing=()
for need in "${needs[@]}"; do
  command -v "${need#*:}" >/dev/null || missing+=("${need%%:*}")
done
[ -s /etc/ssl/certs/ca-certificates.crt ] || missing+=(ca-certificates)
# The tests run servers of their own from these programs; they are not on PATH.
compgen -G '/usr/lib/postgresql/*/bin/postgres' >/dev/null || missing+=(postgresql)
[ ${#missing[@]} -eq 0 ] && exit 0

if [ "$(id -u)" -ne 0 ]; then
  echo "missing: ${missing[*]}; run as root, or: sudo apt-get install ${missing[*]}" >&2
  exit 1
fi
echo "installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
# Debian's package makes a database cluster and starts it with the machine. Nobody asked
# for one, so its configuration says no before the package is there. One that exists
# already stays as it is.
if [[ " ${missing[*]} " == *" postgresql "* && ! -e /etc/postgresql-common/createcluster.conf ]]; then
  apt-get install -y -qq --no-install-recommends postgresql-common >/dev/null
  sed -i -E 's/^#?create_main_cluster *=.*/create_main_cluster = false/' /etc/postgresql-common/createcluster.conf
fi
apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
