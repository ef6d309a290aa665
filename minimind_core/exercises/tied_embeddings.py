"""Exercises of notebook 10: gradients of a tied matrix by hand, its entry in the optimizer, and its way from a file."""

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import nn

from ..config import MiniMindConfig
from ..model import MiniMindForCausalLM
from ..training import parameter_groups
from .framework import Exercise, case, draw


def ids(*rows: object) -> torch.Tensor:
    return torch.tensor(rows)


# 1. embedding_gradient -----------------------------------------------------------------------------------------------


def embedding_gradient_reference(ids, grad, vocab):
    """Add each position's gradient to its token's row. ids: [...]; grad: [..., hidden]. Returns [vocab, hidden]."""
    rows = grad.new_zeros(vocab, grad.shape[-1])
    return rows.index_add(0, ids.reshape(-1), grad.reshape(-1, grad.shape[-1]))


def look_up_case(label: str, ids: torch.Tensor, hidden: int, vocab: int, seed: int):
    return case(label, ids, draw(*ids.shape, hidden, seed=seed), vocab)


embedding_gradient = Exercise(
    name="10_tied_embeddings.embedding_gradient",
    title="The gradient of a look-up: each position adds to its token's row",
    signature="embedding_gradient(ids, grad, vocab)",
    reference=embedding_gradient_reference,
    cases=[
        case("two positions, one number each", ids(2, 1), torch.tensor([[3.0], [-0.5]]), 3),
        case("one token twice", ids(1, 1), torch.tensor([[3.0], [-0.5]]), 3),
        look_up_case("two numbers each, token 0 too", ids(0, 2, 0), 2, 3, seed=1001),
        look_up_case("batch and seq", ids([1, 3, 1], [3, 0, 4]), 2, 6, seed=1002),
        look_up_case("a longer batch", (torch.arange(24) ** 2 % 7).reshape(2, 12), 5, 7, seed=1003),
    ],
)


def each_position(ids, grad):
    """(place in the text, token, gradient) of every position."""
    places = torch.arange(ids.shape[-1]).expand_as(ids)
    flat = places.reshape(-1).tolist(), ids.reshape(-1).tolist(), grad.reshape(-1, grad.shape[-1])
    return list(zip(*flat, strict=True))


@embedding_gradient.mutant(
    "a token that stands in the text twice keeps one gradient only",
    "rows[ids] = ... and rows[ids] += ... write to the same row again, and the last one stays. Every position counts: "
    "index_add, or a loop with +=.",
)
def written_not_added(ids, grad, vocab):
    rows = grad.new_zeros(vocab, grad.shape[-1])
    for _, token, value in each_position(ids, grad):
        rows[token] = value
    return rows


@embedding_gradient.mutant(
    "the loop runs over the first axis of ids only",
    "ids[0] is then a whole text, and rows[ids[0]] += ... keeps one gradient of a token that stands in it twice. "
    "Flatten first: ids.reshape(-1), grad.reshape(-1, hidden).",
)
def first_axis_only(ids, grad, vocab):
    rows = grad.new_zeros(vocab, grad.shape[-1])
    for token, value in zip(ids, grad, strict=True):
        rows[token] += value
    return rows


@embedding_gradient.mutant(
    "the result is all zeros",
    "rows.index_add(...) changes nothing, it returns a new tensor: return that one. index_add_ changes rows itself.",
)
def sum_thrown_away(ids, grad, vocab):
    return grad.new_zeros(vocab, grad.shape[-1])


@embedding_gradient.mutant(
    "a token's gradients are averaged, not added",
    "the loss changes with every place at which the row is used, so the slopes add up. A frequent token moves more.",
    "nn.Embedding has scale_grad_by_freq=True for it; MiniMind leaves it off.",
)
def averaged(ids, grad, vocab):
    counts = torch.bincount(ids.reshape(-1), minlength=vocab).clamp(min=1)
    return embedding_gradient_reference(ids, grad, vocab) / counts[:, None]


@embedding_gradient.mutant(
    "the whole is divided by the number of positions",
    "the mean over tokens is taken in the loss. Its 1/n is in grad already.",
)
def divided(ids, grad, vocab):
    return embedding_gradient_reference(ids, grad, vocab) / ids.numel()


@embedding_gradient.mutant(
    "the gradients go to the rows of the positions, not of the tokens",
    "position 0 looked up row ids[0]. That row is the one that was used, so it gets the gradient.",
)
def by_position(ids, grad, vocab):
    rows = grad.new_zeros(vocab, grad.shape[-1])
    for place, _, value in each_position(ids, grad):
        rows[place % vocab] += value
    return rows


@embedding_gradient.mutant(
    "the row of token 0 gets nothing",
    "only a padding_idx would freeze a row, and MiniMind's embedding has none.",
    "nn.Embedding(..., padding_idx=0) does so.",
)
def padding_frozen(ids, grad, vocab):
    rows = embedding_gradient_reference(ids, grad, vocab)
    rows[0] = 0
    return rows


@embedding_gradient.mutant(
    "only the rows that occur are returned",
    "the gradient has the shape of the matrix, [vocab, hidden]: the other rows are zero.",
    "nn.Embedding(..., sparse=True) stores it so.",
)
def only_occurring(ids, grad, vocab):
    return embedding_gradient_reference(ids, grad, vocab)[ids.unique()]


@embedding_gradient.mutant(
    "the result is transposed: [hidden, vocab]",
    "the matrix is [vocab, hidden], one row for each token, and its gradient is like it.",
)
def transposed(ids, grad, vocab):
    return embedding_gradient_reference(ids, grad, vocab).T


@embedding_gradient.mutant(
    "the last position of each text is left out",
    "the shift belongs to the loss. If the last position has nothing to predict, its grad is zero by itself.",
)
def last_left_out(ids, grad, vocab):
    return embedding_gradient_reference(ids[..., :-1], grad[..., :-1, :], vocab)


@embedding_gradient.mutant(
    "every row gets all the gradients",
    "a row moves by what was done with it. What is not looked up gets nothing from this end.",
)
def everywhere(ids, grad, vocab):
    return grad.reshape(-1, grad.shape[-1]).sum(dim=0).expand(vocab, -1)


@embedding_gradient.mutant(
    "the sign is turned",
    "the gradient points uphill. The optimizer takes the minus.",
)
def downhill(ids, grad, vocab):
    return -embedding_gradient_reference(ids, grad, vocab)


@embedding_gradient.mutant(
    "ids is not flattened for index_add",
    "its index is a list of rows, one axis. ids is [batch, seq] here: ids.reshape(-1), grad.reshape(-1, hidden).",
)
def not_flattened(ids, grad, vocab):
    return grad.new_zeros(vocab, grad.shape[-1]).index_add(0, ids, grad)


@embedding_gradient.mutant(
    "the one-hot matrix holds whole numbers, and grad holds floats",
    "F.one_hot gives int64, and PyTorch multiplies matrices of one type only: .to(grad.dtype) first.",
)
def one_hot_of_whole_numbers(ids, grad, vocab):
    return F.one_hot(ids, vocab).reshape(-1, vocab).T @ grad.reshape(-1, grad.shape[-1])


# 2. tied_gradient ----------------------------------------------------------------------------------------------------


def tied_gradient_reference(weight, ids, targets):
    """Look up, score, mean cross-entropy: the gradient of the one matrix from either end, and their sum."""
    x = weight[ids]
    d_logits = (F.softmax(x @ weight.T, dim=-1) - F.one_hot(targets, len(weight))) / len(ids)
    from_head = d_logits.T @ x
    from_embedding = embedding_gradient_reference(ids, d_logits @ weight, len(weight))
    return from_embedding, from_head, from_embedding + from_head


def two_ends_case(label: str, text: list[int], targets: list[int], hidden: int, vocab: int, seed: int, scale=1.0):
    return case(label, draw(vocab, hidden, seed=seed, scale=scale), ids(*text), ids(*targets))


tied_gradient = Exercise(
    name="10_tied_embeddings.tied_gradient",
    title="One matrix, two gradients: from the embedding, from the head, and their sum",
    signature="tied_gradient(weight, ids, targets)",
    reference=tied_gradient_reference,
    returns=("from_embedding", "from_head", "total"),
    provides={"embedding_gradient": embedding_gradient_reference},
    cases=[
        case("one token, two in the vocabulary", torch.tensor([[1.0], [0.5]]), ids(0), ids(1)),
        two_ends_case("one token that predicts itself", [2], [2], hidden=2, vocab=3, seed=1011),
        two_ends_case("two tokens", [0, 2], [2, 1], hidden=2, vocab=3, seed=1012),
        two_ends_case("one token twice", [1, 1, 3], [1, 2, 0], hidden=3, vocab=4, seed=1013),
        two_ends_case("as many tokens as features and in the vocabulary", [3, 0, 3, 1], [0, 3, 1, 2], 4, 4, seed=1014),
        two_ends_case("logits of hundreds", [4, 2, 4], [2, 4, 0], hidden=4, vocab=5, seed=1015, scale=9.0),
    ],
)


def by_hand(weight, ids, targets, d_logits=None, spread=embedding_gradient_reference):
    """The same with another gradient of the logits, or another way back to the rows."""
    x = weight[ids]
    if d_logits is None:
        d_logits = (F.softmax(x @ weight.T, dim=-1) - F.one_hot(targets, len(weight))) / len(ids)
    from_head = d_logits.T @ x
    from_embedding = spread(ids, d_logits @ weight, len(weight))
    return from_embedding, from_head, from_embedding + from_head


@tied_gradient.mutant(
    "the total is the head's gradient alone",
    "the matrix is used twice, so both uses change the loss: a row that was looked up is pulled from that side too.",
)
def only_head(weight, ids, targets):
    from_embedding, from_head, _ = tied_gradient_reference(weight, ids, targets)
    return from_embedding, from_head, from_head


@tied_gradient.mutant(
    "the total is the embedding's gradient alone",
    "then a token that is not in the text would never be told that it was not meant.",
)
def only_embedding(weight, ids, targets):
    from_embedding, from_head, _ = tied_gradient_reference(weight, ids, targets)
    return from_embedding, from_head, from_embedding


@tied_gradient.mutant(
    "all three are the sum",
    "autograd adds the two ends of one tensor. By hand they come apart: two gradients first, then their sum.",
)
def all_the_sum(weight, ids, targets):
    *_, total = tied_gradient_reference(weight, ids, targets)
    return total, total, total


@tied_gradient.mutant(
    "from_embedding is the sum already",
    "from_embedding += from_head changes from_embedding itself. Write total = from_embedding + from_head.",
)
def added_in_place(weight, ids, targets):
    _, from_head, total = tied_gradient_reference(weight, ids, targets)
    return total, from_head, total


@tied_gradient.mutant(
    "from_head is the sum already",
    "from_head += from_embedding changes from_head itself. Write total = from_embedding + from_head.",
)
def added_to_head(weight, ids, targets):
    from_embedding, _, total = tied_gradient_reference(weight, ids, targets)
    return from_embedding, total, total


@tied_gradient.mutant(
    "the 1 is subtracted at every position, for all targets at once",
    "d_logits[:, targets] are whole columns. Each position has one right token: F.one_hot(targets, vocab), "
    "or d_logits[torch.arange(n), targets].",
)
def whole_columns(weight, ids, targets):
    d_logits = F.softmax(weight[ids] @ weight.T, dim=-1)
    d_logits[:, targets] -= 1
    return by_hand(weight, ids, targets, d_logits / len(ids))


@tied_gradient.mutant(
    "the loss is divided by the vocabulary, not by the number of tokens",
    "the mean runs over the positions of the text: n is len(ids).",
)
def over_vocabulary(weight, ids, targets):
    return tuple(len(ids) / len(weight) * part for part in tied_gradient_reference(weight, ids, targets))


@tied_gradient.mutant(
    "the total is the mean of the two",
    "slopes add up: move the matrix a little, and both ends change the loss by their own amount.",
)
def mean_of_both(weight, ids, targets):
    from_embedding, from_head, total = tied_gradient_reference(weight, ids, targets)
    return from_embedding, from_head, total / 2


@tied_gradient.mutant(
    "the two ends are returned in the wrong order",
    "first from_embedding, then from_head, then the total.",
)
def exchanged(weight, ids, targets):
    from_embedding, from_head, total = tied_gradient_reference(weight, ids, targets)
    return from_head, from_embedding, total


@tied_gradient.mutant(
    "the loss is summed, not averaged: the 1/n is missing",
    "MiniMind's loss is the mean over the tokens, so each contributes 1/n of its slope.",
)
def summed(weight, ids, targets):
    return tuple(len(ids) * part for part in tied_gradient_reference(weight, ids, targets))


@tied_gradient.mutant(
    "the 1 of the right token is not subtracted: softmax stands alone",
    "all scores would be pushed down, and nothing would pull the right one up.",
)
def no_target(weight, ids, targets):
    return by_hand(weight, ids, targets, F.softmax(weight[ids] @ weight.T, dim=-1) / len(ids))


@tied_gradient.mutant(
    "the sign is turned: one-hot minus softmax",
    "this is the way downhill. The gradient is softmax minus one-hot; the optimizer takes the minus.",
)
def downhill_logits(weight, ids, targets):
    return tuple(-part for part in tied_gradient_reference(weight, ids, targets))


@tied_gradient.mutant(
    "the right answer is taken to be the token that was read",
    "the 1 belongs to targets, the next token. With ids the model would be taught to repeat its input.",
)
def target_is_input(weight, ids, targets):
    return by_hand(weight, ids, ids)


@tied_gradient.mutant(
    "the embedding's gradient goes to the rows of the targets",
    "looked up were the rows of ids. What comes back through the look-up belongs to them.",
)
def rows_of_targets(weight, ids, targets):
    return by_hand(weight, ids, targets, spread=lambda ids, grad, vocab: spread_to(targets, grad, vocab))


def spread_to(rows, grad, vocab):
    return embedding_gradient_reference(rows, grad, vocab)


@tied_gradient.mutant(
    "a token that is read twice keeps one gradient only",
    "weight_grad[ids] += ... writes to the same row again. Add them all, as in the exercise before.",
)
def read_twice_lost(weight, ids, targets):
    return by_hand(weight, ids, targets, spread=written_not_added)


@tied_gradient.mutant(
    "softmax runs over the tokens of the text, not over the vocabulary",
    "the probabilities of all next tokens sum to 1 at each position: dim=-1.",
)
def softmax_over_tokens(weight, ids, targets):
    x = weight[ids]
    d_logits = (F.softmax(x @ weight.T, dim=0) - F.one_hot(targets, len(weight))) / len(ids)
    return by_hand(weight, ids, targets, d_logits)


@tied_gradient.mutant(
    "softmax is written as exp(z) / sum of exp(z), which overflows",
    "e to a score of 89 is too large for float32: infinity / infinity is NaN. "
    "torch.softmax takes off the largest first.",
)
def overflow(weight, ids, targets):
    x = weight[ids]
    grown = (x @ weight.T).exp()
    d_logits = (grown / grown.sum(dim=-1, keepdim=True) - F.one_hot(targets, len(weight))) / len(ids)
    return by_hand(weight, ids, targets, d_logits)


@tied_gradient.mutant(
    "log-softmax stands where the probabilities belong",
    "the slope of -log p with respect to the scores is p minus one-hot, with p itself.",
)
def log_probabilities(weight, ids, targets):
    d_logits = (F.log_softmax(weight[ids] @ weight.T, dim=-1) - F.one_hot(targets, len(weight))) / len(ids)
    return by_hand(weight, ids, targets, d_logits)


@tied_gradient.mutant(
    "F.one_hot(targets) is as wide as the largest target, not as the vocabulary",
    "it stops at the largest number that it meets. Its second argument says how many columns there are: len(weight).",
)
def one_hot_too_narrow(weight, ids, targets):
    return by_hand(weight, ids, targets, (F.softmax(weight[ids] @ weight.T, dim=-1) - F.one_hot(targets)) / len(ids))


@tied_gradient.mutant(
    "from_head is transposed: [hidden, vocab]",
    "a gradient has the shape of its matrix, [vocab, hidden]: d_logits [n, vocab] is the one to be turned around.",
)
def head_transposed(weight, ids, targets):
    from_embedding, from_head, total = tied_gradient_reference(weight, ids, targets)
    return from_embedding, from_head.T, total


@tied_gradient.mutant(
    "from_embedding has one row for each token of the text, not for each of the vocabulary",
    "d_logits @ weight is what comes back to the places that were looked up, [n, hidden]. Add it to their rows, as in "
    "the exercise before.",
)
def not_spread(weight, ids, targets):
    _, from_head, total = tied_gradient_reference(weight, ids, targets)
    d_logits = (F.softmax(weight[ids] @ weight.T, dim=-1) - F.one_hot(targets, len(weight))) / len(ids)
    return d_logits @ weight, from_head, total


@tied_gradient.mutant(
    "the head's 1/n is missing",
    "both ends start from the same d_logits, and the mean over the n tokens is in it: divide it once, before both.",
)
def head_summed(weight, ids, targets):
    from_embedding, from_head, _ = tied_gradient_reference(weight, ids, targets)
    return from_embedding, len(ids) * from_head, from_embedding + len(ids) * from_head


# 3. optimizer_groups -------------------------------------------------------------------------------------------------

ADAMW_DECAY = 0.01  # what torch.optim.AdamW takes for a group that says nothing


def optimizer_groups_reference(model, weight_decay):
    """Two groups for AdamW: matrices with decay, vectors (the norms) without. Each Parameter once."""
    return parameter_groups(model, weight_decay)


def read_groups(candidate: Callable, kind: str, weight_decay: float) -> tuple | None:
    """Build a model, group its Parameters, and count what AdamW would see."""
    model = MiniMindForCausalLM(MODELS[kind])
    groups = candidate(model, weight_decay)
    if groups is None or groups is ...:
        return groups
    if not isinstance(groups, list | tuple):
        raise TypeError(f"return the groups, a list of dictionaries; this is of type {type(groups).__name__}")
    known = {id(parameter) for parameter in model.parameters()}
    entries = [(parameter, group.get("weight_decay", ADAMW_DECAY)) for group in groups for parameter in members(group)]
    different = {id(parameter): (parameter, decay) for parameter, decay in entries if id(parameter) in known}
    sizes = {}
    for parameter, decay in different.values():
        sizes[decay] = sizes.get(decay, 0) + parameter.numel()
    return len(entries), len(different), sizes.get(weight_decay, 0), sizes.get(0, 0)


def members(group: dict) -> Iterable[torch.Tensor]:
    """The tensors of a group. Raises TypeError with what AdamW wants, if it is none."""
    if not isinstance(group, dict) or "params" not in group:
        raise TypeError('AdamW wants a list of dictionaries, each with "params": a list of Parameters')
    parameters = [group["params"]] if torch.is_tensor(group["params"]) else list(group["params"])
    parameters = [one[1] if isinstance(one, tuple) else one for one in parameters]  # named_parameters gives pairs
    if not all(torch.is_tensor(one) for one in parameters):
        raise TypeError('"params" must be Parameters, or (name, Parameter) pairs; model.parameters() gives them')
    return parameters


SIZES = MiniMindConfig(
    vocab_size=5,
    hidden_size=4,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    intermediate_size=6,
    max_position_embeddings=8,
)
MODELS = {
    "tied": SIZES,
    "untied": SIZES.replace(tie_word_embeddings=False),
    "without QK-norm": SIZES.replace(qk_norm=False),
    "with two experts": SIZES.replace(use_moe=True, num_experts=2),
}


optimizer_groups = Exercise(
    name="10_tied_embeddings.optimizer_groups",
    title="Groups for AdamW: each Parameter once, norms without decay",
    signature="optimizer_groups(model, weight_decay)",
    reference=optimizer_groups_reference,
    call=read_groups,
    arguments=("a MiniMind", "weight_decay"),
    returns=("entries", "Parameters of the model among them", "numbers with decay", "numbers without decay"),
    cases=[
        case("embedding and head tied", "tied", 0.1),
        case("embedding and head untied", "untied", 0.1),
        case("no norm of queries and keys, as in MiniMind-2", "without QK-norm", 0.05),
        case("experts in place of one feed-forward", "with two experts", 0.1),
    ],
)


def split(model, weight_decay, decays, parameters=None):
    """Two groups by a rule of the name and the Parameter."""
    named = list(model.named_parameters()) if parameters is None else parameters
    return [
        {"params": [p for name, p in named if decays(name, p)], "weight_decay": weight_decay},
        {"params": [p for name, p in named if not decays(name, p)], "weight_decay": 0.0},
    ]


def is_matrix(name, parameter):
    return parameter.ndim > 1


@optimizer_groups.mutant(
    "the norms' weights decay too",
    "decay pulls toward 0, and a norm's weight is at home near 1. A list of names such as 'LayerNorm.weight' matches "
    "nothing in MiniMind, whose norms are called otherwise. `ndim` asks no names.",
    "MiniMind's own trainer gives AdamW all parameters in one group.",
)
def all_decayed(model, weight_decay):
    return split(model, weight_decay, lambda name, parameter: True)


@optimizer_groups.mutant(
    "nothing decays",
    "without decay on the matrices, weights that no longer help stay as they are.",
)
def none_decayed(model, weight_decay):
    return split(model, weight_decay, lambda name, parameter: False)


@optimizer_groups.mutant(
    "the two groups are exchanged: norms decay and matrices do not",
    "a norm's weight is one number for each feature, at home near 1. It is the matrices that should stay small.",
)
def groups_exchanged(model, weight_decay):
    return split(model, weight_decay, lambda name, parameter: parameter.ndim <= 1)


@optimizer_groups.mutant(
    "the embedding does not decay",
    "tied, it is the head as well: a matrix like the others, and the largest one.",
    "some recipes leave embeddings out, where they are looked up only.",
)
def embedding_spared(model, weight_decay):
    return split(model, weight_decay, lambda name, parameter: parameter.ndim > 1 and "embed" not in name)


@optimizer_groups.mutant(
    "the tied matrix is in the list twice",
    "it has two names but is one Parameter. Listed twice, it would be moved twice in each step. model.parameters() "
    "gives each once; remove_duplicate=False and a walk over all modules do not.",
)
def tied_twice(model, weight_decay):
    return split(model, weight_decay, is_matrix, list(model.named_parameters(remove_duplicate=False)))


@optimizer_groups.mutant(
    "Parameters are listed once for each module that holds them",
    "module.parameters() gives those of its parts as well, so a walk over model.modules() meets each several times. "
    "AdamW refuses that. model.parameters() alone gives each once.",
)
def every_module(model, weight_decay):
    named = [("", parameter) for module in model.modules() for parameter in module.parameters()]
    return split(model, weight_decay, is_matrix, named)


@optimizer_groups.mutant(
    "neither group says weight_decay",
    "AdamW then takes its default, 0.01, for both: the norms decay, and the caller's number is lost.",
)
def decay_never_said(model, weight_decay):
    return [{"params": group["params"]} for group in split(model, weight_decay, is_matrix)]


@optimizer_groups.mutant(
    "the tensors come from state_dict, and are no Parameters",
    "they never get a gradient, so nothing would be trained, without any error.",
)
def from_state_dict(model, weight_decay):
    return split(model, weight_decay, is_matrix, list(model.state_dict().items()))


@optimizer_groups.mutant(
    "the second group does not say weight_decay=0",
    "AdamW has a default of 0.01 for groups that say nothing.",
)
def default_decay(model, weight_decay):
    groups = split(model, weight_decay, is_matrix)
    return [groups[0], {"params": groups[1]["params"]}]


@optimizer_groups.mutant(
    "the first group does not carry weight_decay",
    "AdamW then takes its default, 0.01, whatever the caller asked for.",
)
def decay_not_passed(model, weight_decay):
    groups = split(model, weight_decay, is_matrix)
    return [{"params": groups[0]["params"]}, groups[1]]


@optimizer_groups.mutant(
    "the norms are not in any group",
    "no decay does not mean no training: they need a group of their own, with weight_decay 0.",
)
def norms_left_out(model, weight_decay):
    return split(model, weight_decay, is_matrix)[:1]


@optimizer_groups.mutant(
    "only norms with 'layernorm' in their name are spared",
    "q_norm, k_norm and the final model.norm are norms too.",
)
def by_layernorm(model, weight_decay):
    return split(model, weight_decay, lambda name, parameter: "layernorm" not in name)


@optimizer_groups.mutant(
    "the head is left out, which only a tied model forgives",
    "untied, lm_head has a matrix of its own. model.parameters() knows: it gives one matrix or two.",
)
def head_left_out(model, weight_decay):
    named = [(name, parameter) for name, parameter in model.named_parameters() if not name.startswith("lm_head")]
    return split(model, weight_decay, is_matrix, named)


@optimizer_groups.mutant(
    "the tied matrix is in no group",
    "it is left out under both of its names, and would never be trained.",
)
def matrix_left_out(model, weight_decay):
    named = [
        (name, p) for name, p in model.named_parameters() if not name.startswith(("lm_head", "model.embed_tokens"))
    ]
    return split(model, weight_decay, is_matrix, named)


@optimizer_groups.mutant(
    "the decay is 0.1, whatever weight_decay says",
    "the number is a setting of the run: use the argument.",
)
def decay_fixed(model, weight_decay):
    return split(model, 0.1, is_matrix)


@optimizer_groups.mutant(
    "the norms are in both groups",
    "AdamW refuses a Parameter that it meets twice. The first group is for matrices only: parameter.ndim > 1.",
)
def norms_in_both(model, weight_decay):
    groups = split(model, weight_decay, is_matrix)
    return [{"params": list(model.parameters()), "weight_decay": weight_decay}, groups[1]]


@optimizer_groups.mutant(
    "the groups hold copies, or `.data`, and no Parameters",
    "a gradient arrives at the Parameter itself. What .data, .detach() or .clone() gives is never trained.",
)
def not_themselves(model, weight_decay):
    named = [(name, parameter.data) for name, parameter in model.named_parameters()]
    return split(model, weight_decay, is_matrix, named)


# 4. load_tied --------------------------------------------------------------------------------------------------------


class TwoEnds(nn.Module):
    """Embedding and head around nothing, tied."""

    def __init__(self, vocab: int, hidden: int):
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.head = nn.Linear(hidden, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids))


def load_tied_reference(model, weights):
    """Load the one matrix, under either of its names or both, and tie the head to it."""
    here, there = weights.get("embed.weight"), weights.get("head.weight")
    if here is not None and there is not None and not torch.equal(here, there):
        raise ValueError("embed.weight and head.weight differ: one of them would be lost")
    matrix = there if here is None else here
    model.load_state_dict({"embed.weight": matrix, "head.weight": matrix}, assign=True)
    model.head.weight = model.embed.weight


def load_and_look(candidate: Callable, embedding: torch.Tensor | None, head: torch.Tensor | None, meta: bool) -> tuple:
    """Build a tied model, load, and return what became of it. Both names there: was it a ValueError?"""
    weights = {name: value for name, value in (("embed.weight", embedding), ("head.weight", head)) if value is not None}
    vocab, hidden = next(iter(weights.values())).shape
    with torch.device("meta" if meta else torch.get_default_device()):
        model = TwoEnds(vocab, hidden)
    if not meta:
        nn.init.constant_(model.embed.weight, 0.5)
    different = len(weights) == 2 and not torch.equal(embedding, head)
    try:
        returned = candidate(model, weights)
    except Exception as error:
        refused = isinstance(error, ValueError) and len(weights) == 2
        if isinstance(error, NotImplementedError) or not (different or refused):
            raise
        if refused:
            nothing = torch.zeros(vocab, hidden)
            return 1, 0, 0, 0, nothing, nothing, 0
        words = f"the two matrices differ, and ValueError is wanted. It raised {type(error).__name__}: {error}"
        raise TypeError(words).with_traceback(error.__traceback__) from error
    if returned is ...:
        return returned
    model = returned if isinstance(returned, TwoEnds) else model
    ends = model.embed.weight, model.head.weight
    flags = ends[0] is ends[1], not any(end.is_meta for end in ends), all(end.requires_grad for end in ends)
    values = [torch.zeros(end.shape) if end.is_meta else end.detach().clone() for end in ends]
    if not (ends[0] is ends[1] or any(end.is_meta for end in ends)):
        with torch.no_grad():
            ends[0].zero_()  # does the other end see it?
    return 0, *map(int, flags), *values, int(not ends[1].is_meta and bool((ends[0] == ends[1]).all()))


def load_case(label: str, names: str, meta: bool = False, vocab: int = 3, hidden: int = 2, seed: int = 1031):
    matrix = draw(vocab, hidden, seed=seed)
    other = draw(vocab, hidden, seed=seed + 500) if "different" in names else matrix
    return case(label, matrix if "embed" in names else None, other if "head" in names else None, meta)


load_tied = Exercise(
    name="10_tied_embeddings.load_tied",
    title="Load a tied model, and leave it tied",
    signature="load_tied(model, weights)",
    reference=load_tied_reference,
    call=load_and_look,
    arguments=("embed.weight", "head.weight", "model on the meta device"),
    returns=(
        "is the file refused by a ValueError (1: yes)",
        "are both ends one Parameter (1: yes)",
        "have they numbers (1: yes)",
        "can they be trained (1: yes)",
        "embed.weight",
        "head.weight",
        "do they share their memory (1: yes)",
    ),
    cases=[
        load_case("the file has embed.weight only", "embed", vocab=2, hidden=1),
        load_case("the file has head.weight only", "head"),
        load_case("both names, the same numbers", "embed head", seed=1032),
        load_case("both names, different numbers: refuse", "embed head different", seed=1033),
        load_case("a planned model, embed.weight only", "embed", meta=True, seed=1034),
        load_case("a planned model, head.weight only", "head", meta=True, seed=1035),
        load_case("a planned model, both names", "embed head", meta=True, seed=1036),
    ],
)


def matrix_of(weights):
    return weights["embed.weight"] if "embed.weight" in weights else weights["head.weight"]


def refuse_different(weights):
    if len(weights) == 2 and not torch.equal(*weights.values()):
        raise ValueError("the two differ")


def load(model, weights, assign=True):
    """PyTorch's own loading of what is there."""
    model.load_state_dict(weights, strict=False, assign=assign)


@load_tied.mutant(
    "what was loaded is not tied again",
    "assign=True puts a new Parameter where a name is found. The other end keeps its old one, and with both names in "
    "the file there are two new ones.",
)
def not_tied_again(model, weights):
    refuse_different(weights)
    load(model, weights)


@load_tied.mutant(
    "the head gets a copy of the matrix",
    "equal numbers are not one Parameter: each would get its own half of the gradient, and they would drift apart.",
)
def copied(model, weights):
    load_tied_reference(model, weights)
    model.head.weight = nn.Parameter(model.embed.weight.detach().clone())


@load_tied.mutant(
    "the two share their memory but are two Parameters",
    "load_state_dict with assign=True does that, and so does .data. There are two gradients and two states in the "
    "optimizer: the one matrix would be moved twice in each step. End with model.head.weight = model.embed.weight.",
)
def shared_memory(model, weights):
    load_tied_reference(model, weights)
    model.head.weight = nn.Parameter(model.embed.weight.data)


@load_tied.mutant(
    "tied the wrong way round: the embedding takes the head's Parameter",
    "where the file has embed.weight only, the head still has its old numbers, and they are kept. First give both "
    "names the loaded matrix.",
)
def wrong_way(model, weights):
    refuse_different(weights)
    load(model, weights)
    model.embed.weight = model.head.weight


@load_tied.mutant(
    "tied, but a file that has head.weight only is lost",
    "the head then takes the embedding's Parameter, which still has its old numbers. First give both names the loaded "
    "matrix.",
)
def head_lost(model, weights):
    refuse_different(weights)
    load(model, weights)
    model.head.weight = model.embed.weight


@load_tied.mutant(
    "two different matrices are accepted, and the head's is lost",
    "the file is of an untied model. Its head would silently be replaced: raise ValueError.",
)
def difference_accepted(model, weights):
    load_tied_reference(model, {"embed.weight": matrix_of(weights)})


@load_tied.mutant(
    "two equal matrices are refused",
    "a state_dict has both names for the one matrix. Ask whether the numbers are equal: torch.equal.",
)
def equal_refused(model, weights):
    if len(weights) == 2:
        raise ValueError("two matrices")
    load_tied_reference(model, weights)


@load_tied.mutant(
    "the matrix can no longer be trained",
    "a Parameter made with requires_grad=False gets no gradient. Load the numbers, and leave that as it is.",
)
def frozen(model, weights):
    load_tied_reference(model, weights)
    model.embed.weight.requires_grad_(False)


@load_tied.mutant(
    "a model on the meta device stays without numbers",
    "a meta tensor has a shape and no memory: nothing can be copied into it. With assign=True the loaded tensor takes "
    "its place.",
)
def no_assign(model, weights):
    refuse_different(weights)
    if not model.embed.weight.is_meta:
        load_tied_reference(model, weights)


@load_tied.mutant(
    "load_state_dict was given the file as it is, and the file has one name of the two",
    "the model has two names for its matrix, and load_state_dict asks for both. Hand it the one matrix under both.",
)
def as_it_is(model, weights):
    refuse_different(weights)
    model.load_state_dict(weights, assign=True)
    model.head.weight = model.embed.weight


@load_tied.mutant(
    "embed.weight is taken to be in every file",
    "some files have the matrix as head.weight only. Ask which name is there: `in`, or .get.",
)
def embed_in_every_file(model, weights):
    refuse_different(weights)
    load_tied_reference(model, {"embed.weight": weights["embed.weight"]})


EXERCISES = [embedding_gradient, tied_gradient, optimizer_groups, load_tied]
