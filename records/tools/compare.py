"""Judge the logs of NanoGPT speedruns: what was changed, is it better, is it faster, how surely.

    ./run.sh compare records/*.log                       one setting: runs, spread, p-value
    ./run.sh compare NEW.log NEW2.log --vs records/base  two settings and a verdict
    ./run.sh compare new/ --vs base/ --plot new.png      the same, drawn
    ./run.sh compare idea1/ idea2/ --vs base/            several candidates, a table
    ./run.sh compare new/ --at 2690 --first              losses at a step; earliest step
    ./run.sh compare NEW.log --plot new.png              a run, alive or not
    ./run.sh compare new/ --vs base/ --html new.html     a page for a browser, that zooms

A log is this project's, or published by the speedrun since October 2024, or captured from a
console. A file may hold several runs, one after the other. A folder stands for every .log and .txt
below it. A resumed run is read with the logs that it continues, which lie beside its own, where its
checkpoint lay, or in another folder that is named. The runs named first are A, those after --vs are
B, the baseline: "B -> A" and A - B throughout. With --vs, each folder named first is a candidate of
its own (A1, A2, ...), and p-values of "better" are adjusted for their number.

Only finished runs with finite losses enter the statistics, and none that was resumed with another
script or other settings, or whose first log is missing, as long as there are others; what is left
out is named. A copy of a run, by its losses and times, counts once. --at=STEP takes what runs had
reached at a step, as if they had finished there (--at=2690,2720: A at the first, B at the second).
--loss=val_ema_loss reads another logged loss.

--target=LOSS is the loss to reach: by default 3.28, or none where the logs name another vocabulary
than GPT-2's. --first finds the earliest step, the same for all runs, at which the rules of the
speedrun and of its optimizer track hold for it.

--html writes a page that needs no network (page.py), and --follow writes it again every five
seconds while runs are alive; it reloads itself. --label, once for each side, says what they are
called.

Where the sides ran the same seeds, their differences are tested in pairs, beside Welch's test. If
pairs were added until a difference was decided, no p-value holds: --until_decided=0.01 judges by
e-values (judge.py explains them), as ./run.sh race does.
Exit status: 0 all read, 1 some log was none or missing (the rest is still reported), 2 wrong usage.

--json prints one object, with null for what the logs do not say or too few runs cannot say:
  version: 8; target: the loss to reach; loss: the name of the loss that is read; unread: a line
    for each input that was no log, and for each log that is missing
  sides: the candidates, then B if there is one: label, name, warnings, independent, used (names of
    the runs in the statistics), copies (names of those left out as copies), loss and seconds (n,
    mean, sd, interval: 95 % of the mean; of loss p: one-sided t-test), at (the step of the last
    losses, where the runs agree), rules (rows of rule, value, holds, runs_needed, first: the
    earliest step, with --first), runs
  runs: name, path, logs (rows of path and the step it begins at, the oldest first), missing (why
    the oldest of them is not the run's beginning, else null), steps, total, seconds, tokens,
    ms_per_step, loss, finished, diverged, changed (settings, on resuming), mixed (in what else the
    logs of the run differ, such as script, ranks, host or torch), reached (step and seconds at the
    target), validations (rows of step, total, kind, loss, seconds, ms_per_step, tokens, lr,
    window), hardware, torch, ranks, seed, parameters, timed_on and validated_on (what must agree
    before times, losses compare), source (its sha256), hyperparameters and environment (as the
    newest log has them)
  comparison (null without --vs, and where there are several candidates) and comparisons (a list,
    where there are several): hyperparameters, environment (rows of name, values in B, in A), source
    (a diff), unequal (in what A and B are, in words), loss and seconds (by Welch's test: difference
    A - B, interval, p, E, adjusted: p or 1 / E, adjusted for the number of candidates), paired (the
    same by the t-test of differences, with seeds and sd; by e-values with --until_decided, needed:
    pairs for a decision; and steps: how many steps later A has the loss of B, by the curve of B),
    no_effect (of how many losses none differs, else null), speaks (welch or paired: the test of
    the verdict), why, level, to_target (reached: by how many runs of A, of B;
    means; seconds: as above), power (detectable: the difference that these runs would show 4 times
    of 5; needed: the runs a side, or the pairs, for the difference seen), decision (better, worse,
    no difference or undecided), verdict
"""

import argparse
import contextlib
import difflib
import hashlib
import json
import math
import os
import re
import sys
import textwrap
import time
from collections import Counter
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from records.tools import judge, logs
from records.tools.judge import ALPHA, losses_by_step, pairs_of, rule_lines, test_that_speaks
from records.tools.logs import BadInput, interval, number, printable, read, short

TARGET = 3.28  # a loss over the GPT-2 vocabulary; over another it means nothing
WIDTH = 100
RECORDS = Path(__file__).resolve().parents[1]

# ---- One side ------------------------------------------------------------------------------------

RUN_ITSELF = {"seed", "name", "records", "command", "resumed"}  # differ from run to run
NOT_GIVEN = "(not given)"

class Side:
    """The runs of one setting, and what their tables, picture and JSON say of them."""

    def __init__(self, label, runs, target, at=None, first=False, name=None):
        self.label = label
        self.name = name or name_of(runs)
        self.runs = runs
        self.copies = []
        self.warnings = []
        kept = self.without_copies(runs)
        by_step = losses_by_step([run for run in kept if not run.diverged]) if first else {}
        if at is not None:
            for run in runs:
                run.end_at(at)
        whole = [run for run in kept if run.finished and not run.diverged]
        self.used = [run for run in whole if not of_two_methods(run)] or whole
        losses = [run.loss for run in self.used]
        self.loss = judge.spread(losses) | {"p": judge.p_below(losses, target)}
        self.seconds = judge.spread([run.seconds for run in self.used])
        ends = {run.validations[-1].step for run in self.used}
        self.at = ends.pop() if len(ends) == 1 else None
        if target is not None:
            for run in runs:
                run.find_target(target)
        self.rules = []
        for rule in rules_for(target) if losses else ():
            holding = (step for step in by_step if rule(by_step[step], target)["holds"])
            self.rules.append(rule(losses, target) | {"first": next(holding, None)})
        seeds = Counter(run.seed for run in self.used if run.seed)
        shared = [seed for seed, n in seeds.items() if n > 1]
        self.independent = not shared
        self.warn(at, shared)

    def without_copies(self, runs):
        """The runs without those whose losses and times another has too, of which the longest
        stays."""
        kept = []
        for run in sorted(runs, key=lambda run: (-len(run.validations), not run.source)):
            marks = marks_of(run)
            original = next((other for other in kept if marks and marks <= marks_of(other)
                             and not share_logs(run, other)), None)
            if original:
                self.copies.append(run.name)
                self.warnings.append(f"run {run.name} of {self.label} has the losses of "
                                     f"{original.name}: a copy, counted once")
            else:
                kept.append(run)
        return [run for run in runs if run in kept]

    def warn(self, at, shared_seeds):
        label = self.label
        for run in self.runs:
            if run.changed or run.mixed:
                what = "; ".join([*run.changed, *run.mixed])
                text = f"run {run.name} of {label} was resumed with differences ({what})"
                if of_two_methods(run):
                    text += ", kept, for there is no other" if run in self.used else ", left out"
                self.warnings.append(text)
        if shared_seeds:
            self.warnings.append(f"runs of {label} share a seed: {', '.join(shared_seeds)}")
        others = [run for run in self.runs if run not in self.used and run.name not in self.copies]
        diverged = sum(run.diverged for run in others)
        stopped = sum(not run.finished and not run.diverged for run in others)
        early = "stopped before a last loss (--at=STEP takes those at a step)"
        for count, what in ((diverged, "had a loss that is not finite"),
                            (stopped, early if at is None else f"have no loss at step {at}")):
            if count:
                self.warnings.append(f"{count} of the runs of {label} {what}")
        settings = values_of(self.used, "hyperparameters")
        mixed = [key for key, values in settings.items() if len(values) > 1]
        for what, values in (("source", {run.source for run in self.used if run.source}),
                             ("hardware", {run.timed_on for run in self.used})):
            mixed += [what] if len(values) > 1 else []
        if mixed:
            self.warnings.append(f"runs of {label} differ from each other in: {', '.join(mixed)}")

def rules_for(target):
    if target == TARGET:
        return judge.speedrun_rule, judge.track_rule
    return () if target is None else (judge.speedrun_rule,)

def name_of(runs):
    """What the runs are called: by their own name, else by their folder, else by the first."""
    names = {run.hyperparameters.get("name", "").strip("'\"") for run in runs}
    if len(names) == 1 and names != {""}:
        return short(names.pop(), 100)
    folders = {Path(run.path).resolve().parent for run in runs}
    if len(folders) == 1 and RECORDS not in folders:
        return folders.pop().name
    return runs[0].name

def is_alive(run):
    """Whether its log may still grow, or the next run of a series is about to begin. A log that has
    not grown for ten minutes is given up."""
    return time.time() - os.path.getmtime(run.path) < (60 if run.finished else 600)

def of_two_methods(run):
    """Whether its losses are those of more than one script or set of settings, or may be."""
    return bool(run.changed or run.missing or "script" in run.mixed)

def share_logs(run, other):
    """Whether one continues the other, or both continue a third one: then they are no copies."""
    return len(run.logs + other.logs) > 2 and not set(run.logs).isdisjoint(other.logs)

def marks_of(run):
    """By which a copy of a run is known, digit for digit."""
    return {(line.step, line.loss, line.seconds) for line in run.validations if line.step > 0}

def values_of(runs, kind):
    """key -> the sorted values it has over the runs; kind is "hyperparameters" or "environment"."""
    tables = [getattr(run, kind) for run in runs]
    found = {}
    for key in dict.fromkeys(chain(*tables)):
        if key not in RUN_ITSELF:
            found[key] = sorted({table.get(key, NOT_GIVEN) for table in tables})
    return found

# ---- Two sides -----------------------------------------------------------------------------------

def differences(a, b, kind):
    """Rows of key, values in B, values in A for what tells the sides apart."""
    in_a = values_of(a.runs, kind)
    in_b = values_of(b.runs, kind)
    rows = [[key, in_b.get(key, [NOT_GIVEN]), in_a.get(key, [NOT_GIVEN])] for key in in_b | in_a]
    return [row for row in rows if row[1] != row[2]]

def compare(a, b, target, level=None):
    """Everything that is said about two sides, but for the verdict. A level means that pairs were
    added until a difference was decided at it, so that e-values take the place of p-values."""
    pairs = pairs_of(a, b)
    in_pairs = list(zip(*pairs)) or [(), ()]
    enough = len(pairs) > 1 and 2 * len(pairs) >= min(len(a.used), len(b.used))
    by_pairs = partial(judge.until_decided, level=level) if level else judge.paired
    by_sides = judge.difference if level else judge.welch
    is_paired = enough or bool(level)
    tested = in_pairs if is_paired else (a.used, b.used)  # by the seeds alone, never the outcome
    found = {
        "unequal": unequal(a, b),
        "hyperparameters": differences(a, b, "hyperparameters"),
        "environment": differences(a, b, "environment"),
        "source": source_diff(*[(side.used or side.runs)[0] for side in (b, a)]),
        "paired": {"seeds": [run.seed for run, _ in pairs]},
        "no_effect": unchanged_losses(pairs),
        "speaks": "paired" if is_paired else "welch",
        "level": level or ALPHA,
        "why": f"of the seeds, both sides ran {len(pairs)}",
        "to_target": time_to_target(a, b, tested, by_pairs if is_paired else by_sides),
        "power": None,
    }
    for key in ("loss", "seconds"):
        found[key] = by_sides(*values_of_both(a.used, b.used, key))
        found["paired"][key] = by_pairs(*values_of_both(*in_pairs, key))
    later = [steps_later(*pair) for pair in pairs]
    known = [] if None in later else later
    found["paired"]["steps"] = by_pairs(known, [0.0] * len(known))
    if min(map(len, tested)) > 1 and not level:
        found["power"] = judge.power(*values_of_both(*tested, "loss"), enough)
    return found

def compare_all(candidates, baseline, target, level=None, worth=None, more=0):
    """A comparison of each candidate with the baseline, its p- or e-value adjusted for the number
    of candidates and of `more` that have no runs, with the decision and the verdict. A difference
    below `worth` is none."""
    found = [compare(side, baseline, target, level) for side in candidates]
    for key in ("loss", "seconds"):
        tests = [test_that_speaks(one, key) for one in found]
        values = [1 if test["adjusted"] is None else test["adjusted"] for test in tests]
        for test, value in zip(tests, judge.adjusted(values + [1] * more)):
            if test["adjusted"] is not None:
                test["adjusted"] = value
    for side, one in zip(candidates, found):
        one["decision"] = decision(side, baseline, one, worth)
        one["verdict"] = verdict(side, baseline, one, target)
    return found

def values_of_both(a, b, key):
    return [[getattr(run, key) for run in runs] for runs in (a, b)]

def steps_later(run, other):
    """How many steps later `run` has the loss of `other`, by the latter's own curve; below 0 if it
    is earlier. With a gain of g nats, `run` is where `other` was when its loss was still g above
    its last one. None where the curve of `other` has no such loss, or the steps are not equal."""
    gain = other.loss - run.loss
    level = other.loss + abs(gain)
    points = [(line.step, line.loss) for line in other.validations if line.loss is not None]
    for (step, loss), (next_step, next_loss) in reversed(list(pairwise(points))):
        if run.steps == other.steps and loss >= level > next_loss:
            share = (loss - level) / (loss - next_loss)
            return math.copysign(other.steps - step - share * (next_step - step), -gain)
    return 0.0 if gain == 0 and run.steps == other.steps else None

def unchanged_losses(pairs):
    """How many losses two sides of equal seeds have, where none differs at any step."""
    logged = [[[(line.step, line.kind, line.loss) for line in run.lines if line.kind]
               for run in pair] for pair in pairs]
    if not pairs or any(one != other for one, other in logged):
        return None
    return sum(len(one) for one, _ in logged)

def time_to_target(a, b, tested, test):
    """The times at which the runs reach the target; tested where every run reaches it, for those
    that do are no fair sample."""
    reached = [sum(run.reached is not None for run in side.used) for side in (a, b)]
    if not any(reached):
        return None
    found = {"reached": reached, "means": None, "seconds": None}
    if reached == [len(a.used), len(b.used)] and all(reached):
        found["means"] = [fmean(run.reached[1] for run in side.used) for side in (a, b)]
        found["seconds"] = test(*[[run.reached[1] for run in runs] for runs in tested])
    return found

def source_diff(old, new):
    """A unified diff of the sources of B and A, each hunk with the definition above its change;
    None where a log holds no source."""
    if not (old.source and new.source):
        return None
    texts = [run.source.splitlines() for run in (old, new)]
    lines = list(difflib.unified_diff(*texts, f"B {old.name}", f"A {new.name}", lineterm="", n=2))
    for i, line in enumerate(lines):
        if line.startswith("@@ "):
            start = int(re.search(r"\+(\d+)", line)[1]) + 1  # past the two lines of context
            above = [text for text in texts[1][:start] if re.match(r"\s*(def|class) ", text)]
            lines[i] = f"{line} {above[-1].strip() if above else ''}".rstrip()
    return lines

# ---- The verdict ---------------------------------------------------------------------------------

def titles(sides):
    """What the sides are called: by their names, where these differ."""
    if len({side.name for side in sides}) < len(sides):
        return [side.label for side in sides]
    return [side.name for side in sides]

def unequal(a, b):
    """What else than the method may make a difference, in words."""
    found = []
    for what in ("tokens", "steps", "parameters"):
        means = [[getattr(run, what) or 0 for run in side.used] or [0] for side in (a, b)]
        ours, theirs = map(fmean, means)
        if ours and theirs and ours != theirs:
            percent = f"{100 * abs(ours / theirs - 1):.3g} %"
            found.append(f"{percent} {'more' if ours > theirs else 'fewer'} {what}")
    if not comparable_losses(a, b):
        found.append("other validation data")
    if not comparable_times(a, b):
        found.append("other hardware, ranks or rules of the clock")
    return found

def decision(a, b, comparison, worth=None):
    """better, worse, no difference or undecided, by the losses."""
    if not comparable_losses(a, b) or not (a.independent and b.independent):
        return "undecided"
    same = comparison["no_effect"] and len(comparison["paired"]["seeds"]) > 1
    return decide(test_that_speaks(comparison, "loss"), same, comparison["level"], worth)

def decide(test, same, level, worth=None):
    """The decision of a test; `same`: whether all losses of two pairs or more are the same."""
    if judge.is_sure(test, level):
        return "better" if test["difference"] < 0 else "worse"
    within = worth and test["interval"] and max(map(abs, test["interval"])) <= worth
    return "no difference" if same or within else "undecided"

def verdict(a, b, comparison, target):
    """A few sentences, never more than the runs support."""
    n_a = len(a.used)
    n_b = len(b.used)
    both = {tuple(run.validations) for run in a.used} & {tuple(run.validations) for run in b.used}
    if both:  # the same losses and times, digit for digit
        return f"Nothing is shown: {len(both)} of the runs stand on both sides."
    if not comparison["no_effect"] and min(n_a, n_b) < 2:
        return (f"Nothing is shown: {n_a} finished run{'s' * (n_a != 1)} of A against {n_b} of B, "
                "and spread takes at least 2 a side.")
    if not (a.independent and b.independent):
        return ("Nothing is shown: the runs of a side are not independent (see the warnings), so "
                "no p-value holds.")
    if test_that_speaks(comparison, "loss")["difference"] is None:
        return ("Nothing is shown: the sides have no seed in common, and an e-value takes pairs. "
                "Without --until_decided, all runs are compared.")
    sentences = [about_loss(a, b, comparison), about_time(a, b, comparison)]
    if comparison["unequal"]:
        text = f"Unequal: {titles([a, b])[0]} has {', '.join(comparison['unequal'])}."
        sentences.insert(0, text)
    if target is not None:
        sentences.append(about_target(a, b, comparison, target))
    for side in (a, b):
        if side.warnings:
            sentences.append(f"But mind the warnings about {side.label}.")
    return " ".join(filter(None, sentences))

def comparable_losses(a, b):
    return len({run.validated_on for run in a.used + b.used}) == 1

def comparable_times(a, b):
    runs = a.used + b.used
    return len({run.timed_on for run in runs}) == 1 and not any(run.mixed for run in runs)

def about_loss(a, b, comparison):
    count = comparison["no_effect"]
    pairs = len(comparison["paired"]["seeds"])
    if count:
        return (f"The change had no effect on the losses: with the same seed both sides log the "
                f"same losses at every step ({count} losses in {pairs} "
                f"pair{'s' * (pairs != 1)}).")
    if not comparable_losses(a, b):
        return "Losses do not compare, the validation data or the vocabulary differ."
    names = titles([a, b])
    test = test_that_speaks(comparison, "loss")
    if comparison["decision"] == "no difference":
        low, high = test["interval"]
        return (f"No difference that matters: {names[0]} - {names[1]} lies between {low:+.4f} and "
                f"{high:+.4f} nats a token, by {pairs} pairs.")
    size = f"{names[0]} - {names[1]} = {test['difference']:+.4f} nats a token"
    extent = ", ".join(text for text in comparison["unequal"] if "%" in text)
    text = claim("loss", names, test, size, ("better", "worse"), comparison["level"], extent)
    welch = f"Welch's t-test of {len(a.used)} runs against {len(b.used)}"
    by = f"{pairs} pairs" if comparison["speaks"] == "paired" else welch
    return f"{text} by {by}.{about_steps(names, b, comparison)}{about_power(comparison)}"

def about_steps(names, b, comparison):
    """What the difference in nats is in steps."""
    test = comparison["paired"]["steps"]
    if comparison["speaks"] != "paired" or not test["difference"]:
        return ""
    earlier = test["difference"] < 0
    sign = -1 if earlier else 1
    percent = [sign * 100 * steps / b.used[0].steps
               for steps in (test["difference"], *(test["interval"] or ()))]
    sure = 95 if test["E"] is None else 100 * (1 - comparison["level"])
    between = (f" ({sure:g} % interval: {{:.2g}} to {{:.2g}} %)".format(*sorted(percent[1:]))
               if test["interval"] else "")
    return (f" By the slope of its curve, {names[1]} would need {abs(test['difference']):.3g} "
            f"{'more' if earlier else 'fewer'} steps for the same loss, {percent[0]:.2g} % of the "
            f"run{between}.")

def about_power(comparison):
    """What the runs could have shown, or what is still to be done, where they show nothing."""
    test = test_that_speaks(comparison, "loss")
    found = comparison["power"]
    if judge.is_sure(test, comparison["level"]) or test["adjusted"] is None:
        return ""
    if test["E"] is not None:
        needed = test["needed"]
        return f" Some {needed} pairs in all would likely decide it." if needed else ""
    if not found["detectable"]:
        return ""
    what = "pairs" if comparison["speaks"] == "paired" else "runs a side"
    return (f" Such a race would detect a difference of {found['detectable']:.2g} in 4 cases of 5; "
            f"to detect the one seen would take {found['needed'] or 'more than 100,000'} {what}.")

def about_time(a, b, comparison):
    if not comparable_times(a, b):
        return ("Times do not compare, the hardware, the ranks or the rules of the clock differ, "
                "or a run was resumed with differences.")
    test = test_that_speaks(comparison, "seconds")
    if test["difference"] is None:
        return None
    text = claim_time(titles([a, b]), test, b.seconds["mean"], comparison["level"])
    return f"{text} on {a.used[0].hardware or 'hardware that the logs do not name'}."

def about_target(a, b, comparison, target):
    """Loss and speed together: who gets below the target, and who is there first."""
    names = titles([a, b])
    held = ["yes" if side.rules and side.rules[0]["holds"] else "not shown" for side in (a, b)]
    text = f"Mean below {target:g} at p < {ALPHA}: {names[0]} {held[0]}, {names[1]} {held[1]}."
    found = comparison["to_target"]
    if not found:
        return text
    if not found["means"]:
        counts = [f"{n} of {len(side.used)}" for n, side in zip(found["reached"], (a, b))]
        return (f"{text} {names[0]} reaches {target:g} in {counts[0]} runs, {names[1]} in "
                f"{counts[1]}.")
    means = found["means"]
    text += (f" To {target:g} it takes {names[0]} {means[0]:.1f} s and {names[1]} {means[1]:.1f} s "
             "of training")
    if not comparable_times(a, b):
        return f"{text}, on hardware that differs."
    said = claim_time(names, found["seconds"], means[1], comparison["level"])
    return f"{text}. There, {said[0].lower() if said.startswith('No') else said[0]}{said[1:]}."

def claim_time(names, test, seconds, level):
    difference = test["difference"] or 0
    size = f"{difference:+.3g} s, {100 * difference / max(seconds, 1e-9):+.1f} %"
    return claim("time", names, test, size, ("faster", "slower"), level)

def claim(what, names, test, size, words, level=ALPHA, extent=""):
    """One sentence about a difference A - B, as strong as its p- or e-value and no stronger."""
    word = words[(test["difference"] or 0) > 0]
    than = f"{word} than {names[1]}{' at ' * bool(extent)}{extent}"
    if test["adjusted"] is None:
        return f"No difference in {what} can be tested, the runs do not spread"
    if judge.is_sure(test, level):
        return f"{names[0]} is {than} ({size}, {strength(test)})"
    if judge.is_sure(test, 0.05):
        return f"{names[0]} may be {than}, not surely ({size}, {strength(test)})"
    return f"No difference in {what} is shown ({size}, {strength(test)})"

def strength(test):
    """The p- or e-value in words, and what the number of candidates leaves of it."""
    by_p = test["E"] is None
    text = f"p = {test['p']:.2g}" if by_p else f"E = {test['E']:.3g}"
    if test["adjusted"] > 1.001 * judge.p_value(test):
        left = test["adjusted"] if by_p else 1 / test["adjusted"]
        text += f", adjusted for the number of candidates {left:.2g}"
    return text

# ---- Text ----------------------------------------------------------------------------------------

MEASURES = (("val loss", "loss", ".5f", ""), ("time", "seconds", ".3f", " s"))

def say(text="", file=None):
    print(printable(text), file=file)

def say_wrapped(text, indent="  "):
    say(textwrap.fill(printable(text), WIDTH, subsequent_indent=indent))

def tokens_text(tokens):
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if tokens is not None and tokens >= size:
            return f"{tokens / size:.4g}{unit}"
    return number(tokens, "d")

def print_table(rows):
    """Rows of text, the first of them the header; the first column stands to the left."""
    rows = [list(map(printable, row)) for row in rows]
    widths = [max(map(len, cells)) for cells in zip(*rows)]
    for first, *others in rows:
        say("  ".join([first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]))

def print_side(side, target):
    runs = side.runs
    title = f"{side.label}: {side.name}, {len(runs)} run{'s' * (len(runs) != 1)}"
    for what in ("hardware", "ranks", "torch"):
        values = {getattr(run, what) or "-" for run in runs}
        if values != {"-"}:
            title += f", {what} {' | '.join(sorted(values))}"
    say_wrapped(title)
    to_target = "to target" if target is None else f"to {target:g}"
    rows = [["run", "val loss", "time", "ms/step", "steps", "tokens", "step", to_target]]
    for run in runs:
        step, seconds = run.reached or (None, None)
        of = "" if run.finished else f"/{run.total}"
        rows.append([run.name, number(run.loss, ".4f"), number(run.seconds, ".2f", " s"),
                     number(run.ms_per_step, ".2f"), f"{run.steps}{of}", tokens_text(run.tokens),
                     number(step, ".0f"), number(seconds, ".2f", " s")])
    print_table(rows)
    say()
    rows = [["over the runs", "n", "mean", "SD", "95 % interval of the mean"]]
    for what, key, form, unit in MEASURES:
        found = getattr(side, key)
        rows.append([what, str(found["n"]), number(found["mean"], form, unit),
                     number(found["sd"], form, unit), interval(found["interval"], form)])
    print_table(rows)
    for line in rule_lines(side, target):
        say_wrapped(line)
    for line in side.warnings:
        say_wrapped(f"warning: {line}")
    say()

def print_comparison(a, b, comparison):
    rows = [["at the end", f"{a.label} - {b.label}", "interval", "p or 1 / E"]]
    pairs = len(comparison["paired"]["seeds"])
    for what, key, form, unit in MEASURES:
        paired = comparison["paired"][key]
        tests = [(f"{pairs} pairs", paired)] * (pairs > 1)
        tests += [("Welch", comparison[key])] * (paired["E"] is None)
        for kind, test in tests:
            rows.append([f"{what}, {kind}", number(test["difference"], f"+{form}", unit),
                         interval(test["interval"], form), number(judge.p_value(test), ".2g")])
    print_table(rows)
    say()
    print_changes(comparison)
    diff = ["missing in a log, no diff"] if comparison["source"] is None else comparison["source"]
    say("\n".join(["source, B -> A:", *(diff or ["the same"]), ""]))

def print_candidates(candidates, baseline, comparisons):
    """The table of a race of several, with a row for each candidate."""
    rows = [["candidate", "decision", "pairs", f"loss - {baseline.name}'s", "interval",
             "p or 1 / E", "adjusted", "time", "tokens", "parameters"]]
    for side, found in zip(candidates, comparisons):
        test = test_that_speaks(found, "loss")
        run = side.used[0] if side.used else side.runs[0]
        seconds = test_that_speaks(found, "seconds")["difference"]
        rows.append([side.name, found["decision"], str(len(found["paired"]["seeds"])),
                     number(test["difference"], "+.4f"), interval(test["interval"], "+.4f"),
                     number(judge.p_value(test), ".2g"), number(test["adjusted"], ".2g"),
                     number(seconds, "+.1f", " s"), tokens_text(run.tokens),
                     tokens_text(run.parameters)])
    print_table(rows)
    say()

def print_changes(comparison):
    for kind in ("hyperparameters", "environment"):
        rows = comparison[kind]
        say(f"{kind}: {'B -> A' if rows else 'no difference in the logs'}")
        for key, before, after in rows:
            say_wrapped(f"  {key}: {' | '.join(before)} -> {' | '.join(after)}", " " * 6)
        say()

def as_json(thing):
    """The fields of a Side or a Run, for json.dumps."""
    if isinstance(thing, Side):
        return vars(thing) | {"used": [run.name for run in thing.used]}
    source = thing.source and hashlib.sha256(thing.source.encode()).hexdigest()
    fields = {key: value for key, value in vars(thing).items() if key != "lines"}
    return fields | {"source": source or None}

# ---- The command ---------------------------------------------------------------------------------

def parse_steps(text):
    """The steps in --at=STEP or --at=STEP,STEP: of A and of B."""
    if not re.fullmatch(r"\d{1,9}(,\d{1,9})?", text):
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a step, or those of A and of B "
                                         "as in 2690,2720")
    steps = [int(step) for step in text.split(",")]
    return steps * (3 - len(steps))

def finite(text):
    value = float(text)
    if not math.isfinite(value):
        raise ValueError
    return value

def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__, prog="./run.sh compare",
                                     allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", nargs="+", metavar="A", help="logs, or folders of logs")
    parser.add_argument("--vs", nargs="+", action="append", metavar="B", help="the baseline's")
    parser.add_argument("--target", type=finite, help="validation loss to reach")
    parser.add_argument("--at", type=parse_steps, metavar="STEP[,STEP]", default=[None, None])
    parser.add_argument("--first", action="store_true", help="the earliest step of each rule")
    parser.add_argument("--loss", metavar="NAME", default=logs.VAL_LOSS, help="another loss")
    parser.add_argument("--until_decided", type=float, metavar="LEVEL", help="by e-values")
    parser.add_argument("--plot", metavar="FILE", help="draw the losses into a .png or .svg")
    parser.add_argument("--html", metavar="FILE", help="a page for a browser")
    parser.add_argument("--follow", action="store_true", help="keep it fresh while runs are alive")
    parser.add_argument("--label", action="append", metavar="NAME", help="of a side, in order")
    parser.add_argument("--json", action="store_true", help="everything, for programs")
    options = parser.parse_args(arguments)
    if len(options.vs or []) > 1:
        parser.error("--vs may be given once: all candidates have the same baseline")
    if options.until_decided is not None and not 0 < options.until_decided < 1:
        parser.error("--until_decided takes a level between 0 and 1, 0.01 say")
    if not re.fullmatch(r"\w+", options.loss):
        parser.error("--loss takes the name of a loss as it stands in a log, val_ema_loss say")
    if options.follow and not options.html:
        parser.error("--follow keeps a page fresh: add --html=FILE")
    if options.plot and not options.plot.endswith((".png", ".svg")):
        parser.error("--plot takes a .png or an .svg")
    return options

def read_sides(options):
    """The candidates, the baseline in a list, the comparisons, the target, and a line for each
    input that is no log. With a baseline, each folder is a candidate, and the files are one
    together."""
    inputs = [options.logs]
    if options.vs:
        inputs = [[path] for path in options.logs if os.path.isdir(path)]
        files = [path for path in options.logs if not os.path.isdir(path)]
        inputs += [files] if files else []
    *found, vs = [read(paths, options.loss) for paths in [*inputs, *(options.vs or [[]])]]
    unread = [line for _, lines in [*found, vs] for line in lines]
    if not all(runs for runs, _ in found) or (options.vs and not vs[0]):
        raise BadInput("no run to report" + (" on one of the sides" if options.vs else ""))
    target = options.target
    vocabularies = {run.hyperparameters.get("vocab_size") for runs, _ in [*found, vs]
                    for run in runs}
    if target is None and vocabularies <= {None, "50257", "50304"}:  # GPT-2's
        target = TARGET
    labels = ["A"] if len(found) == 1 else [f"A{i + 1}" for i in range(len(found))]
    count = len(found) + bool(options.vs)
    names = options.label or [None] * count
    if len(names) != count:
        raise BadInput(f"--label: found {len(names)}, expected one for each of the {count} sides, "
                       "the baseline last")
    candidates = [Side(label, runs, target, options.at[0], options.first, name)
                  for label, (runs, _), name in zip(labels, found, names)]
    if not options.vs:
        return candidates, [], [], target, unread
    baseline = Side("B", vs[0], target, options.at[1], options.first, names[-1])
    comparisons = compare_all(candidates, baseline, target, options.until_decided)
    return candidates, [baseline], comparisons, target, unread

def report(candidates, baseline, comparisons, target):
    """Print everything about the sides."""
    several = len(candidates) > 1
    for side, comparison in zip(candidates, comparisons):
        name = f" on {side.name}" if several else ""
        say_wrapped(f"verdict{name}: {comparison['verdict']}", "")
        say()
    if several:
        print_candidates(candidates, *baseline, comparisons)
    for side in candidates + baseline:
        print_side(side, target)
    for side, comparison in zip(candidates, comparisons):
        print_comparison(side, *baseline, comparison)

def follow(options):
    """Write the page again and again, until no run is alive or Ctrl+C."""
    from records.tools import page

    say(f"{options.html} shows the runs while they train; Ctrl+C ends that", sys.stderr)
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            candidates, baseline, comparisons, target, _ = read_sides(options)
            sides = candidates + baseline
            if not any(is_alive(run) for side in sides for run in side.runs):
                return
            page.save(options.html, sides, comparisons, target, alive=True)
            time.sleep(5)

def main(arguments=None):
    """Print what is asked for; returns the exit status."""
    options = parse(arguments)
    if options.follow:
        follow(options)
    candidates, baseline, comparisons, target, unread = read_sides(options)
    for line in unread:
        say(line, sys.stderr)
    sides = candidates + baseline
    only = comparisons[0] if len(comparisons) == 1 else None
    if options.plot:
        from records.tools import plot  # which takes a second to import

        plot.save(options.plot, sides, target, pairs_of(*sides) if only else (),
                  options.until_decided)
    if options.html:
        from records.tools import page

        page.save(options.html, sides, comparisons, target)
    if options.json:
        print(json.dumps({"version": 8, "target": target, "loss": options.loss, "sides": sides,
                          "comparison": only, "comparisons": [] if only else comparisons,
                          "unread": unread}, indent=1, default=as_json, allow_nan=False))
    else:
        report(candidates, baseline, comparisons, target)
    return 1 if unread else 0

if __name__ == "__main__":
    try:
        sys.stdout.reconfigure(errors="backslashreplace")  # for file names that are no text
        sys.exit(main())
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (BadInput, OSError) as error:
        sys.exit(f"compare.py: {printable(str(error))}")  # status 1
