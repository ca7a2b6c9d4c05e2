"""What must not lose a run: checkpoints and --resume, kills, signals, damaged files, full disks,
consoles and shards that vanish, ranks and launchers that die, two writers of one log."""

import dataclasses
import functools
import glob
import inspect
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import pytest
import torch
from conftest import (ENVIRONMENT, ROOT, SCRIPT, TINY, command, launch, log_of, log_path, losses,
                      newest_checkpoint, planted, train, write_shard)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import train_gpt
from train_gpt import SEPARATOR, UserError, read_checkpoint

RUN = [*TINY, "--num_iterations=12", "--val_loss_every=4", "--save_every=3", "--micro_batches=2"]


class Broken(Exception):
    """Stands for whatever ends a process."""


def break_off():
    raise Broken


@contextmanager
def before_step(script, number: int, do):
    """Calls do() when that training step is about to be made. (The warmup makes one of step 0.)"""
    train_step = script.train_step

    @functools.wraps(train_step)
    def interrupted(*args):
        if inspect.signature(train_step).bind(*args).arguments["step"] == number - 1:
            do()
        return train_step(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "train_step", interrupted)
        yield


def broken_run(script, records, shards, *flags, step=8) -> Path:
    """A run that ended in the middle of that step: its log."""
    with before_step(script, step, break_off), pytest.raises(Broken):
        train(script, *RUN, *shards, f"--records={records}", *flags)
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
    assert mine["progress"]["step"] == theirs["progress"]["step"]
    groups = [(mine["model"], theirs["model"])]
    assert mine["optimizers"].keys() == theirs["optimizers"].keys() and theirs["optimizers"]
    groups += [(mine["optimizers"][name], theirs["optimizers"][name])
               for name in theirs["optimizers"]]
    for tensors, expected in groups:
        assert tensors.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(tensors[name], tensor), name


def checkpoints(folder) -> list[str]:
    """The names of the files beside the log, oldest first."""
    return sorted(path.name for path in Path(folder).glob("*/*"))


def contents(folder) -> dict:
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory, shards, script):
    """An uninterrupted run of RUN."""
    folder = tmp_path_factory.mktemp("whole")
    train(script, *RUN, *shards, f"--records={folder}")
    return folder


# --------------------------------------------------------------------------------------------------
# Checkpoints and --resume

@pytest.mark.both_scripts
def test_checkpoints_hold_all_that_decides_the_rest(whole, script):
    assert checkpoints(whole) == ["step00000009.pt", "step00000012.pt"], "the two newest are kept"
    saved = newest_checkpoint(whole)
    assert saved["progress"]["step"] == 12 and saved["progress"]["seconds"] > 0
    assert f"script: sha256 {saved['facts']['script']} " in log_of(whole)
    settings = {f.name for f in dataclasses.fields(script.Hyperparameters)}
    assert settings < set(saved["facts"]) and saved["facts"]["seed"] == 1
    owned = set().union(*saved["optimizers"].values())
    assert owned == set(saved["model"]), "every parameter has state"
    for name in train_gpt.checkpoints_of(log_path(whole)):
        assert f"\ncheckpoint: {name}" in log_of(whole)


@pytest.mark.method
def test_optimizer_state_is_that_of_muon_and_adam(whole):
    saved = newest_checkpoint(whole)
    names = set(saved["model"])
    matrices = {name for name in names if re.fullmatch(r"blocks\..*weight", name)}
    assert set(saved["optimizers"]) == {"momentum", "mean", "mean_square"}
    assert set(saved["optimizers"]["momentum"]) == matrices
    for state in ("mean", "mean_square"):
        assert set(saved["optimizers"][state]) == names - matrices
    for tensors in (saved["model"], *saved["optimizers"].values()):
        for name, tensor in tensors.items():
            assert tensor.any(), name


def test_without_save_every_nothing_is_saved(tmp_path, shards):
    train(train_gpt, *RUN, *shards, f"--records={tmp_path}", "--save_every=0")
    (log,) = tmp_path.iterdir()
    with pytest.raises(UserError, match="saved no checkpoint"):
        train(train_gpt, f"--resume={log}")


@pytest.mark.both_scripts
def test_a_resumed_run_ends_in_the_same_bits(tmp_path, shards, whole, script, monkeypatch):
    """In its own settings and folder; the log is the old one, cut to the checkpoint."""
    monkeypatch.chdir(tmp_path)
    log = broken_run(script, "mine", shards)
    before = log_of("mine")
    assert "\nstep:7/12 train_loss" in before and "\nstep:8/12" not in before
    train(script, f"--resume={log}")
    assert_same_run("mine", whole)
    assert log_of("mine").startswith(before[:before.rindex("\ncheckpoint: mine/") + 1])
    rest = after_the_source("mine")
    assert rest.count("\nresumed: step 6 at ") == 1 and "\nchanged: " not in rest
    seconds = [float(t) for t in re.findall(r"train_time:(\d+)ms", rest)]
    assert seconds == sorted(seconds), "the clock continues from where it was"
    assert checkpoints("mine") == ["step00000009.pt", "step00000012.pt"]


@pytest.mark.parametrize("name", ["demo.d", "demo.pt", "demo.log.1"])
def test_runs_whose_names_look_like_files_resume(tmp_path, shards, monkeypatch, name):
    log = broken_run(train_gpt, tmp_path, shards, f"--name={name}", step=5)
    monkeypatch.chdir(log.parent)
    with before_step(train_gpt, 6, break_off), pytest.raises(Broken):
        train(train_gpt, f"--resume={log.name}")
    train(train_gpt, f"--resume={log}")
    assert len(losses(after_the_source(tmp_path), "train_loss")) == 12


def test_training_time_continues_from_the_checkpoints(tmp_path, shards):
    log = broken_run(train_gpt, tmp_path, shards)
    path = log.with_suffix("") / "step00000006.pt"
    saved = torch.load(path, weights_only=True)
    saved["progress"]["seconds"] = 1000.0
    torch.save(saved, path)
    train(train_gpt, f"--resume={log}")
    form = r"step:\d+/12 train_loss\S+ train_time:(\d+)ms"
    times = [int(t) for t in re.findall(form, log_of(tmp_path))]
    assert len(times) == 12 and max(times[:6]) < 1e6 < min(times[6:])


@pytest.mark.both_scripts
def test_the_log_says_what_has_changed(tmp_path, shards, script, monkeypatch):
    """A setting given beside --resume, another script, other validation data. A setting that is
    given as it was is not mentioned, and one that is not given stays."""
    log = broken_run(script, tmp_path, shards, "--muon_lr=0.03", "--seed=-1", "--embed_lr=0.3",
                     "--head_lr=0.008", "--adam_beta2=0.95")
    other = write_shard(tmp_path / "other.bin", [256, *range(200)] * 10)
    copy = tmp_path / "other.py"
    copy.write_text(Path(script.__file__).read_text() + "\n# tweaked\n")
    monkeypatch.setattr(script, "__file__", str(copy))
    train(script, f"--resume={log}", "--head_lr=0.02", "--val_loss_every=2", "--embed_lr=0.3",
          "--adam_beta2=0.9", "--save_every=4", f"--val_files={other}")
    rest = after_the_source(tmp_path)
    changed = re.findall(r"^changed: (.*)$", rest, re.M)
    assert {line.split()[0] for line in changed} == {
        "head_lr", "val_loss_every", "adam_beta2", "save_every", "val_files", "script",
        "validation_data"}
    assert "head_lr was 0.008 and is 0.02" in changed and len(changed) == 7
    assert "adam_beta2 was 0.95 and is 0.9" in changed
    assert rest.index("\nresumed: step 6 ") < rest.index("\nchanged: ") < rest.index("\nstep:7/12 ")
    facts = newest_checkpoint(tmp_path)["facts"]
    assert facts["muon_lr"] == 0.03 and facts["head_lr"] == 0.02
    assert "step:10/12 val_loss" in rest
    assert checkpoints(tmp_path)[-2:] == ["step00000008.pt", "step00000012.pt"]


def test_data_that_moved_may_be_renamed(tmp_path, shards):
    """The same shards under another name are the same data."""
    log = broken_run(train_gpt, tmp_path / "r", shards)
    for path in Path(shards[0].split("=")[1]).parent.glob("t_train_*.bin"):
        shutil.copy(path, tmp_path / path.name)
    train(train_gpt, f"--resume={log}", f"--train_files={tmp_path}/t_train_*.bin")
    changed = re.findall(r"^changed: (\w+)", after_the_source(tmp_path / "r"), re.M)
    assert changed == ["train_files"]


@pytest.mark.parametrize("flag", [
    "--train_seq_len=128", "--micro_batches=4", "--seed=2", "--name=other",
    "--records=elsewhere"])
def test_what_decides_the_place_in_the_data_must_stay(tmp_path, shards, flag):
    log = broken_run(train_gpt, tmp_path, shards)
    before = contents(tmp_path)
    with pytest.raises(UserError, match=f"{flag[2:].split('=')[0]} was .* and is .*must stay"):
        train(train_gpt, f"--resume={log}", flag)
    assert contents(tmp_path) == before


def test_a_preset_beside_resume_is_refused(tmp_path, shards):
    log = broken_run(train_gpt, tmp_path, shards)
    with pytest.raises(UserError, match="--preset.*not allowed with .*--resume|--resume.*--preset"):
        train(train_gpt, f"--resume={log}", "--preset=demo")


def test_other_training_data_under_the_same_name_are_refused(tmp_path, shards):
    """Of the same length; a change that the number of tokens does not show."""
    path = Path(write_shard(tmp_path / "x_train_1.bin", [256, *range(250)] * 99))
    data = [f"--train_files={path}", shards[1]]
    log = broken_run(train_gpt, tmp_path / "r", data)
    good = path.read_bytes()
    for place in (2000, len(good) - 2000):
        path.write_bytes(good[:place] + b"\7\0" * 9 + good[place + 18:])
        before = contents(tmp_path)
        with pytest.raises(UserError, match="training_data was .* and is "):
            train(train_gpt, f"--resume={log}")
        assert contents(tmp_path) == before
    path.write_bytes(good)
    train(train_gpt, f"--resume={log}")


def test_a_finished_run_continues_when_it_is_given_more_steps(tmp_path, shards):
    """The validation line of its first end stays in the log."""
    train(train_gpt, *RUN, *shards, f"--records={tmp_path}")
    val_lines = [line for line in steps(tmp_path) if " val_loss" in line]
    train(train_gpt, f"--resume={log_path(tmp_path)}", "--num_iterations=14")
    rest = after_the_source(tmp_path)
    assert "\nchanged: num_iterations was 12 and is 14\n" in rest
    assert rest.count("\nfinal_val_loss: ") == 1 and len(losses(rest, "train_loss")) == 14
    assert [line for line in steps(tmp_path) if " val_loss" in line][:-1] == val_lines


def test_a_finished_run_reports_its_result_again(tmp_path, shards, capsys):
    train(train_gpt, *RUN, *shards, f"--records={tmp_path}")
    (final,) = re.findall("(?m)^final_val_loss: .*", log_of(tmp_path))
    before = steps(tmp_path)
    capsys.readouterr()
    train(train_gpt, f"--resume={log_path(tmp_path)}")
    assert re.findall("(?m)^final_val_loss: .*", log_of(tmp_path)) == [final]
    assert steps(tmp_path) == before and f"\n{final}\n" in capsys.readouterr().out


def broken_at_the_end(script, records, shards) -> Path:
    """A run that ended between its last checkpoint and its result: its log."""
    write = script.RunLog.write

    def broken(log, text, console=True):
        return break_off() if text.startswith("final_val_loss: ") else write(log, text, console)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script.RunLog, "write", broken)
        with pytest.raises(Broken):
            train(script, *RUN, *shards, f"--records={records}")
    assert checkpoints(records)[-1] == "step00000012.pt"
    return log_path(records)


def test_a_run_that_ended_before_its_result_gives_it_when_it_is_resumed(tmp_path, shards, whole):
    train(train_gpt, f"--resume={broken_at_the_end(train_gpt, tmp_path, shards)}")
    assert "\nresumed: step 12 at " in log_of(tmp_path)
    assert_same_run(tmp_path, whole)
    result = f"\nfinal_val_loss: {losses(log_of(whole))[-1]:.4f} nats per token"
    assert result in after_the_source(tmp_path)


SHAPES = ["--model_dim=48", "--num_heads=4"]


@pytest.mark.both_scripts
def test_a_resume_that_fails_cuts_nothing(tmp_path, shards, whole, script):
    """Another shape, a step that fails, a damaged shard: log and checkpoints stay as they are, and
    the run can still be resumed."""
    log = broken_run(script, tmp_path, shards)
    before = contents(tmp_path)
    for flag in SHAPES:
        with pytest.raises(script.UserError, match="the checkpoint lacks .* in the shape"):
            train(script, f"--resume={log}", flag)
        assert contents(tmp_path) == before
    with before_step(script, 7, break_off), pytest.raises(Broken):
        train(script, f"--resume={log}")
    assert contents(tmp_path) == before
    (shard, *_) = Path(shards[1].split("=")[1]).parent.glob("t_val_*.bin")
    good = shard.read_bytes()
    shard.write_bytes(good[:1500] + b"\xff" * 100 + good[1600:])
    try:
        with pytest.raises(script.UserError, match="65535"):
            train(script, f"--resume={log}")
    finally:
        shard.write_bytes(good)
    assert contents(tmp_path) == before
    train(script, f"--resume={log}")
    assert_same_run(tmp_path, whole)


def test_what_cannot_be_resumed_is_refused_in_one_line_and_left_alone(tmp_path, shards):
    log = broken_run(train_gpt, tmp_path / "broken", shards)
    none = broken_run(train_gpt, tmp_path / "none", shards, step=2)
    lost = broken_run(train_gpt, tmp_path / "lost", shards)
    lost.rename(lost.with_suffix(".txt"))
    refused = {
        tmp_path / "nowhere": "is not a log",
        log.with_name("none.log"): "is not a log",
        "/": "is not a log",
        tmp_path: "is not a log",
        ROOT / "train_gpt.py": "is not a log",
        log.with_suffix(""): "is not a log",
        log.with_suffix("") / "step00000006.pt": "is not a log",
        lost: "is not a log",
        "x" * 300: "is not a log",
        none: "saved no checkpoint",
    }
    before = contents(tmp_path)
    for path, reason in refused.items():
        with pytest.raises(UserError, match=reason) as raised:
            train(train_gpt, f"--resume={path}")
        assert "\n" not in str(raised.value) and str(path) in str(raised.value)
    with pytest.raises(UserError, match="the run has done 6 steps already"):
        train(train_gpt, f"--resume={log}", "--num_iterations=5")
    with pytest.raises(UserError, match="99999999"):
        train(train_gpt, f"--resume={log}", "--val_tokens=99999999")
    assert contents(tmp_path) == before


def test_an_older_checkpoint_serves_when_the_newer_one_is_deleted(tmp_path, shards, whole):
    log = broken_run(train_gpt, tmp_path, shards)
    (log.with_suffix("") / "step00000006.pt").unlink()
    train(train_gpt, f"--resume={log}")
    assert "\nresumed: step 3 at " in log_of(tmp_path)
    assert_same_run(tmp_path, whole)


@pytest.mark.parametrize("edit", [
    lambda text: text[:1000],
    lambda text: text.replace("train_loss:", "my_note train_loss:", 1),
    lambda text: text.replace("\nstep:3/", "\n"),
], ids=["cut", "a word more", "a word less"])
def test_a_log_that_was_edited_by_hand_is_refused(tmp_path, shards, edit):
    """Cut at the checkpoint's place, it would be cut within a line."""
    log = broken_run(train_gpt, tmp_path, shards)
    text = edit(log.read_text())
    log.write_text(text)
    with pytest.raises(UserError, match=f"{log} was edited after step00000006.pt was saved"):
        train(train_gpt, f"--resume={log}")
    assert log.read_text() == text


def test_a_log_that_is_deleted_during_the_run_does_not_end_it(tmp_path, shards):
    with before_step(train_gpt, 5, lambda: log_path(tmp_path).unlink()):
        train(train_gpt, *RUN, *shards, f"--records={tmp_path}")
    assert checkpoints(tmp_path) == ["step00000009.pt", "step00000012.pt"]
    (folder,) = tmp_path.iterdir()
    with pytest.raises(UserError, match=f"{folder}.log is not a log"):
        train(train_gpt, f"--resume={folder}.log")


STATE_NAMES = ("step", "model", "seconds", "progress", "facts", "optimizers")


def test_state_may_have_any_name(tmp_path, shards, whole):
    """An optimizer of a user's whose state is named like what else a checkpoint holds: the run is
    resumed to the same bits. The state counts the steps, and a wrong count is seen."""
    own = tmp_path / "own.py"
    text = SCRIPT.read_text()
    tensors = "[torch.zeros_like(p) for p in params.values()]"
    text = text.replace("class Muon(", f"""class Counting(Adam):
    def __init__(self, params, lr, hp, world):
        super().__init__(params, lr, hp, world)
        self.state |= {{name: {tensors} for name in {STATE_NAMES}}}

    def update(self, step):
        super().update(step)
        for name in {STATE_NAMES}:
            for tensor in self.state[name]:
                assert (tensor == step).all() or step == 0
                tensor += 1

class Muon(""", 1)
    text = text.replace("optimizers.append(Adam(", "optimizers.append(Counting(", 1)
    assert text.count("Counting(") == 2
    own.write_text(text)
    flags = [*RUN, *shards, f"--records={tmp_path}"]
    broken = planted(tmp_path, "assert step < 7 or '--resume' in str(sys.argv)", own)
    assert launch(*flags, script=broken, check=False).returncode == 1
    launch(f"--resume={log_path(tmp_path)}", script=broken)
    saved = newest_checkpoint(tmp_path)
    for name in STATE_NAMES:
        assert all((tensor == 12).all() for tensor in saved["optimizers"][name].values())
    assert steps(tmp_path) == steps(whole)


# --------------------------------------------------------------------------------------------------
# Kills and signals

LONG = [*TINY, "--val_loss_every=4", "--save_every=3", "--micro_batches=2"]


@pytest.fixture(scope="module")
def long(tmp_path_factory, shards, script):
    """An uninterrupted run of LONG."""
    folder = tmp_path_factory.mktemp("long")
    train(script, *LONG, *shards, f"--records={folder}", "--num_iterations=90")
    return folder


@pytest.mark.both_scripts
def test_kills_at_every_place_and_at_random(tmp_path, shards, long, script):
    """A kill at each of the chosen places (in a step, a validation, a save, a resumption) and some
    at random times, each followed by --resume: the run ends as the uninterrupted one does, step by
    step and bit by bit."""
    done = subprocess.run([sys.executable, ROOT / "tests" / "killed_runs.py", script.__file__,
                           tmp_path, *LONG, *shards], capture_output=True, text=True,
                          env=ENVIRONMENT, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    kills = json.loads(done.stdout.splitlines()[-1])
    assert len(kills) == 18 and sum(kills.values()) == 29 and kills["at random"] == 12, kills
    assert_same_run(tmp_path, long)
    numbers = re.findall(r"^step:(\d+)/90 train_loss", log_of(tmp_path), re.M)
    assert [int(n) for n in numbers] == list(range(1, 91)), "none is missing, none is there twice"
    assert checkpoints(tmp_path) == ["step00000087.pt", "step00000090.pt"]


def is_gone(pid: int) -> bool:
    """Whether a process has ended, which nobody may have waited for yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


class Process:
    """A run whose processes are at hand."""

    def __init__(self, *flags, ranks=None, before=(), script=None):
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
        """Sends it to all of the run's processes, as a terminal does."""
        os.killpg(self.process.pid, number)
        return self

    def end(self, seconds: float = 60) -> tuple[int, str]:
        """(status, stderr) of it once it has ended; it must within that time."""
        try:
            _, errors = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
            raise
        return self.process.returncode, errors


def assert_one_line_on_how_to_continue(errors: str, number, records):
    """The line of rank 0, and no other line of the script's."""
    lines = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and f"{SCRIPT.name}\", line" not in errors, errors
    assert number.name in lines[0] and f"--resume={log_path(records)}" in lines[0], errors
    newest = max(path.name for path in Path(records).glob("*/step*.pt"))
    assert newest in lines[0], errors


@pytest.mark.both_scripts
def test_signals_end_a_run_at_once_and_it_resumes_to_the_same_bits(tmp_path, shards, long, script):
    """SIGTERM and SIGINT with a line, SIGHUP as it ends any program."""
    flags = [*LONG, *shards, f"--records={tmp_path}", "--num_iterations=90"]
    for number, step in ((signal.SIGTERM, 8), (signal.SIGINT, 30), (signal.SIGHUP, 52)):
        begun = Process(*flags, script=script.__file__).wait_for(f"step:{step}/").signal(number)
        status, errors = begun.end()
        assert int(re.findall(r"step:(\d+)/", log_of(tmp_path))[-1]) < step + 30, "at once"
        if number == signal.SIGHUP:
            assert status == -number and errors == ""
        else:
            assert status == 128 + number and errors.count("\n") == 1, errors
            assert_one_line_on_how_to_continue(errors, number, tmp_path)
            flags = [re.search("--resume=[^ ;]+", errors)[0]]
    launch(*flags, script=script.__file__)
    assert log_of(tmp_path).count("\nresumed: ") == 3
    assert_same_run(tmp_path, long)


def test_a_signal_before_the_first_checkpoint_promises_nothing(tmp_path, shards):
    begun = Process(*RUN, *shards, f"--records={tmp_path}", "--save_every=0", "--epochs=9999",
                    "--num_iterations=999").wait_for("step:2/").signal(signal.SIGTERM)
    status, errors = begun.end()
    assert status == 143 and errors.startswith("error: stopped by SIGTERM"), errors
    assert errors.count("\n") == 1 and "--resume" not in errors and "saved" not in errors


def test_nohup_is_respected(tmp_path, shards):
    begun = Process(*RUN, *shards, f"--records={tmp_path}", "--num_iterations=999",
                    "--epochs=9999", before=["nohup"]).wait_for("step:4/")
    begun.signal(signal.SIGHUP).wait_for("step:9/").signal(signal.SIGTERM)
    status, errors = begun.end()
    assert status == 143
    assert_one_line_on_how_to_continue(errors, signal.SIGTERM, tmp_path)


# --------------------------------------------------------------------------------------------------
# Ranks and launchers

TWO = [*LONG, "--num_iterations=40"]


def two_launchers(script, other, *flags, folders=(None, None)) -> list[subprocess.Popen]:
    """Two torchrun agents, as on two machines, that meet by a c10d rendezvous. Each starts in a
    folder of its own, if `folders` names them."""
    port = random.randint(20000, 50000)
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1",
             "--rdzv_backend=c10d", "--rdzv_id=test", f"--rdzv_endpoint=127.0.0.1:{port}",
             "--local_addr=127.0.0.1"]
    return [subprocess.Popen([*agent, path, *flags], stdout=subprocess.PIPE,
                             stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT, cwd=folder)
            for path, folder in zip((script, other), folders)]


@pytest.fixture(scope="module")
def two(tmp_path_factory, shards, script):
    """An uninterrupted run of TWO on two ranks, which two launchers start."""
    folder = tmp_path_factory.mktemp("two")
    agents = two_launchers(script.__file__, script.__file__, *TWO, *shards, f"--records={folder}")
    output = [agent.communicate(timeout=200)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], output
    return folder


def assert_same_losses(folder, other):
    """But for the rounding of another number of ranks."""
    for kind in ("train_loss", "val_loss"):
        mine = losses(log_of(folder), kind)
        assert mine == pytest.approx(losses(log_of(other), kind), abs=0.002)


@pytest.mark.both_scripts
def test_two_launchers_train_as_one_process(tmp_path, shards, two, script):
    train(script, *TWO, *shards, f"--records={tmp_path}")
    assert "\nranks: 2\n" in log_of(two) and "\nranks: 1\n" in log_of(tmp_path)
    assert_same_losses(tmp_path, two)


def test_two_launchers_with_different_scripts_are_refused(tmp_path, shards):
    """As where a copy on the second machine was edited: both end, and one line says why."""
    other = tmp_path / SCRIPT.name
    other.write_text(SCRIPT.read_text() + "# edited\n")
    agents = two_launchers(SCRIPT, other, *TWO, *shards, f"--records={tmp_path}/r")
    output = [agent.communicate(timeout=200)[0] for agent in agents]
    assert all(agent.returncode for agent in agents), output
    errors = re.findall("(?m)^error: .*", "".join(output))
    assert errors and all("differs between machines" in line for line in errors), output
    assert not (tmp_path / "r").exists(), "nothing was begun"


@pytest.mark.both_scripts
def test_two_launchers_with_different_data_are_refused(tmp_path, shards, script):
    """As where the second machine has other shards under the same names. Each machine's ranks would
    train and validate on its own."""
    patterns = dict(flag.lstrip("-").split("=") for flag in shards)
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        for name, pattern in patterns.items():
            (folder / name).mkdir(parents=True)
            for path in glob.glob(pattern):
                shutil.copy(path, folder / name)
    changed = bytearray(next((folders[1] / "train_files").iterdir()).read_bytes())
    changed[1026] ^= 1  # of the first tokens
    next((folders[1] / "train_files").iterdir()).write_bytes(changed)
    agents = two_launchers(script.__file__, script.__file__, *TWO,
                           *(f"--{name}={name}/*.bin" for name in patterns),
                           f"--records={tmp_path}/r", folders=folders)
    output = [agent.communicate(timeout=200)[0] for agent in agents]
    assert all(agent.returncode for agent in agents), output
    errors = re.findall("(?m)^error: .*", "".join(output))
    assert errors and all("data differ between machines" in line for line in errors), output
    assert not (tmp_path / "r").exists(), "nothing was begun"


@pytest.mark.both_scripts
def test_two_ranks_that_are_ended_resume_to_the_same_bits(tmp_path, shards, two, script):
    """By SIGTERM to torchrun alone, as a scheduler sends it, by SIGINT to all, as a terminal does,
    and by SIGKILL to one rank and to torchrun. After that no process is left, so that nothing else
    writes the log. The status and the report are torchrun's."""
    flags = [*TWO, *shards, f"--records={tmp_path}"]
    ends = [(signal.SIGTERM, "torchrun"), (signal.SIGINT, "all"), (signal.SIGKILL, "rank 1"),
            (signal.SIGKILL, "torchrun")]
    for (number, target), step in zip(ends, (5, 11, 17, 23)):
        begun = Process(*flags, ranks=2, script=script.__file__).wait_for(f"step:{step}/")
        workers = begun.workers()
        assert len(workers) == 2
        if target == "all":
            begun.signal(number)
        else:
            os.kill(workers[1] if target == "rank 1" else begun.process.pid, number)
        status, errors = begun.end(seconds=25)  # torchrun kills what has not ended after 30
        deadline = time.monotonic() + 10
        while not all(map(is_gone, workers.values())) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert all(map(is_gone, workers.values())), f"{target}: processes are left"
        if number == signal.SIGKILL:
            assert status == (-9 if target == "torchrun" else 1)
        else:
            assert status == 1
            assert_one_line_on_how_to_continue(errors, number, tmp_path)
        flags = [f"--resume={log_path(tmp_path)}"]
    launch(*flags, ranks=2, script=script.__file__)
    assert log_of(tmp_path).count("\nresumed: ") == 4
    assert_same_run(tmp_path, two)


def test_other_numbers_of_ranks_and_an_error_on_one_of_them(tmp_path, shards, whole):
    """A run of one rank is resumed on two, is ended by an error on rank 1 alone, which is printed,
    and is resumed on one."""
    log = broken_run(train_gpt, tmp_path, shards, step=5)
    script = planted(tmp_path, "require(step < 7 or world.rank == 0, 'planted error')")
    done = launch(f"--resume={log}", ranks=2, script=script, check=False)
    assert done.returncode == 1
    errors = [line for line in done.stderr.splitlines() if "planted error" in line]
    assert len(errors) == 1 and errors[0].startswith("error: "), done.stderr
    assert "rank 1 " in errors[0], done.stderr
    assert checkpoints(tmp_path) == ["step00000003.pt", "step00000006.pt"]
    train(train_gpt, f"--resume={log}")
    resumed = re.findall(r"^resumed: step (\d) at .* on (\d) rank", log_of(tmp_path), re.M)
    assert resumed == [("3", "2"), ("6", "1")]
    assert_same_losses(tmp_path, whole)


@pytest.mark.both_scripts
def test_a_log_has_one_writer(tmp_path, shards, script):
    """Resuming a run that is still alive is refused; the run itself is not disturbed."""
    begun = Process(*LONG, *shards, f"--records={tmp_path}", "--num_iterations=9999",
                    "--epochs=9999", script=script.__file__).wait_for("step:7/")
    for ranks in (None, 2):
        done = launch(f"--resume={log_path(tmp_path)}", ranks=ranks, script=script.__file__,
                      check=False)
        assert done.returncode, "refused"
        (error,) = re.findall("(?m)^error: .*", done.stderr)
        assert f"{log_path(tmp_path)} is still written by another process" in error
    begun.signal(signal.SIGTERM).end()
    numbers = [int(n) for n in re.findall(r"(?m)^step:(\d+)/9999 train_loss", log_of(tmp_path))]
    assert numbers == list(range(1, len(numbers) + 1)) and "\nresumed: " not in log_of(tmp_path)
    with before_step(script, len(numbers) + 9, break_off), pytest.raises(Broken):
        train(script, f"--resume={log_path(tmp_path)}")


def test_logs_of_one_second_take_the_next_free_name(tmp_path, shards, monkeypatch):
    class Frozen(datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2026, 1, 1, tzinfo=tz)

    monkeypatch.setattr(train_gpt, "datetime", Frozen)
    for _ in range(3):
        train(train_gpt, *TINY, *shards, "--num_iterations=1", f"--records={tmp_path}")
    logs = sorted(path.name for path in tmp_path.glob("*.log"))
    assert logs == [f"2026-01-01T00-00-0{second}Z_demo.log" for second in range(3)]
    for log in logs:
        assert (tmp_path / log).read_text().endswith(f"\nlog: {tmp_path / log}\n")


@pytest.mark.parametrize("environment", [
    {"WORLD_SIZE": "abc"}, {"RANK": "1"}, {"LOCAL_RANK": "-1"}, {"WORLD_SIZE": "0"},
    {"RANK": "0.5", "WORLD_SIZE": "2"}], ids=str)
def test_an_environment_that_makes_no_sense_is_one_line(shards, monkeypatch, environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for name, value in environment.items():
        with pytest.raises(UserError, match=f"'{name}': '{value}'.*start with torchrun") as raised:
            train(train_gpt, *TINY, *shards, "--check")
        assert "\n" not in str(raised.value)


# --------------------------------------------------------------------------------------------------
# Damaged files

class Harmful:
    """What a pickle would do if it were allowed to."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_damaged_checkpoint_is_one_line_and_loses_nothing(tmp_path, shards, whole):
    log = broken_run(train_gpt, tmp_path, shards)
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
        "a pickle that acts": {"progress": {}, "facts": {}, "model": Harmful(harmless)},
    }
    for damage in (*damages, *pickles):
        if damage in damages:
            newest.write_bytes(damages[damage])
        else:
            torch.save(pickles[damage], newest)
        before = contents(tmp_path)
        with pytest.raises(UserError, match=f"^{newest} .*damaged.*delete") as e:
            train(train_gpt, f"--resume={log}")
        assert "\n" not in str(e.value) and contents(tmp_path) == before, damage
    assert not harmless.exists()
    newest.unlink()
    train(train_gpt, f"--resume={log}")
    assert "\nresumed: step 3 at " in log_of(tmp_path)
    assert_same_run(tmp_path, whole)


def test_a_finished_run_whose_newest_checkpoint_is_damaged_repeats_its_end(tmp_path, shards, whole):
    """As the error says: delete it to continue from the one before it."""
    train(train_gpt, *RUN, *shards, f"--records={tmp_path}")
    newest = log_path(tmp_path).with_suffix("") / "step00000012.pt"
    os.truncate(newest, 5000)
    with pytest.raises(UserError, match="delete it to continue from the one before it"):
        train(train_gpt, f"--resume={log_path(tmp_path)}")
    newest.unlink()
    train(train_gpt, f"--resume={log_path(tmp_path)}")
    assert_same_run(tmp_path, whole)


WEIGHTS = torch.arange(300.0)


@settings(max_examples=300, deadline=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_damage_to_a_checkpoint_changes_what_is_read(tmp_path, data):
    """Cut at any byte, a flipped bit, a run of zeros, or anything appended: it is refused in one
    line, or the damage lies where nothing is read."""
    path = tmp_path / "step00000003.pt"
    facts = {"progress": {"step": 3}, "facts": {"name": "a"}}
    torch.save(facts | {"model": {"w": WEIGHTS}}, path)
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
    shard of tokens in range."""
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
        (shard,) = train_gpt.find_shards(path)
        tokens = train_gpt.read_tokens(path, 0, shard.tokens, 257)
    except UserError as e:
        assert path in str(e) and "\n" not in str(e)
    else:
        header = train_gpt.np.array([20240520, 1, shard.tokens], dtype="<i4").tobytes()
        assert shard.path == path and content[:12] == header
        assert len(content) == 1024 + 2 * shard.tokens
        assert len(tokens) == shard.tokens and tokens.to(torch.int32).max() < 257


# --------------------------------------------------------------------------------------------------
# Disks and consoles

class SmallDisk:
    """A folder on a file system that can be filled up and freed: a small tmpfs where one can be
    mounted, else an ordinary folder and a limit on the size of files."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)]
        self.mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0

    def fill(self, room: int):
        """Leaves this many bytes; for 0, not even the rest of the log's last page of memory."""
        if self.mounted:
            free = os.statvfs(self.folder).f_bavail * os.statvfs(self.folder).f_frsize
            (self.folder / "ballast").write_bytes(bytes(free - room))
        if room == 0 or not self.mounted:
            limit = max(path.stat().st_size for path in self.folder.glob("*.log")) + room
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

    def free(self):
        (self.folder / "ballast").unlink(missing_ok=True)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)


@pytest.fixture
def small_disk(tmp_path):
    disk = SmallDisk(tmp_path / "disk")
    yield disk
    disk.free()
    if disk.mounted:
        subprocess.run(["umount", "-l", str(disk.folder)], check=True)


ROOMS = {"the checkpoints": 200_000, "the log as well": 0}


@pytest.mark.both_scripts
@pytest.mark.parametrize("what", ROOMS)
def test_a_run_goes_through_a_disk_that_is_full_for_a_while(small_disk, shards, whole, script,
                                                           capsys, what):
    """Full from step 2 to step 8: the saves of steps 3 and 6 fail, those of 9 and 12 are made, and
    the log has every line in the end."""
    with (before_step(script, 2, lambda: small_disk.fill(ROOMS[what])),
          before_step(script, 8, small_disk.free)):
        train(script, *RUN, *shards, f"--records={small_disk.folder}")
    assert_same_run(small_disk.folder, whole)
    assert checkpoints(small_disk.folder) == ["step00000009.pt", "step00000012.pt"]
    warnings = re.findall("(?m)^warning: .*", after_the_source(small_disk.folder))
    assert len(warnings) == 2 and "step00000003.pt not saved" in warnings[0]
    assert "step00000006.pt not saved" in warnings[1]
    console = capsys.readouterr().out
    on_the_log = re.findall(r"(?m)^warning: \S+\.log cannot be written .*", console)
    if what == "the checkpoints":
        assert all(re.search("No space left|File too large", w) for w in warnings), warnings
        assert not on_the_log
    else:
        assert len(on_the_log) == 1 and re.search("No space left|File too large", on_the_log[0])


@pytest.mark.parametrize("what", ROOMS)
def test_a_disk_that_stays_full_is_an_error_at_the_end(small_disk, shards, whole, what):
    """The run has trained to its end, and what was saved before is whole."""
    with before_step(train_gpt, 8, lambda: small_disk.fill(ROOMS[what])):
        with pytest.raises(UserError, match="the run is complete, but .* could not be saved"):
            train(train_gpt, *RUN, *shards, f"--records={small_disk.folder}")
    kept = [name for name in checkpoints(small_disk.folder) if name.startswith("step")]
    assert kept == ["step00000003.pt", "step00000006.pt"]
    if what == "the checkpoints":
        assert steps(small_disk.folder) == steps(whole)
    small_disk.free()
    train(train_gpt, f"--resume={log_path(small_disk.folder)}")
    assert_same_run(small_disk.folder, whole)


def test_a_last_save_that_fails_is_status_2(tmp_path, shards, whole):
    """In a process of its own, with a limit on the size of files."""
    limited = tmp_path / "limited.py"
    limited.write_text("import resource, runpy\n"
                       "resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))\n"
                       f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n")
    done = launch(*RUN, *shards, f"--records={tmp_path}", script=limited, check=False)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("error: the run is complete, but"), done.stderr
    assert done.stdout.count("\nwarning: ") == 4 and "File too large" in done.stdout
    assert steps(tmp_path) == steps(whole)


def test_a_records_folder_that_vanishes_does_not_end_a_run(tmp_path, shards, whole):
    """Its checkpoints cannot be saved until it is there again."""
    records, away = tmp_path / "records", tmp_path / "away"
    with (before_step(train_gpt, 5, lambda: records.rename(away)),
          before_step(train_gpt, 8, lambda: away.rename(records))):
        train(train_gpt, *RUN, *shards, f"--records={records}")
    assert_same_run(records, whole)
    assert "step00000006.pt not saved (" in log_of(records)


@pytest.mark.both_scripts
def test_what_cannot_be_saved_nor_cleared_away_does_not_end_a_run(tmp_path, shards, whole, script):
    """Here a file is in the place of the folder for checkpoints. A disk that has become read-only
    fails alike: nothing can be written there, and nothing removed."""
    def block():
        log_path(tmp_path).with_suffix("").write_text("no folder")

    with (before_step(script, 2, block),
          before_step(script, 8, lambda: log_path(tmp_path).with_suffix("").unlink())):
        train(script, *RUN, *shards, f"--records={tmp_path}")
    assert_same_run(tmp_path, whole)
    assert checkpoints(tmp_path) == ["step00000009.pt", "step00000012.pt"]
    assert "step00000006.pt not saved (" in log_of(tmp_path)


CONSOLES = {
    "a pipe that closes": "| head -3 > {0}/seen",
    "full": "> /dev/full 2> {0}/errors",
    "closed": ">&- 2>&-",
    "no errors either": "> /dev/full 2> /dev/full",
}


@pytest.mark.both_scripts
@pytest.mark.parametrize("console", CONSOLES)
def test_a_run_needs_no_console(tmp_path, shards, whole, script, console):
    flags = [*RUN, *shards, f"--records={tmp_path}/r"]
    words = " ".join(f"'{word}'" for word in command(*flags, script=script.__file__))
    done = subprocess.run(["bash", "-o", "pipefail", "-c",
                           f"{words} {CONSOLES[console].format(tmp_path)}"], env=ENVIRONMENT,
                          capture_output=True, text=True, timeout=200)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert_same_run(tmp_path / "r", whole)
    assert after_the_source(tmp_path / "r").endswith(f"\nlog: {log_path(tmp_path / 'r')}\n")
    for path in ("seen", "errors"):
        if (tmp_path / path).exists():
            assert len((tmp_path / path).read_text().splitlines()) == (3 if path == "seen" else 0)


def test_a_console_that_goes_away_in_the_middle_does_not_end_a_run(tmp_path, shards, whole):
    begun = Process(*RUN, *shards, f"--records={tmp_path}").wait_for("step:4/")
    begun.process.stdout.close()
    errors = begun.process.stderr.read()
    assert begun.process.wait(60) == 0 and errors == "", errors
    assert_same_run(tmp_path, whole)


# --------------------------------------------------------------------------------------------------
# Data that go wrong during a run

def test_a_loss_that_is_not_finite_keeps_the_checkpoint_before_it(tmp_path, shards, whole,
                                                                  monkeypatch):
    train_step = train_gpt.train_step

    def poisoned(model, batches, optimizers, step, hp, world):
        loss = train_step(model, batches, optimizers, step, hp, world)
        return loss * float("nan") if step == 7 else loss

    with monkeypatch.context() as patch:
        patch.setattr(train_gpt, "train_step", poisoned)
        with pytest.raises(UserError, match=r"^step 8: .*train.loss is nan"):
            train(train_gpt, *RUN, *shards, f"--records={tmp_path}")
    assert "\nstep:8/12 train_loss:nan " in log_of(tmp_path)
    assert checkpoints(tmp_path) == ["step00000003.pt", "step00000006.pt"]
    train(train_gpt, f"--resume={log_path(tmp_path)}")
    assert_same_run(tmp_path, whole)


@pytest.mark.both_scripts
def test_weights_that_are_not_finite_are_not_saved(tmp_path, shards, script, monkeypatch):
    """Here the last step before a save makes them; its loss was computed before."""
    train_step = script.train_step

    def poisoned(model, batches, optimizers, step, hp, world):
        loss = train_step(model, batches, optimizers, step, hp, world)
        if step == 5:
            next(model.parameters()).data[0] = float("inf")
        return loss

    monkeypatch.setattr(script, "train_step", poisoned)
    with pytest.raises(script.UserError, match=r"^step [67]: .*loss is "):
        train(script, *RUN, *shards, f"--records={tmp_path}", "--val_loss_every=0")
    assert checkpoints(tmp_path) == ["step00000003.pt"]
    assert "step00000006.pt not saved (weights are not finite)" in log_of(tmp_path)


@pytest.mark.parametrize("damage, message", [
    (lambda path: path.unlink(), "x_train_2.bin cannot be opened: No such file"),
    (lambda path: os.truncate(path, 1500), "x_train_2.bin .*shorter"),
    (lambda path: path.write_bytes(b"\xff" * path.stat().st_size), "x_train_2.bin .*token 65535"),
], ids=["vanishes", "shrinks", "is overwritten"])
def test_a_shard_that_changes_during_the_run_is_one_line(tmp_path, shards, damage, message):
    """What was saved before is whole, and the run resumes when the shard is there again."""
    paths = [Path(write_shard(tmp_path / f"x_train_{number}.bin", [256, *range(number, 250)] * 9))
             for number in range(3)]
    good = paths[2].read_bytes()
    records = tmp_path / "r"
    with before_step(train_gpt, 8, lambda: damage(paths[2])):
        with pytest.raises(UserError, match=message) as raised:
            train(train_gpt, *RUN, *shards, "--epochs=1", f"--records={records}",
                  f"--train_files={tmp_path}/x_train_*.bin")
    assert "\n" not in str(raised.value)
    assert checkpoints(records) == ["step00000003.pt", "step00000006.pt"]
    with pytest.raises(UserError, match=r"x_train|--num_iterations"):
        train(train_gpt, f"--resume={log_path(records)}")
    paths[2].write_bytes(good)
    train(train_gpt, f"--resume={log_path(records)}")
    assert len(losses(log_of(records), "train_loss")) == 12
    assert "\nchanged: " not in after_the_source(records)
