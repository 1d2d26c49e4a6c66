"""The mutants of `tests.mutants` fit the code, and a mutant that breaks it is noticed."""

from __future__ import annotations

import ast
import re
import shutil

import pytest

from tests.mutant_list import MUTANTS, Mutant
from tests.mutants import MARK, ROOT, Outcome, apply, judge, write_table


def test_there_are_enough_of_them():
    assert len(MUTANTS) >= 40
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_each_stands_in_the_code_once(tmp_path, mutant):
    (tmp_path / mutant.file).parent.mkdir(parents=True)
    shutil.copy(ROOT / mutant.file, tmp_path / mutant.file)
    before = apply(tmp_path, mutant)
    after = (tmp_path / mutant.file).read_text()
    assert ast.dump(ast.parse(before)) != ast.dump(ast.parse(after))
    assert all((ROOT / killer.partition("::")[0]).exists() for killer in mutant.killers)


def test_a_change_is_found_in_its_function_however_it_is_formatted(tmp_path):
    call = "return g(\n            x,\n            2 * self.y,\n        )\n"
    text = f"class A:\n    LIMIT = 3\n\n    def f(self, x):\n        {call}\n"
    path = tmp_path / "product.py"
    path.write_text(text + text.replace("class A", "class B"))
    apply(tmp_path, Mutant("call", "product.py", "kind", "B.f", "x, 2*self.y)", "x)", killers=()))
    apply(tmp_path, Mutant("limit", "product.py", "kind", "A.LIMIT", "3", "4", killers=()))
    found = ast.unparse(ast.parse(path.read_text()))
    assert re.findall(r"LIMIT = .|g\(.*", found) == ["LIMIT = 4", "g(x, 2 * self.y)", "LIMIT = 3", "g(x)"]
    for before in ("self", "sel", "3"):
        with pytest.raises(ValueError, match=r"stands [02] times in A\.f"):
            apply(tmp_path, Mutant("other", "product.py", "kind", "A.f", before, "", killers=()))


def test_a_mutant_is_killed_or_survives(tmp_path):
    (tmp_path / "product.py").write_text("def double(x):\n    return 2 * x  # twice\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu: none\n    full: none\n")
    (tmp_path / "test_product.py").write_text(
        "from product import double\n\n\ndef test_double():\n    assert double(3) == 6\n"
    )
    wrong = Mutant("thrice", "product.py", "wrong scale", "double", "2 * x", "3 * x", killers=("test_product.py",))
    outcome = judge(tmp_path, wrong, everything=False)
    assert (outcome.tier, outcome.killer) == ("small", "test_product.py::test_double")
    harmless = Mutant(
        "words", "product.py", "nothing", "double", "# twice", "# two times", killers=("test_product.py",)
    )
    assert judge(tmp_path, harmless, everything=False).tier == "survived"
    broken = Mutant(
        "syntax", "product.py", "nothing", "double", "return 2", "return return 2", killers=("test_product.py",)
    )
    assert judge(tmp_path, broken, everything=False).tier == "error"
    assert "return 2 * x" in (tmp_path / "product.py").read_text()


def test_the_table_stands_between_its_marks(tmp_path):
    page = tmp_path / "page.md"
    kept = f"| {MUTANTS[0].name} | `file.py` | kind | survived |"
    page.write_text(f"before\n{MARK[0]}\nold\n{kept}\n| gone | `file.py` | kind | `test` |\n{MARK[1]}\nafter\n")
    mutant = Mutant("name", "file.py", "kind", "f", "a", "b", killers=())
    write_table(page, [Outcome(mutant, "small", "tests/test_x.py::test_y[3]", 1.0)])
    text = page.read_text()
    assert (
        "old" not in text
        and "gone" not in text
        and kept in text
        and text.startswith("before")
        and text.endswith("after\n")
    )
    assert "| name | `file.py` | kind | `tests/test_x.py::test_y` |" in text
    assert "1 of 2 mutants" in text
