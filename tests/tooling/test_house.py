"""`tests/checks/house.py`: a planted cycle, double name and shared name are found, and nothing else is."""

import ast
from pathlib import Path

import pytest

from tests.checks import house


def trees(**modules: str) -> dict[str, ast.Module]:
    """Modules by name, `_` for the dots."""
    return {name.replace("_", "."): ast.parse(source) for name, source in modules.items()}


@pytest.mark.parametrize(
    "source",
    [
        "import nodes.b",
        "from nodes import b",
        "from nodes.b import thing",
        "from . import b",
        "from .b import thing",
        "def late():\n    from nodes import b",
        "try:\n    from nodes import b\nexcept ImportError:\n    pass",
        "if TYPE_CHECKING:\n    pass\nelse:\n    from nodes import b",
    ],
)
def test_two_modules_that_import_each_other_are_a_cycle(source: str) -> None:
    graph = house.imports(trees(nodes="", nodes_a=source, nodes_b="import nodes.a"))
    assert house.cycles(graph) == [["nodes.a", "nodes.b"]]


@pytest.mark.parametrize(
    "source",
    [
        "if TYPE_CHECKING:\n    from nodes import b",
        "if typing.TYPE_CHECKING:\n    from nodes import b",
        "from nodes import other",
        "import nodes",
        "import elsewhere",
    ],
)
def test_what_no_cycle_is(source: str) -> None:
    graph = house.imports(trees(nodes="", nodes_a=source, nodes_b="import nodes.a"))
    assert house.cycles(graph) == []


def test_a_package_that_imports_its_module_is_in_the_cycle() -> None:
    """The module goes through the package, which loads the module first."""
    graph = house.imports(trees(nodes="from nodes import a", nodes_a="from nodes import thing"))
    assert house.cycles(graph) == [["nodes", "nodes.a"]]


def test_a_long_cycle_is_one_and_two_cycles_are_two() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": {"d"}, "f": {"a"}}
    assert house.cycles(graph) == [["a", "b", "c"], ["d", "e"]]


def test_a_class_name_is_defined_once_in_an_app() -> None:
    """Nested ones count; another app may use the name; Django's own names are its habit."""
    found = house.doubles(
        {
            "nodes.a": ast.parse("class Twice: ...\nclass Once:\n    class Meta: ...\n"),
            "nodes.b": ast.parse("class Other:\n    class Twice: ...\n    class Meta: ...\n"),
            "operations.a": ast.parse("class Once: ...\n"),
            "localai_cluster.worker.a": ast.parse("class Server: ...\n"),
            "localai_cluster.embedded.a": ast.parse("class Server: ...\n"),
        }
    )
    assert found == {("nodes", "Twice"): ["nodes.a:1", "nodes.b:2"]}


BASE = """
class Task:
    def __init__(self):
        self._name = ""
    async def _run_step(self): ...
    def wake(self): ...
    def __repr__(self): ...
"""


@pytest.mark.parametrize(
    "source",
    [
        "from nodes.kit import Task\nclass Pass(Task):\n    async def _run_step(self): ...",
        "from nodes import kit\nclass Pass(kit.Task):\n    def _run_step(self): ...",
        "from nodes.package import Task as Base\nclass Pass(Base):\n    _run_step = None",
        "from nodes.kit import Task\nclass Middle(Task): ...\n"
        "class Pass(Middle[int]):\n    def start(self):\n        self._run_step: int = 1",
    ],
    ids=["imported", "of a module", "of a package", "grandchild"],
)
def test_a_private_name_of_a_base_class_is_not_used_again(source: str) -> None:
    """A rename once gave a method of `PeriodicTask` a name that two tasks had: they lost their retry."""
    package = "from nodes.kit import Task"
    found = house.collisions(trees(nodes_kit=BASE, nodes_package=package, nodes_a=source))
    assert found == ["nodes.a.Pass._run_step is also a name of its base class nodes.kit.Task"]


@pytest.mark.parametrize(
    "body",
    [
        "def wake(self): ...",
        "def __repr__(self): ...",
        "def go(self):\n        other._name = self._run_step\n        self._name += 1",
    ],
    ids=["public", "special", "only used"],
)
def test_what_a_subclass_may_define(body: str) -> None:
    source = f"from nodes.kit import Task\nclass Pass(Task):\n    {body}\nclass Other:\n    _name = 1"
    assert house.collisions(trees(nodes_kit=BASE, nodes_a=source)) == []


def test_all_findings_are_printed_and_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "nodes").mkdir()
    (tmp_path / "nodes" / "a.py").write_text("from nodes import b\n\nclass Same: ...\n")
    (tmp_path / "nodes" / "b.py").write_text("from nodes import a\n\nclass Same: ...\n")
    (tmp_path / "nodes" / "c.py").write_text("class Base:\n    _x = 1\nclass Sub(Base):\n    _x = 2\n")
    monkeypatch.setattr("sys.argv", ["house", str(tmp_path)])
    assert house.main() == 1
    assert capsys.readouterr().out.splitlines() == [
        "room   files   lines",
        "nodes      3      10",
        "all        3      10",
        "cycle: nodes.a <-> nodes.b",
        "nodes defines Same twice: nodes.a:3, nodes.b:3",
        "nodes.c.Sub._x is also a name of its base class nodes.c.Base",
        "1 import cycles, 1 class names defined twice, 1 private names shared with a base class",
    ]
