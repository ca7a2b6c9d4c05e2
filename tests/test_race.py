"""tools/race.py, with trial.py and verdict.py, on a stand-in for the script that takes no time."""

import errno
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from unittest.mock import Mock
import numpy as np
import pytest
from conftest import ROOT, TINY, planted, refused
from test_data_common import status_of
from test_logs import log_text
from data import common
from records.tools import judge, ledger, logs, race, tables, verify

LEAST = next(n for n in range(2, 20) if judge.e_of_pairs([1.0] * n) >= 100)  # pairs
STAND_IN = '''
import argparse, hashlib, os, sys, time
from pathlib import Path

OFFSET = 0.0
NOISE = 1.0
MS = 100
source = Path(__file__).read_text()
parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("preset", nargs="?")
parser.add_argument("--curve", action="store_true")
for name, value in dict(seed=0, num_iterations=5, val_loss_every=1, save_every=0, muon_lr=1.0,
                        name="", records="", text="").items():
    parser.add_argument(f"--{name}", type=type(value), default=value)
args = parser.parse_args()
with open(os.environ["STARTS"], "a") as file:
    print(*sys.argv[1:], f"NPROC={os.environ.get('NPROC')}", file=file)
Path(args.records).mkdir(parents=True, exist_ok=True)
path = Path(args.records, f"{time.time_ns()}_{args.name}.log")
log = open(path, "w", buffering=1)
head = [f"{key} = {value!r}" for key, value in vars(args).items()]
sha256 = hashlib.sha256(source.encode()).hexdigest()
separator = "=" * 100
print(*head, separator, f"command: {' '.join(sys.argv)}", "cpu: 2 x EPYC", "torch: 2.13.0, Py",
      "ranks: 1", "threads: 1 a rank", "data: a.bin 90 tokens 0f", "val_data: b.bin 9 tokens 1f",
      f"script: sha256 {sha256} {source.count(chr(10))} lines", separator,
      source.removesuffix("\\n"), separator, sep="\\n", file=log)
N = args.num_iterations
ns = Path(os.environ["STARTS"]).read_text().count("\\n")  # no two runs take the same time
hold = Path(os.environ["STARTS"] + ".hold")  # while it is there, the second pair does not end
for step in range(N + 1):
    while step == 3 and args.seed == 2 and hold.exists():
        Path(os.environ["STARTS"] + ".held").touch()
        time.sleep(0.02)
    seeds = int(hashlib.sha256(str(args.seed).encode()).hexdigest()[:4], 16) / 65536
    small = int(hashlib.sha256(f"{args.seed} {OFFSET}".encode()).hexdigest()[:4], 16) / 65536
    loss = 5 - step / N + seeds + OFFSET * (1 + NOISE * small / 10)
    line = (f"step:{step}/{N} val_loss:{loss:.4f} train_time:{MS * step + ns}ms "
            f"step_avg:{MS if step else float('nan'):.2f}ms tokens:{step} lr:1.000 window:128")
    print(line, file=log)
    print(line.replace("val", "train"), line, sep="\\n", flush=True)
print(f"log: {path}", file=log)
print(f"log: {path}", flush=True)
'''
LAUNCHER = ("import runpy, sys\nsys.argv = sys.argv[1:]\n"
            "runpy.run_path(sys.argv[0], run_name='__main__')\n")
EXAM = """import json, sys
text = open(sys.argv[1]).read()
at_first = "/one_step/" in sys.argv[2]
assert "CRASHES" not in text, "the check failed"
problem = "token 7 sees the future" if at_first and "DISHONEST" in text else ""
if not at_first and "CHEATS" in text:
    problem = "its log lies"
with open(__file__ + ".asked", "a", errors="replace") as file:
    print(at_first, file=file)
print(json.dumps({"own": 1.0, "text": None, "problem": problem}))
"""

SAVE = race.plot.save

def draw_nothing(file, *content, **more):
    """In place of a picture, which takes longer than a race of stand-ins."""
    file.write("<svg></svg>") if more else file.write_bytes(b"\x89PNG")

def prepared(place, patch):
    """A folder with the script, a copy that is better by about 0.1, and a launcher of them."""
    patch.setattr(race.plot, "save", draw_nothing)
    (place / "base.py").write_text(STAND_IN)
    (place / "record.py").write_text(STAND_IN.replace("OFFSET = 0.0", "OFFSET = -0.1"))
    (place / "launch.py").write_text(LAUNCHER)
    (place / "exam.py").write_text(EXAM)
    patch.setattr(race.trial, "EXAM", place / "exam.py")
    patch.setattr(race.trial, "text_for", lambda *_: {"flags": [], "exam": None})
    patch.setattr(race.trial, "LAUNCH", place / "launch.py")
    patch.setattr(race.trial, "monotonic", itertools.count(0, 0.1).__next__)  # as MS says
    patch.setenv("STARTS", str(place / "starts"))
    patch.delenv("NPROC", raising=False)
    return place

@pytest.fixture
def place(tmp_path, monkeypatch):
    return prepared(tmp_path, monkeypatch)

def run_race(place, *flags, script="record.py"):
    argv = [str(place / script), f"--vs={place / 'base.py'}", f"--records={place / 'records'}",
            *flags]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setattr(sys, "argv", ["race.py", *argv])
        return status_of(race.main)

def verdicts(place, name="record"):
    text = (place / "records" / f"race_{name}" / "verdict.json").read_text()
    return {row["candidate"]: row for row in json.loads(text)}

def changed(place, old, new, script="record"):
    assert STAND_IN.count(old) == 1
    (place / f"{script}.py").write_text(STAND_IN.replace(old, new))

def starts(place):
    """(name, seed, num_iterations or None) of each run that was started."""
    found = []
    for line in (place / "starts").read_text().splitlines():
        given = dict(re.findall(r"--(\w+)=(\S+)", line))
        found.append((given["name"], int(given["seed"]), given.get("num_iterations")))
    return found

def finished_logs(place, side):
    return sorted((place / "records" / "race_record" / side).glob("*.log"))

@pytest.mark.parametrize("preset", [[], ["demo"]])
def test_a_race_of_the_demo_says_how_many_nats_it_can_decide(preset, place, capsys):
    """From the spread of the committed runs, also where a CPU chooses the demo."""
    seeds = [one.loss for one in logs.read([race.DEMO_RUNS])[0]]
    plan = race.parse([str(place / "record.py"), f"--records={place}", *preset])
    plan.key = "none"
    race.foretell(plan, logs.Line(10, 720, "train_loss", 3.0, 2.5, 250.0, 40960))
    effect = 2**0.5 * np.std(seeds, ddof=1) * judge.smallest_effect(12, 0.01)
    assert capsys.readouterr().out == (
        "race: a run trains for 03:00; at most 24 runs take 1:12:00, plus their exams\n"
        f"race: with 12 pairs, half of all races detect a difference of about {effect:.4f} nats\n")

def test_its_page_is_fresh_after_every_run(place, monkeypatch):
    pages = []
    monkeypatch.setattr(race.verdict.page, "page", lambda sides, comparison, notes, alive:
                        pages.append((len(sides[-1].runs), notes, alive)) or "")
    run_race(place, "--most=2")
    assert pages == [(1, [], True), (1, [], True), (2, [], True), (2, [], False)]

def test_a_race_in_turn_with_the_same_seeds(place, capsys, monkeypatch):
    assert run_race(place, "--most=3", "--level=0.5", "--muon_lr=2") == 0
    assert starts(place) == [
        ("record", 1, "1"), ("base", 1, "1"),  # one step of each
        ("record", 1, None), ("base", 1, None), ("base", 2, None), ("record", 2, None),
        ("record", 3, None), ("base", 3, None)]
    out = capsys.readouterr().out
    folder = place / "records" / "race_record"
    assert sorted(path.name for path in folder.iterdir()) == [
        ".lock", "base", "base.py", "exams.json", "race.html", "race.json", "race.png", "record",
        "record.patch", "record.py", "verdict.json", "verdict.txt"]
    ends = [[logs.read_run(path, "x").loss for path in finished_logs(place, side)]
            for side in ("record", "base")]
    verdict = " ".join((folder / "verdict.txt").read_text().split())
    found = re.search(r"record is better than base \(record - base = (-0\.1\d*) nats a token, 50 % "
                      r"interval \S+ \.\. \S+, E = (\S+), lower in 3 of 3 pairs\)\.", verdict)
    E = judge.e_of_pairs(np.subtract(*ends))
    assert found[2] == tables.plain(E) and verdict in " ".join(out.split())
    row = verdicts(place)["record"]
    assert row["E"] == pytest.approx(E) and row["p"] is None and row["keep"] is True
    assert f"{row['difference']:.4f}" == found[1] and row["pairs"] == 3
    # The copy is there 0.1 nats earlier, on a line that falls by 0.2 nats a step, of five.
    assert row["steps_later"] == pytest.approx(-0.5, abs=0.1) and row["baseline_steps"] == 5
    before = out.partition("verdict: ")[0]
    assert re.search(r"race: record: undecided after 1 pair: lower by 0\.1\d* in all 1, E", before)
    assert re.search(r"race: a run trains for 00:00; at most 6 runs take 00:03, plus their exams\n"
                     r"race: with 3 pairs, half of all races detect a difference of about 1\.\d+ "
                     r"SDs of the differences\n", before)
    assert "-OFFSET = 0.0\n+OFFSET = -0.1\n" in (folder / "record.patch").read_text()
    assert all("--muon_lr=2" in line for line in (place / "starts").read_text().splitlines())
    monkeypatch.setattr(race.plot, "save", SAVE)  # the page and the picture themselves
    plan, *_ = race.ended(folder)
    again = race.verdict.outcome_of(plan)
    race.verdict.write_page(plan, again, alive=False)
    race.plot.save(folder / "race.png", again.sides, again.comparison, None)
    assert (folder / "race.png").stat().st_size > 10_000
    assert re.search(r"(?s)record is better than base .*<svg .*</svg>\s+<pre", (
        folder / "race.html").read_text())
    for name in ("record", "base"):  # before anything is slow, it says what is slow
        assert re.search(rf"race: checking \S+{name}\.py: one step .* and its exam\n", out)

def test_pairs_are_added_until_it_is_decided(place, capsys):
    """By the same command; a decided race starts nothing more, also if it may."""
    assert run_race(place, "--most=2") == 4
    out = capsys.readouterr().out
    assert "race: --most=2 is too few pairs to show that a copy is better\n" in out
    why = verdicts(place)["record"]["why"]
    assert out.endswith(f"race: {why}\n") and re.fullmatch(
        r"record: undecided after 2 pairs: lower by 0\.1\d* in all 2, E = \S+ of 100; the same "
        "command with `--most=4` goes on", why)
    before = starts(place)
    assert run_race(place, "--most=3") == 4
    (line,) = ledger.read(place / "records" / "ideas.csv")  # one idea, with its three pairs
    assert (line["race"], line["candidate"], line["pairs"]) == ("race_record", "record", "3")
    assert starts(place)[len(before):] == [("record", 3, None), ("base", 3, None)]
    assert "4 runs are done" in capsys.readouterr().out
    assert run_race(place) == 0
    row = verdicts(place)["record"]
    assert row["pairs"] == LEAST and row["decision"] == "better" and row["E"] >= 100
    assert row["adjusted"] == pytest.approx(1 / row["E"]) and row["why"].startswith("record is bet")
    low, high = row["interval"]
    assert row["p"] is None and low < row["difference"] < high < 0
    assert len(finished_logs(place, "record")) == len(finished_logs(place, "base")) == LEAST
    out = capsys.readouterr().out
    assert re.search(rf"better after {LEAST} pairs: lower by 0\.1\d* in all {LEAST}, E = ", out)
    before = starts(place)
    assert run_race(place, "--most=20") == 0 and starts(place) == before

@pytest.mark.parametrize("script, new, expected", [
    ("record.py", "OFFSET = 0.3", (3, "worse", LEAST)),
    ("base.py --muon_lr=3", "OFFSET = 0.0", (3, "no difference", 2)),
    ("record.py", "OFFSET = -0.1\n1 / ('--seed=2' not in sys.argv)", (2, "broken", 1))])
def test_how_a_candidate_may_fare(place, script, new, expected, capsys):
    """From the logs, verify finds the same."""
    changed(place, "OFFSET = 0.0", new)
    status = run_race(place, "--name=x", script=script)
    ((name, row),) = verdicts(place, "x").items()
    assert (status, row["decision"], row["pairs"]) == expected and not row["keep"]
    folder = place / "records" / "race_x"
    assert verify.main([str(folder)]) == 0
    assert (folder / f"{name}.patch").read_text().startswith(
        "flags: --muon_lr=3\n" if "--" in script else "---")
    made = Counter(name for name, _, steps in starts(place) if steps is None)
    assert made == {name: row["pairs"], "base": row["pairs"] + (status == 2)}
    assert ("ZeroDivisionError" in capsys.readouterr().err) == (status == 2)

@pytest.mark.parametrize("old, new, flags, expected, why", [
    ("tokens:{step}", "tokens:{2 * step}", [], (3, "no difference", False), "Unequal: record has "
     "100 % more tokens. The change had no effect"),
    ("args.num_iterations\n", "args.num_iterations + 1\nOFFSET, MS = -0.1, 80\n", [], (
        3, "better", False),
     "Unequal: record has 20 % more tokens, 20 % more steps. record is better than base"),
    ("OFFSET = 0.0", "OFFSET = -0.1  # CHEATS", [], (2, "dishonest", False),
     "{place}/record.py, seed 1: its log lies"),
    ("OFFSET = 0.0", "OFFSET = -0.1  # DISHONEST", ["--dishonest"], (3, "better", False),
     "{place}/record.py: token 7 sees the future"),
    ("for key, value in vars(args)", "for key, value in (vars(args) | {'val_tokens': 9})", [],
     (2, "broken", False), "{place}/record.py: no loss compares, for the validation data")])
def test_the_status_and_the_json_of_a_race(place, capsys, old, new, flags, expected, why):
    """Programs read standard output, people the verdict, which begins with what is dishonest."""
    changed(place, old, new)
    status = run_race(place, "--json", *flags)
    out, err = capsys.readouterr()
    (row,) = json.loads(out)
    assert (status, row["decision"], row["keep"]) == expected
    assert row["why"].startswith(why.format(place=place))
    if status == 2:
        assert err.splitlines()[-1].startswith("error: ")
    elif not row["honest"]:
        verdict = (place / "records" / "race_record" / "verdict.txt").read_text()
        assert verdict.startswith(f"{row['why']}\n") and f"\n\n{row['why']}\n" in err
        assert run_race(place, *flags) == status  # the check is not made again
        assert (place / "exam.py.asked").read_text().split().count("True") == 2

@pytest.mark.parametrize("ms, tick, words", [
    (200, 0.1, "So record is slower to that loss, and a race does not keep it."),
    (100, 0.1, "So record is faster to that loss."),
    ("400 if '--seed=1' in sys.argv else 105", 0.1, "is not decided, so the loss decides."),
    (100, 0.3, "record says 0.5 s of training, and 1.5 s passed by the race's clock, ")])
def test_no_copy_is_kept_that_is_later_at_the_loss(place, monkeypatch, ms, tick, words):
    """Or whose clock is wrong. Noisy times, and a wrong clock of the baseline, do not decide."""
    monkeypatch.setattr(race.trial, "monotonic", itertools.count(0, tick).__next__)
    changed(place, "MS = 100", f"MS = {ms}\nOFFSET = -0.1")
    assert run_race(place) == 3 * (ms == 200 or tick == 0.3)
    row = verdicts(place)["record"]
    assert row["decision"] == "better" and words in row["why"] and row["slower"] == (ms == 200)
    if tick == 0.1:
        assert row["steps_interval"][0] < row["steps_later"] < row["steps_interval"][1]
        later = row["seconds"] * (1 + row["steps_later"] / 5) - row["baseline_seconds"]
        assert row["seconds_later"] == pytest.approx(later, abs=0.02)
        assert row["seconds_interval"][0] < row["seconds_later"] < row["seconds_interval"][1]
        return
    for path in (place / "records" / "race_record" / "record").glob("*.clock"):
        path.unlink()
    assert run_race(place) == 0 and "base says 0.5 s" in verdicts(place)["record"]["why"]

def test_a_baseline_runs_once(place, capsys):
    """A later race takes its runs. After an hour it asks how fast the machine is by now."""
    assert run_race(place, "--most=2", "--name=first") == 4
    before = starts(place)
    for path in (place / "records" / "baselines").glob("*/*/*/*.log"):
        os.utime(path, (0, 0))
    assert run_race(place, "--most=2", "--name=second", "--why=a word") == 4
    assert [name for name, *_ in starts(place)[len(before):]] == [
        "record", "base", "record", "base", "record"]  # one step each, then the pairs
    out = " ".join(capsys.readouterr().out.split())
    assert re.search(r"kept runs of base took 1 s where they take [\d.]+ s now", out)
    assert "kept runs of base: 2 of 2, made by race_first" in out
    assert "record was raced before: undecided in race_first" in out
    assert verify.main([str(place / "records" / "race_second")]) == 0
    row = ledger.read(place / "records" / "ideas.csv")[-1]
    assert row["note"] == "a word" and row["baseline"] and row["copy"] != row["baseline"]

def test_a_patch_is_raced(place, capsys):
    """It may have flags of its own, and need not change more than these."""
    head = "flags: --muon_lr=2\nwhy: a word\n"
    (place / "one.patch").write_text(
        f"{head}--- base.py\n+++ x\n@@ -5 +5 @@\n-OFFSET = 0.0\n+OFFSET = -0.1\n")
    (place / "two.patch").write_text(head)
    (place / "three.patch").write_text("@@ -1 +1 @@\n-x\n+y\n")
    assert run_race(place, "--most=1", script="one.patch") == 4
    row = verdicts(place, "one")["one"]
    assert row["difference"] == pytest.approx(-0.1, 0.1) and row["note"] == "a word"
    told = json.loads((place / "records" / "race_one" / "race.json").read_text())
    assert [told[f"{name}.flags"] for name in ("one", "base")] == [["--muon_lr=2"], []]
    assert verify.main([str(place / "records" / "race_one")]) == 0
    assert run_race(place, script="two.patch --x=1") == 2  # for it has no flag --x
    assert verdicts(place, "two")["two"]["decision"] == "broken"
    assert run_race(place, script="three.patch") == 2
    assert "three.patch: is no patch of " in capsys.readouterr().err

@pytest.mark.skipif(sys.platform != "linux", reason="a leash, and pgrep")
def test_a_run_that_hangs_on_one_of_two_ranks_is_ended(tmp_path, shards, monkeypatch):
    script = planted(tmp_path, "if world.rank == 1 and step == 2: __import__('time').sleep(999)")
    monkeypatch.setattr(race.trial, "LEAST", 5)
    one = race.Entry("x", str(script), [*TINY, *shards, "--micro_batches=2"], script.read_text(),
                      kept=str(script), allowed={"a step": 1.0})
    with refused("planted.py fails with seed 1, in a step, which took longer than 5 s, see its"):
        race.trial.run(one, "1", tmp_path / "records", "--num_iterations=4", NPROC="2")
    wait_until(lambda: subprocess.run(["pgrep", "-f", f"{tmp_path}/"], check=False).returncode)

def test_two_settings_of_one_script(place):
    flags = [f"--records={place / 'records'}", "--most=2", "--seed=7", "--save_every=3"]
    assert run_race(place, "demo", *flags, "--name=x", "--text=a.txt",
                    script="base.py --muon_lr=0.5 --val_loss_every=2") == 3
    lines = (place / "starts").read_text().splitlines()[2:]
    assert [seed for _, seed, _ in starts(place)[2:]] == [7, 7, 8, 8]
    for line in lines:
        assert line.startswith("--curve demo --save_every=3 ")
        assert ("--muon_lr=0.5 --val_loss_every=2" in line) == ("--name=base_ours " in line)
    assert (place / "records" / "race_x" / "base_ours").is_dir()

FAILS = (", see its output above: mend it, its flags (one that only a copy knows "
         "goes into one word with it) or this machine")

@pytest.mark.parametrize("old, new, flags, words", [
    ("loss = 5", "loss = missing", [], FAILS),
    ("\nsource =", "\nsys.argv.append('--seed=9')\nsource =", [],
     "with seed 1; a race needs the seed, and a validation after the last step"),
    ("NOISE = 1.0", "NOISE = 1.0  # CRASHES", [], "record.py: its run cannot be examined "
     "(AssertionError: the check failed); the same command tries it again"),
    ("muon_lr=1.0", "muon_lr=1.0, z_loss=0.1", ["--z_loss=0.2"], FAILS)])
def test_a_mistake_shows_in_one_step_and_once_mended_it_is_raced(place, capsys, old, new, flags,
                                                                 words):
    changed(place, old, new)
    assert run_race(place, *flags) == 2
    err = capsys.readouterr().err
    assert err.splitlines()[-1].endswith(words)
    assert ("NameError: name 'missing' is not defined" in err) == ("missing" in new)
    assert all(steps == "1" for *_, steps in starts(place))
    assert all(line.endswith("NPROC=1") for line in (place / "starts").read_text().splitlines())
    # Before a copy is blamed, the baseline shows whether anything runs on this machine.
    assert (("base", 1, "1") in starts(place)) == (not flags and "CRASHES" not in new)
    if not flags:
        (place / "record.py").write_text(STAND_IN)
    assert run_race(place, "--most=1", script=" ".join(["record.py", *flags])) == 4

def test_a_run_that_fails_is_run_again_by_the_same_command(place, capsys):
    assert run_race(place, "--most=1") == 4
    fails = "import sys\nif '--seed=2' in sys.argv:\n    sys.exit('no space')\n"
    for name, launcher in (("base", fails),  # which begins the second pair
                           ("record", fails.replace("if", "if 'record.py' in sys.argv[1] and"))):
        (place / "launch.py").write_text(launcher + LAUNCHER)
        assert run_race(place, "--most=2") == 2
        err = capsys.readouterr().err
        assert "no space" in err and re.search(rf"error: \S+/{name}\.py fails with seed 2", err)
    assert verdicts(place)["record"]["decision"] == "broken"
    (place / "launch.py").write_text(LAUNCHER)
    assert run_race(place, "--most=2") == 4
    assert [len(finished_logs(place, side)) for side in ("record", "base")] == [2, 2]

def test_a_race_that_goes_on_refuses_what_has_changed(place, capsys, monkeypatch):
    assert run_race(place, "--most=1", "--muon_lr=1") == 4
    before = starts(place)
    def is_refused(words, *flags):
        assert run_race(place, "--most=2", *flags) == 2 and starts(place) == before
        err = capsys.readouterr().err
        assert "was begun with other scripts or flags: " in err and words in err
        assert "Go back to them, remove that folder, or give this race a --name of its own" in err
    is_refused("or flags: record.flags was ['--muon_lr=1'] and is ['--muon_lr=2'];", "--muon_lr=2")
    is_refused("first_seed was 1 and is 2", "--muon_lr=1", "--seed=2")
    monkeypatch.setenv("NPROC", "2")
    is_refused("NPROC was None and is 2", "--muon_lr=1")
    (place / "record.py").write_text(STAND_IN)
    is_refused("record.sha256 was ", "--muon_lr=1")

@pytest.mark.parametrize("flags, words", [
    (["--most=0"], "argument --most: 0: expected a whole number from 1 on"),
    (["--resume=x.log"], "--resume=x.log: a race starts runs of its own"),
    (["base.py --x='"], "cannot be split into flags (No closing quotation); close its quotes"),
    (["--level=2"], "argument --level: 2: expected a number from 1e-09 to 0.5"),
    (["gone.py"], "gone.py: cannot be read"),
    (["base.py --val_files=x.bin"], "--val_files=x.bin: losses compare only on one validation "
     "text, so this flag takes effect on both sides or on none"),
    (["base.py --muon_lr=1 --val_tokens 9"], "--val_tokens: losses compare only on one"),
    (["record.py", "b.py --x=1"], "error: b.py --x=1: a race has one copy; put several into a "
     "folder, and ./run.sh night FOLDER races them"),
    (["base.py"], "would race itself, with the same settings: name a copy"),
    (["demo"], "no word names a copy: ./run.sh race my_record.py")])
def test_wrong_usage_starts_nothing(flags, words, place, capsys):
    script, *flags = flags if not flags[0].startswith("--") else ["record.py", *flags]
    assert run_race(place, *flags, script=script) == 2
    out = capsys.readouterr()
    assert words in out.err and not (place / "starts").exists() and len(out.err.splitlines()) == 1

def test_a_file_system_without_locks_and_a_ledger_that_cannot_be_written(place, capsys,
                                                                         monkeypatch):
    error = OSError(errno.ENOLCK, "No locks available")
    monkeypatch.setattr(common.fcntl, "flock", Mock(side_effect=error))
    (place / "records" / "ideas.csv").mkdir(parents=True)
    assert run_race(place, "--most=1") == 4
    out, err = capsys.readouterr()
    assert "without locks (No locks available)" in err
    _, after = out.split("verdict: ", 1)
    assert "ideas.csv cannot be written (Is a directory)" in after

PROGRAM = """import sys
sys.path.insert(0, {root!r})
from records.tools import race, logs
race.trial.LAUNCH = race.Path({launcher!r})
race.trial.EXAM = race.trial.LAUNCH.with_name("exam.py")
race.trial.text_for = lambda *_: {{"flags": [], "exam": None}}
sys.exit(race.load.run(race.main))
"""

def begin(place):
    code = PROGRAM.format(root=str(ROOT), launcher=str(place / "launch.py"))
    command = [sys.executable, "-c", code, f"{place}/record.py", f"--vs={place / 'base.py'}",
               f"--records={place / 'records'}", "--most=2"]
    with open(place / "out", "w") as out:
        return subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)

def wait_until(done):
    """A hang is a failure, by a generous limit."""
    for _ in range(1200):
        if done():
            return
        time.sleep(0.05)
    raise AssertionError(done)

@pytest.mark.skipif(sys.platform != "linux", reason="signals and pgrep as on Linux")
@pytest.mark.parametrize("number, group, status", [
    (signal.SIGINT, True, 130), (signal.SIGTERM, False, 143), (signal.SIGKILL, False, -9)])
def test_interrupted_it_goes_on_and_no_run_is_lost_or_counted_twice(number, group, status, place,
                                                                    capsys):
    """While it runs, it cannot be started again, and its script may be edited."""
    hold = place / "starts.hold"
    hold.touch()
    program = begin(place)
    wait_until((place / "starts.held").exists)  # three steps into the third of four runs
    assert run_race(place, "--most=2") == 2
    assert "race_record: this race is running already; wait for it" in capsys.readouterr().err
    for side in ("record", "base"):
        (place / f"{side}.py").write_text("an edit that is half done")
    (os.killpg if group else os.kill)(program.pid, number)
    assert program.wait() == status
    pattern = f"{place}.*--seed"  # of a stand-in that trains
    wait_until(lambda: subprocess.run(["pgrep", "-f", pattern], check=False).returncode == 1)
    text = (place / "out").read_text()
    if number != signal.SIGKILL:
        assert "race: the same command goes on from the runs that are done\n" in text
        assert text.endswith("interrupted\n") and "Traceback" not in text
    hold.unlink()
    (place / "base.py").write_text(STAND_IN)
    changed(place, "OFFSET = 0.0", "OFFSET = -0.1")
    run_race(place, "--most=2")
    assert "2 runs are done" in capsys.readouterr().out
    assert len(starts(place)) == 2 + 5
    for side, logged in (("record", 2), ("base", 3)):
        found = [logs.read_run(path, "x") for path in finished_logs(place, side)]
        assert len(found) == logged
        assert sorted(run.seed for run in found if run.finished) == ["1", "2"]
    assert verify.main([str(place / "records" / "race_record")]) == 0
    assert "2 pairs" in (place / "records" / "race_record" / "verdict.txt").read_text()

@pytest.mark.parametrize("word, script, own", [
    ("a.py --x=1 --y 2", "a.py", ["--x=1", "--y", "2"]), ("a b.py", "a b.py", []),
    ("a b.py --x='1 2'", "a b.py", ["--x=1 2"]), ("'a b.py' --x=1", "a b.py", ["--x=1"]),
    ("d e/a b.py --x=c.py", "d e/a b.py", ["--x=c.py"])])
def test_a_word_may_hold_a_script_with_its_flags(word, script, own, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path(script).parent.mkdir(exist_ok=True)
    for path in (script, "my base.py"):
        Path(path).write_text(path)
    found = race.parse([word, "--vs=my base.py", "--z=3"])
    one = found.candidate
    assert (one.script, one.text, one.flags) == (script, script, ["--z=3", *own])
    assert found.baseline.name == "my_base" and found.folder.name == f"race_{one.name}"

@pytest.mark.parametrize("more, resumed, counts", [
    ({}, False, True), ({"seed": 3}, False, False), ({"source": "# other\n"}, False, False),
    ({"losses": (9.0, float("nan"))}, False, False), ({"total": 300}, False, False),
    ({}, True, True), ({"hyper": {"muon_lr": 2}}, True, False),
    ({"env": {"ranks": 2}}, True, False), ({"source": "# other\n"}, True, False)])
def test_which_runs_count(place, more, resumed, counts):
    """What --resume leaves is a log of its own, which continues the one that was cut short."""
    usual = {"source": (place / "record.py").read_text()}
    if resumed:
        (place / "b.log").write_text(log_text(**usual, total=500))
        more = {"losses": (3.3, 3.2), "first": 250, "parent": "gone/b"} | more
    for name in ("a.log", "z_copy.log"):  # of a seed that is there
        (place / name).write_text(log_text(**usual | more))
    entry = race.Entry("record", "record.py", [], usual["source"])
    found = race.trial.finished(entry, logs.read([place])[0], ("1", "2"))
    assert [(seed, Path(run.path).stem) for seed, run in found.items()] == [("1", "a")] * counts
