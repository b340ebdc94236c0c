"""Count the tokens and lines of Python code without comments, docstrings and blank lines, by folder: `make lines`."""

import ast
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

SKIPPED = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def docstring_lines(path: Path) -> set[int]:
    """Return the lines of strings that are statements, such as docstrings and those below a field."""
    tree = ast.parse(path.read_text())
    strings = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    return {line for node in strings for line in range(node.lineno, node.end_lineno + 1)}


def count(path: Path) -> tuple[int, int]:
    """Return the numbers of tokens and of lines with code of a file."""
    docstrings = docstring_lines(path)
    with path.open("rb") as file:
        tokens = [
            token
            for token in tokenize.tokenize(file.readline)
            if token.type not in SKIPPED and token.start[0] not in docstrings
        ]
    return len(tokens), len({line for token in tokens for line in range(token.start[0], token.end[0] + 1)})


def rows(root: Path) -> Iterator[tuple[str, list[Path]]]:
    """Yield a name and the files of each folder directly in `root`, of the files in it, and of all of them."""
    for folder in sorted(path for path in root.iterdir() if path.is_dir()):
        if files := sorted(folder.rglob("*.py")):
            yield str(folder), files
    if files := sorted(root.glob("*.py")):
        yield f"{root}/*.py", files
    yield f"{root}, all of it", sorted(root.rglob("*.py"))


def main() -> None:
    """Print a row for each folder of the directories that the command names."""
    print(f"{'':28}{'tokens':>9}{'code':>8}{'lines':>8}  tokens a line")
    for root in map(Path, sys.argv[1:]):
        for name, files in rows(root):
            tokens, code = (sum(column) for column in zip(*map(count, files), strict=True))
            lines = sum(len(path.read_text().splitlines()) for path in files)
            print(f"{name:28}{tokens:9,}{code:8,}{lines:8,}  {tokens / code:.1f}")


if __name__ == "__main__":
    main()
