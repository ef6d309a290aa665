"""Exercises of notebook 00: splitting and merging heads, counting parameters, the first loss."""

import math

from einops import rearrange

from ..config import MiniMindConfig
from .framework import Exercise, case, draw

# 1. split_heads ------------------------------------------------------------------------------------------------------


def split_heads_reference(x, heads):
    """x: [batch, seq, heads * head_dim]. Returns [batch, heads, seq, head_dim]."""
    return rearrange(x, "batch seq (heads head_dim) -> batch heads seq head_dim", heads=heads)


split = Exercise(
    name="00_start_here.split_heads",
    title="Cut the hidden axis into heads",
    signature="split_heads(x, heads)",
    reference=split_heads_reference,
    cases=[
        case("one sequence of two tokens, two heads of two", draw(1, 2, 4, seed=60), 2),
        case("as many positions as heads, and as many heads as features", draw(2, 3, 9, seed=61), 3),
        case("two sequences of three tokens, four heads of two", draw(2, 3, 8, seed=62), 4),
        case("not contiguous", draw(3, 2, 8, seed=63).transpose(0, 1), 2),
    ],
)


@split.mutant(
    "view goes straight to [batch, heads, seq, head_dim]",
    "view only cuts the numbers in the order of memory, token after token. The shape is right, but a head gets pieces "
    "of its neighbors and of other tokens. First view to [batch, seq, heads, head_dim], then transpose(1, 2).",
)
def view_only(x, heads):
    batch, seq, hidden = x.shape
    return x.reshape(batch, heads, seq, hidden // heads)


@split.mutant(
    "the transpose is missing: the result is [batch, seq, heads, head_dim]",
    "attention multiplies over the last two axes, and they must be seq and head_dim.",
    "it is the layout of MiniMind's q and k before attention, and of flash-attention's inputs.",
)
def transpose_missing(x, heads):
    return rearrange(x, "batch seq (heads head_dim) -> batch seq heads head_dim", heads=heads)


@split.mutant(
    "the hidden axis is cut as (head_dim heads), so heads take turns",
    "head 0 must be the first head_dim features in a row, since q_proj was trained so. Write (heads head_dim).",
)
def interleaved_heads(x, heads):
    return rearrange(x, "batch seq (head_dim heads) -> batch heads seq head_dim", heads=heads)


@split.mutant(
    "heads and head_dim are swapped: the number was taken for the size of a head",
    "8 heads of 96 are not 96 heads of 8. In einops the keyword names the axis: heads=heads.",
)
def heads_for_head_dim(x, heads):
    return rearrange(x, "batch seq (heads head_dim) -> batch heads seq head_dim", head_dim=heads)


@split.mutant(
    "the last two axes are swapped: the result is [batch, heads, head_dim, seq]",
    "that is the transposed key of q k^T. Both q and k are wanted as [.., seq, head_dim] first.",
)
def transposed_heads(x, heads):
    return rearrange(x, "batch seq (heads head_dim) -> batch heads head_dim seq", heads=heads)


@split.mutant(
    "batch and heads have changed places",
    "the first axis is the batch everywhere; heads come second.",
)
def heads_first(x, heads):
    return rearrange(x, "batch seq (heads head_dim) -> heads batch seq head_dim", heads=heads)


@split.mutant(
    "the wrong pair of axes is transposed after the view",
    "after view the axes are batch 0, seq 1, heads 2, head_dim 3. transpose(1, 2) swaps seq and heads.",
)
def wrong_transpose(x, heads):
    return rearrange(x, "batch seq (heads head_dim) -> batch seq head_dim heads", heads=heads)


# 2. merge_heads ------------------------------------------------------------------------------------------------------


def merge_heads_reference(x):
    """x: [batch, heads, seq, head_dim]. Returns [batch, seq, heads * head_dim]."""
    return rearrange(x, "batch heads seq head_dim -> batch seq (heads head_dim)")


merge = Exercise(
    name="00_start_here.merge_heads",
    title="Put the heads back into one hidden axis",
    signature="merge_heads(x)",
    reference=merge_heads_reference,
    cases=[
        case("one sequence of two tokens, two heads of two", draw(1, 2, 2, 2, seed=64)),
        case("two sequences of three tokens, four heads of two", draw(2, 4, 3, 2, seed=65)),
        case("two heads, five tokens, not contiguous", draw(2, 5, 2, 3, seed=66).transpose(1, 2)),
    ],
)


@merge.mutant(
    "the heads are merged without being moved next to head_dim",
    "reshape reads memory in order: head 0 of all tokens first. A token then gets one head of several tokens. "
    "transpose(1, 2) first.",
)
def merged_in_place(x):
    batch, heads, seq, head_dim = x.shape
    return x.reshape(batch, seq, heads * head_dim)


@merge.mutant(
    "the axes are merged as (head_dim heads)",
    "o_proj was trained on whole heads in a row: all of head 0, then all of head 1. Write (heads head_dim).",
)
def merged_interleaved(x):
    return rearrange(x, "batch heads seq head_dim -> batch seq (head_dim heads)")


@merge.mutant(
    "the heads were not merged: four axes are left",
    "o_proj works on [batch, seq, hidden]. After the transpose, join the last two axes.",
)
def not_merged(x):
    return rearrange(x, "batch heads seq head_dim -> batch seq heads head_dim")


@merge.mutant(
    "seq and the heads were merged, not the heads and head_dim",
    "tokens must stay apart: only the last axis grows.",
)
def merged_with_seq(x):
    return rearrange(x, "batch heads seq head_dim -> batch (heads seq) head_dim")


@merge.mutant("the heads were added up", "each head has its own features, and o_proj wants to see all of them.")
def heads_added(x):
    return x.sum(1)


@merge.mutant("the mean over the heads was taken", "each head has its own features, and o_proj wants to see them all.")
def heads_averaged(x):
    return x.mean(1)


@merge.mutant(
    "the result is [seq, batch, hidden]",
    "the first axis is the batch everywhere in MiniMind.",
    "torch.nn.MultiheadAttention has seq first unless batch_first=True.",
)
def seq_first(x):
    return rearrange(x, "batch heads seq head_dim -> seq batch (heads head_dim)")


# 3. count_layer ------------------------------------------------------------------------------------------------------


def count_layer_reference(config: MiniMindConfig) -> int:
    """The number of parameters in one dense block."""
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    query, key = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    attention = hidden * query + 2 * hidden * key + query * hidden
    norms = 2 * hidden + (2 * head_dim if config.qk_norm else 0)
    return attention + 3 * hidden * inner + norms


TINY = dict(hidden_size=14, num_attention_heads=4, num_key_value_heads=2, head_dim=2, intermediate_size=10)
count = Exercise(
    name="00_start_here.count_layer",
    title="Count the parameters of one block from its config",
    signature="count_layer(config)",
    reference=count_layer_reference,
    cases=[
        case("a tiny block", MiniMindConfig(**TINY)),
        case("the same without QK-norm", MiniMindConfig(**TINY, qk_norm=False)),
        case("MiniMind-3", MiniMindConfig()),
        case("MiniMind-2 small", MiniMindConfig.minimind_2_small()),
    ],
)


def wide_key(config):
    return (config.num_attention_heads - config.num_key_value_heads) * config.head_dim


@count.mutant(
    "k_proj and v_proj are counted as wide as q_proj",
    "with grouped-query attention they make num_key_value_heads heads only: 384 wide in MiniMind-3, not 768.",
    "with num_key_value_heads = num_attention_heads it is right: that is plain multi-head attention.",
)
def keys_as_wide_as_queries(config):
    return count_layer_reference(config) + 2 * config.hidden_size * wide_key(config)


@count.mutant(
    "q, k, v and o are counted as four matrices of hidden * hidden",
    "k_proj and v_proj make num_key_value_heads heads only, so they are half as wide in MiniMind-3.",
    "it is right for plain multi-head attention with head_dim = hidden / heads.",
)
def four_squares(config):
    query = config.num_attention_heads * config.head_dim
    more = 2 * (config.hidden_size - query) + 2 * (config.hidden_size - query + wide_key(config))
    return count_layer_reference(config) + config.hidden_size * more


@count.mutant(
    "q_proj and o_proj are counted as hidden * hidden",
    "their other side is num_attention_heads * head_dim: 768 too in MiniMind-3, but head_dim may be given freely.",
    "with head_dim = hidden / heads it gives the same number.",
)
def query_as_wide_as_hidden(config):
    query = config.num_attention_heads * config.head_dim
    return count_layer_reference(config) + 2 * config.hidden_size * (config.hidden_size - query)


@count.mutant(
    "the feed-forward is counted with two matrices",
    "SwiGLU has three: gate_proj, up_proj and down_proj.",
    "the first Transformer and GPT-2 have two.",
)
def two_matrices(config):
    return count_layer_reference(config) - config.hidden_size * config.intermediate_size


@count.mutant("biases are counted", "no linear layer of MiniMind has a bias.", "GPT-2 has one in each.")
def with_biases(config):
    query, key = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    return count_layer_reference(config) + query + 2 * key + 2 * config.hidden_size + 2 * config.intermediate_size


@count.mutant(
    "the QK-norm weights are missing",
    "q_norm and k_norm hold head_dim weights each, shared by all heads: 2 * 96 in MiniMind-3.",
    "MiniMind-2 has no QK-norm.",
)
def qk_norm_missing(config):
    return count_layer_reference(config) - (2 * config.head_dim if config.qk_norm else 0)


@count.mutant(
    "QK-norm weights are counted whatever config.qk_norm says",
    "MiniMind-2 has none. Read the switch.",
)
def qk_norm_always(config):
    return count_layer_reference(config) + (0 if config.qk_norm else 2 * config.head_dim)


@count.mutant(
    "QK-norm weights are counted for every head",
    "all heads share one vector of head_dim for the queries, and one for the keys.",
)
def qk_norm_per_head(config):
    heads = config.num_attention_heads + config.num_key_value_heads - 2
    return count_layer_reference(config) + (heads * config.head_dim if config.qk_norm else 0)


@count.mutant("o_proj is missing", "after the heads are merged, one more matrix mixes them: query width * hidden.")
def output_missing(config):
    return count_layer_reference(config) - config.num_attention_heads * config.head_dim * config.hidden_size


@count.mutant("only one norm is counted", "a block has two of them, one before attention, one before the feed-forward.")
def one_norm(config):
    return count_layer_reference(config) - config.hidden_size


@count.mutant("the norms are missing", "each RMSNorm holds one weight per feature. Small, but not zero.")
def no_norms(config):
    return count_layer_reference(config) - 2 * config.hidden_size - (2 * config.head_dim if config.qk_norm else 0)


@count.mutant("all layers are counted", "the question is about one block.")
def all_layers(config):
    return count_layer_reference(config) * config.num_hidden_layers


# 4. first_loss -------------------------------------------------------------------------------------------------------


def first_loss_reference(vocab, hidden, std):
    """The loss of an untrained model on random targets, in nats: ln(vocab) + hidden * std^2 / 2."""
    return math.log(vocab) + hidden * std**2 / 2


loss = Exercise(
    name="00_start_here.first_loss",
    title="Foretell the loss of an untrained model",
    signature="first_loss(vocab, hidden, std)",
    reference=first_loss_reference,
    cases=[
        case("ten tokens, and all weights zero", 10, 4, 0.0),
        case("ten tokens, four features", 10, 4, 0.5),
        case("MiniMind-3", 6400, 768, 0.02),
        case("Qwen3's vocabulary", 151936, 1024, 0.02),
    ],
)


@loss.mutant(
    "the logarithm is to base 2", "cross-entropy in PyTorch is in nats: math.log.", "in bits it would be right."
)
def base_two(vocab, hidden, std):
    return math.log2(vocab) + hidden * std**2 / 2


@loss.mutant("the logarithm is to base 10", "cross-entropy in PyTorch is in nats: math.log.")
def base_ten(vocab, hidden, std):
    return math.log10(vocab) + hidden * std**2 / 2


@loss.mutant(
    "only ln(vocab) is there",
    "that is the loss if all logits are equal. Random logits with variance s add s / 2, 0.154 in MiniMind-3.",
)
def uniform_only(vocab, hidden, std):
    return math.log(vocab)


@loss.mutant("the half is missing", "the mean of exp(z) for a normal z of variance s is exp(s / 2), not exp(s).")
def half_missing(vocab, hidden, std):
    return math.log(vocab) + hidden * std**2


@loss.mutant(
    "the standard deviation is not squared", "a logit adds up hidden products, so its variance is hidden * std^2."
)
def not_squared(vocab, hidden, std):
    return math.log(vocab) + hidden * std / 2


@loss.mutant("the half of the variance is subtracted", "random logits are wrong guesses: they can only cost something.")
def subtracted(vocab, hidden, std):
    return math.log(vocab) - hidden * std**2 / 2


@loss.mutant(
    "the width is missing",
    "the final norm gives hidden features of size 1, and each adds std^2 to the variance of a logit.",
)
def width_missing(vocab, hidden, std):
    return math.log(vocab) + std**2 / 2


EXERCISES = [split, merge, count, loss]
