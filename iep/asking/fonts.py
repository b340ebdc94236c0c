"""Text -> installed fonts that together have its characters, and which characters none of them has.

Whether a font has a character is all that is looked at, not whether it suits the language.
"""

import logging
from functools import cache

from matplotlib.font_manager import FontProperties, findfont, fontManager, get_font

USUAL = "sans-serif"
_NO_TEXT = ("Last Resort", "STIXNonUnicode", "STIXSize", "cm")
"""How names of matplotlib's own fonts begin that hold other shapes than those of the characters."""

# It warns of a font without bold letters, in whose place others are drawn.
logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)


def fonts_for(text: str) -> tuple[list[str], str]:
    """Names of fonts, the usual one first, then those that have what it lacks; and the characters that none has."""
    names, missing = [USUAL], {letter for letter in text if not letter.isspace()} - _letters(USUAL)
    others = sorted({entry.name for entry in fontManager.ttflist if not entry.name.startswith(_NO_TEXT)})
    for name in others if missing else ():
        if found := missing & _letters(name):
            names.append(name)
            missing -= found
    return names, "".join(sorted(missing))


@cache
def _letters(name: str) -> frozenset[str]:
    """The characters that a font has, normal and bold."""
    fonts = (get_font(findfont(FontProperties(family=[name], weight=weight))) for weight in ("normal", "bold"))
    return frozenset.intersection(*(frozenset(map(chr, font.get_charmap())) for font in fonts))
