"""tools/ledger.py: the ledger of what was raced, and what survives that so much was tried; and
that git takes a race that was moved to a topic."""

import subprocess

import numpy as np
import pytest
from conftest import ROOT, refused
from scipy import stats

from records.tools import ledger


def row(candidate="a", patch="1", **more):
    """A candidate's object in verdict.json."""
    usual = {"candidate": candidate, "patch": patch, "decision": "undecided", "keep": False,
             "honest": True, "difference": 0.01, "interval": None, "E": 2.0, "p": None, "pairs": 3,
             "seconds": 1.5, "baseline_seconds": 1.0, "tokens": 9, "baseline_tokens": 9, "why": ""}
    return usual | more


def rows_in(folder):
    return [(r["race"], r["candidate"], r["patch"], r["pairs"])
            for r in ledger.read(folder / "ideas.csv")]


def test_an_idea_that_goes_on_is_still_one_idea(tmp_path):
    ledger.add(tmp_path, "race_x", [row("a"), row("b, \"c\"\n", interval=[-1.0, 2.5])])
    ledger.add(tmp_path, "race_y", [row("a", pairs=0, E=None, decision="broken", difference=None)])
    ledger.add(tmp_path, "race_x", [row("a", pairs=7), row("a", "2")])
    assert rows_in(tmp_path) == [("race_x", "b, \"c\"\n", "1", "3"), ("race_y", "a", "1", "0"),
                                ("race_x", "a", "1", "7"), ("race_x", "a", "2", "3")]
    second = ledger.read(tmp_path / "ideas.csv")[0]
    assert (second["low"], second["high"], second["p"]) == ("-1.0", "2.5", "")
    assert [path.name for path in tmp_path.iterdir()] == ["ideas.csv"]


@pytest.mark.parametrize("text", ["a,b\n1,2\n", ",".join(ledger.COLUMNS) + "\n2026,x\n",
                                  ",".join(ledger.COLUMNS) + "\n" + "x," * 16 + "x\n"])
def test_a_damaged_ledger_is_one_line(text, tmp_path):
    (tmp_path / "ideas.csv").write_text(text)
    with refused("line 2: no line of a ledger"):
        ledger.read(tmp_path / "ideas.csv")


def marked(rows):
    rows = [{"E": "", "p": "", "keep": "True", **one} for one in rows]
    ledger.mark_survivors(rows)
    return [one["survives"] == "yes" for one in rows]


def test_what_survives():
    """Of ten ideas with e-values, the second best survives from 2 * 20 / 10 = 4 times less on."""
    worthless = [{"E": "0.5"}] * 8
    assert marked([{"E": "250"}, {"E": "110"}, *worthless]) == [True, True] + [False] * 8
    assert marked([{"E": "250"}, {"E": "90"}, *worthless]) == [True, False] + [False] * 8
    assert marked([{"E": "150"}, *worthless, {}, {}]) == [False] * 11
    assert marked([{"E": "250", "keep": "False"}, *worthless]) == [False] * 9
    values = [0.001, 0.01, 0.03, 0.2, 0.9]
    expected = list(stats.false_discovery_control(values) <= 0.05)
    assert marked([{"p": str(p)} for p in values]) == expected == [True] * 3 + [False] * 2
    # Both kinds: half of the rate is left for each.
    assert marked([{"p": "0.03"}]) == [True] and marked([{"p": "0.03"}, {"E": "1"}])[0] is False
    assert marked([{"p": "0.024"}, {"E": "1"}]) == [True, False]


def test_worthless_ideas_seldom_survive():
    """In 300 ledgers of 40 ideas without an effect, raced in six pairs and called better where they
    look so, 5 % may hold a false discovery."""
    random = np.random.RandomState(0)
    found = 0
    for _ in range(300):
        differences = random.standard_normal((40, 6))
        rows = [{"E": str(E)} for E in ideas_e(differences[:20])]
        rows += [{"p": str(p)} for p in stats.ttest_1samp(differences[20:], 0, axis=1).pvalue]
        found += any(marked(rows))
    assert found <= 0.08 * 300


def ideas_e(differences):
    from records.tools.judge import e_value
    return e_value(differences)


def test_the_table(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ledger, "ROOT", tmp_path)
    (tmp_path / "records" / "2026-11-25_x").mkdir(parents=True)
    ledger.main([])
    assert "no idea yet" in capsys.readouterr().out
    ledger.add(tmp_path / "records", "race_x", [row("good", keep=True, decision="better", E=5000.0),
                                               row("bad\x1b", E=0.25)])
    ledger.add(tmp_path / "records" / "2026-11-25_x", "race_y", [row("old", "3", E=None, p=0.5)])
    ledger.main([])
    header, *rows, _, last = capsys.readouterr().out.splitlines()
    assert header.split() == ledger.SHOWN
    assert {line.split()[2]: line.endswith("yes") for line in rows} == {
        "good": True, r"bad\x1b": False, "old": False}
    assert last == "3 ideas, of which 1 survive at a false discovery rate of 5%"


def test_git_takes_a_race_that_was_moved_and_ignores_one_that_was_not(tmp_path):
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / ".gitignore").write_text((ROOT / ".gitignore").read_text())
    kept = ["verdict.txt", "verdict.json", "race.json", "race.png", "a.patch", "README.md",
            "a/1.log", "train_gpt/2.log"]
    for folder in ("gelu", "race_gelu", "ablate_a"):
        for name in [*kept, "a/1/step00000010.pt", "race.html"]:
            path = tmp_path / "records" / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    for name in ("ideas.csv", "2026-11-25_x/ideas.csv"):
        (tmp_path / "records" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "records" / name).touch()
    subprocess.run(["git", "-C", tmp_path, "add", "."], check=True)
    added = subprocess.run(["git", "-C", tmp_path, "ls-files"], capture_output=True, text=True,
                           check=True).stdout.split()
    expected = [".gitignore", *[f"records/gelu/{name}" for name in kept],
                "records/2026-11-25_x/ideas.csv"]
    assert added == sorted(expected)
