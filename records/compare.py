"""Judge the logs of NanoGPT speedruns: what was changed, is it better, is it faster, how surely.

    python records/compare.py records/*.log                       one setting: runs, spread, p-value
    python records/compare.py NEW.log NEW2.log --vs records/base  two settings and a verdict
    python records/compare.py new/ --vs base/ --plot new.png      the same, drawn
    python records/compare.py new/ --at 2690 --first              losses at a step; earliest step
    python records/compare.py NEW.log --plot new.png              a run, alive or not: loss, speed

A log is this project's, or published by the speedrun since October 2024, or captured from a
console. A file may hold several runs, one after the other. A folder stands for every .log and .txt
below it. A resumed run is read with the logs that it continues, which lie beside its own, where its
checkpoint lay, or in another folder that is named. The runs named first are A, those after --vs are
B, the baseline: "B -> A" and A - B throughout.

Only finished runs with finite losses enter the statistics, and none that was resumed with another
script or other settings, or whose first log is missing, as long as there are others; what is left
out is named. --at=STEP takes what runs had reached at a step, as if they had finished there. A copy
of a run, by its losses and times, counts once.
Where the sides ran the same seeds, their differences are tested in pairs, beside Welch's test.
Exit status: 0 all read, 1 some log was none or missing (the rest is still reported), 2 wrong usage.

--json prints one object, with null for what the logs do not say or too few runs cannot say:
  version: 6; target: the loss to reach; loss: the name of the loss that is read; unread: a line
    for each input that was no log, and for each log that is missing
  sides: A, or A and B: label, name, warnings, independent, used (names of the runs in the
    statistics), copies (names of those left out as copies), loss and seconds (n, mean, sd,
    interval: 95 % of the mean; of loss p: one-sided t-test), at (the step of the last losses, where
    the runs agree), rules (rows of rule, value, holds, runs_needed, first: the earliest step, with
    --first), runs
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
import ast
import difflib
import hashlib
import json
import math
import os
import re
import sys
import textwrap
from collections import Counter
from itertools import chain
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from records import logs, stats
from records.logs import BadInput, printable, read
from records.stats import ALPHA

TARGET = 3.28  # a loss over the GPT-2 vocabulary; over another it means nothing
WIDTH = 100
RECORDS = Path(__file__).resolve().parent

# ---- One side ------------------------------------------------------------------------------------

RUN_ITSELF = {"seed", "name", "records", "command", "resumed"}  # differ from run to run
NOT_GIVEN = "(not given)"

class Side:
    """The runs of one setting, and what their tables, picture and JSON say of them."""

    def __init__(self, label, runs, target, at=None, first=False):
        self.label = label
        self.name = name_of(runs)
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
        self.loss = stats.spread(losses) | {"p": stats.p_below(losses, target)}
        self.seconds = stats.spread([run.seconds for run in self.used])
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
        if diverged:
            self.warnings.append(f"{diverged} of the runs of {label} had a loss that is not finite")
        if stopped and at is not None:
            self.warnings.append(f"{stopped} of the runs of {label} have no loss at step {at}")
        elif stopped:
            self.warnings.append(f"{stopped} of the runs of {label} stopped before a last loss "
                                 "(--at=STEP takes those at a step)")
        settings = values_of(self.used, "hyperparameters")
        mixed = [key for key, values in settings.items() if len(values) > 1]
        if len({run.source for run in self.used if run.source}) > 1:
            mixed.append("source")
        if len({run.timed_on for run in self.used}) > 1:
            mixed.append("hardware")
        if mixed:
            self.warnings.append(f"runs of {label} differ from each other in: {', '.join(mixed)}")

def rules_for(target):
    if target == TARGET:
        return stats.speedrun_rule, stats.track_rule
    return () if target is None else (stats.speedrun_rule,)

def losses_by_step(runs):
    """step -> the losses of all runs, for the steps at which all of them have one."""
    tables = [{line.step: line.loss for line in run.validations if line.loss is not None}
              for run in runs]
    common = set.intersection(*map(set, tables)) if tables else set()
    return {step: [table[step] for table in tables] for step in sorted(common)}

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
    in_pairs = list(zip(*pairs)) or [(), ()]
    enough = len(pairs) > 1 and 2 * len(pairs) >= max(len(a.used), len(b.used))
    tested = in_pairs if enough else (a.used, b.used)  # by the seeds alone, never by the outcome
    found = {
        "hyperparameters": differences(a, b, "hyperparameters"),
        "environment": differences(a, b, "environment"),
        "parameters": differing_parameters(a, b),
        "source": source_diff(usual_run(b), usual_run(a)),
        "paired": {"seeds": [run.seed for run, _ in pairs]},
        "no_effect": unchanged_losses(pairs),
        "speaks": "paired" if enough else "welch",
        "why": why_this_test(len(pairs), enough),
        "to_target": time_to_target(a, b, tested, enough),
        "power": None,
        "rule": None,
    }
    for key in ("loss", "seconds"):
        found[key] = stats.welch(*values_of_both(a.used, b.used, key))
        found["paired"][key] = stats.paired(*values_of_both(*in_pairs, key))
    if min(map(len, tested)) > 1:
        found["power"] = stats.power(*values_of_both(*tested, "loss"), enough)
    if target == TARGET and None not in (a.at, b.at):
        losses = values_of_both(a.used, b.used, "loss")
        found["rule"] = stats.track_rule_for_two(*losses, b.at - a.at)
    found["verdict"] = verdict(a, b, found, target)
    return found

def values_of_both(a, b, key):
    return [[getattr(run, key) for run in runs] for runs in (a, b)]

def why_this_test(pairs, enough):
    if enough:
        return f"both sides ran the same {pairs} seeds, so the differences are tested in pairs"
    why = f"the sides share only {pairs} of their seeds" if pairs else "the sides share no seed"
    return f"{why}, so that no differences are tested in pairs"

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

def time_to_target(a, b, tested, in_pairs):
    """The times at which the runs reach the target; tested where every run reaches it, for those
    that do are no fair sample."""
    reached = [sum(run.reached is not None for run in side.used) for side in (a, b)]
    if not any(reached):
        return None
    found = {"reached": reached, "means": None, "seconds": None}
    if reached == [len(a.used), len(b.used)] and all(reached):
        found["means"] = [fmean(run.reached[1] for run in side.used) for side in (a, b)]
        times = [[run.reached[1] for run in runs] for runs in tested]
        found["seconds"] = (stats.paired if in_pairs else stats.welch)(*times)
    return found

def source_diff(old, new):
    """A unified diff of the sources of B and A, each hunk with the name of its function; None where
    a log holds no source."""
    if not (old.source and new.source):
        return None
    texts = [run.source.splitlines() for run in (old, new)]
    lines = list(difflib.unified_diff(*texts, f"B {old.name}", f"A {new.name}", lineterm="", n=2))
    for i, line in enumerate(lines):
        if line.startswith("@@ "):
            first = next(k for k in range(i + 1, len(lines)) if lines[k][0] != " ")
            removed = lines[first][0] == "-"
            start = re.match(r"@@ -(\d+)\S* \+(\d+)", line)[1 if removed else 2]
            run = old if removed else new
            lines[i] = f"{line} {function_at(run.source, int(start) + first - i - 1)}".rstrip()
    return lines

def function_at(source, number):
    """The function, with its class, in which a line of a source stands."""
    try:
        nodes = list(ast.walk(ast.parse(source)))  # a class before its methods
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""
    return ".".join(node.name for node in nodes
                    if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
                    and node.lineno <= number <= node.end_lineno)

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
    both = {tuple(run.validations) for run in a.used} & {tuple(run.validations) for run in b.used}
    if both:  # the same losses and times, digit for digit
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
    parser.add_argument("logs", nargs="+", metavar="A", help="logs, or folders of logs")
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
    options = parser.parse_args(arguments)
    if options.target is not None and not math.isfinite(options.target):
        parser.error("--target must be a number")
    if not re.fullmatch(r"\w+", options.loss):
        parser.error("--loss takes the name of a loss as it stands in a log, val_ema_loss say")
    if options.plot and not options.plot.endswith((".png", ".svg")):
        parser.error("--plot takes a .png or an .svg")
    return options

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

def main(arguments=None):
    """Print what is asked for; returns the exit status."""
    options = parse(arguments)
    sides, target, unread = read_sides(options)
    comparison = compare(*sides, target) if options.vs else None
    if options.plot:
        from records import plot  # which takes a second to import

        plot.save(options.plot, sides, target, pairs_of(*sides) if options.vs else ())
    if options.json:
        print(json.dumps({"version": 6, "target": target, "loss": options.loss, "sides": sides,
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
    return 1 if unread else 0

if __name__ == "__main__":
    try:
        sys.stdout.reconfigure(errors="backslashreplace")  # for file names that are no text
        sys.exit(main())
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (BadInput, OSError) as error:
        sys.exit(f"compare.py: {printable(str(error))}")  # status 1
