"""Schedules at their corners: the window's growth, the learning rate, Muon's momentum."""

from dataclasses import replace
import pytest
from train_gpt import PRESETS, lr_factor, muon_momentum, window_tokens

pytestmark = pytest.mark.quick
HP = PRESETS["speedrun"]

def test_the_window_grows_from_start_to_end_in_whole_blocks():
    windows = [window_tokens(step, HP) for step in range(HP.num_iterations + 1)]
    assert windows[0] == windows[1] == 128 and windows[-1] == 1792
    assert sorted(set(windows)) == list(range(128, 1793, 128)) and windows == sorted(windows)
    # The record's own formula: ceil(1728 * progress / 128) blocks, at least one.
    assert windows == [max(1, -(-1728 * step // (1770 * 128))) * 128 for step in range(1771)]
    fixed = replace(HP, window_start=1024, window_end=1024)
    assert {window_tokens(step, fixed) for step in (0, 1, 900, 1770)} == {1024}
    assert window_tokens(0, replace(HP, num_iterations=0)) == 128

def test_learning_rate_is_flat_then_falls_to_the_floor():
    scales = [lr_factor(step, HP) for step in range(HP.num_iterations + 1)]
    start = HP.num_iterations * 6 // 10
    assert set(scales[:start + 1]) == {1.0} and scales[start + 1] < 1
    assert scales[-1] == pytest.approx(0.1)
    assert scales[(start + 1770) // 2] == pytest.approx(0.55, abs=0.001)
    falls = [a - b for a, b in zip(scales[start:], scales[start + 1:])]
    assert max(falls) - min(falls) < 1e-9
    assert lr_factor(1770, replace(HP, cooldown_frac=0.0)) == 1.0
    assert lr_factor(0, replace(HP, cooldown_frac=1.0, lr_floor=0.0)) == 1.0
    assert lr_factor(1770, replace(HP, cooldown_frac=1.0, lr_floor=0.0)) == 0.0

def test_momentum_warms_up_and_stays():
    momenta = [muon_momentum(step, HP) for step in (0, 150, 300, 1770)]
    assert momenta == pytest.approx([0.85, 0.9, 0.95, 0.95])
    assert muon_momentum(0, replace(HP, muon_momentum_steps=0)) == 0.95

def test_the_short_preset_is_the_speedruns_model_and_step():
    """... so that it compiles the same program, with the momentum's warmup in proportion."""
    short = PRESETS["short"]
    names = "name", "num_iterations", "muon_momentum_steps", "save_every", "train_files"
    assert replace(HP, **{name: getattr(short, name) for name in names}) == short
    assert short.muon_momentum_steps / short.num_iterations == pytest.approx(300 / 1770, rel=0.01)
