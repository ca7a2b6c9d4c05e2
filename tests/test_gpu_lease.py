"""tests/gpu_lease.sh on a CPU, with small settings: each part prints its line whatever happens to
it, and what was measured is kept. Its figures mean nothing here."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ENVIRONMENT, ROOT

import gpu_lease

RECORD = ROOT / "tests" / "fixtures" / "record_like.txt"
SMALL = ["--cpu", "--preset=demo", "--windows=LSSL", "--value_embeds=0..0", "--attention=xx.x",
         "--model_dim=128", "--num_heads=1", "--head_dim=128", "--train_seq_len=128",
         "--val_seq_len=256", "--val_tokens=500", "--window_start=128", "--window_end=256",
         "--micro_batches=2"]


@pytest.fixture
def clone(tmp_path) -> Path:
    """A copy of the programs, with shards."""
    folder = tmp_path / "clone"
    for name in ("data", "records", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=lambda path, names: [
            name for name in names
            if name not in ("speedrun_2026", "helpers")
            and not name.endswith((".py", ".sh", "text.txt"))])
    shutil.copy(ROOT / "train_gpt.py", folder)
    done = lease(folder, "data", "tests/text.txt", "--tokenizer=bytes", "--val_tokens=2200")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def start(folder: Path, *words, **options):
    return subprocess.Popen(
        ["tests/gpu_lease.sh", *words], cwd=folder, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, start_new_session=True,
        env=ENVIRONMENT | {"PYTHON": sys.executable, "HOME": str(folder.parent / "home")},
        **options)


def lease(folder: Path, *words):
    process = start(folder, *words)
    out, err = process.communicate(timeout=250)
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def parts(text: str) -> dict[str, tuple[str, str]]:
    """{name: (how it ended, its figure)}"""
    lines = re.findall(r"(?m)^(\S.{25}) (\S.{9}) +\d+ s  (.*)$", text)
    return {name.strip(): (ended.strip(), figure) for name, ended, figure in lines}


def test_a_part_that_hangs_and_one_that_fails_do_not_stop_the_others(clone):
    script = clone / "train_gpt.py"
    text = script.read_text()
    mark = "    # FP8Linear is a custom function; the compiler"
    assert text.count(mark) == 1
    script.write_text(text.replace(mark, '    if hp.name == "demo":\n        time.sleep(1000)\n'
                                   '    assert hp.name != "few", "planted"\n' + mark))
    done = lease(clone, "1", *SMALL, "--minutes=1", "--only=demo|steps", "--out=out")
    assert done.returncode == 1, done.stdout + done.stderr
    found = parts(done.stdout)
    ended, figure = found["demo"]
    assert ended == "cut off" and re.search(r"it hung in warm_up \(.*train_gpt\.py, line", figure)
    ended, figure = found["12 steps of full size"]
    assert ended == "ok" and re.search(r"ms a step, .*train_loss 5\.\d+ .*val_loss 5", figure)
    assert found["3 steps of 2K tokens"][0] == "failed, 1"
    assert found["3 steps of 2K tokens"][1].endswith("AssertionError: planted")
    assert done.stdout.endswith("did not pass: demo, 3 steps of 2K tokens\n"), done.stdout
    assert (clone / "out" / "summary.txt").read_text() == done.stdout
    assert "Traceback" in (clone / "out" / "output.txt").read_text()
    assert not (clone.parent / "home").exists(), "nothing is written outside"


def test_what_was_measured_is_kept_when_all_is_killed(clone):
    """In the middle of the benchmark."""
    out = clone / "out"
    process = start(clone, "2", *SMALL, "--only=machine|killed|bench", f"--out={out}")
    deadline = time.monotonic() + 60
    while "  compiled\n" not in (text := read(out / "output.txt")) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in processes_of_session(process.pid):
        os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=20)
    assert "  compiled\n" in text
    found = parts((out / "summary.txt").read_text())
    assert list(found) == ["machine", "60 steps, then killed"]
    assert found["machine"][0] == "ok" and "no GPU, torch 2" in found["machine"][1]
    assert found["60 steps, then killed"][0] == "ok"
    assert "== benchmark, for at most" in text
    assert "ceilings" in text and json.loads((out / "bench.json").read_text())["figures"]
    assert (out / "logs.tar.gz").stat().st_size > 1000

    done = lease(clone, "2", *SMALL, "--only=resumed", f"--out={out}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search("steps 51 to (59|60) were trained before as well: losses differ by 0.0000",
                     parts(done.stdout)["resumed at step 50"][1])
    files = list(out.iterdir())
    assert len(files) <= 8 and all(file.stat().st_size < 2**24 for file in files)


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def processes_of_session(leader: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        words = read(stat).rpartition(")")[2].split()
        if words and int(words[3]) == leader and words[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def test_the_record_runs_beside_ours(clone):
    """By a stand-in with a model of our own, since the record's source is not ours to keep."""
    record = clone / "log.txt"
    shutil.copy(RECORD, record)
    done = lease(clone, "3", *SMALL, "--only=models in turn", "--out=out", f"--record={record}")
    assert done.returncode == 0, done.stdout + done.stderr
    found = parts(done.stdout)
    assert list(found) == ["models in turn", "models in turn, tuned"]
    assert re.search(r"\| the record \| \S+ \| 128 \| \S+ \| 1\.000 \| 5\.5491 \|", done.stdout)
    for name, tuned in (("beside", False), ("beside_tuned", True)):
        content = json.loads((clone / "out" / f"{name}.json").read_text())
        assert content["about"]["tuned"] is tuned
        assert list(content["models"]) == ["the record", "train_gpt.py", "the record attempt"]


def test_the_records_script_changes_in_its_data_and_its_processes_alone(tmp_path):
    flags = ["--train_files=/data/*_train_*.bin", "--val_files=/data/*_val_*.bin",
             "--val_tokens=1048576", "--num_iterations=40", "--val_loss_every=20", "--cpu"]
    gpu_lease.make_record(RECORD, tmp_path / "record.py", flags)
    made, source = (tmp_path / "record.py").read_text(), gpu_lease.source_of(RECORD)
    compile(made, "record.py", "exec")
    changed = [new.strip() for old, new in zip(source.splitlines(), made.splitlines())
               if old != new]
    assert len(made.splitlines()) == len(source.splitlines()) and changed == [
        'return sorted(Path("/").glob(filename_pattern[1:]))',
        "train_files = '/data/*_train_*.bin' # a comment",
        "val_files = '/data/*_val_*.bin' # a comment", "val_tokens = 1048576 # a comment",
        "num_iterations = 40 # a comment", "val_loss_every = 20 # a comment",
        "train_batch_size = 8 * args.seq_len"]
    (tmp_path / "other.txt").write_text(RECORD.read_text().replace("1770", "1750"))
    with pytest.raises(SystemExit, match="it has not once 'num_iterations = 1770'"):
        gpu_lease.make_record(tmp_path / "other.txt", tmp_path / "record.py", flags)


@pytest.mark.parametrize("words, message", [
    (["4"], "name a stage"),
    (["data"], "data takes a TEXT"),
    (["1", "--minutes=9.5"], "--minutes=9.5 is no whole number"),
    (["1"], "torch sees no CUDA GPU; --cpu rehearses without one"),
    (["3", "--record=none.txt"], "none.txt: there is no such file"),
    (["1", "--cpu", "--data=tests"], "/tests has no *_train_*.bin: first run tests/gpu_lease.sh"),
])
def test_what_a_user_can_fix_is_one_line(words, message):
    done = lease(ROOT, *words)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("error: ") and message in done.stderr and not done.stdout


@pytest.mark.parametrize("output, status, line", [
    ("figure: 3 GPUs\n", 0, "3 GPUs"),
    ("figure: half\nError in atexit\nRuntimeError: first line\n  detail\n", 1,
     "half. RuntimeError: first line"),
    ("error: no file matches x\n", 2, "error: no file matches x"),
    ("logs/1.txt\nstep:0/9 val_loss:10.8258 train_time:0ms step_avg:nanms\n"
     "step:1/9 train_time:9ms step_avg:9.00ms\n"
     "step:9/9 val_loss:7.5 train_time:8012ms step_avg:801.20ms\npeak memory: 1 MiB\n", 0,
     "801.20 ms a step, val_loss 10.8258 7.5000"),
    ("[rank1]: Traceback\n[rank1]: RuntimeError: NCCL\ntorch.distributed.ChildFailedError: \n", 1,
     "RuntimeError: NCCL"),
    ("=== FAILURES ===\nE AssertionError\nFAILED tests/a.py::b - no\n1 failed, 2 passed in 3.21s\n",
     1, "1 failed, 2 passed in 3.21s\n    FAILED tests/a.py::b - no"),
])
def test_a_line_says_what_matters_of_an_output(tmp_path, output, status, line):
    path = tmp_path / "output.txt"
    path.write_text("figure: of another part\n" + output)
    offset = path.read_text().index("\n") + 1
    assert gpu_lease.figure(path, offset, status) == line
