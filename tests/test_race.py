"""tools/race.py: what it starts, in which order, what it counts, and how it goes on. Most races
here are of a stand-in for the script, which writes logs of the same form in no time."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT
from scipy import stats
from test_data_common import status_of
from test_logs import log_text

from data.common import UserError
from records.tools import ledger, logs, race

STAND_IN = '''
import argparse, hashlib, os, sys, time
from pathlib import Path

OFFSET = 0.0
NOISE = 1.0
source = Path(__file__).read_text()
parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("preset", nargs="?")
for name, value in dict(seed=0, num_iterations=5, val_loss_every=1, save_every=0).items():
    parser.add_argument(f"--{name}", type=int, default=value)
for name, value in dict(muon_lr=1.0).items():
    parser.add_argument(f"--{name}", type=float, default=value)
for name in ("name", "records", "text"):
    parser.add_argument(f"--{name}")
args = parser.parse_args()
with open(os.environ["STARTS"], "a") as file:
    print(*sys.argv[1:], f"NPROC={os.environ.get('NPROC')}", file=file)
Path(args.records).mkdir(parents=True, exist_ok=True)
path = Path(args.records, f"{time.time_ns()}_{args.name}.log")
log = open(path, "w", buffering=1)
head = [f"{key} = {value!r}" for key, value in vars(args).items()]
sha256 = hashlib.sha256(source.encode()).hexdigest()
separator = "=" * 100
print(*head, separator, "ranks: 1", f"script: sha256 {sha256} {source.count(chr(10))} lines",
      separator, source.removesuffix("\\n"), separator, sep="\\n", file=log)
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
    line = (f"step:{step}/{N} val_loss:{loss:.4f} train_time:{100 * step + ns}ms "
            f"step_avg:{100 if step else float('nan'):.2f}ms tokens:{step} lr:1.000 window:128")
    print(line, file=log)
    print(line, flush=True)
print(f"log: {path}", file=log)
print(f"log: {path}", flush=True)
'''


LAUNCHER = "import os, sys\nos.execv(sys.executable, [sys.executable, *sys.argv[1:]])\n"

# It takes the flags that the script takes.
HONESTY = """import sys
text = open(sys.argv[1]).read()
with open(__file__ + ".asked", "a") as file:
    print(*sys.argv[1:], file=file)
print("validation: fine")
if "DISHONEST" in text or "--muon_lr=13" in sys.argv:
    print("not honest: the loss of token 7 changes by 0.5")
    sys.exit(3)
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with the script, a copy that is better by about 0.1, and a launcher of them."""
    (tmp_path / "base.py").write_text(STAND_IN)
    (tmp_path / "record.py").write_text(STAND_IN.replace("OFFSET = 0.0", "OFFSET = -0.1"))
    (tmp_path / "launch.py").write_text(LAUNCHER)
    (tmp_path / "honesty.py").write_text(HONESTY)
    monkeypatch.setattr(race.trial, "LAUNCH", tmp_path / "launch.py")
    monkeypatch.setattr(race.trial, "HONESTY", tmp_path / "honesty.py")
    monkeypatch.setenv("STARTS", str(tmp_path / "starts"))
    monkeypatch.delenv("NPROC", raising=False)
    return tmp_path


def run_race(place, *flags, script="record.py"):
    """The exit status of a race in this process."""
    argv = [str(place / script), f"--vs={place / 'base.py'}", f"--records={place / 'records'}",
            *flags]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["race.py", *argv])
        patch.chdir(ROOT)
        return status_of(race.main, errors=(logs.BadInput,))


def verdicts(place, name="record"):
    """candidate -> its object in verdict.json."""
    text = (place / "records" / f"race_{name}" / "verdict.json").read_text()
    return {row["candidate"]: row for row in json.loads(text)}


def starts(place):
    """(name, seed, num_iterations or None) of each run that was started."""
    found = []
    for line in (place / "starts").read_text().splitlines():
        given = dict(re.findall(r"--(\w+)=(\S+)", line))
        found.append((given["name"], int(given["seed"]), given.get("num_iterations")))
    return found


def finished_logs(place, side):
    return sorted((place / "records" / "race_record" / side).glob("*.log"))


@pytest.mark.parametrize("flags, judged", [(["--repeat=2"], False), (["--most=2"], True)])
def test_its_page_is_fresh_after_every_run(place, monkeypatch, flags, judged):
    """... and with a fixed number of pairs it says nothing of their difference before the end."""
    pages = []
    monkeypatch.setattr(race.verdict.page, "save", lambda path, sides, comparisons, target, notes, alive:
                        pages.append((len(sides[-1].runs), len(comparisons), notes, alive)))
    run_race(place, *flags)
    assert pages == [(1, judged, [], True), (2, judged, [], True), (2, judged, [], True),
                     (2, 1, [], False)]


def test_a_race_in_turn_with_the_same_seeds(place, capsys):
    assert run_race(place, "--repeat=3", "--target=4.0", "--muon_lr=2") == 0
    assert starts(place) == [
        ("record", 1, "1"), ("base", 1, "1"),  # one step of each
        ("record", 1, None), ("base", 1, None), ("base", 2, None), ("record", 2, None),
        ("record", 3, None), ("base", 3, None)]
    out = capsys.readouterr().out
    folder = place / "records" / "race_record"
    assert sorted(path.name for path in folder.iterdir()) == [
        "base", "race.html", "race.json", "race.png", "record", "record.patch", "verdict.json",
        "verdict.txt"]
    ends = [[logs.read_run(path, "x").loss for path in finished_logs(place, side)]
            for side in ("record", "base")]
    p = stats.ttest_rel(*ends).pvalue
    verdict = " ".join((folder / "verdict.txt").read_text().split())
    found = re.search(r"record is better than base \(record - base = (-0\.1\d*) nats a token, p = "
                      r"(\S+)\) by 3 pairs\.", verdict)
    assert found[2] == f"{p:.2g}" and verdict in " ".join(out.split())
    row = verdicts(place)["record"]
    assert row["p"] == pytest.approx(p) and row["E"] is None and row["keep"] is True
    assert f"{row['difference']:.4f}" == found[1] and row["pairs"] == 3
    assert "below 4 at p < 0.01: record" in verdict
    before = out.partition("verdict: ")[0]
    assert " p = " not in before and " E = " not in before
    assert "after 1 pair: record - base = -0.1" in out
    assert re.search(r"race: 5 runs to go, about 00:\d\d\n", out)
    assert re.search(r"step 2: record - base = (-0\.1\d*), mean of 1: \1\n", out)
    assert re.search(r"step 2: record - base = -0\.1\d*, mean of 3: -0\.1", out)
    patch = (folder / "record.patch").read_text()
    assert "-OFFSET = 0.0\n+OFFSET = -0.1\n" in patch
    assert (folder / "race.png").read_bytes().startswith(b"\x89PNG")
    assert all("--muon_lr=2" in line and "--save_every=0" in line
               for line in (place / "starts").read_text().splitlines())


def test_pairs_are_added_until_it_is_decided(place, capsys):
    """Five at least; and a race that is decided starts nothing more, also if more are allowed."""
    assert run_race(place, "demo") == 0
    row = verdicts(place)["record"]
    pairs = row["pairs"]
    assert 5 <= pairs < 12 and row["decision"] == "better" and row["E"] >= 100 and row["p"] is None
    assert row["adjusted"] == pytest.approx(1 / row["E"]) and row["why"].startswith("record is bet")
    low, high = row["interval"]
    assert low < row["difference"] < high < 0
    assert len(finished_logs(place, "record")) == len(finished_logs(place, "base")) == pairs
    out = capsys.readouterr().out
    assert f"after {pairs} pairs: record - base = " in out and f"E = {row['E']:.3g}: better" in out
    assert re.search(r"after 4 pairs: .*: undecided, 1 more such pair would decide it\n", out)
    before = starts(place)
    assert run_race(place, "demo", "--most=20") == 0 and starts(place) == before
    assert verdicts(place)["record"] == row


def test_an_undecided_race_goes_on_with_more_pairs_and_a_fixed_one_does_not(place, capsys):
    assert run_race(place, "--most=2") == 4
    assert verdicts(place)["record"]["decision"] == "undecided"
    before = starts(place)
    assert run_race(place, "--most=3") == 4
    (line,) = ledger.read(place / "records" / "ideas.csv")  # one idea, with its three pairs
    assert (line["race"], line["candidate"], line["pairs"]) == ("race_record", "record", "3")
    assert starts(place)[len(before):] == [("record", 3, None), ("base", 3, None)]
    out = " ".join(capsys.readouterr().out.split())
    assert "4 runs are done" in out and "pairs in all would likely decide it." in out
    assert run_race(place, "--repeat=3") == 2
    assert "repeat was None and is 3" in capsys.readouterr().err
    flags = ["--name=fixed", "--repeat=2"]
    assert run_race(place, *flags) in (0, 4)
    assert run_race(place, "--name=fixed", "--repeat=3") == 2
    assert "repeat was 2 and is 3" in capsys.readouterr().err


def test_many_candidates_share_the_baseline_and_drop_out(place, capsys):
    """One is better, one worse, one the same, one does not run, and one is not honest."""
    offsets = {"worse": 0.3, "same": 0.0, "broken": 0.0, "liar": -2.0}
    for name, offset in offsets.items():
        text = STAND_IN.replace("OFFSET = 0.0", f"OFFSET = {offset}")
        text = text.replace("loss = 5", "loss = missing") if name == "broken" else text
        (place / f"{name}.py").write_text(text + "# DISHONEST\n" * (name == "liar"))
    copies = [str(place / f"{name}.py") for name in offsets]
    settings = f"{place / 'base.py'} --muon_lr=3"
    assert run_race(place, *copies, settings) == 0
    rows = verdicts(place)
    assert {name: (row["decision"], row["keep"], row["honest"]) for name, row in rows.items()} == {
        "record": ("better", True, True), "worse": ("worse", False, True),
        "same": ("no difference", False, True), "broken": ("broken", False, True),
        "liar": ("dishonest", False, False), "base_muon_lr_3": ("no difference", False, True)}
    assert rows["same"]["pairs"] == 2 and rows["broken"]["pairs"] == rows["liar"]["pairs"] == 0
    assert rows["liar"]["why"].endswith("it is not raced, unless you add --dishonest")
    best = rows["record"]
    assert best["adjusted"] == pytest.approx(6 / best["E"]) and best["E"] > 600
    assert rows["worse"]["E"] >= 100
    made = [name for name, _, steps in starts(place) if steps is None]
    assert made.count("base") == max(best["pairs"], rows["worse"]["pairs"])
    assert made.count("same") == 2 and made.count("broken") == made.count("liar") == 0
    assert len({row["patch"] for row in rows.values()} - {rows["same"]["patch"]}) == 5
    out, err = capsys.readouterr()
    assert "NameError: name 'missing' is not defined" in err
    folder = place / "records" / "race_record"
    table = next(line for line in out.splitlines() if line.startswith("worse "))
    assert table.split()[1:3] == ["worse", str(rows["worse"]["pairs"])]
    assert (folder / "base_muon_lr_3.patch").read_text() == "flags: --muon_lr=3\n"
    before = starts(place)  # the same command tries only what could not be raced
    (place / "broken.py").write_text(STAND_IN.replace("OFFSET = 0.0", "OFFSET = 0.2"))
    assert run_race(place, *copies, settings) == 0
    more = starts(place)[len(before):]
    assert more[:2] == [("broken", 1, "1"), ("liar", 1, "1")]
    assert {name for name, _, steps in more if steps is None} == {"broken"}
    assert verdicts(place)["broken"]["decision"] == "worse"


def test_the_status_and_the_json_of_a_race(place, capsys):
    """3: nothing to keep; 2: nothing could be raced. Programs read standard output."""
    (place / "record.py").write_text(STAND_IN.replace("OFFSET = 0.0", "OFFSET = 0.1"))
    assert run_race(place, "--json") == 3
    out, err = capsys.readouterr()
    assert json.loads(out)[0]["decision"] == "worse" and "race: after 1 pair" in err
    (place / "record.py").write_text("import missing")
    assert run_race(place, "--name=x", "--json") == 2
    out, err = capsys.readouterr()
    assert json.loads(out)[0]["decision"] == "broken"
    assert err.splitlines()[-1].startswith("error: ")


def test_a_gain_with_more_tokens_is_not_kept(place):
    (place / "record.py").write_text(STAND_IN.replace("OFFSET = 0.0", "OFFSET = -0.1").replace(
        "tokens:{step}", "tokens:{2 * step}"))
    assert run_race(place) == 3
    row = verdicts(place)["record"]
    assert (row["decision"], row["tokens"], row["baseline_tokens"]) == ("better", 10, 5)
    assert row["why"].startswith("Unequal: record has 100 % more tokens. record is better than "
                                 "base at 100 % more tokens (")


def test_a_difference_that_is_not_worth_more_pairs(place):
    assert run_race(place, "--worth=0.2", "--only_ours=--muon_lr=2") == 0  # it is decided before
    (place / "record.py").write_text(STAND_IN.replace("OFFSET = 0.0", "OFFSET = 0.01").replace(
        "NOISE = 1.0", "NOISE = -22.0"))
    assert run_race(place, "--worth=0.2", "--name=y") == 3
    row = verdicts(place, "y")["record"]
    assert row["decision"] == "no difference" and max(map(abs, row["interval"])) <= 0.2
    assert row["why"].startswith("No difference that matters: record - base lies between -0.")


def test_a_candidate_with_other_validation_data_is_not_compared(place, capsys):
    (place / "record.py").write_text(STAND_IN.replace('for key, value in vars(args).items()]',
        'for key, value in (vars(args) | {"val_tokens": 9}).items()]'))
    assert run_race(place) == 2
    assert "validation data" in capsys.readouterr().err
    assert len(finished_logs(place, "record")) == 1


def test_two_settings_of_one_script(place):
    flags = [f"--records={place / 'records'}", "--repeat=2", "--seed=7", "--save_every=3"]
    assert run_race(place, "demo", *flags, "--only_ours=--muon_lr=0.5 --val_loss_every=2",
                    "--name=x", script="base.py") == 3
    lines = (place / "starts").read_text().splitlines()[2:]
    assert [seed for _, seed, _ in starts(place)[2:]] == [7, 7, 8, 8]
    for line in lines:
        assert line.startswith("demo ") and "--save_every=3" in line and "every=0" not in line
        assert ("--muon_lr=0.5 --val_loss_every=2" in line) == ("--name=base_ours " in line)
    assert (place / "records" / "race_x" / "base_ours").is_dir()


def test_a_mistake_shows_at_once_with_its_traceback(place, capsys):
    (place / "record.py").write_text(STAND_IN.replace("loss = 5", "loss = missing"))
    assert run_race(place) == 2
    err = capsys.readouterr().err
    assert "Traceback" in err and "NameError: name 'missing' is not defined" in err
    assert err.splitlines()[-1] == (f"error: {place}/record.py fails in a run of 1 step, whose "
                                    "output is above; mend it and start the race again")
    assert len(starts(place)) == 1 and "NPROC=1" in (place / "starts").read_text()
    (place / "record.py").write_text(STAND_IN)  # mended, it is raced
    assert run_race(place, "--repeat=1") == 4


def test_a_copy_that_is_not_honest_is_not_raced(place, capsys):
    """Once it is mended, the race begins."""
    (place / "record.py").write_text(STAND_IN + "# DISHONEST\n")
    assert run_race(place, "--repeat=1", "--muon_lr=1") == 2
    assert capsys.readouterr().err == (
        f"error: {place}/record.py: not honest: the loss of token 7 changes by 0.5; it is not "
        "raced, unless you add --dishonest\n")
    assert len(starts(place)) == 1  # its one step
    assert verdicts(place)["record"]["decision"] == "dishonest"
    (place / "record.py").write_text(STAND_IN.replace("OFFSET = 0.0", "OFFSET = -0.1"))
    assert run_race(place, "demo", "--repeat=1", "--text=a.txt", "--muon_lr=1") == 4
    asked = (place / "honesty.py.asked").read_text().splitlines()
    assert asked[1:] == [f"{place}/{name} demo --muon_lr=1" for name in ("record.py", "base.py")]
    verdict = (place / "records" / "race_record" / "verdict.txt").read_text()
    assert "honest" not in verdict


def test_a_dishonest_copy_may_be_raced_and_the_verdict_says_so_first(place, capsys):
    """Also when pairs are added later; a setting can make a script dishonest, too."""
    flags = ["--only_ours=--muon_lr=13", "--dishonest"]
    assert run_race(place, "--most=1", *flags) == 4
    assert run_race(place, *flags) == 3
    found = verdicts(place)["record"]
    assert found["decision"] == "better" and not found["keep"]
    seen = f"{place}/record.py: not honest: the loss of token 7 changes by 0.5\n"
    folder = place / "records" / "race_record"
    assert (folder / "verdict.txt").read_text().startswith(seen)
    assert "\n\n" + seen in capsys.readouterr().out
    assert len((place / "honesty.py.asked").read_text().splitlines()) == 2


def test_a_script_that_takes_no_single_step_is_tried_with_two(place):
    text = STAND_IN.replace("N = args", 'assert args.num_iterations % 2 == 0 or '
                            'sys.exit("error: --num_iterations takes multiples of 2")\nN = args')
    for name in ("record.py", "base.py"):
        (place / name).write_text(text)
    assert run_race(place, "--num_iterations=6", "--repeat=1") == 4
    assert [steps for *_, steps in starts(place)][:4] == ["1", "2", "1", "2"]
    assert "--num_iterations=6" in (place / "starts").read_text().splitlines()[-1]


def test_a_flag_that_only_the_copy_knows(place, capsys):
    (place / "record.py").write_text(STAND_IN.replace("muon_lr=1.0", "muon_lr=1.0, z_loss=0.1"))
    assert run_race(place, "--z_loss=0.2") == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith(
        "base.py fails in a run of 1 step, whose output is above; flags that only the copies know "
        "go into --only_ours")
    assert run_race(place, "--only_ours=--z_loss=0.2", "--most=1") == 4


def test_a_copy_that_ignores_its_seed_is_refused(place, capsys):
    (place / "record.py").write_text(STAND_IN.replace("\nsource =", "\nsys.argv.append('--seed=9')"
                                                      "\nsource ="))
    assert run_race(place) == 2
    assert "its log says seed = 9 at step 1, expected --seed=1" in capsys.readouterr().err


def test_a_run_that_fails_is_run_again_by_the_same_command(place, capsys):
    assert run_race(place, "--most=1") == 4
    fails = "import sys\nif '--seed=2' in sys.argv:\n    sys.exit('no space')\n"
    (place / "launch.py").write_text(fails + LAUNCHER)
    assert run_race(place, "--most=2") == 2  # the baseline begins the second pair
    out = capsys.readouterr()
    assert "no space" in out.err
    assert re.search(r"error: \S+/base\.py failed with seed 2", out.err)
    fails = fails.replace("if", "if 'record.py' in sys.argv[1] and")
    (place / "launch.py").write_text(fails + LAUNCHER)
    assert run_race(place, "--most=2") == 2
    assert re.search(r"error: \S+/record\.py failed with seed 2", capsys.readouterr().err)
    assert verdicts(place)["record"]["decision"] == "broken"
    (place / "launch.py").write_text(LAUNCHER)
    assert run_race(place, "--most=2") == 4
    assert [len(finished_logs(place, side)) for side in ("record", "base")] == [2, 2]


@pytest.mark.parametrize("change, words", [
    ("record", "record.sha256 was "),
    ("flags", "record.flags was ['--muon_lr=1'] and is ['--muon_lr=2']"),
    ("seed", "first_seed was 1 and is 2"), ("NPROC", "NPROC was None and is 2")])
def test_a_race_that_goes_on_refuses_what_has_changed(change, words, place, capsys, monkeypatch):
    assert run_race(place, "--most=1", "--muon_lr=1") == 4
    before = starts(place)
    if change == "record":
        with open(place / "record.py", "a") as file:
            file.write("# another\n")
    if change == "NPROC":
        monkeypatch.setenv("NPROC", "2")
    flags = ["--muon_lr=2" if change == "flags" else "--muon_lr=1"]
    flags += ["--seed=2"] if change == "seed" else []
    assert run_race(place, "--most=2", *flags) == 2
    err = capsys.readouterr().err
    assert "was begun with other scripts or flags: " in err and words in err
    assert "Go back to them, or give this race a --name of its own" in err
    assert starts(place) == before


@pytest.mark.parametrize("flags, words", [
    (["--repeat=0"], "--repeat=0: takes a number above 0"),
    (["--resume=x.log"], "--resume=x.log: a race starts runs of its own"),
    (["--only_ours='"], "cannot be split into flags (No closing quotation); close its quotes"),
    (["--target=nan"], "argument --target: invalid number value: 'nan'"),
    (["--most=0"], "--most=0: takes a number above 0"),
    (["--level=2"], "--level=2.0: takes a number below 1"),
    (["--level=0.1", "--repeat=3"], "--repeat judges at a level of 0.01"),
    (["record.py"], "record.py: cannot be read"),
    (["demo"], "no word names a copy: ./run.sh race my_record.py")])
def test_wrong_usage_starts_nothing(flags, words, place, capsys):
    script = flags.pop() if flags == ["demo"] else "record.py"
    assert run_race(place, *flags, script=script) == 2
    out = capsys.readouterr()
    assert words in out.err and not (place / "starts").exists() and len(out.err.splitlines()) == 1


PROGRAM = """
import sys
sys.path.insert(0, {root!r})
from records.tools import race, logs
from data import common
race.trial.LAUNCH = race.Path({launcher!r})
race.trial.HONESTY = race.trial.LAUNCH.with_name("honesty.py")
sys.exit(common.run(race.main, errors=(logs.BadInput,)))
"""


def begin(place, *flags):
    """A race in a program of its own, as in a shell; its output goes to the file `out`."""
    code = PROGRAM.format(root=str(ROOT), launcher=str(place / "launch.py"))
    command = [sys.executable, "-c", code, str(place / "record.py"), f"--vs={place / 'base.py'}",
               f"--records={place / 'records'}", "--repeat=2", *flags]
    with open(place / "out", "a") as out:
        return subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)


def wait_for(path, words):
    """Until a file holds the words; a hang is a failure, by a generous limit."""
    for _ in range(1200):
        if path.exists() and words in path.read_text(errors="replace"):
            return
        time.sleep(0.05)
    raise AssertionError(f"{words!r} never came: {path.read_text() if path.exists() else path}")


def alive(place):
    """The stand-ins of this race that train."""
    shown = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    return [line for line in shown.stdout.splitlines()
            if str(place) in line and "--records" in line and "--seed" in line]


@pytest.mark.skipif(sys.platform != "linux", reason="signals and ps as on Linux")
@pytest.mark.parametrize("number, group, status", [
    (signal.SIGINT, True, 130), (signal.SIGTERM, False, 143)])
def test_interrupted_it_goes_on_and_no_run_is_lost_or_counted_twice(number, group, status, place):
    hold = place / "starts.hold"
    hold.touch()
    program = begin(place)
    wait_for(place / "starts.held", "")  # three steps into the third of four runs
    (os.killpg if group else os.kill)(program.pid, number)
    assert program.wait() == status
    for _ in range(100):
        if not alive(place):
            break
        time.sleep(0.1)
    assert not alive(place)
    text = (place / "out").read_text()
    assert "race: 2 runs are done; the same command goes on from there" in text
    assert text.endswith("interrupted\n") and "Traceback" not in text
    hold.unlink()
    assert begin(place).wait() in (0, 4)
    assert "2 runs are done" in (place / "out").read_text()
    assert len(starts(place)) == 2 + 5
    for side, logged in (("record", 2), ("base", 3)):
        found = [logs.read_run(path, "x") for path in finished_logs(place, side)]
        assert len(found) == logged
        assert sorted(run.seed for run in found if run.finished) == ["1", "2"]
    assert "2 pairs" in (place / "records" / "race_record" / "verdict.txt").read_text()


@pytest.mark.parametrize("more, resumed, counts", [
    ({}, None, True), ({"seed": 3}, None, False), ({"source": "# another script\n"}, None, False),
    ({"losses": (9.0, float("nan"))}, None, False), ({"total": 300}, None, False),
    ({}, {}, True), ({}, {"hyper": {"muon_lr": 2}}, False), ({}, {"env": {"ranks": 2}}, False),
    ({}, {"source": "# another script\n"}, False)])
def test_which_runs_count(place, more, resumed, counts):
    """Finished ones of this script and these seeds. What --resume leaves is a log of its own, which
    continues the one that was cut short."""
    flags = [f"--vs={place / 'base.py'}", "--repeat=2", f"--records={place / 'records'}"]
    one = race.parse([str(place / "record.py"), *flags])
    folder = one.folder / "record"
    folder.mkdir(parents=True)
    usual = {"source": (place / "record.py").read_text()}
    killed = {} if resumed is None else {"total": 500}
    (folder / "a.log").write_text(log_text(**usual | killed | more))
    if resumed is not None:
        text = log_text((3.3, 3.2), first=250, parent="gone/a", **usual | resumed)
        (folder / "b.log").write_text(text)
    (folder / "z_copy.log").write_text((folder / "a.log").read_text())  # of a seed that is there
    found = race.counted(one, one.candidates[0])
    assert {seed: Path(run.path).stem for seed, run in found.items()} == (
        {1: "a" if resumed is None else "b"} if counts else {})


def test_a_verdict_says_how_many_steps_are_saved(place):
    """The copy is there 0.1 nats earlier, on a line that falls by 0.2 nats a step, of five."""
    assert run_race(place) == 0
    row = verdicts(place)["record"]
    assert row["steps_later"] == pytest.approx(-0.5, abs=0.1) and row["baseline_steps"] == 5
    low, high = row["steps_interval"]
    assert low < row["steps_later"] < high
