"""tools/night.py: ideas in a folder, hours, kills, and what winners are."""

import difflib
import json
import os
import random
import re
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock
import numpy as np
import pytest
from conftest import ROOT
from test_data_common import status_of
from test_race import PROGRAM, STAND_IN, place, starts, wait_until  # noqa: F401
from records.tools import judge, load, logs, night, race, trial, verify

def without_races(patch):
    """In place of each race, what its script says of itself: `GAIN 2`, say, in a second. If it says
    nothing, that takes the hours, and is undecided if they are fewer than one."""
    now = [0.0]

    @contextmanager
    def child(program, *words, stdout, **_):
        try:
            plan = race.parse(words)
        except load.UserError as error:
            print(f"error: {error}", file=stdout)
            yield Mock(poll=lambda: 2, returncode=2)
            return
        one, base = plan.candidate, plan.baseline
        gain = sum(sign * int(x) for sign, side in ((1, one), (-1, base))
                   for x in re.findall("GAIN (.*)", side.text))
        end = now[0] + (1 if gain else 3600 * plan.options.hours)
        path = plan.folder / "verdict.json"
        pairs = json.loads(path.read_text())[0]["pairs"] if path.exists() else 0
        decision = "better" if gain < 0 else "worse" if gain else "no difference"
        decision = "undecided" if not gain and plan.options.hours < 1 else decision
        path.write_text(json.dumps([night.NOT_RACED | {
            "candidate": one.name, "decision": decision, "keep": gain < 0, "pairs": pairs + 9,
            "why": one.note, "difference": gain, "words": words}]))
        (plan.folder / f"{one.name}.py").write_text(one.text)
        (plan.folder / "race.json").write_text(json.dumps({f"{one.name}.flags": one.flags}))
        with open(plan.folder.parent / "raced", "a") as file:
            print(one.name, base.name, file=file)
        yield Mock(poll=lambda: now.__setitem__(0, end) or 0, returncode=0)
    patch.setattr(night, "child", child)
    patch.setattr(night, "time", Mock(monotonic=lambda: now[0]))

NIGHT = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nfrom records.tools import night\n"

class Ideas:
    """A folder of ideas for a script."""
    def __init__(self, place: Path, text: str):  # noqa: F811
        self.folder, self.text, self.night = place / "ideas", text, place / "records/night_ideas"
        (place / "base.py").write_text(text)
        self.folder.mkdir()
        self.words = [str(self.folder), f"--vs={place}/base.py", f"--records={place}/records"]

    def add(self, name: str, old: str, new: str, head: str = ""):
        assert self.text.count(old) == 1
        texts = self.text, self.text.replace(old, new)
        diff = difflib.unified_diff(*[text.splitlines(True) for text in texts], "a", "b")
        (self.folder / name).write_text(texts[1] if name.endswith(".py") else head + "".join(diff))

    def race(self, *flags):
        return status_of(lambda: night.main([*self.words, *flags]))

    def rows(self) -> dict:
        found = json.loads((self.night / "night.json").read_text())["ideas"]
        return {Path(row["file"]).name: row for row in found}

    def raced(self) -> list:
        return [tuple(line.split()) for line in (self.night / "raced").read_text().splitlines()]

@pytest.fixture
def ideas(tmp_path, monkeypatch):
    without_races(monkeypatch)
    return Ideas(tmp_path, "".join(f"line {i}\n" for i in range(60)))

def test_a_winner_is_raced_again_and_climbs(ideas):
    """What begins later is raced against it. An edited file is a new idea."""
    ideas.add("a.patch", "line 10\n", "GAIN 1\n")
    ideas.add("b.patch", "line 20\n", "GAIN -1\n", head="why: faster\nflags: --muon_lr=2\n")
    ideas.add("c.py", "line 30\n", "GAIN -2\n")
    ideas.add("d.patch", "line 40\n", "GAIN -1\n")
    (ideas.folder / "e.patch").write_text("@@ -1 +1 @@\n-x\n+y\n")
    assert ideas.race("--climb", "demo") == 0
    winners = [("b", "base"), ("b", "base"), ("c", "b"), ("c", "b"), ("d", "c"), ("d", "c")]
    assert ideas.raced() == [("a", "base"), *winners]
    rows = ideas.rows()
    assert [(row["decision"], row["confirmed"]) for row in rows.values()] == [
        ("worse", None), *[("better", True)] * 3, ("broken", None)]
    assert "e.patch: is no patch of " in rows["e.patch"]["why"]
    one = race.parse(rows["b.patch"]["words"]).candidate
    assert one.flags == ["demo", "--muon_lr=2"] and rows["b.patch"]["why"] == "faster"
    assert "--seed=1001" in rows["b.patch"]["words"] and "--muon_lr=2" in rows["d.patch"]["words"]
    ideas.add("a.patch", "line 10\n", "GAIN 2\n")
    assert ideas.race("--climb", "demo") == 0 and ideas.raced()[7:] == [("a", "d")]

def test_hours_are_shared_and_kept(ideas, capsys):
    """What is undecided goes on when all had their share, and with more hours."""
    for name in "ab":
        ideas.add(f"{name}.patch", "line 10\n", f"{name}\n")
    assert ideas.race("--hours=0.5", "--json", "--most=9") == 4
    told = json.loads(capsys.readouterr().out)
    assert [row["hours"] for row in told["ideas"]] == [0.25, 0.25] and told["left"] == 0
    assert ideas.race("--hours=0.5") == 4 and len(ideas.raced()) == 2
    assert ideas.race("--hours=0.9") == 4
    assert ideas.raced() == 2 * [("a", "base"), ("b", "base")]
    assert [row["pairs"] for row in ideas.rows().values()] == [18, 18]

def test_after_a_first_look_the_worse_half_waits(ideas):
    for name, gain in (("a", 2), ("b", -1), ("c", 1), ("d", -2)):
        ideas.add(f"{name}.patch", "line 10\n", f"GAIN {gain}\n")
    assert ideas.race("--first=60") == 0
    assert [name for name, _ in ideas.raced()] == [*"abcd", *"bbddac"]  # two of them win

def test_no_night_confirms_what_does_nothing():
    """Of 1,000 simulated ones with 30 such ideas, which share the runs of their baseline and are
    looked at after each of 24 pairs. First races alone would find winners in some."""
    draw = np.random.default_rng(1)

    def winners(gaps):
        return np.any([(judge.e_of_pairs(gaps[..., :n]) >= 100) & (gaps[..., :n].mean(-1) < 0)
                       for n in range(8, 25)], axis=0)
    nights, ideas = np.nonzero(winners(
        draw.standard_normal((1000, 30, 24)) - draw.standard_normal((1000, 1, 24))))
    again = winners(draw.standard_normal((len(nights), 24)) - draw.standard_normal((1, 24)))
    assert 10 < len({*nights}) < 200 and len({*nights[again]}) <= 10

def test_the_patches_that_leave_out_parts_of_the_method_apply():
    """Each changes the script or has flags, and says what it does."""
    text = (ROOT / "train_gpt.py").read_text()
    paths = sorted((ROOT / "records" / "method" / "without").iterdir())
    for path in paths:
        changed, head = trial.patched(str(path), "train_gpt.py")
        assert head["why"] and (changed != text or head["flags"]), path
        compile(changed, path, "exec")
    assert len(paths) == 12

BASE = STAND_IN.replace("MS = 100", "MS = 1000")  # so that no load makes its clock wrong
IDEAS = {  # what each changes, the decision, what it says
    "bad": ("OFFSET = 0.0", "OFFSET = 0.1", "worse", "is worse than base"),
    "cheats": ("OFFSET = 0.0", "OFFSET = -0.1  # CHEATS", "dishonest", "seed 1: its log lies"),
    "fails": ("loss = 5", "loss = missing", "broken", "fails with seed 1, in its import"),
    "good": ("OFFSET = 0.0", "OFFSET = -0.1", "better", "is better than base"),
    "hangs": ("import argparse", "import time\ntime.sleep(999)\nimport argparse", "broken",
              "in its import, which took longer than 9 s"),
    "waits": ("log = open", "print('log: x', flush=True)\ntime.sleep(999)\nlog = open", "broken",
              "in its warm-up, which took longer than 9 s")}

@pytest.mark.skipif(sys.platform != "linux", reason="a leash, and pgrep")
def test_a_night_that_is_killed(place):  # noqa: F811
    """Two ideas at a time. Whatever an idea does, it is decided, and no run is made twice."""
    ours = Ideas(place, BASE)
    for name, (old, new, *_) in IDEAS.items():
        ours.add(f"{name}.patch", old, new)
    program = PROGRAM.format(root=str(ROOT), launcher=str(place / "launch.py"))
    (place / "race.py").write_text(program.replace("sys.exit(", "race.trial.LEAST = 9\nrace"
                                   ".plot.save = lambda f, *_, **m: m and f.write('<svg></svg>')\n"
                                   "sys.exit(", 1))
    (place / "night.py").write_text(f"{NIGHT}night.RACE = night.Path({str(place / 'race.py')!r})\n"
                                    "sys.exit(night.run(night.main))\n")
    command = [sys.executable, place / "night.py", *ours.words, "--level=0.2", "--at_once=2"]
    (place / "starts").touch()
    for _ in range(5):
        most = len(starts(place)) + random.randint(1, 4)
        with subprocess.Popen(command) as started:
            wait_until(lambda: len(starts(place)) >= most or started.poll() is not None)
            started.kill()
        wait_until(lambda: subprocess.run(["pgrep", "-f", f"{place}/"], check=False).returncode)
    assert subprocess.run(command, check=False).returncode == 0
    for name, row in ours.rows().items():
        *_, decision, words = IDEAS[name.removesuffix(".patch")]
        assert (row["decision"], row["confirmed"]) == (decision, name == "good.patch" or None)
        assert words in row["why"] and (row["pairs"] < 2 or verify.main([
            str(ours.night / row["folder"])]) == 0)
    made = [(log.parent.name, run.seed) for log in ours.night.glob("race_*/*/*.log")
            if (run := logs.read_run(log, "")).finished and log.parent.name != "base"]
    assert len({*made}) == len(made)
    page = (ours.night / "night.html").read_text()
    assert page.count("<tr>") == 1 + 2 * len(IDEAS) and "better, confirmed" in page
