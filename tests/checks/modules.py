"""The size of the product: modules, their length, those with one importer, code lines.

`python -m tests.checks.modules [folder]` prints the figures beside their goals; it never fails. Packages
(`__init__.py`), migrations and generated code are no modules.
"""

import ast
import io
import statistics
import sys
import tokenize
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.checks.house import imports, product_files

MIN_MEDIAN = 120
MAX_SINGLE_IMPORTER = 15.0
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


@dataclass(frozen=True)
class Sizes:
    """The figures of a tree."""

    modules: int
    median_length: float
    single_importer: int
    """Modules that exactly one other module imports."""
    code_lines: int
    """Lines without blanks, comments and docstrings."""

    @property
    def single_importer_share(self) -> float:
        """Per cent of the modules that one module imports."""
        return 100 * self.single_importer / max(self.modules, 1)


def measure(root: Path) -> Sizes:
    """Read the product under `root`."""
    texts = {path: path.read_text(encoding="utf-8") for path in product_files(root)}
    names = {path: ".".join(path.relative_to(root).with_suffix("").parts) for path in texts}
    trees = {name.removesuffix(".__init__"): ast.parse(texts[path]) for path, name in names.items()}
    importers = Counter(target for targets in users(trees).values() for target in targets)
    modules = [path for path in texts if path.name != "__init__.py"]
    return Sizes(
        len(modules),
        statistics.median([len(texts[path].splitlines()) for path in modules] or [0]),
        sum(importers[names[path]] == 1 for path in modules),
        sum(map(code_lines, texts.values())),
    )


def users(trees: Mapping[str, ast.Module]) -> dict[str, set[str]]:
    """Return module -> modules that it uses: a name of a package counts for the module that defines it.

    The package that re-exports the name does not count as its user.
    """
    graph = imports(trees)
    packages = {name.rpartition(".")[0] for name in trees} & trees.keys()
    definers = {
        (package, name): target
        for package in packages
        for name, target in _imported_names(trees[package].body, trees)
    }
    for package, _ in definers:
        graph[package] -= {target for (other, _), target in definers.items() if other == package}
    for module, tree in trees.items():
        for name, package in _imported_names(ast.walk(tree), trees):
            if target := definers.get((package, name)):
                graph[module].add(target)
    return graph


def _imported_names(nodes: Iterable[ast.AST], modules: Container[str]) -> Iterator[tuple[str, str]]:
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module and node.module in modules:
            for alias in node.names:
                yield alias.name, node.module


def code_lines(text: str) -> int:
    """Return the number of lines that hold code; a docstring is any bare string of a body."""
    documentation = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - documentation)


def report(sizes: Sizes) -> list[str]:
    """Return the lines to print."""
    share = f"{sizes.single_importer_share:.0f} % ({sizes.single_importer})"
    return [
        f"{'modules':<26}{sizes.modules:6}",
        f"{'median module length':<26}{sizes.median_length:6.0f}  (goal: at least {MIN_MEDIAN})",
        f"{'with one importer':<26}{share:>6}  (goal: at most {MAX_SINGLE_IMPORTER:g} %)",
        f"{'code lines':<26}{sizes.code_lines:6}",
    ]


def main() -> int:
    """Print the report; return 0."""
    print("\n".join(report(measure(Path(sys.argv[1] if len(sys.argv) > 1 else ".")))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
