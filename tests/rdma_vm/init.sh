#!/bin/busybox sh
# The guest's first process: modules, the host's root tree under an overlay, then /out/guest.sh in it.
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
while read -r module; do insmod "/mods/$module"; done < /mods/order 2>/dev/null
mount -t 9p -o ro,trans=virtio,version=9p2000.L,msize=524288,cache=loose root /lower || {
  echo "rdma-vm: no root tree"
  poweroff -f
}
mount -t tmpfs -o size=70% tmpfs /rw
mkdir /rw/up /rw/work
mount -t overlay -o lowerdir=/lower,upperdir=/rw/up,workdir=/rw/work overlay /new
mkdir -p /new/proc /new/sys /new/dev /new/out /new/run /new/tmp
mount -t proc proc /new/proc
mount -t sysfs sys /new/sys
mount -t devtmpfs dev /new/dev
mkdir -p /new/dev/shm /new/dev/pts
mount -t tmpfs tmpfs /new/dev/shm
mount -t devpts devpts /new/dev/pts
mount -t tmpfs tmpfs /new/run
mount -t 9p -o trans=virtio,version=9p2000.L,msize=262144 out /new/out
exec chroot /new /bin/bash /out/guest.sh
