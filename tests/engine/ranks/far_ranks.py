"""`python -m tests.engine.ranks.far_ranks FOLDER`: rank 0, in a network of its own.

Rank 1 is in another, and a slow link joins them. Plays a schedule, then loses the link for two
seconds in the middle of an answer. Prints the results as JSON; exits with NOT_ALLOWED, and the
reason, where this process may not create networks.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.engine.ranks.divided_models import write_divided
from tests.engine.ranks.local_group import ROOT, LocalGroup
from tests.engine.rounds import Rounds
from tests.engine.test_parity import check_schedule

NOT_ALLOWED = 77
NEAR, FAR = "10.77.0.1", "10.77.0.2"
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET of linux/sched.h
_SET_NAME = 0x400454CA  # TUNSETIFF of linux/if_tun.h
_BARE_PACKETS = 0x0001 | 0x1000  # IFF_TUN, IFF_NO_PI
_TOKENS = 60


def enter_network(address: str) -> int:
    """Give this thread, and all that it starts, a network of its own; a descriptor of its device.

    Raises OSError.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_NETWORK):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), "unshare(CLONE_NEWNET)")
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, _SET_NAME, struct.pack("16sH22x", b"far", _BARE_PACKETS))
    for command in (
        "ip link set lo up",
        f"ip addr add {address}/24 dev far",
        "ip link set far up",
    ):
        subprocess.run(command.split(), check=True, capture_output=True)
    return device


def main(folder: Path) -> None:
    far = ThreadPoolExecutor(1)  # its thread is in the other network
    try:
        devices = [enter_network(NEAR), far.submit(enter_network, FAR).result()]
    except (OSError, subprocess.CalledProcessError, AttributeError) as refusal:
        print(refusal)
        sys.exit(NOT_ALLOWED)

    def start(command: list[str], environ: dict[str, str]) -> subprocess.Popen[bytes]:
        return far.submit(subprocess.Popen, command, env=environ, cwd=ROOT).result()

    link = subprocess.Popen(
        [sys.executable, "-m", "tests.engine.ranks.slow_link", *map(str, devices)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=devices,
    )
    assert link.stdin is not None
    assert link.stdout is not None
    model = write_divided(folder, "qwen2")
    with LocalGroup(2, hosts=(NEAR, FAR), start=start) as group:
        whole = group.whole(model)
        divided = group.load(model, parallelism="pipeline", rank_timeout=10)
        seen = check_schedule(divided, 1, whole)
        answers = []
        for each in (whole, divided):
            rounds = Rounds(each)
            rounds.submit(1, [1, 2, 3], _TOKENS, ignore_eos=True)
            while len(rounds.received[1].tokens) < _TOKENS // 2:
                rounds.step()
            if each is divided:
                link.stdin.write(b"drop\n")
                link.stdin.flush()
            rounds.drain()
            answers.append(rounds.received[1].tokens)
        dropped = int(link.stdout.readline())
        found = {"equal": answers[0] == answers[1], "dropped": dropped, "causes": group.causes}
        print(json.dumps(found | {"seen": seen}), flush=True)
    link.stdin.close()
    link.wait(120)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
