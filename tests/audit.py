"""Audit the notebooks for what nbval lets pass, and for the anatomy that every notebook of the series shares.

    python tests/audit.py notebooks/01_rmsnorm.ipynb       print every fault; exit 1 if there is one

Each function in `GATES` is one rule: it takes a `Notebook` and yields its faults, each as one sentence that says where
and what to do. `SECTIONS` is the table of headings that a writer follows. tests/test_audit.py plants every fault once.
"""

from __future__ import annotations

import io
import json
import re
import sys
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import nbformat

ROOT = Path(__file__).parents[1]

# Each `##` heading, in this order. More sections may stand between them, and a heading may go on: "## Predict: which?".
SECTIONS = {
    "Predict": "a question, to be answered before it is measured",
    "The equation": "$$ ... $$ and a line `**Source:** paper, equation number`",
    "As loops": "the same as plain loops, run",
    "In einops": "the short version, and a line `**Shapes:** ...`",
    "They agree": "`agree(...)` on random parameters; its output says `close: True`",
    "Explore": "a static picture with alt text, then the explorer's cell",
    "In MiniMind": "where the part sits in the real model, traced",
    "Myths, measured": "`### Myth: ...`, each followed by a cell that refutes it",
    "Exercises": "`### Exercise 1: ...` cards: stub cell, check cell, Hint / Outline / Solution in <details>",
    "Recap": "a list of five lines",
    "Three questions": "each answered by a code cell",
    "Next": "a link onward",
    "For teachers": "minutes of a lesson, one question for the class, its common wrong answer",
}
START = "00_start_here"  # orientation: it teaches no part, so it has no equation and no myths of its own
START_SKIPS = {
    "The equation",
    "As loops",
    "In einops",
    "They agree",
    "Explore",
    "In MiniMind",
    "Myths, measured",
}
START_ALSO = {"Your progress": "the map of passed checks", "Glossary": "one for the whole series"}

SETUP_LINES = 5
CELL_LINES = 25
WORDS = (300, 2200)
IGNORED_CELLS = 2
EXERCISES = {START: 1}
EXERCISES_DEFAULT = 3
ALT_WORDS = 6
CAPTURING = {"Output", "interact", "interactive", "interactive_output", "interact_manual", "clear_output"}
PICTURES = ("image/png", "image/jpeg", "image/svg+xml", "application/vnd.jupyter.widget-view+json")
LEAKS = {
    "a device name": re.compile(r"\b(?:cuda(?::\d+)?|cpu|mps(?::\d+)?)\b"),
    "a memory address": re.compile(r"\b0x[0-9a-fA-F]{6,}\b"),
    "an absolute path": re.compile(r"(?<![\w./:<])/(?:[\w.+-]+/)+[\w.+-]*|\b[A-Za-z]:\\\w+"),
    "a progress bar": re.compile(r"\d%\|| it/s\b|\r(?!\n)"),
}
IMAGE = re.compile(r"!\[([^\]]*)\]\(([^)\s]+)[^)]*\)|<img\b[^>]*>")
LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)[^)]*\)")
ONLY_A_NAME = re.compile(r"<Figure size.*>|<[\w. ]+ at 0x\w+>|<IPython.*>|(?!tensor)\w+\(.*\)", re.DOTALL)
EINOPS = {"rearrange", "reduce", "repeat", "einsum"}
RUNNERS = ("Makefile", "pyproject.toml", ".ci/run", ".github/workflows/*.yml", "notebooks/conftest.py")


@dataclass
class Notebook:
    """A notebook and its place; the helpers below are what the gates share."""

    path: Path
    cells: list[nbformat.NotebookNode]

    @classmethod
    def read(cls, path: Path) -> Notebook:
        return cls(path, nbformat.read(path, as_version=4).cells)

    @property
    def is_start(self) -> bool:
        return self.path.stem == START

    @cached_property
    def code(self) -> list[nbformat.NotebookNode]:
        return [cell for cell in self.cells if cell.cell_type == "code"]

    @cached_property
    def markdown(self) -> list[nbformat.NotebookNode]:
        return [cell for cell in self.cells if cell.cell_type == "markdown"]

    @cached_property
    def blocks(self) -> list[tuple[int, str, list]]:
        """(level, heading, content) in order: content holds the text and the code cells up to the next heading."""
        blocks: list[tuple[int, str, list]] = [(0, "", [])]
        for cell in self.cells:
            if cell.cell_type != "markdown":
                blocks[-1][2].append(cell)
                continue
            fenced = False
            for line in cell.source.splitlines():
                fenced ^= line.startswith("```")
                heading = None if fenced else re.match(r"(#{1,6}) +(.*\S)", line)
                if heading:
                    blocks.append((len(heading[1]), heading[2], []))
                else:
                    blocks[-1][2].append(line)
        return blocks

    def section(self, name: str) -> list | None:
        """Everything below the `##` heading `name`, its `###` headings included as lines; None if it is missing."""
        content = None
        for level, heading, below in self.blocks:
            if level == 2 and content is not None:
                break
            if level == 2 and matches(heading, name):
                content = list(below)
            elif content is not None:
                content += ["#" * level + " " + heading, *below]
        return content

    @property
    def wanted(self) -> dict[str, str]:
        return {name: what for name, what in SECTIONS.items() if not (self.is_start and name in START_SKIPS)}


def matches(heading: str, name: str) -> bool:
    """Whether a heading is `name`, or `name` with more after it."""
    return re.match(re.escape(name) + r"(?!\w)", heading) is not None


def prose(content: list) -> str:
    return "\n".join(item for item in content if isinstance(item, str))


def code_in(content: list) -> list[nbformat.NotebookNode]:
    return [item for item in content if not isinstance(item, str)]


def printed(cell: nbformat.NotebookNode) -> str:
    """The text that a cell stored: what it printed, and its value unless that is only an object's name."""
    texts = []
    for output in cell.outputs:
        if output.output_type == "stream" and output.name == "stdout":
            texts.append(output.text)
        elif output.output_type == "error":
            texts.append(f"{output.ename}: {output.evalue}")
        elif "data" in output:
            value = output.data.get("text/plain", "")
            if not ONLY_A_NAME.fullmatch(value.strip()):
                texts.append(value)
            elif "text/html" in output.data:
                html = re.sub(r"<style.*?</style>|<[^>]+>", " ", output.data["text/html"], flags=re.DOTALL)
                texts.append(html)
    return "\n".join(texts).strip()


def stored_text(cell: nbformat.NotebookNode) -> str:
    """All text that a cell stored in any form, encoded pictures left out."""
    texts = []
    for output in cell.outputs:
        texts += [output.get("text", ""), output.get("evalue", "")]
        texts += [str(text) for kind, text in output.get("data", {}).items() if kind.startswith("text/")]
    return re.sub(r"data:image/[^\"')\s]+", "", "\n".join(texts))


def lines_of(cell: nbformat.NotebookNode) -> list[str]:
    return [line for line in cell.source.splitlines() if line.strip()]


def names_in(cell: nbformat.NotebookNode) -> set[str]:
    """The names in a cell's code; comments, strings and IPython's % and ! lines do not count."""
    source = "".join(f"{line}\n" for line in cell.source.splitlines() if not line.lstrip().startswith(("%", "!")))
    names = set()
    try:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.NAME:
                names.add(token.string)
    except (tokenize.TokenError, IndentationError):
        names |= set(re.findall(r"[A-Za-z_]\w*", source))
    return names


def has_widget(cell: nbformat.NotebookNode) -> bool:
    return any("application/vnd.jupyter.widget-view+json" in output.get("data", {}) for output in cell.outputs)


def at(cell: nbformat.NotebookNode) -> str:
    first = next(iter(lines_of(cell)), "(empty)")
    return f"cell [{cell.get('execution_count')}] `{first[:60]}`"


def tags_of(cell: nbformat.NotebookNode) -> list[str]:
    return cell.metadata.get("tags", [])


# ---------------------------------------------------------------- what nbval lets pass


def counts_run_from_one(notebook: Notebook) -> Iterator[str]:
    """An empty count makes nbval skip the comparison."""
    counts = [cell.execution_count for cell in notebook.code]
    if counts != list(range(1, len(counts) + 1)):
        yield f"execution counts are {counts}, not 1..{len(counts)}: run tests/run_notebooks.py"
    for cell in notebook.code:
        if not lines_of(cell):
            yield "an empty code cell: delete it"


def no_stderr(notebook: Notebook) -> Iterator[str]:
    for cell in notebook.code:
        if any(output.output_type == "stream" and output.name == "stderr" for output in cell.outputs):
            yield f"{at(cell)} writes to stderr: mend the cause of the warning"


def errors_are_meant(notebook: Notebook) -> Iterator[str]:
    """nbval passes a cell tagged raises-exception that no longer raises."""
    for cell in notebook.code:
        raised = any(output.output_type == "error" for output in cell.outputs)
        tagged = {"raises-exception", "nbval-raises-exception"} & set(tags_of(cell)) or re.search(
            r"^\s*#\s*NBVAL_RAISES_EXCEPTION\s*$", cell.source, re.MULTILINE
        )
        if raised and not tagged:
            yield f"{at(cell)} stores an error without the tag raises-exception"
        if tagged and not raised:
            yield f"{at(cell)} is tagged raises-exception but stores no error"


def ignored_cells_say_why(notebook: Notebook) -> Iterator[str]:
    ignored = 0
    for cell in notebook.code:
        lines = [line.strip() for line in lines_of(cell)]
        if hidden := {"nbval-ignore-output", "nbval-skip", "nbval-check-output"} & set(tags_of(cell)):
            yield f"{at(cell)} has the hidden tag {sorted(hidden)[0]}: say it in a comment, where a reader sees it"
        for number, line in enumerate(lines):
            marker = line.lstrip("# ") if line.startswith("#") else ""
            if marker in ("NBVAL_SKIP", "NBVAL_CHECK_OUTPUT", "PYTEST_VALIDATE_IGNORE_OUTPUT"):
                yield f"{at(cell)} says {marker}: not used in this series"
            elif marker == "NBVAL_IGNORE_OUTPUT":
                ignored += 1
                reason = lines[number + 1] if number + 1 < len(lines) else ""
                if not reason.startswith("#") or len(reason.lstrip("# ").split()) < 4:
                    yield f"{at(cell)} ignores its output without a reason: say why in a comment on the next line"
            elif "NBVAL" in line:
                yield f"{at(cell)} has NBVAL inside a line; nbval sees it only as the whole line"
    if ignored > IGNORED_CELLS:
        yield f"{ignored} cells ignore their output; at most {IGNORED_CELLS}: print claims in place of timings"


def pictures_have_numbers(notebook: Notebook) -> Iterator[str]:
    """nbval compares no picture, so the numbers that it draws must stand beside it as text."""
    for cell in notebook.code:
        if any(kind in output.get("data", {}) for output in cell.outputs for kind in PICTURES):
            if not re.search(r"\d|True|False", printed(cell)):
                yield f"{at(cell)} stores a picture without text: print the numbers that it shows"


def images_have_alt_text(notebook: Notebook) -> Iterator[str]:
    for cell in notebook.markdown:
        for image in IMAGE.finditer(cell.source):
            alt, target = image[1], image[2]
            if target is None:
                alt = (re.search(r'\balt="([^"]*)"', image[0]) or ["", ""])[1]
                target = (re.search(r'\bsrc="([^"]*)"', image[0]) or ["", ""])[1]
            if len(alt.split()) < ALT_WORDS:
                yield f"the picture {target} has the alt text {alt!r}: say in {ALT_WORDS} words or more what it shows"
            if re.match(r"\w+:", target) or not (notebook.path.parent / target).is_file():
                yield f"the picture {target} is not a file of this repository"


def links_lead_somewhere(notebook: Notebook) -> Iterator[str]:
    for cell in notebook.markdown:
        for target in LINK.findall(cell.source):
            name = target.partition("#")[0]
            if name and not re.match(r"\w+:", name) and not (notebook.path.parent / name).exists():
                yield f"the link {target} leads nowhere"


def nothing_captures_output(notebook: Notebook) -> Iterator[str]:
    """interact and Output leak into the cell without a front end, and hide errors with one."""
    for cell in notebook.code:
        if used := CAPTURING & names_in(cell):
            yield f"{at(cell)} uses {sorted(used)[0]}: use an explorer of minimind_core.explorers"


def outputs_name_no_machine(notebook: Notebook) -> Iterator[str]:
    for cell in notebook.code:
        text = stored_text(cell)
        for what, pattern in LEAKS.items():
            if found := pattern.search(text):
                yield f"{at(cell)} stores {what}, {found[0]!r}: print what holds on every machine"


# ---------------------------------------------------------------- size


def cells_are_short(notebook: Notebook) -> Iterator[str]:
    for cell in notebook.code:
        if (count := len(lines_of(cell))) > CELL_LINES:
            yield f"{at(cell)} has {count} lines; at most {CELL_LINES}: split it, one claim each"


def prose_is_measured(notebook: Notebook) -> Iterator[str]:
    text = "\n".join(cell.source for cell in notebook.markdown)
    text = re.sub(
        r"<details>.*?</details>|```.*?```|\$\$.*?\$\$|^[ \t]*\|[^\n]*$", " ", text, flags=re.DOTALL | re.MULTILINE
    )
    words = len(re.findall(r"\b[^\W\d_][\w'-]*", text))
    if not WORDS[0] <= words <= WORDS[1]:
        yield f"{words} words of prose; between {WORDS[0]} and {WORDS[1]}"


# ---------------------------------------------------------------- anatomy


def title_cell(notebook: Notebook) -> Iterator[str]:
    first = notebook.cells[0].source if notebook.cells and notebook.cells[0].cell_type == "markdown" else ""
    number = notebook.path.stem[:2]
    if not re.match(rf"# {number}\b\W*\w+", first):
        yield f"the first cell must begin with the title: `# {number} ...`"
    paragraphs = [part for part in re.split(r"\n\s*\n", first)[1:2] if part[:1].isalpha()]
    if not paragraphs:
        yield "the title is not followed by a paragraph that says the purpose"
    after = first.partition("**After this notebook you can**")[2]
    items = re.findall(r"^(?:[-*]|\d+\.) +\S", re.split(r"\n\s*\n(?![-*\d])|\n\*\*", after)[0], re.MULTILINE)
    if len(items) != 3:
        yield f"`**After this notebook you can**` must list three things, not {len(items)}"
    if not re.search(r"\*\*Time:\*\*[^\n]*\d+ minutes", first):
        yield "the title cell lacks `**Time:** N minutes`"
    for label in ("Before you start", "Know this already?"):
        if not re.search(rf"\*\*{re.escape(label)}:?\*\*:? *\S", first):
            yield f"the title cell lacks `**{label}** ...`"


def setup_cell(notebook: Notebook) -> Iterator[str]:
    if not notebook.code or not any(line.startswith(("import ", "from ")) for line in lines_of(notebook.code[0])):
        yield "the first code cell must be the set-up with its imports"
    elif (count := len(lines_of(notebook.code[0]))) > SETUP_LINES:
        yield f"the set-up cell has {count} lines; at most {SETUP_LINES}"
    elif notebook.code[0].outputs:
        yield "the set-up cell stores output: it prints nothing"


def sections_in_order(notebook: Notebook) -> Iterator[str]:
    headings = [heading for level, heading, _ in notebook.blocks if level == 2]
    found = [name for heading in headings for name in notebook.wanted if matches(heading, name)]
    for name, what in {**notebook.wanted, **(START_ALSO if notebook.is_start else {})}.items():
        if not any(matches(heading, name) for heading in headings):
            yield f"no section `## {name}`: {what}"
    order = [name for name in notebook.wanted if name in found]
    if found != order:
        yield f"the sections stand in the order {found}, not {order}, each once"


def _fault_in(name: str, check: Callable[[list], Iterator[str]]) -> Callable[[Notebook], Iterator[str]]:
    """A gate on one section; a notebook that lacks the section, or may skip it, is not asked."""

    def gate(notebook: Notebook) -> Iterator[str]:
        content = notebook.section(name) if name in notebook.wanted else None
        for fault in check(content) if content is not None else ():
            yield f"`## {name}`: {fault}"

    gate.__name__ = check.__name__.strip("_")
    return gate


def _predict(content: list) -> Iterator[str]:
    if "?" not in prose(content):
        yield "asks no question"


def _equation(content: list) -> Iterator[str]:
    if not re.search(r"\$\$.+?\$\$", prose(content), re.DOTALL):
        yield "has no $$ ... $$"
    if not re.search(r"\*\*Source:\*\*[^\n]*\d", prose(content)):
        yield "has no line `**Source:** paper, equation number`"


def _loops(content: list) -> Iterator[str]:
    if not any("for" in names_in(cell) for cell in code_in(content)):
        yield "has no code cell with a loop"
    elif not any(printed(cell) for cell in code_in(content)):
        yield "prints nothing"


def _einops(content: list) -> Iterator[str]:
    if not any(EINOPS & names_in(cell) for cell in code_in(content)):
        yield f"calls none of {', '.join(sorted(EINOPS))}"
    if not re.search(r"\*\*Shapes:\*\* *\S", prose(content)):
        yield "has no line `**Shapes:** ...`"


def _agreement(content: list) -> Iterator[str]:
    if not any("agree" in names_in(cell) for cell in code_in(content)):
        yield "does not call agree(...)"
    text = "\n".join(map(printed, code_in(content)))
    if "close: True" not in text or "close: False" in text:
        yield "its output must say `close: True` for every pair"
    if any("ones" in names_in(cell) for cell in code_in(content)):
        yield "compares on ones, which hide faults of order and cast: use random parameters"


def _explorer(content: list) -> Iterator[str]:
    widgets = [index for index, item in enumerate(content) if not isinstance(item, str) and has_widget(item)]
    images = [index for index, item in enumerate(content) if isinstance(item, str) and IMAGE.search(item)]
    if not widgets:
        yield "no cell stores a widget view"
    if not images:
        yield "has no static picture for readers without a kernel"
    elif widgets and images[0] > widgets[0]:
        yield "the static picture must stand above the explorer's cell"


def _in_minimind(content: list) -> Iterator[str]:
    if not any(printed(cell) for cell in code_in(content)):
        yield "no cell shows the part in the real model"


def myths_are_measured(notebook: Notebook) -> Iterator[str]:
    if "Myths, measured" not in notebook.wanted or notebook.section("Myths, measured") is None:
        return
    names = [heading for _, heading, _ in notebook.blocks]
    start = next(index for index, (level, name, _) in enumerate(notebook.blocks) if level == 2 and name[:5] == "Myths")
    myths = 0
    for level, heading, content in notebook.blocks[start + 1 :]:
        if level <= 2:
            break
        if re.match(r"Myth\b", heading):
            myths += 1
            if not any(printed(cell) for cell in code_in(content)):
                yield f"`### {heading}` is not followed by a cell that measures it"
    if not myths:
        yield f"`## {names[start]}` has no `### Myth: ...`"


def exercises_are_cards(notebook: Notebook) -> Iterator[str]:
    content = notebook.section("Exercises")
    if content is None:
        return
    cards: list[tuple[str, list]] = []
    for item in content:
        if isinstance(item, str) and re.match(r"### Exercise\b", item):
            cards.append((item, []))
        elif cards:
            cards[-1][1].append(item)
    least = EXERCISES.get(notebook.path.stem, EXERCISES_DEFAULT)
    if len(cards) < least:
        yield f"{len(cards)} cards `### Exercise ...`; at least {least}"
    for title, card in cards:
        text = prose(card)
        for label in ("Difficulty", "Minutes"):
            if not re.search(rf"\*\*{label}:\*\* *\S", text):
                yield f"`{title}` lacks `**{label}:** ...`"
        checks = [index for index, cell in enumerate(code_in(card)) if "check" in names_in(cell)]
        stubs = [index for index, cell in enumerate(code_in(card)) if {"def", "class"} & names_in(cell)]
        if not stubs:
            yield f"`{title}` has no stub cell with a `def` or `class`"
        if not checks or set(stubs) & set(checks) or (stubs and stubs[0] > checks[0]):
            yield f"`{title}` needs a check cell of its own, below the stub"
        folded = re.findall(r"<details>\s*<summary>(.*?)</summary>(.*?)</details>", text, re.DOTALL)
        names = [re.sub(r"<[^>]+>", "", name).split(" ")[0].strip(":") for name, _ in folded]
        if names != ["Hint", "Outline", "Solution"]:
            yield f"`{title}` must fold Hint, Outline, Solution in <details>, in this order; it has {names}"
        elif "```python" not in folded[2][1]:
            yield f"`{title}` has a solution without a ```python block"


def _recap(content: list) -> Iterator[str]:
    items = re.findall(r"^(?:[-*]|\d+\.) +\S", prose(content), re.MULTILINE)
    if len(items) != 5:
        yield f"lists {len(items)} lines, not five"


def _questions(content: list) -> Iterator[str]:
    answered = sum(bool(printed(cell)) for cell in code_in(content))
    if answered < 3:
        yield f"{answered} questions are answered by a code cell with output, not three"
    if prose(content).count("?") < 3:
        yield "asks fewer than three questions"


def _next(content: list) -> Iterator[str]:
    if not LINK.search(prose(content)):
        yield "has no link onward"


def _teachers(content: list) -> Iterator[str]:
    text = prose(content)
    for what, pattern in {
        "the minutes of a lesson": r"\d+ minutes",
        "a question for the class": r"\?",
        "the common wrong answer": r"(?i)wrong answer",
    }.items():
        if not re.search(pattern, text):
            yield f"lacks {what}"


GATES: list[Callable[[Notebook], Iterator[str]]] = [
    counts_run_from_one,
    no_stderr,
    errors_are_meant,
    ignored_cells_say_why,
    pictures_have_numbers,
    images_have_alt_text,
    links_lead_somewhere,
    nothing_captures_output,
    outputs_name_no_machine,
    cells_are_short,
    prose_is_measured,
    title_cell,
    setup_cell,
    sections_in_order,
    _fault_in("Predict", _predict),
    _fault_in("The equation", _equation),
    _fault_in("As loops", _loops),
    _fault_in("In einops", _einops),
    _fault_in("They agree", _agreement),
    _fault_in("Explore", _explorer),
    _fault_in("In MiniMind", _in_minimind),
    myths_are_measured,
    exercises_are_cards,
    _fault_in("Recap", _recap),
    _fault_in("Three questions", _questions),
    _fault_in("Next", _next),
    _fault_in("For teachers", _teachers),
]


def audit(path: Path) -> list[str]:
    """All faults of one notebook."""
    notebook = Notebook.read(path)
    faults = [fault for gate in GATES for fault in gate(notebook)]
    if "widgets" in json.loads(path.read_text(encoding="utf-8"))["metadata"]:
        faults.append("metadata.widgets is stored, which GitHub refuses: run tests/run_notebooks.py")
    return faults


def audit_runners(root: Path) -> list[str]:
    """nbval's lax mode compares nothing in unmarked cells; nothing in the repository may ask for it."""
    lax = "--nbval-" + "lax"
    files = [file for pattern in RUNNERS for file in sorted(root.glob(pattern))]
    return [f"{file.relative_to(root)} asks for {lax}" for file in files if lax in file.read_text(encoding="utf-8")]


def main(arguments: list[str]) -> int:
    paths = [Path(name) for name in arguments] or sorted((ROOT / "notebooks").glob("*.ipynb"))
    faults = audit_runners(ROOT)
    for path in paths:
        faults += [f"{path.name}: {fault}" for fault in audit(path)]
    print("\n".join(faults) or f"{len(paths)} notebooks, no fault")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
