"""What must not lose a run: checkpoints and --resume, kills, signals, damaged files, full disks,
shards that vanish, ranks and launchers that die."""

import errno
import json
import os
import random
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from conftest import (ENVIRONMENT, ROOT, TINY, command, launch, log_of, log_path, losses,
                      newest_checkpoint, planted, write_shard)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import train_gpt
from train_gpt import SEPARATOR, UserError, read_checkpoint, run

pytestmark = pytest.mark.usefixtures("runs_here")

FAILURES = (UserError, OSError)  # which main() prints as one line
RUN = [*TINY, "--num_iterations=12", "--val_loss_every=4", "--save_every=3", "--micro_batches=2"]


class Broken(Exception):
    """Stands for whatever ends a process."""


@contextmanager
def before_step(step: int, do):
    """Call do() when that training step is about to be made. (The warmup makes one of step 0.)"""
    train_step = train_gpt.train_step

    def interrupted(model, batches, optimizers, now, hp, ranks):
        if now == step - 1:
            do()
        return train_step(model, batches, optimizers, now, hp, ranks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_gpt, "train_step", interrupted)
        yield


def break_off():
    raise Broken


def broken_run(records, shards, *flags, step=8) -> Path:
    """A run that ended in the middle of that step: its log."""
    with before_step(step, break_off), pytest.raises(Broken):
        run([*RUN, *shards, f"--records={records}", *flags])
    return log_path(records)


def after_the_source(folder) -> str:
    return log_of(folder).split(f"\n{SEPARATOR}\n")[-1]


def steps(folder) -> list[str]:
    """The log's step lines without their times."""
    return [re.sub(r" train_time:\S+ step_avg:\S+", "", line)
            for line in after_the_source(folder).splitlines() if line.startswith("step:")]


def assert_same_run(folder, other):
    """The same losses, and the same bits in the last checkpoint: weights and optimizer state."""
    assert steps(folder) == steps(other)
    mine = newest_checkpoint(folder)
    theirs = newest_checkpoint(other)
    assert mine["step"] == theirs["step"]
    for kind in ("model", "momentum", "row_squares", "exp_avg", "exp_avg_sq"):
        assert mine[kind].keys() == theirs[kind].keys()
        for name, tensor in theirs[kind].items():
            assert torch.equal(mine[kind][name], tensor), f"{kind} of {name}"


def checkpoints(folder) -> list[str]:
    """What there is beside the log, oldest first."""
    return sorted(path.name for path in Path(folder).glob("*/*"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory, shards):
    """An uninterrupted run of RUN."""
    folder = tmp_path_factory.mktemp("whole")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    run([*RUN, *shards, f"--records={folder}"])
    torch.set_num_threads(threads)
    return folder


# --------------------------------------------------------------------------------------------------
# Checkpoints and --resume


def test_checkpoints_hold_all_that_decides_the_rest(whole):
    assert checkpoints(whole) == ["step00000009.pt", "step00000012.pt"], "the two newest are kept"
    saved = newest_checkpoint(whole)
    names = set(saved["model"])
    matrices = {name for name in names if name.startswith("blocks.")}
    assert set(saved["momentum"]) == set(saved["row_squares"]) == matrices
    assert set(saved["exp_avg"]) == set(saved["exp_avg_sq"]) == names - matrices
    for kind in ("model", "momentum", "row_squares", "exp_avg", "exp_avg_sq"):
        for name, tensor in saved[kind].items():
            assert tensor.any() or name == "value_mix", f"{kind} of {name}"
    assert saved["step"] == 12 and saved["seconds"] > 0
    assert saved["hyperparameters"]["seed"] == 1 and saved["script_path"] == sys.argv[0]
    assert f"script: sha256 {saved['script']} " in log_of(whole)
    for path in train_gpt.checkpoints_in(log_path(whole).with_suffix("")):
        assert f"\ncheckpoint: {path}" in log_of(whole)


def test_without_save_every_nothing_is_saved(tmp_path, shards):
    run([*RUN, *shards, f"--records={tmp_path}", "--save_every=0"])
    (log,) = tmp_path.iterdir()
    with pytest.raises(UserError, match="no checkpoint"):
        run([f"--resume={log}"])


@pytest.mark.parametrize("kind", ["log", "folder", "checkpoint"])
def test_a_run_goes_on_from_any_of_its_paths(tmp_path, shards, whole, monkeypatch, kind):
    """In its own settings and folder, in the same bits; the log is the old one, and goes on."""
    monkeypatch.chdir(tmp_path)
    log = broken_run("mine", shards)
    before = log_of("mine")
    assert "\nstep:7/12 train_loss" in before and "\nstep:8/12" not in before
    folder = log.with_suffix("")
    run([f"--resume={dict(log=log, folder=folder, checkpoint=folder / 'step00000006.pt')[kind]}"])
    assert_same_run("mine", whole)
    assert log_of("mine").startswith(before[:before.rindex("\ncheckpoint: mine/") + 1])
    said = after_the_source("mine")
    assert said.count("\nresumed: step 6 at ") == 1 and "\nchanged: " not in said
    seconds = [float(t) for t in re.findall(r"train_time:(\d+)ms", said)]
    assert seconds == sorted(seconds), "the clock goes on from where it was"
    assert checkpoints("mine") == ["step00000009.pt", "step00000012.pt"]


@pytest.mark.parametrize("name", ["demo.d", "demo.pt", "demo.log.1"])
def test_names_like_file_names_and_the_current_folder(tmp_path, shards, monkeypatch, name):
    log = broken_run(tmp_path, shards, f"--name={name}", step=5)
    folder = log.with_suffix("")
    for path in (".", log, folder / "step00000003.pt"):
        monkeypatch.chdir(folder)
        with before_step(6, break_off), pytest.raises(Broken):
            run([f"--resume={path}"])
    run([f"--resume={folder}"])
    assert len(losses(after_the_source(tmp_path), "train_loss")) == 12


def rewrite(path: Path, **changed):
    """Change parts of a checkpoint."""
    saved = torch.load(path, weights_only=True)
    torch.save(saved | changed, path)


def test_training_time_goes_on_from_the_checkpoints(tmp_path, shards):
    log = broken_run(tmp_path, shards)
    path = log.with_suffix("") / "step00000006.pt"
    rewrite(path, seconds=1000.0)
    run([f"--resume={log}"])
    form = r"step:\d+/12 train_loss\S+ train_time:(\d+)ms"
    times = [int(t) for t in re.findall(form, log_of(tmp_path))]
    assert len(times) == 12 and max(times[:6]) < 1e6 < min(times[6:])


def test_what_changes_is_said(tmp_path, shards, monkeypatch):
    """A setting given beside --resume, another script, other data; what is given as it was is not
    said, and what is not given stays."""
    log = broken_run(tmp_path, shards, "--muon_lr=0.03", "--seed=-1")
    first = Path(shards[0].split("=")[1]).parent / "t_train_000001.bin"
    (tmp_path / "t_train_000001.bin").write_bytes(first.read_bytes())
    script = tmp_path / "other.py"
    script.write_text((ROOT / "train_gpt.py").read_text() + "\n# tweaked\n")
    monkeypatch.setattr(train_gpt, "__file__", str(script))
    run([f"--resume={log}", "--head_lr=0.02", "--val_loss_every=2", "--embed_lr=0.3",
         "--adam_beta2=0.9", "--save_every=4", f"--train_files={tmp_path}/t_train_*.bin"])
    said = after_the_source(tmp_path)
    changed = re.findall(r"^changed: (?:--)?(.*)$", said, re.M)
    assert {line.split()[0] for line in changed} == {
        "head_lr", "val_loss_every", "adam_beta2", "save_every", "train_files", "script", "data"}
    assert "head_lr was 0.008 and is 0.02" in changed
    assert "adam_beta2 was 0.95 and is 0.9" in changed
    assert len(changed) == 7
    assert said.index("\nresumed: step 6 ") < said.index("\nchanged: ") < said.index("\nstep:7/12 ")
    saved = newest_checkpoint(tmp_path)["hyperparameters"]
    assert saved["muon_lr"] == 0.03 and saved["head_lr"] == 0.02
    assert "step:10/12 val_loss" in said and checkpoints(tmp_path)[-2:] == ["step00000008.pt",
                                                                            "step00000012.pt"]


def test_a_finished_run_goes_on_where_it_is_given_more_steps(tmp_path, shards):
    run([*RUN, *shards, f"--records={tmp_path}"])
    run([f"--resume={log_path(tmp_path)}", "--num_iterations=14"])
    said = after_the_source(tmp_path)
    assert re.search(r"^changed: (--)?num_iterations was 12 and is 14$", said, re.M)
    assert said.count("\nfinal_val_loss: ") == 1 and len(losses(said, "train_loss")) == 14


def test_a_model_of_another_shape_is_refused_and_nothing_is_lost(tmp_path, shards, whole):
    log = broken_run(tmp_path, shards)
    for flag in ("--model_dim=48", "--windows=LSSLL --value_embeds=0...0 --attention=xx.xx"):
        with pytest.raises(UserError, match="the checkpoint lacks .*in this shape"):
            run([f"--resume={log}", *flag.split()])
    run([f"--resume={log}"])
    assert_same_run(tmp_path, whole)


def contents(folder) -> dict:
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def test_what_cannot_go_on_is_refused_in_one_line_and_left_alone(tmp_path, shards, whole):
    log = broken_run(tmp_path / "broken", shards)
    none = broken_run(tmp_path / "none", shards, step=2)
    lost = broken_run(tmp_path / "lost", shards)
    lost.rename(lost.with_suffix(".txt"))
    folder = log.with_suffix("")
    done = log_path(whole)
    refused = {
        tmp_path / "nowhere": "does not exist",
        log.with_name("none.log"): "does not exist",
        folder / "step00000099.pt": "does not exist",
        "/": "no checkpoint",
        "": "no checkpoint",
        tmp_path: "no checkpoint",
        ROOT / "train_gpt.py": "no checkpoint",
        none: "no checkpoint",
        lost.with_suffix(""): str(lost),
        done: "finished",
        done.with_suffix(""): "finished",
        done.with_suffix("") / "step00000012.pt": "finished",
        done.with_suffix("") / "step00000009.pt": r"step00000012\.pt is newer",
        folder / "step00000003.pt": r"step00000006\.pt is newer",
    }
    before = contents(tmp_path) | contents(whole)
    for path, reason in refused.items():
        with pytest.raises(FAILURES, match=reason) as raised:
            run([f"--resume={path}"])
        assert "\n" not in str(raised.value) and str(path) in str(raised.value)
    with pytest.raises(UserError, match=f"--resume={log}.* past --num_iterations"):
        run([f"--resume={log}", "--num_iterations=5"])
    with pytest.raises(UserError, match="99999999"):
        run([f"--resume={log}", "--val_tokens=99999999"])
    assert contents(tmp_path) | contents(whole) == before


def test_an_older_checkpoint_serves_when_the_newer_is_deleted(tmp_path, shards, whole):
    log = broken_run(tmp_path, shards)
    (log.with_suffix("") / "step00000006.pt").unlink()
    run([f"--resume={log.with_suffix('')}/step00000003.pt"])
    assert "\nresumed: step 3 at " in log_of(tmp_path)
    assert_same_run(tmp_path, whole)


def broken_at_the_end(records, shards) -> Path:
    """A run that ended between its last checkpoint and its result: its log."""
    write = train_gpt.RunLog.write

    def broken(log, text, console=True):
        return break_off() if text.startswith("final_val_loss: ") else write(log, text, console)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_gpt.RunLog, "write", broken)
        with pytest.raises(Broken):
            run([*RUN, *shards, f"--records={records}"])
    assert checkpoints(records)[-1] == "step00000012.pt"
    return log_path(records)


def test_a_run_that_ended_before_its_result_is_not_finished(tmp_path, shards, whole):
    """Only the last validation is made."""
    run([f"--resume={broken_at_the_end(tmp_path, shards)}"])
    assert "\nresumed: step 12 at " in log_of(tmp_path)
    assert_same_run(tmp_path, whole)


def test_a_result_in_the_source_does_not_finish_a_run(tmp_path, shards, whole, monkeypatch):
    """As of someone who pastes a log into the docstring of a copy."""
    result = "step:12/12 val_loss:0.1\nfinal_val_loss: 0.1 nats per token\nlog: mine\n"
    script = tmp_path / "copy.py"
    text = (ROOT / "train_gpt.py").read_text().replace('"""', f'"""\n{result}', 1)
    script.write_text(f"{text}\n'''\n{result}{SEPARATOR}\n{result}'''\n")
    monkeypatch.setattr(train_gpt, "__file__", str(script))
    log = broken_at_the_end(tmp_path, shards)
    assert log_of(tmp_path).count("\nfinal_val_loss: ") == 3
    run([f"--resume={log}"])
    assert log_of(tmp_path).count("\nfinal_val_loss: ") == 4
    final = f"\nfinal_val_loss: {losses(log_of(whole))[-1]:.4f} nats per token"
    assert final in after_the_source(tmp_path)


def test_half_a_result_does_not_finish_a_run(tmp_path, shards):
    """As a disk that is full in the middle of this line leaves it."""
    run([*RUN, *shards, f"--records={tmp_path}"])
    log = log_path(tmp_path)
    whole = log_of(tmp_path)
    log.write_text(whole[:whole.index("\nfinal_val_loss: ") + len("\nfinal_val_loss: 2")])
    run([f"--resume={log}"])
    assert losses(log_of(tmp_path)) == losses(whole)


def test_a_log_that_was_cut_is_refused(tmp_path, shards):
    log = broken_run(tmp_path, shards)
    os.truncate(log, 1000)
    with pytest.raises(UserError, match=f"{log}.*cut"):
        run([f"--resume={log}"])
    assert log.stat().st_size == 1000


def test_a_path_that_cannot_be_is_one_line():
    with pytest.raises(FAILURES, match="x" * 99) as raised:
        run([f"--resume={'x' * 300}"])
    assert "\n" not in str(raised.value)


def test_a_log_that_is_deleted_during_the_run_does_not_end_it(tmp_path, shards):
    with before_step(5, lambda: log_path(tmp_path).unlink()):
        run([*RUN, *shards, f"--records={tmp_path}"])
    assert checkpoints(tmp_path) == ["step00000009.pt", "step00000012.pt"]
    (folder,) = tmp_path.iterdir()
    with pytest.raises(FAILURES, match=f"{folder}.log"):
        run([f"--resume={folder}"])


def test_a_records_folder_that_vanishes_during_the_run_is_one_line(tmp_path, shards):
    away = tmp_path / "away"
    with before_step(5, lambda: (tmp_path / "records").rename(away)):
        with pytest.raises(FAILURES, match="records"):
            run([*RUN, *shards, f"--records={tmp_path}/records"])
    run([f"--resume={log_path(away)}"])
    assert len(losses(log_of(away), "train_loss")) == 12


# --------------------------------------------------------------------------------------------------
# Kills and signals

LONG = [*TINY, "--val_loss_every=4", "--save_every=3", "--micro_batches=2"]


@pytest.fixture(scope="module")
def long(tmp_path_factory, shards):
    """An uninterrupted run of LONG."""
    folder = tmp_path_factory.mktemp("long")
    launch(*LONG, *shards, f"--records={folder}", "--num_iterations=90")
    return folder


def test_kills_at_every_place_and_at_random(tmp_path, shards, long):
    """A kill at each of the chosen places (in a step, a validation, a saving, a resumption) and
    some at random times, each resumed: the run ends as the uninterrupted one, step for step and bit
    for bit."""
    done = subprocess.run([sys.executable, ROOT / "tests" / "killed_runs.py", tmp_path, *LONG,
                           *shards], capture_output=True, text=True, env=ENVIRONMENT, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    kills = json.loads(done.stdout.splitlines()[-1])
    assert len(kills) == 18 and kills["at random"] == 12, kills
    assert_same_run(tmp_path, long)
    numbers = re.findall(r"^step:(\d+)/90 train_loss", log_of(tmp_path), re.M)
    assert [int(n) for n in numbers] == list(range(1, 91)), "none is missing, none is there twice"
    assert checkpoints(tmp_path) == ["step00000087.pt", "step00000090.pt"]


class Process:
    """A run whose processes are at hand."""

    def __init__(self, *flags, ranks=None, before=(), script=ROOT / "train_gpt.py"):
        self.process = subprocess.Popen([*before, *command(*flags, ranks=ranks, script=script)],
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                        env=ENVIRONMENT, start_new_session=True)

    def wait_for(self, text: str):
        seen = ""
        for line in self.process.stdout:
            seen += line
            if text in line:
                return self
        raise AssertionError(f"ended before {text!r}:\n{seen}{self.process.stderr.read()}")

    def workers(self) -> dict[int, int]:
        """{rank: process id} below torchrun."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        environments = {int(child): Path(f"/proc/{child}/environ").read_text()
                        for child in children}
        ranks = {child: re.search(r"\0RANK=(\d+)", text) for child, text in environments.items()}
        return {int(rank[1]): child for child, rank in ranks.items() if rank}

    def signal(self, number):
        """To all of its processes, as a terminal does it."""
        os.killpg(self.process.pid, number)
        return self

    def end(self, seconds: float = 60) -> tuple[int, str]:
        """(status, stderr) of it once it has ended; it must within that time."""
        try:
            _, said = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
            raise
        return self.process.returncode, said


def assert_one_line_on_how_to_go_on(said: str, number, records):
    """The line of rank 0, and no other of the script's."""
    lines = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "train_gpt.py\", line" not in said, said
    assert number.name in lines[0] and f"--resume={log_path(records)}" in lines[0], said
    newest = max(path.name for path in Path(records).glob("*/step*.pt"))
    assert newest in lines[0], said


def test_signals_end_a_run_at_once_and_it_goes_on_in_the_same_bits(tmp_path, shards, long):
    """SIGTERM and SIGINT with a line, SIGHUP as it ends any program."""
    flags = [*LONG, *shards, f"--records={tmp_path}", "--num_iterations=90"]
    for number, step in ((signal.SIGTERM, 8), (signal.SIGINT, 30), (signal.SIGHUP, 52)):
        begun = Process(*flags).wait_for(f"step:{step}/").signal(number)
        status, said = begun.end()
        assert int(re.findall(r"step:(\d+)/", log_of(tmp_path))[-1]) < step + 30, "at once"
        if number == signal.SIGHUP:
            assert status == -number and said == ""
        else:
            assert status == 128 + number and said.count("\n") == 1, said
            assert_one_line_on_how_to_go_on(said, number, tmp_path)
            flags = [re.search("--resume=[^ ;]+", said)[0]]
    launch(*flags)
    assert log_of(tmp_path).count("\nresumed: ") == 3
    assert_same_run(tmp_path, long)


def test_a_signal_before_the_first_checkpoint_promises_nothing(tmp_path, shards):
    begun = Process(*RUN, *shards, f"--records={tmp_path}", "--save_every=0", "--epochs=9999",
                    "--num_iterations=999").wait_for("step:2/").signal(signal.SIGTERM)
    status, said = begun.end()
    assert status == 143 and said.startswith("error: stopped by SIGTERM"), said
    assert said.count("\n") == 1 and "--resume" not in said and "saved" not in said


def test_nohup_is_respected(tmp_path, shards):
    begun = Process(*RUN, *shards, f"--records={tmp_path}", "--num_iterations=999",
                    "--epochs=9999", before=["nohup"]).wait_for("step:4/")
    begun.signal(signal.SIGHUP).wait_for("step:9/").signal(signal.SIGTERM)
    status, said = begun.end()
    assert status == 143
    assert_one_line_on_how_to_go_on(said, signal.SIGTERM, tmp_path)


# --------------------------------------------------------------------------------------------------
# Ranks and launchers

TWO = [*LONG, "--num_iterations=40"]


@pytest.fixture(scope="module")
def two(tmp_path_factory, shards):
    """An uninterrupted run of TWO on two ranks: two torchrun agents, as on two machines, that meet
    by a c10d rendezvous."""
    folder = tmp_path_factory.mktemp("two")
    port = random.randint(20000, 50000)
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1",
             "--rdzv_backend=c10d", "--rdzv_id=test", f"--rdzv_endpoint=127.0.0.1:{port}",
             "--local_addr=127.0.0.1", ROOT / "train_gpt.py", *TWO, *shards, f"--records={folder}"]
    agents = [subprocess.Popen(agent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                               env=ENVIRONMENT) for _ in range(2)]
    said = [agent.communicate(timeout=200)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], said
    return folder


def assert_same_losses(folder, other):
    """But for the rounding of another number of ranks."""
    for kind in ("train_loss", "val_loss"):
        mine = losses(log_of(folder), kind)
        assert mine == pytest.approx(losses(log_of(other), kind), abs=0.002)


def test_two_launchers_train_as_one_process(tmp_path, shards, two):
    run([*TWO, *shards, f"--records={tmp_path}"])
    assert "\nranks: 2\n" in log_of(two) and "\nranks: 1\n" in log_of(tmp_path)
    assert_same_losses(tmp_path, two)


def test_two_ranks_that_are_ended_go_on_in_the_same_bits(tmp_path, shards, two):
    """By SIGTERM to the launcher alone, as a scheduler sends it, by SIGINT to all, as a terminal
    does, and by SIGKILL to one rank. The status and the report are torchrun's."""
    flags = [*TWO, *shards, f"--records={tmp_path}"]
    for number, step in ((signal.SIGTERM, 7), (signal.SIGINT, 15), (signal.SIGKILL, 23)):
        begun = Process(*flags, ranks=2).wait_for(f"step:{step}/")
        workers = begun.workers()
        if number == signal.SIGTERM:
            begun.process.terminate()
        elif number == signal.SIGINT:
            begun.signal(number)
        else:
            os.kill(workers[1], number)
        status, said = begun.end(seconds=25)  # torchrun kills what has not ended after 30
        assert status == 1 and not Path(f"/proc/{workers[0]}").exists()
        if number != signal.SIGKILL:
            assert_one_line_on_how_to_go_on(said, number, tmp_path)
        flags = [f"--resume={log_path(tmp_path)}"]
    launch(*flags, ranks=2)
    assert log_of(tmp_path).count("\nresumed: ") == 3
    assert_same_run(tmp_path, two)


def test_other_numbers_of_ranks_and_an_error_on_one_of_them(tmp_path, shards, whole):
    """A run of one rank goes on on two, is ended by an error on rank 1 alone, which is said, and
    goes on on one."""
    log = broken_run(tmp_path, shards, step=5)
    script = planted(tmp_path, "require(step < 7 or ranks.rank == 0, 'planted error')")
    done = launch(f"--resume={log}", ranks=2, script=script, check=False)
    assert done.returncode == 1
    said = [line for line in done.stderr.splitlines() if "planted error" in line]
    assert len(said) == 1 and said[0].startswith("error: ") and "rank 1 " in said[0], done.stderr
    assert checkpoints(tmp_path) == ["step00000003.pt", "step00000006.pt"]
    run([f"--resume={log}"])
    resumed = re.findall(r"^resumed: step (\d) at .* on (\d) rank", log_of(tmp_path), re.M)
    assert resumed == [("3", "2"), ("6", "1")]
    assert_same_losses(tmp_path, whole)


# --------------------------------------------------------------------------------------------------
# Damaged files


class Harmful:
    """What a pickle would do if it were allowed to."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_damaged_checkpoint_is_one_line_and_loses_nothing(tmp_path, shards, whole):
    log = broken_run(tmp_path, shards)
    newest = log.with_suffix("") / "step00000006.pt"
    good = newest.read_bytes()
    flipped = bytearray(good)
    flipped[len(good) // 2] ^= 4
    harmless = tmp_path / "harmful"
    damages = {
        "truncated": good[:-1000],
        "a flipped bit": flipped,
        "empty": b"",
        "garbage": random.Random(1).randbytes(5000),
        "text": b"no checkpoint\n" * 40,
        "zeros": bytes(len(good)),
    }
    pickles = {
        "the weights alone": torch.load(newest, weights_only=True)["model"],
        "another version": {"step": 6, "model": {}},
        "no dict": [1, 2, 3],
        "a tensor": torch.zeros(3),
        "a pickle that acts": dict.fromkeys(train_gpt.FACTS, 1) | {"model": Harmful(harmless)},
    }
    for damage in (*damages, *pickles):
        if damage in damages:
            newest.write_bytes(damages[damage])
        else:
            torch.save(pickles[damage], newest)
        before = contents(tmp_path)
        with pytest.raises(UserError, match=f"^{newest}: .*damaged.*delete") as e:
            run([f"--resume={log}"])
        assert "\n" not in str(e.value) and contents(tmp_path) == before, damage
    assert not harmless.exists()
    newest.unlink()
    run([f"--resume={log}"])
    assert "\nresumed: step 3 at " in log_of(tmp_path)
    assert_same_run(tmp_path, whole)


WEIGHTS = torch.arange(300.0)


@settings(max_examples=300, deadline=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_damage_to_a_checkpoint_changes_what_is_read(tmp_path, data):
    """Cut at any byte, a flipped bit, a run of zeros, or anything appended: it is refused in one
    line, or was where nothing is read."""
    path = tmp_path / "step00000003.pt"
    facts = {name: [name, 3] for name in train_gpt.FACTS}
    saved = facts | {"model": {"w": WEIGHTS}}
    torch.save(saved, path)
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    damage = data.draw(st.sampled_from(["cut", "flip", "zero", "append"]))
    if damage == "cut":
        del content[at:]
    elif damage == "flip":
        content[at] ^= 1 << data.draw(st.integers(0, 7))
    elif damage == "zero":
        span = slice(at, at + data.draw(st.integers(1, 600)))
        content[span] = bytes(len(content[span]))
    else:
        content += data.draw(st.binary(min_size=1, max_size=64))
    path.write_bytes(content)
    try:
        read = read_checkpoint(path)
    except UserError as e:
        assert str(path) in str(e) and "damaged" in str(e) and "\n" not in str(e)
    else:
        assert damage != "cut" and torch.equal(read.pop("model")["w"], WEIGHTS)
        assert read == facts


@settings(max_examples=300, deadline=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_shard_is_refused_or_still_a_shard(tmp_path, data):
    """Whatever happens to a shard's bytes, it is refused in one line, or what is left is a right
    shard of tokens in range. (A last byte that makes no token does no harm.)"""
    path = write_shard(tmp_path / "s.bin", [256, *range(250)] * 5)
    content = bytearray(Path(path).read_bytes())
    at = data.draw(st.integers(0, len(content) - 1) | st.integers(0, 16))
    damage = data.draw(st.sampled_from(["cut", "flip", "overwrite", "append"]))
    if damage == "cut":
        del content[at:]
    elif damage == "flip":
        content[at] ^= 1 << data.draw(st.integers(0, 7))
    elif damage == "overwrite":
        new = data.draw(st.binary(min_size=1, max_size=16))
        content[at:at + len(new)] = new
    else:
        content += data.draw(st.binary(min_size=1, max_size=16))
    Path(path).write_bytes(content)
    try:
        ((found, count),) = train_gpt.find_shards(path).items()
        tokens = train_gpt.read_tokens(path, 0, count, 257)
    except UserError as e:
        assert path in str(e) and "\n" not in str(e)
    else:
        header = train_gpt.np.array([20240520, 1, count], dtype="<i4").tobytes()
        assert found == path and content[:12] == header
        assert len(content) // 2 == 512 + count
        assert len(tokens) == count and tokens.to(torch.int32).max() < 257


# --------------------------------------------------------------------------------------------------
# Failing well


@pytest.mark.parametrize("what", ["checkpoint", "log"])
def test_a_full_disk_is_one_line(tmp_path, shards, whole, what):
    """A limit on the size of files stands for the full disk: the log fits, a checkpoint does not;
    or not even the log."""
    flags = [*RUN, *shards, f"--records={tmp_path}"]
    room = 400_000
    if what == "log":
        flags.append("--save_every=0")
        room = log_of(whole).index("step:9/12")
    script = tmp_path / "small.py"
    script.write_text("import resource, runpy\n"
                      f"resource.setrlimit(resource.RLIMIT_FSIZE, ({room}, {room}))\n"
                      f"runpy.run_path({str(ROOT / 'train_gpt.py')!r}, run_name='__main__')\n")
    done = launch(*flags, script=script, check=False)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    if what == "checkpoint":
        assert re.search(r"step00000003.pt: cannot be saved \(.+\).*--resume", done.stderr)
        assert steps(tmp_path) == steps(whole)[:4]
    else:
        assert done.stderr.startswith("error: ") and "File too large" in done.stderr
        assert "\nstep:1/12 train_loss" in log_of(tmp_path)
    assert not list(tmp_path.glob("*/*"))


def test_a_disk_that_fills_up_keeps_the_checkpoints_before(tmp_path, shards, whole, monkeypatch):
    save = torch.save
    saved = []

    def fill_up(payload, file):
        saved.append(payload["step"])
        if len(saved) == 3:
            file.write(b"half of it")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(payload, file)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", fill_up)
        with pytest.raises(UserError, match="step00000009.pt: cannot be saved .*No space left"):
            run([*RUN, *shards, f"--records={tmp_path}"])
    assert checkpoints(tmp_path) == ["step00000003.pt", "step00000006.pt"]
    run([f"--resume={log_path(tmp_path)}"])
    assert_same_run(tmp_path, whole)


def test_a_non_finite_loss_keeps_the_checkpoint_before_it(tmp_path, shards, whole, monkeypatch):
    train_step = train_gpt.train_step

    def poisoned(model, batches, optimizers, step, hp, ranks):
        loss = train_step(model, batches, optimizers, step, hp, ranks)
        return loss * float("nan") if step == 7 else loss

    with monkeypatch.context() as patch:
        patch.setattr(train_gpt, "train_step", poisoned)
        with pytest.raises(UserError, match=r"^step 8: .*train.loss is nan"):
            run([*RUN, *shards, f"--records={tmp_path}"])
    assert "\nstep:8/12 train_loss:nan " in log_of(tmp_path)
    assert checkpoints(tmp_path) == ["step00000003.pt", "step00000006.pt"]
    run([f"--resume={log_path(tmp_path)}"])
    assert_same_run(tmp_path, whole)


@pytest.mark.parametrize("damage, said", [
    (lambda path: path.unlink(), "No such file.*x_train_2.bin"),
    (lambda path: os.truncate(path, 1500), "x_train_2.bin: .*shorter"),
    (lambda path: path.write_bytes(b"\xff" * path.stat().st_size), "x_train_2.bin: .*token 65535"),
], ids=["vanishes", "shrinks", "is overwritten"])
def test_a_shard_that_changes_during_the_run_is_one_line(tmp_path, shards, damage, said):
    """What was saved before is whole, and the run goes on when the shard is there again."""
    paths = [Path(write_shard(tmp_path / f"x_train_{number}.bin", [256, *range(250)] * 9))
             for number in range(3)]
    good = paths[2].read_bytes()
    records = tmp_path / "r"
    with before_step(8, lambda: damage(paths[2])):
        with pytest.raises(FAILURES, match=said) as raised:
            run([*RUN, *shards, "--epochs=1", f"--train_files={tmp_path}/x_train_*.bin",
                 f"--records={records}"])
    assert "\n" not in str(raised.value)
    assert checkpoints(records) == ["step00000003.pt", "step00000006.pt"]
    with pytest.raises(UserError, match=r"x_train|--num_iterations"):
        run([f"--resume={log_path(records)}"])
    paths[2].write_bytes(good)
    run([f"--resume={log_path(records)}"])
    assert len(losses(log_of(records), "train_loss")) == 12
    assert "\nchanged: " not in after_the_source(records)


def test_a_console_that_goes_away_ends_a_run_in_one_line(tmp_path, shards, whole):
    """And the run goes on from its newest checkpoint."""
    begun = Process(*RUN, *shards, f"--records={tmp_path}").wait_for("step:4/")
    begun.process.stdout.close()
    said = begun.process.stderr.read()
    assert begun.process.wait(60) == 2 and said.startswith("error: ") and said.count("\n") == 1
    assert "Broken pipe" in said
    run([f"--resume={log_path(tmp_path)}"])
    assert_same_run(tmp_path, whole)
