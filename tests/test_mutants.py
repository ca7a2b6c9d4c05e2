"""The mistakes of mutants.py can be planted. (./run.sh test mutants plants them.)"""

import re

from conftest import ROOT
from mutants import MUTANTS

def test_the_mistakes_have_a_place():
    """In all sections. Each differs from the others, its text stands in the script once, and the
    test that should find it exists, as the only one of its name."""
    script = (ROOT / "train_gpt.py").read_text()
    assert {m.section for m in MUTANTS} == set(range(1, 11))
    assert len({(m.text, m.wrong) for m in MUTANTS}) == len(MUTANTS)
    for mutant in MUTANTS:
        assert script.count(mutant.text) == 1 and mutant.text != mutant.wrong, mutant.mistake
        tests = (ROOT / "tests" / mutant.file).read_text()
        found = re.findall(rf"\ndef test_\w*{mutant.test}", tests)
        assert len(found) == 1 or found and not mutant.test, mutant.mistake
