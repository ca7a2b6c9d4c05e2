"""records/compare.py: every log format, hostile logs, the statistics against exact values,
verdicts, tables, pictures, errors."""

import contextlib
import hashlib
import importlib.util
import io
import json
import math
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

ROOT = Path(__file__).resolve().parent.parent
LOGS = Path(__file__).resolve().parent / "fixtures" / "logs"
spec = importlib.util.spec_from_file_location("compare", ROOT / "records" / "compare.py")
compare = importlib.util.module_from_spec(spec)
sys.modules["compare"] = compare
spec.loader.exec_module(compare)

LINE = "=" * 100


def script_line(source):
    """The line by which the source in a log is passed over exactly."""
    lines = source.count("\n") + (not source.endswith("\n"))
    return f"script: sha256 {hashlib.sha256(source.encode()).hexdigest()} {lines} lines"


def log_text(losses=(10.8258, 4.0, 3.279), seed=1, ms=100.0, every=125, hyper=(), env=(),
             source="import torch\n", total=None, counted=True,
             end=("peak_memory: 100 MiB on rank 0",)):
    """A log of this project that validates every `every` steps, with the given losses; one that is
    not counted is of the time before a log named its source's number of lines."""
    steps = []
    total = total or every * (len(losses) - 1)
    for i, loss in enumerate(losses):
        step = i * every
        for kind, at in (("train", step - 1), ("train", step), ("val", step)):
            if at > 0 or kind == "val":
                steps.append(f"step:{at}/{total} {kind}_loss:{loss:.4f} train_time:{ms * at:.0f}ms "
                             f"step_avg:{ms:.2f}ms tokens:{at * 1000} lr:1.000 window:256")
    hyper = {"name": "'x'", "seed": seed, "vocab_size": 50257, "muon_lr": 0.05} | dict(hyper)
    env = {"torch": "2.11.0", "ranks": 8, "seed": seed, "gpus": "8 x NVIDIA H100"} | dict(env)
    return "\n".join([*(f"{k} = {v}" for k, v in hyper.items()), LINE,
                      *(f"{k}: {v}" for k, v in env.items()),
                      *([script_line(source)] if counted else []), LINE, source, LINE,
                      "note: a remark", *steps, *end]) + "\n"


def write(folder, finals, ms=(100.0,), first_seed=1, **more):
    """A folder of logs that end in the given losses; returns it as text."""
    folder.mkdir(parents=True, exist_ok=True)
    for i, final in enumerate(finals):
        (folder / f"run{i}.log").write_text(
            log_text((10.8258, 4.0 + i / 1000, final), seed=first_seed + i, ms=ms[i % len(ms)],
                     **more))
    return str(folder)


def sides(*folders, target=3.28):
    out = [compare.side_of(label, compare.read([folder], pytest.fail), target)
           for label, folder in zip("AB", folders)]
    return (*out, compare.compare(*out, target)) if len(out) == 2 else out[0]


def run_of(*validations):
    """A Run of (step, seconds, tokens, loss)."""
    lines = [compare.Line(*point, "val", None, math.nan) for point in validations]
    return compare.Run("x", "x", lines, "", {}, {}, "")


def run_main(capsys, *arguments):
    try:
        status = compare.main([str(a) for a in arguments])
    except SystemExit as e:
        status = e.code
    out = capsys.readouterr()
    return status, out.out, out.err


# --------------------------------------------------------------------------------------------------
# Formats

FORMATS = {  # file: runs, steps, total, loss, seconds, untimed, validations, hardware, torch
    "2024-05_no_clock.log": (1, 30, None, 3.299619, None, 0, 4, None, None),
    "2024-10_train_loss.txt": (1, 60, 60, 3.2801, 7.0, 10, 4, "8x H100 80GB HBM3", "2.5.0+cu124"),
    "2024-12_no_train_loss.txt": (1, 50, 50, 3.2790, 4.8, 10, 3, "8x H100 80GB HBM3",
                                  "2.6.0.dev20241105+cu124"),
    "2025-02_whole_clock.txt": (1, 40, 40, 3.2768, 2.32, 0, 5, "8x H100 80GB HBM3",
                                "2.7.0.dev20250208+cu126"),
    "2026_seconds.txt": (1, 50, 50, 3.27729, 9.148, 0, 3, "8x H100 80GB HBM3",
                         "2.10.0.dev20251210+cu126"),
    "console_only.log": (1, 40, 40, 3.2774, 1.364, 0, 3, None, None),
    "several_runs.txt": (3, 30, 30, 3.2773, 1.9, 10, 3, "8x H100 80GB HBM3",
                         "2.6.0.dev20241105+cu124"),
    "stopped_early.txt": (1, 37, 60, 3.4809, 3.807, 10, 2, "8x H100 80GB HBM3",
                          "2.6.0.dev20241105+cu124"),
    "quotes_a_log.txt": (1, 20, 20, 3.2821, 1.2, 0, 3, "8x H100 80GB HBM3",
                         "2.6.0.dev20241105+cu124"),
    "own_8gpu.log": (1, 40, 40, 3.2777, 4.082, 0, 5, "8x H100 80GB HBM3", "2.11.0+cu128"),
    "own_resumed.log": (1, 40, 40, 3.2767, 4.084, 0, 5, "8x H100 80GB HBM3", "2.11.0+cu128"),
    "own_cpu.log": (1, 24, 24, 1.9104, 0.708, 0, 4, "2x Example CPU 3.0 GHz", "2.13.0+cpu"),
}


def test_every_fixture_has_a_row():
    assert {p.name for p in LOGS.iterdir()} == {*FORMATS, "not_a_log.txt"}


@pytest.mark.parametrize("name", FORMATS)
def test_format(name):
    runs = compare.runs_in(LOGS / name, name)
    run = runs[0]
    assert (len(runs), run.steps, run.total, run.loss, run.seconds, run.untimed,
            len(run.validations), run.hardware,
            run.environment.get("torch")) == FORMATS[name]
    steps = [v[0] for v in run.validations]
    assert steps == sorted(set(steps)) and run.validations[0][3] > 10
    assert not math.isnan(run.loss) and run.finished == (name != "stopped_early.txt")


@pytest.mark.parametrize("name", FORMATS)
def test_windows_line_ends_change_nothing(name, tmp_path):
    (tmp_path / name).write_bytes((LOGS / name).read_bytes().replace(b"\n", b"\r\n"))
    for a, b in zip(compare.runs_in(LOGS / name, "x"), compare.runs_in(tmp_path / name, "x"),
                    strict=True):
        for name_ in ("validations", "seconds", "tokens", "hardware", "ranks", "source"):
            assert getattr(a, name_) == getattr(b, name_)


def test_ten_free_steps_are_outside_the_clock():
    run, = compare.runs_in(LOGS / "2024-10_train_loss.txt", "x")
    assert " val_loss:10.8258 train_time:285ms " in (LOGS / "2024-10_train_loss.txt").read_text()
    assert run.validations[0][:2] == (0, 0.0) and run.validations[1][:2] == (20, 1.4)
    assert run.ms_per_step == pytest.approx(140.0)  # as the log says: 7000 ms over 50 timed steps
    whole, = compare.runs_in(LOGS / "2025-02_whole_clock.txt", "x")
    assert whole.ms_per_step == pytest.approx(58.0)


def test_several_runs_in_one_file():
    runs = compare.runs_in(LOGS / "several_runs.txt", "x")
    assert [run.name for run in runs] == ["x#1", "x#2", "x#3"]
    assert len({run.loss for run in runs}) == 3
    assert [run.seconds for run in runs] == [1.9, 1.9, 1.92]
    assert all(run.hardware == "8x H100 80GB HBM3" and "num_iterations" in run.hyperparameters
               for run in runs)


def test_a_run_that_dies_after_its_first_validation_is_no_part_of_the_next():
    line = "step:{}/10 val_loss:{} train_time:{}ms step_avg:1.00ms\n"
    runs = compare.split_runs(line.format(0, 9, 0) + line.format(0, 9, 0) + line.format(10, 3, 10))
    assert [len(lines) for lines in runs] == [1, 2]


def test_resumption_replaces_the_steps_that_are_done_again(tmp_path):
    text = (LOGS / "own_resumed.log").read_text()
    steps = text.split(LINE)[-1]
    assert steps.count("step:21/40 ") == 2 and steps.count("step:20/40 val_loss") == 1
    run, = compare.runs_in(LOGS / "own_resumed.log", "x")
    assert [v[0] for v in run.validations] == [0, 10, 20, 30, 40]
    text = text.replace("\nresumed from", "\nstarted like")  # else it is a second run
    (tmp_path / "two.log").write_text(text)
    assert len(compare.runs_in(tmp_path / "two.log", "x")) == 2


def test_a_script_is_no_log_even_if_it_quotes_one(tmp_path):
    own = (LOGS / "own_8gpu.log").read_text().split(f"{LINE}\n", 2)[2].rpartition(LINE)[0]
    assert "\nstep:9999/9999 val_loss" in own
    for name, text in {"a.py": own, "b.py": own.replace(LINE, ""),
                       "c.py": "# a remark\n" + own}.items():
        (tmp_path / name).write_text(text)
        with pytest.raises(compare.BadInput, match="no log"):
            compare.runs_in(tmp_path / name, "x")


def test_source_and_steps_without_a_separator(tmp_path):
    text = (LOGS / "quotes_a_log.txt").read_text()
    source, _, steps = text.rpartition(LINE)
    (tmp_path / "x.txt").write_text(source.split("Running Python")[0].replace(LINE, "") + steps)
    run, = compare.runs_in(tmp_path / "x.txt", "x")
    assert (run.steps, run.loss) == (20, 3.2821)


def test_foreign_source_is_the_whole_listing():
    run, = compare.runs_in(LOGS / "quotes_a_log.txt", "x")
    text = (LOGS / "quotes_a_log.txt").read_text()
    listing = text[:text.index("Running Python")].rstrip("\n").removesuffix(LINE)
    assert run.source == listing.rstrip("\n")
    assert run.hyperparameters == {"input_bin": '"data/train_*.bin"', "num_iterations": "20",
                                   "lr": "0.05"}
    assert run.environment["driver"] == "535.183.06" and run.environment["cuda"] == "12.4"


source_lines = st.lists(st.one_of(st.just(LINE),
                                  st.just("step:5/5 val_loss:1.0 train_time:5ms step_avg:1.00ms"),
                                  st.just("s:1 tel:2.0"), st.just('"""'), st.just("import os"),
                                  st.just("resumed at step 3"),
                                  st.text(st.characters(codec="utf-8", exclude_characters="\r\n\0"),
                                          max_size=30)), max_size=12)


@pytest.fixture(scope="module")
def one_path(tmp_path_factory):
    return tmp_path_factory.mktemp("log") / "x.log"


@settings(max_examples=60, deadline=None)
@given(source_lines, st.lists(st.floats(0.1, 20).map(lambda x: round(x, 4)), min_size=2,
                              max_size=5))
def test_own_log_reads_back_whatever_the_source_holds(one_path, lines, losses):
    source = "\n".join(lines).rstrip("\n")
    one_path.write_text(log_text(losses, source=source), encoding="utf-8", newline="")
    run, = compare.runs_in(one_path, "x")
    assert [v[3] for v in run.validations] == losses and run.source == source
    assert run.tokens == 125_000 * (len(losses) - 1) and run.hyperparameters["muon_lr"] == "0.05"
    assert run.end == {"peak_memory": "100 MiB on rank 0"}


def test_what_follows_the_steps():
    # It ends with a sample of dialogue, which is no measurement.
    run, = compare.runs_in(LOGS / "own_cpu.log", "x")
    assert run.end == {"peak_memory": "640 MiB on rank 0",
                       "final_val_loss": "1.9104 nats per token, on 262144 tokens"}


def test_gpu_table_keeps_limits_and_drops_temperatures():
    run, = compare.runs_in(LOGS / "own_8gpu.log", "x")
    assert run.environment["gpu power.limit [W]"] == "700.00 W"
    assert run.environment["gpu clocks.max.sm [MHz]"] == "1980 MHz"
    assert not any("temperature" in key or "current" in key and "ecc" not in key
                   for key in run.environment)


# --------------------------------------------------------------------------------------------------
# Hostile logs: no text that a user or a model wrote is a result

FORGED = "step:200/200 val_loss:0.0100 train_time:2ms step_avg:0.01ms"
PASTED = log_text((9.0, 0.5), source='"x"\n').splitlines()  # whole, with a script line that fits
HOSTILE = [LINE, FORGED, f"{FORGED} tokens:7 lr:1.000 window:256",
           "step:3/200 train_loss:0.0100 train_time:1ms step_avg:1.00ms",
           "s:3 tel:0.100000", "clock: from the first step on", "note: a remark", "sample:",
           "resumed: step 3 at noon",
           "changed: --seed was 1 and is 2", "note: resumed although the seed differs",
           "Running Python 3.9.9", "import os",
           "seed = 7", script_line("x"), "peak_memory: 1 MiB on rank 0",
           "final_val_loss: 0.01 nats per token, on 1 tokens",
           "# a remark", "", "class Hyperparameters:", "    lr = 0.7", '"quoted"', "it's"]
harmless = st.text(st.characters(codec="utf-8", exclude_characters="\r\n\0\\"), max_size=12)
hostile_lines = st.lists(st.one_of(st.sampled_from([*HOSTILE, "\n".join(PASTED)]), harmless),
                         max_size=8)


@st.composite
def hostile_sources(draw):
    """Python whose strings and comments hold whatever looks like a log."""
    docstring = "\n".join(draw(hostile_lines)).replace('"""', "")
    notes = "\n".join(draw(hostile_lines)).replace("'", "")
    first = draw(st.sampled_from(["", '# it\'s a """ remark\n']))
    last = draw(st.sampled_from(["", "x = 1", "\n\n"]))
    source = (f'{first}"""About:\n{docstring}\n"""\nimport torch  # it\'s used\n\n'
              f"NOTES = r'''\n{notes}\n'''\n{last}")
    compile(source, "source", "exec")
    return source


losses_of_a_run = st.lists(st.floats(0.1, 20).map(lambda x: round(x, 4)), min_size=2, max_size=5)


@settings(max_examples=150, deadline=None)
@given(hostile_sources(), hostile_lines, losses_of_a_run, st.booleans(), st.data())
def test_quoted_and_sampled_text_is_no_result(one_path, source, sample, losses, counted, data):
    text = log_text(losses, source=source, counted=counted,
                    end=["peak_memory: 100 MiB on rank 0", "sample:", *sample])
    one_path.write_text(text, encoding="utf-8", newline="")
    run, = compare.runs_in(one_path, "x")
    assert [v[3] for v in run.validations] == losses and run.source == source and run.changed == []
    assert (run.hyperparameters["seed"], run.environment["torch"], run.seed) == ("1", "2.11.0", "1")
    assert run.end == {"peak_memory": "100 MiB on rank 0"} and "script" not in run.environment
    lines = text.split("\n")
    one_path.write_text("\n".join(lines[:data.draw(st.integers(0, len(lines)))]) + "\n",
                        encoding="utf-8", newline="")
    try:
        cut, = compare.runs_in(one_path, "x")
    except compare.BadInput:
        return  # cut before its first step line
    assert cut.validations == run.validations[:len(cut.validations)]


@pytest.mark.parametrize("counted", [True, False])
def test_a_log_that_quotes_logs_and_samples_step_lines(tmp_path, counted):
    source = '"""Gave:\n' + "\n".join(PASTED + HOSTILE) + '\n"""\nimport torch\n'
    (tmp_path / "x.log").write_text(log_text(source=source, counted=counted,
                                             end=["sample:", LINE, FORGED, *PASTED]))
    run, = compare.runs_in(tmp_path / "x.log", "x")
    assert (run.loss, run.steps, run.seconds, run.finished, run.source) == (3.279, 250, 25.0, True,
                                                                            source)


@pytest.mark.parametrize("ending", ["", "\n", "\n\n", "\n\n\n"])
def test_a_counted_source_is_exact_and_need_not_be_python(tmp_path, ending):
    source = f'x = """\n{LINE}\nclock: now\n{FORGED}\nnever closed{ending}'
    (tmp_path / "x.log").write_text(log_text(source=source))
    run, = compare.runs_in(tmp_path / "x.log", "x")
    assert run.source == source and run.loss == 3.279
    assert f"sha256 {compare.plain(run)['source']} " in (tmp_path / "x.log").read_text()
    wrong = (tmp_path / "x.log").read_text().replace(script_line(source),
                                                     script_line(source + "\nmore\nlines"))
    (tmp_path / "x.log").write_text(wrong)
    with pytest.raises(compare.BadInput, match="no log"):
        compare.runs_in(tmp_path / "x.log", "x")


def test_a_source_written_without_its_last_newline_is_known_by_its_hash(tmp_path):
    source = f'"""\n{LINE}\n{FORGED}\n"""\nimport torch\n'
    text = log_text(source=source).replace(f"{source}\n", source)
    assert log_text(source=source) != text
    (tmp_path / "x.log").write_text(text)
    run, = compare.runs_in(tmp_path / "x.log", "x")
    assert run.source == source and run.loss == 3.279


def test_a_captured_console_with_a_sample(tmp_path):
    console = (LOGS / "console_only.log").read_text()
    (tmp_path / "x.log").write_text("\n".join([console, "sample:", FORGED, LINE, *PASTED]))
    run, = compare.runs_in(tmp_path / "x.log", "x")
    assert (run.loss, run.total) == (3.2774, 40)


def test_two_logs_of_ours_in_one_file_are_not_mixed(tmp_path):
    (tmp_path / "x.log").write_text(log_text() + log_text((9.0, 8.0), hyper={"muon_lr": 9},
                                                          source=f'"""\n{FORGED}\n"""\n'))
    run, = compare.runs_in(tmp_path / "x.log", "x")
    assert (run.loss, run.hyperparameters["muon_lr"]) == (3.279, "0.05")


STRANGE = ["step:5/9 val_loss:3.0 train_time:1.2.3ms step_avg:1.00ms",
           f"step:{'9' * 5000}/9 val_loss:3.0 train_time:1ms step_avg:1ms",
           "step:5/0 val_loss:3.0 train_time:1ms step_avg:1ms",
           "step:5/9 val_loss:x train_time:1ms step_avg:1.00ms",
           "step:5/9 val_loss:1.2.3 train_time:1ms step_avg:1.00ms",
           "step:5/9 val_loss:inf train_time:1ms step_avg:1.00ms",
           f"step:5/9 val_loss:3.0 train_time:{'9' * 400}ms step_avg:1ms",
           "step:5/9 val_loss:3.0 train_time:nanms step_avg:5ms",
           "step:20/9 val_loss:3.0 train_time:nanms step_avg:5ms",
           "step:20/9 val_loss:2.0 train_time:5ms step_avg:0ms",
           "step:5/9 val_loss:3.0 train_time:1ms step_avg:1ms tokens:" + "9" * 5000, "s:5 tel:x",
           "s:5 tel:3", "s:٣ tel:3",
           "step:٣/٩ val_loss:3.0 train_time:1ms step_avg:1ms",
           "step:9/9 val_loss:-1.0 train_time:0ms step_avg:0ms tokens:0"]


@pytest.mark.filterwarnings("error")
@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from([*STRANGE, *HOSTILE]), max_size=8),
       st.lists(st.sampled_from([*STRANGE, *HOSTILE]), max_size=8))
def test_strange_lines_are_no_traceback(one_path, a, b):
    other = one_path.with_name("y.log")
    one_path.write_text("\n".join(["step:0/9 val_loss:9.0 train_time:0ms step_avg:nanms", *a]))
    other.write_text("\n".join([log_text((9.0, 3.0)), *b]))
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert compare.main([str(one_path), "--vs", str(other), "--target", "3.5"]) == 0
        out.truncate(0)
        assert compare.main([str(one_path), "--vs", str(other), "--json"]) == 0
    json.loads(out.getvalue().lstrip("\0"), parse_constant=pytest.fail)


@pytest.mark.parametrize("line", ["step:0/0 val_loss:3.0 train_time:0ms step_avg:0ms tokens:5",
                                  *STRANGE])
def test_a_file_of_one_strange_line_against_itself_and_another(tmp_path, capsys, line):
    for name in ("x.log", "y.log"):
        (tmp_path / name).write_text(line + "\n")
    for more in (["--json"], ["--plot", str(tmp_path / "x.svg")]):
        try:
            assert compare.main([str(tmp_path / "x.log"), "--vs", str(tmp_path / "y.log"),
                                 *more]) == 0
        except compare.BadInput as e:
            assert str(e).startswith("no run to report") or "no picture" in str(e)


@pytest.mark.parametrize("line", [
    FORGED + " a:b:c:d" * 60 + " !", FORGED[:30] + "x" * 50_000, "key: a" + " " * 50_000 + "b",
                                  "import x\n" * 20_000,
    '"""\n' * 20_001, "'" * 50_000, "class Hyperparameters:\n" + "    \n" * 20_000, "#" * 50_000,
                                  "=" * 50_000,
    "class Hyperparameters:\n    a = 1" + " " * 50_000 + "2 # x", "| 0 NVIDIA" + " " * 50_000 + "x",
                                  "sample: \n" * 20_000,
    "|   0  NVIDIA H100" + " x" * 20_000], ids=range(13))
def test_no_text_takes_long(tmp_path, line):
    step = "step:{}/9 val_loss:9.0 train_time:0ms step_avg:nanms"
    ours = log_text(source="import torch\n", counted=False, end=[line])
    for text in (f"import os\n{LINE}\n{line}\n{step.format(0)}\n{line}\n{step.format(9)}\n",
                 f"{step.format(0)}\n{line}\n", ours):
        (tmp_path / "x.log").write_text(text)
        start = time.perf_counter()
        with contextlib.suppress(compare.BadInput):
            compare.runs_in(tmp_path / "x.log", "x")
        assert time.perf_counter() - start < 5


# --------------------------------------------------------------------------------------------------
# Resumed runs

def resumed(final, seed, *notes):
    """A log that was resumed at step 125, with lines about it."""
    lines = log_text((10.8, 4.0 + seed / 1000, final), seed=seed,
                     ms=100 + seed / 10).splitlines(keepends=True)
    at = next(i for i, line in enumerate(lines) if line.startswith("step:125/250 val")) + 1
    notes = ["resumed: step 125 at 2026-11-22T01:00:00Z, on 8 rank(s) of here", *notes]
    return "".join([*lines[:at], *(f"{note}\n" for note in notes), *lines[at:]])


@pytest.mark.parametrize("notes, counts", [
    ([], True), (["changed: --save_every was 125 and is 0",
                  "changed: --records was 'a' and is 'b'"], True),
    (["checkpoint: changed: --seed"], True), (["changed: --muon_lr was 0.05 and is 0.06"], False),
    (["changed: save_every was 125 and is 0"], True),
                                           (["changed: muon_lr was 0.05 and is 0.06"], False),
    (["changed: the script (its sha256)"], False), (["changed: the data: other shards"], False),
    (["note: resumed although --muon_lr was 0.05"], False)])
def test_a_run_resumed_with_other_settings_is_left_out(tmp_path, notes, counts):
    folder = write(tmp_path / "a", GOOD)
    (tmp_path / "a" / "resumed.log").write_text(resumed(3.2, 90, *notes))
    side, _, result = sides(folder, write(tmp_path / "b", SAME, first_seed=30))
    assert len(side["runs"]) == 5 and side["loss"]["n"] == 4 + counts
    said = [w for w in side["warnings"] if "resumed with other settings" in w]
    assert len(said) == (not counts) and "But A" not in result["verdict"]
    if not counts:
        assert notes[0].partition(" ")[2].removeprefix("resumed although ") in said[0]
        assert "run resumed of A" in said[0]
        assert "left out" in said[0] and side["loss"]["mean"] == pytest.approx(np.mean(GOOD))


def test_where_all_runs_were_resumed_anew_they_are_used_and_it_is_said(tmp_path):
    a = tmp_path / "a"
    a.mkdir()
    for seed in (1, 2, 3):
        (a / f"{seed}.log").write_text(resumed(3.27 + seed / 1000, seed,
                                               "changed: --muon_lr was 0.05 and is 0.06"))
    (a / "stopped.log").write_text(log_text((10.8, 4.5), seed=50, total=250))
    side, _, result = sides(str(a), write(tmp_path / "b", SAME, first_seed=30))
    said = [w for w in side["warnings"] if "other settings" in w]
    assert side["loss"]["n"] == len(said) == 3
    assert all("kept, for there is no other" in w for w in said)
    assert "But A has but runs resumed with new settings." in result["verdict"]


# --------------------------------------------------------------------------------------------------
# Statistics

def test_p_value_against_closed_forms():
    # Student's t has closed distribution functions for 1 and 2 degrees of freedom
    a = [3.277, 3.279]
    t = (np.mean(a) - 3.28) / (np.std(a, ddof=1) / math.sqrt(2))
    assert compare.p_below(a, 3.28) == pytest.approx(0.5 + math.atan(t) / math.pi)
    b = [3.277, 3.279, 3.2785]
    t = (np.mean(b) - 3.28) / (np.std(b, ddof=1) / math.sqrt(3))
    assert compare.p_below(b, 3.28) == pytest.approx(0.5 + t / (2 * math.sqrt(2 + t * t)))
    assert compare.p_below(b, 3.27) > 0.5


def test_spread_against_tables():
    out = compare.spread([2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0])
    # The first number is the 97.5 % point of t with 7 degrees of freedom, from tables.
    half = 2.364624 * 2.138090 / math.sqrt(8)
    assert (out["n"], out["mean"]) == (8, 5.0) and out["sd"] == pytest.approx(2.138090, abs=1e-6)
    assert out["interval"] == pytest.approx((5 - half, 5 + half), abs=1e-5)
    assert compare.spread([3.28]) == {"n": 1, "mean": 3.28, "sd": None, "interval": None}
    assert compare.spread([])["mean"] is None


def test_runs_needed():
    assert compare.runs_needed(0.001, 0.0013) == 13
    for margin, sd in ((0.001, 0.0013), (0.002, 0.0013), (0.001, 0.0005), (0.003, 0.0008)):
        needed = compare.runs_needed(margin, sd)
        for n in (needed - 1, needed):  # samples of exactly this mean and SD
            values = np.linspace(-1, 1, n) if n > 1 else np.zeros(1)
            values = 3.28 - margin + values * (sd / np.std(values, ddof=1) if n > 1 else 0)
            assert n < 2 or (stats.ttest_1samp(values, 3.28,
                                               alternative="less").pvalue < 0.01) == (n == needed)
    assert compare.runs_needed(-0.001, 0.0013) is None and compare.runs_needed(1e-9, 1.0) is None


def test_welch_against_scipy():
    a, b = [3.2781, 3.2790, 3.2772, 3.2785], [3.2801, 3.2799, 3.2807]
    test, out = stats.ttest_ind(a, b, equal_var=False), compare.welch(a, b)
    assert out["p"] == pytest.approx(test.pvalue)
    assert out["difference"] == pytest.approx(3.2782 - 3.2802333, abs=1e-7)
    assert out["interval"] == pytest.approx(tuple(test.confidence_interval(0.95)))
    assert compare.welch([1.0], [2.0, 3.0]) == {"difference": -1.5, "interval": None, "p": None}
    assert compare.welch([1.0, 1.0], [2.0, 2.0])["p"] is None
    assert compare.welch([], [1.0])["difference"] is None
    assert compare.welch([0.1 + 0.2, 0.3], [0.5, 0.5])["p"] is None  # rounding is no spread


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(32000, 33500).map(lambda x: x / 10000), min_size=2, max_size=20))
def test_statistics_agree_with_scipy(losses):
    out = compare.spread(losses)
    assert out["interval"][0] <= out["mean"] <= out["interval"][1]
    p = compare.p_below(losses, 3.28)
    if len(set(losses)) == 1:
        assert p is None and out["sd"] == 0
    else:
        assert p == pytest.approx(stats.ttest_1samp(losses, 3.28, alternative="less").pvalue)
        assert compare.p_below(losses, 3.27) >= p


def test_target_is_reached_on_the_line_between_validations():
    run = run_of((0, 0.0, 0, 11.0), (100, 10.0, 1, 4.0), (200, 30.0, 2, 3.0), (300, 40.0, 3, 2.0))
    assert run.reached(3.25) == (175.0, 25.0)
    assert run.reached(4.0) == (100.0, 10.0)
    assert run.reached(2.0) == (300.0, 40.0)
    assert run.reached(1.0) is None
    clockless = run_of((0, None, None, 4.0), (100, None, None, 3.0))
    assert clockless.reached(3.5) == (50.0, None)
    after_nan = run_of((0, 0.0, 0, math.nan), (100, 10.0, 1, 3.0))
    assert after_nan.reached(3.5) == (100.0, 10.0)


def test_loss_at_equal_time_interpolates(tmp_path):
    a = write(tmp_path / "a", [3.27, 3.27], ms=(50.0,))
    b = write(tmp_path / "b", [3.29, 3.29], ms=(100.0,), first_seed=9)
    *_, result = sides(a, b)
    assert [row["x"] for row in result["equal"]["step"]] == [125, 250]
    assert result["equal"]["step"][-1]["difference"] == pytest.approx(-0.02)
    times = result["equal"]["training time"]
    assert [row["x"] for row in times] == pytest.approx([2.5, 5, 7.5, 10,
                                                         12.5])  # as far as the shorter runs go
    assert times[-1]["a"] == pytest.approx(3.27) and times[-1]["b"] == pytest.approx(4.0005)
    assert times[0]["a"] == pytest.approx(10.8258 + (4.0005 - 10.8258) * 2.5 / 6.25)
    assert result["same_batch"] and result["equal"]["tokens"][-1]["x"] == 250_000


# --------------------------------------------------------------------------------------------------
# Warnings and verdicts

GOOD, SAME = [3.2770, 3.2781, 3.2776, 3.2783], [3.2772, 3.2779, 3.2778, 3.2784]


def test_a_sure_difference_is_claimed_with_its_hardware(tmp_path):
    *_, result = sides(write(tmp_path / "a", GOOD, ms=(99.0, 99.1)),
                       write(tmp_path / "b", SAME, ms=(100.0, 100.1)))
    assert result["verdict"].startswith("A is faster by 1.0 % (p = ")
    assert "same kind of hardware; no difference in loss is shown (p = " in result["verdict"]
    assert result["verdict"].endswith("4 against 4 runs. Below 3.28 at p < 0.01: A yes, B yes.")
    *_, swapped = sides(str(tmp_path / "b"), str(tmp_path / "a"))
    assert "A is slower by 1.0 %" in swapped["verdict"]


def test_a_loss_is_called_better_or_worse(tmp_path):
    low, high = write(tmp_path / "a", GOOD, ms=(99.0, 101.0)), write(tmp_path / "b",
                                                                     [3.2850, 3.2862, 3.2858],
                                                                     ms=(99.0, 101.0))
    *_, result = sides(low, high)
    assert "A is better by 0.0079 (p = " in result["verdict"]
    assert "No difference in time" in result["verdict"]
    assert "A yes, B not shown" in result["verdict"]
    assert "A is worse by" in sides(high, low)[2]["verdict"]


@pytest.mark.parametrize("p, words", [(0.009, "A is faster by 1 %"),
                                      (0.011, "A may be faster by 1 %, not surely"),
                                      (0.049, "A may be faster"),
                                      (0.051, "no difference in time is shown"),
                                      (None, "can be tested")])
def test_claims_are_as_strong_as_their_p_value(p, words):
    assert words in compare.claim("time", {"difference": -1.0, "p": p}, "1 %", ("faster", "slower"))


@pytest.mark.parametrize("more, words", [
    ({"env": {"gpus": "8 x NVIDIA H200"}}, "times do not compare, the hardware differs"),
    ({"env": {"ranks": 4}}, "times do not compare, the hardware differs"),
    ({"env": {"data": "d/val_0.bin 7 tokens sha256 aa"}}, "losses do not compare"),
    ({"hyper": {"val_tokens": 99}}, "losses do not compare"),
])
def test_what_does_not_compare_is_not_compared(tmp_path, more, words):
    *_, result = sides(write(tmp_path / "a", GOOD, ms=(50.0, 51.0), **more),
                       write(tmp_path / "b", SAME, ms=(99.0, 100.0)))
    assert words in result["verdict"].lower()
    assert ("faster" if "times" in words else "better") not in result["verdict"]


def test_moved_data_is_still_the_same_data(tmp_path):
    a = write(tmp_path / "a", GOOD, ms=(50.0, 51.0),
              env={"data": "here/val_0.bin 7 tokens sha256 aa"})
    b = write(tmp_path / "b", SAME, ms=(99.0, 100.0),
              env={"data": "elsewhere/val_0.bin 7 tokens sha256 aa"})
    assert "do not compare" not in sides(a, b)[2]["verdict"]


def test_clocks_of_different_eras_do_not_compare(tmp_path):
    for side, name in (("a", "2024-12_no_train_loss.txt"), ("b", "2025-02_whole_clock.txt")):
        (tmp_path / side).mkdir()
        text = (LOGS / name).read_text()
        for i in range(2):
            (tmp_path / side / f"{i}.txt").write_text(text.replace("val_loss:10.8258",
                                                                   f"val_loss:10.82{i}"))
    assert "one side's first ten steps were free" in sides(str(tmp_path / "a"),
                                                           str(tmp_path / "b"))[2]["verdict"]


def test_one_run_a_side_shows_nothing(tmp_path):
    *_, result = sides(write(tmp_path / "a", [3.2]), write(tmp_path / "b", [3.3]))
    assert result["verdict"] == ("Nothing is shown: 1 finished run of A against 1 of B, and spread "
                                 "takes at least 2 a side.")


def test_shared_seeds_and_copies_are_no_evidence(tmp_path):
    a, b = tmp_path / "a", write(tmp_path / "b", SAME)
    write(a, GOOD)
    (a / "run1.log").write_text(log_text((10.8, 4.0, 3.2781), seed=1))  # run0 has seed 1 too
    side_a, _, result = sides(str(a), b)
    assert any("share a seed" in w and "1 (2 runs)" in w for w in side_a["warnings"])
    assert "not independent" in result["verdict"] and "A is" not in result["verdict"]
    shutil.copy(a / "run0.log", a / "again.log")
    assert any("digit for digit" in w for w in sides(str(a))["warnings"])
    assert not sides(b)["warnings"]
    by_chance = tmp_path / "chance"  # two short runs may well agree to four digits
    by_chance.mkdir()
    for seed in (1, 2):
        (by_chance / f"{seed}.log").write_text(log_text((10.8258, 3.278), seed=seed,
                                                        ms=100.0 + seed))
    assert not sides(str(by_chance))["warnings"]


def test_a_file_counts_once_and_on_one_side(tmp_path):
    folder = write(tmp_path / "a", GOOD)
    assert len(compare.read([folder, f"{folder}/run0.log", f"{folder}/*.log"],
                            pytest.fail)) == len(GOOD)
    *_, result = sides(folder, folder)
    assert result["verdict"] == "Nothing is shown: 4 of the files stand on both sides."


def test_stopped_and_diverged_runs_are_named_and_left_out(tmp_path):
    folder = write(tmp_path / "a", GOOD)
    (tmp_path / "a" / "stopped.log").write_text(log_text((10.8, 4.5), seed=50, total=250))
    (tmp_path / "a" / "nan.log").write_text(log_text((10.8, 4.5, math.nan), seed=51))
    (tmp_path / "a" / "nan_early.log").write_text(log_text((10.8, math.nan), seed=52, total=250))
    side, _, result = sides(folder, write(tmp_path / "b", SAME))
    assert side["loss"]["n"] == 4 and side["loss"]["mean"] == pytest.approx(np.mean(GOOD))
    assert any(w.startswith("1 of the runs of A stopped early") for w in side["warnings"])
    assert any(w.startswith("2 of the runs of A ended with a loss that is not finite")
               for w in side["warnings"])
    assert result["verdict"].endswith("But A has runs that diverged.")


def test_a_side_that_mixes_settings_is_said_to(tmp_path):
    folder = write(tmp_path / "a", GOOD)
    write(tmp_path / "a" / "more", SAME, first_seed=30, hyper={"muon_lr": 0.06})
    side, _, result = sides(folder, write(tmp_path / "b", SAME, first_seed=60))
    assert side["mixed"] == ["muon_lr"] and result["verdict"].endswith("But A mixes settings.")


# --------------------------------------------------------------------------------------------------
# The command

def test_two_sides_in_the_promised_order(tmp_path, capsys):
    a = write(tmp_path / "a", GOOD, hyper={"muon_lr": 0.06, "windows": "'L" + "S" * 120 + "'"},
              env={"torch": "2.12.0"},
              source="import torch\nx = 2\n")
    b = write(tmp_path / "b", SAME, source="import torch\nx = 1\n")
    status, out, err = run_main(capsys, a, "--vs", b)
    wanted = ["A: 4 runs", "B: 4 runs", "hyperparameters: B -> A", "  muon_lr: 0.05 -> 0.06",
              "  windows:",
              "environment: B -> A", "  torch: 2.11.0 -> 2.12.0",
              "source of the first run of each side: B -> A", "-x = 1", "+x = 2",
              "loss at equal step",
              "loss at equal tokens", "loss at equal training time", "at the end", "verdict: "]
    places = [out.find(f"\n{line}" if line[0] != "A" else line) for line in wanted]
    assert places == sorted(places) and places[0] == 0 and status == 0 and err == ""
    assert "seed" not in out[places[2]:] and max(map(len, out.splitlines())) <= 100


def test_long_diffs_are_cut_unless_asked_for(tmp_path, capsys):
    a = write(tmp_path / "a", GOOD[:1], source="\n".join(f"x = {i}" for i in range(300)))
    b = write(tmp_path / "b", GOOD[:1])
    _, short, _ = run_main(capsys, a, "--vs", b)
    _, full, _ = run_main(capsys, a, "--vs", b, "--full-diff")
    assert "more lines of diff" in short and "+x = 299" not in short and "+x = 299" in full


def test_tables_fit_100_columns_whatever_the_names(tmp_path, capsys):
    for i, name in enumerate(("a" * 90, "b" * 120)):
        env = {"gpus": f"{i} x A GPU with an extraordinarily long name from somewhere",
               "torch": f"2.1{i}.0.dev20260101+cu999", "ranks": 8 + i}
        (tmp_path / f"{name}.log").write_text(log_text((10.8, 3.2 + i), seed=i, env=env))
    status, out, _ = run_main(capsys, tmp_path)
    assert status == 0 and "…" in out and max(map(len, out.splitlines())) <= 100
    for word in ("3.2000", "4.2000", "12.50 s", "100.00", "125k"):
        assert word in out  # figures are never cut


def test_needed_runs_are_printed(tmp_path, capsys):
    # SD 0.0013, 0.001 below the target: 13 runs, of which 3 are done
    losses = [3.2790 + x for x in (-0.0013, 0.0013, 0.0)]
    _, out, _ = run_main(capsys, write(tmp_path / "a", losses))
    assert ("mean below 3.28: p = 0.16 (one-sided t-test), not below 0.01; 10 more runs at this "
            "margin") in out
    _, out, _ = run_main(capsys, tmp_path / "a", "--target", "3.2")
    assert "more runs alone will not help" in out


def test_no_target_for_another_vocabulary(tmp_path, capsys):
    _, out, _ = run_main(capsys, LOGS / "own_cpu.log")
    assert "no target" in out and "3.28" not in out
    _, out, _ = run_main(capsys, LOGS / "own_cpu.log", "--target", "2")
    assert "to 2" in out


def test_what_is_no_log_costs_one_line_and_the_rest_goes_on(tmp_path, capsys):
    (tmp_path / "shard.bin").write_bytes(bytes(2000))
    status, out, err = run_main(capsys, LOGS / "not_a_log.txt", tmp_path / "shard.bin",
                                tmp_path / "absent.log", tmp_path,
                                tmp_path / "*.log", LOGS / "own_8gpu.log")
    assert status == 1 and "3.2777" in out and out.startswith("A: 1 run")
    lines = err.splitlines()
    assert len(lines) == 5 and [line.partition(": ")[2] for line in lines] == [
        "no .log or .txt file in this folder", "no file matches",
        "no log (no line of a step in it)", "no log (not a text file)",
        "cannot be read (No such file or directory)"]


@pytest.mark.parametrize("arguments", [(), ("--vs", "x.log"), ("x.log", "--plot", "x.jpg"),
                                       ("x.log", "--target", "nan"),
                                       ("x.log", "--nonsense")])
def test_wrong_usage_is_status_2(arguments, capsys):
    status, out, err = run_main(capsys, *arguments)
    assert status == 2 and out == "" and "compare.py: error:" in err or "error:" in err


def test_json_holds_everything_and_is_strict(tmp_path, capsys):
    a = write(tmp_path / "a", GOOD)
    (tmp_path / "a" / "nan.log").write_text(log_text((10.8, 4.5, math.nan), seed=51))
    status, out, _ = run_main(capsys, a, "--vs", write(tmp_path / "b", SAME), "--json")
    found = json.loads(out, parse_constant=pytest.fail)
    side = found["sides"][0]
    assert status == 0
    assert side["loss"]["n"] == 4
    assert side["loss"]["mean"] == pytest.approx(np.mean(GOOD))
    assert [run["loss"] for run in side["runs"]] == [None, *GOOD]
    assert len(side["runs"][1]["source"]) == 64
    assert side["runs"][1]["environment"]["torch"] == "2.11.0"
    assert side["runs"][1]["validations"][1] == [125, 12.5, 125000, 4.0] and side["runs"][1]["end"]
    assert found["comparison"]["verdict"] and found["comparison"]["equal"]["training time"]
    assert found["version"] == 1
    assert found["unread"] == []
    assert side["used"] == [f"run{i}" for i in range(len(GOOD))]
    assert side["target_reached"][0] is None and side["target_reached"][1][0] < 250


def test_in_json_numbers_are_numbers(tmp_path, capsys):
    hyper = {"adam_betas": (0.8, 0.95), "use_fp8": True, "val_files": "'a*.bin'", "odd": "{1, 2}",
             "huge": "9e999", "count": "4 * 8"}
    a = write(tmp_path / "a", GOOD, hyper=hyper)
    b = write(tmp_path / "b", SAME, hyper={**hyper, "muon_lr": 0.06})
    found = json.loads(run_main(capsys, a, "--vs", b, "--json")[1], parse_constant=pytest.fail)
    run = found["sides"][0]["runs"][0]
    assert run["hyperparameters"] == {"name": "x", "seed": 1, "vocab_size": 50257, "muon_lr": 0.05,
                                      "adam_betas": [0.8, 0.95],
                                      "use_fp8": True, "val_files": "a*.bin", "odd": "{1, 2}",
                                      "huge": "9e999", "count": "4 * 8"}
    assert (run["ranks"], run["seed"], run["torch"], run["environment"]["ranks"]) == (8, 1,
                                                                                      "2.11.0", "8")
    assert found["comparison"]["hyperparameters"] == [["muon_lr", [0.06], [0.05]]]


def test_every_field_of_the_json_is_documented(tmp_path, capsys):
    text = run_main(capsys, write(tmp_path / "a", GOOD), "--vs", write(tmp_path / "b", SAME),
                    "--json")[1]
    found = json.loads(text)
    side, result = found["sides"][0], found["comparison"]
    names = [*found, *side, *side["loss"], *side["seconds"], *side["runs"][0], *result,
             *result["loss"], *result["equal"],
             *result["equal"]["step"][0]]
    assert [name for name in names if name not in compare.__doc__] == []


def test_as_a_program(tmp_path):
    command = [sys.executable, str(ROOT / "records" / "compare.py")]
    bad = subprocess.run([*command, str(tmp_path / "absent.log")], capture_output=True, text=True,
                         cwd=tmp_path,
                         check=False)
    assert bad.returncode == 1 and bad.stdout == "" and "Traceback" not in bad.stderr
    assert bad.stderr.splitlines()[-1] == "compare.py: no run to report"
    folder = write(tmp_path / "a", GOOD * 20)
    piped = subprocess.run(f'"{sys.executable}" "{command[1]}" "{folder}" --json | head -1',
                           shell=True, capture_output=True,
                           text=True, check=False)
    assert piped.stdout == "{\n" and piped.stderr == ""


# --------------------------------------------------------------------------------------------------
# The picture

def test_picture(tmp_path, capsys):
    a, b = write(tmp_path / "a", GOOD), write(tmp_path / "b", SAME[:2], ms=(120.0,))
    assert run_main(capsys, a, "--vs", b, "--plot", tmp_path / "x.png")[0] == 0
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "x.png").stat().st_size > 20_000
    import matplotlib
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text stays text
        assert run_main(capsys, a, "--vs", b, "--plot", tmp_path / "x.svg")[0] == 0
    text = (tmp_path / "x.svg").read_text()
    for words in ("Validation loss: a against b", "A: a, mean of 4 runs", "B: b, mean of 2 runs",
                  "target 3.28",
                  "training time (seconds)", "tokens (millions)", "validation loss"):
        assert words in text, words


def figure_of(monkeypatch, path, sides_, target):
    """The figure that compare.plot draws."""
    import matplotlib.pyplot as plt
    kept = []
    monkeypatch.setattr(plt, "close", kept.append)
    compare.plot(sides_, target, str(path))
    monkeypatch.undo()
    return kept[0]


def test_the_mean_line_ends_with_the_mean_of_the_runs(tmp_path, monkeypatch):
    folder = write(tmp_path / "a", [3.2, 3.3, 3.4], ms=(80.0, 100.0, 120.0))
    side = sides(folder)
    x, y = compare.mean_curve(side["used"], "training time")
    assert x == pytest.approx([0, 12.5, 25.0]) and y == pytest.approx([10.8258, 4.001, 3.3])
    (tmp_path / "a" / "longer.log").write_text(log_text((10.8258, 4.0, 3.5, 3.1), seed=9))
    x, y = compare.mean_curve(sides(folder)["used"], "step")
    assert x == pytest.approx([0, 125, 281.25]) and y[-1] == pytest.approx(3.25)
    figure = figure_of(monkeypatch, tmp_path / "x.png", [sides(folder)], 3.28)
    thick, = (line for line in figure.axes[0].get_lines() if line.get_linewidth() > 2)
    assert thick.get_xdata()[-1] == pytest.approx(28.125)
    assert thick.get_ydata()[-1] == pytest.approx(3.25)


def test_the_first_validation_does_not_eat_the_axis(tmp_path, monkeypatch):
    side = sides(write(tmp_path / "a", GOOD))
    for target, low in ((3.28, 3.2), (2.9, 2.8), (1.0, 3.2)):  # a target far below is left out
        for i, panel in enumerate(figure_of(monkeypatch, tmp_path / "x.png", [side], target).axes):
            bottom, top = panel.get_ylim()
            assert low < bottom < 3.277 and 3.4 < top < 4.1, (i, bottom, top)


@pytest.mark.parametrize("a, b, names", [
    (["a/x.log"], ["b/x.log"], ["a", "b"]), (["a/1.log", "a/2.log"], ["b/1.log"], ["a", "b"]),
    (["2026-01-01T00-00-00Z_mine.log", "2026-01-02T00-00-00Z_mine.log"],
     ["2026-01-03T00-00-00Z_base.log"], ["mine", "base"]),
    (["records/2026-01-01T00-00-00Z_mine.log"], ["records/demo/2026-01-01T00-00-00Z_demo.log"],
     ["mine", "demo"]),
    (["u.log", "v.log", "w.log"], ["x.log"], ["u, v, ...", "x"])])
def test_the_sides_names(tmp_path, a, b, names):
    runs = [[run_of((0, 0.0, 0, 3.0)) for _ in paths] for paths in (a, b)]
    for of_side, paths in zip(runs, (a, b)):
        for run, path in zip(of_side, paths):
            run.path = str(tmp_path / path)
    assert compare.names_of([{"runs": of_side} for of_side in runs]) == names


@pytest.mark.parametrize("name", ["2024-05_no_clock.log", "several_runs.txt", "stopped_early.txt"])
def test_logs_that_lack_something_can_be_drawn(name, tmp_path):
    side = compare.side_of("A", compare.runs_in(LOGS / name, name), 3.28)
    compare.plot([side], 3.28, str(tmp_path / "x.svg"))
    assert (tmp_path / "x.svg").stat().st_size > 5000


def test_a_picture_that_cannot_be_drawn_is_one_line(tmp_path):
    side = compare.side_of("A", compare.runs_in(LOGS / "own_8gpu.log", "x"), 3.28)
    with pytest.raises(compare.BadInput, match="cannot be written"):
        compare.plot([side], 3.28, str(tmp_path / "absent" / "x.png"))
    empty = compare.side_of("A", [run_of((0, 0.0, 0, math.nan))], 3.28)
    with pytest.raises(compare.BadInput, match="no validation loss"):
        compare.plot([empty], 3.28, str(tmp_path / "x.png"))


def test_matplotlib_is_loaded_for_pictures_only():
    code = (f"import sys; sys.path.insert(0, {str(ROOT / 'records')!r}); import compare; "
            "assert not {'matplotlib', 'torch', 'train_gpt'} & {*sys.modules}")
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --------------------------------------------------------------------------------------------------
# The table of records

def test_the_table_of_records_is_fresh():
    try:
        table = compare.records_table(ROOT / "records", pytest.fail)
    except compare.BadInput as e:
        pytest.skip(f"which logs are records is known in a git checkout only: {e}")
    text = (ROOT / "records" / "README.md").read_text()
    fresh = compare.readme_with_table(text, table)
    assert fresh == text, "stale: run python records/compare.py --update-readme"


@pytest.fixture
def checkout(tmp_path):
    if not shutil.which("git"):
        pytest.skip("git is not installed")
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "records").mkdir()
    readme = "# Records\n\n{}\n{}\nthe end\n".format(*compare.MARKERS)
    (tmp_path / "records" / "README.md").write_text(readme)
    return tmp_path / "records"


def test_only_tracked_logs_are_records(checkout):
    readme = checkout / "README.md"
    write(checkout / "mine", GOOD)  # a user's own runs
    compare.update_readme(checkout, pytest.fail)
    assert "No records yet." in readme.read_text() and "mine" not in readme.read_text()
    write(checkout / "speedrun", SAME)
    (checkout / "speedrun" / "stopped.log").write_text(log_text((10.8, 4.5), seed=50, total=250))
    subprocess.run(["git", "-C", str(checkout), "add", "-f", "speedrun"], check=True)
    before = readme.read_text()
    assert compare.readme_with_table(before, compare.records_table(checkout,
                                                                   pytest.fail)) != before  # stale
    compare.update_readme(checkout, pytest.fail)
    text = readme.read_text()
    assert ("| [speedrun](speedrun/) | 4 of 5 | 3.2778 (0.0005) | 25.0 s (0.0) | 100.00 | 250 | "
            "250k | 8x H100 | 2.11.0 |") in text
    assert text.startswith("# Records\n") and text.endswith("the end\n") and "mine" not in text
    compare.update_readme(checkout, pytest.fail)
    assert readme.read_text() == text


def test_what_is_written_by_hand_stays_in_the_table(checkout):
    readme = checkout / "README.md"
    for name in ("one", "two"):
        write(checkout / name, SAME)
    subprocess.run(["git", "-C", str(checkout), "add", "-f", "one", "two"], check=True)
    compare.update_readme(checkout, pytest.fail)
    said = "Is one | better than `two`? No: 3.2778 | 3.2778."
    rows = readme.read_text().splitlines()
    written = [row.removesuffix("- |") + f"{said} |" if row.startswith("| [one]") else row
               for row in rows]
    assert written != rows
    readme.write_text("\n".join(written) + "\n")
    write(checkout / "one", GOOD, hyper={"muon_lr": 1}, ms=(50.0,))
    write(checkout / "three", GOOD)
    subprocess.run(["git", "-C", str(checkout), "add", "-f", "three"], check=True)
    compare.update_readme(checkout, pytest.fail)
    rows = {row.split("](")[0]: row for row in readme.read_text().splitlines()}
    assert rows["| [one"].endswith(f"| 50.00 | 250 | 250k | 8x H100 | 2.11.0 | {said} |")
    assert rows["| [two"].endswith("| 2.11.0 | - |") and rows["| [three"].endswith("| 2.11.0 | - |")


def test_a_table_from_before_the_last_column_gets_it(checkout):
    write(checkout / "one", SAME)
    subprocess.run(["git", "-C", str(checkout), "add", "-f", "one"], check=True)
    old = "| record |\n|---|\n| [one](one/) | 4 | 3.2 | 5 s | 100 | 250 | 250k | 8x H100 | 2.11.0 |"
    readme = f"# Records\n{compare.MARKERS[0]}\n{old}\n{compare.MARKERS[1]}\n"
    (checkout / "README.md").write_text(readme)
    compare.update_readme(checkout, pytest.fail)
    assert "| 2.11.0 | - |\n" in (checkout / "README.md").read_text()


def test_errors_about_the_table(checkout, tmp_path_factory):
    (checkout / "README.md").write_text("no markers")
    with pytest.raises(compare.BadInput, match="markers"):
        compare.update_readme(checkout, pytest.fail)
    bare = tmp_path_factory.mktemp("bare") / "records"
    bare.mkdir()
    with pytest.raises(compare.BadInput):
        compare.records_table(bare, pytest.fail)
    nested = checkout / "copy" / "records"  # a copy inside another project's checkout
    nested.mkdir(parents=True)
    with pytest.raises(compare.BadInput, match="not the top of a git checkout"):
        compare.records_table(nested, pytest.fail)
