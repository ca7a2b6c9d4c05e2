"""The mistakes of mutants.py can be planted. (./run.sh test mutants plants them.)"""

import re

from conftest import ROOT
from mutants import MUTANTS

def test_the_mistakes_have_a_place():
    """In all sections of the script and in all programs. Each differs from the others, its text
    stands in its program once, and the test that should find it exists, as the only one of its
    name."""
    programs = [ROOT / "run.sh", *ROOT.glob("data/*.py"), *ROOT.glob("records/tools/*.py")]
    programs = {str(path.relative_to(ROOT)) for path in programs if path.stem != "__init__"}
    assert {m.section for m in MUTANTS if m.program == "train_gpt.py"} == set(range(1, 11))
    assert {m.program for m in MUTANTS if not m.section} == programs
    assert len({(m.program, m.text, m.wrong) for m in MUTANTS}) == len(MUTANTS)
    for mutant in MUTANTS:
        times = (ROOT / mutant.program).read_text().count(mutant.text)
        assert times == 1, (f"the text of the mistake '{mutant.mistake}' stands {times} times in "
                            f"{mutant.program}, not once: change it in tests/mutants.py too")
        assert mutant.text != mutant.wrong, mutant.mistake
        tests = (ROOT / "tests" / mutant.file).read_text()
        found = re.findall(rf"\ndef test_\w*{mutant.test}", tests)
        assert len(found) == 1 or found and not mutant.test, mutant.mistake
