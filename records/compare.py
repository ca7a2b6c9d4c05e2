"""Judge the logs of NanoGPT speedruns: what was changed, is it better, is it faster, how surely.

    python records/compare.py records/*.log                       one setting: runs, spread, p-value
    python records/compare.py NEW.log NEW2.log --vs records/base  two settings and a verdict
    python records/compare.py new/ --vs base/ --plot new.png      the same, drawn
    python records/compare.py new/ --at 2690 --first              losses at a step; earliest step
    python records/compare.py NEW.log --plot new.png              a run, alive or not: loss, speed
    python records/compare.py --update-readme                     the table in records/README.md

A log is this project's, or published by the speedrun since October 2024, or captured from a
console. A file may hold several runs, one after the other. A folder stands for every .log and .txt
below it. A resumed run is read with the logs that it continues, which lie beside its own, where its
checkpoint lay, or in another folder that is named. The runs named first are A, those after --vs are
B, the baseline: "B -> A" and A - B throughout.

Only finished runs with finite losses enter the statistics, and none that was resumed with another
script or other settings, or whose first log is missing, as long as there are others; what is left
out is named. Runs that all end at one step before their schedule does count as finished there. A
copy of a run, by its losses, counts once.
Where the sides ran the same seeds, their differences are tested in pairs, beside Welch's test.
--update-readme keeps the table's last column, which is written by hand.
Exit status: 0 all read, 1 some log was none or missing (the rest is still reported), 2 wrong usage.

--json prints one object, with null for what the logs do not say or too few runs cannot say:
  version: 5; target: the loss to reach; loss: the name of the loss that is read; unread: a line
    for each input that was no log, and for each log that is missing
  sides: A, or A and B: label, name, warnings, independent, used (names of the runs in the
    statistics), copies (names of those left out as copies), loss and seconds (n, mean, sd,
    interval: 95 % of the mean; of loss p: one-sided t-test), at (the step of the last losses, where
    the runs agree), rules (rows of rule, value, holds, runs_needed, first: the earliest step, with
    --first), others (source diffs within the side), runs
  runs: name, path, logs (rows of path and the step it begins at, the oldest first), missing (why
    the oldest of them is not the run's beginning, else null), steps, total, seconds, tokens,
    ms_per_step, loss, finished, diverged, changed (settings, on resuming), mixed (in what else the
    logs of the run differ, such as script, ranks, host or torch), reached (step and seconds at the
    target), validations (rows of step, total, kind, loss, seconds, ms_per_step, tokens, lr,
    window), hardware, torch, ranks, seed, parameters, timed_on and validated_on (what must agree
    before times, losses compare), source (its sha256), hyperparameters and environment (as the
    newest log has them)
  comparison: hyperparameters, environment (rows of name, values in B, in A), parameters (in B, in
    A, where they differ), source (a diff), loss and seconds (by Welch's test: difference A - B,
    interval, p), paired (the same by the t-test of differences, with seeds and sd), no_effect (of
    how many losses none differs, else null), speaks (welch or paired: the test of the verdict),
    why, to_target (reached: by how many runs of A, of B; seconds: as above), power (detectable: the
    difference that these runs would show 4 times of 5; needed: the runs a side, or the pairs, for
    the difference seen), rule (of the optimizer track, for two results: value, holds), verdict
"""

import argparse
import difflib
import hashlib
import json
import math
import os
import re
import subprocess
import sys
import textwrap
import warnings
from collections import Counter
from itertools import chain, pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from records import logs
from records.logs import BadInput, read

with logs.installed():
    import numpy as np
    from scipy import optimize, stats

TARGET = 3.28                     # a loss over the GPT-2 vocabulary; over another it means nothing
ALPHA = 0.01                      # the speedrun's level of significance
POWER = 0.8                       # of ten true differences of this size, eight are shown
TRACK_MARGIN = 0.004              # of the optimizer track: 3.09 SDs of 0.0013, for p < 0.001
TRACK_LOSS_PER_STEP = 0.0045 / 100  # of the optimizer track: what a step less costs
WIDTH = 100
RECORDS = Path(__file__).resolve().parent
MARKERS = ("<!-- table: compare.py --update-readme -->", "<!-- end of table -->")

# ---- Statistics ----------------------------------------------------------------------------------

def spread(values):
    """n, mean, SD and the 95 % interval of the mean (Student's t); None where n is too small."""
    n = len(values)
    found = {"n": n, "mean": None, "sd": None, "interval": None}
    if n > 0:
        found["mean"] = float(np.mean(values))
    if n > 1:
        found["sd"] = float(np.std(values, ddof=1))
        half = float(stats.t.ppf(0.975, n - 1)) * found["sd"] / math.sqrt(n)
        found["interval"] = (found["mean"] - half, found["mean"] + half)
    return found

def p_below(values, target):
    """p of a one-sided t-test that the mean is below the target; None where there is no spread."""
    if target is None or len(set(values)) < 2:
        return None
    return float(stats.ttest_1samp(values, target, alternative="less").pvalue)

def tested(test):
    """The 95 % interval and the p-value of one of SciPy's tests; None where it has none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about values that are all the same
        result = test()
        low, high = result.confidence_interval()
    if not math.isfinite(result.pvalue):
        return {"interval": None, "p": None}
    return {"interval": (float(low), float(high)), "p": float(result.pvalue)}

def welch(a, b):
    """Difference of the means of a and b, Welch's 95 % interval and two-sided p; None where they
    cannot be had."""
    found = {"difference": None, "interval": None, "p": None}
    if a and b:
        found["difference"] = float(np.mean(a) - np.mean(b))
    if min(len(a), len(b)) > 1 and max(len(set(a)), len(set(b))) > 1:
        found |= tested(lambda: stats.ttest_ind(a, b, equal_var=False))
    return found

def paired(a, b):
    """The same by the t-test of the differences of pairs, with their SD."""
    differences = np.subtract(a, b)
    found = {"difference": None, "interval": None, "p": None, "sd": None}
    if len(differences):
        found["difference"] = float(np.mean(differences))
    if len(differences) > 1:
        found["sd"] = float(np.std(differences, ddof=1))
        if found["sd"] > 1e-12:
            found |= tested(lambda: stats.ttest_rel(a, b))
    return found

def chance_to_show(difference, se, df):
    """The power of a two-sided t-test at p < ALPHA, for a true difference and its standard error.
    Student's noncentral t, integrated over the chance of the SD, which SciPy's own does not
    survive at 1 degree of freedom."""
    edge = stats.t.ppf(1 - ALPHA / 2, df)
    quantiles = (np.arange(2000) + 0.5) / 2000
    sd_ratio = np.sqrt(stats.chi2.ppf(quantiles, df) / df)
    return float(np.mean(stats.norm.sf(edge * sd_ratio - abs(difference) / se)))

def detectable(se, df):
    """The difference that such runs show, at p < ALPHA, 4 times of 5."""
    if not se:
        return None
    high = 2 * stats.t.ppf(1 - ALPHA / 2, df) + 10
    return se * optimize.brentq(lambda x: chance_to_show(x, 1, df) - POWER, 0, high)

def runs_needed(difference, error_of, most=100_000):
    """The fewest runs a side, or pairs, that show a difference 4 times of 5; error_of(n) gives the
    standard error and the degrees of freedom. None where it takes more than `most`."""
    if not difference or chance_to_show(difference, *error_of(most)) < POWER:
        return None
    low = 1
    high = most
    while high - low > 1:
        middle = (low + high) // 2
        if chance_to_show(difference, *error_of(middle)) < POWER:
            low = middle
        else:
            high = middle
    return high

def power(a, b, difference, pair_sd, pair_count):
    """What these runs could have shown: of the pairs where their SD is given, else of the sides'
    losses by Welch's test."""
    if pair_sd is not None:
        def error_of(n):
            return pair_sd / math.sqrt(n), n - 1
        now = error_of(pair_count)
    else:
        variances = (np.var(a, ddof=1), np.var(b, ddof=1))

        def error_of(n, m=None):
            parts = (variances[0] / n, variances[1] / (m or n))
            rest = parts[0] ** 2 / (n - 1) + parts[1] ** 2 / ((m or n) - 1)
            return math.sqrt(sum(parts)), sum(parts) ** 2 / rest if rest else 1
        now = error_of(len(a), len(b))
    if now[0] < 1e-12:
        return {"detectable": None, "needed": None}
    return {"detectable": detectable(*now), "needed": runs_needed(difference, error_of)}

# ---- The rules of the field ----------------------------------------------------------------------

def speedrun_rule(losses, target):
    """The speedrun's: a mean below the target at p < 0.01, by a one-sided t-test."""
    p = p_below(losses, target)
    needed = None
    margin = target - np.mean(losses)
    if p is not None and margin > 0:
        n = np.arange(2, 10_001)
        passes = margin / np.std(losses, ddof=1) * np.sqrt(n) > stats.t.ppf(1 - ALPHA, n - 1)
        needed = int(n[np.argmax(passes)]) if passes.any() else None
    return {"rule": "speedrun", "value": p, "holds": p is not None and p < ALPHA,
            "runs_needed": needed}

def track_rule(losses, target):
    """The optimizer track's: (target - mean) * sqrt(n) >= 0.004, which takes the SD for known."""
    margin = target - float(np.mean(losses))
    value = margin * math.sqrt(len(losses))
    needed = math.ceil(round((TRACK_MARGIN / margin) ** 2, 9)) if margin > 0 else None
    return {"rule": "optimizer track", "value": value, "holds": round(value, 12) >= TRACK_MARGIN,
            "runs_needed": needed}

def track_rule_for_two(a, b):
    """The optimizer track's for two results, where fewer steps count as a lower loss."""
    if None in (a.at, b.at) or not (a.used and b.used):
        return None
    gain = b.loss["mean"] - a.loss["mean"] + (b.at - a.at) * TRACK_LOSS_PER_STEP
    value = gain / math.sqrt(1 / len(a.used) + 1 / len(b.used))
    return {"value": value, "holds": round(value, 12) >= TRACK_MARGIN}

def losses_by_step(runs):
    """step -> the losses of all runs, for the steps at which all of them have one."""
    tables = [{line.step: line.loss for line in run.validations if line.loss is not None}
              for run in runs]
    common = set.intersection(*map(set, tables)) if tables else set()
    return {step: [table[step] for table in tables] for step in sorted(common)}

def first_step(rule, by_step, target):
    """The earliest step, the same for all runs, at which a rule holds."""
    for step, losses in by_step.items():
        if rule(losses, target)["holds"]:
            return step
    return None

# ---- One side ------------------------------------------------------------------------------------

RUN_ITSELF = {"seed", "name", "records", "command", "resumed"}  # differ from run to run
NOT_GIVEN = "(not given)"

class Side:
    """The runs of one setting, and what their tables, picture and JSON say of them."""

    def __init__(self, label, runs, target, at=None, first=False):
        self.label = label
        self.name = name_of(runs)
        self.runs = runs
        self.warnings = []
        kept = self.without_copies(runs)
        by_step = losses_by_step([run for run in kept if not run.diverged]) if first else {}
        if at is not None:
            for run in runs:
                run.end_at(at)
        whole = self.finished_runs(kept)
        self.used = [run for run in whole if not of_two_methods(run)] or whole
        losses = [run.loss for run in self.used]
        self.loss = spread(losses) | {"p": p_below(losses, target)}
        self.seconds = spread([run.seconds for run in self.used])
        ends = {run.validations[-1].step for run in self.used}
        self.at = ends.pop() if len(ends) == 1 else None
        self.independent = True
        if target is not None:
            for run in runs:
                run.find_target(target)
        self.rules = []
        if target is not None and losses:
            self.rules.append(speedrun_rule(losses, target))
        if target == TARGET and losses:
            self.rules.append(track_rule(losses, target))
        for row, rule in zip(self.rules, (speedrun_rule, track_rule)):
            row["first"] = first_step(rule, by_step, target)
        self.warn_about_runs(at)
        self.warn_about_settings()

    def without_copies(self, runs):
        """The runs without those whose losses another has too, of which the longest stays."""
        self.copies = []
        kept = []
        owners = {}
        for run in sorted(runs, key=lambda run: (-len(run.validations), not run.source)):
            timed, untimed = marks_of(run)
            marks = untimed if len(untimed) > 3 else timed  # a few losses may agree by chance
            rivals = owners.get(min(marks, default=None, key=str), [])
            original = next((rival for rival in rivals if marks <= set().union(*marks_of(rival))
                             and not share_logs(run, rival)), None)
            if original:
                self.copies.append(run.name)
                self.warnings.append(f"run {run.name} of {self.label} has the losses of "
                                     f"{original.name}: a copy, counted once")
                continue
            kept.append(run)
            for mark in timed | untimed:
                owners.setdefault(mark, []).append(run)
        return [run for run in runs if run in kept]

    def finished_runs(self, runs):
        whole = [run for run in runs if not run.diverged and run.finished]
        if whole:
            return whole
        stopped = [run for run in runs if not run.diverged and run.validations]
        ends = {(run.validations[-1].step, run.total) for run in stopped}
        if len(stopped) > 1 and len(stopped) == len(runs) and len(ends) == 1:
            step, total = ends.pop()
            self.warnings.append(f"runs of {self.label} all end at step {step} of {total}, which "
                                 "is taken for their end")
            for run in stopped:
                run.end_at(step)
            return stopped
        return []

    def warn_about_runs(self, at):
        label = self.label
        for run in self.runs:
            if run.changed or run.mixed:
                what = "; ".join([*run.changed, *run.mixed])
                text = f"run {run.name} of {label} was resumed with differences ({what})"
                if of_two_methods(run):
                    text += ", kept, for there is no other" if run in self.used else ", left out"
                self.warnings.append(text)
        seeds = Counter(run.seed for run in self.used if run.seed)
        shared = [seed for seed, n in seeds.items() if n > 1]
        others = [run for run in self.runs if run not in self.used and run.name not in self.copies]
        diverged = sum(run.diverged for run in others)
        stopped = sum(not run.finished and not run.diverged for run in others)
        if shared:
            self.warnings.append(f"runs of {label} share a seed: {', '.join(shared)}")
        if diverged:
            self.warnings.append(f"{diverged} of the runs of {label} had a loss that is not finite")
        if stopped and at is not None:
            self.warnings.append(f"{stopped} of the runs of {label} have no loss at step {at}")
        elif stopped:
            self.warnings.append(f"{stopped} of the runs of {label} stopped before a last loss")
        self.independent = not shared

    def warn_about_settings(self):
        settings = values_of(self.used, "hyperparameters")
        mixed = [key for key, values in settings.items() if len(values) > 1]
        sources = Counter(run.source for run in self.used if run.source)
        self.others = []
        if len(sources) > 1:
            mixed.append("source")
            self.others = self.differing_sources(sources)
        if len({run.timed_on for run in self.used}) > 1:
            mixed.append("hardware")
        if mixed:
            self.warnings.append(f"runs of {self.label} differ from each other in: "
                                 f"{', '.join(mixed)}")

    def differing_sources(self, sources):
        """The diff of each further source from the one that most runs have."""
        usual = sources.most_common(1)[0][0]
        owner = {run.source: run for run in reversed(self.used) if run.source}
        return [source_diff(owner[usual], owner[source]) for source in sources if source != usual]

def name_of(runs):
    """What the runs are called: by their own name, else by their folder, else by the first."""
    names = {run.hyperparameters.get("name", "").strip("'\"") for run in runs}
    if len(names) == 1 and names != {""}:
        return names.pop()
    folders = {Path(run.path).resolve().parent for run in runs}
    if len(folders) == 1 and RECORDS not in folders:
        return folders.pop().name
    return runs[0].name

def of_two_methods(run):
    """Whether its losses are those of more than one script or set of settings, or may be."""
    return bool(run.changed or run.missing or "script" in run.mixed)

def share_logs(run, other):
    """Whether one continues the other, or both continue a third one: then they are no copies."""
    return len(run.logs + other.logs) > 2 and not set(run.logs).isdisjoint(other.logs)

def marks_of(run):
    """By which a copy of a run is known: its validations with their times, and without."""
    validated = [line for line in run.validations if line.step > 0]
    return ({(line.step, line.loss, line.seconds) for line in validated},
            {(line.step, line.loss) for line in validated})

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

def pairs_of(a, b):
    """(run of A, run of B) for each seed that both sides ran once."""
    tables = []
    for side in (a, b):
        seeds = Counter(run.seed for run in side.used)
        tables.append({run.seed: run for run in side.used if run.seed and seeds[run.seed] == 1})
    return [(run, tables[1][seed]) for seed, run in tables[0].items() if seed in tables[1]]

def compare(a, b, target):
    """Everything that is said about two sides."""
    pairs = pairs_of(a, b)
    losses = [[run.loss for run in side.used] for side in (a, b)]
    found = {
        "hyperparameters": differences(a, b, "hyperparameters"),
        "environment": differences(a, b, "environment"),
        "parameters": differing_parameters(a, b),
        "source": source_diff(usual_run(b), usual_run(a), "B ", "A "),
        "loss": welch(*losses),
        "seconds": welch(*[[run.seconds for run in side.used] for side in (a, b)]),
        "paired": {"seeds": [run.seed for run, _ in pairs]},
        "no_effect": unchanged_losses(pairs),
    }
    for key in ("loss", "seconds"):
        found["paired"][key] = paired(*[[getattr(pair[i], key) for pair in pairs] for i in (0, 1)])
    found |= which_test(a, b, len(pairs))
    found["to_target"] = time_to_target(a, b, pairs, found["speaks"])
    found["power"] = None
    if min(map(len, losses)) > 1:
        test = test_that_speaks(found, "loss")
        found["power"] = power(*losses, test["difference"], test.get("sd"), len(pairs))
    found["rule"] = track_rule_for_two(a, b) if target == TARGET else None
    found["verdict"] = verdict(a, b, found, target)
    return found

def which_test(a, b, pairs):
    """The test that the verdict takes, chosen by the seeds alone and never by its outcome."""
    if pairs > 1 and 2 * pairs >= max(len(a.used), len(b.used)):
        why = f"both sides ran the same {pairs} seeds, so the differences are tested in pairs"
        return {"speaks": "paired", "why": why}
    why = "the sides share no seed" if not pairs else f"the sides share only {pairs} of their seeds"
    return {"speaks": "welch", "why": f"{why}, so that no differences are tested in pairs"}

def test_that_speaks(comparison, key):
    return comparison["paired"][key] if comparison["speaks"] == "paired" else comparison[key]

def differing_parameters(a, b):
    counts = [sorted({run.parameters for run in side.runs if run.parameters}) for side in (b, a)]
    return counts if all(counts) and counts[0] != counts[1] else None

def usual_run(side):
    """The first of the runs that have the source that most have."""
    runs = side.used or side.runs
    usual = Counter(run.source for run in runs).most_common(1)[0][0]
    return next(run for run in runs if run.source == usual)

def unchanged_losses(pairs):
    """How many losses two sides of equal seeds have, where none differs at any step."""
    logged = [[[(line.step, line.kind, line.loss) for line in run.lines if line.kind]
               for run in pair] for pair in pairs]
    if not pairs or any(one != other for one, other in logged):
        return None
    return sum(len(one) for one, _ in logged)

def time_to_target(a, b, pairs, speaks):
    """The times at which the runs reach the target; tested where every run reaches it, for those
    that do are no fair sample."""
    reached = [sum(run.reached is not None for run in side.used) for side in (a, b)]
    found = {"reached": reached, "means": None, "seconds": None}
    if not any(reached):
        return None
    if reached != [len(a.used), len(b.used)] or not all(reached):
        return found
    times = [[run.reached[1] for run in side.used] for side in (a, b)]
    found["means"] = [float(np.mean(seconds)) for seconds in times]
    if speaks == "paired":
        times = [[pair[i].reached[1] for pair in pairs] for i in (0, 1)]
        found["seconds"] = paired(*times)
    else:
        found["seconds"] = welch(*times)
    return found

def source_diff(old, new, old_mark="", new_mark=""):
    """A unified diff of two runs' sources, each hunk with the name of its function; None where a
    log holds no source."""
    if not (old.source and new.source):
        return None
    texts = [run.source.splitlines() for run in (old, new)]
    names = (f"{old_mark}{old.name}", f"{new_mark}{new.name}")
    lines = list(difflib.unified_diff(*texts, *names, lineterm="", n=2))
    for i, line in enumerate(lines):
        if line.startswith("@@ "):
            lines[i] = f"{line} {function_at(lines, i, *texts)}".rstrip()
    return lines

def function_at(diff, i, old, new):
    """The function, with its class, in which the first change of a hunk lies."""
    above = 0
    while diff[i + 1 + above].startswith(" "):
        above += 1
    removed = diff[i + 1 + above].startswith("-")
    start = re.match(r"@@ -(\d+)\S* \+(\d+)", diff[i])[1 if removed else 2]
    lines = old if removed else new
    at = max(int(start) - 1, 0) + above
    indent = len(lines[at]) - len(lines[at].lstrip()) if lines[at].strip() else WIDTH
    names = []
    for line in reversed(lines[:at]):
        found = re.match(r"( *)(?:async )?(?:def|class) (\w+)", line)
        if found and len(found[1]) < indent:
            names.append(found[2])
            indent = len(found[1])
        elif line and line[0] not in " #)]}@":
            indent = 0  # a line of the module: nothing above encloses what stands below it
        if not indent:
            break
    return ".".join(reversed(names))

# ---- The verdict ---------------------------------------------------------------------------------

def titles(sides):
    """What the sides are called: by their names, where these differ."""
    if len({side.name for side in sides}) < len(sides):
        return [side.label for side in sides]
    return [side.name for side in sides]

def verdict(a, b, comparison, target):
    """A few sentences, never more than the runs support."""
    n_a = len(a.used)
    n_b = len(b.used)
    both = timed_losses(a.used) & timed_losses(b.used)
    if both:
        return f"Nothing is shown: {len(both)} of the runs stand on both sides."
    if not comparison["no_effect"] and min(n_a, n_b) < 2:
        return (f"Nothing is shown: {n_a} finished run{'s' * (n_a != 1)} of A against {n_b} of B, "
                "and spread takes at least 2 a side.")
    if not (a.independent and b.independent):
        return ("Nothing is shown: the runs of a side are not independent (see the warnings), so "
                "no p-value holds.")
    sentences = [about_loss(a, b, comparison), about_time(a, b, comparison)]
    if comparable_losses(a, b) and not comparison["no_effect"]:
        sentences.insert(1, about_power(comparison))
    if target is not None:
        sentences.append(about_target(a, b, comparison, target))
    for side in (a, b):
        if side.warnings:
            sentences.append(f"But mind the warnings about {side.label}.")
    return " ".join(filter(None, sentences))

def timed_losses(runs):
    """The runs' losses and times: those of a copy are the same, digit for digit."""
    return {tuple(run.validations) for run in runs}

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
    test = test_that_speaks(comparison, "loss")
    size = f"{abs(test['difference']):.4f} nats a token"
    text = claim("loss", titles([a, b]), test, size, ("better", "worse"))
    if comparison["speaks"] == "paired":
        other = number(comparison["loss"]["p"], ".2g")
        text += f" by the t-test of {pairs} pairs (Welch's, which ignores the seeds: p = {other})"
    else:
        text += f" by Welch's t-test of {len(a.used)} runs against {len(b.used)}"
    return f"{text}."

def about_power(comparison):
    """What the runs could have shown, where they do not show a difference."""
    found = comparison["power"]
    p = test_that_speaks(comparison, "loss")["p"]
    if p is None or p < ALPHA or not found["detectable"]:
        return None
    paired = comparison["speaks"] == "paired"
    runs = f"{len(comparison['paired']['seeds'])} such pairs" if paired else "Such runs"
    text = f"{runs} would detect a difference of {found['detectable']:.2g} in 4 cases of 5"
    if found["needed"]:
        what = "pairs" if paired else "runs a side"
        return f"{text}; to detect the one seen would take some {found['needed']} {what}."
    return f"{text}; the one seen is too small for any number of runs that one could make."

def about_time(a, b, comparison):
    if any(run.mixed for run in a.used + b.used):
        return "Times do not compare, a run was resumed with differences (see the warnings)."
    if not comparable_times(a, b):
        return "Times do not compare, the hardware, the ranks or the rules of the clock differ."
    test = test_that_speaks(comparison, "seconds")
    if test["difference"] is None:
        return None
    percent = 100 * abs(test["difference"]) / max(b.seconds["mean"], 1e-9)
    text = claim("time", titles([a, b]), test, f"{percent:.1f} %", ("faster", "slower"))
    if not a.used[0].hardware:
        return f"{text}; the logs do not name the hardware."
    return f"{text} on the same kind of hardware."

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
    percent = 100 * abs(found["seconds"]["difference"] or 0) / max(means[1], 1e-9)
    said = claim("time to the target", names, found["seconds"], f"{percent:.1f} %",
                 ("faster there", "slower there"))
    return f"{text}: {said[0].lower() if said.startswith('No') else said[0]}{said[1:]}."

def claim(what, names, test, size, words):
    """One sentence about a difference A - B, as strong as its p-value and no stronger."""
    word = words[(test["difference"] or 0) > 0]
    p = test["p"]
    if p is None:
        return f"No difference in {what} can be tested, the runs do not spread"
    if p < ALPHA:
        return f"{names[0]} is {word} than {names[1]} by {size} (p = {p:.2g})"
    if p < 0.05:
        return f"{names[0]} may be {word} than {names[1]} by {size}, not surely (p = {p:.2g})"
    return f"No difference in {what} is shown ({size}, p = {p:.2g})"

# ---- Text ----------------------------------------------------------------------------------------

MEASURES = (("val loss", "loss", ".5f", ""), ("time", "seconds", ".3f", " s"))
RULES = {
    "speedrun": "speedrun's rule, a mean below {:g} at p < 0.01 (one-sided t-test): p = {:.2g}",
    "optimizer track": "optimizer track's rule, ({:g} - mean) * sqrt(n) >= 0.004, for an SD of "
                       "0.0013: {:.5f}",
}

def printable(text):
    """Without what would steer a terminal: such characters as escapes."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode()
                   for c in text)

def say(text="", file=None):
    print(printable(text), file=file)

def say_wrapped(text, indent="  "):
    say(textwrap.fill(printable(text), WIDTH, subsequent_indent=indent))

def number(value, form, unit=""):
    return "-" if value is None else f"{value:{form}}{unit}"

def interval(bounds, form):
    return "-" if bounds is None else f"{bounds[0]:{form}} .. {bounds[1]:{form}}"

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
    print_rules(side, target)
    for line in side.warnings:
        say_wrapped(f"warning: {line}")
    say()

def print_rules(side, target):
    if target is None:
        say("no target: these runs have a vocabulary of their own (--target sets one)")
    for row in side.rules:
        if row["value"] is None:
            say_wrapped(f"mean below {target:g}: no p-value, which takes two finished runs that "
                        "differ")
            continue
        text = RULES[row["rule"]].format(target, row["value"])
        text += ", holds" if row["holds"] else ", does not hold"
        if row["runs_needed"]:
            text += f"; {row['runs_needed']} run{'s' * (row['runs_needed'] != 1)} of this mean "
            text += "would do" if row["runs_needed"] <= len(side.used) else "would be needed"
        if row["first"] is not None:
            text += f"; first holds at step {row['first']}"
        say_wrapped(text)

def print_comparison(a, b, comparison):
    rows = [["at the end", "A - B", "95 % interval", "p (two-sided)"]]
    pairs = len(comparison["paired"]["seeds"])
    for what, key, form, unit in MEASURES:
        tests = [("Welch", comparison[key])]
        if pairs > 1:
            tests.insert(0, (f"{pairs} pairs", comparison["paired"][key]))
        for kind, test in tests:
            rows.append([f"{what}, {kind}", number(test["difference"], f"+{form}", unit),
                         interval(test["interval"], form), number(test["p"], ".2g")])
    print_table(rows)
    name = "the t-test of the pairs" if comparison["speaks"] == "paired" else "Welch's t-test"
    say_wrapped(f"The verdict uses {name}: {comparison['why']}.", "")
    if comparison["rule"]:
        found = comparison["rule"]
        say_wrapped("optimizer track's rule for two results, (B's loss - A's + (B's steps - A's) / "
                    "100 * 0.0045) / sqrt(1/n + 1/n) >= 0.004: "
                    f"{found['value']:.5f}, {'holds' if found['holds'] else 'does not hold'}")
    say()
    print_changes(comparison)
    for side in (a, b):
        for diff in side.others:
            print_diff(diff, f"sources within {side.label} differ")
    print_diff(comparison["source"], "source, B -> A")

def print_changes(comparison):
    for kind in ("hyperparameters", "environment"):
        rows = comparison[kind]
        say(f"{kind}: {'B -> A' if rows else 'no difference in the logs'}")
        for key, before, after in rows:
            say_wrapped(f"  {key}: {' | '.join(before)} -> {' | '.join(after)}", " " * 6)
        say()
    if comparison["parameters"]:
        before, after = (" | ".join(f"{n:,}" for n in ns) for ns in comparison["parameters"])
        say(f"parameters of the model: {before} -> {after}\n")

def print_diff(diff, title):
    if diff is None:
        say(f"{title}: missing in a log, no diff\n")
    elif not diff:
        say(f"{title}: the same\n")
    else:
        say("\n".join([f"{title}: {diff_size(diff)}", *diff, ""]))

def diff_size(diff):
    """How much of a source has changed, as "3 places, -6 +7 lines"."""
    marks = Counter(line[0] for line in diff[2:] if line)
    places = marks["@"]
    return f"{places} place{'s' * (places != 1)}, -{marks['-']} +{marks['+']} lines"

def as_json(thing):
    """The fields of a Side or a Run, for json.dumps."""
    if isinstance(thing, Side):
        return vars(thing) | {"used": [run.name for run in thing.used]}
    source = thing.source and hashlib.sha256(thing.source.encode()).hexdigest()
    fields = {key: value for key, value in vars(thing).items() if key != "lines"}
    return fields | {"source": source or None}

# ---- Picture -------------------------------------------------------------------------------------

COLOURS = ("#0072B2", "#D55E00")  # told apart by the colour-blind, and in grey by the dashes
DASHES = ("-", (0, (4, 1.5)))
DIFFERENCE = "#5B3A8C"
SHOWN_FROM = 0.5  # of the steps: before that losses fall so steeply that they would set the range
FEW = 5  # validations in what is shown: with fewer, the training losses are drawn too
AXES = {"seconds": "training time (seconds)", "tokens": "training tokens (millions)",
        "step": "training step"}
STYLE = {"font.size": 11, "axes.titlesize": 11, "legend.fontsize": 10, "figure.titlesize": 13,
         "text.parse_math": False, "axes.spines.top": False, "axes.spines.right": False}

def short(name, width=40):
    name = printable(name)
    return name if len(name) <= width else f"{name[:width - 3]}..."

def place(line, axis):
    """Where a Line stands on an axis of AXES."""
    value = getattr(line, axis)
    return value / 1e6 if axis == "tokens" else value

def shown_lines(run):
    """The Lines in the picture's range with a loss, and the last ones before it."""
    first = SHOWN_FROM * run.steps
    found = [line for line in run.lines if line.loss is not None]
    before = {line.kind: line for line in found if line.step < first}
    return [*before.values(), *(line for line in found if line.step >= first)]

def validation_curve(run, axis):
    """Positions and losses."""
    points = [line for line in shown_lines(run) if line.kind == "val"]
    return [place(line, axis) for line in points], [line.loss for line in points]

def training_curve(run, axis):
    """Positions and losses, each the mean over a sixth of what is shown."""
    points = [line for line in shown_lines(run) if line.kind == "train"]
    width = max(1, len(points) // 6)
    if len(points) < 2:
        return [], []
    weights = np.full(width, 1 / width)
    places = np.convolve([place(line, axis) for line in points], weights, mode="valid")
    losses = np.convolve([line.loss for line in points], weights, mode="valid")
    return list(places), list(losses)

def mean_curve(runs, curve, axis):
    """The mean of the runs' curves; None where they do not have the same steps."""
    if len({tuple(curve(run, "step")[0]) for run in runs}) != 1:
        return None
    return np.mean([curve(run, axis) for run in runs], axis=0)

def draw_losses(panel, side, axis, colour, dash, training):
    """A thin line a run, and a bold one their mean, where all validated at the same steps."""
    name = short(side.name)
    runs = side.used or side.runs
    for run in runs:
        panel.plot(*validation_curve(run, axis), color=colour, linewidth=0.8, alpha=0.6)
    mean = mean_curve(runs, validation_curve, axis)
    if len(runs) > 1 and mean is not None:
        panel.plot(*mean, color=colour, linewidth=2.6, linestyle=dash, marker="o", markersize=4,
                   label=f"{name}: mean of {len(runs)} runs")
    else:
        panel.plot(*validation_curve(runs[0], axis), color=colour, linewidth=1.8, linestyle=dash,
                   marker="o", markersize=4,
                   label=name if len(runs) == 1 else f"{name}: {len(runs)} runs")
    smoothed = mean_curve(runs, training_curve, axis) if training else None
    if smoothed is not None and len(smoothed[0]) > 1:
        panel.plot(*smoothed, color=colour, linewidth=1, linestyle=":",
                   label=f"{name}: training loss, smoothed")

def set_range(panel, runs, axis, target, training):
    """The part of the losses that is shown; the target only where it is near."""
    late = [line for run in runs for line in run.lines if line.step >= SHOWN_FROM * run.steps]
    losses = [line.loss for line in late if line.kind == "val" and line.loss is not None]
    losses = losses or [loss for run in runs for loss in validation_curve(run, axis)[1]]
    low = min(losses)
    high = max(losses)
    trained = [loss for run in runs for loss in training_curve(run, "step")[1]]
    if training and trained:  # as far as the validations stay readable
        span = high - low
        low = max(min(low, *trained), low - span)
        high = min(max(high, *trained), high + span)
    if target is not None and abs(target - (low + high) / 2) < 2 * (high - low):
        low = min(low, target)
        high = max(high, target)
    room = 0.06 * (high - low) or 0.01
    places = [place(line, axis) for line in late]
    width = max(places) - min(places)
    panel.set_ylim(low - room, high + room)
    if width > 0:
        panel.set_xlim(min(places), max(places) + 0.02 * width)

def finish_panel(panel, axis, ylabel):
    panel.set_xlabel(AXES[axis])
    panel.set_ylabel(ylabel)
    panel.grid(color="0.88", linewidth=0.7)
    panel.set_axisbelow(True)
    if axis == "step":
        panel.xaxis.get_major_locator().set_params(integer=True)
    for one in (panel.xaxis, panel.yaxis):
        one.get_major_formatter().set_scientific(False)
        one.get_major_formatter().set_useOffset(False)

def differences_by_step(pairs):
    """(what, steps, rows of A - B for each pair): of the validation losses, or where these are few
    of the smoothed training losses; None where they share no two steps, or do not run to the
    same one: on the way, other schedules say little."""
    if len({run.total for pair in pairs for run in pair}) != 1:
        return None
    for what, curve, least in (("validation", validation_curve, FEW),
                               ("smoothed training", training_curve, 3),
                               ("validation", validation_curve, 2)):
        tables = [[dict(zip(*curve(run, "step"))) for run in pair] for pair in pairs]
        steps = sorted(set.intersection(*(set(table) for pair in tables for table in pair)))
        if len(steps) >= least:
            return what, steps, np.array([[a[step] - b[step] for step in steps] for a, b in tables])
    return None

def draw_difference(panel, what, steps, rows):
    """A - B by step: a thin line a pair, a bold one their mean, and the 95 % interval."""
    mean = rows.mean(axis=0)
    half = stats.t.ppf(0.975, len(rows) - 1) * rows.std(axis=0, ddof=1) / math.sqrt(len(rows))
    panel.fill_between(steps, mean - half, mean + half, color=DIFFERENCE, alpha=0.18, linewidth=0,
                       label="95 % interval of the mean difference")
    for row in rows:
        panel.plot(steps, row, color=DIFFERENCE, linewidth=0.8, alpha=0.6)
    panel.plot(steps, mean, color=DIFFERENCE, linewidth=2.6, marker="o" * (len(steps) < 30),
               markersize=4, label=f"mean difference of {len(rows)} pairs")
    panel.axhline(0, color="black", linewidth=1)
    span = float(np.ptp(np.append(rows, 0)))
    low = max(min(rows.min(), (mean - half).min(), 0), rows.min() - span)  # few pairs: a wide band
    high = min(max(rows.max(), (mean + half).max(), 0), rows.max() + span)
    room = 0.06 * (high - low) or 0.01
    panel.set_ylim(low - room, high + room)
    panel.set_xlim(steps[0], steps[-1] + 0.02 * (steps[-1] - steps[0]))
    panel.set_title(f"Difference in {what} loss, in pairs of one seed: below 0 the first is better")
    finish_panel(panel, "step", "difference (nats a token)")

def draw_rates(panel, run, amount):
    """The factor of the learning rates and, on a second axis, the speed, over the steps."""
    rates = [(line.step, line.lr) for line in run.lines
             if line.lr is not None and line.kind != "val"]
    panel.plot(*zip(*rates or [(0, 0)]), color="black", linewidth=1.6,
               label="learning-rate factor (left)")
    panel.set_ylim(0, 1.08)
    finish_panel(panel, "step", "factor of the learning rates")
    other = panel.twinx()
    scale = 1000 if amount == "tokens" else 1
    speeds = [(after.step, (getattr(after, amount) - getattr(before, amount)) / scale
               / (after.seconds - before.seconds))
              for before, after in pairwise(run.lines[::len(run.lines) // 60 + 1])
              if after.seconds > before.seconds]
    other.plot(*zip(*speeds or [(0, 0)]), color="#009E73", linewidth=1.2,
               label="speed (right)")
    other.set_ylim(0, 1.15 * max((speed for _, speed in speeds), default=1) or 1)
    other.set_ylabel("thousand tokens a second" if scale > 1 else "steps a second")
    other.spines["right"].set_visible(True)

def draw(sides, target):
    """The end of the runs: validation loss over training time and over tokens; below, where the
    sides ran the same seeds, their difference by step. A single side: loss, and its first run's
    learning rates and speed."""
    from matplotlib.figure import Figure

    runs = [run for side in sides for run in side.used or side.runs]
    if not any(shown_lines(run) and run.validations for run in runs):
        raise BadInput("no picture, for the logs hold no loss")
    runs = [run for run in runs if any(line.kind == "val" for line in shown_lines(run))]
    pairs = pairs_of(*sides) if len(sides) > 1 else []
    difference = differences_by_step(pairs) if len(pairs) > 1 else None
    amount = "step" if any(line.tokens is None for run in runs for line in run.lines) else "tokens"
    figure = Figure(figsize=(9, 7.6 if difference else 4.8), layout="constrained")
    mosaic = [["time", "tokens"]] + [["difference"] * 2] * bool(difference)
    panels = figure.subplot_mosaic(mosaic)
    few = max(len(validation_curve(run, "step")[0]) for run in runs) < FEW
    with_training = few or len(sides) == 1
    for axis, panel in (("seconds", panels["time"]), (amount, panels["tokens"])):
        if len(sides) == 1 and panel is panels["tokens"]:
            draw_rates(panel, runs[0], amount)
            continue
        for side, colour, dash in zip(sides, COLOURS, DASHES):
            draw_losses(panel, side, axis, colour, dash, with_training)
        if target is not None:
            panel.axhline(target, color="black", linewidth=1, linestyle="-.",
                          label=f"target {target:g}")
        set_range(panel, runs, axis, target, with_training)
        finish_panel(panel, axis, "loss (nats a token)")
    if difference:
        draw_difference(panels["difference"], *difference)
    entries = {}
    for panel in figure.axes:
        handles, labels = panel.get_legend_handles_labels()
        entries |= dict(zip(labels, handles))
    figure.suptitle(picture_title(sides))
    figure.legend(entries.values(), entries, loc="outside lower center", ncols=2, frameon=False)
    return figure

def picture_title(sides):
    names = [short(side.name) for side in sides]
    counts = [len(side.used or side.runs) for side in sides]
    runs = f"{counts[0]} run{'s' * (counts[0] != 1)}"
    if len(set(counts)) > 1:
        runs = f"{counts[0]} and {counts[1]} runs"
    elif len(counts) > 1:
        runs += " each"
    return textwrap.fill(f"Validation loss of {' against '.join(names)}, {runs}", 80)

def save_picture(sides, target, path):
    import matplotlib

    with matplotlib.rc_context(STYLE):
        draw(sides, target).savefig(path, dpi=144)

# ---- The table of this repository's records ------------------------------------------------------

HEADER = ("| record | runs | val loss, mean (SD) | time, mean (SD) | ms/step | steps | tokens | "
          "hardware | torch | what was asked, and what came out |")

def tracked_logs(records):
    """The logs under records/ that git tracks: a user's own runs are no records."""
    command = ["git", "-C", str(records), "ls-files", "-z", "*.log"]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    if not found:
        raise BadInput(f"{records}: git tracks no log here")
    return [Path(records, name) for name in sorted(found.split("\0")) if name]

def records_table(records):
    """One row of markdown for each folder of tracked logs."""
    folders = {}
    for path in tracked_logs(records):
        folders.setdefault(path.parent, []).append(path)
    rows = [HEADER, re.sub(r"[^|]+", "---", HEADER)]
    for folder, paths in folders.items():
        runs, unread = read(paths)
        if unread:
            raise BadInput(unread[0])
        name = folder.relative_to(records).as_posix()
        side = Side(name, runs, None)
        used = side.used
        cells = [f"[{name}]({name}/)"]
        cells.append(f"{len(used)} of {len(runs)}" if len(used) < len(runs) else f"{len(used)}")
        for found, form, unit in ((side.loss, ".4f", ""), (side.seconds, ".1f", " s")):
            sd = "" if found["sd"] is None else f" ({found['sd']:{form}})"
            cells.append(f"{number(found['mean'], form, unit)}{sd}")
        ms_per_step = spread([run.ms_per_step for run in used if run.ms_per_step])
        cells.append(number(ms_per_step["mean"], ".2f"))
        for values in ([str(run.steps) for run in used], [tokens_text(run.tokens) for run in used],
                       [run.hardware for run in used], [run.torch for run in used]):
            texts = sorted({(value or "-").replace("|", "/") for value in values})
            cells.append(", ".join(texts) or "-")
        rows.append(f"| {' | '.join(cells)} | - |")
    return printable("\n".join(rows))

def readme_with_table(text, new_table):
    """The text with the table between its markers made anew; its last column stays."""
    start, end = (text.find(marker) for marker in MARKERS)
    if start < 0 or end < start:
        raise BadInput(f"README.md: the markers {' and '.join(MARKERS)} do not stand in it so")
    last = HEADER.count("|") - 2
    old = [row.split(" | ", last) for row in text[start:end].splitlines()]
    kept = {cells[0]: cells[last:] for cells in old if len(cells) > last}
    rows = [row.split(" | ") for row in new_table.splitlines()]
    rows = [" | ".join(cells[:last] + kept.get(cells[0], cells[last:])) for cells in rows]
    return "\n".join([text[:start] + MARKERS[0], *rows, text[end:]])

def update_readme(records):
    readme = Path(records) / "README.md"
    table = records_table(records)
    readme.write_text(readme_with_table(readme.read_text("utf-8"), table), "utf-8")

# ---- The command ---------------------------------------------------------------------------------

def parse_steps(text):
    """The steps in --at=STEP or --at=STEP,STEP: of A and of B."""
    if not re.fullmatch(r"\d{1,9}(,\d{1,9})?", text):
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a step, or those of A and of B "
                                         "as in 2690,2720")
    steps = [int(step) for step in text.split(",")]
    return steps * (3 - len(steps))

def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", nargs="*", metavar="A", help="logs, or folders of logs")
    parser.add_argument("--vs", nargs="+", metavar="B", help="the same for the baseline")
    parser.add_argument("--target", type=float, help=f"validation loss to reach (default {TARGET}; "
                        "none where the logs name another vocabulary than GPT-2's)")
    parser.add_argument("--at", type=parse_steps, metavar="STEP[,STEP]", default=[None, None],
                        help="take the losses at this step (of A and B: 2690,2720)")
    parser.add_argument("--first", action="store_true", help="say the earliest step, the same for "
                        "all runs, at which each rule holds")
    parser.add_argument("--loss", metavar="NAME", default=logs.VAL_LOSS,
                        help="read another logged loss, val_ema_loss say")
    parser.add_argument("--plot", metavar="FILE", help="draw the losses into a .png or .svg")
    parser.add_argument("--json", action="store_true", help="everything, for programs")
    parser.add_argument("--update-readme", action="store_true", help="write the table of the logs "
                        "that git tracks under records/ into records/README.md")
    options = parser.parse_args(arguments)
    if not options.logs and not options.update_readme:
        parser.error("no log given")
    if options.target is not None and not math.isfinite(options.target):
        parser.error("--target must be a number")
    if not re.fullmatch(r"\w+", options.loss):
        parser.error("--loss takes the name of a loss as it stands in a log, val_ema_loss say")
    if options.plot and not options.plot.endswith((".png", ".svg")):
        parser.error("--plot takes a .png or an .svg")
    return options

def main(arguments=None):
    options = parse(arguments)
    if options.update_readme:
        update_readme(RECORDS)
    return report(options) if options.logs else 0

def read_sides(options):
    """The sides, the target, and a line for each input that is no log."""
    runs, unread = read(options.logs, options.loss)
    baseline, more_unread = read(options.vs or [], options.loss)
    unread += more_unread
    for line in unread:
        say(line, sys.stderr)
    if not runs or (options.vs and not baseline):
        raise BadInput("no run to report" + (" on one of the sides" if options.vs else ""))
    target = options.target
    vocabularies = {run.hyperparameters.get("vocab_size") for run in runs + baseline}
    if target is None and vocabularies <= {None, "50257", "50304"}:  # GPT-2's
        target = TARGET
    sides = [Side("A", runs, target, options.at[0], options.first)]
    if options.vs:
        sides.append(Side("B", baseline, target, options.at[1], options.first))
    return sides, target, unread

def report(options):
    """Print what is asked for; returns the exit status."""
    sides, target, unread = read_sides(options)
    comparison = compare(*sides, target) if options.vs else None
    if options.plot:
        save_picture(sides, target, options.plot)
    if options.json:
        print(json.dumps({"version": 5, "target": target, "loss": options.loss, "sides": sides,
                          "comparison": comparison, "unread": unread},
                         indent=1, default=as_json, allow_nan=False))
        return 1 if unread else 0
    if comparison:
        say_wrapped(f"verdict: {comparison['verdict']}", "")
        say()
    for side in sides:
        print_side(side, target)
    if comparison:
        print_comparison(*sides, comparison)
    else:
        for diff in sides[0].others:
            print_diff(diff, "sources within A differ")
    return 1 if unread else 0

if __name__ == "__main__":
    try:
        sys.stdout.reconfigure(errors="backslashreplace")  # for file names that are no text
        sys.exit(main())
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (BadInput, OSError) as error:
        sys.exit(f"compare.py: {printable(str(error))}")  # status 1
