"""Runs a script as torchrun does, in several processes, of which one imports torch for all:

    python tests/helpers/ranks.py NUMBER SCRIPT.py [arguments]

Where one fails, the others are ended. The status is 1 then."""

import os
import runpy
import signal
import sys
import torch  # noqa: F401, the scripts need these modules
import torch.distributed as dist
import torch.nn.attention.flex_attention  # noqa: F401

reading, writing = os.pipe()

def become(rank: int, size: int):
    """Takes the place of a rank, and runs the script to its end."""
    os.close(writing)  # so that it ends if the first process does
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size),
                   "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": os.read(reading, 5).decode(),
                   "TORCHELASTIC_USE_AGENT_STORE": "True"}
    sys.argv = sys.argv[2:]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.exit()

size = int(sys.argv[1])
ranks = set()
for rank in range(size):
    ranks.add(pid := os.fork())
    if pid == 0:
        become(rank, size)
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
os.write(writing, size * (b"%05d" % store.port))
status = 0
while ranks:
    pid, code = os.wait()
    ranks.remove(pid)
    if code and not status:
        status = 1
        for other in ranks:
            os.kill(other, signal.SIGTERM)
sys.exit(status)
