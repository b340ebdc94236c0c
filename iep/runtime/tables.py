"""Rows of cells -> a text table with aligned columns."""

from collections.abc import Sequence


def align_rows(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """Return a text table whose columns `left` are aligned to the left and the others to the right."""
    columns = [
        [cell.ljust(width) if number in left else cell.rjust(width) for cell in column]
        for number, column in enumerate(zip(*rows, strict=True))
        for width in [max(map(len, column))]
    ]
    return "\n".join("  ".join(row).rstrip() for row in zip(*columns, strict=True))
