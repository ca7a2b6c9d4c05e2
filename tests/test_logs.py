"""tools/logs.py: log formats, text that is no result, chains of resumed runs."""

import hashlib
from pathlib import Path
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from data.common import UserError
from records.tools import logs

LOGS = Path(__file__).resolve().parent / "fixtures" / "logs"
LINE = "=" * 100

def script_line(source):
    """By which the source in a log is passed over exactly, as train_gpt.py writes it."""
    sha256 = hashlib.sha256(source.encode()).hexdigest()
    return f"script: sha256 {sha256} {source.count(chr(10))} lines"

def log_text(losses=(10.8258, 4.0, 3.279), seed=1, ms=100.0, every=125, hyper=(), env=(),
             source="import torch\n", total=None, notes=(), parent=None, first=0):
    """A log of this project that validates every `every` steps, with the given losses. With a
    parent, the path of its folder, it is resumed from the step `first`."""
    steps = []
    total = total or first + every * (len(losses) - 1)
    if parent:
        env = {**dict(env), "resumed": f"{parent}/step{first:08}.pt at step {first}"}
    for i, loss in enumerate(losses):
        step = first + i * every
        for kind, at in (("train", step - 1), ("train", step), ("val", step)):
            if at > first or kind == "val":
                steps.append(f"step:{at}/{total} {kind}_loss:{loss:.4f} train_time:{ms * at:.0f}ms "
                             f"step_avg:{ms:.2f}ms tokens:{at * 1000} lr:1.000 window:256")
    hyper = {"name": "'x'", "seed": seed, "vocab_size": 50257, "muon_lr": 0.05} | dict(hyper)
    env = {"torch": "2.11.0, Python 3.12.7", "ranks": 8, "gpus": "8 x NVIDIA H100"} | dict(env)
    return "\n".join([*(f"{k} = {v}" for k, v in hyper.items()), LINE,
                      *(f"{k}: {v}" for k, v in env.items()), script_line(source), LINE,
                      source.removesuffix("\n"), LINE,
                      "note: a remark", *notes, *steps, "peak_memory: 100 MiB on rank 0"]) + "\n"

def read_text(folder, text, name="x.log"):
    (folder / name).write_bytes(text.encode())
    return logs.read_run(folder / name, "x")

def losses_of(run):
    return [line.loss for line in run.validations]

def runs_in(path):
    return logs.Reader([]).runs(path, "x")

H100 = "8x H100 80GB HBM3"
PUBLISHED = {  # file: steps, total, loss, seconds, ms a step, free steps, validations, ...
    "2024-10_train_loss.txt": (60, 60, 3.2801, 7.0, 140.0, 10, 4, H100, "2.5.0+cu124"),
    "2024-12_no_train_loss.txt": (50, 50, 3.2790, 4.8, 120.0, 10, 3, H100,
                                  "2.6.0.dev20241105+cu124"),
    "2025-02_whole_clock.txt": (40, 40, 3.2768, 2.32, 58.0, 0, 5, H100, "2.7.0.dev20250208+cu126"),
    "2026_seconds.txt": (50, 50, 3.27729, 9.148, 182.95, 0, 3, H100, "2.10.0.dev20251210+cu126"),
    "console_only.log": (40, 40, 3.2774, 1.364, 34.1, 0, 3, None, None),
    "stopped_early.txt": (37, 60, 3.4809, 3.807, 141.0, 10, 2, H100, "2.6.0.dev20241105+cu124"),
    "quotes_a_log.txt": (20, 20, 3.2821, 1.2, 60.0, 0, 3, H100, "2.6.0.dev20241105+cu124")}
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_log(name):
    run = logs.read_run(LOGS / name, name)
    assert (run.steps, run.total, run.loss, run.seconds, run.ms_per_step, run.timed_on[3],
            len(run.validations), run.hardware, run.torch) == PUBLISHED[name]
    steps = [line.step for line in run.validations]
    assert steps == sorted(set(steps)) and losses_of(run)[0] > 10 and run.tokens is None
    assert run.finished == (name != "stopped_early.txt") and not run.diverged
    if name == "quotes_a_log.txt":
        text = (LOGS / name).read_text()
        listing = text[:text.index("Running Python")].rstrip("\n").removesuffix(LINE)
        assert run.source == listing.rstrip("\n") and run.hyperparameters == {}
        assert run.environment == {"python": "3.12.7", "torch": run.torch, "cuda": "12.4",
                                   "driver": "535.183.06", "gpus": "8 x NVIDIA H100 80GB HBM3"}

def test_one_head_and_several_runs(tmp_path):
    """As the optimizer track has them: the source once, the steps one run after the other."""
    text = (LOGS / "2026_seconds.txt").read_text()
    head = text[:text.index("step:0/50")]
    steps = text[len(head):]
    again = steps.replace("val_loss:3.27729", "val_loss:3.27801")
    for between in ("", "\n", "trial:2/30 seed:1\n", f"{LINE}\n=== seed 2 start ===\n"):
        (tmp_path / "x.txt").write_text(f"{head}{steps}{between}{again}")
        runs = runs_in(tmp_path / "x.txt")
        assert [(run.name, run.loss, run.finished) for run in runs] == [
            ("x#1", 3.27729, True), ("x#2", 3.27801, True)]
        assert runs[0].source == runs[1].source != "" and runs[1].hardware == H100
        assert runs[1].steps == 50 and len(runs[1].validations) == 3
    with pytest.raises(UserError, match="x.txt: holds 2 runs, expected one"):
        logs.read_run(tmp_path / "x.txt", "x")

@pytest.mark.parametrize("text, words", [
    ("step:100/300 val_loss:4.0 train_time:1ms step_avg:1ms\n"
     "step:200/300 val_loss:4.0 train_time:2ms step_avg:1ms\n"
     "step:192/300 val_loss:3.0 train_time:2ms step_avg:1ms\n", "go back from 200 to 192"),
    (log_text() + log_text(seed=2), "or several logs stand in this file"),
    (log_text().replace("import torch", "import numpy"), "its source is cut or changed"),
    ((LOGS / "quotes_a_log.txt").read_text() * 2, "several logs in one file: split it"),
    ("x = \"\"\"\nRunning Python 3.9.9\nstep:9/9 val_loss:0.1 train_time:1ms step_avg:1ms\n\"\"\"\n"
     + (LOGS / "quotes_a_log.txt").read_text(), "several logs in one file: split it")])
def test_runs_that_cannot_be_told_apart_are_refused(text, words, tmp_path):
    with pytest.raises(UserError, match=words):
        read_text(tmp_path, text)

@pytest.mark.parametrize("came, said, passed", [  # seconds, step, kind, train_time of each line
    ("19.037 0 val 0, 19.085 1 train 51, 20.655 30 train 1625, 20.677 30 val 1626, "  # on a CPU
     "20.726 31 train 1681, 22.241 60 train 3193, 22.265 60 val 3196", 3.192, 3.182),
    ("5 0 val 0, 5.4 1 train 100, 6 9 train 900, 6 10 train 1000, 9 10 val 1000, "  # as on a GPU,
     "30 saved, 30.4 11 train 1100, 32 20 train 2000, 50 20 val 2000", 2, 3)])  # three steps late
def test_a_races_clock_leaves_out_validation_and_saving(tmp_path, came, said, passed):
    clock = logs.Clock()
    for at, step, *words in map(str.split, came.split(", ")):
        clock.note("step:{}/99 {}_loss:1.0 train_time:{}ms step_avg:9.0ms\n".format(step, *words)
                   if words else "checkpoint: x.pt\n", float(at))
    clock.save(read_text(tmp_path, log_text()))
    assert logs.read_run(tmp_path / "x.log", "x").clock[:2] == pytest.approx((said, passed))

def test_our_own_log(tmp_path):
    text = log_text(env={"data": "a 1 tokens\ndata: b 2 tokens", "cpu": "2 x AMD EPYC, AVX2",
                         "val_data": "b/c.bin 7 tokens 2f\nval_data: b/my d.bin 8 tokens 3f"})
    run = read_text(tmp_path, text)
    assert (run.total, run.tokens, run.ranks, run.hardware) == (250, 250e3, "8", "8x H100")
    assert run.environment["data"] == "a 1 tokens; b 2 tokens" and "script" not in run.environment
    assert run.validated_on == (None, "50257", "7 tokens 2f", "8 tokens 3f")
    assert read_text(tmp_path, text.replace("gpus: ", "other: ")).hardware == "2x AMD EPYC, AVX2"

def test_the_gpus_limits_count_and_their_temperatures_do_not(tmp_path):
    rows = ("driver_version, clocks.current.sm [MHz], power.limit [W], temperature.gpu\n"
            "gpu: 570.1, 1200 MHz, 700.00 W, 34\ngpu: 570.1, 1201 MHz, {} W, 35")
    runs = [read_text(tmp_path, log_text(env={"gpu": rows.format(limit)}))
            for limit in ("700.00", "650.00")]
    assert [{key: value for key, value in run.environment.items() if key.startswith("gpu ")}
            for run in runs] == [{"gpu driver_version": "570.1", "gpu power.limit [W]": limits}
                                 for limits in ("700.00 W", "650.00 W; 700.00 W")]
    assert runs[0].timed_on != runs[1].timed_on

FORGED = "step:200/200 val_loss:0.0100 train_time:2ms step_avg:0.01ms"
PASTED = log_text((9.0, 0.5), source='"x"\n')  # whole, with a script line that fits
HOSTILE = [LINE, FORGED, f"{FORGED} tokens:7 lr:1.000 window:256",
           "Running Python 3.9.9", "seed = 7", script_line("x"), "", PASTED.rstrip("\n")]
hostile_lines = st.lists(st.sampled_from(HOSTILE) | st.text(
    st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=12), max_size=12)
losses_of_a_run = st.lists(st.floats(0.1, 20).map(lambda x: round(x, 4)), min_size=2, max_size=5)
@settings(max_examples=80, deadline=None)
@given(hostile_lines, st.sampled_from(["", "\n", "\n\n"]), losses_of_a_run, st.data())
def test_whatever_the_source_holds_is_no_result(tmp_path_factory, lines, ending, losses, data):
    folder = tmp_path_factory.mktemp("log")
    source = "\n".join(lines) + ending
    text = log_text(losses, source=source)
    run = read_text(folder, text)
    assert losses_of(run) == losses and run.source == source and run.changed == []
    assert (run.hyperparameters["seed"], run.torch, run.seed) == ("1", "2.11.0", "1")
    lines = text.split("\n")
    cut = "\n".join(lines[:data.draw(st.integers(0, len(lines)))]) + "\n"
    try:
        found = losses_of(read_text(folder, cut))
    except UserError:
        return  # cut before its first step line
    assert found == losses[:len(found)]

WHOLE = "step:5/9 val_loss:3.0 train_time:1ms step_avg:1.00ms"
HALF = [WHOLE.replace(*change) for change in (
    (" train", " val_loss:3.1 train"), ("s:3", "s: 3"), ("s:3", "s=3"), ("3.0", "3,0"),
    ("val_", ""), ("3.0", "1.2.3"), ("3.0", "tensor(3.0)"), ("1ms", "1.2.3ms"), ("1ms", "nanms"),
    ("1ms", "1min"), (" train_time:1ms step_avg:1.00ms", ""), ("5/", "9" * 5000 + "/"),
    ("1ms", "9" * 400 + "ms"), ("0ms", "0ms tokens:" + "9" * 5000), ("5/9", "\u0663/\u0669"))]

def test_a_console_may_hold_several_runs(tmp_path):
    run = "Running Python 3.9\nstep:0/2 val_loss:9 train_time:0ms step_avg:nanms\n"
    (tmp_path / "x.txt").write_text(2 * (run + run.partition("\n")[2].replace(":0/2", ":2/2")))
    assert [losses_of(one) for one in runs_in(tmp_path / "x.txt")] == 2 * [[9.0, 9.0]]

@pytest.mark.parametrize("line", [*HALF, f"50%|##  | 5/9{WHOLE}", f"\x1b[32m{WHOLE}"])
def test_a_step_line_that_is_not_understood_refuses_the_file(tmp_path, line):
    """By its number, in a console's capture and, if it begins the line, in a log of ours."""
    lines = log_text((9.0, 3.0)).partition("note: a remark\n")[2].splitlines()
    (tmp_path / "x.txt").write_text("\n".join(["W0518 torchrun", *lines[:2], line, *lines[2:]]))
    with pytest.raises(UserError, match=r"x.txt: no log \(line 4 begins as a step") as raised:
        runs_in(tmp_path / "x.txt")
    assert len(str(raised.value)) < 400 and "\n" not in str(raised.value)
    text = log_text((9.0, 3.0), notes=[line])
    number = text[:text.index(line)].count("\n") + 1
    if line.startswith("step"):
        with pytest.raises(UserError, match=rf"no log \(line {number} begins"):
            read_text(tmp_path, text)
    else:  # where a log of ours may quote it
        assert losses_of(read_text(tmp_path, text)) == [9.0, 3.0]
    (tmp_path / "x.txt").write_text("\n".join([*lines, line]))  # alive or killed: half a line
    assert losses_of(runs_in(tmp_path / "x.txt")[0]) == [9.0, 3.0]

@pytest.mark.parametrize("shown, loss", [
    ("3.277912378311157", 3.277912378311157), ("3.2779123783111572", 3.2779123783111572),
    ("3." + "1" * 60, 3.1111111111111112), ("9.9e-05", 9.9e-05), ("3.1E+00", 3.1), (".5", 0.5),
    ("+3.5", 3.5), *((nan, None) for nan in ("nan", "NaN", "-nan", "NAN", "inf", "-Infinity"))])
def test_losses_as_programs_write_them(tmp_path, shown, loss):
    run = read_text(tmp_path, log_text((9.0, 3.0)).replace("val_loss:3.0000", f"val_loss:{shown}"))
    assert losses_of(run) == [9.0, loss] and run.diverged == (loss is None) and run.finished

@pytest.mark.parametrize("encoding, old, new", [
    ("utf-8", "\n", "\r\n"), ("utf-8-sig", "", ""),
    ("utf-8", "\nstep:", "\n 50%|##  | 1/2 [00:01<00:01]\rstep:")])  # a progress bar goes back
def test_a_log_as_consoles_and_editors_leave_it(tmp_path, encoding, old, new):
    text = log_text((9.0, 4.0, 3.0))
    want = read_text(tmp_path, text).lines
    for own in (text, "\n" + text.partition("note: a remark\n")[2]):
        (tmp_path / "y.log").write_bytes(own.replace(old or "\0", new).encode(encoding))
        (run,) = runs_in(tmp_path / "y.log")
        assert run.lines == want and run.source == ("import torch\n" if own is text else "")

CHAIN = {  # name: losses, its parent, the step where it begins
    "a": ((10.8, 4.0, 3.9), None, 0),  # killed behind step 250 of 375
    "b": ((4.0, 3.8), "a", 125),  # resumed from step 125, and killed
    "c": ((3.8, 3.2), "b", 250),  # resumed from step 250, and finished
    "d": ((4.0, 3.7, 3.1), "a", 125),  # another one from step 125, which has finished
}

def write_chain(folder, names="abc", **more):
    for name in names:
        losses, parent, first = CHAIN[name]
        (folder / f"{name}.log").write_text(log_text(losses, parent=parent and f"gone/{parent}",
                                                     first=first, total=375, **more.get(name, {})))
    return folder

def read(*arguments):
    """{name: run}, where nothing is missing."""
    runs, unread = logs.read(map(str, arguments))
    assert unread == []
    return {run.name: run for run in runs}

def at_steps(run):
    return {line.step: line.loss for line in run.validations}

A_TO_C = {0: 10.8, 125: 4.0, 250: 3.8, 375: 3.2}
A_TO_D = {0: 10.8, 125: 4.0, 250: 3.7, 375: 3.1}
@pytest.mark.parametrize("names, argument, expected", [
    ("abc", "", {"c": A_TO_C}), ("abc", "c.log", {"c": A_TO_C}),
    ("abc", "b.log", {"b": {0: 10.8, 125: 4.0, 250: 3.8}}),
    ("abc", "a.log", {"a": {0: 10.8, 125: 4.0, 250: 3.9}}),
    ("abcd", "", {"c": A_TO_C, "d": A_TO_D}),
    ("abd", "", {"b": {0: 10.8, 125: 4.0, 250: 3.8}, "d": A_TO_D})])
def test_a_chain_is_one_run(tmp_path, names, argument, expected):
    """From a folder, and from its newest log. What came after a checkpoint is forgotten."""
    runs = read(write_chain(tmp_path, names) / argument)
    assert {name: at_steps(run) for name, run in runs.items()} == expected
    for name, run in runs.items():
        assert run.finished == (name in "cd") and (run.changed, run.mixed) == ([], [])
        steps = [(line.step, line.kind) for line in run.lines]
        assert steps == sorted(set(steps)) and run.missing is None
        assert len(run.logs) == {"a": 1, "c": 3}.get(name, 2) and run.logs[-1][1] == CHAIN[name][2]

def test_a_parent_is_found_where_folders_have_moved_to(tmp_path):
    """Beside the log; where the checkpoint's path says; in another folder that is named."""
    old, older, new = (tmp_path / name for name in ("old", "older", "new"))
    old.mkdir()
    new.mkdir()
    write_chain(old, "a").joinpath("a.log").rename(old / "2026_x.v1.log")
    child = new / "b.log"
    child.write_text(log_text((4.0, 3.8), parent=old / "2026_x.v1", first=125, total=375))
    assert len(read(child)["b"].logs) == 2
    old.rename(older)
    (run,), unread = logs.read([child])
    assert at_steps(run) == {125: 4.0, 250: 3.8} and unread == [
        f"{child}: read without its beginning, 2026_x.v1.log is missing; put that log beside this "
        "one, or name its folder too"]
    assert (run.missing, run.mixed) == ("2026_x.v1.log is missing", ["a missing log"])
    (run,) = read(child, older).values()
    assert len(run.logs) == 2 and run.mixed == []
    (older / "2026_x.v1.log").rename(new / "2026_x.v1.log")
    assert len(read(new)["b"].logs) == 2

HARMLESS = {"name": "'y'", "records": "'z'", "save_every": 9}
@pytest.mark.parametrize("b, c, mixed, changed", [
    ({"source": "import torch as t\n"}, {}, ["script"], []),
    ({"env": {"gpus": "8 x NVIDIA H200", "threads": "2"}}, {}, ["threads", "gpus"], []),
    ({"env": {"torch": "2.11.0, Python 3.13.0", "git": "abc", "command": "x"}}, {}, [], []),
    ({"env": {"ranks": 4, "torch": "2.12.0"}}, {}, ["ranks", "torch"], []),
    ({"hyper": {"muon_lr": 0.06} | HARMLESS}, {"hyper": {"new": 1}}, [],
     ["muon_lr was 0.05 and is 0.06", "muon_lr was 0.06 and is 0.05", "new was None and is 1"])])
def test_in_what_the_pieces_of_a_run_differ_is_told(tmp_path, b, c, mixed, changed):
    write_chain(tmp_path, b=b, c=c)
    (run,) = read(tmp_path).values()
    assert (run.mixed, run.changed) == (mixed, changed)

def test_a_line_that_a_full_disk_has_cut_is_no_result(tmp_path):
    text = log_text((10.8, 4.0, 3.2))
    last = text.index("step:250/250 val")
    for end in range(last + 1, text.index("\n", last)):
        run = read_text(tmp_path, f"{text[:end]}...\n{text[last:]}")
        assert losses_of(run) == [10.8, 4.0, 3.2]
        run = read_text(tmp_path, f"{text[:end]}...\nerror: no space\n")
        assert losses_of(run) == [10.8, 4.0] and not run.finished and run.lines[-1].step == 250
        assert losses_of(read_text(tmp_path, text[:end])) == [10.8, 4.0]  # killed there
