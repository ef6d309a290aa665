"""What explorers of the reader's own text share: the trained models of bytes, and how a text is cut and drawn."""

import unicodedata
from functools import cache, lru_cache

from matplotlib.font_manager import findfont, get_font

from ..model import MiniMindForCausalLM
from ..toy import toy_model


@cache
def model(kind: str = "dense") -> MiniMindForCausalLM:
    """A trained toy model, loaded once."""
    return toy_model(kind)


@lru_cache(maxsize=256)
def fitting(text: str, longest: int) -> str:
    """The whole characters at the beginning that fit into so many bytes."""
    return text.encode(errors="replace")[:longest].decode(errors="ignore")


@cache
def drawable(char: str) -> str:
    """What the picture shows for a character: itself, an open box for the space, a square if the font lacks it."""
    if char == " ":
        return "␣"
    known = get_font(findfont("DejaVu Sans")).get_char_index(ord(char))
    return char if known and char.isprintable() and not unicodedata.combining(char) else "□"
