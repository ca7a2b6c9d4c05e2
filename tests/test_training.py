"""Whole runs of the script: the golden trajectory, several ranks, the log, errors, copies, the
seeds' settings."""

import dataclasses
import hashlib
import json
import math
import os
import re
import shlex
import shutil

import pytest
import torch
from conftest import (ROOT, TINY, launch, log_of, log_path, losses, newest_checkpoint, planted,
                      write_shard)

import train_gpt
from train_gpt import SEPARATOR, UserError, run

pytestmark = pytest.mark.usefixtures("runs_here")


def assert_same_weights(folder, other):
    theirs = newest_checkpoint(other)["model"]
    for name, weight in newest_checkpoint(folder)["model"].items():
        assert torch.equal(weight, theirs[name]), name


METHOD = [  # whatever the preset is
    "--attention_scale=0.12", "--embed_lr=0.6", "--muon_momentum_end=0.95",
    "--muon_momentum_steps=100", "--smear=false", "--key_offset=false", "--pair_rows=0",
    "--muon_beta2=0",
]
GOLDEN = [*TINY, *METHOD, "--muon_lr=0.05", "--num_iterations=30", "--val_loss_every=10",
          "--micro_batches=4", "--val_tokens=0"]


def test_golden_trajectory(tmp_path, shards):
    """Losses of 30 steps in float32 on one thread, as stored. Another CPU or torch release sums in
    another order, which 30 steps let grow to some 1e-3; a changed method moves losses by more.
    Regenerate only on purpose:
    TRAIN_GPT_GOLDEN=1 ./run.sh test tests/test_training.py -k golden"""
    run([*GOLDEN, *shards, f"--records={tmp_path}"])
    log = log_of(tmp_path)
    got = {"val_loss": losses(log), "train_loss": losses(log, "train_loss")}
    stored = ROOT / "tests" / "golden.json"
    if os.environ.get("TRAIN_GPT_GOLDEN"):
        stored.write_text(json.dumps(got, indent=1) + "\n")
    want = json.loads(stored.read_text())
    assert got["val_loss"][0] == pytest.approx(math.log(320), abs=1e-4)
    assert got["val_loss"] == pytest.approx(want["val_loss"], abs=0.01)
    assert got["train_loss"] == pytest.approx(want["train_loss"], abs=0.01)
    assert got["val_loss"] == sorted(got["val_loss"], reverse=True)
    assert got["val_loss"][-1] < got["val_loss"][0] - 2


def test_two_runs_with_one_seed_are_identical(tmp_path, shards):
    logs = []
    for folder in ("a", "b"):
        run([*TINY, *shards, f"--records={tmp_path}/{folder}"])
        logs.append(log_of(tmp_path / folder))
    assert losses(logs[0]) == losses(logs[1])
    assert losses(logs[0], "train_loss") == losses(logs[1], "train_loss")
    assert_same_weights(tmp_path / "a", tmp_path / "b")
    run([*TINY, *shards, f"--records={tmp_path}/c", "--seed=2"])
    assert losses(log_of(tmp_path / "c"))[1:] != losses(logs[0])[1:]


def test_ranks_do_not_change_the_training(tmp_path, shards):
    """The demo preset, made narrower, on 1, 2 and 4 ranks in float32. The ranks sum the same
    gradients in another order: over 20 steps losses agree to 0.002. (With an epsilon of 1e-10, Adam
    makes a full update of a gradient that is nothing but rounding, as the mixing weights have while
    projections are zero: 0.016 in the demo's third step.)"""
    curves = []
    for ranks in (1, 2, 4):
        launch("--preset=demo", *shards, "--num_iterations=20", "--val_loss_every=10",
               "--val_tokens=0", "--epochs=200", "--train_seq_len=128", "--val_seq_len=1024",
               "--model_dim=64", "--num_heads=2", "--head_dim=32", "--seed=1", "--dtype=float32",
               f"--records={tmp_path}/{ranks}", ranks=ranks)
        log = log_of(tmp_path / str(ranks))
        assert f"\nranks: {ranks}\n" in log
        curves.append(losses(log) + losses(log, "train_loss"))
    assert len(curves[0]) == 3 + 20
    for curve in curves[1:]:
        assert curve == pytest.approx(curves[0], abs=0.002)


def test_log_has_its_sections_and_its_last_lines(tmp_path, shards, capsys):
    run([*TINY, *shards, f"--records={tmp_path}", "--name=my_try"])
    log = log_of(tmp_path)
    console = capsys.readouterr().out
    name = r"\d{4}-\d\d-\d\dT\d\d-\d\d-\d\dZ_my_try\.log"
    assert re.fullmatch(name, log_path(tmp_path).name)
    settings, environment, rest = log.split(f"\n{SEPARATOR}\n", 2)
    source, steps = rest.rsplit(f"\n{SEPARATOR}\n", 1)
    fields = dataclasses.fields(train_gpt.Hyperparameters)
    assert "num_iterations = 6" in settings.splitlines() and "seed = 1" in settings.splitlines()
    assert len(settings.splitlines()) == len(fields)
    for key in ("command", "host", "cpu", "torch", "ranks", "threads", "git", "data", "script"):
        assert re.search(rf"^{key}: .+", environment, re.M), key
    script = (ROOT / "train_gpt.py").read_text()
    assert source.rstrip("\n") == script.rstrip("\n")
    assert hashlib.sha256(script.encode()).hexdigest() in environment
    step_lines = [line for line in steps.splitlines() if line.startswith("step:")]
    form = (r"step:(\d+)/6 (train_loss|val_loss):\d+\.\d{4} train_time:\d+ms "
            r"step_avg:(nan|\d+\.\d\d)ms tokens:(\d+) lr:\d\.\d{3} window:(\d+)")
    matches = [re.fullmatch(form, line) for line in step_lines]
    assert all(matches), step_lines
    assert [(int(m[1]), m[2]) for m in matches] == [
        (0, "val_loss"), (1, "train_loss"), (2, "train_loss"), (3, "train_loss"), (3, "val_loss"),
        (4, "train_loss"), (5, "train_loss"), (6, "train_loss"), (6, "val_loss")]
    assert all(int(m[4]) == int(m[1]) * 4 * 256 for m in matches)
    windows = [int(m[5]) for m in matches]
    assert windows == sorted(windows) and windows[0] == 128 and windows[-1] == 384
    keys = ("model", "warmup", "checkpoint", "throughput",
            "final_val_loss", "log")
    for key in keys:
        assert re.search(rf"^{key}: .+", steps, re.M), key
    final = f"final_val_loss: {losses(log)[-1]:.4f} nats per token, "
    assert final in steps and "on 1000 tokens" in steps.split(final)[1]
    assert steps.splitlines()[-1] == f"log: {log_path(tmp_path)}"
    assert console == steps, "the console shows all that follows the source"


def test_warmup_leaves_no_trace(tmp_path, shards, monkeypatch):
    run([*TINY, *shards, f"--records={tmp_path}/a"])
    monkeypatch.setattr(train_gpt, "warm_up", lambda *args: None)
    run([*TINY, *shards, f"--records={tmp_path}/b"])
    assert_same_weights(tmp_path / "a", tmp_path / "b")


def test_validating_and_saving_stop_the_clock(tmp_path, shards, monkeypatch):
    """The time that they take does not show in the times of the steps around them."""
    now = [0.0]
    monkeypatch.setattr(train_gpt.time, "perf_counter", lambda: now[0])

    def slowed(name: str, seconds: float):
        original = getattr(train_gpt, name)

        def slow(*args):
            now[0] += seconds
            return original(*args)

        monkeypatch.setattr(train_gpt, name, slow)

    slowed("evaluate", 1000)
    slowed("save_checkpoint", 500)
    slowed("train_step", 2)
    run([*TINY, *shards, f"--records={tmp_path}", "--save_every=2"])
    form = r"step:(\d+)/6 \w+:\S+ train_time:(\d+)ms step_avg:(\S+)ms"
    times = re.findall(form, log_of(tmp_path))
    assert [int(t) for _, t, _ in times] == [2000 * int(step) for step, _, _ in times]
    assert times[0][2] == "nan" and times[1][2] == "2000.00"


def test_clock_on_cuda_begins_and_ends_with_an_idle_device(monkeypatch):
    """What the device does before a start is not counted, what it has left at a stop is."""
    now = [10.0]
    pending = [0.0]

    def synchronize():
        now[0] += pending[0]
        pending[0] = 0

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(train_gpt.time, "perf_counter", lambda: now[0])
    clock = train_gpt.StepClock(torch.device("cuda"), 0.5, None, None)
    for _ in range(2):
        pending[0] = 100
        clock.start()
        now[0] += 3
        pending[0] = 4
        clock.stop()
    assert clock.elapsed == 0.5 + 2 * 7


def test_non_finite_loss_stops_the_run_and_names_the_step(tmp_path, shards):
    with pytest.raises(UserError, match=r"^step [1-9]: .*train.loss is (nan|inf)"):
        run([*TINY, *shards, f"--records={tmp_path}", "--embed_lr=1e38", "--num_iterations=9",
             "--val_loss_every=0"])
    log = log_of(tmp_path)
    assert "train_loss:nan" in log or "train_loss:inf" in log
    assert not list(tmp_path.glob("*/*")), "nothing that is not finite was saved"


def test_errors_are_one_line_with_status_2(tmp_path, shards):
    done = launch(*TINY, *shards, "--num_iterations=5000", "--epochs=1", f"--records={tmp_path}",
                  check=False)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("error: ") and "raise --epochs" in done.stderr, done.stderr
    assert not list(tmp_path.iterdir()), "nothing was begun"


def test_an_error_on_several_ranks_is_said_once_and_none_hangs(tmp_path, shards):
    done = launch(*TINY, *shards, "--val_tokens=99999999", f"--records={tmp_path}", ranks=2,
                  check=False)
    said = re.findall("^error: .*", done.stderr, re.M)
    assert done.returncode == 1 and len(said) == 1 and "99999999" in said[0], done.stderr
    assert "train_gpt.py\", line" not in done.stderr


def test_a_rank_that_fails_ends_the_run(tmp_path, shards):
    """A defect that meets rank 1 alone in the middle of the training: nobody hangs, and the reason
    is there to read."""
    script = planted(tmp_path, "assert step < 2 or ranks.rank == 0, 'planted defect'")
    done = launch(*TINY, *shards, f"--records={tmp_path}/r", ranks=2, script=script, check=False)
    assert done.returncode == 1 and "AssertionError: planted defect" in done.stderr, done.stderr
    assert len(losses(log_of(tmp_path / "r"), "train_loss")) <= 2


def test_check_does_every_check_and_starts_nothing(tmp_path, shards, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(UserError, match="3 ranks do not divide 4"):
        run([*TINY, *shards, "--check", f"--records={tmp_path}/none"])
    monkeypatch.setenv("WORLD_SIZE", "2")
    run([*TINY, *shards, "--check", f"--records={tmp_path}/none"])
    said = capsys.readouterr().out
    assert said.startswith("checks passed")
    for shard in ("t_train_000001.bin", "t_train_000002.bin", "t_val_000000.bin"):
        assert shard in said
    assert not (tmp_path / "none").exists()


WRONG = [
    "--adam_eps=0", "--adam_eps=-1", "--adam_eps=nan", "--muon_lr=-0.1", "--muon_lr=nan",
    "--head_lr=-1e-9", "--head_lr=inf", "--embed_lr=-1", "--scalar_lr=nan", "--adam_beta2=1",
    "--adam_beta1=nan", "--adam_beta1=-0.1", "--lr_floor=-0.1", "--lr_floor=1.1",
    "--cooldown_frac=nan", "--muon_beta2=1", "--muon_momentum_end=1.5", "--attention_scale=nan",
    "--attention_scale=inf", "--rope_base=0", "--lm_head_softcap=0", "--window_start=0",
    "--micro_batches=0", "--num_iterations=-1", "--model_dim=24",
    "--train_seq_len=100", "--epochs=0", "--save_every=-1", "--val_loss_every=-1", "--name=a/b",
    "--records=", "--seed=-2", "--windows=LSXL", "--windows=L", "--value_embeds=0..00",
]


@pytest.mark.parametrize("flag", WRONG)
def test_check_refuses_settings_that_cannot_start(tmp_path, shards, flag):
    with pytest.raises(UserError, match=flag.split("=")[0]) as raised:
        run([*TINY, *shards, "--check", f"--records={tmp_path}/none", flag])
    assert "\n" not in str(raised.value)


def test_an_unwritable_records_folder_is_one_line(tmp_path, shards):
    (tmp_path / "file").write_text("")
    with pytest.raises((UserError, OSError), match=f"{tmp_path}/file"):
        run([*TINY, *shards, f"--records={tmp_path}/file"])


def test_a_copy_elsewhere_under_another_name_runs(tmp_path, shards):
    shutil.copy(ROOT / "train_gpt.py", tmp_path / "my_record.py")
    done = launch(*TINY, *shards, "--num_iterations=2", script=tmp_path / "my_record.py",
                  cwd=tmp_path)
    assert len(losses(done.stdout)) == 2
    assert newest_checkpoint(tmp_path / "records")["script_path"] == str(tmp_path / "my_record.py")


def test_logs_of_one_second_do_not_overwrite_each_other(tmp_path, shards, monkeypatch):
    class Frozen(train_gpt.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2026, 1, 1, tzinfo=tz)

    monkeypatch.setattr(train_gpt, "datetime", Frozen)
    flags = [*TINY, *shards, "--num_iterations=1", f"--records={tmp_path}"]
    run(flags)
    assert log_path(tmp_path).name == "2026-01-01T00-00-00Z_demo.log"
    before = log_of(tmp_path)
    with pytest.raises((UserError, OSError), match="exists.*2026-01-01T00-00-00Z_demo.log"):
        run(flags)
    assert log_of(tmp_path) == before


def test_saved_model_is_the_trained_one_and_safe_to_load(tmp_path, shards):
    run([*TINY, *shards, f"--records={tmp_path}"])
    saved = newest_checkpoint(tmp_path)
    assert saved["step"] == 6
    assert all(name.split(".")[0] != "_orig_mod" for name in saved["model"])
    hp = train_gpt.Hyperparameters(**saved["hyperparameters"])
    model = train_gpt.GPT(hp, train_gpt.block_sparse)
    model.load_state_dict(saved["model"])
    ranks = train_gpt.Ranks(0, 1, torch.device("cpu"))
    sequences = train_gpt.load_validation(train_gpt.find_shards(hp.val_files), hp, ranks)
    val_loss = train_gpt.evaluate(model, sequences, 6, hp, ranks)
    assert val_loss == pytest.approx(losses(log_of(tmp_path))[-1], abs=1e-4)


def test_zero_steps_is_a_validation(tmp_path, shards):
    run([*TINY, *shards, f"--records={tmp_path}", "--num_iterations=0"])
    assert losses(log_of(tmp_path)) == pytest.approx([math.log(320)], abs=1e-4)


def seed_lines() -> list[str]:
    """The lines of flags in the documentation that name the seeds' settings."""
    heading = "## Settings of earlier records"
    for path in (ROOT / "records" / "README.md", ROOT / "README.md"):
        _, found, after = path.read_text().partition(heading)
        if found:
            section = after.split("\n## ")[0].replace("\\\n", " ")
            lines = [line.strip() for line in section.splitlines()]
            return [line for line in lines if line.startswith("./run.sh speedrun")]
    return []


SEED_LINES = seed_lines()


def test_there_is_a_line_for_each_seed():
    assert len(SEED_LINES) == 5


@pytest.mark.parametrize("number", range(len(SEED_LINES)))
def test_a_seeds_settings_train(tmp_path, shards, number):
    """Each line as it stands, then made small; what makes it that record's method stays."""
    flags = shlex.split(SEED_LINES[number])[2:]
    small = ["--vocab_size=257", "--model_dim=32", "--num_heads=2", "--head_dim=16",
             "--train_seq_len=256", "--val_seq_len=512", "--val_tokens=1000", "--num_iterations=3",
             "--val_loss_every=0", "--epochs=99", "--seed=1", "--dtype=float32"]
    run(["--preset=speedrun", *flags, *small, *shards, f"--records={tmp_path}"])
    log = log_of(tmp_path)
    curve = losses(log, "train_loss")
    assert len(curve) == 3 and curve[-1] < curve[0]
    lines = log.split(f"\n{SEPARATOR}\n")[0].splitlines()
    settings = dict(line.split(" = ", 1) for line in lines)
    for flag in flags:
        name, value = flag.removeprefix("--").split("=")
        if f"--{name}" not in " ".join(small) and name != "use_fp8":
            stands = settings[name].strip("'()").replace(" ", "")
            assert stands == value or float(stands) == float(value), flag


@pytest.mark.parametrize("kind", ["train", "val"])
def test_out_of_range_tokens_never_train(tmp_path, shards, kind):
    path = write_shard(tmp_path / "bad.bin", [256] * 900 + [257] + [256] * 5000)
    with pytest.raises(UserError, match=f"{path}: .* 257.*--vocab_size=257"):
        run([*TINY, *shards, f"--{kind}_files={path}", f"--records={tmp_path}/r"])
    assert not losses(log_of(tmp_path / "r"), "train_loss")


def test_validation_data_without_documents_are_pointed_out(tmp_path, shards, capsys):
    write_shard(tmp_path / "val.bin", [7] * 1100)
    flags = [*TINY, *shards, "--num_iterations=0", "--save_every=0"]
    run([*flags, f"--records={tmp_path}/a", f"--val_files={tmp_path}/val.bin"])
    note = "\nnote: no end-of-text token (256) in the validation data: "
    assert note in log_of(tmp_path / "a") and note in "\n" + capsys.readouterr().out
    write_shard(tmp_path / "val.bin", [256] + [7] * 1100)  # one document, which fills no sequence
    run([*flags, f"--records={tmp_path}/b", f"--val_files={tmp_path}/val.bin"])
    assert "\nnote: " not in log_of(tmp_path / "b")
