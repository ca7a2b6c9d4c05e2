"""records/compare.py: the statistics against exact values, verdicts, tables, pictures, errors."""

import contextlib
import hashlib
import io
import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from test_logs import FORGED, HOSTILE, LOGS, STRANGE, log_text, read_text

from records import compare, logs

GOOD = [3.2770, 3.2781, 3.2776, 3.2783]
SAME = [3.2772, 3.2779, 3.2778, 3.2784]


def write(folder, finals, ms=(100.0,), first_seed=1, **more):
    """A folder of logs that end in the given losses; returns it as text."""
    folder.mkdir(parents=True, exist_ok=True)
    for i, final in enumerate(finals):
        losses = (10.8258, 4.0 + (first_seed + i) / 1000, final)
        text = log_text(losses, seed=first_seed + i, ms=ms[i % len(ms)], **more)
        (folder / f"run{i}.log").write_text(text)
    return str(folder)


def side_of(label, folder, target=3.28):
    runs, unread = logs.read([str(folder)])
    assert unread == []
    return compare.Side(label, runs, target)


def verdict_of(a, b, target=3.28):
    sides = [side_of("A", a, target), side_of("B", b, target)]
    return compare.compare(*sides, target)["verdict"]


def run_main(capsys, *arguments):
    try:
        status = compare.main([str(a) for a in arguments])
    except SystemExit as e:
        status = e.code
    out = capsys.readouterr()
    return status, out.out, out.err


# --------------------------------------------------------------------------------------------------
# Resumed runs

def resume(folder, seed, **more):
    """A run of a folder that was killed at step 125 and has finished from there, with what differs
    then."""
    parent = folder / f"killed{seed}.log"
    parent.write_text(log_text((10.8, 4.0 + seed / 1000), seed=seed, total=250))
    text = log_text((4.0 + seed / 1000, 3.27 + seed / 10_000), seed=seed, first=125,
                    parent=folder / parent.stem, **more)
    (folder / f"resumed{seed}.log").write_text(text)
    return parent


@pytest.mark.parametrize("more, counts, words", [
    ({}, True, None), ({"hyper": {"save_every": 0}}, True, None),
    ({"env": {"ranks": 4}}, True, "ranks"),
    ({"hyper": {"muon_lr": 0.06}}, False, "muon_lr was 0.05 and is 0.06"),
    ({"source": "import numpy\n"}, False, "script")])
def test_a_run_resumed_with_another_method_is_left_out(tmp_path, more, counts, words):
    folder = tmp_path / "a"
    write(folder, GOOD)
    resume(folder, 90, **more)
    side = side_of("A", folder)
    assert len(side.runs) == 5 and side.loss["n"] == 4 + counts
    said = [warning for warning in side.warnings if "resumed90" in warning]
    assert said == ([] if words is None else [
        f"run resumed90 of A was resumed with differences ({words})"
        + ("" if counts else ", left out")])


def test_a_run_without_its_beginning_is_left_out(tmp_path, capsys):
    folder = tmp_path / "a"
    write(folder, GOOD)
    resume(folder, 90).unlink()
    status, out, err = run_main(capsys, folder, "--json")
    found = json.loads(out)
    assert status == 1 and "killed90.log is missing" in err and found["unread"] == err.splitlines()
    (side,) = found["sides"]
    assert side["loss"]["n"] == 4 and side["warnings"] == [
        "run resumed90 of A was resumed with differences (a missing log), left out"]


def test_where_all_runs_were_resumed_anew_they_are_used_and_it_is_said(tmp_path):
    folder = tmp_path / "a"
    folder.mkdir()
    for seed in range(1, 5):
        resume(folder, seed, hyper={"muon_lr": 0.06})
    side = side_of("A", folder)
    assert side.loss["n"] == sum("kept, for there is no other" in w for w in side.warnings) == 4
    said = verdict_of(folder, write(tmp_path / "b", SAME, first_seed=30))
    assert said.endswith(" But mind the warnings about A.")


def test_runs_that_went_on_elsewhere_are_no_clock(tmp_path):
    """Also where all runs of both sides did, in the same way."""
    for name, first in (("a", 1), ("b", 11)):
        (tmp_path / name).mkdir()
        for seed in range(first, first + 3):
            resume(tmp_path / name, seed, env={"ranks": 4, "torch": "2.12.0"})
    said = verdict_of(tmp_path / "a", tmp_path / "b")
    assert "Times do not compare, a run was resumed with differences" in said
    assert "faster" not in said and "slower" not in said


def test_branches_of_a_run_are_no_copies_of_it(tmp_path):
    """One was killed before it validated, so that it has no losses of its own; the others have
    finished, but share their seed and their beginning."""
    parent = resume(tmp_path, 7)
    text = log_text((4.007, 3.3), seed=7, first=125, parent=parent.with_suffix(""))
    (tmp_path / "alive.log").write_text(text[:text.index("step:249/")])
    side = side_of("A", tmp_path)
    assert sorted(run.name for run in side.runs) == ["alive", "resumed7"] and side.copies == []
    assert [run.name for run in side.used] == ["resumed7"]
    assert side.warnings == ["1 of the runs of A stopped before a last loss"]
    (tmp_path / "other.log").write_text(text)
    side = side_of("A", tmp_path)
    assert side.loss["n"] == 2 and not side.independent and side.copies == []


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
    assert compare.p_below([3.2, 3.2], 3.28) is compare.p_below(b, None) is None


def test_spread_against_tables():
    out = compare.spread([2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0])
    # The first number is the 97.5 % point of t with 7 degrees of freedom, from tables.
    half = 2.364624 * 2.138090 / math.sqrt(8)
    assert (out["n"], out["mean"]) == (8, 5.0) and out["sd"] == pytest.approx(2.138090, abs=1e-6)
    assert out["interval"] == pytest.approx((5 - half, 5 + half), abs=1e-5)
    assert compare.spread([3.28]) == {"n": 1, "mean": 3.28, "sd": None, "interval": None}
    assert compare.spread([]) == {"n": 0, "mean": None, "sd": None, "interval": None}
    assert compare.spread([3.0, 3.0]) == {"n": 2, "mean": 3, "sd": 0, "interval": (3, 3)}


def test_welch_against_scipy():
    a, b = [3.2781, 3.2790, 3.2772, 3.2785], [3.2801, 3.2799, 3.2807]
    test, out = stats.ttest_ind(a, b, equal_var=False), compare.welch(a, b)
    assert out["p"] == pytest.approx(test.pvalue)
    assert out["difference"] == pytest.approx(3.2782 - 3.2802333, abs=1e-7)
    assert out["interval"] == pytest.approx(tuple(test.confidence_interval(0.95)))
    assert compare.welch([1.0], [2.0, 3.0]) == {"difference": -1.5, "interval": None, "p": None}
    assert compare.welch([1.0, 1.0], [2.0, 2.0])["p"] is None
    assert compare.welch([], [1.0])["difference"] is None


def test_target_is_reached_on_the_line_between_validations(tmp_path):
    text = log_text((11.0, 4.0, 3.0, 2.0), every=100)
    for target, reached in ((3.25, (175, 17.5)), (4.0, (100, 10)), (2.0, (300, 30)),
                            (11.5, (0, 0)), (1.0, None)):
        run = read_text(tmp_path, text)
        run.find_target(target)
        assert run.reached == (reached and pytest.approx(reached))


def test_paired_against_scipy():
    a, b = [3.10, 3.32, 3.51, 3.27], [3.12, 3.33, 3.54, 3.28]
    out = compare.paired(a, b)
    test = stats.ttest_1samp(np.subtract(a, b), 0)
    assert out["p"] == pytest.approx(test.pvalue) and out["p"] < 0.05
    assert compare.welch(a, b)["p"] > 0.8  # the seeds' own spread hides the difference
    assert out["difference"] == pytest.approx(-0.0175)
    assert out["sd"] == pytest.approx(np.std([0.02, 0.01, 0.03, 0.01], ddof=1))
    assert out["interval"] == pytest.approx(tuple(test.confidence_interval(0.95)))
    for x, y in (([1.0], [2.0]), ([1.0, 2.0], [2.0, 3.0])):  # one pair; pairs without spread
        assert compare.paired(x, y)["p"] is None and compare.paired(x, y)["difference"] == -1
    assert compare.paired([], [])["difference"] is None


@pytest.mark.parametrize("df, nc", [(3, 5.0), (8, 3.2), (30, 4.0)])
def test_the_power_is_that_of_the_noncentral_t(df, nc):
    edge = stats.t.ppf(1 - compare.ALPHA / 2, df)
    assert compare.chance_to_show(2 * nc, 2.0, df) == pytest.approx(stats.nct.sf(edge, df, nc),
                                                                    abs=1e-4)


def test_what_runs_could_have_shown_against_simulation():
    """Of 4,000 simulated sets of 6 pairs with the difference named, 4 of 5 have p < 0.01; and with
    as many pairs as are said to be needed for a smaller one."""
    found = compare.power([], [], 0.5, 1.0, 6)
    draw = np.random.default_rng(1).normal
    for n, difference in ((6, found["detectable"]), (found["needed"], 0.5)):
        p = stats.ttest_1samp(draw(difference, 1.0, (4000, n)), 0, axis=1).pvalue
        assert np.mean(p < compare.ALPHA) == pytest.approx(0.8, abs=0.03)
    a, b = draw(0, 1.0, 7), draw(0, 2.0, 5)
    found = compare.power(a, b, 1.5, None, 0)
    for n, m, difference in ((7, 5, found["detectable"]), (*2 * [found["needed"]], 1.5)):
        x = draw(difference, np.std(a, ddof=1), (n, 4000))
        p = stats.ttest_ind(x, draw(0, np.std(b, ddof=1), (m, 4000)), equal_var=False).pvalue
        assert np.mean(p < compare.ALPHA) == pytest.approx(0.8, abs=0.03)
    assert compare.power([], [], 0.0, 1.0, 6)["needed"] is None
    assert compare.power([], [], 1.0, 0.0, 6) == {"detectable": None, "needed": None}


def test_the_rules_of_the_field():
    """Figures of the optimizer track's README: 3.276 for one run, 3.278 for four; and its three
    examples of two results."""
    for n, mean in ((1, 3.276), (4, 3.278), (16, 3.279)):
        row = compare.track_rule([mean] * n, 3.28)
        assert row["holds"] and row["value"] == pytest.approx(0.004) and row["runs_needed"] == n
        assert not compare.track_rule([mean + 1e-5] * n, 3.28)["holds"]
    assert compare.track_rule([3.281], 3.28)["runs_needed"] is None
    values = np.linspace(-1, 1, 12)
    losses = list(3.279 + values * 0.0013 / np.std(values, ddof=1))
    row = compare.speedrun_rule(losses, 3.28)
    assert not row["holds"] and row["runs_needed"] == 13
    assert row["value"] == pytest.approx(stats.ttest_1samp(losses, 3.28, alternative="less").pvalue)


@pytest.mark.parametrize("ours, theirs, value", [
    ((3.2785, 3210, 10), (3.2785, 3225, 16), 0.00167),
    ((3.2785, 3210, 10), (3.2778, 3250, 16), 0.0027),
    ((3.2790, 3325, 20), (3.2788, 3375, 20), 0.00648)])
def test_the_rule_for_two_results(ours, theirs, value):
    sides = []
    for mean, at, n in (ours, theirs):
        side = object.__new__(compare.Side)
        side.at, side.used, side.loss = at, n * [None], {"mean": mean}
        sides.append(side)
    found = compare.track_rule_for_two(*sides)
    assert found["value"] == pytest.approx(value, abs=3e-5) and found["holds"] == (value > 0.004)
    sides[0].at = None  # its runs end at different steps
    assert compare.track_rule_for_two(*sides) is None


def test_losses_at_a_step_and_the_first_step_of_the_rules(tmp_path, capsys):
    """At step 500 all are below, and so surely enough; at 375 one run has no validation."""
    for i in range(4):
        losses = (10.8, 4.0, 3.29, 3.2781 + i / 1e4, 3.277 + i / 1e4, 3.276)
        text = log_text(losses, seed=i)
        if i == 3:
            text = "".join(line for line in text.splitlines(True) if "step:375/" not in line)
        (tmp_path / f"{i}.log").write_text(text)
    side = compare.Side("A", logs.read([str(tmp_path)])[0], 3.28, 500, first=True)
    assert (side.loss["n"], side.at) == (4, 500)
    assert side.loss["mean"] == pytest.approx(3.27715)
    assert [row["first"] for row in side.rules] == [500, 500] and side.warnings == []
    side = compare.Side("A", logs.read([str(tmp_path)])[0], 3.28, 375)
    assert side.loss["n"] == 3 and side.warnings == ["1 of the runs of A have no loss at step 375"]
    assert [row["first"] for row in side.rules] == [None, None]
    _, out, _ = run_main(capsys, tmp_path, "--at", "375", "--first")
    assert "3.27820" in out and "first holds at step 500" in out
    _, out, _ = run_main(capsys, tmp_path, "--vs", tmp_path, "--at=500,375", "--json")
    sides = json.loads(out)["sides"]
    assert [side["at"] for side in sides] == [500, 375]


# --------------------------------------------------------------------------------------------------
# Warnings and verdicts

def test_a_sure_difference_is_claimed_with_its_hardware(tmp_path):
    a = write(tmp_path / "a", GOOD, ms=(99.0, 99.1))
    b = write(tmp_path / "b", SAME, ms=(100.0, 100.2))
    said = verdict_of(a, b)
    assert said.startswith("No difference in loss is shown (0.0001 nats a token, p = ")
    assert " A is faster than B by 1.0 % (p = " in said and " on the same kind of hardware." in said
    assert " Mean below 3.28 at p < 0.01: A yes, B yes." in said
    assert "A is slower than B by 1.1 %" in verdict_of(b, a)


def test_a_loss_is_called_better_or_worse(tmp_path):
    low = write(tmp_path / "a", GOOD, ms=(99.0, 101.0))
    high = write(tmp_path / "b", [3.2850, 3.2862, 3.2858, 3.2858], ms=(99.5, 101.0, 98.5))
    said = verdict_of(low, high)
    assert said.startswith("A is better than B by 0.0080 nats a token (p = ")
    assert "No difference in time" in said and "A yes, B not shown" in said
    assert "A is worse than B by" in verdict_of(high, low)
    assert "below" not in verdict_of(low, high, target=None)


@pytest.mark.parametrize("p, words", [(0.009, "A is faster than B by 1 %"),
                                      (0.011, "A may be faster than B by 1 %, not surely"),
                                      (0.049, "A may be faster than B"),
                                      (0.051, "No difference in time is shown"),
                                      (None, "can be tested")])
def test_claims_are_as_strong_as_their_p_value(p, words):
    assert words in compare.claim("time", "AB", {"difference": -1.0, "p": p}, "1 %",
                                 ("faster", "slower"))


@pytest.mark.parametrize("more, words", [
    ({"env": {"gpus": "8 x NVIDIA H200"}}, "times do not compare, the hardware"),
    ({"env": {"ranks": 4}}, "times do not compare"),
    ({"env": {"threads": "1 a rank"}}, "times do not compare"),
    ({"env": {"data": "d/val_0.bin 7 tokens"}}, "losses do not compare"),
    ({"hyper": {"vocab_size": 257}}, "losses do not compare"),
    ({"hyper": {"val_tokens": 99}}, "losses do not compare"),
])
def test_what_does_not_compare_is_not_compared(tmp_path, more, words):
    said = verdict_of(write(tmp_path / "a", GOOD, ms=(50.0, 51.0), **more),
                      write(tmp_path / "b", SAME, ms=(99.0, 100.0)))
    assert words in said.lower()
    assert ("faster" if "times" in words else "better") not in said


def test_moved_data_is_still_the_same_data(tmp_path):
    a = write(tmp_path / "a", GOOD, ms=(50.0, 51.0), env={"data": "here/val_0.bin 7 tokens"})
    b = write(tmp_path / "b", SAME, ms=(99.0, 99.1), env={"data": "elsewhere/val_0.bin 7 tokens"})
    assert "do not compare" not in verdict_of(a, b)


def test_clocks_of_different_eras_do_not_compare(tmp_path):
    names = {"a": "2024-12_no_train_loss.txt", "b": "2025-02_whole_clock.txt"}
    for side, name in names.items():
        (tmp_path / side).mkdir()
        for i in range(2):
            text = (LOGS / name).read_text().replace("val_loss:3.", f"val_loss:{i + 3}.")
            (tmp_path / side / f"{i}.txt").write_text(text)
    said = verdict_of(tmp_path / "a", tmp_path / "b")
    assert "Times do not compare, the hardware, the ranks or the rules of the clock differ" in said


def test_logs_without_hardware_are_said_to_be(tmp_path):
    console = (LOGS / "console_only.log").read_text()
    for side in ("a", "b"):
        (tmp_path / side).mkdir()
        for i in range(2):
            text = console.replace("val_loss:3.", f"val_loss:3.{ord(side)}{i}")
            (tmp_path / side / f"{i}.log").write_text(text)
    assert "; the logs do not name the hardware." in verdict_of(tmp_path / "a", tmp_path / "b")


def test_one_run_a_side_shows_nothing(tmp_path):
    said = verdict_of(write(tmp_path / "a", [3.2]), write(tmp_path / "b", [3.3]))
    assert said == ("Nothing is shown: 1 finished run of A against 1 of B, and spread takes at "
                    "least 2 a side.")


def test_shared_seeds_and_copies_are_no_evidence(tmp_path):
    a, b = tmp_path / "a", write(tmp_path / "b", SAME, first_seed=30)
    write(a, GOOD)
    assert side_of("A", a).warnings == side_of("B", b).warnings == []
    (a / "run1.log").write_text(log_text((10.8, 4.0, 3.2781), seed=1))  # run0 has seed 1 too
    assert side_of("A", a).warnings == ["runs of A share a seed: 1"]
    assert "not independent" in verdict_of(a, b) and "A is" not in verdict_of(a, b)
    text = (LOGS / "console_only.log").read_text()  # which names no seed
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "1.log").write_text(text)
    (tmp_path / "c" / "2.log").write_text(f"copied\n{text}")
    side = side_of("A", tmp_path / "c")
    assert side.warnings == ["run 2 of A has the losses of 1: a copy, counted once"]
    assert side.independent and side.loss["n"] == 1 and side.copies == ["2"]


def test_a_file_counts_once_and_a_run_on_one_side(tmp_path):
    folder = write(tmp_path / "a", GOOD)
    assert len(logs.read([folder, f"{folder}/run0.log"])[0]) == len(GOOD)
    shutil.copytree(folder, tmp_path / "b")
    for other in (folder, tmp_path / "b"):
        assert verdict_of(folder, other) == "Nothing is shown: 4 of the runs stand on both sides."


def test_stopped_and_diverged_runs_are_named_and_left_out(tmp_path):
    folder = write(tmp_path / "a", GOOD)
    (tmp_path / "a" / "stopped.log").write_text(log_text((10.8, 4.6), seed=50, total=250))
    (tmp_path / "a" / "nan.log").write_text(log_text((10.8, 4.5, math.nan), seed=51))
    (tmp_path / "a" / "nan_early.log").write_text(log_text((10.8, math.nan), seed=52, total=250))
    side = side_of("A", folder)
    assert side.loss["n"] == 4 and side.loss["mean"] == pytest.approx(np.mean(GOOD))
    assert side.warnings == ["2 of the runs of A had a loss that is not finite",
                             "1 of the runs of A stopped before a last loss"]
    said = verdict_of(folder, write(tmp_path / "b", SAME, first_seed=30))
    assert said.endswith("But mind the warnings about A.")


def test_a_copy_counts_once_under_whatever_name(tmp_path):
    """A log, a console's capture of it with other lines, its last line alone."""
    losses = [10.8, 5.0, 4.5, 4.0, 3.5, 3.277]
    (tmp_path / "log.log").write_text(log_text(losses))
    steps = log_text(losses).partition("note: a remark\n")[2]
    (tmp_path / "console.txt").write_text("W0518 torchrun\n" + steps.replace("ms step", "ms step"))
    slower = steps.replace("00ms step_avg", "17ms step_avg")  # on another clock, the same losses
    (tmp_path / "slower.txt").write_text(slower)
    last = [line for line in steps.splitlines() if "val_loss" in line][-1]
    (tmp_path / "last.txt").write_text(last)
    (tmp_path / "other.log").write_text(log_text([*losses[:-1], 3.278], seed=2))
    side = side_of("A", tmp_path)
    assert sorted(side.copies) == ["console", "last", "slower"] and side.loss["n"] == 2
    assert [run.name for run in side.used] == ["log", "other"] and side.independent


def test_runs_that_all_end_early_have_ended(tmp_path):
    for i in range(3):
        text = log_text((10.8, 4.0, 3.27 + i / 1000), seed=i, total=300)
        (tmp_path / f"{i}.log").write_text(text)
    side = side_of("A", tmp_path)
    assert side.loss["n"] == 3 and side.at == 250
    assert side.warnings == ["runs of A all end at step 250 of 300, which is taken for their end"]
    (tmp_path / "3.log").write_text(log_text((10.8, 4.0, 3.5, 3.4), seed=9, total=300, every=75))
    assert side_of("A", tmp_path).loss["n"] == 0  # they end at different steps: killed, it seems


def test_pairs_of_one_seed_speak(tmp_path):
    """The seeds' own spread is ten times the difference, which all pairs have."""
    seeds = [3.20, 3.25, 3.31, 3.28]
    b = write(tmp_path / "b", seeds, ms=(99.0, 101.0))
    a = write(tmp_path / "a", [x - d for x, d in zip(seeds, (0.01, 0.011, 0.012, 0.01))],
              ms=(99.5, 101.0, 98.0))
    said = verdict_of(a, b)
    found = compare.compare(side_of("A", a), side_of("B", b), 3.28)
    assert found["speaks"] == "paired" and found["paired"]["seeds"] == ["1", "2", "3", "4"]
    assert found["paired"]["loss"]["p"] < 0.001 and found["loss"]["p"] > 0.5
    assert said.startswith("A is better than B by 0.0108 nats a token (p = ")
    assert "by the t-test of 4 pairs (Welch's, which ignores the seeds: p = 0." in said
    other = write(tmp_path / "c", seeds, ms=(99.0, 101.0), first_seed=4)
    found = compare.compare(side_of("A", a), side_of("B", other), 3.28)
    assert found["speaks"] == "welch" and found["paired"]["seeds"] == ["4"]
    assert found["why"].startswith("the sides share only 1 of their seeds")
    assert "by Welch's t-test of 4 runs against 4. Such runs would detect a difference of" in (
        found["verdict"])


def test_a_change_without_effect_is_called_so(tmp_path):
    a = write(tmp_path / "a", GOOD, ms=(99.0, 99.2))
    b = write(tmp_path / "b", GOOD, ms=(101.0, 102.2))
    said = verdict_of(a, b)
    assert said.startswith("The change had no effect on the losses: with the same seed both sides "
                           "log the same losses at every step (28 losses in 4 pairs).")
    assert "A is faster than B" in said and "better" not in said and "would show" not in said
    one = verdict_of(f"{a}/run0.log", f"{b}/run0.log")
    assert one.startswith("The change had no effect") and "(7 losses in 1 pair)" in one
    text = Path(a, "run2.log").read_text()
    Path(a, "run2.log").write_text(text.replace("train_loss:4.003", "train_loss:4.004", 1))
    assert "no effect" not in verdict_of(a, b)  # a single digit of a single step


def test_hopeless_runs_are_called_so(tmp_path):
    spread = [3.20, 3.24, 3.28, 3.22]
    a = write(tmp_path / "a", spread)
    b = write(tmp_path / "b", [x + d for x, d in zip(spread, (0.02, -0.02, 0.02, -0.018))])
    found = compare.compare(side_of("A", a), side_of("B", b), 3.28)
    power = found["power"]
    assert (f"4 such pairs would detect a difference of {power['detectable']:.2g} in 4 cases of 5; "
            f"to detect the one seen would take some {power['needed']} pairs.") in found["verdict"]
    assert power["detectable"] > 0.05 and power["needed"] > 1000


def test_the_time_to_the_target_is_tested_where_all_reach_it(tmp_path):
    a = write(tmp_path / "a", GOOD, ms=(80.0, 81.0))
    b = write(tmp_path / "b", GOOD[::-1], ms=(100.0, 103.0))
    found = compare.compare(side_of("A", a), side_of("B", b), 3.28)["to_target"]
    times = [[run.reached[1] for run in side_of("A", folder).used] for folder in (a, b)]
    assert found["reached"] == [4, 4] and found["means"] == pytest.approx(np.mean(times, axis=1))
    assert found["seconds"]["p"] == pytest.approx(stats.ttest_rel(*times).pvalue)
    assert "To 3.28 it takes A 20.1 s and B 25.3 s of training: A is faster there than B by" in (
        verdict_of(a, b))
    b = write(tmp_path / "b", [3.3, *GOOD[1:]], ms=(100.0, 103.0))
    assert "A reaches 3.28 in 4 of 4 runs, B in 3 of 4." in verdict_of(a, b)


def test_sides_are_called_by_the_runs_own_name(tmp_path, capsys):
    both = tmp_path / "race"
    for name, finals in (("gelu", GOOD), ("relu", SAME)):
        write(both / name, finals, hyper={"name": repr(name)}, first_seed=len(name))
    a = [f"{both}/gelu/run{i}.log" for i in range(4)]
    _, out, _ = run_main(capsys, *a, "--vs", both / "relu")
    assert "Mean below 3.28 at p < 0.01: gelu yes, relu yes." in " ".join(out.split())
    assert "\nA: gelu, 4 runs" in out and "\nB: relu, 4 runs" in out


def test_sources_within_a_side_are_shown(tmp_path, capsys):
    folder = write(tmp_path / "a", GOOD, source="def f():\n    return 1\n")
    text = log_text(source="def f():\n    return 2\n", seed=9)
    (tmp_path / "a" / "other.log").write_text(text)
    _, out, _ = run_main(capsys, folder)
    assert ("sources within A differ: 1 place, -1 +1 lines\n--- run0\n+++ other\n"
            "@@ -1,2 +1,2 @@ f\n") in out


SOURCE = """import torch

class Block(Module):
    def forward(self, x):
        # a remark
        x = x + 1

        return x

    def other(self):
        return 0


def step():
    return 1

if main:
    step()
"""


@pytest.mark.parametrize("old, new, name", [
    ("x = x + 1", "x = x + 2", "Block.forward"), ("        x = x + 1\n", "", "Block.forward"),
    ("return 0", "return 3", "Block.other"), ("return 1", "return 3", "step"),
    ("    step()", "    again()", ""), ("import torch", "import numpy", ""),
    ("class Block(Module)", "class Block(Other)", ""), ("def other", "def another", "Block")])
def test_a_hunk_is_headed_by_its_function(old, new, name, tmp_path):
    runs = [read_text(tmp_path, log_text(source=source))
            for source in (SOURCE, SOURCE.replace(old, new))]
    diff = compare.source_diff(*runs)
    heads = [line.split("@@")[2].strip() for line in diff if line.startswith("@@")]
    assert heads == [name]


def test_the_parameters_are_compared(tmp_path, capsys):
    a = write(tmp_path / "a", GOOD, notes=["model: 1200 parameters; 8 x 1024 tokens a step"])
    b = write(tmp_path / "b", SAME, notes=["model: 1000 parameters; 8 x 1024 tokens a step"])
    assert "parameters of the model: 1,000 -> 1,200\n" in run_main(capsys, a, "--vs", b)[1]
    assert "parameters of" not in run_main(capsys, a, "--vs", tmp_path / "a")[1]


def test_nothing_steers_the_terminal(tmp_path, capsys):
    evil = "\x1b]0;owned\x07\u202e\x9b31m"
    a = write(tmp_path / "a", GOOD, hyper={"name": f"'{evil}'", "muon_lr": evil},
              env={"torch": evil}, source=f"x = '{evil}'\n")
    b = write(tmp_path / "b", SAME, first_seed=30)
    bad = tmp_path / f"{evil}.log"
    bad.write_text("nothing")
    for more in ([], ["--json"]):
        status, out, err = run_main(capsys, a, bad, "--vs", b, *more)
        assert status == 1 and "owned" in out and "owned" in err
        assert not any(c in out + err for c in "\x1b\x07\x9b\u202e")


def test_a_side_that_mixes_settings_is_said_to(tmp_path):
    folder = write(tmp_path / "a", GOOD)
    write(tmp_path / "a" / "more", SAME, first_seed=30, hyper={"muon_lr": 0.06}, source="x = 1\n",
          env={"ranks": 4})
    assert side_of("A", folder).warnings == [
        "runs of A differ from each other in: muon_lr, source, hardware"]


# --------------------------------------------------------------------------------------------------
# The command

def test_two_sides_in_the_promised_order(tmp_path, capsys):
    a = write(tmp_path / "a", GOOD, hyper={"muon_lr": 0.06, "windows": "'L" + "S" * 120 + "'"},
              env={"torch": "2.12.0"}, source="import torch\nx = 2\n")
    b = write(tmp_path / "b", SAME, source="import torch\nx = 1\n", first_seed=30)
    status, out, err = run_main(capsys, a, "--vs", b)
    wanted = ["verdict: ", "A: x, 4 runs, hardware 8x H100, ranks 8, torch 2.12.0\nrun   val loss ",
              "B: x, 4 runs", "at the end", "The verdict uses Welch's t-test: ",
              "hyperparameters: B -> A", "  muon_lr: 0.05 -> 0.06", "  windows: (not given) ->",
              "environment: B -> A", "  torch: 2.11.0, Python",
              "source, B -> A: 1 place, -1 +1 lines", "-x = 1", "+x = 2"]
    places = [out.find(f"\n{line}" if line[0] != "v" else line) for line in wanted]
    assert places == sorted(places) and places[0] == 0 and status == 0 and err == ""
    assert "seed" not in out[places[5]:] and max(map(len, out.splitlines())) <= 100
    _, out, _ = run_main(capsys, a, "--vs", tmp_path / "a")
    for line in ("hyperparameters: no difference in the logs",
                 "source, B -> A: the same"):
        assert f"\n{line}\n" in out
    assert "missing in a log" in run_main(capsys, a, "--vs", LOGS / "console_only.log")[1]


def test_the_table_of_runs(tmp_path, capsys):
    (tmp_path / "one.log").write_text(log_text((10.8, 4.0, 3.2)))
    (tmp_path / "two.log").write_text(log_text((10.8, 4.0, 3.5), seed=2, total=500))
    _, out, _ = run_main(capsys, tmp_path)
    rows = [row.split() for row in out.splitlines()]
    assert ["one", "3.2000", "25.00", "s", "100.00", "250", "250k", "238", "23.75", "s"] in rows
    assert ["two", "3.5000", "25.00", "s", "100.00", "250/500", "250k", "-", "-"] in rows
    assert ["val", "loss", "1", "3.20000", "-", "-"] in rows


def test_what_is_said_about_the_target(tmp_path, capsys):
    losses = [3.2790 + x for x in (-0.0013, 0.0013, 0.0)]
    _, out, _ = run_main(capsys, write(tmp_path / "a", losses))
    assert ("speedrun's rule, a mean below 3.28 at p < 0.01 (one-sided t-test): p = 0.16, does not "
            "hold; 13 runs\n  of this mean would be needed\n") in out
    _, out, _ = run_main(capsys, tmp_path / "a", "--target", "3.3")
    assert "a mean below 3.3 at p < 0.01 (one-sided t-test): p = 0.00" in out and ", holds" in out
    assert "optimizer track's" not in out  # which is for 3.28
    _, out, _ = run_main(capsys, tmp_path / "a" / "run0.log")
    assert "mean below 3.28: no p-value" in out
    other = write(tmp_path / "b", losses, hyper={"vocab_size": 257})
    _, out, _ = run_main(capsys, other)
    assert "no target" in out and "3.28:" not in out
    assert "a mean below 3.28" in run_main(capsys, other, "--target", "3.28")[1]


def test_what_is_no_log_costs_one_line_and_the_rest_goes_on(tmp_path, capsys):
    (tmp_path / "shard.bin").write_bytes(bytes(2000))
    (tmp_path / "empty").mkdir()
    status, out, err = run_main(capsys, LOGS / "not_a_log.txt", tmp_path / "shard.bin",
                                tmp_path / "absent.log", tmp_path / "empty",
                                LOGS / "console_only.log")
    assert status == 1 and "3.2774" in out and out.startswith("A: logs, 1 run\n")
    assert [line.partition(": ")[2] for line in err.splitlines()] == [
        "no .log or .txt file in this folder", "no log (no line of a step in it)",
        "no log (no line of a step in it)", "cannot be read (No such file or directory)"]


def test_a_side_without_runs_is_an_error(tmp_path):
    with pytest.raises(logs.BadInput, match="no run to report on one of the sides"):
        compare.main([write(tmp_path / "a", GOOD), "--vs", str(LOGS / "not_a_log.txt")])


@pytest.mark.parametrize("arguments", [(), ("--vs", "x.log"), ("x.log", "--plot", "x.jpg"),
                                       ("x.log", "--target", "nan"), ("x.log", "--nonsense"),
                                       ("x.log", "--at=x"), ("x.log", "--loss=a b"),
                                       ("x.log", "--at=1,2,3")])
def test_wrong_usage_is_status_2(arguments, capsys):
    status, out, err = run_main(capsys, *arguments)
    assert status == 2 and out == "" and "error:" in err.splitlines()[-1]


def test_json_holds_everything_and_is_strict(tmp_path, capsys):
    a = write(tmp_path / "a", GOOD)
    (tmp_path / "a" / "nan.log").write_text(log_text((10.8, 4.5, math.nan), seed=51))
    b = write(tmp_path / "b", SAME, hyper={"muon_lr": 0.06})
    status, out, _ = run_main(capsys, a, "--vs", b, "--json")
    found = json.loads(out, parse_constant=pytest.fail)
    side = found["sides"][0]
    run = side["runs"][1]
    assert (status, found["version"], found["target"], found["unread"]) == (0, 5, 3.28, [])
    assert side["loss"]["n"] == 4 and side["loss"]["mean"] == pytest.approx(np.mean(GOOD))
    assert side["used"] == [f"run{i}" for i in range(len(GOOD))]
    assert [run["loss"] for run in side["runs"]] == [None, *GOOD]
    assert side["runs"][0]["reached"] is None and run["reached"][0] < 250
    assert run["source"] == hashlib.sha256(b"import torch\n").hexdigest()
    assert run["environment"]["ranks"] == "8" and run["hyperparameters"]["name"] == "'x'"
    assert run["validations"][1] == [125, 250, "val", 4.001, 12.5, 100.0, 125000, 1.0, 256]
    assert found["comparison"]["hyperparameters"] == [["muon_lr", ["0.06"], ["0.05"]]]
    assert found["comparison"]["verdict"] and found["comparison"]["source"] == []


def test_every_field_of_the_json_is_documented(tmp_path, capsys):
    a, b = write(tmp_path / "a", GOOD), write(tmp_path / "b", SAME)
    found = json.loads(run_main(capsys, a, "--vs", b, "--json")[1])
    side, result = found["sides"][0], found["comparison"]
    names = {*found, *side, *side["loss"], *side["runs"][0], *result, *result["loss"],
             *logs.Line._fields}
    fields = compare.__doc__.partition("--json prints")[2]
    assert [name for name in names if name not in fields] == []


def test_as_a_program(tmp_path):
    command = [sys.executable, str(ROOT / "records" / "compare.py")]
    folder = write(tmp_path / "a", GOOD * 20)
    said_of = {("absent.log",): "no run to report",
               (folder, "--plot", "no/x.png"): "[Errno 2] No such file or directory: 'no/x.png'"}
    for arguments, said in said_of.items():
        bad = subprocess.run([*command, *arguments], capture_output=True, text=True, cwd=tmp_path,
                             check=False)
        assert bad.returncode == 1 and bad.stdout == "" and "Traceback" not in bad.stderr
        assert bad.stderr.splitlines()[-1] == f"compare.py: {said}"
    piped = subprocess.run(f'"{sys.executable}" "{command[1]}" "{folder}" --json | head -1',
                           shell=True, capture_output=True, text=True, check=False)
    assert piped.stdout == "{\n" and piped.stderr == ""


@pytest.mark.filterwarnings("error")
@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from([*STRANGE, *HOSTILE]), max_size=8),
       st.lists(st.sampled_from([*STRANGE, *HOSTILE]), max_size=8))
def test_strange_lines_are_no_traceback(tmp_path_factory, a, b):
    folder = tmp_path_factory.mktemp("log")
    first = "step:0/9 val_loss:9.0 train_time:0ms step_avg:nanms"
    (folder / "x.log").write_text("\n".join([first, *a]))
    (folder / "y.log").write_text("\n".join([log_text((9.0, 3.0)), *b]))
    arguments = [str(folder / "x.log"), "--vs", str(folder / "y.log"), "--target", "3.5"]
    for more in ([], ["--json"]):
        with (contextlib.redirect_stdout(io.StringIO()) as out,
              contextlib.redirect_stderr(io.StringIO()) as err):
            try:
                assert compare.main([*arguments, *more]) == 0
            except logs.BadInput:
                for line in err.getvalue().splitlines():
                    assert ": no log" in line or ": holds " in line
                return
    json.loads(out.getvalue(), parse_constant=pytest.fail)


# --------------------------------------------------------------------------------------------------
# The picture

LONG = (10.8258, 4.0, 3.9, 3.8, 3.7, 3.6, 3.5, 3.4, 3.3)


def write_long(folder, finals, ms=(100.0,), first_seed=1, **more):
    """Logs with enough validations for a picture of them alone."""
    folder.mkdir(parents=True, exist_ok=True)
    for i, final in enumerate(finals):
        losses = (*LONG[:-1], 3.4 + i / 1000, final)
        text = log_text(losses, seed=first_seed + i, ms=ms[i % len(ms)], **more)
        (folder / f"run{i}.log").write_text(text)
    return str(folder)


def test_picture(tmp_path, capsys):
    import matplotlib
    a = write_long(tmp_path / "a", GOOD, hyper={"name": "'a$_b'"})
    b = write_long(tmp_path / "b", SAME[:1], ms=(120.0,), first_seed=9, hyper={"name": "'b\x1b'"})
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text stays text
        for name in ("x.png", "x.svg"):
            assert run_main(capsys, a, "--vs", b, "--plot", tmp_path / name)[0] == 0
    image = (tmp_path / "x.png").read_bytes()
    assert image.startswith(b"\x89PNG") and int.from_bytes(image[16:20]) == 9 * 144
    text = (tmp_path / "x.svg").read_text()
    for words in ("a$_b: mean of 4 runs", r"b\x1b<", "Validation loss of a$_b against b", "4 and 1",
                  "target 3.28", "training time (seconds)", "training tokens (millions)",
                  "loss (nats a token)"):
        assert words in text, words
    shown = re.sub("<[^>]*>", "", text)  # without the tags, whose random names hold any digits
    assert "1e6" not in shown and "mean difference" not in shown and "smoothed" not in shown


def bold_lines(panel):
    return [line for line in panel.get_lines() if line.get_linewidth() > 2]


def test_a_thin_line_a_run_and_a_thick_one_their_mean(tmp_path):
    folder = write_long(tmp_path / "a", [3.2, 3.3, 3.4], ms=(80.0, 100.0, 120.0))
    side = side_of("A", folder)
    left, right, below = compare.draw([side, side], 3.28).axes
    thick, _ = bold_lines(left)
    ends = [(line.get_xdata()[-1], line.get_ydata()[-1]) for line in (thick, bold_lines(right)[0])]
    assert ends == [pytest.approx((112.5, 3.3)), pytest.approx((1.125, 3.3))]
    thin = {line.get_xdata()[-1] for line in left.get_lines() if line.get_linewidth() == 0.8}
    assert thin == {90.0, 112.5, 135.0}
    assert [{*line.get_ydata()} for line in bold_lines(below)] == [{0.0}]
    text = log_text((*LONG, 3.2, 3.1), seed=9)
    (tmp_path / "a" / "longer.log").write_text(text)
    side = side_of("A", folder)
    for panel in compare.draw([side, side], None).axes:
        assert not bold_lines(panel)  # steps differ: no mean


def test_the_difference_is_drawn_by_step_in_pairs(tmp_path):
    a = side_of("A", write_long(tmp_path / "a", [3.2, 3.3, 3.1]))
    b = side_of("B", write_long(tmp_path / "b", [3.3, 3.5, 3.4]))
    panel = compare.draw([a, b], None).axes[2]
    (mean,) = bold_lines(panel)
    assert mean.get_ydata()[-1] == pytest.approx(-0.2) and mean.get_xdata()[-1] == 1125
    (band,) = panel.collections
    half = stats.t.ppf(0.975, 2) * 0.1 / math.sqrt(3)
    at_end = [y for x, y in band.get_paths()[0].vertices if x == 1125]
    assert min(at_end) == pytest.approx(-0.2 - half) and max(at_end) == pytest.approx(-0.2 + half)
    assert panel.get_ylim()[0] < -0.3 and panel.get_ylim()[1] > 0
    longer = side_of("B", write_long(tmp_path / "c", [3.3, 3.5, 3.4], every=150))
    assert len(compare.draw([a, longer], None).axes) == 2  # other schedules are no pairs by step


def test_few_validations_come_with_smoothed_training_losses(tmp_path):
    a = side_of("A", write(tmp_path / "a", GOOD))
    b = side_of("B", write(tmp_path / "b", SAME, first_seed=30))
    for panel in compare.draw([a, b], None).axes:
        dotted = [line for line in panel.get_lines() if line.get_linestyle() == ":"]
        assert len(dotted) == 2 and "training loss, smoothed" in dotted[0].get_label()


def test_the_range_is_the_end_of_the_runs(tmp_path):
    side = side_of("A", write_long(tmp_path / "a", GOOD))
    for target, low in ((3.28, 3.2), (2.9, 2.8), (0.5, 3.2)):  # a target far below is left out
        for panel in (*compare.draw([side, side], target).axes[:2],
                      compare.draw([side], target).axes[0]):
            bottom, top = panel.get_ylim()
            assert low < bottom < 3.277 and 3.5 < top < 3.75, (bottom, top)
            start, end = panel.get_xlim()
            assert 0.5 <= start / end < 0.6


@pytest.mark.parametrize("name", ["console_only.log", "stopped_early.txt"])
def test_without_tokens_the_steps_are_drawn(name):
    sides = [compare.Side(label, [logs.read_run(LOGS / name, name)], 3.28) for label in "AB"]
    assert compare.draw(sides, 3.28).axes[1].get_xlabel() == "training step"


def test_no_loss_no_picture(tmp_path):
    side = compare.Side("A", [read_text(tmp_path, log_text((math.nan,), total=9))], 3.28)
    with pytest.raises(logs.BadInput, match="hold no loss"):
        compare.draw([side], 3.28)


def test_a_run_alone_has_its_training_its_rates_and_its_speed(tmp_path):
    text = log_text((10.8, 4.0, 3.5), total=1000).replace("lr:1.000", "lr:0.500")
    side = compare.Side("A", [read_text(tmp_path, text)], None)
    losses, rates, speeds = compare.draw([side], None).axes
    (training,) = (line for line in losses.get_lines() if line.get_linestyle() == ":")
    assert list(training.get_xdata()) == [12.4, 12.5, 24.9, 25.0]
    assert list(training.get_ydata()) == [4.0, 4.0, 3.5, 3.5]
    assert any(list(line.get_ydata()) == [10.8, 4.0, 3.5] and line.get_marker() == "o"
               for line in losses.get_lines())
    (factors,) = rates.get_lines()
    assert list(factors.get_xdata()) == [124, 125, 249, 250] and {*factors.get_ydata()} == {0.5}
    (speed,) = speeds.get_lines()
    assert list(speed.get_ydata()) == pytest.approx([10] * len(speed.get_ydata()))
    assert speeds.get_ylabel().startswith("thousand tokens a second") and len(speed.get_xdata()) > 2


def test_a_run_that_is_alive(tmp_path, capsys):
    """Before its first step; before its first validation; in the middle of a line."""
    whole = log_text((10.8, 4.0, 3.2))
    for end, steps, drawn in (("step:0/", "0/0", False), ("step:124/", "0/250", True),
                              ("tokens:125000 lr", "124/250", True)):
        (tmp_path / "x.log").write_text(whole[:whole.index(end) + len(end)])
        status, out, err = run_main(capsys, tmp_path / "x.log")
        row = out.splitlines()[2].split()
        assert (status, err, row[0]) == (0, "", "x") and steps in row
        assert "1 of the runs of A stopped before a last loss" in out
        side = side_of("A", tmp_path)
        said = contextlib.nullcontext() if drawn else pytest.raises(logs.BadInput)
        with said:
            compare.draw([side], None)


def test_matplotlib_is_loaded_for_pictures_only():
    code = (f"import sys; sys.path.insert(0, {str(ROOT / 'records')!r}); import compare; "
            "assert not {'matplotlib', 'torch', 'train_gpt'} & {*sys.modules}")
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("line", [f"{FORGED} tokens:7", *STRANGE])
def test_strange_lines_can_be_drawn(tmp_path, line):
    run = read_text(tmp_path, f"step:0/9 val_loss:9.0 train_time:0ms step_avg:nanms\n{line}\n")
    compare.draw([compare.Side("A", [run], 3.28)], 3.28)


# --------------------------------------------------------------------------------------------------
# The table of records

def test_the_table_of_records_is_fresh():
    if not (ROOT / ".git").exists():
        pytest.skip("which logs are records is known in a git checkout only")
    text = (ROOT / "records" / "README.md").read_text()
    fresh = compare.readme_with_table(text, compare.records_table(ROOT / "records"))
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


def track(checkout, *folders):
    subprocess.run(["git", "-C", str(checkout), "add", "-f", *folders], check=True)


def test_only_tracked_logs_are_records(checkout):
    readme = checkout / "README.md"
    write(checkout / "mine", GOOD)  # a user's own runs
    write(checkout / "speedrun", SAME)
    (checkout / "speedrun" / "stopped.log").write_text(log_text((10.8, 4.5), seed=50, total=250))
    track(checkout, "speedrun")
    compare.update_readme(checkout)
    text = readme.read_text()
    assert ("| [speedrun](speedrun/) | 4 of 5 | 3.2778 (0.0005) | 25.0 s (0.0) | 100.00 | 250 | "
            "250k | 8x H100 | 2.11.0 | - |\n") in text
    assert text.startswith("# Records\n") and text.endswith("the end\n") and "mine" not in text
    compare.update_readme(checkout)
    assert readme.read_text() == text


def test_what_is_written_by_hand_stays_in_the_table(checkout):
    readme = checkout / "README.md"
    for name in ("one", "two"):
        write(checkout / name, SAME)
    track(checkout, "one", "two")
    compare.update_readme(checkout)
    said = "Is one | better than `two`? No: 3.2778 | 3.2778."
    rows = readme.read_text().splitlines()
    written = [row.removesuffix("- |") + f"{said} |" if row.startswith("| [one]") else row
               for row in rows]
    assert written != rows
    readme.write_text("\n".join(written) + "\n")
    write(checkout / "one", GOOD, hyper={"muon_lr": 1}, ms=(50.0,))
    write(checkout / "three", GOOD)
    track(checkout, "three")
    compare.update_readme(checkout)
    rows = {row.split("](")[0]: row for row in readme.read_text().splitlines()}
    assert rows["| [one"].endswith(f"| 50.00 | 250 | 250k | 8x H100 | 2.11.0 | {said} |")
    assert rows["| [two"].endswith("| 2.11.0 | - |") and rows["| [three"].endswith("| 2.11.0 | - |")


def test_errors_about_the_table(checkout, tmp_path_factory):
    for folder in (checkout, tmp_path_factory.mktemp("no_checkout")):
        with pytest.raises(logs.BadInput, match="git tracks no log here"):
            compare.update_readme(folder)
    write(checkout / "one", SAME)
    track(checkout, "one")
    (checkout / "README.md").write_text("no markers")
    with pytest.raises(logs.BadInput, match="markers"):
        compare.update_readme(checkout)
