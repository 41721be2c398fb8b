"""Makes ranks that wait for each other leave the processor to those that compute.

While it waits, MLX's ring polls its sockets without a pause. With more ranks than processors, a
rank that waits therefore delays the one that it waits for until the system takes the processor from
it: three ranks on two processors need five times as long. For the same reason a rank may preempt
another one when it wakes up.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import preemption
from tests.long import TEST_LONG

_SOURCE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <poll.h>
#include <sys/socket.h>
#include <time.h>

ssize_t recv(int socket, void *buffer, size_t size, int flags) {
  static ssize_t (*next)(int, void *, size_t, int);
  if (!next) next = (ssize_t(*)(int, void *, size_t, int))dlsym(RTLD_NEXT, "recv");
  ssize_t received = next(socket, buffer, size, flags);
  if (received < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
    int reason = errno;
    struct pollfd readable = {.fd = socket, .events = POLLIN};
    ppoll(&readable, 1, &(struct timespec){.tv_nsec = 200000}, 0);  // the ring may have to send
    errno = reason;
  }
  return received;
}
"""


@pytest.fixture(scope="module")
def yielding(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Ranks that the module's tests start yield, where there is a C compiler."""
    if sys.platform != "linux":
        yield
        return
    preemption.allow(True)
    with pytest.MonkeyPatch.context() as patch:
        if compiler := shutil.which("cc"):
            patch.setenv("LD_PRELOAD", _preloaded(compiler, tmp_path_factory.mktemp("yielding")))
        yield
    preemption.allow(TEST_LONG)


def _preloaded(compiler: str, folder: Path) -> str:
    """The value of LD_PRELOAD: the compiled library first, then what is preloaded already."""
    library = folder / "yielding.so"
    command = [compiler, "-O2", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library), "-ldl"]
    subprocess.run(command, input=_SOURCE, text=True, check=True)
    preloaded = [str(library), *os.environ.get("LD_PRELOAD", "").split(":")]
    return ":".join(filter(None, preloaded))
