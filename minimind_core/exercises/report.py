"""What a check says, as text and as HTML."""

import html
import textwrap
from dataclasses import dataclass, field

WRAPPER = textwrap.TextWrapper(
    96, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False, break_long_words=False
)
SIGNS = {"passed": "✓", "not attempted yet": "○", "not yet": "✗", "stopped with an error": "✗"}


@dataclass(frozen=True)
class Report:
    """The result of one check.

    status: "passed", "not attempted yet", "not yet" or "stopped with an error". mistake: the name of the mutant that
    was recognized, else None. paragraphs: sentences. table: rows of (name, value), the input that separates.
    """

    exercise: str
    status: str
    paragraphs: list[str] = field(default_factory=list)
    table: list[tuple[str, str]] = field(default_factory=list)
    mistake: str | None = None

    @property
    def passed(self) -> bool:
        return self.status == "passed"

    @property
    def headline(self) -> str:
        return f"{SIGNS[self.status]} {self.exercise}: {self.status}"

    def __repr__(self) -> str:
        lines = [self.headline]
        for paragraph in self.paragraphs:
            lines += WRAPPER.wrap(paragraph)
        width = max((len(name) for name, _ in self.table), default=0)
        lines += [f"    {name:<{width}}  {value}" for name, value in self.table]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        body = "".join(f"<p style='margin:0.3em 0'>{html.escape(p)}</p>" for p in self.paragraphs)
        rows = "".join(
            f"<tr><th style='text-align:left'>{html.escape(name)}</th>"
            f"<td style='text-align:left'><code>{html.escape(value)}</code></td></tr>"
            for name, value in self.table
        )
        table = f"<table>{rows}</table>" if rows else ""
        edge = "solid" if self.passed else "dashed"
        return (
            f"<div style='border-left:4px {edge} currentColor;padding:0.2em 0.8em;max-width:46em'>"
            f"<strong>{html.escape(self.headline)}</strong>{body}{table}</div>"
        )
