"""Whole runs of the script: the golden trajectory, several ranks, the log, errors, copies, the seeds' settings."""

import json
import math
import os
import re
import shlex
import shutil

import pytest
import torch
from conftest import ROOT, TINY, launch, losses, write_shard

import train_gpt
from records.sample import load_model
from train_gpt import SEPARATOR, UserError, run


@pytest.fixture(autouse=True)
def one_thread():
    """Sums depend on the number of threads in their last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def log_of(folder) -> str:
    (path,) = folder.glob("*.log")
    return path.read_text()


METHOD = ["--attention_scale=0.12", "--embed_lr=0.6", "--muon_momentum_end=0.95", "--muon_momentum_steps=100",
          "--smear=false", "--key_offset=false", "--pair_rows=0", "--muon_beta2=0"]  # whatever the preset is
GOLDEN = [*TINY, *METHOD, "--muon_lr=0.05",
          "--num_iterations=30", "--val_loss_every=10", "--micro_batches=4", "--val_tokens=0"]


def test_golden_trajectory(tmp_path, shards):
    """Losses of 30 steps in float32 on one thread, as stored. Another CPU or torch release sums in another order, which
    30 steps let grow to some 1e-3; a changed method moves losses by more. Regenerate only on purpose:
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
    assert got["val_loss"] == sorted(got["val_loss"], reverse=True) and got["val_loss"][-1] < got["val_loss"][0] - 2


def test_two_runs_with_one_seed_are_identical(tmp_path, shards):
    logs = []
    for folder in ("a", "b"):
        run([*TINY, *shards, f"--records={tmp_path}/{folder}"])
        logs.append(log_of(tmp_path / folder))
    assert losses(logs[0]) == losses(logs[1]) and losses(logs[0], "train_loss") == losses(logs[1], "train_loss")
    models = [load_model(next(tmp_path.glob(f"{folder}/*/")))[0] for folder in ("a", "b")]
    for p, q in zip(models[0].parameters(), models[1].parameters()):
        assert torch.equal(p, q)
    run([*TINY, *shards, f"--records={tmp_path}/c", "--seed=2"])
    assert losses(log_of(tmp_path / "c"))[1:] != losses(logs[0])[1:]


def test_ranks_do_not_change_the_training(tmp_path, shards):
    """The demo preset, made narrower, on 1, 2 and 4 ranks in float32. The ranks sum the same gradients in another order:
    over 20 steps losses agree to 0.002. (With an epsilon of 1e-10, Adam makes a full update of a gradient that is nothing but
    rounding, as the mixing weights have while projections are zero: 0.016 in the demo's third step.)"""
    curves = []
    for ranks in (1, 2, 4):
        launch("--preset=demo", *shards, "--num_iterations=20", "--val_loss_every=10", "--val_tokens=0", "--epochs=200",
               "--train_seq_len=128", "--val_seq_len=1024", "--model_dim=64", "--num_heads=2", "--head_dim=32", "--seed=1",
               "--sample_tokens=0", "--dtype=float32", f"--records={tmp_path}/{ranks}", ranks=ranks)
        log = log_of(tmp_path / str(ranks))
        assert f"\nranks: {ranks}\n" in log
        curves.append(losses(log) + losses(log, "train_loss"))
    assert len(curves[0]) == 3 + 20
    for curve in curves[1:]:
        assert curve == pytest.approx(curves[0], abs=0.002)


def test_log_has_its_sections_and_its_last_lines(tmp_path, shards, capsys):
    run([*TINY, *shards, f"--records={tmp_path}", "--sample_tokens=5", "--name=my_try"])
    log, console = log_of(tmp_path), capsys.readouterr().out
    (path,) = tmp_path.glob("*.log")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d-\d\d-\d\dZ_my_try\.log", path.name)
    settings, environment, rest = log.split(f"\n{SEPARATOR}\n", 2)
    source, steps = rest.rsplit(f"\n{SEPARATOR}\n", 1)
    assert "num_iterations = 6" in settings.splitlines() and "seed = 1" in settings.splitlines()
    assert len(settings.splitlines()) == len(train_gpt.dataclasses.fields(train_gpt.Hyperparameters))
    for key in ("python", "torch", "ranks", "seed", "cpu", "threads", "data"):
        assert re.search(rf"^{key}: .+", environment, re.M), key
    assert source.rstrip("\n") == (ROOT / "train_gpt.py").read_text().rstrip("\n")
    step_lines = [line for line in steps.splitlines() if line.startswith("step:")]
    form = (r"step:(\d+)/6 (train_loss|val_loss):\d+\.\d{4} train_time:\d+ms step_avg:(nan|\d+\.\d\d)ms tokens:(\d+) "
            r"lr:\d\.\d{3} window:(\d+)")
    matches = [re.fullmatch(form, line) for line in step_lines]
    assert all(matches), step_lines
    assert [(int(m[1]), m[2]) for m in matches] == [
        (0, "val_loss"), (1, "train_loss"), (2, "train_loss"), (3, "train_loss"), (3, "val_loss"),
        (4, "train_loss"), (5, "train_loss"), (6, "train_loss"), (6, "val_loss")]
    assert all(int(m[4]) == int(m[1]) * 4 * 256 for m in matches)
    windows = [int(m[5]) for m in matches]
    assert windows == sorted(windows) and windows[0] == 128 and windows[-1] == 384
    for key in ("clock", "note", "model", "warmup", "data", "peak_memory", "throughput", "hardware", "final_val_loss",
                "sample", "log"):
        assert re.search(rf"^{key}:", steps, re.M), key
    assert "bits per byte" in steps and step_lines[-1] in console


def test_warmup_leaves_no_trace(tmp_path, shards, monkeypatch):
    run([*TINY, *shards, f"--records={tmp_path}/a"])
    monkeypatch.setattr(train_gpt, "warm_up", lambda *args: None)
    run([*TINY, *shards, f"--records={tmp_path}/b"])
    models = [load_model(next(tmp_path.glob(f"{folder}/*/")))[0] for folder in ("a", "b")]
    for p, q in zip(models[0].parameters(), models[1].parameters()):
        assert torch.equal(p, q)


def test_validation_stops_the_clock(tmp_path, shards, monkeypatch):
    """The time that a validation takes does not show in the times of the steps around it."""
    now = [0.0]
    monkeypatch.setattr(train_gpt.time, "perf_counter", lambda: now[0])
    evaluate, train_step = train_gpt.evaluate, train_gpt.train_step

    def slow_evaluate(*args):
        now[0] += 1000
        return evaluate(*args)

    def slow_step(*args):
        now[0] += 2
        return train_step(*args)

    monkeypatch.setattr(train_gpt, "evaluate", slow_evaluate)
    monkeypatch.setattr(train_gpt, "train_step", slow_step)
    monkeypatch.setattr(train_gpt, "hardware_limit", lambda *args: (1.0, 1.0, "test"))
    run([*TINY, *shards, f"--records={tmp_path}"])
    times = re.findall(r"step:(\d+)/6 \w+:\S+ train_time:(\d+)ms step_avg:(\S+)ms", log_of(tmp_path))
    assert [int(t) for _, t, _ in times] == [2000 * int(step) for step, _, _ in times]
    assert times[0][2] == "nan" and times[1][2] == "2000.00"


def test_clock_on_cuda_adds_the_events_milliseconds(monkeypatch):
    """The arithmetic of the CUDA branch, with events that are plain numbers."""
    class Event:
        def __init__(self, enable_timing):
            self.waited = False

        def record(self):
            self.ms = now[0] * 1000

        def synchronize(self):
            self.waited = True

        def elapsed_time(self, other):
            assert other.waited
            return other.ms - self.ms

    now = [10.0]
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(train_gpt.time, "perf_counter", lambda: now[0])
    clock = train_gpt.Clock(torch.device("cuda"))
    for _ in range(2):
        clock.start()
        now[0] += 3
        mark = clock.mark()
        now[0] += 1
        clock.stop()
        now[0] += 100
    assert clock.elapsed == 8 and mark() == pytest.approx(4 + 3)


def test_a_terminal_shows_a_bar_and_the_validations(tmp_path, shards, monkeypatch, capsys):
    monkeypatch.setattr(train_gpt.sys.stdout, "isatty", lambda: True, raising=False)
    run([*TINY, *shards, f"--records={tmp_path}"])
    console = capsys.readouterr()
    assert "6/6" in console.err and "step:3/6 val_loss" in console.out and "train_loss" not in console.out
    assert log_of(tmp_path).count("train_loss:") >= 6


def test_non_finite_loss_stops_the_run_and_names_the_step(tmp_path, shards):
    with pytest.raises(UserError, match=r"^step [1-9]: the training loss is (nan|inf)"):
        run([*TINY, *shards, f"--records={tmp_path}", "--embed_lr=1e38", "--num_iterations=9", "--val_loss_every=0"])
    log = log_of(tmp_path)
    assert "train_loss:nan" in log or "train_loss:inf" in log
    assert not list(tmp_path.glob("*/model.pt"))


def test_errors_are_one_line_with_status_2(tmp_path, shards):
    done = launch(*TINY, *shards, "--num_iterations=5000", "--epochs=1", f"--records={tmp_path}", check=False)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "raise --epochs" in done.stderr, done.stderr
    assert not list(tmp_path.iterdir()), "nothing was begun"


def test_an_error_on_several_ranks_is_said_once_and_none_hangs(tmp_path, shards):
    done = launch(*TINY, *shards, "--val_tokens=99999999", f"--records={tmp_path}", ranks=2, check=False)
    assert done.returncode == 1 and done.stderr.count("tokens to predict, 99999999 are asked for") == 1, done.stderr
    assert "train_gpt.py\", line" not in done.stderr


def test_a_rank_that_fails_ends_the_run(tmp_path, shards):
    """A defect that meets rank 1 alone in the middle of the training: nobody hangs, and the reason is there to read."""
    copy = (ROOT / "train_gpt.py").read_text().replace(
        "    # Muon's gradients travel first", "    assert step < 2 or dist.get_rank() == 0, 'planted defect'\n    # Muon's", 1)
    (tmp_path / "broken.py").write_text(copy)
    done = launch(*TINY, *shards, f"--records={tmp_path}/r", ranks=2, script=tmp_path / "broken.py", check=False)
    assert done.returncode == 1 and "rank 1 met a defect" in done.stderr and "planted defect" in done.stderr, done.stderr
    assert len(losses(log_of(tmp_path / "r"), "train_loss")) <= 2


def test_check_does_every_check_and_starts_nothing(tmp_path, shards, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(UserError, match="3 ranks do not divide 4"):
        run([*TINY, *shards, "--check", f"--records={tmp_path}/none"])
    monkeypatch.setenv("WORLD_SIZE", "2")
    run([*TINY, *shards, "--check", f"--records={tmp_path}/none"])
    assert "checks passed: 2 training and 1 validation" in capsys.readouterr().out
    assert not (tmp_path / "none").exists()


def test_an_unwritable_records_folder_is_one_line(tmp_path, shards):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        run([*TINY, *shards, f"--records={tmp_path}/file"])


def test_a_copy_elsewhere_under_another_name_runs(tmp_path, shards):
    shutil.copy(ROOT / "train_gpt.py", tmp_path / "my_record.py")
    done = launch(*TINY, *shards, "--num_iterations=2", script=tmp_path / "my_record.py", cwd=tmp_path)
    assert len(losses(done.stdout)) == 2 and len(list((tmp_path / "records").glob("*.log"))) == 1


def test_logs_of_one_second_do_not_overwrite_each_other(tmp_path, shards, monkeypatch):
    class Frozen(train_gpt.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2026, 1, 1, tzinfo=tz)

    monkeypatch.setattr(train_gpt, "datetime", Frozen)
    for _ in range(2):
        run([*TINY, *shards, "--num_iterations=1", f"--records={tmp_path}", "--save=false"])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["2026-01-01T00-00-00Z_demo.log", f"2026-01-01T00-00-00Z_demo_{os.getpid()}.log"]


def test_saved_model_is_the_trained_one_and_safe_to_load(tmp_path, shards):
    run([*TINY, *shards, f"--records={tmp_path}"])
    (folder,) = [p for p in tmp_path.iterdir() if p.is_dir()]
    payload = torch.load(folder / "model.pt", weights_only=True)
    assert payload["step"] == 6 and all(name.split(".")[0] != "_orig_mod" for name in payload["model"])
    model, hp = load_model(folder)
    data = train_gpt.check_data(hp)
    sequences, _ = train_gpt.load_validation(data["val"], data["val_tokens"], hp, 0, 1, torch.device("cpu"))
    ranks = train_gpt.Ranks(0, 1, torch.device("cpu"))
    window = torch.tensor(train_gpt.window_tokens(6, hp))
    assert train_gpt.evaluate(model, sequences, window, hp, ranks)[0] == pytest.approx(losses(log_of(tmp_path))[-1], abs=1e-4)
    with pytest.raises(UserError, match="holds no model.pt and no checkpoint"):
        load_model(tmp_path)
    (folder / "model.pt").write_bytes((folder / "model.pt").read_bytes()[:5000])
    with pytest.raises(UserError, match="is damaged"):
        load_model(folder)


def test_zero_steps_is_a_validation(tmp_path, shards):
    run([*TINY, *shards, f"--records={tmp_path}", "--num_iterations=0"])
    assert losses(log_of(tmp_path)) == pytest.approx([math.log(320)], abs=1e-4)


def seed_lines() -> list[str]:
    """The lines of flags in the README that name the seeds' settings."""
    section = (ROOT / "README.md").read_text().split("## Settings of earlier records")[1].split("\n## ")[0]
    return [line.strip() for line in section.replace("\\\n", " ").splitlines() if line.strip().startswith("./run.sh speedrun")]


def test_the_readme_has_a_line_for_each_seed():
    assert len(seed_lines()) == 5


@pytest.mark.parametrize("number", range(5))
def test_a_seeds_settings_train(tmp_path, shards, number):
    """Each line as it stands, then made small; what makes it that record's method stays."""
    flags = shlex.split(seed_lines()[number])[2:]
    small = ["--vocab_size=257", "--model_dim=32", "--num_heads=2", "--head_dim=16", "--train_seq_len=256", "--val_seq_len=512",
             "--val_tokens=1000", "--num_iterations=3", "--val_loss_every=0", "--epochs=99", "--seed=1", "--dtype=float32"]
    run(["--preset=speedrun", *flags, *small, *shards, f"--records={tmp_path}"])
    log = log_of(tmp_path)
    curve = losses(log, "train_loss")
    assert len(curve) == 3 and curve[-1] < curve[0]
    settings = dict(line.split(" = ", 1) for line in log.split(f"\n{SEPARATOR}\n")[0].splitlines())
    for flag in flags:
        name, value = flag.removeprefix("--").split("=")
        if f"--{name}" not in " ".join(small) and name != "use_fp8":
            assert settings[name].strip("'()").replace(" ", "") == value or float(settings[name]) == float(value), flag


def test_text_of_samples(capsys):
    assert train_gpt.decode([72, 105, 256, 33], 257) == "Hi!"
    assert train_gpt.decode([195], 257) == "\ufffd"


def test_out_of_range_tokens_never_train(tmp_path, shards):
    path = write_shard(tmp_path / "bad.bin", [256] * 5000 + [257])
    with pytest.raises(UserError, match="token 257 at byte 11024 is not below the vocabulary size 257"):
        run([*TINY, *shards, f"--train_files={path}", f"--records={tmp_path}/r"])
    assert not (tmp_path / "r").exists()
