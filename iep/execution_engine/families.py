"""The families of modules that an engine can be made of, by the name that `--modules` takes."""

from iep.execution_engine.family import Family
from iep.execution_engine.modules import IEP
from iep.execution_engine.tbd import TBD

FAMILIES: dict[str, Family] = {"iep": IEP, "tbd": TBD}


def family(modules: str) -> Family:
    """The family of that name.

    Raises:
        ValueError: there is none.
    """
    if modules not in FAMILIES:
        raise ValueError(f"modules is {modules!r}, expected one of {', '.join(FAMILIES)}")
    return FAMILIES[modules]
