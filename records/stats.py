"""Statistics of runs: spreads, tests of a difference, their power, and the rules of the field.
compare.py puts their results into words. What too few values cannot say is None."""

import math
import warnings
from bisect import bisect_left

from records import logs

with logs.installed():
    import numpy as np
    from scipy import special, stats

ALPHA = 0.01                      # the speedrun's level of significance
POWER = 0.8                       # of ten true differences of this size, eight are shown
MOST_RUNS = 100_000
TRACK_MARGIN = 0.004              # of the optimizer track: 3.09 SDs of 0.0013, for p < 0.001
TRACK_LOSS_PER_STEP = 0.0045 / 100  # of the optimizer track: what a step less costs

# ---- Tests ---------------------------------------------------------------------------------------

def spread(values):
    """n, mean, SD and the 95 % interval of the mean (Student's t)."""
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
    """p of a one-sided t-test that the mean is below the target."""
    if target is None or len(set(values)) < 2:
        return None
    return float(stats.ttest_1samp(values, target, alternative="less").pvalue)

def difference(a, b, test=None, **options):
    """The difference of the means of a and b, with the 95 % interval and the two-sided p of one of
    SciPy's tests, where one is given."""
    found = {"difference": None, "interval": None, "p": None}
    if a and b:
        found["difference"] = float(np.mean(a) - np.mean(b))
    if test:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about values that are nearly the same
            result = test(a, b, **options)
            low, high = result.confidence_interval()
        if math.isfinite(result.pvalue):
            found |= {"interval": (float(low), float(high)), "p": float(result.pvalue)}
    return found

def welch(a, b):
    """By Welch's test, if one of the sides spreads."""
    if min(len(a), len(b)) < 2 or max(len(set(a)), len(set(b))) < 2:
        return difference(a, b)
    return difference(a, b, stats.ttest_ind, equal_var=False)

def paired(a, b):
    """By the t-test of the differences of pairs, with their SD."""
    sd = float(np.std(np.subtract(a, b), ddof=1)) if len(a) > 1 else None
    return difference(a, b, stats.ttest_rel if sd and sd > 1e-12 else None) | {"sd": sd}

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

def track_rule_for_two(a, b, steps_saved):
    """The optimizer track's for the losses of two results, where fewer steps count as a lower
    loss."""
    gain = float(np.mean(b) - np.mean(a)) + steps_saved * TRACK_LOSS_PER_STEP
    value = gain / math.sqrt(1 / len(a) + 1 / len(b))
    return {"value": value, "holds": round(value, 12) >= TRACK_MARGIN}
