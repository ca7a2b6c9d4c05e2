"""tools/ledger.py: the ledger of what was raced, and what survives that so much was tried."""

import json
import multiprocessing
import subprocess
import pytest
from conftest import ROOT
from records.tools import ledger

def row(candidate="a", patch="1", **more):
    usual = {"candidate": candidate, "patch": patch, "decision": "undecided", "keep": False,
             "honest": True, "difference": 0.01, "interval": None, "E": 2.0, "p": None, "pairs": 3,
             "seconds": 1.5, "baseline_seconds": 1.0, "tokens": 9, "baseline_tokens": 9, "why": ""}
    return usual | more

def ideas_in(folder):
    return [(r["race"], r["candidate"], r["patch"], r["pairs"])
            for r in ledger.read(folder / "ideas.csv")]

def test_an_idea_that_goes_on_is_still_one_idea(tmp_path):
    for race, one in (("x", row("a")), ("x", row("b, \"c\"\n", interval=[-1.0, 2.5])),
                      ("y", row("a", pairs=0, E=None, decision="broken", difference=None)),
                      ("x", row("a", pairs=7)), ("x", row("a", "2"))):
        ledger.add(tmp_path, f"race_{race}", one)
    assert ideas_in(tmp_path) == [("race_x", "b, \"c\"", "1", "3"), ("race_y", "a", "1", "0"),
                                  ("race_x", "a", "1", "7"), ("race_x", "a", "2", "3")]
    second = ledger.read(tmp_path / "ideas.csv")[0]
    assert (second["low"], second["high"], second["p"]) == ("-1.0", "2.5", None)
    assert [path.name for path in tmp_path.iterdir()] == ["ideas.csv"]

@pytest.mark.parametrize("change, warned", [
    (lambda text: "\ufeff" + text, 0), (lambda text: text.rstrip("\n"), 0),
    (lambda text: text + "2026-11-25,race_y,b,2,undeci", 1),  # a full disk
    *((lambda text, wrong=wrong: text + text.split("\n")[1].replace("2.5", wrong), 1)
      for wrong in ("x", "nan", "-1"))])
def test_what_others_did_to_a_ledger(change, warned, tmp_path, capsys):
    """It is read all the same, a line that is none is named, what comes after it stays whole."""
    ledger.add(tmp_path, "race_x", row("a", E=2.5))
    path = tmp_path / "ideas.csv"
    path.write_bytes(change(path.read_text()).encode())
    ledger.add(tmp_path, "race_z", row("c"))
    assert ideas_in(tmp_path) == [("race_x", "a", "1", "3"), ("race_z", "c", "1", "3")]
    assert [one["E"] for one in ledger.read(path)] == [2.5, 2.0]
    err = capsys.readouterr().err
    assert err.count("\n") == 2 * warned and err.count("line 3: no line of a ledger") == 2 * warned

def enter(folders, name, barrier):
    for folder in folders:
        barrier.wait()
        for i in range(3):
            ledger.add(folder, f"race_{name}", row(f"{name}{i}"))

def test_races_that_end_together_lose_nothing(tmp_path):
    """Also not where each finds no ledger: 40 times, each time three races at once."""
    folders = [tmp_path / str(trial) for trial in range(40)]
    for folder in folders:
        folder.mkdir()
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(3)
    races = [context.Process(target=enter, args=(folders, name, barrier)) for name in "abc"]
    for one in races:
        one.start()
    for one in races:
        one.join()
    assert [one.exitcode for one in races] == [0, 0, 0]
    expected = sorted(f"{name}{i}" for name in "abc" for i in range(3))
    for folder in folders:
        assert sorted(candidate for _, candidate, _, _ in ideas_in(folder)) == expected

def marked(rows):
    rows = [{"E": None, "p": None, "keep": "True", **one} for one in rows]
    ledger.mark_survivors(rows)
    return [one["kept"] == "yes" for one in rows]

def test_what_survives():
    """Of ten ideas with e-values, the second best survives from 2 * 20 / 10 = 4 times less on."""
    worthless = [{"E": 0.5}] * 8
    assert marked([{"E": 250.0}, {"E": 110.0}, *worthless]) == [True, True] + [False] * 8
    assert marked([{"E": 250.0}, {"E": 90.0}, *worthless]) == [True, False] + [False] * 8
    assert marked([{"E": 150.0}, *worthless, {}, {}]) == [False] * 11
    assert marked([{"E": 250.0, "keep": "False"}, *worthless]) == [False] * 9
    assert marked([{"E": 250.0}, {"p": 0.001}]) == [True, False]

def test_the_table(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ledger, "ROOT", tmp_path)
    (tmp_path / "records" / "2026-11-25_x").mkdir(parents=True)
    ledger.main([])
    assert "no such idea yet" in capsys.readouterr().out
    ledger.add(tmp_path / "records" / "2026-11-25_x", "race_y", row("old", "3", E=None, p=0.5))
    for one in (row("good", keep=True, decision="better", E=5000.0), row("bad\x1b", E=0.25),
                row("part_of_many", E=150.0), row("broken", E=None, difference=None)):
        ledger.add(tmp_path / "records", "race_x", one)
    ledger.main([])
    out = capsys.readouterr().out
    assert all(len(line) <= 80 for line in out.splitlines())
    header, *rows, _, count, last = out.splitlines()
    assert header.split()[:4] == ["idea", "date", "decision", "loss"]
    assert [[*line.split()[1:3], *line.split()[4:]] for line in rows] == [
        ["good", "1", "better", "+0.0100", "E", "5,000", "3", "yes"],
        [r"bad\x1b", "1", "undecided", "+0.0100", "E", "0.25", "3", "-"],
        ["part_of_many", "1", "undecided", "+0.0100", "E", "150", "3", "-"],
        ["broken", "1", "undecided", "-", "-", "3", "-"],
        ["old", "3", "undecided", "+0.0100", "p", "0.5", "3", "-"]]
    assert count == "5 ideas, 1 of them kept at a false discovery rate of 5%"
    assert last == "What failed, and why: records/negative.md"
    ledger.main(["OLD", "2026", "--json"])
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["candidate"], found["p"], found["baseline"]) == ("old", 0.5, "")
    ledger.main(["nothing"])
    assert "no such idea yet" in capsys.readouterr().out

def test_git_takes_a_race_that_was_moved_and_ignores_one_that_was_not():
    kept = ["verdict.txt", "verdict.json", "race.json", "race.png", "a.patch", "README.md",
            "a/1.log", "train_gpt/2.log"]
    names = [f"records/{folder}/{name}" for folder in ("gelu", "race_gelu", "night_a", "baselines")
             for name in [*kept, "a/1/step00000010.pt", "race.html"]]
    names += ["records/ideas.csv", "records/2026-11-25_x/ideas.csv"]
    done = subprocess.run(["git", "check-ignore", "--no-index", *names], cwd=ROOT, text=True,
                          capture_output=True, check=True)
    assert {*names} - {*done.stdout.split()} == {
        "records/2026-11-25_x/ideas.csv", *(f"records/gelu/{name}" for name in kept)}
