"""`tests/checks/words.py`, `modules.py` and `trip.py`: planted modules are counted, and only what counts."""

import ast
import sys
from pathlib import Path
from typing import Any

from tests.checks import modules, trip, words

SOURCE = '''"""Whether this opens badly, and says so."""

LIMIT = 3
"""Return is fine."""


def made(one, nodes, *, self=None):
    """Return the nodes."""
    found = nodes  # what is found
    return found


class Node:
    def label(self):
        return "told"
'''


def test_words_of_docstrings_and_bound_names() -> None:
    """Three of seven names, one of three docstrings, one of twelve words."""
    counted = words.Words()
    counted.add("a.py", ast.parse(SOURCE))
    assert (counted.openers, counted.docstrings, counted.speech) == (1, 3, 1)
    assert counted.odd_names == {"made": 1, "one": 1, "found": 1}
    assert counted.names == 6
    assert counted.per_file == {"a.py": 5}
    assert "furthest off: a.py 5" in words.report(counted)


def test_declared_names_of_the_pages() -> None:
    """A declaration, the names that it takes out of a value, and an arrow's parameters."""
    counted = words.Words()
    counted.add_page("a.ts", "const told = 1;\nconst { a: found, b } = x;\nx.map((one, at) => one.told);\n")
    assert (counted.page_names, counted.odd_page_names) == (5, 3)
    assert counted.odd_names == {"told": 1, "found": 1, "one": 1}


def test_code_lines_leave_out_blanks_comments_and_docstrings() -> None:
    assert modules.code_lines(SOURCE) == 7
    assert modules.code_lines("x = (\n    1,\n    # why\n    2,\n)\n") == 4


def test_sizes_of_a_planted_tree(tmp_path: Path) -> None:
    package = tmp_path / "nodes"
    (package / "migrations").mkdir(parents=True)
    files = {"__init__": "", "a": "import nodes.b\n", "b": "x = 1\n\n\n", "c": "import nodes.b\n"}
    for name, text in {**files, "d": "import nodes.a\n", "migrations/e": "import nodes.a\n"}.items():
        (package / f"{name}.py").write_text(text)
    sizes = modules.measure(tmp_path)
    assert sizes == modules.Sizes(modules=4, median_length=1, single_importer=1, code_lines=4)
    assert modules.report(sizes)[2].split()[-8:-6] == ["25", "%"]


def test_a_name_that_a_package_re_exports_is_used_from_its_module() -> None:
    """`a` has two users, `b` one, which takes it from the package; the package itself uses neither."""
    sources = {
        "nodes": "",
        "nodes.models": "from nodes.models.a import A\nfrom nodes.models.b import B\n",
        "nodes.models.a": "A = 1\n",
        "nodes.models.b": "B = 1\n",
        "nodes.c": "from nodes.models import A, B\n",
        "nodes.d": "from nodes.models.a import A\n",
    }
    graph = modules.users({name: ast.parse(text) for name, text in sources.items()})
    assert [name for name, used in graph.items() if "nodes.models.a" in used] == ["nodes.c", "nodes.d"]
    assert [name for name, used in graph.items() if "nodes.models.b" in used] == ["nodes.c"]
    assert graph["nodes.models"] == set()


def test_a_recording_has_functions_files_and_mutual_pairs() -> None:
    """Functions of tests and of libraries are left out."""
    recording = trip.Recording()
    sys.setprofile(recording.profile)
    try:
        from localai_cluster.kit import names

        names.key("Node")
    finally:
        sys.setprofile(None)
    assert recording.files == ["localai_cluster/kit/names.py"]
    assert ("localai_cluster/kit/names.py", "key") in recording.functions
    recording.calls.update({("a", "b"): None, ("b", "a"): None, ("b", "c"): None})
    assert recording.mutual_pairs == [("a", "b")]


def test_an_import_within_a_recording_does_not_count() -> None:
    """The second of two trips in a process has the same files as the first, which alone imports."""
    text = "class Late:\n    pass\n\ndef create():\n    return Late()\n\ncreate()\n"
    body, module = compile(text, str(trip.ROOT / "nodes" / "late.py"), "exec"), dict[str, Any]()
    recordings = []
    for call in (lambda: exec(body, module), lambda: module["create"]()):
        recordings.append(trip.Recording())
        sys.setprofile(recordings[-1].profile)
        try:
            call()
        finally:
            sys.setprofile(None)
    assert [list(recording.functions) for recording in recordings] == [[], [("nodes/late.py", "create")]]


def test_the_tests_of_all_trips_exist_once() -> None:
    for test in (test for planned in trip.TRIPS for test in planned.tests):
        assert trip.find_test(test).endswith(f"::{test}")
