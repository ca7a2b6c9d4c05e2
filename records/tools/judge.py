"""Statistics of runs: spreads, tests of a difference, also of pairs that are added until it is
decided, their power, and the rules of the field.
compare.py puts their results into words. What too few values cannot say is None."""

import math
import warnings
from bisect import bisect_left
from collections import Counter

from records.tools.load import installed
from records.tools.logs import number

with installed():
    import numpy as np
    from scipy import special, stats

ALPHA = 0.01                      # the speedrun's level of significance
PRIOR = 4.0                       # see e_value
POWER = 0.8                       # of ten true differences of this size, eight are shown
MOST_RUNS = 100_000
TRACK_MARGIN = 0.004              # of the optimizer track: 3.09 SDs of 0.0013, for p < 0.001

# ---- Tests ---------------------------------------------------------------------------------------

def spread(values):
    """n, mean, SD and the 95 % interval of the mean (Student's t)."""
    n = len(values)
    found = {"n": n, "mean": None, "sd": sd_of(values), "interval": None}
    if n > 0:
        found["mean"] = float(np.mean(values))
    if n > 1:
        half = float(stats.t.ppf(0.975, n - 1)) * found["sd"] / math.sqrt(n)
        found["interval"] = (found["mean"] - half, found["mean"] + half)
    return found

def p_below(values, target):
    """p of a one-sided t-test that the mean is below the target."""
    if target is None or len(set(values)) < 2:
        return None
    return float(stats.ttest_1samp(values, target, alternative="less").pvalue)

def sd_of(values):
    return float(np.std(values, ddof=1)) if len(values) > 1 else None

def difference(a, b, test=None, **options):
    """The difference of the means of a and b, with the 95 % interval and the two-sided p of one of
    SciPy's tests, where one is given."""
    found = {"difference": None, "interval": None, "p": None, "E": None, "adjusted": None}
    if a and b:
        found["difference"] = float(np.mean(a) - np.mean(b))
    if test:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about values that are nearly the same
            result = test(a, b, **options)
            low, high = result.confidence_interval()
        if math.isfinite(result.pvalue):
            p = float(result.pvalue)
            found |= {"interval": (float(low), float(high)), "p": p, "adjusted": p}
    return found

def welch(a, b):
    """By Welch's test, if one of the sides spreads."""
    if min(len(a), len(b)) < 2 or max(len(set(a)), len(set(b))) < 2:
        return difference(a, b)
    return difference(a, b, stats.ttest_ind, equal_var=False)

def paired(a, b):
    """By the t-test of the differences of pairs, with their SD."""
    sd = sd_of(np.subtract(a, b))
    return difference(a, b, stats.ttest_rel if sd and sd > 1e-12 else None) | {"sd": sd}

def differences_by_step(pairs):
    """Steps, and rows [pairs, steps] of A - B in the validation loss, for pairs (run of A, run of
    B). None where they have no two steps in common, or do not run to the same one: on the way,
    other schedules say little."""
    if len({run.total for pair in pairs for run in pair}) != 1:
        return None
    tables = [[{line.step: line.loss for line in run.validations if line.loss is not None}
               for run in pair] for pair in pairs]
    steps = sorted(set.intersection(*(set(table) for pair in tables for table in pair)))
    if len(steps) < 2:
        return None
    return steps, np.array([[a[step] - b[step] for step in steps] for a, b in tables])

def interval_of_pairs(differences, level=None):
    """The interval of the mean of differences of pairs: 95 % by the t-test, or where pairs were
    added until decided at a level, the confidence sequence. None where the pairs are too few."""
    if level:
        return confidence_sequence(differences, level)
    return paired(list(differences), [0.0] * len(differences))["interval"]

def adjusted(values):
    """p-values of several comparisons, adjusted for their number (Holm, 1979): with a probability
    of 1 - level, none of those that stay below the level is wrong."""
    order = np.argsort(values)
    steps = np.sort(values) * np.arange(len(values), 0, -1)
    return np.minimum(1, np.maximum.accumulate(steps))[np.argsort(order)].tolist()

def p_value(test):
    """p, or 1 / E, which is a p-value too."""
    return test["p"] if test["E"] is None else min(1, 1 / test["E"])

def is_sure(test, level=ALPHA):
    """Whether a test shows its difference: for a gain, which is a lower value, after the adjustment
    for the number of candidates. To call one worse by chance costs no more than that idea."""
    p = test["adjusted"] if (test["difference"] or 0) < 0 else p_value(test)
    return p is not None and p <= level

# ---- Runs and pairs of runs ----------------------------------------------------------------------

def losses_by_step(runs):
    """step -> the losses of all runs, for the steps at which all of them have one."""
    tables = [{line.step: line.loss for line in run.validations if line.loss is not None}
              for run in runs]
    common = set.intersection(*map(set, tables)) if tables else set()
    return {step: [table[step] for table in tables] for step in sorted(common)}

def pairs_of(a, b):
    """(run of A, run of B) for each seed that both sides ran once."""
    tables = []
    for side in (a, b):
        seeds = Counter(run.seed for run in side.used)
        tables.append({run.seed: run for run in side.used if run.seed and seeds[run.seed] == 1})
    return [(run, tables[1][seed]) for seed, run in tables[0].items() if seed in tables[1]]

def test_that_speaks(comparison, key):
    return comparison["paired"][key] if comparison["speaks"] == "paired" else comparison[key]

# ---- Until decided -------------------------------------------------------------------------------
# Whoever looks at a p-value after each pair, and stops at the first small one, is wrong far more
# often than it says. An e-value may be looked at any number of times: where there is no difference,
# it ever reaches 1 / level with a probability of at most the level (Ville's inequality).

def log_e(share, n):
    """The logarithm of the e-value of n differences; see e_value."""
    width = 1 + n * PRIOR
    return -np.log(width) / 2 - n / 2 * np.log1p(-share * (1 - 1 / width))

def share_of_mean(differences):
    """The share of the mean in the mean square of differences [..., n]: t^2 / (n - 1 + t^2)."""
    square = np.mean(np.square(differences), axis=-1)
    return np.mean(differences, axis=-1) ** 2 / np.where(square > 0, square, 1)

def e_value(differences):
    """The e-value of the mean of n differences of pairs [..., n]. 1 / E is a p-value at every look.

    It is the Bayes factor of the t-test (Gönen et al., The American Statistician, 2005) for a mean
    that is normal around 0 with a variance of PRIOR, in units of the differences' own spread, which
    has a right-Haar prior. As pairs are added, its values are a test martingale (Pérez-Ortiz et
    al., arXiv:2208.07610). At most it is (1 + n PRIOR) ** ((n - 1) / 2), so 100 takes 5 pairs."""
    return np.exp(log_e(share_of_mean(differences), np.shape(differences)[-1]))

def confidence_sequence(differences, level):
    """The means that e_value(differences - mean) < 1 / level leaves possible. With a probability of
    1 - level, the true mean lies in all such intervals, after however many pairs. None where the
    pairs are too few for a bound."""
    n = len(differences)
    width = 1 + n * PRIOR
    share = (1 - (level * width**-0.5) ** (2 / n)) / (1 - 1 / width)  # at which E is 1 / level
    if share >= 1:
        return None
    mean = float(np.mean(differences))
    half = float(np.std(differences)) * math.sqrt(share / (1 - share))
    return mean - half, mean + half

def until_decided(a, b, level):
    """The test of pairs whose number was not fixed beforehand, with the SD of the differences."""
    if not a:
        return difference(a, b) | {"sd": None, "needed": None}
    differences = np.subtract(a, b)
    E = float(e_value(differences))
    return difference(a, b) | {"E": E, "adjusted": min(1, 1 / E), "sd": sd_of(differences),
                               "interval": confidence_sequence(differences, level),
                               "needed": pairs_until_decided(differences, level)}

def pairs_until_decided(differences, level):
    """How many pairs would reach E = 1 / level, if their mean and spread stayed what they are; None
    if more than MOST_RUNS."""
    share = share_of_mean(differences)
    decided = log_e(share, np.arange(1, MOST_RUNS)) >= -math.log(level)
    return int(np.argmax(decided)) + 1 if decided.any() else None

# ---- Power ---------------------------------------------------------------------------------------

def detectable(se, df):
    """The true difference that a two-sided t-test of this standard error shows at p < ALPHA with a
    chance of POWER (by Student's noncentral t)."""
    return float(se * special.nctdtrinc(df, 1 - POWER, stats.t.ppf(1 - ALPHA / 2, df)))

def welch_error(a, b, n, m):
    """Standard error and degrees of freedom of Welch's test, of n runs that spread like a against
    m like b."""
    parts = (np.var(a, ddof=1) / n, np.var(b, ddof=1) / m)
    rest = parts[0] ** 2 / (n - 1) + parts[1] ** 2 / (m - 1)
    return math.sqrt(sum(parts)), sum(parts) ** 2 / rest if rest else 1

def power(a, b, is_paired):
    """The difference that these runs would show in 4 cases of 5; and the fewest runs a side, or
    pairs, that would show the one seen."""
    seen = abs(np.mean(a) - np.mean(b))
    differences = np.subtract(a, b) if is_paired else None

    def error_of(n, m):
        if is_paired:
            return np.std(differences, ddof=1) / math.sqrt(n), n - 1
        return welch_error(a, b, n, m)

    def shows(n):
        return detectable(*error_of(n, n)) <= seen

    now = error_of(len(a), len(b))
    if now[0] < 1e-12:
        return {"detectable": None, "needed": None}
    needed = bisect_left(range(MOST_RUNS), True, lo=2, key=shows) if shows(MOST_RUNS) else None
    return {"detectable": detectable(*now), "needed": needed}

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

RULES = {
    "speedrun": "speedrun's rule, a mean below {:g} at p < 0.01 (one-sided t-test): p = {}",
    "optimizer track": "optimizer track's rule, ({:g} - mean) * sqrt(n) >= 0.004, for an SD of "
                       "0.0013: {}",
}

def rule_lines(side, target):
    """What the rules of the field say of a side."""
    if target is None:
        return ["no target: these runs have a vocabulary of their own (--target sets one)"]
    lines = []
    for row in side.rules:
        text = RULES[row["rule"]].format(target, number(row["value"], ".2g"))
        text += ", holds" if row["holds"] else ", does not hold"
        if row["runs_needed"]:
            text += f"; it takes {row['runs_needed']} runs of this mean"
        if row["first"] is not None:
            text += f"; first holds at step {row['first']}"
        lines.append(text)
    return lines
