"""The words of the product, in four figures with limits: three of the Python code, one of the pages' names.

`python -m tests.checks.words [folder]` prints them and the files that are furthest off; it exits 1 above a
limit. Celery, Django, httpx and procrastinate have 0 to 0.6, 0 to 8 and 0.3 to 1.5.
"""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.checks.house import product_files

MAX_OPENERS = 3.0
"""Per cent of docstrings that open like a clause: What, Whether, Who …"""
MAX_SPEECH = 10.0
"""Forms of tell, say and ask per 10,000 words of docstrings."""
MAX_NAMES = 2.0
"""Per cent of bound names that are a pronoun, an adverb or a participle alone."""
WORST_SHOWN = 12
_OPENER = re.compile(r"(What|Whether|Who|Whose|Where|How|Those|Which|The same|So many)\b")
_WORD = re.compile(r"[a-z']+")
_DECLARED = re.compile(
    r"\b(?:const|let|function|type|interface|class)\s+(?:(\w+)|[\[{]([^\]}=]*)[\]}])|\(([\w, ]+)\) =>"
)
"""A declaration in TypeScript: its name, the names that it takes out of a value, or an arrow's parameters."""
_SPEECH = frozenset(
    ("tell", "tells", "telling", "told", "say", "says", "saying", "said", "ask", "asks", "asking", "asked")
)
_PARTICIPLES = """
    told said asked kept made found known left wanted seen heard given taken gone begun going spare sparing
    leaving standing
"""
_PRONOUNS = """
    one what own other others former which who whose his its whole rest some those more every all such
"""
_ADVERBS = """
    there here about again elsewhere besides beside plainly whichever together way says go follows
    news wish wishes
"""
_NAMES = frozenset(f"{_PARTICIPLES}{_PRONOUNS}{_ADVERBS}".split())


@dataclass
class Words:
    """Docstrings and bound names of a tree, with the number of odd ones in each file."""

    docstrings: int = 0
    openers: int = 0
    words: int = 0
    speech: int = 0
    names: int = 0
    odd_names: Counter[str] = field(default_factory=Counter)
    page_names: int = 0
    odd_page_names: int = 0
    per_file: Counter[str] = field(default_factory=Counter)

    def add(self, path: str, tree: ast.Module) -> None:
        """Count one file."""
        docstrings = list(_docstrings(tree))
        words = [word for text in docstrings for word in _WORD.findall(text.lower())]
        names = [name.strip("_") for name in _bound_names(tree)]
        openers = sum(bool(_OPENER.match(text)) for text in docstrings)
        speech = sum(word in _SPEECH for word in words)
        odd_names = [name for name in names if name in _NAMES]
        self.docstrings += len(docstrings)
        self.openers += openers
        self.words += len(words)
        self.speech += speech
        self.names += len(names)
        self.odd_names.update(odd_names)
        self.per_file[path] += openers + speech + len(odd_names)

    def add_page(self, path: str, text: str) -> None:
        """Count the declared names of one file of the pages."""
        groups = (group for match in _DECLARED.findall(text) for group in match)
        names = [name.split(":")[-1].strip(" .") for group in groups if group for name in group.split(",")]
        odd_names = [name for name in names if name.lower() in _NAMES]
        self.page_names += len(names)
        self.odd_page_names += len(odd_names)
        self.odd_names.update(odd_names)
        self.per_file[path] += len(odd_names)

    def figures(self) -> list[tuple[str, float, float]]:
        """Return name, value and limit of each figure."""
        odd_names = self.odd_names.total() - self.odd_page_names
        return [
            ("openers, % of docstrings", 100 * self.openers / max(self.docstrings, 1), MAX_OPENERS),
            ("speech, per 10,000 words", 10_000 * self.speech / max(self.words, 1), MAX_SPEECH),
            ("names, % of bound names", 100 * odd_names / max(self.names, 1), MAX_NAMES),
            ("pages, % of declared names", 100 * self.odd_page_names / max(self.page_names, 1), MAX_NAMES),
        ]


def _docstrings(tree: ast.Module) -> Iterator[str]:
    """Yield each bare string of a body: docstrings, also those of attributes and constants."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            match statement:
                case ast.Expr(value=ast.Constant(value=str() as text)):
                    yield text.strip()


def _bound_names(tree: ast.Module) -> Iterator[str]:
    """Yield the names of functions, arguments and variables."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield node.name
                arguments = (*node.args.args, *node.args.kwonlyargs)
                yield from (argument.arg for argument in arguments if argument.arg not in ("self", "cls"))


def measure(root: Path) -> Words:
    """Count the product's modules and pages under `root`, without migrations and generated code."""
    words = Words()
    for path in product_files(root):
        words.add(path.relative_to(root).as_posix(), ast.parse(path.read_text(encoding="utf-8")))
    for path in sorted((root / "static" / "src").rglob("*.ts*")):
        if path.name not in ("schema.ts", "actions.ts"):
            words.add_page(path.relative_to(root).as_posix(), path.read_text(encoding="utf-8"))
    return words


def report(words: Words) -> list[str]:
    """Return the lines to print; the files that are furthest off only if a figure exceeds its limit."""
    figures = words.figures()
    lines = [f"{name:<26}{value:6.1f}  (at most {limit:g})" for name, value, limit in figures]
    if any(value > limit for _, value, limit in figures):
        worst = ", ".join(f"{path} {count}" for path, count in words.per_file.most_common(WORST_SHOWN))
        names = ", ".join(f"{name} {count}" for name, count in words.odd_names.most_common(WORST_SHOWN))
        lines += [f"furthest off: {worst}", f"names used most: {names}"]
    return lines


def main() -> int:
    """Print the report; return 1 if a figure exceeds its limit."""
    words = measure(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
    print("\n".join(report(words)))
    return int(any(value > limit for _, value, limit in words.figures()))


if __name__ == "__main__":
    sys.exit(main())
