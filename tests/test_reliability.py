"""What must not lose a run: checkpoints and --resume, kills, signals, deterministic ranks, ranks and launchers that die."""

import fcntl
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, TINY, launch, losses
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import train_gpt
from train_gpt import UserError, read_checkpoint, run, tree_sum, write_checkpoint

ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")} | {
    "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
RUN = [*TINY, "--num_iterations=12", "--val_loss_every=4", "--save_every=3", "--micro_batches=2"]


@pytest.fixture(autouse=True)
def one_thread():
    before, handlers = torch.get_num_threads(), [(s, signal.getsignal(s)) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    torch.use_deterministic_algorithms(False)
    for number, handler in handlers:
        signal.signal(number, handler)


def log_path(folder) -> Path:
    (path,) = Path(folder).glob("*.log")
    return path


def steps(folder) -> list[str]:
    """The log's step lines without their times."""
    return [re.sub(r" train_time:\S+ step_avg:\S+", "", line) for line in log_path(folder).read_text().splitlines()
            if line.startswith("step:")]


def weights(folder) -> dict:
    (path,) = Path(folder).glob("*/model.pt")
    return read_checkpoint(path)["model"]


def assert_same_run(folder, other):
    assert steps(folder) == steps(other)
    theirs = weights(other)
    for name, tensor in weights(folder).items():
        assert torch.equal(tensor, theirs[name]), name


def checkpoints(folder) -> list[str]:
    return sorted(path.name for path in Path(folder).glob("*/step*"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory, shards):
    """An uninterrupted run of RUN."""
    folder = tmp_path_factory.mktemp("whole")
    torch.set_num_threads(1)
    run([*RUN, *shards, f"--records={folder}"])
    return folder


def stop_at(step: int, monkeypatch, number=signal.SIGTERM, times: int = 1):
    """Send a signal while that step is under way."""
    train_step = train_gpt.train_step

    def interrupted(*args):
        if args[5] == step - 1:
            os.kill(os.getpid(), number)
        return train_step(*args)

    monkeypatch.setattr(train_gpt, "train_step", interrupted)


# ----------------------------------------------------------------------------------------------------------------------
# Checkpoints and --resume


def test_checkpoints_hold_all_that_decides_the_rest(whole):
    assert checkpoints(whole) == ["step00000009.pt", "step00000012.pt"], "the two newest are kept"
    path = next(whole.glob("*/step00000009.pt"))
    payload = torch.load(path, weights_only=True)
    names = set(payload["model"])
    assert set(payload["exp_avg"]) == set(payload["exp_avg_sq"]) == names - set(payload["momentum"])
    assert set(payload["momentum"]) == set(payload["row_squares"]) == {name for name in names if name.startswith("blocks.")}
    assert all(t.any() for kind in train_gpt.STATE for n, t in payload[kind].items() if "value_mix" not in n)
    assert payload["step"] == 9 and payload["seconds"] > 0 and payload["hyperparameters"]["seed"] == 1
    data = train_gpt.check_data(train_gpt.Hyperparameters(**payload["hyperparameters"]))
    hp = train_gpt.Hyperparameters(**payload["hyperparameters"])
    assert payload["position"] == train_gpt.TrainLoader(data["train"], data["spans"], hp, 0, 1, torch.device("cpu"), 9).position == (2, 1)
    assert f"checkpoint: {path}, saved in " in log_path(whole).read_text()


@pytest.mark.parametrize("step, number", [(3, signal.SIGTERM), (5, signal.SIGINT), (8, signal.SIGHUP), (12, signal.SIGTERM)])
def test_a_signal_saves_and_resuming_gives_the_same_bits(tmp_path, shards, whole, monkeypatch, step, number):
    with monkeypatch.context() as patch:
        stop_at(step, patch, number)
        with pytest.raises(UserError, match=rf"stopped by {signal.Signals(number).name}; step {step} is saved") as caught:
            run([*RUN, *shards, f"--records={tmp_path}"])
    assert caught.value.status == 128 + number and f"step{step:08}.pt" in checkpoints(tmp_path)
    before = log_path(tmp_path).read_text()
    run([*RUN, *shards, f"--records={tmp_path}", "--resume"])
    assert_same_run(tmp_path, whole)
    log = log_path(tmp_path).read_text()
    assert log.count(f"\nresumed: step {step} at ") == 1 and "stopped by" not in log.split(train_gpt.SEPARATOR)[-1]
    seconds = [float(t) for t in re.findall(r"train_time:(\d+)ms", log)]
    assert seconds == sorted(seconds), "the clock goes on from where it was"
    assert log.startswith(before[:before.rindex("\nstep:")])


def stopped_at_5(folder, shards, monkeypatch):
    """A run that a signal stopped: its checkpoint's path and content."""
    with monkeypatch.context() as patch:
        stop_at(5, patch)
        with pytest.raises(UserError, match="step 5 is saved"):
            run([*RUN, *shards, f"--records={folder}"])
    path = next(folder.glob("*/step00000005.pt"))
    return path, read_checkpoint(path)


def test_a_checkpoint_from_before_normuon_resumes(tmp_path, shards, monkeypatch):
    path, payload = stopped_at_5(tmp_path, shards, monkeypatch)
    del payload["row_squares"]
    write_checkpoint(path, payload)
    run([*RUN, *shards, f"--records={tmp_path}", "--resume"])
    assert "\nfinal_val_loss: " in log_path(tmp_path).read_text()


def test_training_time_goes_on_from_the_checkpoints(tmp_path, shards, monkeypatch):
    path, payload = stopped_at_5(tmp_path, shards, monkeypatch)
    write_checkpoint(path, dict(payload, seconds=payload["seconds"] + 1000))
    run([*RUN, *shards, f"--records={tmp_path}", "--resume"])
    times = [int(t) for t in re.findall(r"step:\d+/12 train_loss\S+ train_time:(\d+)ms", log_path(tmp_path).read_text())]
    assert max(times[:5]) < 1e6 < min(times[5:])


def interrupted_run(folder, shards, monkeypatch, step=7, *flags):
    with monkeypatch.context() as patch:
        stop_at(step, patch)
        with pytest.raises(UserError, match="stopped by"):
            run([*RUN, *shards, f"--records={folder}", *flags])


def test_a_damaged_newest_checkpoint_is_passed_over(tmp_path, shards, whole, monkeypatch, capsys):
    interrupted_run(tmp_path, shards, monkeypatch)
    newest = next(tmp_path.glob("*/step00000007.pt"))
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 4
    newest.write_bytes(content)
    run([*RUN, *shards, f"--records={tmp_path}", "--resume"])
    said = capsys.readouterr().out
    assert "step00000007.pt: is damaged" in said and "its checksum is wrong" in said and "resumed: step 6 at " in said
    assert_same_run(tmp_path, whole)
    assert checkpoints(tmp_path) == ["step00000007.set_aside", "step00000009.pt", "step00000012.pt"]


def test_where_every_checkpoint_is_damaged_nothing_is_said_to_go_on(tmp_path, shards, monkeypatch):
    interrupted_run(tmp_path, shards, monkeypatch)
    for path in tmp_path.glob("*/step*.pt"):
        path.write_bytes(path.read_bytes()[:1000])
    folder = log_path(tmp_path).with_suffix("")
    with pytest.raises(UserError, match=r"step00000007.pt: is damaged.*step00000006.pt: is damaged.* has no checkpoint") as raised:
        run([*RUN, *shards, f"--records={tmp_path}", f"--resume={folder}"])
    assert "going on" not in str(raised.value)


def test_resuming_from_a_path(tmp_path, shards, whole, monkeypatch):
    """A log, its folder, or a checkpoint that is not the newest."""
    for kind in ("log", "folder", "checkpoint"):
        records = tmp_path / kind
        interrupted_run(records, shards, monkeypatch)
        log = log_path(records)
        path = {"log": log, "folder": log.with_suffix(""), "checkpoint": log.with_suffix("") / "step00000006.pt"}[kind]
        run([*RUN, *shards, f"--records={records}", f"--resume={path}"])
        assert f"resumed: step {6 if kind == 'checkpoint' else 7} at" in log.read_text()
        assert_same_run(records, whole)


def test_the_newest_unfinished_run_of_these_settings_is_taken(tmp_path, shards, monkeypatch):
    class Clock(train_gpt.datetime):
        minute = 0

        @classmethod
        def now(cls, tz=None):
            return cls(2026, 1, 1, 0, Clock.minute, tzinfo=tz)

    monkeypatch.setattr(train_gpt, "datetime", Clock)
    for Clock.minute, flags in enumerate((["--seed=1"], ["--seed=1"], ["--seed=1", "--muon_lr=0.02"], ["--name=other"])):
        interrupted_run(tmp_path, shards, monkeypatch, 5, *flags)
    run([*RUN, *shards, f"--records={tmp_path}", "--resume"])
    finished = [path.name for path in sorted(tmp_path.glob("*.log")) if "final_val_loss" in path.read_text().split(train_gpt.SEPARATOR)[-1]]
    assert finished == ["2026-01-01T00-01-00Z_demo.log"]


def test_a_newer_run_is_not_passed_over_unless_its_settings_differ(tmp_path, shards, whole, monkeypatch):
    interrupted_run(tmp_path, shards, monkeypatch)
    resume, old = [*RUN, *shards, f"--records={tmp_path}", "--resume"], log_path(tmp_path)
    newer = old.with_name("2999-01-01T00-00-00Z_demo.log")  # ended before its first checkpoint
    newer.write_text(old.read_text())
    with pytest.raises(UserError, match=f"{newer}: this run has no whole checkpoint to go on from; start it anew, or name an older"):
        run(resume)
    newer.write_text(old.read_text().replace("muon_lr = 0.045\n", "muon_lr = 0.02\n", 1))
    with open(newer) as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # another run, and alive
        run(resume)
    newer.unlink()
    assert_same_run(tmp_path, whole)


def test_a_checkpoint_that_is_not_there_or_past_the_end_is_refused(tmp_path, shards, monkeypatch):
    interrupted_run(tmp_path, shards, monkeypatch)
    resume, folder = [*RUN, *shards, f"--records={tmp_path}"], log_path(tmp_path).with_suffix("")
    with pytest.raises(UserError, match="step00000099.pt is not there"):
        run([*resume, f"--resume={folder}/step00000099.pt"])
    with pytest.raises(UserError, match="step00000007.pt is past --num_iterations=5"):
        run([*resume, "--resume", "--resume_anyway", "--num_iterations=5"])
    monkeypatch.chdir(folder)
    with pytest.raises(UserError, match="past --num_iterations=5"):
        run([*resume, "--resume=.", "--resume_anyway", "--num_iterations=5"])


def test_a_signal_during_a_validation_saves_at_once(tmp_path, shards, whole, monkeypatch):
    evaluate = train_gpt.evaluate

    def interrupted(*args):
        if len(args) == 6:  # the warmup's has no signal to look at
            os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(*args)

    with monkeypatch.context() as patch:
        patch.setattr(train_gpt, "evaluate", interrupted)
        with pytest.raises(UserError, match="stopped by SIGTERM; step 0 is saved"):
            run([*RUN, *shards, f"--records={tmp_path}"])
    assert not steps(tmp_path) and checkpoints(tmp_path) == ["step00000000.pt"]
    run([*RUN, *shards, f"--records={tmp_path}", "--resume"])
    assert_same_run(tmp_path, whole)


def test_what_differs_is_named_and_needs_resume_anyway(tmp_path, shards, monkeypatch):
    interrupted_run(tmp_path, shards, monkeypatch)
    resume = [*RUN, *shards, f"--records={tmp_path}", "--resume"]
    with pytest.raises(UserError, match=r"--windows was LSSL and is LLSL; --muon_lr was 0.045 and is 0.04. .* --resume_anyway"):
        run([*resume, "--muon_lr=0.04", "--windows=LLSL"])
    with pytest.raises(UserError, match="a model of another shape: --model_dim was 32 and is 48"):
        run([*resume, "--model_dim=48", "--resume_anyway"])
    with monkeypatch.context() as patch:
        other = tmp_path / "other.py"
        other.write_text(Path(train_gpt.__file__).read_text() + "\n# tweaked\n")
        patch.setattr(train_gpt, "__file__", str(other))
        with pytest.raises(UserError, match="this script is not the one in the log"):
            run(resume)
    first = next(Path(shards[0].split("=")[1]).parent.glob("t_train_000001.bin"))
    (tmp_path / "t_train_000001.bin").write_bytes(first.read_bytes())
    with pytest.raises(UserError, match=r"--train_files was .* and is .*; the data was .*t_train_000001.bin"):
        run([*resume, f"--train_files={tmp_path}/t_train_*.bin"])
    log = log_path(tmp_path).read_text()
    assert "resumed" not in log.split(train_gpt.SEPARATOR)[-1], "nothing that was refused has touched the log"
    run([*resume, "--muon_lr=0.04", "--resume_anyway"])
    log = log_path(tmp_path).read_text()
    assert "note: resumed although --muon_lr was 0.045 and is 0.04" in log and "step:12/12 val_loss" in log


def test_names_like_file_names_and_an_empty_records_folder(tmp_path, shards, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("demo.log", "demo.pt", "demo"):
        interrupted_run("", shards, monkeypatch, 2, f"--name={name}")
    flags = [*RUN, *shards, "--records=", "--num_iterations=2", "--resume_anyway"]
    run([*flags, "--resume"])
    for name in ("demo.log", "demo.pt"):
        (folder,) = (path for path in tmp_path.glob(f"*_{name}") if path.is_dir())
        run([*flags, f"--name={name}", f"--resume={folder.name}"])
    with pytest.raises(UserError, match="--resume: / is not there"):
        run([*flags, "--resume=/"])
    with pytest.raises(UserError, match=r"--resume: .*xxx.* cannot be read \(File name too long\)"):
        run([*flags, f"--resume={'x' * 300}"])
    assert all("\nfinal_val_loss: " in path.read_text() for path in tmp_path.glob("*.log") if path.is_file())
    assert len([path for path in tmp_path.glob("*_demo*") if path.is_file()]) == 3


def test_resume_refuses_live_finished_and_missing_runs(tmp_path, shards, whole, monkeypatch):
    with pytest.raises(UserError, match=f"a run named demo in {tmp_path} is not there, is finished or has no checkpoint"):
        run([*RUN, *shards, f"--records={tmp_path}", "--resume"])
    with pytest.raises(UserError, match="is finished or has no checkpoint"):
        run([*RUN, *shards, f"--records={whole}", f"--resume={log_path(whole)}"])
    with pytest.raises(UserError, match=f"--resume: {tmp_path}/none is not there"):
        run([*RUN, *shards, f"--records={tmp_path}", f"--resume={tmp_path}/none"])
    interrupted_run(tmp_path, shards, monkeypatch)
    log = log_path(tmp_path)
    before = log.read_bytes()
    with open(log) as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="this run is alive"):
            run([*RUN, *shards, f"--records={tmp_path}", "--resume"])
    assert log.read_bytes() == before
    os.truncate(log, 1000)
    with pytest.raises(UserError, match="was cut to before step00000007.pt"):
        run([*RUN, *shards, f"--records={tmp_path}", "--resume"])


def test_a_signal_saves_although_nobody_reads_the_console_any_more(tmp_path, shards):
    with subprocess.Popen([sys.executable, "-u", ROOT / "train_gpt.py", *RUN, *shards, f"--records={tmp_path}", "--num_iterations=100000",
                           "--epochs=1000000"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT) as process:
        while not process.stdout.readline().startswith("step:3/"):
            assert process.poll() is None
        process.stdout.close()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 128 + signal.SIGINT
    last = steps(tmp_path)[-1].split("/")[0].removeprefix("step:")
    assert checkpoints(tmp_path)[-1] == f"step{int(last):08}.pt"


def test_a_run_holds_the_lock_on_its_log(tmp_path, shards, monkeypatch):
    evaluate, free = train_gpt.evaluate, []

    def looking(*args):
        for log in tmp_path.glob("*.log"):
            with open(log) as file:
                free.append(train_gpt.lock(file))
        return evaluate(*args)

    monkeypatch.setattr(train_gpt, "evaluate", looking)
    run([*RUN, *shards, f"--records={tmp_path}"])
    assert free and not any(free)


def test_kills_at_every_place_and_at_random(tmp_path, shards):
    """At least 10 kills at chosen places (in a step, a validation, a saving) and up to 12 at random times, each resumed: the run
    ends as the uninterrupted one, step for step and bit for bit."""
    flags = [*TINY, *shards, "--num_iterations=60", "--val_loss_every=4", "--save_every=3", "--micro_batches=2"]
    run([*flags, f"--records={tmp_path}/whole"])
    done = subprocess.run([sys.executable, ROOT / "tests" / "killed_runs.py", tmp_path / "killed", "12", *flags, f"--records={tmp_path}/killed"],
                          capture_output=True, text=True, env=ENVIRONMENT, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    kills = json.loads(done.stdout.splitlines()[-1])
    assert sum(kills.values()) >= 12, kills
    assert_same_run(tmp_path / "killed", tmp_path / "whole")
    numbers = [int(line.split(":")[1].split("/")[0]) for line in steps(tmp_path / "killed") if "train_loss" in line]
    assert numbers == list(range(1, 61)), "no step is missing and none is there twice"
    assert sorted(p.name for p in tmp_path.glob("killed/*/*")) == ["model.pt", "step00000057.pt", "step00000060.pt"]


# ----------------------------------------------------------------------------------------------------------------------
# Damaged files

CHECKPOINT = {"step": 3, "model": {"w": torch.arange(300.0)}, "hyperparameters": {"name": "x"}}


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_damage_to_a_checkpoint_goes_unnoticed(tmp_path, data):
    """Cut at any byte, a flipped bit, a run of zeros, or anything appended: refused in one line, whatever torch.load thinks of it."""
    path = tmp_path / "step00000003.pt"
    write_checkpoint(path, CHECKPOINT)
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    match data.draw(st.sampled_from(["cut", "flip", "zero", "append"])):
        case "cut":
            del content[at:]
        case "flip":
            content[at] ^= 1 << data.draw(st.integers(0, 7))
        case "zero":
            span = slice(at, at + data.draw(st.integers(1, 600)))
            if not any(content[span]):
                content[span.start] = 255
            else:
                content[span] = bytes(len(content[span]))
        case "append":
            content += data.draw(st.binary(min_size=1, max_size=64))
    path.write_bytes(content)
    with pytest.raises(UserError, match="is damaged") as caught:
        read_checkpoint(path)
    assert "\n" not in str(caught.value)


def test_a_foreign_file_is_no_checkpoint(tmp_path):
    path = tmp_path / "step00000001.pt"
    write_checkpoint(path, CHECKPOINT)
    assert torch.equal(read_checkpoint(path)["model"]["w"], torch.arange(300.0))
    for content in (b"", b"x" * 31, b"x" * 32, b"x" * 4000):
        path.write_bytes(content)
        with pytest.raises(UserError, match="is damaged, or no checkpoint"):
            read_checkpoint(path)
    torch.save(CHECKPOINT, path)
    with pytest.raises(UserError, match="its checksum is wrong"):
        read_checkpoint(path)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_shard_is_refused_or_still_a_shard(tmp_path, data):
    """Whatever happens to a shard's bytes, it is refused in one line, or what is left is a right shard of tokens in range."""
    tokens = [256, *range(250)] * 5
    from conftest import write_shard
    path = write_shard(tmp_path / "s.bin", tokens)
    content = bytearray(Path(path).read_bytes())
    at = data.draw(st.integers(0, len(content) - 1) | st.integers(0, 16))
    match data.draw(st.sampled_from(["cut", "flip", "overwrite", "append"])):
        case "cut":
            del content[at:]
        case "flip":
            content[at] ^= 1 << data.draw(st.integers(0, 7))
        case "overwrite":
            new = data.draw(st.binary(min_size=1, max_size=16))
            content[at:at + len(new)] = new
        case "append":
            content += data.draw(st.binary(min_size=1, max_size=16))
    Path(path).write_bytes(content)
    try:
        count = train_gpt.check_shard(path, 257)
    except UserError as e:
        assert path in str(e) and "\n" not in str(e)
    else:
        assert content[:12] == train_gpt.np.array([20240520, 1, count], dtype="<i4").tobytes() and len(content) == 1024 + 2 * count
        assert train_gpt.read_tokens(path, count).to(torch.int32).max() < 257


# ----------------------------------------------------------------------------------------------------------------------
# Deterministic ranks


@pytest.mark.parametrize("leaves", [1, 2, 3, 6, 8, 12, 16])
def test_tree_sum_does_not_depend_on_how_terms_are_dealt(leaves):
    generator = torch.Generator().manual_seed(leaves)
    terms = [[torch.randn(50, generator=generator) * 10 ** i, torch.randn(3, generator=generator)] for i in range(leaves)]
    alone = tree_sum(terms)
    torch.testing.assert_close(alone[0], torch.stack([t[0] for t in terms]).sum(0))
    for share in (1, 2, 4, 8, 16):
        if leaves % share == 0:
            dealt = tree_sum(tree_sum(terms[i:i + share]) for i in range(0, leaves, share))
            assert all(map(torch.equal, alone, dealt)), share
    if leaves == 16:
        assert not torch.equal(alone[0], sum(t[0] for t in terms)), "a plain sum has other last bits, so this test can fail"


def test_deterministic_ranks_give_the_same_bits(tmp_path, shards):
    """1, 2, 4 and 8 ranks, losses and weights; 3 validation sequences, which none of the larger numbers divides."""
    flags = [*TINY, *shards, "--deterministic", "--micro_batches=8", "--num_iterations=5", "--val_seq_len=384"]
    run([*flags, f"--records={tmp_path}/1"])
    for ranks in (2, 4, 8):
        launch(*flags, f"--records={tmp_path}/{ranks}", ranks=ranks)
        assert f"\nranks: {ranks}\n" in log_path(tmp_path / str(ranks)).read_text()
        assert_same_run(tmp_path / str(ranks), tmp_path / "1")


# ----------------------------------------------------------------------------------------------------------------------
# Processes that die


class Torchrun:
    """A run under torchrun whose processes are at hand."""

    def __init__(self, ranks: int, *flags):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", ROOT / "train_gpt.py", *flags],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT)

    def wait_for(self, text: str):
        self.output = ""
        for line in self.process.stdout:
            self.output += line
            if text in line:
                return self
        raise AssertionError(f"ended before {text!r}:\n{self.output}")

    def workers(self) -> dict[int, int]:
        """{rank: process id}"""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        environments = {int(pid): Path(f"/proc/{pid}/environ").read_text() for pid in children}
        return {int(re.search(r"\0RANK=(\d+)", text)[1]): pid for pid, text in environments.items() if "\0RANK=" in text}

    def end(self, pids, seconds: float = 60) -> str:
        """All of the output, once the launcher and these processes have ended, which they must within a minute."""
        deadline = time.monotonic() + seconds
        while any(Path(f"/proc/{pid}").exists() for pid in pids):
            assert time.monotonic() < deadline, f"processes {pids} are still there"
            time.sleep(0.05)
        self.output += self.process.stdout.read()
        self.process.wait(timeout=60)
        return self.output


def test_launcher_and_workers_that_are_killed(tmp_path, shards):
    """A run of 2 deterministic ranks whose rank 1, rank 0 and launcher are killed in turn at random points: the rest ends within a
    minute and says why; resumed on 2, 1 and 4 ranks in turn, it ends in the same bits as one that nothing happened to."""
    flags = [*TINY, *shards, "--deterministic", "--micro_batches=4", "--num_iterations=100", "--val_loss_every=20", "--save_every=5"]
    run([*flags, f"--records={tmp_path}/whole"])
    chance, flags = random.Random(5), [*flags, f"--records={tmp_path}/killed"]
    begun = Torchrun(2, *flags).wait_for(f"step:{chance.randint(12, 40)}/")
    workers = begun.workers()
    os.kill(workers[1], signal.SIGKILL)
    said = begun.end(workers.values())
    assert begun.process.returncode == 1 and re.search(r"rank 0 (lost contact with another rank|ends, since rank 1 has)", said), said
    assert "met a defect" not in said

    begun = Torchrun(2, *flags, "--resume").wait_for(f"step:{chance.randint(45, 60)}/")
    workers = begun.workers()
    os.kill(workers[0], signal.SIGKILL)
    said = begun.end(workers.values())
    assert begun.process.returncode == 1 and re.search(r"rank 1 (lost contact with another rank|ends, since rank 0 has)", said), said

    begun = Torchrun(2, *flags, "--resume").wait_for(f"step:{chance.randint(65, 80)}/")
    workers = begun.workers()
    begun.process.kill()
    said = begun.end(workers.values())
    assert "stopped by SIGTERM; step " in said, "the workers notice that their launcher has gone, and save"

    launch(*flags, "--resume", ranks=4)
    assert_same_run(tmp_path / "killed", tmp_path / "whole")
    log = log_path(tmp_path / "killed").read_text()
    assert 1 <= log.count("\nresumed: ") <= 3 and " on 4 rank(s)" in log


def test_a_signal_to_the_launcher_saves_and_a_second_one_ends_at_once(tmp_path, shards):
    flags = [*TINY, *shards, f"--records={tmp_path}", "--num_iterations=3000", "--epochs=9999", "--micro_batches=2"]
    begun = Torchrun(2, *flags).wait_for("step:5/")
    workers = begun.workers()
    begun.process.terminate()
    said = begun.end(workers.values())
    step = re.search(r"stopped by SIGTERM; step (\d+) is saved, the same command with --resume goes on", said)
    assert step and said.count("stopped by") == 1 and "train_gpt.py\", line" not in said, said
    assert checkpoints(tmp_path) == [f"step{int(step[1]):08}.pt"]
    alone = subprocess.Popen([sys.executable, ROOT / "train_gpt.py", *flags, "--resume"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                             text=True, env=ENVIRONMENT)
    for line in alone.stdout:
        if f"step:{int(step[1]) + 2}/" in line:
            break
    os.kill(alone.pid, signal.SIGSTOP)  # both signals are there before it can act on the first
    os.kill(alone.pid, signal.SIGTERM)
    os.kill(alone.pid, signal.SIGCONT)
    alone.stderr.readline()
    time.sleep(1.1)
    os.kill(alone.pid, signal.SIGINT)
    assert alone.wait(timeout=60) in (130, 143)


def test_two_launchers_train_as_one(tmp_path, shards):
    """Two torchrun agents, as on two machines, that meet by a c10d rendezvous; the same two ranks under one agent."""
    flags = [*TINY, *shards, "--micro_batches=2"]
    launch(*flags, f"--records={tmp_path}/one", ranks=2)
    port = random.randint(20000, 50000)
    agents = [subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1", "--rdzv_backend=c10d", "--rdzv_id=test",
         f"--rdzv_endpoint=127.0.0.1:{port}", "--local_addr=127.0.0.1", ROOT / "train_gpt.py", *flags, f"--records={tmp_path}/two"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT) for _ in range(2)]
    said = [agent.communicate(timeout=200)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], said
    assert "\nranks: 2\nnodes: 2\n" in log_path(tmp_path / "two").read_text()
    assert_same_run(tmp_path / "two", tmp_path / "one")


def test_the_self_test_names_the_rank_that_is_missing_or_wrong(tmp_path):
    worker = tmp_path / "worker.py"
    worker.write_text(f"""
import os, sys, time
sys.path.insert(0, {str(ROOT)!r})
import train_gpt
from train_gpt import *
ranks, case = start_ranks(), sys.argv[1]
if case == "late" and ranks.rank == 1:
    time.sleep(8)
if case == "wrong" and ranks.rank == 1:
    all_reduce = dist.all_reduce
    dist.all_reduce = lambda x: (all_reduce(x), x.add_(1))
try:
    self_test(ranks, seconds=2)
    timeouts = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(fd))) as connection:
                connection.getpeername()[1]
                timeouts.append(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
        except OSError:
            pass  # no connection of TCP
    print(f"rank {{ranks.rank}} probes {{sorted(timeouts)}}", flush=True)
    print(f"rank {{ranks.rank}} is content", flush=True)
except UserError as e:
    print(f"rank {{ranks.rank}} says: {{e}}", flush=True)
os._exit(0)
""")
    said = {case: subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=3", worker, case],
                                 capture_output=True, text=True, env=ENVIRONMENT, timeout=120) for case in ("late", "wrong", "right")}
    assert re.search(r"rank 0 says: rank 0 waited 2 s in vain for rank\(s\) 1:", said["late"].stdout), said["late"]
    assert said["wrong"].stdout.count("says: rank 1 on ") == 3 and "gave a wrong sum" in said["wrong"].stdout, said["wrong"]
    assert said["right"].stdout.count("is content") == 3, said["right"]
    probed = re.findall(r"rank \d probes \[(.*?)\]", said["right"].stdout)
    assert len(probed) == 3 and all(len(one.split(", ")) > 3 and set(one.split(", ")) == {"60000"} for one in probed), probed


# ----------------------------------------------------------------------------------------------------------------------
# Room, and failing well


def test_a_disk_or_gpu_without_room_is_refused_before_the_start(tmp_path, shards, monkeypatch):
    hp = train_gpt.parse_flags(["--preset=speedrun", "--dtype=bfloat16", "--num_kv_heads=6", f"--records={tmp_path}/a/b", "--save_every=100"], "demo")[0]
    model, state = train_gpt.state_bytes(hp)
    matrices, embeddings, head = 11 * 4 * 768**2 + 12 * 8 * 768**2, 4 * 50304 * 768, 50304 * 768
    assert abs(model - (4 * matrices + 2 * embeddings + 4 * head)) < 1000 and abs(state - (8 * matrices + 6 * embeddings + 12 * head)) < 3000
    monkeypatch.setattr(train_gpt.shutil, "disk_usage", lambda path: SimpleNamespace(free=model + 3 * state - 2**20))
    with pytest.raises(UserError, match=rf"{tmp_path}: \d+ MiB free, checkpoints take \d+ MiB; free some"):
        train_gpt.check_disk(hp, {})
    for number in (1, 2):  # a resumed run has some of them
        (tmp_path / "run").mkdir(exist_ok=True)
        (tmp_path / "run" / f"step{number:08}.pt").touch()
        monkeypatch.setattr(train_gpt.shutil, "disk_usage", lambda path: SimpleNamespace(free=model + (3 - number) * state + 2**21))
        train_gpt.check_disk(hp, {"log": f"{tmp_path}/run.log"})
        with pytest.raises(UserError, match="free some"):
            train_gpt.check_disk(hp, {})
    monkeypatch.setattr(train_gpt.shutil, "disk_usage", lambda path: SimpleNamespace(free=model + 3 * state + 2**21))
    train_gpt.check_disk(hp, {})
    gpu = SimpleNamespace(type="cuda")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10 * 2**30, 80 * 2**30))
    with pytest.raises(UserError, match="10240 of 81920 MiB of GPU memory are free"):
        train_gpt.check_memory(hp, gpu)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70 * 2**30, 80 * 2**30))
    assert train_gpt.check_memory(hp, gpu) is None and train_gpt.check_memory(hp, torch.device("cpu")) is None


@pytest.mark.parametrize("what", ["checkpoint", "log"])
def test_a_full_disk_leaves_earlier_work_whole(tmp_path, shards, whole, what):
    """A limit on the size of files stands for the full disk: the log fits, a checkpoint does not; or not even the log."""
    flags, room = ([], 400_000) if what == "checkpoint" else (["--save_every=0"], log_path(whole).read_text().index("step:6/12"))
    script = (f"import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, ({room}, {room})); sys.argv = sys.argv[1:]; "
              "import runpy; runpy.run_path(sys.argv[0], run_name='__main__')")
    done = subprocess.run([sys.executable, "-c", script, ROOT / "train_gpt.py", *RUN, *shards, f"--records={tmp_path}", *flags],
                          capture_output=True, text=True, env=ENVIRONMENT, timeout=120)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    if what == "checkpoint":
        assert re.search(r"step00000003.pt: cannot be saved \(.+\); free space, then go on with --resume", done.stderr), done.stderr
        assert steps(tmp_path) == steps(whole)[:4]
    else:
        assert re.search(r"_demo.log: the log cannot be written \(.+\); free space", done.stderr), done.stderr
        assert "\nstep:1/12 train_loss" in log_path(tmp_path).read_text()
    assert not list(tmp_path.glob("*/*"))


@pytest.mark.parametrize("error, asked", [
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.1 GiB"), "Tried to allocate 20.00 GiB"),
    (RuntimeError("[enforce fail at alloc.cpp:1] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 32 bytes. Error code 12"),
     "tried to allocate 32 bytes"),
    (MemoryError(), "MemoryError")])
def test_out_of_memory_is_one_line_that_says_what_to_lower(monkeypatch, capfd, error, asked):
    def fail(argv):
        raise error

    class Ended(Exception):
        pass

    def end(status):
        raise Ended(status)

    monkeypatch.setattr(train_gpt, "run", fail)
    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(sys, "argv", ["train_gpt.py"])
    with pytest.raises(Ended, match="2"):
        train_gpt.main()
    assert capfd.readouterr().err == (f"error: rank 0 is out of memory ({asked}): lower --train_seq_len (and raise --micro_batches) "
                                      "or --val_seq_len\n")


def test_weights_that_are_not_finite_are_never_saved(tmp_path, shards, monkeypatch):
    train_step = train_gpt.train_step

    def poisoned(*args):
        loss = train_step(*args)
        if args[5] == 4:
            args[0].embed.weight.data[0, 0] = float("nan")
        return loss

    monkeypatch.setattr(train_gpt, "train_step", poisoned)
    with pytest.raises(UserError, match="step 5: a weight is no longer finite"):
        run([*RUN, *shards, f"--records={tmp_path}", "--save_every=5", "--val_loss_every=0"])
    assert not checkpoints(tmp_path)


def test_a_non_finite_loss_keeps_the_checkpoint_before_it(tmp_path, shards, whole, monkeypatch):
    train_step = train_gpt.train_step
    with monkeypatch.context() as patch:
        patch.setattr(train_gpt, "train_step", lambda *args: train_step(*args) * (float("nan") if args[5] == 7 else 1))
        with pytest.raises(UserError, match="step 8: the training loss is nan"):
            run([*RUN, *shards, f"--records={tmp_path}"])
    assert checkpoints(tmp_path) == ["step00000003.pt", "step00000006.pt"]
    run([*RUN, *shards, f"--records={tmp_path}", "--resume"])
    assert_same_run(tmp_path, whole)


def test_a_shard_that_disappears_while_training_is_one_line(tmp_path, shards, monkeypatch):
    from conftest import write_shard
    for number in range(3):
        write_shard(tmp_path / f"x_train_{number}.bin", [256, *range(250)] * 9)
    load_next = train_gpt.TrainLoader.load_next

    def losing(self):
        (tmp_path / "x_train_2.bin").unlink(missing_ok=True)
        load_next(self)

    monkeypatch.setattr(train_gpt.TrainLoader, "load_next", losing)
    with pytest.raises(UserError, match=r"x_train_2.bin: cannot be read on \S+ \(No such file"):
        run([*RUN, *shards, "--epochs=1", f"--train_files={tmp_path}/x_train_*.bin", f"--records={tmp_path}/r"])
    assert checkpoints(tmp_path / "r") == ["step00000003.pt", "step00000006.pt"], "earlier work is whole"


def test_a_console_that_goes_away_does_not_end_a_run(tmp_path, shards):
    done = subprocess.run(f"'{sys.executable}' '{ROOT / 'train_gpt.py'}' {' '.join(RUN)} {' '.join(shards)} --records={tmp_path} | head -n 3",
                          shell=True, capture_output=True, text=True, env=ENVIRONMENT, timeout=120)
    assert "Traceback" not in done.stderr and len(losses(log_path(tmp_path).read_text(), "train_loss")) == 12, done.stderr
    check = subprocess.run(f"'{sys.executable}' '{ROOT / 'train_gpt.py'}' --check {' '.join(RUN)} {' '.join(shards)} | true",
                           shell=True, capture_output=True, text=True, env=ENVIRONMENT, timeout=120)
    assert check.stderr == "error: whoever read the console has gone\n"
