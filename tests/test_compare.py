"""tools/compare.py: which runs count, the verdict and its p-value, what is printed, errors."""

import json
import math
import re
import subprocess
import sys
import numpy as np
import pytest
from conftest import ROOT
from scipy import stats
from test_logs import LOGS, log_text
from records.tools import compare, load, logs, submission, tables

GOOD = [3.2770, 3.2781, 3.2776, 3.2783]
SAME = [3.2772, 3.2779, 3.2778, 3.2784]
TENTHS = {"before": (10.8258,) * 9, "every": 25}  # validations, of 250 steps

def write(folder, finals, ms=(100.0,), first_seed=1, before=(10.8258,), then=4.0, **more):
    folder.mkdir(parents=True, exist_ok=True)
    for i, final in enumerate(finals):
        losses = (*before, then + (first_seed + i) / 1000, final)
        text = log_text(losses, seed=first_seed + i, ms=ms[i % len(ms)], **more)
        (folder / f"run{i}.log").write_text(text)
    return folder

def side_of(label, folder, target=3.28):
    runs, unread = logs.read([folder])
    assert unread == []
    return compare.Side(label, runs, target)

def compared(a, b):
    return compare.compare(side_of("A", a), side_of("B", b), 3.28)

def run_main(capsys, *arguments):
    try:
        status = compare.main([str(a) for a in arguments])
    except load.UserError as e:
        status = str(e)
    out = capsys.readouterr()
    return status, out.out, out.err

def json_of(capsys, *arguments):
    status, out, _ = run_main(capsys, *arguments, "--json")
    assert status == 0
    return json.loads(out, parse_constant=pytest.fail)

def resumed(**more):
    text = log_text((4.09, 3.279), seed=90, first=125, parent="gone/killed", **more)
    return {"killed.log": log_text((10.8, 4.09), seed=90, total=250), "resumed.log": text}

RESUMED = "run resumed of A was resumed with differences"
MIXED = "runs of A differ from each other in:"
COUNTED = {  # the files beside four good runs, how many runs count, and the warnings
    "stopped": ({"x.log": log_text((10.8, 4.6), seed=50, total=250)}, 4,
                ["1 run of A stopped before a last loss"]),
    "diverged": ({"x.log": log_text((10.8, 4.5, math.nan), seed=51),
                  "y.log": log_text((10.8, math.nan), seed=52, total=250)}, 4,
                 ["2 runs of A had a loss that is not finite"]),
    "a seed twice": ({"x.log": log_text((10.8, 4.0, 3.2781))}, 5, ["runs of A share a seed: 1"]),
    "mixed": ({"x.log": log_text(seed=50, hyper={"muon_lr": 0.06}, source="x = 1\n",
                                 env={"ranks": 4, "val_data": "other.bin 9 tokens abc"})}, 5,
              [f"{MIXED} muon_lr, source, hardware, validation data"]),
    "resumed": (resumed(), 5, []),
    "resumed elsewhere": (resumed(env={"ranks": 4}), 5, [f"{RESUMED} (ranks)",
                                                         f"{MIXED} hardware"]),
    "resumed otherwise": (resumed(hyper={"muon_lr": 0.06}), 4,
                          [f"{RESUMED} (muon_lr was 0.05 and is 0.06), left out"]),
    "another script": (resumed(source="x = 1\n"), 4, [f"{RESUMED} (script), left out"]),
    "beginning lost": ({"resumed.log": resumed()["resumed.log"]}, 4,
                       [f"{RESUMED} (a missing log), left out"])}
@pytest.mark.parametrize("name", COUNTED)
def test_which_runs_count_and_what_is_said_of_the_others(tmp_path, name):
    files, count, warnings = COUNTED[name]
    folder = write(tmp_path / "a", GOOD)
    for file, text in files.items():
        (folder / file).write_text(text)
    side = compare.Side("A", logs.read([folder, folder / "run0.log"])[0], 3.28)
    assert (side.warnings, side.loss["n"]) == (warnings, count)
    assert side.loss["mean"] == pytest.approx(np.mean([run.loss for run in side.used]))
    other = side_of("B", write(tmp_path / "b", SAME, first_seed=30))
    said = compare.compare(side, other, 3.28)["verdict"]
    assert ("not independent" in said) == (name == "a seed twice")
    assert ("mind the warnings about A" in said) == (bool(warnings) and name != "a seed twice")
    assert ("Times do not compare" in said) == (name in ("mixed", "resumed elsewhere"))

def test_p_value_of_the_verdict_is_that_of_the_pairs_or_of_welchs_test(tmp_path):
    """The seeds' own spread is ten times the difference, which all pairs have."""
    seeds = [3.20, 3.25, 3.31, 3.28]
    better = [x - d for x, d in zip(seeds, (0.01, 0.011, 0.012, 0.011))]
    b = write(tmp_path / "b", seeds)
    a = write(tmp_path / "a", better)
    found = compared(a, b)
    assert found["speaks"] == "paired" and found["paired"]["seeds"] == ["1", "2", "3", "4"]
    p = [stats.ttest_rel(better, seeds).pvalue,
         stats.ttest_ind(better, seeds, equal_var=False).pvalue]
    low, high = found["paired"]["loss"]["interval"]
    assert found["verdict"].startswith(
        f"A is better than B (A - B = -0.0110 nats a token, 99 % interval {low:+.4f} .. {high:+.4f}"
        f", p = {p[0]:.2g}, lower in 4 of 4 pairs).")
    assert found["loss"]["p"] == pytest.approx(p[1]) and found["decision"] == "better"
    found = compared(a, write(tmp_path / "c", seeds, first_seed=4))
    assert (found["speaks"], found["decision"]) == ("welch", "undecided")
    assert found["paired"]["seeds"] == ["4"] and f", p = {p[1]:.2g}) by Welch" in found["verdict"]
    (a / "again.log").write_text(log_text((10.8, 4.0, 3.2781)))  # a seed that ran twice is no pair
    assert compared(a, b)["paired"]["seeds"] == ["2", "3", "4"]

MODEL = {"notes": ["model: 1000 parameters; 8 x 1024 tokens a step"]}
LARGER = {"notes": ["model: 1100 parameters; 8 x 1024 tokens a step"], "before": (10.8, 4.2)}
FAST = {"ms": (99.0, 99.2)}
SLOW = {"ms": (101.0, 102.2)}
HIGH = [3.2850, 3.2862, 3.2858, 3.2858]
VERDICTS = {  # losses of A and more, losses of B and more, what is said, and what is not
    "faster": (GOOD, FAST, SAME, SLOW, [
        "No difference in loss is shown (A - B = -0.0001 nats a token, 99 % ",
        " A is faster than B (-0.625 s, -2.5 %, p = ", " on 8x H100.",
        " Mean below 3.28 at p < 0.01: A yes, B yes."], ["better"]),
    "half the time": (GOOD, {"ms": (50.0, 50.1)}, SAME, {"ms": (100.0, 100.2)}, [
        "No difference in loss", " A is faster than B (-12.5 s, -50.0 %, p = "], []),
    "worse": (HIGH, SLOW, GOOD, FAST, ["A is worse than B (A - B = +0.0", "A not shown, B yes",
                                       "A is slower than B"], []),
    "unequal": ([loss - 0.1 for loss in GOOD], LARGER | FAST, SAME, MODEL, [
        "Unequal: A has 50 % more tokens, 50 % more steps, 10 % more parameters. A is better than "
        "B (A - B = -0.1001 nats"], []),
    "equal": (GOOD, MODEL, SAME, MODEL, ["No difference in loss"], ["Unequal"]),
    "elsewhere": (GOOD, {"hyper": {"val_tokens": 99}, "env": {"ranks": 4}}, SAME, {}, [
        "Unequal: A has other validation data, other hardware, ranks or rules of the clock. Losses "
        "do not compare: A validates on data that the log does not name, 99 tokens of a "], []),
    "too few": ([3.2], {}, SAME, {}, ["Nothing is shown: 1 finished run of A against 4 of B, and "
                                      "spread takes at least 2 a side."], ["A is"]),
    "the same": (GOOD, {}, GOOD, {}, ["Nothing is shown: 4 of the runs stand on both sides."], []),
    "no effect": (GOOD, FAST, GOOD, SLOW, [
        "The change had no effect on the losses: with the same seed both sides log the same losses "
        "at every step (28 losses in 4 pairs).", "A is faster than B"], ["better", "detect"]),
    "no effect, one pair": (GOOD[:1], FAST, GOOD[:1], SLOW, [
        "The change had no effect", "(7 losses in 1 pair)"], []),
    "one pair of four": (GOOD, FAST, [*GOOD[:3], 3.2784], SLOW, [], ["no effect"]),
    "one digit": (GOOD, FAST, GOOD, SLOW | {"before": (10.8259,)}, [], ["no effect"]),
    "other seeds": (GOOD, {}, HIGH, {"first_seed": 30}, [
        "A is better", " by Welch's t-test of 4 runs against 4."], ["pairs"])}
@pytest.mark.parametrize("name", VERDICTS)
def test_the_words_of_a_verdict(tmp_path, name):
    ours, more, theirs, others, words, never = VERDICTS[name]
    found = compared(write(tmp_path / "a", ours, **more), write(tmp_path / "b", theirs, **others))
    said = found["verdict"]
    assert said.startswith(words[0] if words else "") and all(one in said for one in words), said
    assert not any(one in said for one in never), said

def test_all_logs_and_folders_that_are_named_first_are_one_side(tmp_path, capsys):
    a, more = write(tmp_path / "a", GOOD), write(tmp_path / "more", SAME, first_seed=9)
    base = write(tmp_path / "b", SAME, first_seed=20)
    found = json_of(capsys, *sorted(a.glob("*.log")), more, "--vs", base)
    assert [(side["label"], len(side["runs"])) for side in found["sides"]] == [("A", 8), ("B", 4)]
    assert json_of(capsys, a, more)["comparisons"] == []

def test_pairs_that_were_added_until_decided_have_an_e_value(tmp_path, capsys):
    losses = [3.20, 3.25, 3.31, 3.28, 3.22, 3.30, 3.24, 3.26]
    ours = [x - 0.01 - i % 2 / 1000 for i, x in enumerate(losses)]
    base = write(tmp_path / "b", losses, ms=(100.0, 101.0))
    a = write(tmp_path / "a", ours, ms=(100.0, 102.0))
    E = compare.judge.e_of_pairs(np.subtract(ours, losses))
    said = " ".join(run_main(capsys, a, "--vs", base, "--until_decided=0.01")[1].split())
    assert "A is better than B (A - B = -0.0105 nats a token, 99 % interval -0.0" in said
    assert f"E = {E:,.0f}, lower in 8 of 8 pairs)." in said and E > 100 and "e+" not in said
    assert said.count("E assumes that differences of pairs are spread evenly to both sides.") == 2
    assert "8 pairs -0.01050" in said and "Welch" not in said
    assert " p = " not in said.partition(" Mean below")[0]
    for run in range(4, 8):
        (a / f"run{run}.log").unlink()
    (found,) = json_of(capsys, a, "--vs", base, "--until_decided=0.01")["comparisons"]
    assert found["decision"] == "undecided" and found["paired"]["loss"]["p"] is None
    for run in range(4):
        (base / f"run{run}.log").unlink()
    status, out, _ = run_main(capsys, a, "--vs", base, "--until_decided=0.01")
    assert status == 0 and "the sides have no seed in common" in " ".join(out.split())
    assert "Welch's t-test of 4 runs against 4" in " ".join(
        run_main(capsys, a, "--vs", base)[1].split())

@pytest.mark.parametrize("level", [None, 0.01, 0.2])
@pytest.mark.parametrize("seed", range(2))
def test_the_word_and_the_intervals_agree(tmp_path, level, seed):
    """In nats and in steps: 0 is outside where a side is better or worse, and only there."""
    draw = np.random.default_rng(seed).normal
    base = draw(3.3, 0.05, 12)
    sides = [side_of(f"A{i}", write(tmp_path / f"{i}", base + draw(mean, 0.01, 12), **TENTHS))
             for i, mean in enumerate((-0.07, -0.012, 0.0, 0.015))]
    baseline = side_of("B", write(tmp_path / "b", base, ms=(101.0,), **TENTHS))
    found = [compare.compare(side, baseline, 3.28, level) for side in sides]
    for one in found:
        low, high = one["paired"]["loss"]["interval"]
        word = "better" if high < 0 else "worse" if low > 0 else "undecided"
        assert one["decision"] == word and f"interval {low:+.4f} .. {high:+.4f}" in one["verdict"]
        ends = one["paired"]["steps"]["interval"]
        assert [np.sign(end) for end in ends] == [np.sign(low), np.sign(high)]
    assert len({one["decision"] for one in found}) > 1

HELD = "d/held.bin 9 tokens aa"
@pytest.mark.parametrize("env, hyper, words", [
    ({"gpus": "8 x NVIDIA H200"}, {}, "times do not compare, the hardware"),
    ({"ranks": 4}, {}, "times do not compare"), ({}, {"val_tokens": 99}, "losses do not compare"),
    ({"val_data": HELD.replace("9 tok", "7 tok")}, {}, "losses do not compare"),
    ({"val_data": HELD.replace("d/", "moved/")}, {}, None),
    ({"val_data": "e/held.bin 9 tokens bb"}, {},
     "a validates on e/held.bin 9 tokens bb, but b validates on d/held.bin 9 tokens aa."),
    ({"data": "d/val_train.bin 30 tokens 22"}, {}, None),
    ({"val_data": f"{HELD}; d/2.bin 9 tokens bb"}, {}, "losses do not")])
def test_what_does_not_compare_is_not_compared(tmp_path, capsys, env, hyper, words):
    usual = {"data": "d/t_train_1.bin 30 tokens 11", "val_data": HELD}
    sides = [write(tmp_path / "a", GOOD, ms=(50.0, 51.0), hyper=hyper, env=usual | env),
             write(tmp_path / "b", SAME, ms=(99.0, 100.2), env=usual)]
    status, out, err = run_main(capsys, sides[0], "--vs", sides[1], "--json")
    (found,) = json.loads(out)["comparisons"]
    said = found["verdict"].lower()
    losses_compare = not words or words.startswith("times")
    assert (words or "a is faster") in said and not (
        words and losses_compare and "a is faster" in said)
    assert (found["paired"]["loss"]["p"] is not None) == losses_compare
    assert status == (0 if losses_compare else 2)
    if not losses_compare:  # that alone is said, and no table that invites to compare
        assert run_main(capsys, sides[0], "--vs", sides[1])[:2] == (2, "")
    assert err.count("\n") == err.count("error: Losses do not compare") == 1 - losses_compare

def test_two_sides_and_what_they_differ_in(tmp_path, capsys):
    source = "".join(f"x = {i}\n" for i in range(100))
    a = write(tmp_path / "a", GOOD, hyper={"muon_lr": 0.06, "windows": "'L" + "S" * 120 + "'"},
              env={"torch": "2.12.0"}, source=source, **MODEL)
    b = write(tmp_path / "b", SAME, source=source.replace("x =", "y ="), first_seed=30, **MODEL)
    status, out, err = run_main(capsys, a, "--vs", b, "--plot", tmp_path / "x.png")
    assert status == 0 and err == "" and (tmp_path / "x.png").stat().st_size > 10_000
    for line in ("A: x, 4 runs, hardware 8x H100, ranks 8, torch 2.12.0\n", "B: x, 4 runs",
                 "  muon_lr: 0.05 -> 0.06", "  windows: (not given) ->", "  torch: 2.11.0, Python",
                 "-y = 1", "... and 143 more lines, which --json has\n"):
        assert f"\n{line}" in out, line
    diff = out.partition("source, B -> A:\n")[2].partition("... and")[0]
    assert diff.count("\n") == compare.DIFF_LINES
    verdict = out.split("\n\n")[0]  # stands at the end too
    assert verdict.startswith("verdict: ") and out.endswith(f"\n{verdict}\n\n")
    _, out, _ = run_main(capsys, a, "--vs", tmp_path / "a")
    for line in ("hyperparameters: no difference in the logs", "source, B -> A:\nthe same"):
        assert f"\n{line}\n" in out
    console = LOGS / "console_only.log"
    assert "missing in a log" in run_main(capsys, console, "--vs", console)[1]

@pytest.mark.parametrize("end, row", [
    (None, "3.2000 25.00 s 100.00 250 250k"), ("step:0/", "0/0"),
    ("step:124/", "10.8000 0.00 s 100.00 0/250 0"),
    ("tokens:125000 lr", "10.8000 12.40 s 100.00 124/250 124k")])
def test_the_table_of_runs(tmp_path, capsys, end, row):
    whole = log_text((10.8, 4.0, 3.2))
    (tmp_path / "x.log").write_text(whole[:whole.index(end) + len(end)] if end else whole)
    status, out, err = run_main(capsys, tmp_path / "x.log")
    assert (status, err, out.splitlines()[2].split()) == (0, "", ["x", *row.split()])
    assert ("1 run of A stopped before a last loss" in out) == (end is not None)
    assert bool(re.search(r"1 +3\.20000\n", out)) == (end is None)

def test_the_target_is_3_28_where_the_vocabulary_is_gpt_2s(tmp_path, capsys):
    folder = write(tmp_path / "b", [3.2777, 3.2803, 3.2790], hyper={"vocab_size": 257})
    assert "\nno target: " in run_main(capsys, folder)[1]
    assert ("below 3.28 at p < 0.01 (one-sided t-test): p = 0.16, does not hold\n"
            ) in run_main(capsys, folder, "--target=3.28")[1]

def test_nats_become_steps_and_seconds_by_the_curve_of_the_baseline(tmp_path):
    """The baseline falls from 4.00 at step 225 to 3.28 at step 250, and both sides change roles."""
    b = write(tmp_path / "b", [3.28] * 3, **TENTHS)
    slope = 25 / (4.002 - 3.28)  # steps a nat, of the mean curve
    for name, sign, word in (("a", -1, "more"), ("worse", 1, "fewer")):
        a = write(tmp_path / name, [3.28 + sign * gain for gain in (0.35, 0.36, 0.37)], (120,),
                  **TENTHS)
        found = compared(a, b)
        steps, loss, later = (found["paired"][key] for key in ("steps", "loss", "later"))
        assert later["difference"] == pytest.approx(30 * (1 + sign * 0.36 * slope / 250) - 25)
        assert steps["difference"] == pytest.approx(sign * 0.36 * slope, abs=0.01)
        assert steps["interval"] == pytest.approx(
            tuple(end * slope for end in loss["interval"]), abs=0.01)
        assert f"need 12.5 {word} steps for the same loss, 5 % of the run (" in found["verdict"]
    ends = {"before": (), "every": 60}
    far, longer, short, base = (
        write(tmp_path / name, [loss, loss + 0.001], **more) for name, loss, more in (
            ("far", 3.28 - 8, TENTHS),  # no such loss stands on the curve
            ("longer", 3.27, TENTHS | {"every": 30}), ("short", 3.27, ends), ("base", 3.28, ends)))
    for a, b, known in ((far, b, False), (longer, b, True), (short, base, False)):
        found = compared(a, b)
        assert found["paired"]["steps"]["difference"] is None
        assert (found["paired"]["later"]["difference"] is not None) == known
        assert ("How many steps or seconds that is cannot be known" in found["verdict"]) != known
        assert "slope of its curve" not in found["verdict"]

def test_json_is_strict(tmp_path, capsys):
    a = write(tmp_path / "a", GOOD)
    (a / "nan.log").write_text(log_text((10.8, 4.5, math.nan), seed=51))
    found = json_of(capsys, a, "--vs", write(tmp_path / "b", SAME, hyper={"muon_lr": 0.06}))
    assert [run["loss"] for run in found["sides"][0]["runs"]] == [None, *GOOD]
    assert found["comparisons"][0]["hyperparameters"] == [["muon_lr", ["0.06"], ["0.05"]]]

def test_what_is_no_log_costs_one_line_and_the_rest_goes_on(tmp_path, capsys):
    (tmp_path / "shard.bin").write_bytes(bytes(2000))
    (tmp_path / "empty").mkdir()
    found = run_main(capsys, LOGS / "not_a_log.txt", LOGS / "console_only.log",
                     *(tmp_path / name for name in ("shard.bin", "absent.log", "empty")))
    assert found[0] == 1 and "3.2774" in found[1] and found[1].startswith("A: logs, 1 run\n")
    assert [line.partition(": ")[2] for line in found[2].splitlines()] == [
        "no .log or .txt file in this folder", "no log (no line of a step in it)",
        "no log (no line of a step in it)", "cannot be read (No such file or directory)"]
    assert re.fullmatch(r"no run in x.log \(x.log: cannot be read .*\)",
                        run_main(capsys, "x.log")[0])

@pytest.mark.parametrize("arguments, words", [
    ((), "required"), (("x.log", "--plot", "x.jpg"), "takes a .png"),
    (("x.log", "--target", "nan"), "from 0 on"), (("x.log", "--nonsense"), "unrecognized"),
    (("x.log", "--until_decided=1"), "expected a number from 1e-09")])
def test_wrong_usage_is_one_line(arguments, words, capsys):
    status, out, err = run_main(capsys, *arguments)
    assert words in status and "\n" not in status and out == err == ""

def test_as_a_program_whose_reader_has_seen_enough(tmp_path):
    program = ROOT / "records" / "tools" / "compare.py"
    folder = write(tmp_path / "a", GOOD * 20)
    done = subprocess.run(f'"{sys.executable}" "{program}" "{folder}" --json | head -1', shell=True,
                          capture_output=True, text=True, check=False)
    assert done.stdout == "{\n" and done.stderr == ""

# Losses and milliseconds that the speedrun published, and every figure of their statistics.md:
# 2026-07-17_FP8DownProjection.
FP8 = """2775 79532 2779 79682 2793 80231 2791 79536 2769 79641 2781 79593 2772 79653 2775 79658
    2783 79814 2775 79629 2806 79539 2816 79656 2773 79740"""
FP8_BASE = """2821 80694 2802 80720 2758 80659 2769 80818 2775 80747 2768 80795 2780 80763
    2778 80678 2817 80610 2767 80693 2796 80710 2775 80840 2766 80745"""
PUBLISHED = """3.2783692308 0.0014156180 0.0006690604 79.684923 0.182767 79.653 79.532 80.231
    3.2782461538 0.0020164389 0.0042976481 80.728615 0.065165 80.720 80.610 80.840 -1.043692
    -1.292841 1.01309774 +0.0001230769 0.8587465 19.394 4.9e-12"""
def test_the_statistics_of_published_folders(tmp_path, capsys):
    for side, text in (("ours", FP8), ("theirs", FP8_BASE)):
        (tmp_path / side).mkdir()
        values = text.split()
        for i, (loss, ms) in enumerate(zip(values[::2], values[1::2])):
            (tmp_path / side / f"{i:02}.txt").write_text(
                f"step:9/9 val_loss:3.{loss} train_time:{ms}ms step_avg:{int(ms) / 9:.2f}ms\n")
    assert run_main(capsys, tmp_path / "ours", "--vs", tmp_path / "theirs", "--statistics")[0] == 0
    text = (tmp_path / "ours" / "statistics.md").read_text()
    figures = [float(one) for one in re.findall(r"(?<![\w.])[+-]?\d+\.\d+(?:e-\d+)?", text)]
    for one in PUBLISHED.split():
        mantissa, _, exponent = one.partition("e")
        unit = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
        value = abs(float(one))
        assert any(abs(value - abs(figure)) <= 0.5000001 * unit for figure in figures), one
    assert text.count(f" | {values[1]}ms |\n") == 1
    (losses,) = re.findall(r"(?m)^losses = (.*)$", text)[:1]
    assert json.loads(losses) == [float(f"3.{value}") for value in FP8.split()[::2]]

def test_statistics_replace_only_their_own(tmp_path, capsys):
    folder = write(tmp_path / "a", GOOD)
    for _ in range(2):
        assert run_main(capsys, folder, "--statistics")[0] == 0
    assert "no p-value of their difference" not in (folder / "statistics.md").read_text()
    (tmp_path / "race.json").touch()
    assert submission.PEEKED in run_main(capsys, folder, "--statistics")[2]
    assert submission.PEEKED in (folder / "statistics.md").read_text()
    (folder / "statistics.md").write_text("# by hand")
    assert "was not written by --statistics" in run_main(capsys, folder, "--statistics")[0]
    (tmp_path / "x.log").write_text(log_text((10.8, 4.0), total=500))
    assert "has no finished run" in run_main(capsys, tmp_path / "x.log", "--statistics")[0]

def test_tables_fit_a_terminal(capsys):
    """Columns that hold nothing are left out, those that do not fit come below."""
    rows = [["run", *"abcde"], *[[f"{n}" * 20, *(column * 17 for column in "xy-zw")] for n in "12"]]
    rows[1][3] = rows[2][3] = "-"
    tables.print_table(rows)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6 and max(map(len, lines)) <= 80
    assert [line.split() for line in lines[::3]] == [["run", "a", "b", "d"], ["run", "e"]]
