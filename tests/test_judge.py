"""tools/judge.py: p-values and intervals against SciPy, e-values against integration."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import ROOT
from scipy import integrate, optimize
from scipy import stats as scipy_stats
from records.tools import judge
from records.tools.load import load_script

simulate = load_script(ROOT / "records" / "2026-11-26_evalue" / "simulate.py", "simulate")

def test_the_speedruns_rule_and_the_runs_that_it_takes():
    losses = [3.277, 3.279, 3.2785]
    for target in (3.28, 3.27):
        row = judge.speedrun_rule(losses, target)
        expected = scipy_stats.ttest_1samp(losses, target, alternative="less").pvalue
        assert row["p"] == pytest.approx(expected) and not row["holds"]
    values = np.linspace(-1, 1, 12)
    losses = list(3.279 + values * 0.0013 / np.std(values, ddof=1))
    row = judge.speedrun_rule(losses, 3.28)
    assert not row["holds"]
    assert judge.speedrun_rule([*losses, 3.279], 3.28)["holds"]
    for few in ([], [3.2], [3.2, 3.2]):
        assert judge.speedrun_rule(few, 3.28)["p"] is None

def test_spread_against_tables():
    out = judge.spread([2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0])
    # The first number is the 97.5 % point of t with 7 degrees of freedom.
    half = 2.364624 * 2.138090 / math.sqrt(8)
    assert (out["n"], out["mean"]) == (8, 5.0) and out["sd"] == pytest.approx(2.138090, abs=1e-6)
    assert out["interval"] == pytest.approx((5 - half, 5 + half), abs=1e-5)
    assert judge.spread([3.28]) == {"n": 1, "mean": 3.28, "sd": None, "interval": None}
    assert judge.spread([]) == {"n": 0, "mean": None, "sd": None, "interval": None}

@pytest.mark.filterwarnings("error")
def test_p_value_of_two_sides_by_welch_and_in_pairs():
    a = [3.10, 3.32, 3.51, 3.27]
    b = [3.12, 3.33, 3.54, 3.28]
    welch = judge.welch(a, b)
    assert welch["p"] == pytest.approx(scipy_stats.ttest_ind(a, b, equal_var=False).pvalue)
    assert welch["p"] > 0.8 and welch["interval"][0] < -0.0175 < welch["interval"][1]
    test = scipy_stats.ttest_1samp(np.subtract(a, b), 0)
    paired = judge.paired(a, b)
    assert paired["p"] == pytest.approx(test.pvalue) and paired["p"] < 0.05
    for level in (0.01, 0.05):  # the decision's: 0 lies outside where p is below the level
        interval = judge.paired(a, b, level)["interval"]
        assert interval == pytest.approx(tuple(test.confidence_interval(1 - level)))
        assert (interval[1] < 0) == (paired["p"] < level)
    assert (paired["n"], paired["lower"]) == (4, 4)
    assert paired["sd"] == pytest.approx(np.std([0.02, 0.01, 0.03, 0.01], ddof=1))
    assert paired["difference"] == welch["difference"] == pytest.approx(-0.0175)

@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("a, b, difference", [
    ([], [], None), ([], [1.0], None), ([1.0], [2.0], -1), ([1.0, 1.0], [2.0, 2.0], -1)])
def test_where_there_is_no_spread_there_is_no_p_value(a, b, difference):
    tests = [judge.welch(a, b), *([judge.paired(a, b)] if len(a) == len(b) else [])]
    for found in tests:
        assert (found["difference"], found["interval"], found["p"]) == (difference, None, None)
    assert judge.paired([1.0, 2.0], [2.0, 3.0])["p"] is None  # pairs that all differ by as much

def some_differences(n, mean):
    values = np.random.RandomState(n).standard_normal(n)
    return (values - values.mean()) / values.std(ddof=1) * 0.01 + mean

@pytest.mark.parametrize("n, mean", [(2, 0.02), (3, -0.007), (5, 0.03), (8, 0.0), (12, -0.011)])
def test_an_e_value_is_the_bayes_factor_of_the_t_test(n, mean):
    """The density of t where the effect is normal, by numerical integration, over that at 0."""
    found = some_differences(n, mean)
    t = mean / 0.01 * math.sqrt(n)
    def density(effect):
        noncentral = scipy_stats.nct.pdf(t, n - 1, math.sqrt(n) * effect)
        return noncentral * scipy_stats.norm.pdf(effect, 0, math.sqrt(judge.PRIOR))
    expected = integrate.quad(density, -20, 20, points=[0, mean / 0.01], limit=500)[0]
    expected /= scipy_stats.t.pdf(t, n - 1)
    assert judge.e_value(found) == pytest.approx(expected, rel=1e-6)
    assert judge.e_value([found, 7 * found]) == pytest.approx([expected] * 2)

def test_the_ends_of_an_e_value():
    assert judge.e_value([0.3]) == pytest.approx(1) and judge.e_value([0.0] * 6) == 0.2
    width = 1 + 5 * judge.PRIOR
    assert judge.e_value([0.5] * 5) == pytest.approx(width**2)  # as surely as five pairs can say it
    assert judge.e_value([0.5] * 4) < 100

@pytest.mark.parametrize("n", [8, 13, 30])
def test_a_confidence_sequence_has_the_means_that_are_not_excluded(n):
    found = some_differences(n, 0.004)
    low, high = judge.confidence_sequence(found, 0.01)
    for start, bound in ((-100.0, low), (100.0, high)):
        root = optimize.brentq(lambda mean: judge.e_of_pairs(found - mean) - 100, start, 0.004)
        assert bound == pytest.approx(root)
    assert judge.confidence_sequence(found[:7], 0.01) is None

@pytest.mark.parametrize("rule, names", [
    ("E", ["normal", "Cauchy"]), ("and bets on signs", [name for name in simulate.DISTRIBUTIONS
                           if "effect" not in name and "skewed" not in name])])
def test_a_race_without_a_difference_is_seldom_decided(rule, names):
    """In 2,000 races, three standard errors above the bound. E alone is too bold at two values."""
    for name in names:
        wrong = np.mean(simulate.decided_after(name, rule, 2000, 12) <= 12)
        assert wrong <= 0.01 + 3 * (0.01 / 2000) ** 0.5, name
    assert np.mean(simulate.decided_after("two-valued", "E", 2000, 12) <= 12) > 0.04
    for name, medians in (("effect of 2", (7, 8, 9)), ("effect of 1", range(15, 22))):
        assert np.median(simulate.decided_after(name, "E", 1000)) in medians

def test_what_bets_on_signs_win():
    """1 on average over all signs, whatever the sizes, and 100 if all have one sign."""
    signs = np.array(np.meshgrid(*[(-1, 1)] * 8)).reshape(8, -1).T
    for sizes in (np.ones(8), np.arange(1.0, 9.0), np.array([9, 1, 1, 3, 0.1, 7, 1, 2])):
        assert np.mean(judge.e_of_signs(signs * sizes)) == pytest.approx(1)
    assert judge.e_of_signs(np.ones(8)) >= 100 > judge.e_of_signs(np.ones(7))
    assert judge.e_of_signs(-3 * np.ones(8)) == judge.e_of_signs(np.ones(8))
    assert judge.e_of_signs(np.zeros(8)) == pytest.approx(1)

def test_the_smallest_effect_is_shown_by_half_of_the_races():
    """Of other races than those that it was found by."""
    noise = np.random.default_rng(7).normal(size=(2000, 12))
    for most, level in ((8, 0.01), (12, 0.01), (12, 0.1)):
        found = noise[:, :most] + judge.smallest_effect(most, level)
        looks = [judge.e_of_pairs(found[:, :n]) >= 1 / level for n in range(1, most + 1)]
        assert 0.42 < np.mean(np.any(looks, axis=0)) < 0.58
    assert judge.smallest_effect(7, 0.01) is None

def test_losses_are_unchanged_if_those_in_common_are():
    """A race draws when its runs save, and a save adds a validation."""
    def run(*losses):
        lines = [SimpleNamespace(step=step, kind="val_loss", loss=loss) for step, loss in losses]
        return SimpleNamespace(lines=lines)
    one, other = run((0, 5.0), (3, 4.0), (9, 3.0)), run((0, 5.0), (4, 3.9), (9, 3.0))
    assert judge.unchanged_losses([(one, other), (one, one)]) == 5
    assert judge.unchanged_losses([(one, other), (one, run((9, 3.1)))]) is None
    assert judge.unchanged_losses([]) is judge.unchanged_losses([(one, run((5, 1.0)))]) is None
