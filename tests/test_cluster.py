"""Training on two hosts by the script of records/cluster.md: two network namespaces of this machine
with a cable (veth) between them, each with a name and an address of its own. They share nothing but
the files, as the nodes of a cluster do. And on one host whose own name leads nowhere."""

import os
import re
import subprocess
import sys
import pytest
from conftest import (ENVIRONMENT, ROOT, SCRIPT, TINY, edited, launch, log_of, losses,
                      newest_checkpoint, planted, run_sh)
from test_reliability import assert_same_state
from test_run import program
from records.tools.load import TORCHRUN

RUN = [*TINY, "--num_iterations=9", "--val_loss_every=3", "--save_every=3", "--micro_batches=2"]
OTHER_HOSTS = {name: value for name, value in ENVIRONMENT.items() if name != "GLOO_SOCKET_IFNAME"}
ENTER = ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
# This host becomes one, with the script's processes; a sleeping process holds the other one. When
# there is a file `lost`, the other one loses its power: nobody says that connections are closed.
TWO_HOSTS = """
ip link set lo up
hostname one
mount --bind hosts /etc/hosts
unshare --net --uts sh -c "hostname two; exec sleep 1000" & export TWO=$!
on_two="nsenter -t $TWO -n -u"
until [ "$($on_two hostname)" = two ]; do sleep 0.1; done
ip link add wire type veth peer name wire netns $TWO
ip addr add 10.77.0.1/24 dev wire
ip link set wire up
$on_two sh -c "ip link set lo up; ip addr add 10.77.0.2/24 dev wire; ip link set wire up"
(until [ -e lost ]; do sleep 0.1; done
ip link set wire down
for process in /proc/[0-9]*; do
    if [ $process/ns/net -ef /proc/$TWO/ns/net ]; then kill -9 ${process#/proc/}; fi
done) > /dev/null 2>&1 &
bash -eu job.sh
"""
PROGRAMS = {"activate": "", "scontrol": "echo one; echo two",
            "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
            "srun": 'shift\nexport SLURM_NTASKS=2 SLURM_STEP_NUM_TASKS=2\n"$@" & first=$!\n'
                    'nsenter -t $TWO -n -u "$@"; second=$?\nwait $first && exit $second'}

@pytest.fixture
def namespaces():
    done = subprocess.run([*ENTER, "ip", "link"], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"namespaces need Linux, root and `ip`: {done.stderr}")

def start_job(folder, script, *flags) -> subprocess.Popen:
    page = (ROOT / "records" / "cluster.md").read_text()
    job = page.split("<!-- two nodes -->\n```\n")[1].split("```")[0]
    assert len(job.splitlines()) <= 10 and job.count("nproc_per_node=8") == 1
    assert "\nsrun --kill-on-bad-exit=1 torchrun" in job, "a node would wait for one that has died"
    job, count = re.subn(r"train_gpt\.py --preset=.*", " ".join([str(script), *flags]),
                         job.replace("nproc_per_node=8", "nproc_per_node=1"))
    assert count == 1
    (folder / "job.sh").write_text(job)
    (folder / "hosts").write_text("127.0.0.1 localhost\n10.77.0.1 one\n10.77.0.2 two\n")
    programs = folder / ".venv" / "bin"
    for name, text in PROGRAMS.items():
        program(programs / name, text)
    return subprocess.Popen([*ENTER, "bash", "-euc", TWO_HOSTS], cwd=folder, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=OTHER_HOSTS | {
                                "PATH": f"{programs}:{os.environ['PATH']}", "SLURM_JOB_ID": "7",
                                "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "[one,two]"})

def test_a_host_that_dies_ends_the_other_and_one_resumes(tmp_path, shards, namespaces):
    """The second process stops before step 7, and then its host loses its power. The first one
    gives up after the script's timeout, which this copy has shorter."""
    records, resumed, one_host = (tmp_path / name for name in ("records", "resumed", "one_host"))
    launch(*RUN, *shards, f"--records={one_host}", ranks=2)
    short = edited(tmp_path / "short.py", "TIMEOUT = timedelta(«minutes=10→seconds=6»)")
    script = planted(tmp_path, "if step == 7 and world.rank == 1: time.sleep(1000)", short)
    job = start_job(tmp_path, script, *RUN, *shards, f"--records={records}")
    lines = []
    for line in job.stdout:
        lines.append(line)
        if line.startswith("checkpoint: ") and "step00000006.pt" in line:
            break
    (tmp_path / "lost").touch()
    output = "".join(lines) + job.communicate(timeout=100)[0]  # until nothing of it is left
    assert job.returncode and "step:9/9" not in output, output
    checkpoint = newest_checkpoint(records)
    assert checkpoint.name == "step00000006.pt" and output.count("step:6/9 val_loss") == 1
    (tmp_path / "lost").unlink()
    job = start_job(tmp_path, SCRIPT, f"--resume={checkpoint}", f"--records={resumed}")
    output, _ = job.communicate(timeout=200)
    assert job.returncode == 0 and output.count("step:9/9 val_loss") == 1, output
    assert_same_state(resumed, one_host)
    expected = losses(log_of(one_host))
    assert losses(log_of(records)) == expected[:3] and losses(log_of(resumed))[-1] == expected[-1]

def test_a_host_whose_own_name_leads_nowhere_trains(tmp_path, shards, namespaces):
    """No name but localhost can be looked up, as in a fresh container. run.sh starts the processes
    as the script's own page says."""
    (line,) = re.findall("(?m)^ +torchrun (.*) train_gpt[.]py", SCRIPT.read_text())
    assert line.split() == [*TORCHRUN[2:], "--nproc_per_node=8"]
    command = [sys.executable, *TORCHRUN, "--nproc_per_node=2", str(SCRIPT)]
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n")
    enter = ("ip link set lo up && hostname no-such-name && mount --bind $0 /etc/hosts && "
             "! getent hosts no-such-name && exec \"$@\"")
    done = run_sh(*ENTER[1:], "sh", "-c", enter, hosts, *command, *TINY, *shards,
                  "--micro_batches=2", f"--records={tmp_path}/r", run=ENTER[0])
    assert done.returncode == 0 and "step:6/6 val_loss" in done.stdout, done.stdout + done.stderr
    assert "\nranks: 2\n" in log_of(tmp_path / "r")
