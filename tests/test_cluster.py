"""Training on two hosts, as records/cluster.md describes it: two network namespaces of this machine
with a cable (veth) between them, each with a torchrun of its own. They share nothing but the files,
as the nodes of a cluster do."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import (ENVIRONMENT, SCRIPT, TINY, launch, load_checkpoint, log_of, losses,
                      newest_checkpoint, planted)

RUN = [*TINY, "--num_iterations=9", "--val_loss_every=3", "--save_every=3", "--micro_batches=2"]


def ip(*words):
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=False)


class Hosts:
    """Two namespaces, `names`, with the addresses 10.77.0.1 and 10.77.0.2."""

    def __init__(self):
        self.names = [f"host{os.getpid()}{side}" for side in "ab"]
        a, b = self.names
        for words in (
                f"netns add {a}", f"netns add {b}", f"-n {a} link add wire type veth peer name wire "
                f"netns {b}", *(f"-n {name} {what}" for i, name in enumerate(self.names, 1)
                                for what in (f"addr add 10.77.0.{i}/24 dev wire", "link set lo up",
                                             "link set wire up"))):
            done = ip(*words.split())
            if done.returncode:
                self.remove()
                pytest.skip(f"ip {words}: {done.stderr.strip()}")

    def start(self, number: int, script, *flags) -> subprocess.Popen:
        """torchrun on one of the hosts; they meet on the first."""
        name = self.names[number]
        return subprocess.Popen(
            ["ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run",
             "--nnodes=2", "--nproc_per_node=1", "--rdzv_backend=c10d", "--rdzv_id=test",
             "--rdzv_endpoint=10.77.0.1:29500", f"--local_addr=10.77.0.{number + 1}",
             # Between real machines, the name of the endpoint tells which of them it is.
             f"--rdzv_conf=is_host={number == 0}",
             str(script), *flags], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=ENVIRONMENT | {"GLOO_SOCKET_IFNAME": "wire"})

    def kill(self, number: int):
        """As if its power failed: nobody tells the other host that the connections are closed."""
        ip("-n", self.names[number], "link", "set", "wire", "down")
        for pid in ip("netns", "pids", self.names[number]).stdout.split():
            os.kill(int(pid), 9)

    def remove(self):
        for name in self.names:
            for pid in ip("netns", "pids", name).stdout.split():
                os.kill(int(pid), 9)
            ip("netns", "del", name)


@pytest.fixture
def hosts():
    try:
        found = Hosts()
    except FileNotFoundError:
        pytest.skip("there is no program `ip`")
    yield found
    found.remove()


@pytest.fixture(scope="module")
def one_host(tmp_path_factory, shards) -> Path:
    """The records of a run on two processes of one host."""
    folder = tmp_path_factory.mktemp("one_host")
    launch(*RUN, *shards, f"--records={folder}", ranks=2)
    return folder


def assert_same_end(folder: Path, other: Path):
    assert losses(log_of(folder))[-1] == losses(log_of(other))[-1]
    states = [load_checkpoint(each)["state"] for each in (folder, other)]
    for kind, tensors in states[0].items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, states[1][kind][name]), (kind, name)


def test_two_hosts_train_what_one_trains(hosts, one_host, shards, tmp_path):
    agents = [hosts.start(n, SCRIPT, *RUN, *shards, f"--records={tmp_path}") for n in (0, 1)]
    output = [agent.communicate(timeout=200)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], "".join(output)
    for kind in ("val_loss", "train_loss"):
        assert losses(log_of(tmp_path), kind) == losses(log_of(one_host), kind)
    assert_same_end(tmp_path, one_host)
    ours = [text for text in output if "step:9/9" in text]
    assert len(ours) == 1, "the first process prints, on one host"


def test_a_host_that_dies_ends_the_other_and_one_resumes(hosts, one_host, shards, tmp_path):
    """The second host stops before step 7, and then loses its power. The first one gives up after
    the script's timeout, which this copy has shorter."""
    text = SCRIPT.read_text()
    long, short = "TIMEOUT = timedelta(minutes=10)", "TIMEOUT = timedelta(seconds=20)"
    assert text.count(long) == 1
    script = tmp_path / "short.py"
    script.write_text(text.replace(long, short))
    script = planted(tmp_path, "if step == 7 and world.rank == 1: time.sleep(1000)", script)
    records = tmp_path / "two"
    agents = [hosts.start(n, script, *RUN, *shards, f"--records={records}") for n in (0, 1)]
    lines = []
    for line in agents[0].stdout:  # the first process is on one of the two, hence
        lines.append(line)
        if "checkpoint: " in line and "step00000006.pt" in line:
            break
    began = time.monotonic()
    hosts.kill(1)
    output = "".join(lines) + agents[0].communicate(timeout=60)[0]
    assert agents[0].returncode == 1 and time.monotonic() - began < 20 + 15, output
    assert agents[1].wait(10) != 0

    resumed = tmp_path / "resumed"
    launch(f"--resume={newest_checkpoint(records)}", f"--records={resumed}", ranks=2)
    assert newest_checkpoint(records).name == "step00000006.pt"
    assert_same_end(resumed, one_host)
