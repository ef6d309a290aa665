"""Exercises of notebook 08: the gate, the auxiliary loss of all layers, and a gate that can learn at k = 1."""

import warnings

import torch
import torch.nn.functional as F

from ..config import MiniMindConfig
from ..moe import MoEGate
from .compare import kind
from .framework import Exercise, case, draw


def tensor(*rows, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(rows, dtype=dtype)


# 1. gate -------------------------------------------------------------------------------------------------------------


def gate_reference(x, weight, k):
    """Softmax over experts in float32, the k most probable, their weights divided by their sum.

    x: [batch, seq, hidden]; weight: [experts, hidden]. Returns topk_idx, topk_weight [batch, seq, k] and probs
    [batch, seq, experts].
    """
    probs = F.linear(x, weight).softmax(dim=-1, dtype=torch.float32)
    topk_weight, topk_idx = probs.topk(k, dim=-1)
    return topk_idx, topk_weight / topk_weight.sum(dim=-1, keepdim=True), probs


def gate_case(label: str, *axes: int, experts: int, k: int, seed: int):
    return case(label, draw(*axes, seed=seed), draw(experts, axes[-1], seed=seed + 1), k)


gate = Exercise(
    name="08_moe_gate.gate",
    title="The gate: softmax, the k most probable experts, weights that sum to 1",
    signature="gate(x, weight, k)",
    reference=gate_reference,
    returns=("topk_idx", "topk_weight", "probs"),
    cases=[
        case("one token, two of three experts", tensor([[1.0]]), tensor([0.5], [2.0], [1.0]), 2),
        gate_case("one token, one of four experts", 1, 1, 2, experts=4, k=1, seed=800),
        gate_case("two tokens, two of four experts", 1, 2, 3, experts=4, k=2, seed=802),
        gate_case("batch, seq, hidden", 2, 3, 4, experts=5, k=3, seed=804),
        gate_case("as many experts as features", 2, 2, 4, experts=4, k=2, seed=806),
        gate_case("every expert is chosen", 2, 3, 4, experts=3, k=3, seed=808),
        case(  # none of the chosen is rounded to 0: in what order they stand must not depend on ties
            "logits of hundreds",
            tensor([[1.0, 0.0], [0.0, 1.0]]),
            tensor([300.0, -200.0], [301.0, 400.0], [-300.0, 402.0], [250.0, 395.0]),
            2,
        ),
        case(
            "bfloat16",
            tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.bfloat16),
            tensor([0.5, -1.0], [2.0, 0.25], [1.75, 1.0], dtype=torch.bfloat16),
            2,
        ),
    ],
)


def parts(x, weight, k):
    """probs, and of the k most probable the probability and the index."""
    probs = F.linear(x, weight).softmax(dim=-1, dtype=torch.float32)
    return probs, *probs.topk(k, dim=-1)


def share(values):
    return values / values.sum(dim=-1, keepdim=True)


@gate.mutant(
    "softmax comes after top-k, so the other experts have probability 0",
    "the k weights are the same, but probs goes into the auxiliary loss: what has probability 0 there has no gradient, "
    "and an idle expert is never called back.",
    "where no auxiliary loss is used, softmax over the chosen logits is fine: gpt-oss does that.",
)
def softmax_after_topk(x, weight, k):
    logits = F.linear(x, weight).float()
    values, chosen = logits.topk(k, dim=-1)
    topk_weight = values.softmax(dim=-1)
    return chosen, topk_weight, torch.zeros_like(logits).scatter(-1, chosen, topk_weight)


@gate.mutant(
    "the weights are not renormalized",
    "the k probabilities sum to less than 1, so the layer's output is too small. Divide by the sum of the k: the sum "
    "of all is 1 anyway.",
    "norm_topk_prob=False in MiniMind; the Switch Transformer.",
)
def not_renormalized(x, weight, k):
    probs, values, chosen = parts(x, weight, k)
    return chosen, values, probs


@gate.mutant(
    "softmax runs over the tokens, not over the experts",
    "each token must share out its own 1. dim=-1 is the axis of the experts.",
)
def softmax_over_tokens(x, weight, k):
    probs = F.linear(x, weight).softmax(dim=1, dtype=torch.float32)
    values, chosen = probs.topk(k, dim=-1)
    return chosen, share(values), probs


@gate.mutant(
    "the weights are renormalized over the tokens",
    "the k weights of one token sum to 1: divide by the sum over the last axis, with keepdim=True.",
)
def renormalized_over_tokens(x, weight, k):
    probs, values, chosen = parts(x, weight, k)
    return chosen, values / values.sum(dim=1, keepdim=True), probs


@gate.mutant(
    "the k are taken of the tokens, not of the experts",
    "each token chooses among its experts: topk over the last axis, dim=-1.",
)
def topk_over_tokens(x, weight, k):
    probs, _, _ = parts(x, weight, k)
    values, chosen = probs.topk(k, dim=1)
    return chosen, share(values), probs


@gate.mutant(
    "the weights are divided by the sum over all tokens",
    "the k weights of one token sum to 1: sum over the last axis only, with keepdim=True.",
)
def divided_by_total(x, weight, k):
    probs, values, chosen = parts(x, weight, k)
    return chosen, values / values.sum(), probs


@gate.mutant(
    "keepdim=True is missing in the sum of the k weights",
    "the sums, [batch, seq], then lie under seq and k: that stops with an error, or, where seq is k, it divides each "
    "weight by another token's sum.",
)
def without_keepdim(x, weight, k):
    probs, values, chosen = parts(x, weight, k)
    return chosen, values / values.sum(dim=-1), probs


@gate.mutant(
    "logits are returned in place of probs",
    "the auxiliary loss needs probabilities.",
    "Hugging Face's models return router_logits, and their loss takes the softmax.",
)
def logits_for_probs(x, weight, k):
    chosen, topk_weight, _ = gate_reference(x, weight, k)
    return chosen, topk_weight, F.linear(x, weight).float()


@gate.mutant(
    "the chosen experts stand in the order of their numbers",
    "the layer's output would be the same, but here, as from topk, the most probable comes first.",
)
def in_order_of_numbers(x, weight, k):
    chosen, topk_weight, probs = gate_reference(x, weight, k)
    chosen, order = chosen.sort(dim=-1)
    return chosen, topk_weight.gather(-1, order), probs


@gate.mutant(
    "the weights pass through a second softmax",
    "a softmax of numbers between 0 and 1 is nearly flat: the best expert would count hardly more than the next. "
    "Divide by their sum.",
)
def second_softmax(x, weight, k):
    probs, values, chosen = parts(x, weight, k)
    return chosen, values.softmax(dim=-1), probs


@gate.mutant(
    "the weights are divided by the largest, not by their sum",
    "then the best expert has weight 1 and the others come on top.",
)
def divided_by_largest(x, weight, k):
    probs, values, chosen = parts(x, weight, k)
    return chosen, values / values.amax(dim=-1, keepdim=True), probs


@gate.mutant(
    "each logit passes through a sigmoid, not all through one softmax",
    "probabilities that don't sum to 1 make the auxiliary loss depend on the size of the logits.",
    "DeepSeek-V3 scores its experts by a sigmoid.",
)
def sigmoid(x, weight, k):
    probs = F.linear(x, weight).float().sigmoid()
    values, chosen = probs.topk(k, dim=-1)
    return chosen, share(values), probs


@gate.mutant(
    "the weights are made from the logits themselves",
    "logits may be negative, and their sum may be 0. The weights are shares of probability.",
)
def weights_from_logits(x, weight, k):
    probs, _, chosen = parts(x, weight, k)
    return chosen, share(F.linear(x, weight).float().gather(-1, chosen)), probs


@gate.mutant(
    "the k least probable experts are chosen",
    "topk takes the largest unless told otherwise; argsort begins with the smallest.",
)
def least_probable(x, weight, k):
    probs, _, _ = parts(x, weight, k)
    values, chosen = probs.topk(k, dim=-1, largest=False)
    return chosen, share(values), probs


@gate.mutant(
    "the indices are sorted by expert, but the weights are not",
    "each weight then belongs to another expert. If you sort one, reorder the other.",
)
def misaligned(x, weight, k):
    probs, values, chosen = parts(x, weight, k)
    return chosen.sort(dim=-1).values, share(values), probs


@gate.mutant(
    "topk_idx and topk_weight are exchanged",
    "torch.topk gives the values first and the indices second; MiniMind's gate returns the indices first.",
)
def exchanged(x, weight, k):
    chosen, topk_weight, probs = gate_reference(x, weight, k)
    return topk_weight, chosen, probs


@gate.mutant(
    "only the best expert is chosen, whatever k is",
    "argmax and max know no k; topk does.",
)
def only_the_best(x, weight, k):
    return *gate_reference(x, weight, 1)[:2], parts(x, weight, 1)[0]


@gate.mutant(
    "the weight is not transposed: x @ weight",
    "it is kept as [experts, hidden], so x @ weight.T or F.linear(x, weight). Only with as many experts as features "
    "does it run without, and then the numbers are wrong.",
)
def not_transposed(x, weight, k):
    probs = (x @ weight).softmax(dim=-1, dtype=torch.float32)
    values, chosen = probs.topk(k, dim=-1)
    return chosen, share(values), probs


@gate.mutant(
    "softmax stays in half precision",
    "probabilities rounded to three digits make ties between experts. Pass dtype=torch.float32 to softmax.",
)
def half_softmax(x, weight, k):
    probs = F.linear(x, weight).softmax(dim=-1)
    values, chosen = probs.topk(k, dim=-1)
    return chosen, share(values), probs


@gate.mutant(
    "softmax runs in half precision; float32 comes too late",
    "what was rounded to three digits stays rounded. Pass dtype=torch.float32 to softmax.",
)
def late_float(x, weight, k):
    probs = F.linear(x, weight).softmax(dim=-1).float()
    values, chosen = probs.topk(k, dim=-1)
    return chosen, share(values), probs


@gate.mutant(
    "softmax is written without subtracting the largest logit",
    "exp of some hundreds is infinite, and infinity / infinity is NaN. torch.softmax subtracts the largest first.",
)
def overflowing_softmax(x, weight, k):
    grown = F.linear(x, weight).float().exp()
    probs = grown / grown.sum(dim=-1, keepdim=True)
    values, chosen = probs.topk(k, dim=-1)
    return chosen, share(values), probs


# 2. aux_loss ---------------------------------------------------------------------------------------------------------


def shares(probs, topk_idx, token_mask):
    """chosen [layers, batch, seq, experts] as 0 and 1, the probabilities, and which tokens count [1, batch, seq, 1]."""
    chosen = torch.zeros_like(probs).scatter(-1, topk_idx, 1.0)
    counts = torch.ones_like(probs[:1, ..., :1]) if token_mask is None else token_mask[None, ..., None].to(probs)
    return chosen, counts


def aux_loss_reference(probs, topk_idx, token_mask):
    """For each layer experts * sum of f * P over all tokens that count; summed over the layers.

    probs: [layers, batch, seq, experts]; topk_idx: [layers, batch, seq, k]; token_mask: None or [batch, seq].
    """
    chosen, counts = shares(probs, topk_idx, token_mask)
    f = (chosen * counts).sum(dim=(1, 2)) / (counts.sum() * topk_idx.shape[-1])
    p = (probs * counts).sum(dim=(1, 2)) / counts.sum()
    return probs.shape[-1] * (f * p).sum()


def aux_case(label: str, *axes: int, k: int, seed: int, mask: torch.Tensor | None = None, skew: float = 0.0):
    """Random logits; from layer to layer another expert is preferred by `skew`."""
    logits = draw(*axes, seed=seed, scale=1.5)
    for layer in range(axes[0]):
        logits[layer, ..., layer % axes[-1]] += skew
    probs = logits.softmax(dim=-1)
    return case(label, probs, probs.topk(k, dim=-1).indices, mask)


ONE = tensor([[[0.7, 0.3], [0.4, 0.6], [0.9, 0.1]]])  # one layer, one sequence of three tokens
RIGHT_PADDED = torch.tensor([[1, 1, 1], [1, 0, 0]])

aux_loss = Exercise(
    name="08_moe_gate.aux_loss",
    title="The auxiliary loss: experts times the sum of f P, per layer, without padding",
    signature="aux_loss(probs, topk_idx, token_mask)",
    reference=aux_loss_reference,
    cases=[
        case("one layer, three tokens, one of two experts", ONE, ONE.topk(1).indices, None),
        aux_case("two of four experts", 1, 1, 3, 4, k=2, seed=820),
        aux_case("two texts", 1, 2, 3, 3, k=1, seed=821),
        aux_case("two texts of three tokens, one padded", 1, 2, 3, 3, k=1, seed=822, mask=RIGHT_PADDED),
        aux_case("two layers, each with another favorite", 2, 1, 4, 2, k=1, seed=823, skew=3.0),
        aux_case("two layers, two texts, two of four", 2, 2, 3, 4, k=2, seed=824, mask=RIGHT_PADDED.bool(), skew=1.0),
        aux_case("every expert chosen", 1, 2, 3, 3, k=3, seed=825),
    ],
)


def mean_shares(probs, topk_idx, token_mask):
    """f and P of each layer, [layers, experts]."""
    chosen, counts = shares(probs, topk_idx, token_mask)
    f = (chosen * counts).sum(dim=(1, 2)) / (counts.sum() * topk_idx.shape[-1])
    return f, (probs * counts).sum(dim=(1, 2)) / counts.sum()


@aux_loss.mutant(
    "the k axis is left in: f is not divided by k",
    "then f sums to k, and balance is k instead of 1. With another k the coefficient would have to change too.",
    "Hugging Face and MiniMind-3 count like this: their value is k times this one.",
)
def k_left_in(probs, topk_idx, token_mask):
    return topk_idx.shape[-1] * aux_loss_reference(probs, topk_idx, token_mask)


@aux_loss.mutant(
    "the layers are put into one long batch",
    "two layers that both collapse, on different experts, look perfectly balanced together. Each layer has experts of "
    "its own: one loss for each, then the sum.",
    "Hugging Face concatenates the layers.",
)
def layers_concatenated(probs, topk_idx, token_mask):
    f, p = mean_shares(probs, topk_idx, token_mask)
    return probs.shape[-1] * (f.mean(dim=0) * p.mean(dim=0)).sum()


@aux_loss.mutant(
    "the tokens of all layers are summed, but divided by the number of one layer's",
    "each layer has experts of its own: keep the axis of the layers in f and P, and sum the products.",
)
def layers_added_first(probs, topk_idx, token_mask):
    f, p = mean_shares(probs, topk_idx, token_mask)
    return probs.shape[-1] * (f.sum(dim=0) * p.sum(dim=0)).sum()


@aux_loss.mutant(
    "the mean over the layers is taken, not the sum",
    "with the mean, each of eight layers would be pushed an eighth as hard as in MiniMind.",
)
def mean_over_layers(probs, topk_idx, token_mask):
    return aux_loss_reference(probs, topk_idx, token_mask) / len(probs)


@aux_loss.mutant(
    "padding is counted",
    "fillers are much alike, so they crowd one expert: the router would be trained to balance what nobody reads.",
)
def padding_counted(probs, topk_idx, token_mask):
    return aux_loss_reference(probs, topk_idx, None)


@aux_loss.mutant(
    "the padding is counted and the real tokens are left out",
    "the mask is 1 for a real token.",
    "PyTorch's key_padding_mask is True for padding.",
)
def only_padding(probs, topk_idx, token_mask):
    return aux_loss_reference(probs, topk_idx, None if token_mask is None else ~token_mask.bool())


@aux_loss.mutant(
    "padding is left out of P, but counted in f",
    "f and P are means over the same tokens: multiply both by the mask.",
)
def padding_in_f(probs, topk_idx, token_mask):
    f, p = mean_shares(probs, topk_idx, None)[0], mean_shares(probs, topk_idx, token_mask)[1]
    return probs.shape[-1] * (f * p).sum()


@aux_loss.mutant(
    "padding is left out of f, but counted in P",
    "f and P are means over the same tokens: multiply both by the mask.",
)
def padding_in_p(probs, topk_idx, token_mask):
    f, p = mean_shares(probs, topk_idx, token_mask)[0], mean_shares(probs, topk_idx, None)[1]
    return probs.shape[-1] * (f * p).sum()


@aux_loss.mutant(
    "padding adds nothing, but the sums are divided by the number of all tokens",
    "a mean over the tokens that count is their sum divided by their number: the sum of the mask.",
)
def divided_by_all(probs, topk_idx, token_mask):
    real = 1.0 if token_mask is None else token_mask.float().mean()
    return aux_loss_reference(probs, topk_idx, token_mask) * real**2


@aux_loss.mutant(
    "the factor `experts` is missing, or a mean over the experts stands where a sum belongs",
    "perfect balance would be 1 / experts and not 1. A mean divides by just the number you multiply by.",
)
def without_factor(probs, topk_idx, token_mask):
    return aux_loss_reference(probs, topk_idx, token_mask) / probs.shape[-1]


@aux_loss.mutant(
    "f is a number of choices, not their share",
    "twice as many tokens would double the loss. Divide by k times the number of real tokens.",
)
def f_not_divided(probs, topk_idx, token_mask):
    chosen, counts = shares(probs, topk_idx, token_mask)
    return probs.shape[-1] * ((chosen * counts).sum(dim=(1, 2)) * mean_shares(probs, topk_idx, token_mask)[1]).sum()


@aux_loss.mutant(
    "P is a sum over the tokens, not a mean",
    "twice as many tokens would double the loss. Divide by the number of real tokens.",
)
def p_not_divided(probs, topk_idx, token_mask):
    _, counts = shares(probs, topk_idx, token_mask)
    return aux_loss_reference(probs, topk_idx, token_mask) * counts.sum()


@aux_loss.mutant(
    "nothing is counted: f stays 0",
    "scatter without an underscore returns a new tensor: keep its result.",
)
def scatter_dropped(probs, topk_idx, token_mask):
    return 0.0 * aux_loss_reference(probs, topk_idx, token_mask)


@aux_loss.mutant(
    "f is made of probabilities, so that the sum is of P squared",
    "f counts where tokens went. A count has no gradient: f is a constant that says how hard to push each P.",
)
def p_squared(probs, topk_idx, token_mask):
    _, p = mean_shares(probs, topk_idx, token_mask)
    return probs.shape[-1] * p.square().sum()


@aux_loss.mutant(
    "P is made of counts, so that the sum is of f squared",
    "counts have no gradient: this loss can't move the router at all.",
)
def f_squared(probs, topk_idx, token_mask):
    f, _ = mean_shares(probs, topk_idx, token_mask)
    return probs.shape[-1] * f.square().sum()


@aux_loss.mutant(
    "f is the probability that the chosen experts got, not their share of the tokens",
    "f counts 1 for each choice, whether the router was sure or not. It also opens a second way for the gradient.",
)
def f_weighted(probs, topk_idx, token_mask):
    chosen, counts = shares(probs, topk_idx, token_mask)
    f = (chosen * probs * counts).sum(dim=(1, 2)) / (counts.sum() * topk_idx.shape[-1])
    return probs.shape[-1] * (f * mean_shares(probs, topk_idx, token_mask)[1]).sum()


@aux_loss.mutant(
    "the product comes before the mean: f P is formed for each token",
    "for one token f is 1 at the expert it chose: the loss would be the mean probability of the chosen, and it would "
    "make the router unsure instead of even. First both means, then their product.",
)
def product_first(probs, topk_idx, token_mask):
    chosen, counts = shares(probs, topk_idx, token_mask)
    products = (chosen * probs * counts).sum() / (counts.sum() * topk_idx.shape[-1])
    return probs.shape[-1] * products


@aux_loss.mutant(
    "f and P are summed over the experts before the product",
    "both sums are 1, so this is the number of experts, whatever the router does. Sum the products.",
)
def product_of_sums(probs, topk_idx, token_mask):
    f, p = mean_shares(probs, topk_idx, token_mask)
    return probs.shape[-1] * (f.sum(dim=-1) * p.sum(dim=-1)).sum()


@aux_loss.mutant(
    "it is formed for each sequence, then the mean is taken",
    "asked for is the batch level: means over all tokens of the batch. By sequence, each text must be balanced alone.",
    "seq_aux=True, MiniMind-2; DeepSeek-V2.",
)
def by_sequence(probs, topk_idx, token_mask):
    chosen, counts = shares(probs, topk_idx, token_mask)
    total = counts.sum(dim=2)
    f = (chosen * counts).sum(dim=2) / (total * topk_idx.shape[-1])
    p = (probs * counts).sum(dim=2) / total
    return probs.shape[-1] * (f * p).sum() / probs.shape[1]


@aux_loss.mutant(
    "only the first of the k experts is counted",
    "a token loads all the k experts that it visits, not just its favorite.",
    "GShard counts the first of its two experts.",
)
def first_choice_only(probs, topk_idx, token_mask):
    f, _ = mean_shares(probs, topk_idx[..., :1], token_mask)
    return probs.shape[-1] * (f * mean_shares(probs, topk_idx, token_mask)[1]).sum()


@aux_loss.mutant(
    "one value for each layer is returned",
    "the trainer adds one number to its loss: sum over the layers too.",
)
def not_summed(probs, topk_idx, token_mask):
    f, p = mean_shares(probs, topk_idx, token_mask)
    return probs.shape[-1] * (f * p).sum(dim=-1)


# 3. LearningGate -----------------------------------------------------------------------------------------------------


class LearningGate(MoEGate):
    """MoEGate whose weights at k = 1 are 1, and whose gradient is that of p divided by a constant."""

    def __init__(self, config):
        super().__init__(config)

    def forward(self, x, token_mask=None):
        probs, values, chosen = self.choose(x)
        return chosen, self.weigh(values) if self.norm_topk_prob else values, probs

    def choose(self, x):
        return parts(x, self.weight, self.k)

    def weigh(self, values):
        return values / (values.detach() if self.k == 1 else values.sum(dim=-1, keepdim=True))


def run_gate(cls: type, config: MiniMindConfig, weight: torch.Tensor, x: torch.Tensor, wish: torch.Tensor):
    """Build the gate, give it `weight`, and say how much each weight is wished for.

    Returns (topk_idx, topk_weight, probs, gradient of weight).
    """
    candidate = cls(config)
    if not isinstance(candidate, MoEGate):
        raise TypeError("LearningGate must inherit from core.MoEGate, so that the layer can use it")
    with torch.no_grad():
        candidate.weight.copy_(weight)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the core's, where forward asks MoEGate's own first
        result = candidate(x, None)  # as the layer calls it
    if not isinstance(result, tuple | list) or len(result) != 3:
        raise TypeError(f"forward must return topk_idx, topk_weight, probs; it returned {kind(result)}")
    topk_weight = result[1]
    if not torch.is_tensor(topk_weight):
        raise TypeError(f"topk_weight must be a tensor; it is {kind(topk_weight)}")
    if not topk_weight.is_floating_point():
        raise TypeError("forward must return topk_idx, topk_weight, probs; its second result holds whole numbers")
    grad = None
    if topk_weight.shape == wish.shape and topk_weight.requires_grad:
        (grad,) = torch.autograd.grad((topk_weight * wish).sum(), candidate.weight, allow_unused=True)
    chosen, topk_weight, probs = (part.detach() if torch.is_tensor(part) else part for part in result)
    return chosen, topk_weight, probs, torch.zeros_like(weight) if grad is None else grad


def gate_config(experts: int, k: int, hidden: int, norm: bool = True) -> MiniMindConfig:
    moe = {"use_moe": True, "num_experts": experts, "num_experts_per_tok": k, "norm_topk_prob": norm}
    return MiniMindConfig(hidden_size=hidden, head_dim=2, **moe)


def learning_case(label: str, *axes: int, experts: int, k: int, seed: int, norm: bool = True):
    config = gate_config(experts, k, axes[-1], norm)
    weight, x = draw(experts, axes[-1], seed=seed), draw(*axes, seed=seed + 1)
    return case(label, config, weight, x, draw(*axes[:-1], k, seed=seed + 2))


learning = Exercise(
    name="08_moe_gate.LearningGate",
    title="A gate that learns at k = 1: the same outputs, a gradient that lives",
    signature="LearningGate(config)",
    reference=LearningGate,
    call=run_gate,
    arguments=("config", "weight", "x", "wish"),
    returns=("topk_idx", "topk_weight", "probs", "the gradient of weight"),
    tolerance={torch.float32: 1e-4},
    provides={"gate": gate_reference},
    cases=[
        case(
            "one token of one feature, one of two experts",
            gate_config(2, 1, 1),
            tensor([0.5], [-0.5]),
            torch.ones(1, 1, 1),
            torch.ones(1, 1, 1),
        ),
        learning_case("one of four experts", 1, 2, 3, experts=4, k=1, seed=830),
        learning_case("batch, seq, hidden", 2, 3, 4, experts=4, k=1, seed=833),
        learning_case("two of four: nothing new", 1, 3, 4, experts=4, k=2, seed=836),
        learning_case("one of four, norm_topk_prob=False", 1, 3, 4, experts=4, k=1, norm=False, seed=839),
        learning_case("two of four, norm_topk_prob=False", 1, 3, 4, experts=4, k=2, norm=False, seed=842),
    ],
)


@learning.mutant(
    "the weight is p / p, and so is its gradient: nothing",
    "a number divided by itself is 1 however the router moves, so the language-model loss can't teach it. Divide by a "
    "copy that autograd takes for a constant.",
    "norm_topk_prob=True with k = 1 in MiniMind-3, and router_gradient='exact' here.",
)
class Exact(LearningGate):
    def weigh(self, values):
        return values / values.sum(dim=-1, keepdim=True)


@learning.mutant(
    "the weight is p itself",
    "the router learns, but the outputs change: a checkpoint that was trained with weight 1 gets its experts' outputs "
    "times p.",
    "the Switch Transformer, and norm_topk_prob=False.",
)
class Raw(LearningGate):
    def weigh(self, values):
        return values if self.k == 1 else share(values)


@learning.mutant(
    "p is never divided, at any k",
    "with norm_topk_prob the k weights sum to 1.",
    "norm_topk_prob=False.",
)
class NeverDivided(LearningGate):
    def weigh(self, values):
        return values


@learning.mutant(
    "for k > 1 nothing is divided",
    "with norm_topk_prob the k weights sum to 1: a larger k needs its sum.",
)
class OnlyOne(LearningGate):
    def weigh(self, values):
        return values / values.detach() if self.k == 1 else values


@learning.mutant(
    "the weight is a bare 1",
    "the outputs are right, but a constant has no gradient at all.",
)
class BareOne(LearningGate):
    def weigh(self, values):
        return torch.ones_like(values) if self.k == 1 else share(values)


@learning.mutant(
    "the gradient is that of p, not of p divided by its value",
    "1 + p - p.detach() is 1 too, but an unsure router, with a small p, is then corrected p times as weakly.",
    "the classic straight-through form; some quantizers use it.",
)
class AddedOne(LearningGate):
    def weigh(self, values):
        return 1 + values - values.detach() if self.k == 1 else share(values)


@learning.mutant(
    "the numerator is detached, not the denominator",
    "constant / p has the opposite slope: the router would learn to avoid what helps.",
)
class UpsideDown(LearningGate):
    def weigh(self, values):
        return values.detach() / values if self.k == 1 else share(values)


@learning.mutant(
    "both are detached",
    "then the weight is a constant and the router gets nothing.",
)
class BothDetached(LearningGate):
    def weigh(self, values):
        values = values.detach()
        return share(values)


@learning.mutant(
    "the sum is detached for k > 1 too",
    "with two or more experts the exact gradient lives: raising one weight lowers the others. A constant sum hides it.",
)
class DetachedForAll(LearningGate):
    def weigh(self, values):
        return values / values.sum(dim=-1, keepdim=True).detach()


@learning.mutant(
    "each weight is divided by its own value, for k > 1 too",
    "two experts would both have weight 1, and the output would double.",
)
class EachByItself(LearningGate):
    def weigh(self, values):
        return values / values.detach()


@learning.mutant(
    "norm_topk_prob is not asked",
    "with norm_topk_prob=False the weights stay what they are: p.",
)
class AlwaysNormed(LearningGate):
    def forward(self, x, token_mask=None):
        probs, values, chosen = self.choose(x)
        return chosen, self.weigh(values), probs


@learning.mutant(
    "the logits are detached",
    "detach only what you divide by. Cut off from its weight, the gate learns nothing at any k.",
)
class LogitsDetached(LearningGate):
    def choose(self, x):
        return parts(x, self.weight.detach(), self.k)


EXERCISES = [gate, aux_loss, learning]
