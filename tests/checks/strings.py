"""Every string that people see, in one file: `python -m tests.checks.strings` writes `build/strings.txt`.

It reads the pages (text, attributes and literals), the terminal, the admin and the answers of the server
(literals of the product without docstrings, log messages and SQL), the Grafana boards and the API document.
A line has the place and the text; a changing part is `{}`. Read it against the words of the field.
"""

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from localai_cluster.embedded import build
from tests.checks.house import product_files

ROOT = Path(__file__).resolve().parents[2]
OUTPUT = ROOT / "build" / "strings.txt"
_SQL = re.compile(r"\s*(SELECT|INSERT|UPDATE|DELETE|WITH|CREATE|ALTER|DROP|LOCK|SET|WHERE|FROM|AND|ON)\b")
_LOGS = frozenset(("debug", "info", "warning", "error", "exception", "critical", "log"))
_VISIBLE_KEYS = frozenset(("title", "description", "summary", "legendFormat", "label"))
_PAGES = r"""
const ts = require("typescript"), fs = require("node:fs");
for (const file of process.argv.slice(1)) {
  const source = ts.createSourceFile(file, fs.readFileSync(file, "utf8"), ts.ScriptTarget.Latest, true);
  const print = (node, text) => {
    const line = source.getLineAndCharacterOfPosition(node.getStart(source)).line + 1;
    const flat = text.replace(/\s+/g, " ").trim();
    if (/[A-Za-z]{2}/.test(flat)) console.log(`${file}:${line}\t${flat}`);
  };
  const hidden = (node) => ts.isImportDeclaration(node) || ts.isLiteralTypeNode(node)
    || (ts.isJsxAttribute(node) && /^(className|to|href|type|id|data-.*)$/.test(node.name.getText(source)));
  const walk = (node) => {
    if (hidden(node)) return;
    if (ts.isJsxText(node)) print(node, node.text);
    else if (ts.isTemplateExpression(node))
      print(node, node.head.text + node.templateSpans.map((span) => "{}" + span.literal.text).join(""));
    else if (ts.isStringLiteralLike(node) && /^[A-Z“]|\s/.test(node.text)) print(node, node.text);
    ts.forEachChild(node, walk);
  };
  walk(source);
}
"""


def of_pages() -> Iterator[str]:
    """Yield the lines of the pages."""
    static = ROOT / "static"
    files = sorted(
        path.relative_to(static).as_posix()
        for path in (static / "src").rglob("*.ts*")
        if ".test." not in path.name and path.name not in ("schema.ts", "fixtures.ts")
    )
    yield from build.run_node("-e", _PAGES, *files, quiet=True).splitlines()


def of_module(path: Path) -> Iterator[str]:
    """Yield the lines of a module."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in _visible(tree):
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        text = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in parts)
        if re.search(r"[a-z]{2}.* ", text) and not _SQL.match(text):
            yield f"{path.relative_to(ROOT)}:{node.lineno}\t{' '.join(text.split())}"


def _visible(node: ast.AST) -> Iterator[ast.Constant | ast.JoinedStr]:
    """Yield the strings under a node; no docstrings, log messages and parts of f-strings."""
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.Expr(value=ast.Constant()):
                continue
            case ast.Call(func=ast.Attribute(value=ast.Name(id="log"), attr=name)) if name in _LOGS:
                continue
            case ast.JoinedStr() | ast.Constant(value=str()):
                yield child
            case _:
                yield from _visible(child)


def of_document(value: Any, place: str) -> Iterator[str]:
    """Yield the titles and descriptions of a JSON document."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, member in items:
        if key in _VISIBLE_KEYS and isinstance(member, str):
            yield f"{place}.{key}\t{' '.join(member.split())}"
        yield from of_document(member, f"{place}.{key}")


def main() -> int:
    """Write the file; each text once for each file that has it."""
    lines = list(of_pages())
    for path in product_files(ROOT):
        lines += of_module(path)
    for board in sorted((ROOT / "examples" / "grafana").glob("*.json")):
        lines += of_document(json.loads(board.read_text(encoding="utf-8")), board.name)
    lines += of_document(json.loads(build.document()), "api")
    unique = {line.split("\t", 1)[1]: line for line in reversed(lines)}
    OUTPUT.parent.mkdir(exist_ok=True)
    OUTPUT.write_text("".join(f"{line}\n" for line in reversed(unique.values())), encoding="utf-8")
    print(f"{len(unique)} strings: {OUTPUT.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
