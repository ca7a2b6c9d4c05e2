"""records/2026-11-26_evalue: null races, simulated in small."""

import numpy as np
import pytest
from conftest import ROOT

from records.tools import judge
from records.tools.load import load_script

simulate = load_script(ROOT / "records" / "2026-11-26_evalue" / "simulate.py", "simulate")


@pytest.mark.parametrize("rule, names, bound", [
    ("E", ["normal", "Cauchy"], 0.01),
    ("and bets on signs", [name for name in simulate.DISTRIBUTIONS
                           if "effect" not in name and "skewed" not in name], 0.01)])
def test_a_race_without_a_difference_is_seldom_decided(rule, names, bound):
    """In 2,000 races, three standard errors above the bound. E alone is too bold at two values."""
    for name in names:
        wrong = np.mean(simulate.decided_after(name, rule, 2000, 12) <= 12)
        assert wrong <= bound + 3 * (bound / 2000) ** 0.5, name
    assert np.mean(simulate.decided_after("two-valued", "E", 2000, 12) <= 12) > 0.04


def test_what_bets_on_signs_win():
    """Over all signs of eight differences, whatever their sizes, they win 1 on average; and all of
    one sign win 100."""
    signs = np.array(np.meshgrid(*[(-1, 1)] * 8)).reshape(8, -1).T
    for sizes in (np.ones(8), np.arange(1.0, 9.0), np.array([9, 1, 1, 3, 0.1, 7, 1, 2])):
        assert np.mean(judge.e_of_signs(signs * sizes)) == pytest.approx(1)
    assert judge.e_of_signs(np.ones(8)) >= 100 > judge.e_of_signs(np.ones(7))
    assert judge.e_of_signs(-3 * np.ones(8)) == judge.e_of_signs(np.ones(8))
    assert judge.e_of_signs(np.zeros(8)) == pytest.approx(1)
