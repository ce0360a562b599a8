"""The wall clock may jump as it likes: leases and lives of chunks are measured by the monotonic one."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import tanghulu
from tanghulu.errors import ChunkNotFound
from tests.store.cluster import Cluster, eventually
from tests.store.fault_tools import read, value

_CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
static long long *offset;
__attribute__((constructor)) static void begin(void) {
    int fd = open(getenv("WALL_CLOCK_OFFSET"), O_RDONLY);
    offset = mmap(0, 4096, PROT_READ, MAP_SHARED, fd, 0);
}
int clock_gettime(clockid_t id, struct timespec *t) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int rc = real(id, t);
    if (id == CLOCK_REALTIME && offset) t->tv_sec += *offset;
    return rc;
}
int gettimeofday(struct timeval *tv, void *zone) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    tv->tv_sec = t.tv_sec, tv->tv_usec = t.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *out) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    if (out) *out = t.tv_sec;
    return t.tv_sec;
}
"""


@pytest.fixture
def wall_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Moves the wall clock of the processes that are started from now on, by so many seconds."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    (tmp_path / "clock.c").write_text(_CLOCK)
    library, offset = tmp_path / "clock.so", tmp_path / "offset"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, tmp_path / "clock.c", "-ldl"], check=True)
    offset.write_bytes(bytes(4096))
    monkeypatch.setenv("LD_PRELOAD", str(library))
    monkeypatch.setenv("WALL_CLOCK_OFFSET", str(offset))

    def move(seconds: int) -> None:
        with offset.open("r+b") as file:
            file.write(ctypes.c_int64(seconds))

    return move


@pytest.mark.slow
def test_jumps_of_the_wall_clock_end_no_lease_and_no_chunk(wall_clock: Callable[[int], None], tmp_path: Path) -> None:
    with Cluster(0) as cluster:
        ssd = ("--ssd-path", str(tmp_path / "node.tier"), "--ssd-size", "64MiB", "--debug", "lease_ms=2000")
        node = cluster.add_node("16MiB", *ssd)
        moved = subprocess.run([sys.executable, "-c", "import time; print(time.time())"], capture_output=True)
        assert abs(float(moved.stdout) - time.time()) < 60
        with tanghulu.connect(cluster.address) as client:
            client.put("an hour", value("an hour"), ttl_s=3600)
            client.put("a moment", value("a moment"), ttl_s=2.0)
            pinned = client.get("an hour")
            for jump in (10**6, -(10**6), 10**8, 0):
                wall_clock(jump)
                moved = subprocess.run([sys.executable, "-c", "import time; print(time.time())"], capture_output=True)
                assert abs(float(moved.stdout) - time.time() - jump) < 60, "the jump is real"
                assert read(client, "an hour") is None
                assert client.put(f"after{jump}", value(f"after{jump}")).ok
                assert node.metric("tanghulu_node_leases") == 1
            assert bytes(pinned) == value("an hour")
            pinned.close()
            eventually(lambda: isinstance(read(client, "a moment"), ChunkNotFound))
            for i in range(32):
                client.put(f"k{i}", value(f"k{i}"))
            eventually(lambda: node.metric("tanghulu_node_ssd_queued_bytes") == 0)
            wall_clock(-(10**6))
            assert read(client, "an hour") is None, "it comes up from the SSD"
        wall_clock(0)
        node.kill()
        wall_clock(7200)
        node = cluster.add_node("16MiB", *ssd)
        with tanghulu.connect(cluster.address) as client:
            eventually(lambda: read(client, "k0") is None)
            eventually(lambda: isinstance(read(client, "an hour"), ChunkNotFound))  # over, by the restart's clock
