"""The exercises: references pass, stubs do not, every mistake is named, and the notebooks' own solutions work."""

import ast
import inspect
import json
import re
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import einops
import pytest
import torch
import torch.nn.functional as F
from einops import reduce

import minimind_core
from minimind_core import exercises
from minimind_core.exercises.checking import Outcome, differs, examine, run
from minimind_core.exercises.framework import Case, Exercise
from minimind_core.exercises.report import Report
from minimind_core.exercises.store import PROVIDED

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
RMS, QK, RAMP = "01_rmsnorm.rms_norm", "01_rmsnorm.qk_norm", "03_yarn.ramp"
MUTANTS = [(name, mutant) for name in exercises.names() for mutant in exercises.get(name).mutants]
each_exercise = pytest.mark.parametrize("name", exercises.names())
each_mutant = pytest.mark.parametrize("name, mutant", MUTANTS, ids=[f"{n}-{m.name}" for n, m in MUTANTS])


@pytest.fixture(autouse=True)
def progress_off(monkeypatch):
    monkeypatch.setenv("MINIMIND_PROGRESS", "off")


# The banks -----------------------------------------------------------------------------------------------------------


@each_exercise
def test_reference_passes(name):
    exercise = exercises.get(name)
    report = examine(exercise, exercise.reference)
    assert report.passed and repr(report) == f"✓ {name}: passed"


@each_exercise
def test_the_courses_own_function_is_no_attempt(name):
    assert exercises.check(name, exercises.get(name).reference).status == "not attempted yet"
    assert exercises.check(name, minimind_core.rms_norm).status == "not attempted yet"


@each_mutant
def test_mutant_fails_and_is_named(name, mutant):
    report = exercises.check(name, mutant.function)
    assert not report.passed and report.mistake == mutant.name
    text = " ".join(repr(report).split())
    for sentence in (mutant.mistake, mutant.why, mutant.whose or ""):
        assert " ".join(sentence.split()) in text
    assert "wanted" in text and "got" in text
    assert max(map(len, repr(report).splitlines())) <= 180


@each_exercise
def test_every_pair_of_mistakes_can_be_told_apart(name):
    exercise = exercises.get(name)
    made = {m.name: [run(exercise, m.function, case) for case in exercise.cases] for m in exercise.mutants}
    names = sorted(made)
    for i, one in enumerate(names):
        for other in names[:i]:
            pairs = zip(made[one], made[other], strict=True)
            assert any(differs(exercise, a, b, loose=True) for a, b in pairs), f"{one} and {other} look the same"


@each_exercise
def test_bank_is_complete_and_reads_well(name):
    exercise = exercises.get(name)
    assert len(exercise.mutants) >= 6
    assert len({m.name for m in exercise.mutants}) == len(exercise.mutants)
    for case in exercise.cases:
        assert len(case.arguments) == len(exercise.argument_names)
    sizes = [sum(a.numel() for a in case.arguments if torch.is_tensor(a)) for case in exercise.cases]
    assert sizes[0] == min(sizes), "the smallest case comes first"
    for mutant in exercise.mutants:
        assert not mutant.mistake.endswith(".") and mutant.why.endswith(".")
        assert mutant.whose is None or mutant.whose.endswith(".")


def test_weights_are_never_ones():
    for name in exercises.names("01_rmsnorm"):
        exercise = exercises.get(name)
        for case in exercise.cases:
            for argument, value in zip(exercise.argument_names, case.arguments, strict=True):
                if "weight" in argument:
                    assert not torch.allclose(value.float(), torch.ones(1)) and value.unique().numel() > 1


def test_gradient_reference_equals_autograd():
    exercise = exercises.get("01_rmsnorm.rms_norm_backward")
    for case in exercise.cases:
        x, weight, grad, eps = case.fresh()
        x.requires_grad_()
        F.rms_norm(x, weight.shape, weight, eps).backward(grad)
        torch.testing.assert_close(exercise.reference(x.detach(), weight, grad, eps), x.grad, rtol=1e-4, atol=1e-6)


def test_count_reference_equals_the_known_number():
    exercise = exercises.get("00_start_here.count_layer")
    assert exercise.reference(exercise.cases[2].arguments[0]) == 1_769_472 + 5_603_328 + 2 * 768 + 2 * 96


# What readers really write -------------------------------------------------------------------------------------------


def test_stub_is_not_attempted():
    def stub(x, weight, eps):
        """With a docstring."""
        raise NotImplementedError("your turn")

    def dots(x, weight, eps): ...

    def returns_dots(x, weight, eps):
        return ...

    for function in (stub, dots, returns_dots):
        report = exercises.check(RMS, function)
        assert report.status == "not attempted yet" and not report.passed


def test_stub_below_another_name_is_told():
    def helper(x):
        raise NotImplementedError

    def rms_norm(x, weight, eps):
        return helper(x)

    report = exercises.check(RMS, rms_norm)
    assert report.status == "not attempted yet" and "It calls helper" in repr(report)


def test_torch_not_implemented_is_an_error_and_no_stub():
    def rms_norm(x, weight, eps):
        return torch.empty(2, device="meta").tolist()

    report = exercises.check(RMS, rms_norm)
    assert report.status == "stopped with an error" and "NotImplementedError" in repr(report)


def test_a_librarys_not_implemented_is_an_error_and_no_stub():
    def rms_norm(x, weight, eps):
        return einops.einsum(x[None], weight, "b d, d -> (b d)")

    report = exercises.check(RMS, rms_norm)
    assert report.status == "stopped with an error" and "It happened in line 2 of rms_norm" in repr(report)


def test_right_answers_written_in_other_ways_pass():
    def divided(x, weight, eps):
        wide = x.to(torch.float32)
        return ((wide / torch.sqrt(torch.mean(wide**2, -1, keepdim=True) + eps)) * weight.float()).type_as(x)

    def by_einops(x, w, e):
        wide = x.double()
        return (w * wide / (reduce(wide**2, "... dim -> ... 1", "mean") + e).sqrt()).to(x.dtype)

    def by_torch(x, weight, eps):
        return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)

    for function in (divided, by_einops, by_torch):
        assert exercises.check(RMS, function).passed
    assert exercises.check(QK, lambda q, k, a, b, eps: [divided(q, a, eps), divided(k, b, eps)]).passed


def test_mistakes_in_another_order_of_operations_are_named():
    def half(x, weight, eps):
        return (weight * x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()).to(x.dtype)

    def early(x, weight, eps):
        wide = x.float()
        return ((wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt()).type_as(x) * weight).type_as(x)

    assert exercises.check(RMS, half).mistake == "half_arithmetic"
    assert exercises.check(RMS, early).mistake == "cast_before_weight"


def test_two_mistakes_at_once_are_told_one_by_one():
    def centered_in_half(x, weight, eps):
        x = x - x.mean(-1, keepdim=True)
        return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)

    report = exercises.check(RMS, centered_in_half)
    assert report.mistake == "layer_norm" and "something else differs as well" in " ".join(repr(report).split())


def test_mistake_refuted_by_a_right_case_is_not_named():
    def one_at_low(low, high, pairs):  # right but for low = high, where ramp_from_one gives the same numbers by chance
        return torch.tensor([0.0 if i < low else 1.0 if i >= high else (i - low) / (high - low) for i in range(pairs)])

    report = exercises.check(RAMP, one_at_low)
    assert report.status == "not yet" and report.mistake is None


def test_unknown_mistake_shows_the_smallest_input():
    report = exercises.check(RMS, lambda x, weight, eps: exercises.get(RMS).reference(x, weight, eps) * 1.01)
    assert report.status == "not yet" and report.mistake is None
    assert dict(report.table) == {
        "x": "[2] = [3, 4]",
        "weight": "[2] = [2, -0.5]",
        "eps": "1e-06",
        "wanted": "[2] = [1.697, -0.5657]",
        "got": "[2] = [1.714, -0.5713]",
    }


def right(x, weight, eps):
    return exercises.get(RMS).reference(x, weight, eps)


@pytest.mark.parametrize(
    "function, sentence",
    [
        (lambda x, w, e: right(x, w, e).mean(-1), "Wrong shape: wanted [2], got []."),
        (lambda x, w, e: right(x, w, e).double(), "Wrong dtype: wanted float32, got float64."),
        (lambda x, w, e: right(x, w, e).tolist(), "Wrong type: wanted a tensor [2] float32, got a list of 2."),
        (lambda x, w, e: right(x, w, e).numpy(), "got a value of type ndarray."),
        (lambda x, w, e: 3.0, "got the number 3."),
        (lambda x, w, e: "text", "got a value of type str."),
        (lambda x, w, e: (x, w), "got a tuple of 2."),
        (lambda x, w, e: right, "got a function or class (right)."),
        (lambda x, w, e: right(x, w, e).to_sparse(), "The tensor holds no plain numbers"),
        (lambda x, w, e: right(x, w, e).to("meta"), "The tensor holds no plain numbers"),
        (lambda x, w, e: right(x, w, e).int(), "Wrong dtype: wanted float32, got int32."),
        (lambda x, w, e: right(x, w, e).to(torch.complex64), "Wrong dtype: wanted float32, got complex64."),
        (lambda x, w, e: x * float("nan"), "The result holds NaN or infinity."),
        (lambda x, w: x, "takes 2 arguments (x, w), but the exercise calls it with 3 arguments (x, weight, eps)"),
        (lambda: 1, "takes no arguments, but"),
        (torch.ones(2), "it was handed a tensor [2] float32"),
        (None, "it was handed None"),
        (lambda x, w, e: x.nothing, "AttributeError: 'Tensor' object has no attribute 'nothing'"),
        (lambda x, w, e: [][0], "IndexError: list index out of range"),
    ],
)
def test_wrong_results_are_said_plainly(function, sentence):
    report = exercises.check(RMS, function)
    text = " ".join(repr(report).split())
    assert not report.passed and sentence in text
    assert "Traceback" not in text and "0x" not in text and str(Path.home()) not in text


def test_only_the_wanted_error_counts():
    """A case that asks for a ValueError is not met by whatever else goes wrong."""
    exercise = exercises.get("10_tied_embeddings.load_tied")
    wanted = Outcome(error=ValueError("two ends that differ"))
    assert differs(exercise, wanted, Outcome(error=ValueError("in other words"))) is None
    assert "Wanted ValueError, got KeyError" in differs(exercise, wanted, Outcome(error=KeyError("a"))).sentence
    assert differs(exercise, Outcome(value=None), Outcome(error=ValueError())) is not None


MERGE, COUNT, SPELL = (f"13_tokenizer.{name}" for name in ("merge", "count_pairs", "spell"))


@pytest.mark.parametrize(
    "name, function, sentence",
    [
        (MERGE, lambda ids, pair, new_id: ids[0], "Wrong type: wanted a list of 1, got the number 1."),
        (MERGE, lambda ids, pair, new_id: [new_id, 5], "Wanted 1 items, got 2; they differ from item 1 on"),
        (MERGE, lambda ids, pair, new_id: [torch.ones(2)], "Wanted 1 items, got 1; they differ from item 0 on"),
        (COUNT, lambda ids: [(1, 2)], "Wrong type: wanted a dict of 1, got a list of 1."),
        (COUNT, lambda ids: {(1, 3): 1}, "Of 1 keys 1 are missing and 0 have another value; 1 are too many."),
        (COUNT, lambda ids: {(1, 2): 7}, "Of 1 keys 0 are missing and 1 have another value; 0 are too many."),
        (SPELL, lambda token: "b" * len(token), "The text differs."),
        (SPELL, lambda token: ["a"], "Wrong type: wanted a value of type str, got a list of 1."),
    ],
)
def test_wrong_lists_dicts_and_texts_are_said_plainly(name, function, sentence):
    report = exercises.check(name, function)
    assert not report.passed and sentence in " ".join(repr(report).split())


def test_lists_may_be_tuples_and_dicts_counters():
    reference = exercises.get(MERGE).reference
    assert exercises.check(MERGE, lambda ids, pair, new_id: tuple(reference(ids, pair, new_id))).passed
    assert exercises.check(COUNT, lambda ids: Counter(pairwise(ids))).passed


def test_a_list_changed_in_place_is_told_and_spoils_nothing():
    def in_place(ids, pair, new_id):
        merged = exercises.get(MERGE).reference(ids, pair, new_id)
        ids.clear()
        return merged

    for _ in range(2):
        report = exercises.check(MERGE, in_place)
        assert report.passed and "it changes its input (ids) in place" in repr(report)


@pytest.mark.parametrize(
    "function, sentence",
    [
        (lambda q, k, a, b, e: q, "should return 2 things: q, k. It returned a tensor [1, 1, 2, 2] float32."),
        (lambda q, k, a, b, e: (q, k, a), "It returned a tuple of 3."),
        (lambda q, k, a, b, e: (q[0], k), "In q: Wrong shape: wanted [1, 1, 2, 2], got [1, 2, 2]."),
    ],
)
def test_wrong_pairs_are_said_plainly(function, sentence):
    assert sentence in " ".join(repr(exercises.check(QK, function)).split())


def test_whole_numbers_are_compared_exactly():
    name = "00_start_here.count_layer"
    reference = exercises.get(name).reference
    assert exercises.check(name, lambda config: torch.tensor(reference(config))).passed
    assert exercises.check(name, lambda config: float(reference(config))).passed
    assert not exercises.check(name, lambda config: reference(config) + 1).passed
    assert not exercises.check(name, lambda config: str(reference(config))).passed


def test_config_is_shown_by_what_is_not_default():
    report = exercises.check("00_start_here.count_layer", lambda config: 3)
    assert dict(report.table) == {
        "config": "MiniMindConfig(hidden_size=14, num_attention_heads=4, num_key_value_heads=2, head_dim=2, "
        "intermediate_size=10, moe_intermediate_size=10)",
        "wanted": "788",
        "got": "3",
    }


def test_forgotten_return_is_named():
    def rms_norm(x, weight, eps):
        right(x, weight, eps)

    assert "is there a `return`" in repr(exercises.check(RMS, rms_norm))

    def only_its_arguments(x, weight, eps):
        weight * x + eps

    def docstring_alone(x, weight, eps):
        """What it should do."""

    assert "is there a `return`" in repr(exercises.check(RMS, only_its_arguments))
    assert exercises.check(RMS, docstring_alone).status == "not attempted yet"


def test_error_says_type_message_line_and_input():
    def rms_norm(x, weight, eps):
        wide = x.float()
        return wide * weigth  # noqa: F821

    report = exercises.check(RMS, rms_norm)
    assert report.status == "stopped with an error"
    assert report.paragraphs == [
        "NameError: name 'weigth' is not defined",
        "It happened in line 3 of rms_norm: return wide * weigth  # noqa: F821",
    ]
    assert report.table[0] == ("x", "[2] = [3, 4]")


def test_error_only_with_more_axes_shows_that_input():
    def rms_norm(x, weight, eps):
        return x * torch.rsqrt(x.square().mean(-1) + eps) * weight

    report = exercises.check(RMS, rms_norm)
    text = " ".join(repr(report).split())
    assert report.mistake == "no_keepdim" and "Check again after mending it" in text
    assert "must match the size" in text and "It happened in line 2 of rms_norm" in text
    assert report.table[0][1].startswith("[2, 3]") and report.table[-1] == ("got", "RuntimeError")


def test_changed_input_is_told_and_spoils_nothing():
    def rms_norm(x, weight, eps):
        result = right(x, weight, eps)
        x.mul_(2)
        return result

    report = exercises.check(RMS, rms_norm)
    assert report.passed and "changes its input (x) in place" in " ".join(repr(report).split())
    assert exercises.check(RMS, right).paragraphs == []


def test_check_leaves_the_random_numbers_alone():
    torch.manual_seed(0)
    expected = torch.randn(3)
    torch.manual_seed(0)
    exercises.check(RMS, lambda x, weight, eps: torch.randn(2))
    assert torch.equal(torch.randn(3), expected)


def test_report_is_the_same_twice_and_as_html():
    mutant = exercises.get(RMS).mutants[0].function
    one, two = exercises.check(RMS, mutant), exercises.check(RMS, mutant)
    assert repr(one) == repr(two) and one._repr_html_() == two._repr_html_()
    assert "✗ 01_rmsnorm.rms_norm: not yet" in one._repr_html_()
    page = Report("a", "not yet", ["b < c"], [("<d>", "<e>")])._repr_html_()
    assert "b &lt; c" in page and "&lt;d&gt;" in page and "&lt;e&gt;" in page


class Scale(torch.nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return self.factor * x


class Shift(Scale):
    def forward(self, x):
        return self.factor + x


@pytest.fixture
def scale() -> Exercise:
    """An exercise in which the reader writes a class."""
    exercise = Exercise(
        name="01_rmsnorm.Scale",
        title="a class",
        signature="Scale(factor)",
        reference=Scale,
        cases=[Case("three", (3.0, torch.tensor([1.0, 2.0])))],
        call=lambda cls, factor, x: cls(factor)(x),
        arguments=("factor", "x"),
    )
    exercise.mutant("the factor is added", "a scale multiplies.")(Shift)
    return exercise


def test_a_class_is_checked_by_what_it_computes(scale):
    class Stub(Scale):
        def forward(self, x):
            raise NotImplementedError

    class Own(Scale):
        def forward(self, x):
            return x * self.factor

    class Broken(Scale):
        def forward(self, x):
            return x @ self.nothing

    assert examine(scale, Own).passed
    assert examine(scale, Stub).status == "not attempted yet"
    report = examine(scale, Shift)
    assert report.mistake == "Shift" and [name for name, _ in report.table] == ["factor", "x", "wanted", "got"]
    assert "It happened in line 2 of forward: return x @ self.nothing" in " ".join(repr(examine(scale, Broken)).split())


def test_an_error_is_named_only_by_its_own_message(scale):
    class Crossed(Scale):
        def forward(self, x):
            return x @ torch.ones(3)

    class Own(Scale):
        def forward(self, x):
            return x.reshape(3)

    scale.mutant("the vector is multiplied by one of three numbers", "each number is scaled.")(Crossed)
    assert examine(scale, type("Same", (Crossed,), {})).mistake == "Crossed"
    report = examine(scale, Own)
    assert report.mistake is None and report.status == "stopped with an error"


@pytest.mark.parametrize(
    "candidate, sentence",
    [
        (Scale(2.0), 'handed an object. Write exercises.check("01_rmsnorm.Scale", Scale), without brackets'),
        (lambda factor: Scale(factor), "check wants the class itself, not its result: it was handed a function"),
        (torch.nn.Identity(), "handed an object"),
        (torch.ones(2), "handed a tensor [2] float32"),
        (type("Other", (), {"__init__": lambda self: None}), "The class takes no arguments, but the exercise calls it"),
    ],
)
def test_what_is_no_class_is_said(scale, candidate, sentence):
    assert sentence in " ".join(repr(examine(scale, candidate)).split())


def test_unknown_name_gives_the_nearest():
    with pytest.raises(ValueError, match=r"did you mean '01_rmsnorm.rms_norm'\?"):
        exercises.check("01_rmsnorm.rmsnorm", right)
    with pytest.raises(ValueError, match="known are 00_start_here"):
        exercises.load("?")


def test_loaded_only_on_use():
    code = (
        "import sys, minimind_core; assert not any('exercises' in m for m in sys.modules); "
        "from minimind_core import exercises; assert 'minimind_core.exercises.rmsnorm' not in sys.modules; "
        "exercises.names('01_rmsnorm'); assert 'minimind_core.exercises.yarn' not in sys.modules; "
        "assert not {'matplotlib', 'ipywidgets', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# The notebooks -------------------------------------------------------------------------------------------------------


def cells(name: str) -> list[tuple[str, str, list]]:
    """(type, text, outputs) of each cell of the exercise's notebook."""
    path = NOTEBOOKS / f"{name.split('.')[0]}.ipynb"
    assert path.is_file(), f"{path.name} is missing, but its bank has {name}"
    notebook = json.loads(path.read_text(encoding="utf-8"))
    return [(c["cell_type"], "".join(c["source"]), c.get("outputs", [])) for c in notebook["cells"]]


def definition(name: str, source: str) -> list[str] | None:
    """The argument names of the exercise's function or of its class's __init__, if this code defines it."""
    if not re.search(rf"^(def|class) {name.split('.')[1]}\(", source, re.MULTILINE):
        return None
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name == name.split(".")[1]:
            return [a.arg for a in node.args.args]
        if isinstance(node, ast.ClassDef) and node.name == name.split(".")[1]:
            init = next(n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__")
            return [a.arg for a in init.args.args[1:]]
    return None


def execute(name: str, source: str):
    namespace = {**PROVIDED, **exercises.get(name).provides}
    exec(source, namespace)
    return namespace[name.split(".")[1]]


@each_exercise
def test_notebook_has_the_untouched_stub(name):
    stubs = [text for kind, text, _ in cells(name) if kind == "code" and "raise NotImplementedError" in text]
    stubs = [text for text in stubs if definition(name, text) is not None]
    assert len(stubs) == 1, f"{name} has {len(stubs)} stub cells, wanted 1"
    assert definition(name, stubs[0]) == exercises.get(name).parameters
    function = execute(name, stubs[0])
    assert inspect.getdoc(function), "the stub's docstring says the shapes"
    assert exercises.check(name, function).status == "not attempted yet"


@each_exercise
def test_notebook_checks_it(name):
    line = f'exercises.check("{name}", {name.split(".")[1]})'
    checks = [outputs for kind, text, outputs in cells(name) if kind == "code" and text.rstrip().endswith(line)]
    assert len(checks) == 1, f"{name} has {len(checks)} cells that end in {line}, wanted 1"
    stored = "".join("".join(o.get("data", {}).get("text/plain", "")) for o in checks[0])
    assert f"{name}: not attempted yet" in stored


@each_exercise
def test_notebook_solution_passes(name):
    blocks = []
    for kind, text, _ in cells(name):
        if kind == "markdown":
            for details in re.findall(r"<details>\s*<summary>\s*Solution.*?</details>", text, re.DOTALL):
                blocks += re.findall(r"\n\n```python\n(.*?)\n```\n\n", details, re.DOTALL)
    solutions = [block for block in blocks if definition(name, block) is not None]
    assert len(solutions) == 1, f"{name} has {len(solutions)} folded solutions, wanted 1"
    report = exercises.check(name, execute(name, solutions[0]))
    assert report.passed, report
