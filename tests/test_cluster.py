"""Training on two hosts by the script of records/cluster.md: two network namespaces of this machine
with a cable (veth) between them, each with a name and an address of its own. They share nothing but
the files, as the nodes of a cluster do. And on one host whose own name leads nowhere."""

import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import (ENVIRONMENT, ROOT, SCRIPT, TINY, launch, log_of, losses, newest_checkpoint,
                      planted)
from test_reliability import assert_same_state

RUN = [*TINY, "--num_iterations=9", "--val_loss_every=3", "--save_every=3", "--micro_batches=2"]
PAGE = (ROOT / "records" / "cluster.md").read_text()
OTHER_HOSTS = {name: value for name, value in ENVIRONMENT.items() if name != "GLOO_SOCKET_IFNAME"}

def ip(*words):
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=False)

class Hosts:
    """Two namespaces, and what a job script finds on a cluster: `srun`, which starts its command on
    both of them, `scontrol`, and an environment. Skips the test where the kernel refuses."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.names = [f"speedrun{os.getpid()}{side}" for side in "ab"]
        a, b = self.names
        self.etc = [Path("/etc/netns", name) for name in self.names]
        words = [f"netns add {a}", f"netns add {b}",
                 f"-n {a} link add wire type veth peer name wire netns {b}"]
        for number, name in enumerate(self.names, 1):
            words += [f"-n {name} addr add 10.77.0.{number}/24 dev wire",
                      f"-n {name} link set lo up", f"-n {name} link set wire up"]
        for command in words:
            done = ip(*command.split())
            if done.returncode:
                self.remove()
                pytest.skip(f"ip {command}: {done.stderr.strip()}")
        for etc in self.etc:
            etc.mkdir(parents=True)
            (etc / "hosts").write_text(f"127.0.0.1 localhost\n10.77.0.1 {a}\n10.77.0.2 {b}\n")
        (folder / ".venv" / "bin").mkdir(parents=True)
        (folder / ".venv" / "bin" / "activate").touch()
        python = f'exec {sys.executable} -m torch.distributed.run "$@"'
        enter = f'unshare --uts {folder}/.venv/bin/enter'
        for name, text in dict(
                torchrun=python, scontrol=f"echo {a}; echo {b}",
                enter='echo "$1" > /proc/sys/kernel/hostname; shift; exec "$@"',
                srun="export SLURM_NTASKS=2 SLURM_STEP_NUM_TASKS=2\n"
                     f'ip netns exec {a} {enter} {a} "$@" & first=$!\n'
                     f'ip netns exec {b} {enter} {b} "$@"; second=$?\n'
                     'wait $first && exit $second').items():
            path = folder / ".venv" / "bin" / name
            path.write_text(f"#!/bin/sh\n{text}\n")
            path.chmod(0o755)

    def start(self, script, *flags) -> subprocess.Popen:
        """Hands the page's job to the scheduler, with one process on each host and small
        settings."""
        job = PAGE.split("<!-- two nodes -->\n```\n")[1].split("```")[0]
        assert len(job.splitlines()) <= 10 and job.count("nproc_per_node=8") == 1
        job, count = re.subn(r"train_gpt\.py --preset=.*", " ".join([str(script), *flags]),
                             job.replace("nproc_per_node=8", "nproc_per_node=1"))
        assert count == 1
        (self.folder / "job.sh").write_text(job)
        path = f"{self.folder}/.venv/bin:{os.environ['PATH']}"
        return subprocess.Popen(
            ["bash", "-eu", "job.sh"], cwd=self.folder, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
            env=OTHER_HOSTS | {"PATH": path, "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2",
                               "SLURM_JOB_NODELIST": "speedrun[a-b]"})

    def processes(self, number: int) -> list[int]:
        return [int(pid) for pid in ip("netns", "pids", self.names[number]).stdout.split()]

    def lose_power(self, number: int):
        """Nobody tells the other host that the connections are closed."""
        ip("-n", self.names[number], "link", "set", "wire", "down")
        for pid in self.processes(number):
            os.kill(pid, 9)

    def remove(self):
        for number, name in enumerate(self.names):
            for pid in self.processes(number):
                os.kill(pid, 9)
            ip("netns", "del", name)
        for etc in self.etc:
            if etc.exists():
                (etc / "hosts").unlink()
                etc.rmdir()

@pytest.fixture
def hosts(tmp_path):
    if not Path("/proc/sys/user/max_net_namespaces").exists() or os.geteuid():
        pytest.skip("network namespaces need Linux and root")
    try:
        found = Hosts(tmp_path)
    except FileNotFoundError:
        pytest.skip("there is no program `ip`")
    yield found
    found.remove()

def test_a_host_that_dies_ends_the_other_and_one_resumes(hosts, shards):
    """The second process stops before step 7, and then its host loses its power. The first one
    gives up after the script's timeout, which this copy has shorter. All ends as two processes of
    one host end."""
    one_host, resumed = hosts.folder / "one_host", hosts.folder / "resumed"
    launch(*RUN, *shards, f"--records={one_host}", ranks=2)
    text = SCRIPT.read_text()
    long, short = "TIMEOUT = timedelta(minutes=10)", "TIMEOUT = timedelta(seconds=20)"
    assert text.count(long) == 1
    script = hosts.folder / "short.py"
    script.write_text(text.replace(long, short))
    script = planted(hosts.folder, "if step == 7 and world.rank == 1: time.sleep(1000)", script)
    records = hosts.folder / "records"
    job = hosts.start(script, *RUN, *shards, f"--records={records}")
    lines = []
    for line in job.stdout:
        lines.append(line)
        if line.startswith("checkpoint: ") and "step00000006.pt" in line:
            break
    began = time.monotonic()
    hosts.lose_power(1)
    output = "".join(lines) + job.communicate(timeout=60)[0]
    assert job.returncode and time.monotonic() - began < 20 + 15, output
    assert not hosts.processes(0) and "step:9/9" not in output
    assert newest_checkpoint(records).name == "step00000006.pt"
    assert output.count("step:6/9 val_loss") == 1
    ip("-n", hosts.names[1], "link", "set", "wire", "up")
    job = hosts.start(SCRIPT, f"--resume={newest_checkpoint(records)}", f"--records={resumed}")
    output, _ = job.communicate(timeout=200)
    assert job.returncode == 0 and output.count("step:9/9 val_loss") == 1, output
    assert_same_state(resumed, one_host)
    expected = losses(log_of(one_host))
    assert losses(log_of(records)) == expected[:3] and losses(log_of(resumed))[-1] == expected[-1]

def on_a_nameless_host(*words) -> str:
    """Runs a command where no name but localhost can be looked up, as in a fresh container or on a
    laptop off its network; what it prints. Skips the test where the kernel refuses."""
    enter = ["unshare", "--net", "--uts", "--mount"]
    if subprocess.run([*enter, "true"], capture_output=True, check=False).returncode:
        pytest.skip("namespaces need Linux and root")
    script = ("ip link set lo up && hostname no-such-name && echo 127.0.0.1 localhost > $0 && "
              "mount --bind $0 /etc/hosts && ! getent hosts no-such-name && exec \"$@\"")
    done = subprocess.run([*enter, "sh", "-c", script, *map(str, words)], cwd=ROOT, text=True,
                          env=OTHER_HOSTS | {"PYTHON": sys.executable, "NPROC": "2"},
                          capture_output=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout

@pytest.mark.parametrize("start", ["run.sh", "the script's own line"])
def test_a_host_whose_own_name_leads_nowhere_trains(start, tmp_path, shards):
    command = ["./run.sh", str(SCRIPT)]
    if start != "run.sh":
        (line,) = re.findall("(?m)^ +(torchrun .* train_gpt[.]py)", SCRIPT.read_text())
        words = shlex.split(line.replace("=8", "=2"))[1:-1]
        command = [sys.executable, "-m", "torch.distributed.run", *words, str(SCRIPT)]
    output = on_a_nameless_host(tmp_path / "hosts", *command, *RUN, *shards,
                                f"--records={tmp_path}/r")
    assert "step:9/9 val_loss" in output and "\nranks: 2\n" in log_of(tmp_path / "r")
