"""records/export.py: JSON lines and CSV against the log, growing logs, chains of logs, TensorBoard
by what it reads (where it is installed), errors."""

import csv
import io
import json
import math
import signal
import subprocess
import sys

import pytest
from conftest import ROOT
from test_data_common import status_of
from test_logs import LOGS, log_text

from records import export, logs

PROGRAM = str(ROOT / "records" / "export.py")
WHOLE = log_text()
# A log of a run that was killed in the middle of a line, and that of the same run from step 125 on.
KILLED = log_text((10.8258, 4.0, 3.5))
KILLED = KILLED[:KILLED.index("step:250/250 val") + 30]
RESUMED = log_text((4.0, 3.2), parent="gone/killed", first=125, hyper={"muon_lr": 0.02})
# As it grows: before its first step, twice in the middle of a line, and whole.
STAGES = [RESUMED[:RESUMED.index("step:125/")], RESUMED[:RESUMED.index("step:125/") + 30],
          RESUMED[:RESUMED.index("step:250/250 val") + 30], RESUMED]


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs the program in this process: its status, output and errors."""
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["export.py", *map(str, arguments)])
        try:
            status = status_of(export.main, errors=(logs.BadInput,))
        except SystemExit as e:
            status = e.code
        captured = capsys.readouterr()
        return status, captured.out, captured.err
    return run


@pytest.fixture
def follow(run, monkeypatch, tmp_path):
    """Follows a log that goes through the STAGES, one a second."""
    def follow(*arguments):
        path = tmp_path / "x.log"
        (tmp_path / "killed.log").write_text(KILLED)
        stages = iter(STAGES)
        path.write_text(next(stages))
        monkeypatch.setattr(export.time, "sleep", lambda seconds: path.write_text(next(stages)))
        status, out, err = run(path, "--follow", *arguments)
        assert (status, list(stages)) == (0, []), err
        return out
    return follow


def write(folder, text=WHOLE, name="x.log"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    return folder / name


def rows_of(text):
    return [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]


def expected(path):
    """{step: its values} as a tracker gets them."""
    found = {}
    for line in logs.read_run(path, "x").lines:
        values = found.setdefault(line.step, {})
        if not values:
            values |= {name: getattr(line, name) for name in line._fields[4:]}
        values[f"{line.kind}_loss"] = line.loss
    return {step: {name: value for name, value in values.items() if value is not None}
            for step, values in found.items()}


# --------------------------------------------------------------------------------------------------
# JSON lines and CSV

def test_json_lines_hold_the_whole_log(run, tmp_path):
    path = write(tmp_path)
    path.with_suffix("").mkdir()
    for name in (path, f"{path.with_suffix('')}/"):  # a run is named by its folder, too
        status, out, err = run(name, "--to", "jsonl")
        head, *rows = rows_of(out)
        assert (status, err) == (0, "")
    assert (head["kind"], head["version"], head["run"], head["path"]) == ("run", 1, "x", str(path))
    assert head["hyperparameters"] == {"name": "x", "seed": 1, "vocab_size": 50257, "muon_lr": 0.05}
    assert head["environment"]["gpus"] == "8 x NVIDIA H100" and head["changed"] == []
    assert rows[0] == {"run": "x", "step": 0, "total": 250, "kind": "val", "loss": 10.8258,
                       "seconds": 0, "ms_per_step": 100, "tokens": 0, "lr": 1, "window": 256}
    assert [(row["step"], row["kind"], row["loss"]) for row in rows[1:]] == [
        (124, "train", 4), (125, "train", 4), (125, "val", 4), (249, "train", 3.279),
        (250, "train", 3.279), (250, "val", 3.279)]
    assert (rows[-1]["seconds"], rows[-1]["tokens"]) == (25, 250_000)
    fields = export.__doc__.partition("JSON lines, version 1")[2]
    assert [name for name in {*head, *rows[0]} if name not in fields] == []
    path.write_text(log_text((9.0, math.nan)))
    rows = rows_of(run(path, "--to", "jsonl")[1])
    assert [row["loss"] for row in rows[1:]] == [9, None, None, None]


@pytest.mark.parametrize("text, value", [
    ("0.05", 0.05), ("1", 1), ("True", True), ("None", None), ("'a b'", "a b"),
    ("(0.8, 0.95)", [0.8, 0.95]), ("nan", "nan"), ("a = b", "a = b")])
def test_settings_are_what_json_has(text, value):
    assert export.value_of(text) == value and type(export.value_of(text)) is type(value)


def test_csv_has_a_row_a_line_and_a_column_a_setting(run, tmp_path):
    write(tmp_path / "logs", name="a.log")
    write(tmp_path / "logs", log_text((9.0, math.nan), seed=2, hyper={"betas": "(0.8, 0.9)"}),
          "b.log")
    assert run(tmp_path / "logs", "--to", "csv", "--out", tmp_path / "x.csv") == (0, "", "")
    rows = list(csv.DictReader(io.StringIO((tmp_path / "x.csv").read_text())))
    assert [row["run"] for row in rows] == ["a"] * 7 + ["b"] * 4
    assert [row["loss"] for row in rows[-4:]] == ["9.0", "", "", ""]
    assert (rows[-1]["kind"], rows[-1]["step"], rows[-1]["window"]) == ("val", "125", "256")
    assert [row["hyperparameters.seed"] for row in (rows[0], rows[-1])] == ["1", "2"]
    assert [row["hyperparameters.betas"] for row in (rows[0], rows[-1])] == ["", "[0.8, 0.9]"]
    assert rows[0]["environment.torch"] == "2.11.0, Python 3.12.7" and rows[0]["changed"] == ""


# --------------------------------------------------------------------------------------------------
# Resumed runs, and --follow

def test_a_resumed_run_is_written_whole(run, tmp_path):
    write(tmp_path / "logs", KILLED, "killed.log")
    path = write(tmp_path / "logs", RESUMED)
    for argument in (path, tmp_path / "logs"):
        head, *rows = rows_of(run(argument, "--to", "jsonl")[1])
        assert (head["run"], head["path"]) == ("x", str(path))
        assert head["changed"] == ["muon_lr was 0.05 and is 0.02"] and head["mixed"] == []
        assert [(row["step"], row["kind"], row["loss"]) for row in rows] == [
            (0, "val", 10.8258), (124, "train", 4), (125, "train", 4), (125, "val", 4),
            (249, "train", 3.2), (250, "train", 3.2), (250, "val", 3.2)]
    (tmp_path / "logs" / "killed.log").unlink()
    status, out, err = run(path, "--to", "csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert status == 1 and [row["step"] for row in rows] == ["125", "249", "250", "250"]
    assert {row["mixed"] for row in rows} == {"a missing log"}
    assert err.startswith(f"{path}: read without its beginning, killed.log is missing")


def test_a_log_that_grows_is_followed_to_its_end(follow, tmp_path):
    head, *rows = rows_of(follow("--to", "jsonl"))
    assert head["kind"] == "run"
    lines = logs.read_run(tmp_path / "x.log", "x").lines
    assert rows == [{"run": "x"} | line._asdict() for line in lines] and len(rows) == 7


def test_ctrl_c_ends_following_in_one_line(tmp_path):
    path = write(tmp_path, WHOLE[:WHOLE.index("step:249/")])
    command = [sys.executable, PROGRAM, str(path), "--to", "jsonl", "--follow"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True) as run:
        lines = [run.stdout.readline() for _ in range(5)]  # at once, though stdout is a pipe
        run.send_signal(signal.SIGINT)
        out, err = run.communicate(timeout=60)
    assert (run.returncode, out, err) == (130, "", "interrupted\n")
    assert rows_of(lines[-1])[0]["kind"] == "val"


# --------------------------------------------------------------------------------------------------
# TensorBoard, read with its own means

def test_tensorboard(follow, run, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
    follow("--to", "tensorboard", "--out", tmp_path / "tb")
    assert run(tmp_path / "x.log", "--to", "tensorboard", "--out", tmp_path / "tb")[0] == 0
    events = EventAccumulator(str(tmp_path / "tb" / "x")).Reload()
    found = {}
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            assert name not in found.setdefault(event.step, {})  # once, after two writings
            found[event.step][name] = pytest.approx(event.value)
    assert found == expected(tmp_path / "x.log")
    assert [event.wall_time for event in events.Scalars("val_loss")] == [0, 12.5, 25]
    assert run(write(tmp_path / "nan", log_text((9.0, math.nan))), "--to", "tensorboard", "--out",
               tmp_path / "nan")[0] == 0
    event = EventAccumulator(str(tmp_path / "nan" / "x")).Reload().Scalars("val_loss")[-1]
    assert event.step == 125 and math.isnan(event.value)
    content = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    settings = HParamsPluginData.FromString(content).session_start_info.hparams
    assert settings["hyperparameters.muon_lr"].number_value == 0.02
    assert settings["environment.gpus"].string_value == "8 x NVIDIA H100"


# --------------------------------------------------------------------------------------------------
# Errors

def test_a_package_that_is_missing_is_named(run, monkeypatch, tmp_path):
    for module in ("tensorboard", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, module, None)
    status, out, err = run(write(tmp_path), "--to", "tensorboard", "--out", tmp_path / "out")
    assert (status, out) == (2, "") and err.count("\n") == 1
    assert err.startswith("error: --to tensorboard: pip install tensorboard (")


def test_user_errors_are_one_line(run, tmp_path):
    path = write(tmp_path)
    for arguments, said in (
            ((path,), "the following arguments are required: --to"),
            ((path, "--to", "csv", "--out", path), f"{path}: File exists"),
            ((path, LOGS / "console_only.log", "--to", "csv", "--follow"), "one run, not 2")):
        status, out, err = run(*arguments)
        assert (status, out) == (2, "") and said in err and err.count("\n") == 1, err


def test_what_is_no_log_is_named_and_the_rest_exported(run, tmp_path):
    status, out, err = run(LOGS / "not_a_log.txt", write(tmp_path), "--to", "jsonl")
    assert status == 1 and len(rows_of(out)) == 8
    assert err == f"{LOGS / 'not_a_log.txt'}: no log (no line of a step in it)\n"
    status, out, err = run(tmp_path / "absent.log", "--to", "jsonl")
    assert (status, out) == (2, "") and err.splitlines()[1] == "error: no run to export"
