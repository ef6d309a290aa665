"""Exercises of notebook 09: the ends of the slices, the sorted dispatch, and experts that may stay idle."""

import torch
from torch import nn

from .framework import Exercise, case, draw

# 1. slices -----------------------------------------------------------------------------------------------------------


def slices_reference(expert_idx, experts):
    """Where each expert's piece of the sorted list ends. expert_idx: [assignments]; experts: an int."""
    return expert_idx.bincount(minlength=experts).cumsum(0)


SIX = torch.tensor([1, 3, 2, 5, 1, 2])  # tokens 0, 1, 2 to experts (1, 3), (2, 5), (1, 2)

slices = Exercise(
    name="09_moe_dispatch.slices",
    title="Where each expert's slice of the sorted assignments ends",
    signature="slices(expert_idx, experts)",
    reference=slices_reference,
    cases=[
        case("three assignments, two experts", torch.tensor([1, 0, 1]), 2),
        case("the last experts are idle", torch.tensor([2, 0, 2]), 5),
        case("the first expert is idle", torch.tensor([2, 1, 1]), 3),
        case("the six assignments of the notebook", SIX, 6),
        case("one expert takes all", torch.tensor([1, 1, 1, 1]), 3),
        case("32 assignments, 8 experts", torch.arange(32).pow(2) % 7, 8),
    ],
)


@slices.mutant(
    "bincount without minlength: idle experts at the end are not counted",
    "bincount stops at the largest number it sees. Then there are fewer ends than experts, and the next batch may have "
    "another number of them.",
    "MiniMind's own loop runs over these ends, so experts behind the last one are simply not reached.",
)
def no_minlength(expert_idx, experts):
    return expert_idx.bincount().cumsum(0)


@slices.mutant(
    "those are the sizes: the running sum is missing",
    "expert 1's slice starts where expert 0's ends. cumsum turns the sizes into ends.",
)
def sizes(expert_idx, experts):
    return expert_idx.bincount(minlength=experts)


@slices.mutant(
    "those are the starts of the slices, not their ends",
    "the running sum includes the expert's own tokens. Without them it tells where the slice begins.",
)
def starts(expert_idx, experts):
    counted = expert_idx.bincount(minlength=experts)
    return counted.cumsum(0) - counted


@slices.mutant(
    "those are the places of the last tokens: each end is one too small",
    "a slice [start:end] does not take in its end. With end - 1 each expert loses a token.",
)
def last_places(expert_idx, experts):
    return slices_reference(expert_idx, experts) - 1


@slices.mutant(
    "there is a 0 in front: one number more than experts",
    "the start of expert 0 is no end. Wanted is one end for each expert.",
    "grouped matrix products on a GPU often take such offsets with a leading 0.",
)
def leading_zero(expert_idx, experts):
    ends = slices_reference(expert_idx, experts)
    return torch.cat([ends.new_zeros(1), ends])


@slices.mutant(
    "idle experts were left out of the count",
    "unique() lists only the experts that occur, so every expert behind an idle one gets its neighbor's tokens.",
)
def idle_left_out(expert_idx, experts):
    return expert_idx.unique(return_counts=True)[1].cumsum(0)


@slices.mutant(
    "that is the order in which the assignments stand after the sort",
    "argsort says which assignment stands where. Wanted is how far each expert's piece reaches.",
)
def order(expert_idx, experts):
    return expert_idx.argsort(stable=True)


@slices.mutant(
    "the running sum is over expert_idx itself, not over the sizes",
    "the number of an expert says nothing about how many tokens it has. Count first.",
)
def numbers_summed(expert_idx, experts):
    return expert_idx.cumsum(0)


@slices.mutant(
    "the sizes were sorted before the running sum",
    "the assignments are sorted by expert, and so the sizes must stay in the experts' order.",
)
def sizes_sorted(expert_idx, experts):
    return expert_idx.bincount(minlength=experts).sort().values.cumsum(0)


@slices.mutant(
    "minlength is one too large",
    "experts are numbered 0 to experts - 1, and minlength counts the numbers, the 0 included.",
)
def one_too_many(expert_idx, experts):
    return expert_idx.bincount(minlength=experts + 1).cumsum(0)


@slices.mutant(
    "the ends were looked for in the unsorted list",
    "an expert's tokens lie together only after the sort. Its last place in token order says nothing.",
)
def in_token_order(expert_idx, experts):
    places = [(expert_idx == i).nonzero().flatten().tolist() for i in range(experts)]
    return torch.tensor([found[-1] + 1 if found else 0 for found in places])


@slices.mutant(
    "an idle expert's end is 0, not the end of the expert before it",
    "expert 4's empty slice [5:5] ends where expert 3's does. The slice behind it starts there.",
)
def idle_end_zero(expert_idx, experts):
    ends = slices_reference(expert_idx, experts)
    return ends.where(expert_idx.bincount(minlength=experts) > 0, 0)


@slices.mutant(
    "start and end of each slice were returned",
    "wanted are the ends alone, [experts]: a start is the end of the expert before.",
)
def pairs(expert_idx, experts):
    ends = slices_reference(expert_idx, experts)
    return torch.stack([ends - expert_idx.bincount(minlength=experts), ends], dim=-1)


@slices.mutant(
    "the ends are floating-point numbers",
    "a slice wants whole numbers. one_hot and comparisons can be summed as integers, or use bincount.",
)
def as_floats(expert_idx, experts):
    return slices_reference(expert_idx, experts).float()


# 2. dispatch ---------------------------------------------------------------------------------------------------------


class Shift:
    """An expert for checks: adds its number to each feature. Refuses more tokens than the routing sends it."""

    def __init__(self, number: int, shift: int, most: int):
        self.number, self.shift, self.most = number, shift, most

    def __call__(self, x):
        if x.ndim != 2:
            raise ValueError(f"expert {self.number} was fed a tensor of shape {list(x.shape)}; it takes [size, hidden]")
        if len(x) > self.most:
            raise ValueError(
                f"expert {self.number} was fed {len(x)} token{'s' * (len(x) != 1)}; the routing sends it {self.most}"
            )
        return x + self.shift

    def __repr__(self) -> str:
        return f"x + {self.shift}"


def experts_for(topk_idx: torch.Tensor, count: int) -> list[Shift]:
    return [Shift(i, 10 * (i + 1), int((topk_idx == i).sum())) for i in range(count)]


def dispatch_reference(x, topk_idx, topk_weight, experts):
    """Sort, cut, run, weigh, add. x: [tokens, hidden]; topk_idx, topk_weight: [tokens, k]; experts: functions."""
    expert_idx, k = topk_idx.flatten(), topk_idx.shape[1]
    order = expert_idx.argsort(stable=True)
    token = order // k
    parts = x[token].split(expert_idx.bincount(minlength=len(experts)).tolist())
    results = torch.cat([expert(part) for expert, part in zip(experts, parts, strict=True)])
    weight = topk_weight.flatten()[order, None].to(x.dtype)
    return torch.zeros_like(x).index_add(0, token, results * weight)


def routed(label: str, x, topk_idx, topk_weight, count: int):
    """A case from plain lists or tensors."""
    x, topk_weight = (v if torch.is_tensor(v) else torch.tensor(v) for v in (x, topk_weight))
    topk_idx = torch.as_tensor(topk_idx)
    return case(label, x, topk_idx, topk_weight, experts_for(topk_idx, count))


def drawn(label: str, tokens: int, hidden: int, k: int, count: int, seed: int):
    weight, topk_idx = draw(tokens, count, seed=seed).softmax(dim=-1).topk(k)
    return routed(label, draw(tokens, hidden, seed=seed + 1), topk_idx, weight, count)


EIGHTHS = [[0.5, 0.25], [0.75, 0.125], [0.375, 0.5]]  # exact in every type, and no row sums to 1

dispatch = Exercise(
    name="09_moe_dispatch.dispatch",
    title="Sort by expert, run each on its slice, add the results back",
    signature="dispatch(x, topk_idx, topk_weight, experts)",
    reference=dispatch_reference,
    cases=[
        routed("one token, the second of two experts", [[3.0]], [[1]], [[0.5]], 2),
        routed("two tokens that cross", [[1.0], [2.0]], [[1], [0]], [[0.5], [0.25]], 2),
        routed("two tokens, the last experts idle", [[1.0], [2.0]], [[1], [0]], [[0.5], [0.25]], 4),
        routed("two tokens, the first expert idle", [[1.0], [2.0]], [[2], [1]], [[0.5], [0.25]], 3),
        routed("two experts for one token", [[1.0, 2.0, 3.0]], [[1, 0]], [[0.5, 0.25]], 2),
        routed("one expert takes all", [[1.0], [2.0], [3.0]], [[1], [1], [1]], [[0.5], [0.25], [0.125]], 2),
        routed("the six assignments", [[1.0], [2.0], [3.0]], SIX.view(3, 2), EIGHTHS, 6),
        routed("as many tokens as features", draw(4, 4, seed=905), [[2], [0], [2], [1]], draw(4, 1, seed=906).abs(), 3),
        drawn("seven tokens, three of four experts", 7, 5, 3, 4, seed=900),
        drawn("forty tokens, two of eight experts", 40, 6, 2, 8, seed=902),
        routed("bfloat16", draw(3, 4, seed=904).round().bfloat16(), SIX.view(3, 2), EIGHTHS, 6),
    ],
)


def sorted_parts(x, topk_idx, topk_weight, experts, token_of=None):
    """(token, weight in sorted order, results in sorted order) of the right way, to be put together wrongly."""
    expert_idx, k = topk_idx.flatten(), topk_idx.shape[1]
    order = expert_idx.argsort(stable=True)
    token = token_of(order, k) if token_of else order // k
    parts = x[token].split(expert_idx.bincount(minlength=len(experts)).tolist())
    results = torch.cat([expert(part) for expert, part in zip(experts, parts, strict=True)])
    return token, topk_weight.flatten()[order, None].to(x.dtype), results


def put_back(x, token, weighted):
    return torch.zeros_like(x).index_add(0, token, weighted)


@dispatch.mutant(
    "the weights were not sorted along: they still stand in token order",
    "after the sort, place i belongs to assignment order[i]. So take topk_weight.flatten()[order].",
)
def weights_not_sorted(x, topk_idx, topk_weight, experts):
    token, _, results = sorted_parts(x, topk_idx, topk_weight, experts)
    return put_back(x, token, results * topk_weight.flatten()[:, None].to(x.dtype))


@dispatch.mutant(
    "results are written over, not added: of a token's k results one is left",
    "y[token] = ... keeps the last value where a token occurs twice. index_add and scatter_add sum.",
)
def overwritten(x, topk_idx, topk_weight, experts):
    token, weight, results = sorted_parts(x, topk_idx, topk_weight, experts)
    y = torch.zeros_like(x)
    for i, row in enumerate(token.tolist()):
        y[row] = results[i] * weight[i]
    return y


@dispatch.mutant(
    "the token is order % tokens, where order // k belongs",
    "the flattened list runs token 0, 0, 1, 1, 2, 2: each token k times in a row. order % tokens is right for 0, 1, 2, "
    "0, 1, 2, that is for x.repeat(k, 1).",
)
def tiled(x, topk_idx, topk_weight, experts):
    return put_back(x, *_weighted(sorted_parts(x, topk_idx, topk_weight, experts, lambda order, k: order % len(x))))


def _weighted(parts):
    token, weight, results = parts
    return token, results * weight


@dispatch.mutant(
    "order was taken for the token number: the division by k is missing",
    "there are k times more assignments than tokens. Assignment a belongs to token a // k.",
)
def not_divided(x, topk_idx, topk_weight, experts):
    return put_back(x, *_weighted(sorted_parts(x, topk_idx, topk_weight, experts, lambda order, k: order)))


@dispatch.mutant(
    "the token is order // tokens, where order // k belongs",
    "k assignments belong to one token, however many tokens there are.",
)
def divided_by_tokens(x, topk_idx, topk_weight, experts):
    return put_back(x, *_weighted(sorted_parts(x, topk_idx, topk_weight, experts, lambda order, k: order // len(x))))


@dispatch.mutant(
    "the token is order // 2, where order // k belongs",
    "k is topk_idx.shape[1]; in the notebook's example it happens to be 2.",
)
def divided_by_two(x, topk_idx, topk_weight, experts):
    return put_back(x, *_weighted(sorted_parts(x, topk_idx, topk_weight, experts, lambda order, k: order // 2)))


@dispatch.mutant(
    "x itself was cut into slices, in token order",
    "the first slice is expert 0's, so its tokens must come first: split x[token], not x.",
)
def cut_unsorted(x, topk_idx, topk_weight, experts):
    expert_idx, k = topk_idx.flatten(), topk_idx.shape[1]
    order = expert_idx.argsort(stable=True)
    parts = x.split(expert_idx.bincount(minlength=len(experts)).tolist())
    results = torch.cat([expert(part) for expert, part in zip(experts, parts, strict=True)])
    return put_back(x, order // k, results * topk_weight.flatten()[order, None].to(x.dtype))


@dispatch.mutant(
    "the ends were given to split, which wants the sizes",
    "x[token].split([2, 1]) cuts a piece of two rows, then one of one. Leave out the running sum.",
)
def split_at_ends(x, topk_idx, topk_weight, experts):
    expert_idx, k = topk_idx.flatten(), topk_idx.shape[1]
    order = expert_idx.argsort(stable=True)
    parts = x[order // k].split(slices_reference(expert_idx, len(experts)).tolist())
    results = torch.cat([expert(part) for expert, part in zip(experts, parts, strict=True)])
    return put_back(x, order // k, results * topk_weight.flatten()[order, None].to(x.dtype))


@dispatch.mutant(
    "the weights are one row; they must stand as a column beside the results",
    "[size, hidden] * [size] multiplies along hidden. weight[:, None] gives each row its own weight.",
)
def weights_in_a_row(x, topk_idx, topk_weight, experts):
    token, weight, results = sorted_parts(x, topk_idx, topk_weight, experts)
    return put_back(x, token, results * weight[:, 0])


@dispatch.mutant(
    "the result is all zeros: what index_add returned was thrown away",
    "y.index_add(...) leaves y alone and returns the sum. Write y = y.index_add(...), or y.index_add_(...).",
)
def thrown_away(x, topk_idx, topk_weight, experts):
    return torch.zeros_like(x)


@dispatch.mutant(
    "the weights were not brought to the type of x",
    "the weights are float32, and bfloat16 times float32 is float32, which can't be added into a bfloat16 y. Write "
    "weight.to(x.dtype).",
)
def weights_keep_type(x, topk_idx, topk_weight, experts):
    token, _, results = sorted_parts(x, topk_idx, topk_weight, experts)
    order = topk_idx.flatten().argsort(stable=True)
    return put_back(x, token, results * topk_weight.flatten()[order, None])


@dispatch.mutant(
    "the weights are not used",
    "the router says how much of each expert a token gets. Without its weights the router could learn nothing.",
)
def unweighted(x, topk_idx, topk_weight, experts):
    token, _, results = sorted_parts(x, topk_idx, topk_weight, experts)
    return put_back(x, token, results)


@dispatch.mutant(
    "all k results of a token got the weight of its first expert",
    "topk_weight[t, j] belongs to the j-th expert of token t: each assignment has a weight of its own.",
)
def first_weight(x, topk_idx, topk_weight, experts):
    return dispatch_reference(x, topk_idx, topk_weight[:, :1].expand(*topk_idx.shape), experts)


@dispatch.mutant(
    "the weights were rescaled to sum 1",
    "that is the gate's decision (norm_topk_prob). Dispatch takes the weights as they come.",
)
def rescaled(x, topk_idx, topk_weight, experts):
    return dispatch_reference(x, topk_idx, topk_weight / topk_weight.sum(dim=-1, keepdim=True), experts)


@dispatch.mutant(
    "the k results of a token are averaged",
    "their weighted sum is wanted: the weights already say how much each counts.",
)
def averaged(x, topk_idx, topk_weight, experts):
    return dispatch_reference(x, topk_idx, topk_weight, experts) / topk_idx.shape[1]


@dispatch.mutant(
    "the weight stands on the expert's input, not on its result",
    "an expert bends lines: half of the input does not give half of the result.",
)
def weighted_input(x, topk_idx, topk_weight, experts):
    expert_idx, k = topk_idx.flatten(), topk_idx.shape[1]
    order = expert_idx.argsort(stable=True)
    fed = x[order // k] * topk_weight.flatten()[order, None].to(x.dtype)
    parts = fed.split(expert_idx.bincount(minlength=len(experts)).tolist())
    results = [expert(part) for expert, part in zip(experts, parts, strict=True)]
    return put_back(x, order // k, torch.cat(results))


@dispatch.mutant(
    "idle experts at the end are not counted, so there are fewer slices than experts",
    "bincount stops at the largest number it sees. With minlength=len(experts) an idle expert gets an empty slice.",
)
def no_minlength_in_dispatch(x, topk_idx, topk_weight, experts):
    expert_idx, k = topk_idx.flatten(), topk_idx.shape[1]
    order = expert_idx.argsort(stable=True)
    parts = x[order // k].split(expert_idx.bincount().tolist())
    results = torch.cat([expert(part) for expert, part in zip(experts, parts, strict=True)])
    return put_back(x, order // k, results * topk_weight.flatten()[order, None].to(x.dtype))


@dispatch.mutant(
    "idle experts were left out of the count, and those behind them moved up",
    "unique() lists only the experts that occur: with expert 0 idle, it runs on expert 1's tokens.",
)
def idle_moves_others(x, topk_idx, topk_weight, experts):
    busy = topk_idx.unique()
    moved = [_call_unchecked(experts[i]) for i in range(len(busy))]
    return dispatch_reference(x, torch.searchsorted(busy, topk_idx), topk_weight, moved)


def _call_unchecked(expert):
    return lambda x: x + expert.shift


@dispatch.mutant(
    "only the best expert of each token is used",
    "the token was promised k experts, in training and in inference alike.",
)
def best_only(x, topk_idx, topk_weight, experts):
    return dispatch_reference(x, topk_idx[:, :1], topk_weight[:, :1], experts)


@dispatch.mutant(
    "the results were not brought back: they stand in the order of the sort",
    "after the sort row 0 is no longer token 0. token (= order // k) says where each result belongs.",
)
def left_sorted(x, topk_idx, topk_weight, experts):
    _, weight, results = sorted_parts(x, topk_idx, topk_weight, experts)
    return (results * weight).view(len(x), -1, x.shape[1]).sum(dim=1)


@dispatch.mutant(
    "the sort was applied a second time instead of undone",
    "results[order] sorts again. The way back is results[order.argsort()], or index_add with the token numbers.",
)
def sorted_twice(x, topk_idx, topk_weight, experts):
    _, weight, results = sorted_parts(x, topk_idx, topk_weight, experts)
    order = topk_idx.flatten().argsort(stable=True)
    return (results * weight)[order].view(len(x), -1, x.shape[1]).sum(dim=1)


@dispatch.mutant(
    "topk_idx was flattened column by column",
    "flatten() runs along the rows: token 0 with its k experts first. Only then is the token order // k.",
)
def flattened_by_columns(x, topk_idx, topk_weight, experts):
    tokens, k = topk_idx.shape
    return dispatch_reference(x, topk_idx.T.reshape(tokens, k), topk_weight.T.reshape(tokens, k), experts)


@dispatch.mutant(
    "the results are added to x",
    "the block around the layer adds x, so it would be added twice. Begin with zeros.",
)
def added_to_x(x, topk_idx, topk_weight, experts):
    return x + dispatch_reference(x, topk_idx, topk_weight, experts)


@dispatch.mutant(
    "the last token of each slice is lost",
    "a slice [start:end] does not take in its end, so end is the running sum itself, without - 1.",
)
def last_lost(x, topk_idx, topk_weight, experts):
    expert_idx, k = topk_idx.flatten(), topk_idx.shape[1]
    order, y, start = expert_idx.argsort(stable=True), torch.zeros_like(x), 0
    for expert, end in zip(experts, slices_reference(expert_idx, len(experts)).tolist(), strict=True):
        place = order[start : max(end - 1, start)]
        weight = topk_weight.flatten()[place, None].to(x.dtype)
        y, start = y.index_add(0, place // k, expert(x[place // k]) * weight), end
    return y


@dispatch.mutant(
    "the assignments were sorted from the last expert to the first, the slices were not",
    "the first slice is expert 0's, so its tokens must come first.",
)
def descending(x, topk_idx, topk_weight, experts):
    turned = [_call_unchecked(expert) for expert in experts]
    expert_idx, k = topk_idx.flatten(), topk_idx.shape[1]
    order = expert_idx.argsort(stable=True, descending=True)
    parts = x[order // k].split(expert_idx.bincount(minlength=len(experts)).tolist())
    results = torch.cat([expert(part) for expert, part in zip(turned, parts, strict=True)])
    return put_back(x, order // k, results * topk_weight.flatten()[order, None].to(x.dtype))


@dispatch.mutant(
    "every expert runs on every token",
    "the result would be right and the saving gone: that costs as much as a feed-forward with all experts' weights.",
)
def run_all(x, topk_idx, topk_weight, experts):
    every = torch.stack([expert(x) for expert in experts], dim=1)
    share = torch.zeros(len(x), len(experts), dtype=x.dtype).scatter(1, topk_idx, topk_weight.to(x.dtype))
    return (every * share[..., None]).sum(dim=1)


@dispatch.mutant(
    "the result is float32, whatever the type of x",
    "the weights are float32, and bfloat16 times float32 is float32. Bring the weights to the type of x.",
)
def promoted(x, topk_idx, topk_weight, experts):
    return dispatch_reference(x.float(), topk_idx, topk_weight, experts)


# 3. SafeExperts ------------------------------------------------------------------------------------------------------

WIDTH, COUNT = 2, 3  # of the experts in the check: features, and how many experts


class SafeExpertsReference(nn.Module):
    """The sorted dispatch, an idle expert on its empty slice."""

    def __init__(self, experts):
        super().__init__()
        self.experts = nn.ModuleList(experts)

    def forward(self, x, topk_idx, topk_weight):
        return dispatch_reference(x, topk_idx, topk_weight, self.experts)


def train_once(made, x, topk_idx, topk_weight, broken):
    """Build it on three small experts and go forward and back: the result and all gradients, None where missing."""
    experts = []
    for i in range(COUNT):
        experts.append(nn.Linear(WIDTH, WIDTH))
        with torch.no_grad():
            experts[i].weight.copy_(draw(WIDTH, WIDTH, seed=950 + i))
            experts[i].bias.copy_(draw(WIDTH, seed=960 + i))
            if broken == f"expert {i}":
                experts[i].weight.fill_(torch.inf)
    part = made(experts).train()
    x, topk_weight = x.requires_grad_(), topk_weight.requires_grad_()
    y = part(x, topk_idx, topk_weight)
    if torch.is_tensor(y) and y.requires_grad:
        y.square().sum().backward()
    grads = [[parameter.grad for parameter in expert.parameters()] for expert in experts]
    flat = [None if any(g is None for g in own) else torch.cat([g.flatten() for g in own]) for own in grads]
    return (y, x.grad, topk_weight.grad, *flat)


def training_case(label: str, topk_idx: list, seed: int, broken: str = "none"):
    weight = draw(len(topk_idx), len(topk_idx[0]), seed=seed).sigmoid()
    return case(label, draw(len(topk_idx), WIDTH, seed=seed + 1), torch.tensor(topk_idx), weight, broken)


safe = Exercise(
    name="09_moe_dispatch.SafeExperts",
    title="Experts that may stay idle while they are trained",
    signature="SafeExperts(experts)",
    reference=SafeExpertsReference,
    call=train_once,
    arguments=("x", "topk_idx", "topk_weight", "with infinite weights"),
    returns=("y", "gradient of x", "gradient of topk_weight", *(f"gradient of expert {i}" for i in range(COUNT))),
    cases=[
        training_case("one token, experts 0 and 2 idle", [[1]], seed=970),
        training_case("two tokens, expert 1 idle", [[2], [0]], seed=972),
        training_case("nobody idle", [[2], [0], [1]], seed=974),
        training_case("two experts for each token, the last one idle", [[1, 0], [0, 1]], seed=976),
        training_case("two experts for each token", [[1, 0], [2, 1], [0, 2], [2, 0]], seed=978),
        training_case("expert 1 idle, with infinite weights", [[2], [0]], seed=980, broken="expert 1"),
    ],
)


class Looped(nn.Module):
    """A right loop over experts with tokens; `idle` says what becomes of the others. The mistakes change one step."""

    def __init__(self, experts):
        super().__init__()
        self.experts = nn.ModuleList(experts)

    def forward(self, x, topk_idx, topk_weight):
        y, k = torch.zeros_like(x), topk_idx.shape[1]
        for i, expert in enumerate(self.experts):
            place = (topk_idx.flatten() == i).nonzero().flatten()
            if len(place):
                y = self.add(y, place // k, expert(x[place // k]), topk_weight.flatten()[place, None])
            else:
                y = self.idle(y, expert, x)
        return y

    def add(self, y, token, result, weight):
        return y.index_add(0, token, result * weight)

    def idle(self, y, expert, x):
        return y + expert(x[:0]).sum()


@safe.mutant(
    "idle experts are skipped, so they get no gradient at all",
    "DistributedDataParallel waits for a gradient of every parameter and raises at the next step. An expert that runs "
    "on its empty slice gets a gradient of 0.",
    "for inference, and in one process, skipping is right; DistributedDataParallel has find_unused_parameters=True.",
)
class Skipped(Looped):
    def idle(self, y, expert, x):
        return y


@safe.mutant(
    "an idle expert takes part through 0 * sum of its weights",
    "0 times infinity is NaN: one broken weight of an expert that nobody asked for spoils the output.",
    "MiniMind's training loop does that; with finite weights it is the same.",
)
class ZeroDummy(Looped):
    def idle(self, y, expert, x):
        y = y.clone()
        y[0, 0] = y[0, 0] + 0 * sum(parameter.sum() for parameter in expert.parameters())
        return y


@safe.mutant(
    "an idle expert runs on a token, and the result is multiplied by 0",
    "0 times infinity is NaN. Its empty slice costs nothing and touches no token.",
)
class ZeroWeight(Looped):
    def idle(self, y, expert, x):
        return torch.cat([y[:1] + 0 * expert(x[:1]), y[1:]])


@safe.mutant(
    "every expert runs on every token, with weight 0 where it was not chosen",
    "0 times infinity is NaN, and the work grows with the number of experts.",
)
class EveryToken(Looped):
    def forward(self, x, topk_idx, topk_weight):
        share = torch.zeros(len(x), len(self.experts)).scatter_add(1, topk_idx, topk_weight)
        return sum(share[:, i, None] * expert(x) for i, expert in enumerate(self.experts))


@safe.mutant(
    "the idle expert's dummy has a small factor, not 0",
    "then it is trained toward small weights by tokens that never visited it. Its gradient must be 0.",
)
class SmallDummy(Looped):
    def idle(self, y, expert, x):
        return y + 1e-3 * sum(parameter.sum() for parameter in expert.parameters())


@safe.mutant(
    "it runs without gradients",
    "torch.no_grad is for inference. Here nothing could learn.",
    "MiniMind-2's inference function is written so.",
)
class NoGradients(Looped):
    @torch.no_grad()
    def forward(self, x, topk_idx, topk_weight):
        return super().forward(x, topk_idx, topk_weight)


@safe.mutant(
    "the weights are detached: the router gets no gradient",
    "the weights are the only way from the loss to the router. Leave out .detach() and .item().",
)
class DetachedWeights(Looped):
    def forward(self, x, topk_idx, topk_weight):
        return super().forward(x, topk_idx, topk_weight.detach())


@safe.mutant(
    "the tokens are detached: nothing below this layer learns through the experts",
    "the gradient of x is what the layers below are trained with.",
)
class DetachedTokens(Looped):
    def forward(self, x, topk_idx, topk_weight):
        return super().forward(x.detach(), topk_idx, topk_weight)


@safe.mutant(
    "the experts' results are detached or copied by value, so no expert learns",
    "a result that passed through .detach(), .data or .tolist() has lost its way back.",
)
class DetachedResults(Looped):
    def add(self, y, token, result, weight):
        return super().add(y, token, result.detach(), weight)


@safe.mutant(
    "results are written over, not added",
    "a token with k experts needs the sum of all k results.",
)
class Overwritten(Looped):
    def add(self, y, token, result, weight):
        return y.index_copy(0, token, result * weight)


class Sorted(SafeExpertsReference):
    """The right sorted way in steps. The mistakes change one of them."""

    def forward(self, x, topk_idx, topk_weight):
        expert_idx, k = topk_idx.flatten(), topk_idx.shape[1]
        order = expert_idx.argsort(stable=True)
        parts = x[order // k].split(self.sizes(expert_idx))
        results = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=False)])
        return self.add(torch.zeros_like(x), order // k, results * self.weight(topk_weight.flatten(), order)[:, None])

    def sizes(self, expert_idx):
        return expert_idx.bincount(minlength=len(self.experts)).tolist()

    def weight(self, weight, order):
        return weight[order]

    def add(self, y, token, weighted):
        return y.index_add(0, token, weighted)


@safe.mutant(
    "idle experts at the end are not counted, so they don't run and get no gradient",
    "bincount stops at the largest number it sees. With minlength=len(self.experts) each gets its empty slice.",
)
class NoMinlength(Sorted):
    def sizes(self, expert_idx):
        return expert_idx.bincount().tolist()


@safe.mutant(
    "the weights were not sorted along: they still stand in token order",
    "after the sort, place i belongs to assignment order[i]. So take topk_weight.flatten()[order].",
)
class WeightsNotSorted(Sorted):
    def weight(self, weight, order):
        return weight


@safe.mutant(
    "y[token] += ... keeps one result of a token that occurs twice",
    "such an assignment writes, it does not sum. index_add and scatter_add sum.",
)
class PutNotAdded(Sorted):
    def add(self, y, token, weighted):
        y[token] += weighted
        return y


@safe.mutant(
    "the mean of an empty slice is NaN",
    "the mean divides by the number of rows, here 0. The sum of an empty slice is 0.",
)
class MeanOfNothing(Looped):
    def idle(self, y, expert, x):
        return y + 0 * expert(x[:0]).mean()


@safe.mutant(
    "the weights are not used",
    "the router says how much of each expert a token gets, and learns only through these weights.",
)
class Unweighted(Looped):
    def add(self, y, token, result, weight):
        return y.index_add(0, token, result)


@safe.mutant(
    "the results are added into x itself",
    "x is needed again, for the gradients and for the experts to come. Begin with torch.zeros_like(x).",
)
class IntoInput(Looped):
    def forward(self, x, topk_idx, topk_weight):
        for i, expert in enumerate(self.experts):
            place = (topk_idx.flatten() == i).nonzero().flatten()
            token = place // topk_idx.shape[1]
            x.index_add_(0, token, expert(x[token]) * topk_weight.flatten()[place, None])
        return x


EXERCISES = [slices, dispatch, safe]
