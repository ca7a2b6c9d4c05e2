"""tools/launch.py: what a run shows, and its last lines where it ends early."""

import functools
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
import pytest
from conftest import ROOT, RUN_SH, TINY, log_path, newest_checkpoint, run_sh
from records.tools import launch
from records.tools.load import LEASH

@pytest.mark.parametrize("terminal", [True, False])
def test_on_a_terminal_one_line_stands_for_the_training_steps(monkeypatch, capsys, terminal):
    steps = [f"step:{n}/9 train_loss:{n}.5 train_time:1ms\n" for n in range(5, 10)]
    lines = ["log: a\n", *steps, "step:9/9 val_loss:1\n", "end\n"]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr(launch, "tqdm", functools.partial(launch.tqdm, mininterval=0))
    assert list(launch.show(lines)) == lines
    shown = capsys.readouterr().out
    if not terminal:
        assert shown == "".join(lines)
        return
    assert "train_loss" not in shown and re.search(r"5/9 \[.*loss 5[.]5", shown)
    assert re.findall(r"(?:log|step|end).*\n", re.sub(r".*\r", "", shown)) == [
        "log: a\n", "step:9/9 val_loss:1\n", "end\n"]

def started(*argv, until, **env) -> subprocess.Popen:
    """A run.sh in the middle of its training, and in a session of its own, as in a terminal."""
    run = subprocess.Popen([str(ROOT / "run.sh"), *argv], stdout=subprocess.PIPE, text=True,
                           stderr=subprocess.STDOUT, start_new_session=True,
                           env={**os.environ, **RUN_SH, **env})
    output = []
    for line in run.stdout:
        output.append(line)
        if until in line:
            return run
    raise AssertionError("".join(output))

LONG = [*TINY[1:], "--num_iterations=4000", "--epochs=10000", "--val_loss_every=0"]

@pytest.mark.parametrize("number, to_all, ranks, steps", [
    (signal.SIGINT, True, "1", 0), (signal.SIGINT, True, "2", 10), (signal.SIGTERM, False, "2", 0)])
def test_a_signal_leaves_nothing_behind_and_says_how_to_go_on(tmp_path, shards, number, to_all,
                                                              ranks, steps):
    """Ctrl+C, which a terminal sends to all, or a signal to run.sh alone."""
    run = started("demo", *LONG, f"--save_every={steps}", *shards, f"--records={tmp_path}",
                  until="step:20/", NPROC=ranks)
    (os.killpg if to_all else os.kill)(run.pid, number)
    output, _ = run.communicate(timeout=20)
    assert run.returncode == 128 + number, output
    what = "it has saved no checkpoint to go on from; the same command starts it again"
    if steps:
        what = f"to go on: ./run.sh --resume={newest_checkpoint(tmp_path)}"
    assert output.endswith(f"interrupted\nrun.sh: {what}\n") and "Signal" not in output

def test_without_its_console_a_run_goes_on_and_without_its_launcher_it_ends(tmp_path, shards):
    """While it is alive it is not resumed, which would run it twice."""
    run = started("demo", *LONG, "--save_every=10", *shards, f"--records={tmp_path}",
                  until="step:20/", NPROC="2")
    run.stdout.close()
    log = log_path(tmp_path)
    seen = log.read_text().count("\nstep:")
    while log.read_text().count("\nstep:") < seen + 100:
        assert run.poll() is None, "it has ended with its console"
        time.sleep(0.05)
    again = run_sh(f"--resume={log}")
    assert again.returncode == 2 and "is still being written, by process " in again.stderr
    os.kill(run.pid, signal.SIGKILL)
    assert run.wait() == -signal.SIGKILL
    of_the_run = ["pgrep", "-f", str(tmp_path)]
    for _ in range(400):
        if not subprocess.run(of_the_run, capture_output=True, check=False).stdout:
            return
        time.sleep(0.05)
    raise AssertionError("its processes go on")

@pytest.mark.parametrize("code, status, words", [
    ("print('error: planted', file=sys.stderr, flush=True); os._exit(2)", 2, "planted"),
    ("os.kill(os.getpid(), 9)", 137, "a process was killed by SIGKILL, as when memory runs out"),
    ("assert 1 == 2, 'a defect'", 1, "the run has failed with status 1, see above")])
def test_a_rank_that_breaks_is_said_last_without_torchruns_report(tmp_path, capfd, code, status,
                                                                  words):
    (script := tmp_path / "a.py").write_text(
        f"import os, sys, time\nif os.environ['RANK'] == '1':\n    {code}\ntime.sleep(60)")
    with pytest.raises(SystemExit) as ended:
        launch.train(str(script), [], 2)
    said = capfd.readouterr().err
    assert ended.value.code == status and said.splitlines()[-2:] == [
        f"error: {words}", "run.sh: it has saved no checkpoint to go on from; the same command "
        "starts it again"]
    assert "ChildFailedError" not in said and ("AssertionError: a defect" in said) == (status == 1)

def test_a_run_that_ends_well_may_have_said_error(tmp_path):
    (script := tmp_path / "a.py").write_text(
        "import sys\nprint('log: x')\nprint('error: none', file=sys.stderr)")
    assert launch.train(str(script), [], 1) == Path("x")

def test_the_rank_that_was_killed_is_blamed_and_not_those_that_torchrun_ended():
    ended = {}
    launch.pass_errors([f"  exitcode  : {code} (pid: 9)\n" for code in (1, -15, -9, -15)], ended)
    assert ended["status"] == -9

def test_a_leashed_script_runs_as_any_other(tmp_path):
    """It is __main__, its traceback begins in it, and its helpers are found beside it."""
    (tmp_path / "helper.py").write_text("def fail():\n    raise ValueError('mine')\n")
    script = tmp_path / "a script.py"
    script.write_bytes("""# -*- coding: latin-1 -*-
import helper, pickle, sys
from dataclasses import dataclass
@dataclass
class Own:
    x: str = "\xe9"
print(sys.argv, __name__, __file__, sys.path[0], pickle.loads(pickle.dumps(Own())))
helper.fail()
""".encode("latin-1"))
    mistake = tmp_path / "mistake.py"
    mistake.write_text("x = = 1")
    for words in ([script, "a", "--b=1"], [mistake], ["-c", "import sys; sys.exit(3)"]):
        plain, leashed = (subprocess.run([sys.executable, *leash, *words], capture_output=True,
                                         check=False) for leash in ([], [LEASH]))
        assert (plain.returncode, plain.stdout) == (leashed.returncode, leashed.stdout)
        assert plain.stderr == leashed.stderr
