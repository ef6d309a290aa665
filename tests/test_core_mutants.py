"""The list of planted faults fits the core as it is now. The faults themselves run in `make mutants`."""

import ast
from pathlib import Path

import pytest
from mutants_list import MUTANTS

TESTS = Path(__file__).parent
CORE = TESTS.parent / "minimind_core"


def test_at_least_thirty_with_names_of_their_own():
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names) >= 30


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_snippet_occurs_exactly_once(mutant):
    source = (CORE / mutant.file).read_text(encoding="utf-8")
    assert source.count(mutant.old) == 1
    assert mutant.new != mutant.old
    ast.parse(source.replace(mutant.old, mutant.new))
    assert mutant.tests and all((TESTS / f"test_core_{name}.py").is_file() for name in mutant.tests)
