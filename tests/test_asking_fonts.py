"""Which fonts a text is drawn in, and what `iep-ask --draw` says where none has a character."""

import warnings
from pathlib import Path

import pytest
from ask_cases import IMAGE, answered, iep_ask, sample_data, trained
from matplotlib import rc_context
from matplotlib.figure import Figure

from iep.asking.picture import USUAL, fonts_for

RARE, NOWHERE = "\u24b6", "\U0010abcd"
"""A character that the usual font lacks and another of matplotlib's has; one for private use."""


def test_the_usual_font_alone_is_for_what_it_has():
    assert fonts_for("Gr\u00f6\u00dfe \u0416?\t") == ([USUAL], "")


def test_what_the_usual_font_lacks_is_drawn_in_another_that_has_it(tmp_path: Path):
    fonts, missing = fonts_for(f"a {RARE}")
    assert (fonts[0], missing) == (USUAL, "")
    assert len(fonts) == 2
    for weight in ("normal", "bold"):
        with rc_context({"font.family": fonts}), warnings.catch_warnings():
            warnings.simplefilter("error")
            figure = Figure()
            figure.text(0, 0, f"a {RARE}", weight=weight)
            figure.savefig(tmp_path / f"{weight}.png")
    figure = Figure()
    figure.text(0, 0, f"a {RARE}")
    with pytest.warns(UserWarning, match="Glyph .* missing from"):
        figure.savefig(tmp_path / "usual.png")


def test_a_character_of_no_font_is_named(tmp_path: Path):
    data = sample_data(tmp_path / "data", "--backbone", "patches", "--patch-size", 16)
    asked = ("--ee", trained(data, "ee", tmp_path / "ee", 1), "--image", IMAGE, "--program", "exist scene")
    result = iep_ask(*asked, "--question", f"Any {NOWHERE}?", "--draw", tmp_path / "a.png")
    assert result.exit_code == 0, result.output
    assert f"{tmp_path / 'a.png'}: no installed font has {NOWHERE}; boxes replace them" in result.stderr
    assert "no installed font" not in iep_ask(*asked, "--question", "Any?", "--draw", tmp_path / "b.png").stderr
    assert f"Wrote {tmp_path / 'c.svg'}" in answered(*asked, "--question", NOWHERE, "--draw", tmp_path / "c.svg")
