"""Judges runs: their spread, tests of a difference, also of pairs that are added until it is
decided, the rules of the field, and what two sides differ in. It returns data: compare.py puts it
into words, plot.py draws it. What too few values cannot say is None."""

import math
import warnings
from collections import Counter
from itertools import chain, pairwise
from statistics import fmean

import numpy as np
from scipy import optimize, stats

ALPHA = 0.01                      # the speedrun's level of significance
TARGET = 3.28                     # its loss, over GPT-2's vocabulary
PRIOR = 4.0                       # see e_value
BETS = ((4.0, 0.85), (1.0, 0.15))  # see e_of_signs: how strong, and its share of the money
# How much more time may pass than a run says: a factor, and seconds. In small runs on two busy
# cores, both clocks agreed within 0.4 %, and within 12 ms from one validation to the next.
CLOCK_BOUND = (1.05, 0.5)

# ---- Tests ---------------------------------------------------------------------------------------

def spread(values):
    """n, mean, SD and the 95 % interval of the mean (Student's t)."""
    n = len(values)
    mean = float(np.mean(values)) if n else None
    found = {"n": n, "mean": mean, "sd": sd_of(values), "interval": None}
    if n > 1:
        half = float(stats.t.ppf(0.975, n - 1)) * found["sd"] / math.sqrt(n)
        found["interval"] = (mean - half, mean + half)
    return found

def sd_of(values):
    return float(np.std(values, ddof=1)) if len(values) > 1 else None

def difference(a, b, level=ALPHA, test=None, **options):
    """The difference of the means of a and b. With one of SciPy's tests also its t, the two-sided
    p, and the interval of 1 - level: 0 lies outside where p is below the level."""
    found = dict.fromkeys(("difference", "interval", "t", "p", "E")) | {"level": level}
    if a and b:
        found["difference"] = float(np.mean(a) - np.mean(b))
    if test and min(len(a), len(b)) > 1:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about values that are nearly the same
            result = test(a, b, **options)
            low, high = result.confidence_interval(1 - level)
        if abs(result.statistic) < 1e9:  # nan, infinite or larger where nothing spreads
            found |= {"interval": (float(low), float(high)), "p": float(result.pvalue),
                      "t": float(result.statistic)}
    return found

def welch(a, b, level=ALPHA):
    return difference(a, b, level, stats.ttest_ind, equal_var=False)

def of_pairs(a, b, level, test=None):
    """The same of pairs, with the SD of their differences and how many are below 0."""
    differences = np.subtract(a, b)
    return difference(a, b, level, test) | {
        "sd": sd_of(differences), "n": len(a), "lower": int(np.sum(differences < 0))}

def paired(a, b, level=ALPHA):
    return of_pairs(a, b, level, stats.ttest_rel)

def p_value(test):
    """p, or 1 / E, which is a p-value too. None where nothing is tested."""
    return test["p"] if test["E"] is None else min(1, 1 / test["E"])

def is_sure(test, level=ALPHA):
    """Whether a test shows its difference."""
    p = p_value(test)
    return p is not None and p <= level

# ---- Until decided -------------------------------------------------------------------------------
# Whoever looks at a p-value after each pair, and stops at the first small one, is wrong far more
# often than it says. An e-value may be looked at any number of times: where there is no difference,
# it ever reaches 1 / level with a probability of at most the level (Ville's inequality).

def e_value(differences):
    """The e-value of the mean of n differences of pairs [..., n]. 1 / E is a p-value at every look.

    It is the Bayes factor of the t-test (Gönen et al., The American Statistician, 2005) for a mean
    that is normal around 0 with a variance of PRIOR, in units of the differences' own spread, which
    has a right-Haar prior. As pairs are added, its values are a test martingale (Pérez-Ortiz et
    al., arXiv:2208.07610). At most it is (1 + n PRIOR) ** ((n - 1) / 2), so 100 takes 5 pairs."""
    n = np.shape(differences)[-1]
    width = 1 + n * PRIOR
    square = np.mean(np.square(differences), axis=-1)
    share = np.mean(differences, axis=-1) ** 2 / np.where(square > 0, square, 1)  # of the mean
    return np.exp(-np.log(width) / 2 - n / 2 * np.log1p(-share * (1 - 1 / width)))

def e_of_signs(differences):
    """An e-value of differences [..., n] that are symmetric around 0: each sign is a fair coin
    then, whatever the sizes, and what bets on coins have won is a martingale. The bets are shares
    of the money on the next sign, the larger, the larger the pair's difference is beside those so
    far; see records/2026-11-26_evalue. Eight pairs of one sign win 100, nothing wins it sooner."""
    square = np.cumsum(np.square(differences), -1) / np.arange(1, 1 + np.shape(differences)[-1])
    size = differences / np.sqrt(np.where(square > 0, square, 1))
    return sum(share / 2 * np.prod(1 + np.tanh(strength * size), -1)
               for strong, share in BETS for strength in (strong, -strong))

def e_of_pairs(differences):
    """The E that decides: the smaller one, so that no symmetric distribution is called a difference
    more often than promised, normal or not."""
    return np.minimum(e_value(differences), e_of_signs(differences))

def confidence_sequence(differences, level):
    """The means that e_of_pairs(differences - mean) < 1 / level leaves possible. With a probability
    of 1 - level, the true mean lies in all such intervals, after however many pairs. None where the
    pairs are too few for a bound."""
    def excess(middle):
        return float(e_of_pairs(differences - middle)) - 1 / level
    mean = float(np.mean(differences))
    far = 1000 * float(np.ptp(differences)) or 1.0
    ends = (mean - far, mean + far)
    if min(map(excess, ends)) < 0:
        return None
    return tuple(optimize.brentq(excess, mean, end, xtol=1e-15) for end in ends)

def smallest_effect(most, level, races=500):
    """The mean difference, in SDs of the pairs' differences, that half of simulated races detect
    within `most` pairs, which fifty looks are enough to find. None if that is impossible."""
    noise = np.random.default_rng(0).normal(size=(races, most))

    def beyond_half(effect):
        counts = range(most, 0, -max(1, most // 50))
        looks = [e_of_pairs(noise[:, :n] + effect) >= 1 / level for n in counts]
        return np.mean(np.any(looks, axis=0)) - 0.5
    return optimize.brentq(beyond_half, 0, 100, xtol=0.01) if beyond_half(100) > 0 else None

def until_decided(a, b, level):
    """The test of pairs whose number was not fixed beforehand."""
    found = of_pairs(a, b, level)
    if a:
        differences = np.subtract(a, b)
        found |= {"E": float(e_of_pairs(differences)),
                  "interval": confidence_sequence(differences, level)}
    return found

# ---- One side ------------------------------------------------------------------------------------

def speedrun_rule(losses, target):
    """The speedrun's: a mean below the target at p < 0.01, by a one-sided t-test."""
    if len(set(losses)) < 2:
        return {"p": None, "holds": False}
    p = float(stats.ttest_1samp(losses, target, alternative="less").pvalue)
    return {"p": p, "holds": p < ALPHA}

KEYS = ("loss", "seconds", "later")  # that are tested; see tested
RUN_ITSELF = {  # what differs from run to run
    "seed", "name", "records", "save_every", "command", "resumed"}
NOT_GIVEN = "(not given)"

class Side:
    """The runs of one setting: which of them count, their statistics, what is odd about them."""

    def __init__(self, label, runs, target):
        self.label = label
        self.runs = runs
        whole = [run for run in runs if run.finished and not run.diverged]
        self.used = [run for run in whole if not of_two_methods(run)] or whole
        losses = [run.loss for run in self.used]
        self.loss = spread(losses)
        self.seconds = spread([run.seconds for run in self.used])
        self.rule = None if target is None else speedrun_rule(losses, target)
        seeds = Counter(run.seed for run in self.used if run.seed)
        self.shared_seeds = [seed for seed, n in seeds.items() if n > 1]
        others = [run for run in runs if run not in self.used]
        self.diverged = sum(run.diverged for run in others)
        self.stopped = sum(not run.finished and not run.diverged for run in others)
        settings = values_of(self.used, "hyperparameters")
        self.mixed = [key for key, values in settings.items() if len(values) > 1]
        self.mixed += ["source"] * (len({run.source for run in self.used if run.source}) > 1)
        self.mixed += ["hardware"] * (len({run.timed_on for run in self.used}) > 1)
        self.mixed += ["validation data"] * (not one_validation(self.used))

def of_two_methods(run):
    """Whether its losses are those of more than one script or set of settings, or may be."""
    return bool(run.changed or run.missing or "script" in run.mixed)

def values_of(runs, kind):
    """key -> the sorted values it has over the runs; kind is "hyperparameters" or "environment"."""
    tables = [getattr(run, kind) for run in runs]
    keys = [key for key in dict.fromkeys(chain(*tables)) if key not in RUN_ITSELF]
    return {key: sorted({table.get(key, NOT_GIVEN) for table in tables}) for key in keys}

def losses_by_step(runs):
    """step -> the losses of all runs, for the steps at which all of them have one."""
    tables = [{line.step: line.loss for line in run.validations if line.loss is not None}
              for run in runs]
    common = set.intersection(*map(set, tables)) if tables else set()
    return {step: [table[step] for table in tables] for step in sorted(common)}

def one_validation(runs):
    """Whether the losses of runs compare: by the number of tokens and the fingerprints of their
    shards."""
    return len({run.validated_on for run in runs}) < 2

# ---- Two sides -----------------------------------------------------------------------------------

def pairs_of(a, b):
    """(run of A, run of B) for each seed that both sides ran once."""
    tables = []
    for side in (a, b):
        seeds = Counter(run.seed for run in side.used)
        tables.append({run.seed: run for run in side.used if run.seed and seeds[run.seed] == 1})
    return [(run, tables[1][seed]) for seed, run in tables[0].items() if seed in tables[1]]

def test_that_speaks(comparison, key):
    return comparison["paired"][key] if comparison["speaks"] == "paired" else comparison[key]

def clock_is_wrong(run):
    """Whether clearly more time passed by a race's clock than the run's log says."""
    said, passed, _ = run.clock or (0, 0, 0)
    factor, seconds = CLOCK_BOUND
    return passed > factor * said + seconds

def tested(a, b, speaks, key):
    """The values of A and of B that a test takes: losses, seconds, or with the key "later" the
    seconds to B's final loss, which pairs tell. None where these do not compare."""
    if key != "seconds" and not comparable_losses(a, b):
        return [], []
    if key == "later":
        by_pairs = speaks == "paired" and comparable_times(a, b)
        return to_final_loss(pairs_of(a, b) if by_pairs else [])
    runs = list(zip(*pairs_of(a, b))) or [(), ()] if speaks == "paired" else (a.used, b.used)
    if key == "seconds" and any(map(clock_is_wrong, chain(*runs))):
        return [], []
    values = [[getattr(run, key) for run in side] for side in runs]
    return ([], []) if None in chain(*values) else values

def to_final_loss(pairs):
    """The seconds that A and B take to the final loss of B. In all pairs a nat is worth the same
    share of A's run, so that pairs of equal sides differ evenly to both sides, as e-values assume:
    the share that steps_later finds for the mean difference."""
    curve = curve_of([theirs for _, theirs in pairs])
    gaps = [ours.loss - theirs.loss for ours, theirs in pairs]
    gap = (fmean(gaps) if gaps else 0) or 1e-9  # where it is 0, the slope at the end
    later = steps_later(curve, gap)
    if later is None or any(map(clock_is_wrong, chain(*pairs))):
        return [], []
    share = later / curve[-1][0] / gap  # of the run
    return ([ours.seconds * (1 + share * gap) for (ours, _), gap in zip(pairs, gaps)],
            [theirs.seconds for _, theirs in pairs])

def differences(a, b, kind):
    """Rows of key, values in B, values in A for what tells the sides apart."""
    in_a = values_of(a.runs, kind)
    in_b = values_of(b.runs, kind)
    rows = [[key, in_b.get(key, [NOT_GIVEN]), in_a.get(key, [NOT_GIVEN])] for key in in_b | in_a]
    return [row for row in rows if row[1] != row[2]]

def comparable_losses(a, b):
    return one_validation(a.used + b.used)

def comparable_times(a, b):
    runs = a.used + b.used
    return len({run.timed_on for run in runs}) == 1 and not any(run.mixed for run in runs)

def compare(a, b, level=None):
    """What the tests say of two sides, and the decision. A level means that pairs were added until
    a difference was decided at it, so that e-values take the place of p-values."""
    pairs = pairs_of(a, b)
    by_seed = len(pairs) > 1 and 2 * len(pairs) >= min(len(a.used), len(b.used))
    found = {
        "hyperparameters": differences(a, b, "hyperparameters"),
        "environment": differences(a, b, "environment"),
        "paired": {"seeds": [run.seed for run, _ in pairs]},
        "no_effect": unchanged_losses(pairs),
        "speaks": "paired" if by_seed or level else "welch",  # by the seeds, never the outcome
        "level": level or ALPHA}
    of_sides, of_seeds = (difference, until_decided) if level else (welch, paired)
    for key in KEYS:
        found[key] = of_sides(*tested(a, b, "welch", key), found["level"])
        found["paired"][key] = of_seeds(*tested(a, b, "paired", key), found["level"])
    found["paired"]["steps"] = steps_of(pairs, found["paired"]["loss"])
    found["decision"] = "undecided"
    test = test_that_speaks(found, "loss")
    if comparable_losses(a, b) and not a.shared_seeds + b.shared_seeds:
        if is_sure(test, found["level"]):
            found["decision"] = "better" if test["difference"] < 0 else "worse"
        elif found["no_effect"] and len(pairs) > 1:
            found["decision"] = "no difference"
    later = test_that_speaks(found, "later")
    found["slower"] = (later["difference"] or 0) > 0 and is_sure(later, found["level"])
    return found

def steps_of(pairs, test):
    """A test's difference and interval in steps, by the mean curve of the baseline's runs: how many
    steps later the candidate has the baseline's loss; below 0 if it is earlier. None where the
    curve has no such loss, or the steps are not equal."""
    equal = len({run.steps for pair in pairs for run in pair}) == 1
    curve = curve_of([run for _, run in pairs]) if equal else []
    ends = [steps_later(curve, end) for end in test["interval"] or (None,)]
    return {"difference": steps_later(curve, test["difference"]),
            "interval": None if None in ends else tuple(ends)}

def curve_of(runs):
    """(step, mean loss) at each step at which all runs validate; none if their lengths differ."""
    equal = len({run.steps for run in runs}) == 1
    return [(step, fmean(losses)) for step, losses in losses_by_step(runs).items() if equal]

def steps_later(curve, difference):
    """With a gain of g nats, A is where B was when its loss was still g above its last one. None
    where the curve has no such loss, or its validations are too far apart to say where: more than a
    tenth of the run at its end, where the slope changes most, and a quarter before. (Training
    losses do not help: all seeds read the same batches, so the noise is in all curves.)"""
    if not difference or not curve:
        return difference if curve else None
    end, last = curve[-1]
    level = last + abs(difference)
    for (step, loss), (next_step, next_loss) in reversed(list(pairwise(curve))):
        if next_step - step > math.ceil(end / (10 if next_step == end else 4)):
            return None
        if loss >= level > next_loss:
            share = (loss - level) / (loss - next_loss)
            return math.copysign(end - step - share * (next_step - step), difference)
    return None

def unchanged_losses(pairs):
    """How many losses two sides of equal seeds have in common, where none of these differs."""
    logged = [[{(line.step, line.kind): line.loss for line in run.lines if line.kind}
               for run in pair] for pair in pairs]
    # A save adds a validation, and a race draws when its runs save.
    common = [[(a[key], b[key]) for key in a.keys() & b.keys()] for a, b in logged]
    if not all(common) or any(one != other for losses in common for one, other in losses):
        return None
    return sum(map(len, common)) or None

def differences_by_step(pairs, last):
    """Steps, rows [pairs, steps] of A - B in the validation loss, for pairs (run of A, run of B),
    and for each step the interval of the mean as the test of the last one has it, None where the
    pairs are too few. None where the pairs have no two steps in common, other data, or another
    number of steps."""
    runs = [run for pair in pairs for run in pair]
    if len({run.total for run in runs}) != 1 or not one_validation(runs):
        return None
    sides = [losses_by_step(runs) for runs in zip(*pairs)]
    steps = sorted(set(sides[0]) & set(sides[1]))
    if len(steps) < 2:
        return None
    a, b = (np.array([side[step] for step in steps]) for side in sides)
    test = paired if last["E"] is None else until_decided
    bands = [test([*row], [0.0] * len(row), last["level"])["interval"] for row in a - b]
    return steps, (a - b).T, bands
