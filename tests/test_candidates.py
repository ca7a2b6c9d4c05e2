"""records/2026-11-28_candidates: the loss kernel of its patch, interpreted on a CPU, and the whole
model with it, compiled as for an H100. A copy of train_gpt.py for each choice of tiles."""

import pytest
from conftest import ROOT, launch
from test_interpreted import why_not

FOLDER = ROOT / "records" / "2026-11-28_candidates"

@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@pytest.mark.parametrize("case, words", [
    ("equal", "gradient of w: kernel from today's 0.0"),
    pytest.param("compiled", "transpose_bytes is in the generated program",
                 marks=pytest.mark.full)])
def test_the_loss_kernel_equals_todays_head_and_loss(case, words, tmp_path):
    done = launch(case, script=FOLDER / "check.py", TORCHINDUCTOR_CACHE_DIR=str(tmp_path),
                  TRITON_CACHE_DIR=str(tmp_path))
    assert words in done.stdout, done.stdout

def test_each_choice_of_tiles_is_a_copy_that_differs_in_one_call(tmp_path):
    source = (ROOT / "train_gpt.py").read_text()
    (tmp_path / "train_gpt.py").write_text(source)
    launch(script=FOLDER / "tiles.py", cwd=tmp_path)
    copies = [path.read_text() for path in tmp_path.glob("tile_*.py")]
    assert len(copies) == 4
    for copy in copies:
        call, added = (row for row in copy.splitlines() if row not in source.splitlines())
        assert "block_mask=mask" in call and added.strip().startswith("kernel_options={")
        assert copy.count("\n") == 1 + source.count("\n")
