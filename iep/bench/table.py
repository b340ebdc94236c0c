"""Rows of cells -> lines of text with aligned columns."""

from collections.abc import Iterable, Sequence


def format_table(rows: Iterable[Sequence[object]], left: int = 0) -> str:
    """A line for each row; the first `left` columns begin flush, the others end flush."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if n < left else cell.rjust(width)
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    )
