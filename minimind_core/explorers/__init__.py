"""Interactive views, one module per topic. Import the one you want: `from minimind_core.explorers import rmsnorm`.

Nothing here is loaded by `import minimind_core`; an explorer needs matplotlib, ipywidgets and anywidget.
"""

from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType

SHARED = ("canvas", "live", "model_map", "shell", "style", "texts")  # modules of this package that are not explorers


def names() -> list[str]:
    """Names of all explorers, in alphabetical order."""
    return sorted(module.name for module in iter_modules(__path__) if module.name not in SHARED)


def module(name: str) -> ModuleType:
    """The module of one explorer. It has `explore(**start)` and may have STILLS, more states to draw into figures/.

    Raises ValueError when there is no explorer of that name.
    """
    if name not in names():
        raise ValueError(f"there is no explorer {name!r}; choose one of {', '.join(names())}")
    return import_module(f"{__name__}.{name}")
