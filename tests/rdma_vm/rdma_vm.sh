#!/usr/bin/env bash
# rdma_vm.sh - run a command on one or two machines that have RDMA (verbs) devices.
#
# No card and no InfiniBand support of the host's kernel are needed: Debian's own kernel is booted under QEMU (software
# emulation), its rdma_rxe module (soft-RoCE) puts a verbs device on each of several virtio NICs, and the host's whole
# root tree appears in the guest (9p, read-only, under a RAM overlay), so that the guest runs the very interpreter,
# virtual environment and checkout of the host. It shows correctness, retries and failover, never speed.
#
#   rdma_vm.sh prepare               fetch the kernel and build the initramfs (once; needs the network). The cache is whole
#                                    or not there: an interrupted or damaged one is built again.
#   rdma_vm.sh packages              print the Debian packages that are needed, one a line
#   rdma_vm.sh missing               print what is missing for `run`, one a line; nothing when all is there
#   rdma_vm.sh run [options] -- COMMAND [ARG...]
#     --vms N      guests, 1 or 2 (default 1). COMMAND runs in each of them; NODE (0 or 1) tells which one it is.
#     --rails N    verbs devices rxe0.. a guest (default 2), on eth0.. with 10.77.<rail>.<NODE + 1>/24. One more NIC
#                  without a verbs device, ethN, joins the guests too: a control network that no test pulls down.
#     --mem MB     memory of a guest (default 1536)
#     --smp N      virtual processors of a guest (default 1)
#     --timeout S  end the guests after S seconds (default 170)
#     --out DIR    host folder that guest V sees read-write as /out is DIR/nodeV
# Exit status of run: COMMAND's in guest 0, 125 when it did not report one or could not be started.
set -euo pipefail

# Debian packages, and the commands that are needed of each.
packages=(qemu-system-x86 busybox-static cpio kmod iproute2 rdma-core ibverbs-providers libibverbs1)
declare -A commands=([qemu-system-x86]=qemu-system-x86_64 [busybox-static]=busybox [cpio]=cpio [kmod]="depmod modprobe"
                     [iproute2]="ip rdma")
PATH=$PATH:/usr/sbin:/sbin  # where a user's shell does not look, and depmod is
cache=${RDMA_VM_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/tanghulu-rdma-vm}
modules="virtio_pci virtio_net 9pnet_virtio 9p overlay crc32c_intel crc32_generic sch_netem sch_ingress cls_matchall
         act_gact ib_uverbs rdma_ucm rdma_rxe virtio_rng"
# The kernel and the initramfs for these modules and this init, and their checksums.
built=$cache/built-$(echo "$modules" | cat - "$(dirname "$0")/init.sh" | cksum | cut -d' ' -f1)

fail() {
  echo "rdma_vm.sh: $1" >&2
  exit "${2:-1}"
}

missing_packages() {
  local package name
  for package in "${packages[@]}"; do
    dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || { echo "$package"; continue; }
    for name in ${commands[$package]:-}; do command -v "$name" >/dev/null || { echo "$package"; break; }; done
  done
}

# Ends with status $1 and one line that says what to install, if anything is missing.
need_packages() {
  local name lacking names
  for name in apt-get apt-cache dpkg-query dpkg-deb; do
    command -v "$name" >/dev/null || fail "$name is missing: it needs Debian, whose kernel it boots" "$1"
  done
  mapfile -t lacking < <(missing_packages)
  [ ${#lacking[@]} -gt 0 ] || return 0
  names=$(for name in "${lacking[@]}"; do echo "${commands[$name]:-$name}"; done | xargs)
  fail "missing ${names// /, }: apt-get update && apt-get install -y --no-install-recommends ${lacking[*]}" "$1"
}

is_built() {
  [ -d "$built" ] && (cd "$built" && sha256sum --status -c sums 2>/dev/null)
}

missing() {
  missing_packages
  is_built || echo "a kernel: $0 prepare"
}

kernel_package() {
  apt-cache depends linux-image-amd64 2>/dev/null | sed -n 's/.*Depends: \(linux-image-.*\)/\1/p' | head -1 || true
}

# Builds in a folder of its own, which gets its name when it is whole. Who comes second waits for the first.
prepare() {
  local work
  need_packages 1
  mkdir -p "$cache"
  exec {lock}> "$cache/lock"
  flock "$lock"
  is_built && return
  rm -rf "$cache"/building.* "$cache"/built-*
  # An older version of this script kept these, and could not tell whether they were whole.
  rm -rf "$cache"/deb "$cache"/initrd-*
  [ ! -d "$cache/root/boot" ] || rm -rf "$cache/root"
  work=$(mktemp -d "$cache/building.XXXXXX")
  # shellcheck disable=SC2064 - the name as it is now: the variable ends with this function
  trap "rm -rf '$work'" EXIT
  fetch_kernel "$work"
  build_initramfs "$work"
  mkdir "$work/whole"
  mv "$work"/root/boot/vmlinuz-* "$work/whole/vmlinuz"
  mv "$work/initrd" "$work/whole/initrd"
  (cd "$work/whole" && sha256sum vmlinuz initrd > sums && sync vmlinuz initrd sums)
  mv "$work/whole" "$built"
}

# Debian's kernel is unpacked into $1/root, never installed. (The cloud flavour is of no use: it lacks rdma_rxe.)
fetch_kernel() {
  local work=$1 package release
  package=$(kernel_package)
  [ -n "$package" ] || { apt-get update -qq; package=$(kernel_package); }
  [ -n "$package" ] || fail "apt knows no linux-image-amd64: it needs Debian, whose kernel it boots"
  mkdir "$work/deb" "$work/root"
  (cd "$work/deb" && apt-get -o APT::Sandbox::User=root download "$package" >/dev/null)
  dpkg-deb -x "$work"/deb/*.deb "$work/root"
  release=$(basename "$work"/root/lib/modules/*)
  depmod -b "$work/root" "$release"
}

# $1/initrd: busybox, the modules with what they need, and init.sh.
build_initramfs() {
  local work=$1 tree=$1/tree release module
  release=$(basename "$work"/root/lib/modules/*)
  mkdir -p "$tree"/{bin,proc,sys,dev,mods,lower,rw,new}
  cp "$(command -v busybox)" "$tree/bin/busybox"
  for module in $modules; do
    modprobe -d "$work/root" -S "$release" --show-depends "$module" | awk '$1 == "insmod" {print $2}'
  done | awk '!seen[$0]++' > "$work/files"
  while read -r module; do
    cp "$module" "$tree/mods/"; basename "$module"
  done < "$work/files" > "$tree/mods/order"
  cp "$(dirname "$0")/init.sh" "$tree/init"
  chmod +x "$tree/init"
  (cd "$tree" && find . | cpio -o -H newc --quiet | gzip -1) > "$work/initrd"
}

vms=1 rails=2 mem=1536 smp=1 limit=170 out=''
parse() {
  while [ $# -gt 0 ]; do
    case $1 in
      --vms) vms=$2;; --rails) rails=$2;; --mem) mem=$2;; --smp) smp=$2;; --timeout) limit=$2;; --out) out=$2;;
      --) shift; command=("$@"); return;;
      *) echo "unknown option $1" >&2; exit 2;;
    esac
    shift 2
  done
  echo "no command given" >&2; exit 2
}

# What guest $1 does once its root tree stands.
guest_script() {
  local node=$1
  cat <<GUEST
export HOME=/root TMPDIR=/run TERM=dumb LANG=C.UTF-8 PYTHONDONTWRITEBYTECODE=1 IN_RDMA_VM=1 NODE=$node PATH='$PATH'
export PYTHONPATH='${PYTHONPATH:-}'
ulimit -l unlimited
ip link set lo up
for ((i = 0; i <= $rails; i++)); do
  ip link set eth\$i mtu 9000
  ip addr add 10.77.\$i.$((node + 1))/24 dev eth\$i
  ip link set eth\$i up
  [ \$i -eq $rails ] || rdma link add rxe\$i type rxe netdev eth\$i
done
echo "rdma-vm: node $node up at \$(cut -d' ' -f1 /proc/uptime) s with \$(ls /sys/class/infiniband | tr '\n' ' ')"
cd '$PWD'
ln -sfn /proc/self/fd /dev/fd
$(printf '%q ' "${command[@]}")
echo \$? > /out/status
echo "rdma-vm: node $node ends at \$(cut -d' ' -f1 /proc/uptime) s"
sync
echo o > /proc/sysrq-trigger
while :; do :; done
GUEST
}

nics() {
  local node=$1 i backend
  for ((i = 0; i <= rails; i++)); do
    backend="stream,id=n$i,server=$([ "$node" -eq 0 ] && echo on || echo off),addr.type=unix,addr.path=$out/rail$i"
    [ "$vms" -eq 1 ] && backend="user,id=n$i,restrict=on"
    printf '%s\n' -netdev "$backend" -device \
      "virtio-net-pci,id=nic$i,netdev=n$i,mac=$(printf '52:54:00:77:%02x:%02x' "$i" $((node + 1))),host_mtu=9000,romfile="
  done
}

boot() {
  local node=$1 folder=$out/node$1 net
  mkdir -p "$folder"
  rm -f "$folder/status"
  guest_script "$node" > "$folder/guest.sh"
  mapfile -t net < <(nics "$node")
  # crc32_pclmul and the fast string instructions are the slow ones under emulation, so neither is offered.
  exec timeout "$limit" qemu-system-x86_64 -nodefaults -display none -no-reboot \
    -accel tcg,thread=multi,tb-size=256 -cpu max,-erms,-fsrm -m "$mem" -smp "$smp" \
    -kernel "$built/vmlinuz" -initrd "$built/initrd" \
    -append "console=ttyS0 quiet loglevel=3 panic=-1 tsc=unstable clocksource=acpi_pm mitigations=off no_timer_check unknown_nmi_panic random.trust_cpu=on" \
    -qmp "unix:$folder/qmp,server=on,wait=off" -serial "file:$folder/console" -device virtio-rng-pci \
    -fsdev "local,id=r,path=/,security_model=none,readonly=on,multidevs=remap" \
    -device virtio-9p-pci,fsdev=r,mount_tag=root \
    -fsdev "local,id=o,path=$folder,security_model=none" -device virtio-9p-pci,fsdev=o,mount_tag=out \
    "${net[@]}" > "$folder/qemu.log" 2>&1 < /dev/null
}

run() {
  parse "$@"
  need_packages 125
  is_built || fail "there is no kernel, or a damaged one: $0 prepare" 125
  out=${out:-$(mktemp -d)}
  mkdir -p "$out"
  local pids=() node tries
  rm -f "$out"/rail*
  trap 'kill "${pids[@]}" 2>/dev/null || true' EXIT
  for ((node = 0; node < vms; node++)); do
    # The second guest connects to sockets that the first one makes.
    for ((tries = 0; node > 0 && tries < 200; tries++)); do [ -S "$out/rail$rails" ] && break; sleep 0.05; done
    (boot "$node") &
    pids+=($!)
  done
  wait "${pids[0]}" || true
  for ((node = 0; node < vms; node++)); do
    sed "s/\r\$//; s/^/[node$node] /" "$out/node$node/console" "$out/node$node/qemu.log"
  done
  [ -s "$out/node0/status" ] && exit "$(cat "$out/node0/status")"
  exit 125
}

case ${1:-} in
  prepare) prepare;;
  packages) printf '%s\n' "${packages[@]}";;
  missing) missing;;
  run) shift; run "$@";;
  *) sed -n '2,22p' "$0" >&2; exit 2;;
esac
