"""What must not lose a run: kills, damaged files, full disks, machines that differ, bad weights."""

import inspect
import os
import re
import resource
import shlex
import shutil
import sys
from contextlib import contextmanager
from datetime import datetime
from functools import partial, wraps
from pathlib import Path
import pytest
import torch
from conftest import (SCRIPT, TINY, launch, load_checkpoint, log_of, log_path, newest_checkpoint,
                      planted, refused, run_helper, run_sh, train, write_shard)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
import train_gpt
from records.tools.logs import read_run
from train_gpt import UserError, read_checkpoint

SAVES = [*TINY, "--val_loss_every=4", "--save_every=3", "--micro_batches=2"]
RUN = [*SAVES, "--num_iterations=12"]
LONG = [*SAVES, "--num_iterations=60"]

@contextmanager
def before_step(number: int, do):
    """Calls do(model) when that training step is about to be made, after the warmup's own."""
    train_step, warm_up = train_gpt.train_step, train_gpt.warm_up
    def undisturbed(*args):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(train_gpt, "train_step", train_step)
            return warm_up(*args)
    @wraps(train_step)
    def interrupted(*args):
        named = inspect.signature(train_step).bind(*args).arguments
        if named["step"] == number - 1:
            do(named["model"])
        return train_step(*args)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_gpt, "train_step", interrupted)
        patch.setattr(train_gpt, "warm_up", undisturbed)
        yield

def broken_run(records, shards, *flags, step=8) -> Path:
    """The newest checkpoint of a run that ended in the middle of that step."""
    with before_step(step, lambda _: 1 / 0), pytest.raises(ZeroDivisionError):
        train(train_gpt, *RUN, *shards, f"--records={records}", *flags)
    return newest_checkpoint(records)

def newest_log(folder) -> Path:
    return max(Path(folder).glob("*.log"))

def steps_of(folder) -> str:
    """What follows the source in the newest log."""
    return newest_log(folder).read_text().split("\n" + "=" * 100 + "\n")[-1]

def checkpoints(folder) -> list[str]:
    return sorted(path.name for path in Path(folder).glob("*/*"))

def contents(folder) -> dict:
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}

def curve(folder) -> list:
    """The step lines of the newest log and of those that it continues, without their times."""
    run = read_run(newest_log(folder), "run")
    assert not run.missing, run.missing
    return [line._replace(seconds=None, ms_per_step=None) for line in run.lines]

def assert_same_state(folder, other):
    mine, theirs = load_checkpoint(folder), load_checkpoint(other)
    assert mine["step"] == theirs["step"] and mine["state"].keys() == theirs["state"].keys()
    for kind, tensors in theirs["state"].items():
        assert mine["state"][kind].keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert torch.equal(mine["state"][kind][name], tensor), (kind, name)

def assert_same_run(folder, other):
    assert curve(folder) == curve(other)
    assert_same_state(folder, other)

@pytest.fixture(scope="module")
def whole(tmp_path_factory, shards):
    folder = tmp_path_factory.mktemp("whole")
    train(train_gpt, *RUN, *shards, f"--records={folder}")
    return folder

def test_a_killed_rank_ends_all_and_two_ranks_go_on_bit_for_bit(tmp_path, shards):
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    launch(*RUN, *shards, f"--records={whole}", ranks=2)
    script = planted(tmp_path, "if step == 8 and world.rank == 1: os.kill(os.getpid(), 9)")
    done = launch(*RUN, *shards, f"--records={killed}", ranks=2, script=script, check=False,
                  torchrun=True)
    assert done.returncode and "step:10/" not in done.stdout, done.stdout
    log = log_path(killed)
    left = log.read_bytes()
    launch(f"--resume={newest_checkpoint(killed)}", ranks=2)
    assert_same_run(killed, whole)
    assert log.read_bytes() == left and len(list(killed.glob("*.log"))) == 2, "a log each start"

def test_kills_at_every_place(tmp_path, shards):
    """In a step, a validation, a save, a resumption, a line: killed_runs.py names the places."""
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    train(train_gpt, *LONG, *shards, f"--records={whole}")
    assert run_helper("killed_runs.py", train_gpt.__file__, killed, *SAVES, *shards) == "17\n"
    assert_same_run(killed, whole)
    assert checkpoints(killed).count("unfinished") == 2, "they do no harm"

@pytest.mark.quick
def test_checkpoints_hold_all_that_decides_the_rest(whole):
    assert checkpoints(whole) == ["step00000009.pt", "step00000012.pt"], "the two newest are kept"
    saved = load_checkpoint(whole)
    assert saved["step"] == 12 and saved["seconds"] > 0
    assert f"script: sha256 {saved['script']} " in log_of(whole)
    assert train_gpt.Hyperparameters(**saved["settings"]).seed == 1
    weights = saved["state"].pop("model")
    # A copy may have a buffer of integers, which is no parameter.
    trained = {name for name, weight in weights.items() if weight.is_floating_point()}
    assert set().union(*saved["state"].values()) == trained, "every parameter has state"
    assert f"\ncheckpoint: {newest_checkpoint(whole)}\n" in log_of(whole)

@pytest.mark.quick
def test_a_resumed_run_ends_in_the_same_bits(tmp_path, shards, whole, monkeypatch):
    """Nothing needs to be named but the checkpoint, and what is there is left alone."""
    monkeypatch.chdir(tmp_path)
    checkpoint = broken_run("mine", shards)
    assert checkpoint.name == "step00000006.pt" and not checkpoint.is_absolute()
    (checkpoint.parent / "unfinished").write_text("of a kill")
    saved = torch.load(checkpoint, weights_only=True)
    torch.save(saved | {"seconds": 1000.0}, checkpoint)
    before = contents("mine")
    parent = steps_of("mine")
    train(train_gpt, f"--resume={checkpoint}")
    assert before.items() < contents("mine").items()
    assert f"\nresumed: {checkpoint.absolute()} at step 6\n" in newest_log("mine").read_text()
    own = steps_of("mine")
    assert "\nchanged: " not in own
    first, second, *_ = re.findall(r"(?m)^step:.*", own)
    (validation,) = re.findall(r"(?m)^step:6/12 val_loss\S+", parent)
    assert first.startswith(f"{validation} train_time:1000000ms ")
    assert second.startswith("step:7/12 train_loss:")
    times = [int(t) for t in re.findall(r" train_time:(\d+)ms", own)]
    assert times == sorted(times) and times[-1] < 1060000
    assert_same_run("mine", whole)

@pytest.mark.quick
def test_settings_stay_but_those_that_are_named(tmp_path, shards, monkeypatch):
    """Also the seed that was drawn, and a dtype that this machine would not choose."""
    auto = train_gpt.resolve(train_gpt.PRESETS["demo"], torch.device("cpu")).dtype
    other = "bfloat16" if auto == "float32" else "float32"
    checkpoint = broken_run(tmp_path, shards, "--seed=-1", f"--dtype={other}", "--muon_lr=0.03")
    new = {"cooldown_frac": 0.5, "save_every": 4, "lr_floor": 0.05, "name": "changed"}
    old = torch.load(checkpoint, weights_only=True)["settings"]
    assert old["seed"] >= 0 and old["dtype"] == other and old["muon_lr"] == 0.03
    copy = tmp_path / "other.py"
    copy.write_text(Path(train_gpt.__file__).read_text() + "\n# tweaked\n")
    monkeypatch.setattr(train_gpt, "__file__", str(copy))
    train(train_gpt, f"--resume={checkpoint}", *[f"--{k}={value}" for k, value in new.items()])
    assert load_checkpoint(tmp_path)["settings"] == old | new
    (log,) = tmp_path.glob("*_changed.log")
    lines = re.findall("(?m)^changed: (.*)", log.read_text().rpartition("=" * 100)[2])
    assert sorted(lines) == sorted([
        *(f"{name} = {value!r}, was {old[name]!r}" for name, value in new.items()),
        "the script is not the one that saved the checkpoint"])
    head = dict(line.split(" = ") for line in log.read_text().split("\n=")[0].splitlines())
    assert head == {name: repr(value) for name, value in (old | new).items()}
    assert checkpoints(tmp_path)[-2:] == ["step00000008.pt", "step00000012.pt"]

@pytest.mark.quick
def test_data_may_be_added_but_what_was_read_must_stay(tmp_path, shards):
    folder = tmp_path / "data"
    shutil.copytree(Path(shards[0].split("=")[1]).parent, folder)
    data = [f"--train_files={folder}/t_train_*.bin", shards[1]]
    checkpoint = broken_run(tmp_path / "r", data)
    one, two = sorted(folder.glob("t_train_*.bin"))
    good = one.read_bytes()
    def is_refused(*flags):
        before = contents(tmp_path)
        with refused("do not change micro_batches, train_seq_len"):
            train(train_gpt, f"--resume={checkpoint}", *flags)
        assert contents(tmp_path) == before
    for place in (2000, len(good) - 2000):  # of the same length
        one.write_bytes(good[:place] + b"\7\0" * 9 + good[place + 18:])
        is_refused()
    one.write_bytes(two.read_bytes())  # in another order
    two.write_bytes(good)
    is_refused()
    two.write_bytes(one.read_bytes())
    one.write_bytes(good)
    is_refused("--train_seq_len=128")
    is_refused("--micro_batches=4")
    added = write_shard(folder / "t_train_000009.bin", [256, *range(250)] * 9)
    train(train_gpt, f"--resume={checkpoint}")
    assert f"\ndata: {added} 2259 tokens " in newest_log(tmp_path / "r").read_text()
    assert "\nchanged: " not in steps_of(tmp_path / "r")
    assert len(curve(tmp_path / "r")) == 19  # 12 steps, and 7 validations

@pytest.mark.method
def test_a_resume_finds_moved_data_and_may_cut_steps_otherwise(tmp_path, shards):
    checkpoint = broken_run(tmp_path / "r", shards)
    shutil.copytree(Path(shards[0].split("=")[1]).parent, tmp_path / "moved")
    train(train_gpt, f"--resume={checkpoint}", "--train_seq_len=128", "--micro_batches=4",
          f"--train_files={tmp_path}/moved/t_train_*.bin")
    assert len(curve(tmp_path / "r")) == 19

def test_a_complete_run_gives_its_result_again(tmp_path, shards, whole):
    """A kill between the last checkpoint and the result costs nothing."""
    train(train_gpt, *RUN, *shards, f"--records={tmp_path}")
    end = newest_checkpoint(tmp_path)
    (result,) = re.findall("(?m)^final_val_loss: .*", log_of(tmp_path))
    train(train_gpt, f"--resume={end}")
    assert f"\n{result}\n" in steps_of(tmp_path)
    assert steps_of(tmp_path).count("\nstep:") == 1 and "\ncheckpoint: " not in steps_of(tmp_path)
    assert_same_run(tmp_path, whole)

@pytest.mark.method
def test_a_complete_run_goes_on_with_more_steps(tmp_path, shards, whole):
    train(train_gpt, *RUN, *shards, f"--records={tmp_path}")
    end = newest_checkpoint(tmp_path)
    train(train_gpt, f"--resume={end}", "--num_iterations=14")
    assert re.findall("(?m)^changed: .*", steps_of(tmp_path)) == [
        "changed: num_iterations = 14, was 12",
        "changed: rates and window depend on step / num_iterations, so both jump"]
    lines = curve(tmp_path)
    assert lines[:len(curve(whole))] == curve(whole)
    assert [line.step for line in lines[len(curve(whole)):]] == [13, 14, 14]
    with pytest.raises(UserError, match="the run has already done 12 steps"):
        train(train_gpt, f"--resume={end}", "--num_iterations=11")

@pytest.mark.parametrize("edit, words", [
    (lambda saved: saved["settings"].pop("muon_lr"),
     "script and checkpoint differ in the settings .*'muon_lr'"),
    (lambda saved: saved["state"]["model"].update(own=torch.ones(2)),
     r"does not match.*\bmodel\b.*\bown\b"),
    (lambda saved: saved["state"]["Adam mean"].update({"lm_head.weight": torch.ones(2)}),
     r"does not match.*\bAdam mean\b.*\blm_head\.weight\b")], ids=["setting", "tensor", "shape"])
def test_a_checkpoint_of_another_script_is_refused_first(tmp_path, whole, edit, words):
    saved = load_checkpoint(whole)
    edit(saved)
    checkpoint = tmp_path / "step00000012.pt"
    torch.save(saved, checkpoint)
    with refused(words):
        train(train_gpt, f"--resume={checkpoint}", f"--records={tmp_path}")
    assert list(tmp_path.iterdir()) == [checkpoint]
    if "muon_lr" in words:  # named, it is decided
        train(train_gpt, f"--resume={checkpoint}", f"--records={tmp_path}", "--muon_lr=0.045")

class Harmful:
    def __reduce__(self):  # what a pickle would do if it were allowed to
        return os.mkdir, ("harmed",)

@pytest.mark.quick
def test_what_is_no_whole_checkpoint_is_one_line(tmp_path, shards, whole, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkpoint = broken_run("r", shards)
    bad = tmp_path / "bad"
    bad.mkdir()
    (bad / "empty").touch()
    torch.save(load_checkpoint("r")["state"]["model"], bad / "weights")
    torch.save([1, 2, 3], bad / "list")
    torch.save({"data_read": Harmful()}, bad / "acts")
    before = contents(tmp_path)
    for path in [*bad.iterdir(), "nowhere", log_path("r"), checkpoint.parent]:
        with refused(f"--resume={path} cannot be used .*give a "):
            train(train_gpt, f"--resume={path}")
    assert contents(tmp_path) == before and not Path("harmed").exists()
    train(train_gpt, f"--resume={checkpoint.with_name('step00000003.pt')}")  # the one before
    assert_same_run("r", whole)

WEIGHTS = torch.arange(300.0)
@pytest.mark.quick
@settings(max_examples=150, deadline=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_damage_to_a_checkpoint_changes_what_is_read(tmp_path, data):
    """It is refused in one line, or the damage lies where nothing is read."""
    path = tmp_path / "step00000003.pt"
    facts = {"step": 3, "settings": {"name": "a"}, "data_read": "b"}
    torch.save(facts | {"state": {"w": WEIGHTS}}, path)
    content = path.read_bytes()
    at = data.draw(st.integers(0, len(content) - 1) | st.integers(0, 16))
    new = data.draw(st.binary(min_size=1, max_size=64))
    path.write_bytes(data.draw(st.sampled_from([
        content[:at], content[:at] + new + content[at + len(new):], content + new,
        content[:at] + bytes(min(600, len(content) - at)) + content[at + 600:]])))
    try:
        read = read_checkpoint(path)
    except UserError as e:
        assert str(path) in str(e) and "damaged" in str(e) and "\n" not in str(e)
    else:
        assert len(path.read_bytes()) >= len(content)
        assert torch.equal(read.pop("state")["w"], WEIGHTS) and read == facts

@pytest.mark.parametrize("changed", ["same.py", "t_train_000002.bin"])
def test_two_machines_with_different_files_are_refused(tmp_path, shards, changed):
    """As where the second machine has other shards under the same names."""
    for rank in "01":
        shutil.copytree(Path(shards[0].split("=")[1]).parent, tmp_path / rank)
        shutil.copy(train_gpt.__file__, tmp_path / rank / "same.py")
    path = tmp_path / "1" / changed
    text = bytearray(path.read_bytes())
    text[-1:] = b" " if changed == "same.py" else bytes([text[-1] ^ 1])  # of the last token
    path.write_bytes(text)
    start = tmp_path / "start.py"
    start.write_text("import os, runpy\nos.chdir(os.environ['RANK'])\n"
                     "runpy.run_path(os.path.abspath('same.py'), run_name='__main__')\n")
    done = launch(*LONG, "--train_files=t_train*.bin", "--val_files=t_val*.bin", ranks=2,
                  script=start, cwd=tmp_path, check=False)
    errors = re.findall("(?m)^error: .*", done.stderr)
    assert done.returncode and all("data differ between " in line for line in errors), done.stderr
    assert errors and not list(tmp_path.glob("?/records")), "nothing was begun"

def test_other_numbers_of_ranks_and_an_error_on_one_of_them(tmp_path, shards, whole):
    checkpoint = broken_run(tmp_path, shards, step=5)
    script = planted(tmp_path, "require(step < 7 or world.rank == 0, 'planted error')")
    done = launch(f"--resume={checkpoint}", ranks=2, script=script, check=False)
    assert done.returncode == 1
    assert re.findall("(?m)^.*planted error.*", done.stderr) == ["error: planted error"]
    train(train_gpt, f"--resume={newest_checkpoint(tmp_path)}")
    heads = [log.read_text() for log in sorted(tmp_path.glob("*.log"))]
    assert [re.findall(r"(?m)^ranks: (\d)", head) for head in heads] == [["1"], ["2"], ["1"]]
    assert [re.findall(r"(?m)^resumed: .* at step (\d)$", head) for head in heads[1:]] == [
        ["3"], ["6"]]
    mine, theirs = curve(tmp_path), curve(whole)  # but for the rounding of other sums
    assert [line._replace(loss=0) for line in mine] == [line._replace(loss=0) for line in theirs]
    assert [line.loss for line in mine] == pytest.approx([line.loss for line in theirs], abs=0.02)

@pytest.mark.quick
def test_logs_of_one_second_take_the_next_free_name(tmp_path, shards, monkeypatch):
    class Frozen(datetime):
        now = partial(datetime, 2026, 1, 1, 0, 0, 0, 0)
    monkeypatch.setattr(train_gpt, "datetime", Frozen)
    for _ in range(3):
        train(train_gpt, *TINY, *shards, "--num_iterations=1", f"--records={tmp_path}",
              "--save_every=0")
    logs = sorted(path.name for path in tmp_path.iterdir())
    assert logs == [f"2026-01-01T00-00-0{second}Z_demo.log" for second in range(3)], "alone"
    for log in logs:
        assert (tmp_path / log).read_text().endswith(f"\nlog: {tmp_path / log}\n")

@pytest.fixture
def limit_files():
    """A function that has no file grow beyond this size, as on a full disk."""
    def limit(size=resource.RLIM_INFINITY):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    yield limit
    limit()

@pytest.mark.quick
@pytest.mark.parametrize("freed", [3, 8, 99])
@pytest.mark.parametrize("room", [200_000, 30], ids=["for the log alone", "for half a line"])
def test_a_full_disk_does_not_end_a_run(limit_files, tmp_path, shards, whole, capsys, room, freed):
    """It is full from step 2 on: for one line, to step 8 (the saves of steps 3 and 6 fail), or to
    the end. What cannot be written is said once."""
    with (before_step(2, lambda _: limit_files(newest_log(tmp_path).stat().st_size + room)),
          before_step(freed, lambda _: limit_files())):
        train(train_gpt, *RUN, *shards, f"--records={tmp_path}")
    limit_files()
    saved = ["step00000009.pt", "step00000012.pt"] if freed < 12 else []
    assert checkpoints(tmp_path) == saved
    if saved:
        assert_same_state(tmp_path, whole)
    console = capsys.readouterr().out
    assert f"\nfinal_val_loss: {curve(whole)[-1].loss:.4f} nats per token" in console
    warnings = re.findall("(?m)^warning: .*", console)
    log_warnings = [line for line in warnings if ".log cannot be written (disk full?)" in line]
    unsaved = re.findall(r"step0*(\d+)\.pt not saved \(File too large\); training goes on",
                         "\n".join(warnings))
    assert unsaved == {3: [], 8: ["3"], 99: ["3", "12"]}[freed], warnings
    assert len(log_warnings) == (room == 30), warnings
    assert len(warnings) == len(unsaved) + len(log_warnings), warnings
    rest = steps_of(tmp_path)
    if room > 30:
        assert curve(tmp_path) == curve(whole) and set(warnings) <= set(rest.splitlines())
        return
    before, mark, after = rest.partition("...\n")
    begun = before.splitlines()[-1]
    assert len(begun) == 30 and re.search(f"(?m)^{begun}.+$", console), "half of a line"
    assert bool(mark) == bool(after) == bool(saved) and console.endswith(after), "whole lines"

@pytest.mark.parametrize("folder", ["file", "file/below"])
def test_a_records_folder_that_cannot_be_made_is_one_line(tmp_path, shards, folder):
    (tmp_path / "file").write_text("")
    with refused(f"^--records={tmp_path / folder} cannot hold logs: "):
        train(train_gpt, *TINY, *shards, f"--records={tmp_path / folder}")

@pytest.mark.parametrize("console", ["> /dev/full", ">&- 2>&-"])
def test_a_run_needs_no_console(tmp_path, shards, whole, console):
    words = shlex.join([sys.executable, str(SCRIPT), *RUN, *shards, f"--records={tmp_path}/r"])
    done = run_sh("-c", f"{words} {console}", run="bash")
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert_same_run(tmp_path / "r", whole)
    own, expected = (steps_of(folder).splitlines() for folder in (tmp_path / "r", whole))
    assert [line[:5] for line in own] == [line[:5] for line in expected], "the log is whole"

@pytest.mark.quick
def test_weights_that_are_not_finite_are_never_saved(tmp_path, shards, whole):
    """The last step before a save makes them, and no validation was due."""
    def poison(model):
        next(model.parameters()).register_hook(lambda gradient: gradient * float("inf"))
    with (before_step(6, poison),
          pytest.raises(train_gpt.UserError, match="^step 6: val_loss is nan") as raised):
        train(train_gpt, *RUN, *shards, f"--records={tmp_path}")
    assert checkpoints(tmp_path) == ["step00000003.pt"]
    assert steps_of(tmp_path).endswith(f"\nerror: {raised.value}\n")
    train(train_gpt, f"--resume={newest_checkpoint(tmp_path)}")
    assert_same_run(tmp_path, whole)
