"""Exercises of notebook 12: count a model, run its stack, give it a head and a loss, count what a token costs."""

import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from ..config import MiniMindConfig
from ..loss import shifted_cross_entropy
from .compare import kind
from .framework import Exercise, case, draw


def is_whole(value) -> int:
    """1 for a whole number, also in a tensor; 0 for a float, even if nothing stands behind its point."""
    return int(not (value.is_floating_point() if torch.is_tensor(value) else isinstance(value, float)))


# 1. count_model ------------------------------------------------------------------------------------------------------


def widths(config) -> tuple[int, int, int, int]:
    """hidden, and the widths of q, of k, and of one (expert's) feed-forward."""
    query, key = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    inside = config.moe_intermediate_size if config.use_moe else config.intermediate_size
    return config.hidden_size, query, key, inside


def visits(config) -> int:
    """Feed-forwards that one token goes through in a layer."""
    return config.num_experts_per_tok + config.n_shared_experts if config.use_moe else 1


def one_feed_forward(config) -> int:
    hidden, _, _, inside = widths(config)
    return 3 * hidden * inside


def routers(config) -> int:
    return config.num_hidden_layers * config.num_experts * config.hidden_size if config.use_moe else 0


def count_model_reference(config):
    """Returns (total, active): each Parameter once; active leaves out the experts that a token does not visit."""
    hidden, query, key, _ = widths(config)
    attention = 2 * hidden * query + 2 * hidden * key
    norms = 2 * hidden + (2 * config.head_dim if config.qk_norm else 0)
    experts = config.num_experts + config.n_shared_experts if config.use_moe else 1
    ends = config.vocab_size * hidden * (1 if config.tie_word_embeddings else 2) + hidden
    common = ends + config.num_hidden_layers * (attention + norms) + routers(config)
    each = config.num_hidden_layers * one_feed_forward(config)
    return common + each * experts, common + each * visits(config)


def count_and_look(candidate: Callable, config) -> tuple | None:
    """The two counts, and whether both are whole numbers."""
    result = candidate(config)
    if result is None or result is ...:
        return result
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise TypeError(f"count_model must return two things, total and active; it returned {kind(result)}")
    return *result, is_whole(result[0]) & is_whole(result[1])


TINY = dict(vocab_size=11, hidden_size=6, head_dim=2, intermediate_size=5)  # 8 layers, 8 heads, 4 K/V heads
EXPERTS = dict(use_moe=True, num_experts=3, moe_intermediate_size=4)

count = Exercise(
    name="12_the_whole_model.count_model",
    title="Count a whole model: all parameters, and those of one token",
    signature="count_model(config)",
    reference=count_model_reference,
    call=count_and_look,
    returns=("total", "active", "are both whole numbers (1: yes)"),
    cases=[
        case("a tiny model", MiniMindConfig(**TINY)),
        case("its head not tied", MiniMindConfig(**TINY, tie_word_embeddings=False)),
        case("without QK-norm", MiniMindConfig(**TINY, qk_norm=False)),
        case("three narrow experts, one for a token", MiniMindConfig(**TINY, **EXPERTS)),
        case("two for a token", MiniMindConfig(**TINY, **EXPERTS, num_experts_per_tok=2)),
        case("one for a token, and two that all visit", MiniMindConfig(**TINY, **EXPERTS, n_shared_experts=2)),
        case("MiniMind-3", MiniMindConfig()),
        case("MiniMind-3 MoE", MiniMindConfig.minimind_3_moe()),
        case("MiniMind-2 MoE", MiniMindConfig.minimind_2_moe()),
    ],
)


def shifted(config, total: int, active: int | None = None) -> tuple[int, int]:
    """The right counts, each with something added."""
    right = count_model_reference(config)
    return right[0] + total, right[1] + (total if active is None else active)


@count.mutant(
    "the head is counted, although it is tied",
    "lm_head.weight is the embedding's Parameter: two names, one matrix. In MiniMind-3 that is 4,915,200 too many.",
    "a state dict lists it under both names.",
)
def head_twice(config):
    return shifted(config, config.vocab_size * config.hidden_size if config.tie_word_embeddings else 0)


@count.mutant(
    "the head is not counted where it is not tied",
    "config.tie_word_embeddings says it: False makes lm_head a matrix of its own.",
)
def head_never(config):
    return shifted(config, 0 if config.tie_word_embeddings else -config.vocab_size * config.hidden_size)


@count.mutant("the final norm is missing", "one more RMSNorm stands behind the last block: hidden_size weights.")
def no_final_norm(config):
    return shifted(config, -config.hidden_size)


@count.mutant(
    "the QK-norm weights are missing",
    "q_norm and k_norm hold head_dim weights each, in every layer: 1,536 in MiniMind-3.",
)
def no_qk_norm(config):
    return shifted(config, -config.num_hidden_layers * 2 * config.head_dim if config.qk_norm else 0)


@count.mutant(
    "the blocks are counted once, not num_hidden_layers times", "every block has weights of its own.", "ALBERT shares."
)
def one_block(config):
    ends = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2) + config.hidden_size
    return tuple(ends + (value - ends) // config.num_hidden_layers for value in count_model_reference(config))


@count.mutant(
    "the router is missing",
    "each layer has a matrix of num_experts * hidden_size that chooses: 24,576 numbers in MiniMind-3 MoE.",
)
def no_router(config):
    return shifted(config, -routers(config))


@count.mutant(
    "of the router, only the rows of the chosen experts are active",
    "to choose, it scores every expert: all of its rows work for each token.",
)
def router_rows(config):
    if not config.use_moe:
        return shifted(config, 0)
    idle = config.num_experts - config.num_experts_per_tok
    return shifted(config, 0, -config.num_hidden_layers * idle * config.hidden_size)


@count.mutant(
    "experts are counted whatever config.use_moe says",
    "a dense config carries num_experts too, but does not use it. Read the switch.",
)
def always_experts(config):
    return count_model_reference(config.replace(use_moe=True))


@count.mutant(
    "every expert counts as active",
    "a token visits num_experts_per_tok of them, and the shared ones. The others rest.",
)
def all_active(config):
    total, _ = count_model_reference(config)
    return total, total


@count.mutant(
    "one expert counts as active, whatever num_experts_per_tok says",
    "k experts work for each token: one in MiniMind-3, two in MiniMind-2.",
)
def one_active(config):
    idle = config.num_experts_per_tok - 1 if config.use_moe else 0
    return shifted(config, 0, -config.num_hidden_layers * idle * one_feed_forward(config))


@count.mutant(
    "active is total * k / experts",
    "only the experts are divided: embedding, attention, norms and router work for every token.",
)
def proportion(config):
    total, active = count_model_reference(config)
    return (total, total * config.num_experts_per_tok // config.num_experts) if config.use_moe else (total, active)


@count.mutant(
    "the experts are taken to be intermediate_size wide",
    "their width is moe_intermediate_size. In MiniMind both are the same, in Qwen3-MoE they are not.",
)
def dense_width(config):
    return count_model_reference(config.replace(moe_intermediate_size=config.intermediate_size))


@count.mutant(
    "the shared experts are missing",
    "n_shared_experts more feed-forwards stand beside the routed ones (MiniMind-2: one).",
    "MiniMind-3 has none.",
)
def no_shared(config):
    return count_model_reference(config.replace(n_shared_experts=0))


@count.mutant(
    "the shared experts are not counted as active", "every token visits them: that is what shared means.", None
)
def shared_idle(config):
    idle = config.n_shared_experts if config.use_moe else 0
    return shifted(config, 0, -config.num_hidden_layers * idle * one_feed_forward(config))


@count.mutant(
    "a dense feed-forward is counted beside the experts",
    "with use_moe the experts take its place, in every layer.",
    "some models keep the first layers dense, such as DeepSeek's.",
)
def dense_too(config):
    dense = 3 * config.hidden_size * config.intermediate_size if config.use_moe else 0
    return shifted(config, config.num_hidden_layers * dense)


@count.mutant(
    "the embedding is left out of active",
    "the head multiplies by all of it for every token. MiniMind's 64M active are counted with it.",
    "papers often give non-embedding parameters.",
)
def active_without_embedding(config):
    return shifted(config, 0, -config.vocab_size * config.hidden_size)


@count.mutant(
    "the rotary tables are counted",
    "they follow from the config: buffers, neither trained nor saved.",
)
def with_tables(config):
    return shifted(config, 2 * config.max_position_embeddings * config.head_dim)


@count.mutant("active comes first", "the order is total, active.")
def exchanged(config):
    return count_model_reference(config)[::-1]


@count.mutant(
    "k_proj and v_proj are counted as wide as q_proj",
    "they make num_key_value_heads heads only.",
    "it is right for plain multi-head attention.",
)
def wide_keys(config):
    more = (config.num_attention_heads - config.num_key_value_heads) * config.head_dim
    return shifted(config, 2 * config.num_hidden_layers * config.hidden_size * more)


@count.mutant(
    "attention is counted as four matrices of hidden * hidden",
    "q_proj and o_proj have num_attention_heads * head_dim, k_proj and v_proj num_key_value_heads * head_dim.",
    "GPT-2's are square.",
)
def square_attention(config):
    hidden, query, key, _ = widths(config)
    return shifted(config, config.num_hidden_layers * hidden * (4 * hidden - 2 * query - 2 * key))


@count.mutant(
    "q_proj and o_proj are taken to be hidden_size wide",
    "the width of all heads is num_attention_heads * head_dim.",
    "in MiniMind-3 both are 768; in Qwen3-0.6B they are 1,024 and 2,048.",
)
def hidden_queries(config):
    hidden, query, _, _ = widths(config)
    return shifted(config, 2 * config.num_hidden_layers * hidden * (hidden - query))


@count.mutant("o_proj is missing", "attention has four matrices: q_proj, k_proj, v_proj, and o_proj for the way back.")
def no_o_proj(config):
    hidden, query, _, _ = widths(config)
    return shifted(config, -config.num_hidden_layers * hidden * query)


@count.mutant("the feed-forward has two matrices", "SwiGLU has three: gate_proj, up_proj, down_proj.", "GPT-2 has two.")
def feed_forward_of_two(config):
    total, active = count_model_reference(config)
    third = config.num_hidden_layers * config.hidden_size * widths(config)[3]
    experts = config.num_experts + config.n_shared_experts if config.use_moe else 1
    return total - third * experts, active - third * visits(config)


@count.mutant(
    "config.use_moe is not read", "a mixture of experts has a router and several feed-forwards in each layer."
)
def never_experts(config):
    return count_model_reference(config.replace(use_moe=False))


@count.mutant(
    "QK-norm is counted whatever config.qk_norm says",
    "without it a layer has no q_norm and no k_norm.",
    "MiniMind-3 has it, MiniMind-2 has not.",
)
def always_qk_norm(config):
    return count_model_reference(config.replace(qk_norm=True))


@count.mutant("the router is not counted as active", "it scores the experts for every token.")
def router_idle(config):
    return shifted(config, 0, -routers(config))


@count.mutant(
    "no norm is counted",
    "every block has two RMSNorms of hidden_size weights, and q_norm and k_norm of head_dim; a final norm follows.",
)
def no_norms(config):
    each = 2 * config.hidden_size + (2 * config.head_dim if config.qk_norm else 0)
    return shifted(config, -config.num_hidden_layers * each - config.hidden_size)


@count.mutant(
    "the two norms of every block are missing",
    "one stands in front of attention and one in front of the feed-forward, with hidden_size weights each.",
)
def no_block_norms(config):
    return shifted(config, -config.num_hidden_layers * 2 * config.hidden_size)


@count.mutant(
    "only one norm is counted in every block",
    "one stands in front of attention and one in front of the feed-forward: 2 * hidden_size.",
)
def one_block_norm(config):
    return shifted(config, -config.num_hidden_layers * config.hidden_size)


@count.mutant(
    "QK-norm is counted for every head",
    "all heads of a layer share one q_norm and one k_norm, of head_dim weights each.",
)
def qk_norm_of_every_head(config):
    more = config.num_attention_heads + config.num_key_value_heads - 2
    return shifted(config, config.num_hidden_layers * more * config.head_dim if config.qk_norm else 0)


@count.mutant(
    "the counts are floats",
    "a count is a whole number. In Python `/` gives a float, `//` a whole number; here nothing has to be divided.",
)
def floats(config):
    return tuple(float(value) for value in count_model_reference(config))


# 2. run_stack --------------------------------------------------------------------------------------------------------


def run_stack_reference(ids, embedding, blocks, norm, cos, sin, start):
    """ids: [batch, seq]; embedding: [vocab, hidden]; blocks: functions of (x, (cos, sin)). Returns hidden states."""
    rows = slice(start, start + ids.shape[1])
    x = embedding[ids]
    for block in blocks:
        x = block(x, (cos[rows], sin[rows]))
    return norm(x)


class Step:
    """A norm or a block, with words that a report can show."""

    def __init__(self, words: str, function: Callable):
        self.words, self.function = words, function

    def __call__(self, *arguments):
        return self.function(*arguments)

    def __repr__(self) -> str:
        return self.words


class Blocks(list):
    """A list of blocks, shown in few words."""

    def __str__(self) -> str:
        return f"[{', '.join(map(str, self))}]" if len(self) < 3 else f"{len(self)} blocks, each another"


def rotary_block(seed: int) -> Step:
    """A block that depends on its positions, as attention does, and on the order of the tokens."""
    matrix = draw(4, 4, seed=seed, scale=0.5)

    def block(x, positions):
        cos, sin = positions
        return x + torch.tanh((x * cos[..., :1] + x.cumsum(dim=-2) * sin[..., :1]) @ matrix)

    return Step("a random block", block)


def tables(end: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.outer(torch.arange(end).float(), draw(2, seed=seed).abs() + 0.3)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def stack_case(label: str, batch: int, seq: int, blocks: int, end: int, start: int, seed: int):
    ids = torch.randint(0, 9, (batch, seq), generator=torch.Generator().manual_seed(seed))
    weight = 1 + 0.5 * draw(4, seed=seed + 1)
    norm = Step("an RMSNorm", lambda x: F.rms_norm(x, (4,), weight, 1e-6))
    many = Blocks(rotary_block(seed + 3 + i) for i in range(blocks))
    return case(label, ids, draw(9, 4, seed=seed + 2), many, norm, *tables(end, seed + 9), start)


def stack_and_gradient(candidate: Callable, ids, embedding, *others) -> tuple | None:
    """The hidden states, and the gradient that their sum sends back to the embedding (None: none arrives)."""
    start = embedding.clone().requires_grad_()
    handed = start * 1  # not a leaf, so that it can be changed in place
    hidden = candidate(ids, handed, *others)
    embedding.copy_(handed.detach())  # so that a change in place is seen
    if hidden is None or hidden is ...:
        return hidden
    grad = None
    if torch.is_tensor(hidden) and hidden.requires_grad:
        (grad,) = torch.autograd.grad(hidden.sum(), start, allow_unused=True)
    return hidden, grad


stack = Exercise(
    name="12_the_whole_model.run_stack",
    title="The stack: embedding, blocks, final norm, and the right rows of the tables",
    signature="run_stack(ids, embedding, blocks, norm, cos, sin, start)",
    reference=run_stack_reference,
    call=stack_and_gradient,
    returns=("hidden states", "gradient of the embedding"),
    tolerance={torch.float32: 1e-4},
    cases=[
        case(
            "one token, two small blocks",
            torch.tensor([[1]]),
            torch.tensor([[5.0, 6.0], [1.0, 2.0]]),
            Blocks(
                [
                    Step("x -> 3 x + cos", lambda x, positions: 3 * x + positions[0]),
                    Step("x -> x x + 10 sin", lambda x, positions: x * x + 10 * positions[1]),
                ]
            ),
            Step("x -> x / 2", lambda x: x / 2),
            torch.tensor([[0.5, 0.5]]),
            torch.tensor([[0.25, 0.25]]),
            0,
        ),
        stack_case("four tokens, a table of four rows", 1, 4, 2, end=4, start=0, seed=1200),
        stack_case("two texts of three tokens, a longer table", 2, 3, 3, end=9, start=0, seed=1220),
        stack_case("three new tokens behind two cached ones", 1, 3, 3, end=9, start=2, seed=1240),
        stack_case("one new token behind five cached ones", 2, 1, 4, end=9, start=5, seed=1260),
    ],
)


def walk(ids, embedding, blocks, norm, cos, sin, rows: slice, each: Callable | None = None) -> torch.Tensor:
    """run_stack with other rows of the tables; each(x, new) makes the next x of what a block got and returned."""
    x = embedding[ids]
    for block in blocks:
        new = block(x, (cos[rows], sin[rows]))
        x = each(x, new) if each else new
    return norm(x)


def right_rows(ids, start: int) -> slice:
    return slice(start, start + ids.shape[1])


@stack.mutant(
    "the table begins at row 0, whatever start is",
    "behind a cache the first new token stands at position start. With row 0 it looks as if the text began anew.",
)
def from_zero(ids, embedding, blocks, norm, cos, sin, start):
    return walk(ids, embedding, blocks, norm, cos, sin, slice(0, ids.shape[1]))


@stack.mutant(
    "the rows are taken as cos[start:seq]",
    "the second number of a slice is where it ends, not how long it is: cos[start : start + seq].",
)
def end_is_length(ids, embedding, blocks, norm, cos, sin, start):
    return walk(ids, embedding, blocks, norm, cos, sin, slice(start, ids.shape[1]))


@stack.mutant(
    "the last rows of the table are taken",
    "cos[-seq:] is the end of the table, the longest text of all. A text begins at row start.",
)
def last_rows(ids, embedding, blocks, norm, cos, sin, start):
    return walk(ids, embedding, blocks, norm, cos, sin, slice(-ids.shape[1], None))


@stack.mutant(
    "the whole tables are handed over",
    "a block wants one row for each of its seq tokens.",
)
def whole_tables(ids, embedding, blocks, norm, cos, sin, start):
    return walk(ids, embedding, blocks, norm, cos, sin, slice(None))


@stack.mutant("the rows are one too far down", "the first token stands at position start, and that is row start.")
def one_later(ids, embedding, blocks, norm, cos, sin, start):
    rows = right_rows(ids, start)
    turn = lambda table: table.roll(-1, 0)  # noqa: E731
    return walk(ids, embedding, blocks, norm, turn(cos), turn(sin), rows)


@stack.mutant("cos and sin are exchanged", "the pair is (cos, sin), in this order.")
def sin_first(ids, embedding, blocks, norm, cos, sin, start):
    return walk(ids, embedding, blocks, norm, sin, cos, right_rows(ids, start))


@stack.mutant(
    "the final norm is missing",
    "the stream has grown from block to block; the head wants it at the size of one.",
)
def without_norm(ids, embedding, blocks, norm, cos, sin, start):
    return walk(ids, embedding, blocks, lambda x: x, cos, sin, right_rows(ids, start))


@stack.mutant(
    "the final norm stands behind every block",
    "inside the stack the stream flows on as it is: each block norms its own copy.",
    "the post-norm Transformer of 2017 does so.",
)
def norm_each(ids, embedding, blocks, norm, cos, sin, start):
    return walk(ids, embedding, blocks, lambda x: x, cos, sin, right_rows(ids, start), lambda x, new: norm(new))


@stack.mutant(
    "the norm stands behind every block, and once more at the end",
    "only the last block's output is normed here: return norm(x), after the loop.",
)
def norm_each_and_last(ids, embedding, blocks, norm, cos, sin, start):
    return walk(ids, embedding, blocks, norm, cos, sin, right_rows(ids, start), lambda x, new: norm(new))


@stack.mutant(
    "what the blocks return is not kept",
    "a block changes nothing in place: x = block(x, ...).",
)
def not_kept(ids, embedding, blocks, norm, cos, sin, start):
    return walk(ids, embedding, blocks, norm, cos, sin, right_rows(ids, start), lambda x, new: x)


@stack.mutant(
    "the norm comes before the blocks, not after them",
    "it is the last step: what the head reads.",
    "BERT and BLOOM norm behind the embedding too.",
)
def norm_first(ids, embedding, blocks, norm, cos, sin, start):
    x = norm(embedding[ids])
    for block in blocks:
        x = block(x, (cos[right_rows(ids, start)], sin[right_rows(ids, start)]))
    return x


@stack.mutant(
    "the block's input is added once more",
    "a block adds inside, twice, and returns the whole stream.",
)
def added_again(ids, embedding, blocks, norm, cos, sin, start):
    return walk(ids, embedding, blocks, norm, cos, sin, right_rows(ids, start), lambda x, new: x + new)


@stack.mutant(
    "every block reads the embedding",
    "each block goes on with what the one before returned: x = block(x, ...).",
)
def all_read_embedding(ids, embedding, blocks, norm, cos, sin, start):
    return walk(ids, embedding, blocks[-1:], norm, cos, sin, right_rows(ids, start))


@stack.mutant("the first block runs each time", "the blocks have weights of their own: the loop variable is the block.")
def first_block_again(ids, embedding, blocks, norm, cos, sin, start):
    return walk(ids, embedding, [blocks[0]] * len(blocks), norm, cos, sin, right_rows(ids, start))


@stack.mutant("the last block is left out", "the stack has as many blocks as the list; range(len(blocks)) takes all.")
def one_block_short(ids, embedding, blocks, norm, cos, sin, start):
    return walk(ids, embedding, blocks[:-1], norm, cos, sin, right_rows(ids, start))


@stack.mutant("the blocks run in reverse order", "blocks[0] is the lowest: the embedding flows into it.")
def upside_down(ids, embedding, blocks, norm, cos, sin, start):
    return walk(ids, embedding, blocks[::-1], norm, cos, sin, right_rows(ids, start))


@stack.mutant(
    "the embedding is multiplied by the root of hidden",
    "MiniMind takes its rows as they are.",
    "the Transformer of 2017 and Gemma multiply.",
)
def scaled_embedding(ids, embedding, blocks, norm, cos, sin, start):
    return walk(ids, embedding * embedding.shape[1] ** 0.5, blocks, norm, cos, sin, right_rows(ids, start))


@stack.mutant(
    "positions are added to the embedding",
    "rotary positions turn q and k inside attention; the stream carries none.",
    "GPT-2 adds a learned vector for each position, the Transformer of 2017 a table of waves.",
)
def positions_added(ids, embedding, blocks, norm, cos, sin, start):
    rows = right_rows(ids, start)
    x = embedding[ids] + cos[rows]
    for block in blocks:
        x = block(x, (cos[rows], sin[rows]))
    return norm(x)


@stack.mutant(
    "a block is handed cos and sin as two arguments",
    "it takes two in all: x, and the pair (cos, sin) in parentheses.",
)
def not_a_pair(ids, embedding, blocks, norm, cos, sin, start):
    x = embedding[ids]
    for block in blocks:
        x = block(x, cos[right_rows(ids, start)], sin[right_rows(ids, start)])
    return norm(x)


@stack.mutant(
    "the norm stands in front of every block too",
    "each block norms its own copy inside; the stream itself is normed once, after the last block.",
)
def norm_in_front_of_each(ids, embedding, blocks, norm, cos, sin, start):
    x = embedding[ids]
    for block in blocks:
        x = block(norm(x), (cos[right_rows(ids, start)], sin[right_rows(ids, start)]))
    return norm(x)


@stack.mutant(
    "all tokens get one row of the tables",
    "cos[start] is the row of the first new token. Each of the seq tokens has its own: cos[start : start + seq].",
)
def one_row(ids, embedding, blocks, norm, cos, sin, start):
    return walk(ids, embedding, blocks, norm, cos, sin, slice(start, start + 1))


@stack.mutant(
    "the hidden states send no gradient back to the embedding",
    "the numbers are right, but nothing can be trained with them. .detach() and torch.no_grad() cut the way back.",
)
def gradient_lost(ids, embedding, blocks, norm, cos, sin, start):
    return walk(ids, embedding, blocks, norm, cos, sin, right_rows(ids, start)).detach()


# 3. CausalLM ---------------------------------------------------------------------------------------------------------


class CausalLM(nn.Module):
    """The reference, cut into steps, so that each mistake is one step done otherwise."""

    def __init__(self, config, model):
        super().__init__()
        self.model = model
        self.lm_head = self.make_head(config)
        self.tie(config)

    def make_head(self, config):
        return nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def tie(self, config):
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, ids, labels=None):
        """ids, labels: [batch, seq]. Returns (logits [batch, seq, vocab], loss or None)."""
        logits = self.logits(self.model(ids))
        return logits, None if labels is None else self.loss(logits, labels)

    def logits(self, hidden):
        return self.lm_head(hidden)

    def loss(self, logits, labels):
        return shifted_cross_entropy(logits, labels)


class SmallStack(nn.Module):
    """In place of MiniMindModel: ids [batch, seq] -> hidden states [batch, seq, hidden], with an embed_tokens."""

    def __init__(self, config):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.mix = nn.Parameter(torch.empty(config.hidden_size, config.hidden_size))

    def forward(self, ids):
        return torch.tanh(self.embed_tokens(ids) @ self.mix)


def run_language_model(cls: type, config: MiniMindConfig, ids, labels, dtype: torch.dtype):
    """Build it on a small stack, give it weights, run it.

    Returns logits, loss, the gradient of the embedding (None without a loss) and the number of parameters.
    """
    model = cls(config, SmallStack(config))
    if not isinstance(model, nn.Module) or not isinstance(getattr(model, "lm_head", None), nn.Module):
        if callable(model):
            model(ids)  # a stub says so here
        raise TypeError("CausalLM must be an nn.Module that keeps the stack as self.model and the head as self.lm_head")
    if "model.embed_tokens.weight" not in model.state_dict():
        raise TypeError("CausalLM must keep the stack as self.model, so that the names of its weights are MiniMind's")
    weights = {
        "model.embed_tokens.weight": draw(config.vocab_size, config.hidden_size, seed=1280),
        "model.mix": draw(config.hidden_size, config.hidden_size, seed=1281),
        "lm_head.weight": draw(config.vocab_size, config.hidden_size, seed=1280 + 2 * (not config.tie_word_embeddings)),
        "lm_head.bias": draw(config.vocab_size, seed=1283),
    }
    model.load_state_dict({name: value for name, value in weights.items() if name in model.state_dict()}, strict=False)
    model = model.to(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the core's, where nothing is to be predicted
        result = model(ids) if labels is None else model(ids, labels)
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise TypeError(f"forward must return logits and loss; it returned {kind(result)}")
    logits, loss = result
    grad = None
    if torch.is_tensor(loss) and loss.numel() == 1 and loss.requires_grad and labels is not None:
        (grad,) = torch.autograd.grad(loss, model.model.embed_tokens.weight, allow_unused=True)
    return (*(x.detach() if torch.is_tensor(x) else x for x in (logits, loss)), grad, sum_of_sizes(model))


def sum_of_sizes(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def numbers(*rows) -> torch.Tensor:
    return torch.tensor(rows)


TIED = MiniMindConfig(hidden_size=4, vocab_size=6, head_dim=2, intermediate_size=8, num_hidden_layers=1)
UNTIED = TIED.replace(tie_word_embeddings=False)

language_model = Exercise(
    name="12_the_whole_model.CausalLM",
    title="A language model: a stack, a tied head, a shifted loss",
    signature="CausalLM(config, model)",
    reference=CausalLM,
    call=run_language_model,
    arguments=("config", "ids", "labels", "dtype"),
    returns=("logits", "loss", "the gradient of the embedding", "the number of parameters"),
    provides={"shifted_cross_entropy": shifted_cross_entropy},
    tolerance={torch.float32: 1e-4, torch.bfloat16: 2**-6},
    cases=[
        case("two tokens, no labels", TIED, numbers([3, 1]), None, torch.float32),
        case("three tokens, each its own label", TIED, numbers([3, 1, 4]), numbers([3, 1, 4]), torch.float32),
        case("the head not tied", UNTIED, numbers([3, 1, 4]), numbers([3, 1, 4]), torch.float32),
        case(
            "two texts, one with a prompt and padding that are not to be learned",
            TIED,
            numbers([3, 1, 0, 1, 5], [2, 0, 5, 0, 0]),
            numbers([3, 1, 0, 1, 5], [-100, -100, 5, -100, -100]),
            torch.float32,
        ),
        case("one token: nothing to predict", TIED, numbers([3]), numbers([3]), torch.float32),
        case("in bfloat16", TIED, numbers([3, 1, 4, 1, 5]), numbers([3, 1, 4, 1, 5]), torch.bfloat16),
    ],
)


@language_model.mutant(
    "the head has a matrix of its own, although the config ties them",
    "copied values are equal only until the first step of training. Assign the Parameter itself: "
    "self.lm_head.weight = self.model.embed_tokens.weight.",
)
class OwnHead(CausalLM):
    def tie(self, config):
        pass


@language_model.mutant(
    "the head is tied, whatever config.tie_word_embeddings says",
    "models that were trained untied have two matrices; tied, one of them would be lost at loading.",
)
class AlwaysTied(CausalLM):
    def tie(self, config):
        self.lm_head.weight = self.model.embed_tokens.weight


@language_model.mutant("the head has a bias", "MiniMind's head has none: bias=False.", "BERT's head has one.")
class HeadWithBias(CausalLM):
    def make_head(self, config):
        return nn.Linear(config.hidden_size, config.vocab_size)


@language_model.mutant(
    "the labels are not shifted",
    "the logits at position t speak about token t + 1. Unshifted, the model learns to repeat what it reads.",
)
class NoShift(CausalLM):
    def loss(self, logits, labels):
        return cross_entropy(logits, labels)


@language_model.mutant(
    "the labels are shifted twice",
    "core.shifted_cross_entropy shifts already. Shifted once more, the model learns the token after the next.",
)
class TwoShifts(CausalLM):
    def loss(self, logits, labels):
        return shifted_cross_entropy(logits[:, :-1], labels[:, 1:])


@language_model.mutant(
    "the shift goes the other way: logits[:, 1:] against labels[:, :-1]",
    "that asks for the token before. The logits lose their last position, the labels their first.",
)
class BackwardShift(CausalLM):
    def loss(self, logits, labels):
        return cross_entropy(logits[:, 1:], labels[:, :-1])


@language_model.mutant(
    "the loss is NaN where nothing is to be predicted",
    "a mean over no positions is 0 / 0, and one such batch turns every weight into NaN. core.shifted_cross_entropy "
    "gives 0 and warns.",
    "PyTorch's cross_entropy does so.",
)
class NotANumber(CausalLM):
    def loss(self, logits, labels):
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())


@language_model.mutant(
    "the loss is the sum, not the mean",
    "long batches would then take larger steps than short ones.",
)
class SummedLoss(CausalLM):
    def loss(self, logits, labels):
        return shifted_cross_entropy(logits, labels) * (labels[:, 1:] != -100).sum()


@language_model.mutant(
    "the mean is over all positions, those with label -100 too",
    "a batch with much padding would seem to be easy. Divide by the positions that count.",
)
class MeanOverAll(CausalLM):
    def loss(self, logits, labels):
        counted = (labels[:, 1:] != -100).sum()
        return shifted_cross_entropy(logits, labels) * counted / max(labels[:, 1:].numel(), 1)


@language_model.mutant(
    "the mean is taken of each text, then of the texts",
    "a token of a short answer then weighs more than one of a long answer. The mean is over all positions.",
)
class MeanOfMeans(CausalLM):
    def loss(self, logits, labels):
        each = [shifted_cross_entropy(one[None], own[None]) for one, own in zip(logits, labels, strict=True)]
        return torch.stack(each).mean()


@language_model.mutant(
    "every label 0 is left out, as if it were padding",
    "0 may be an ordinary token of a text. What is not to be learned has label -100.",
)
class ZeroIgnored(CausalLM):
    def loss(self, logits, labels):
        return shifted_cross_entropy(logits, labels.clamp(min=0), ignore_index=0)


@language_model.mutant(
    "cross_entropy was given probabilities",
    "it takes the softmax itself. After a second one all probabilities are nearly equal, and little is learned.",
)
class SoftmaxTwice(CausalLM):
    def loss(self, logits, labels):
        return shifted_cross_entropy(logits.softmax(dim=-1), labels)


@language_model.mutant(
    "probabilities are returned, not logits",
    "temperature, top-k and the loss all start from logits.",
)
class Probabilities(CausalLM):
    def logits(self, hidden):
        return self.lm_head(hidden).softmax(dim=-1)


@language_model.mutant(
    "the loss is computed in bfloat16",
    "near 9 bfloat16 knows steps of 1/16 only: logits.float() comes before the loss.",
)
class HalfLoss(CausalLM):
    def loss(self, logits, labels):
        return F.cross_entropy(*flat(logits, labels)) if labels.shape[1] > 1 else super().loss(logits, labels)


@language_model.mutant(
    "only the last position's logits are returned",
    "training needs all of them; for writing, logits_to_keep=1 is an option.",
)
class OnlyLast(CausalLM):
    def forward(self, ids, labels=None):
        logits, loss = super().forward(ids, labels)
        return logits[:, -1:], loss


@language_model.mutant(
    "a loss is returned although no labels were given",
    "without labels there is nothing to be right about: None.",
)
class AlwaysLoss(CausalLM):
    def forward(self, ids, labels=None):
        return super().forward(ids, ids if labels is None else labels)


@language_model.mutant("loss comes first", "the order is logits, loss.", "transformers' tuples begin with the loss.")
class LossFirst(CausalLM):
    def forward(self, ids, labels=None):
        return super().forward(ids, labels)[::-1]


@language_model.mutant(
    "the hidden states are divided by the root of hidden",
    "MiniMind hands them to the head as they are.",
    "T5 does so when its ends are tied.",
)
class ScaledHead(CausalLM):
    def logits(self, hidden):
        return self.lm_head(hidden / hidden.shape[-1] ** 0.5)


@language_model.mutant(
    "the loss sends no gradient back",
    "the number is right, but nothing can be trained with it. .detach() and torch.no_grad() cut the way back.",
)
class GradientLost(CausalLM):
    def loss(self, logits, labels):
        return super().loss(logits, labels).detach()


@language_model.mutant(
    "the head is cut off from the stack: the hidden states send no gradient back",
    "then only the head learns. Neither .detach() nor torch.no_grad() belongs between the stack and the loss.",
)
class StackCutOff(CausalLM):
    def logits(self, hidden):
        return self.lm_head(hidden.detach())


@language_model.mutant(
    "the loss is taken of ids, not of labels",
    "labels are ids with -100 where nothing is to be learned: a prompt and padding. With ids all of it is learned.",
)
class LossOfIds(CausalLM):
    def forward(self, ids, labels=None):
        return super().forward(ids, None if labels is None else ids)


def flat(logits, labels):
    return logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()


def cross_entropy(logits, labels):
    """Without any shift, and 0 where nothing is to be predicted."""
    if not (labels != -100).any():
        return logits.float().sum() * 0
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


# 4. token_flops ------------------------------------------------------------------------------------------------------


def token_flops_reference(config, length):
    """FLOPs of one new token that looks at `length` tokens, itself among them: matrices and scores."""
    return head(config) + projections(config) + scores(config, length) + feed_forwards(config) + 2 * routers(config)


def head(config) -> int:
    return 2 * config.vocab_size * config.hidden_size


def projections(config) -> int:
    hidden, query, key, _ = widths(config)
    return 2 * config.num_hidden_layers * (2 * hidden * query + 2 * hidden * key)


def scores(config, length: int) -> int:
    return 4 * config.num_hidden_layers * widths(config)[1] * length


def feed_forwards(config) -> int:
    return 2 * config.num_hidden_layers * visits(config) * one_feed_forward(config)


def flops_and_look(candidate: Callable, config, length: int) -> tuple | None:
    """The FLOPs, and whether they are a whole number."""
    result = candidate(config, length)
    return result if result is None or result is ... else (result, is_whole(result))


flops = Exercise(
    name="12_the_whole_model.token_flops",
    title="The FLOPs of one token",
    signature="token_flops(config, length)",
    reference=token_flops_reference,
    call=flops_and_look,
    returns=("FLOPs", "is it a whole number (1: yes)"),
    cases=[
        case("a tiny model, the first token", MiniMindConfig(**TINY), 1),
        case("the tenth token, one K/V head", MiniMindConfig(**TINY, num_key_value_heads=1), 10),
        case("three experts, one for a token", MiniMindConfig(**TINY, **EXPERTS), 10),
        case("two for a token", MiniMindConfig(**TINY, **EXPERTS, num_experts_per_tok=2), 10),
        case("one for a token, and one that all visit", MiniMindConfig(**TINY, **EXPERTS, n_shared_experts=1), 10),
        case("MiniMind-3 behind 340 tokens", MiniMindConfig(), 340),
        case("MiniMind-3 MoE", MiniMindConfig.minimind_3_moe(), 340),
    ],
)


@flops.mutant(
    "multiplications are counted, additions are not",
    "each weight takes part in one multiplication and one addition: two FLOPs.",
    "some papers count multiply-adds.",
)
def half(config, length):
    return token_flops_reference(config, length) // 2


@flops.mutant("the head is missing", "the last matrix turns hidden into vocab scores, for every new token.")
def no_head(config, length):
    return token_flops_reference(config, length) - head(config)


@flops.mutant(
    "looking up the embedding is counted as a product",
    "it copies one row. Only the head multiplies by that matrix.",
)
def look_up(config, length):
    return token_flops_reference(config, length) + head(config)


@flops.mutant(
    "every parameter is counted, those of the norms too",
    "a norm multiplies each feature by its weight, no row by a matrix. Small, but the question is about matrices.",
    "2 * parameters is the usual estimate.",
)
def norms_too(config, length):
    norms = 2 * config.hidden_size + (2 * config.head_dim if config.qk_norm else 0)
    return token_flops_reference(config, length) + 2 * (config.num_hidden_layers * norms + config.hidden_size)


@flops.mutant(
    "the scores are missing",
    "attention multiplies q with every key, and the weights with every value. That has no parameters, but costs.",
    "the rule 2 * parameters leaves them out; for short texts that is close.",
)
def no_scores(config, length):
    return token_flops_reference(config, length) - scores(config, length)


@flops.mutant(
    "of attention, only q times k is counted",
    "the weights are multiplied with the values too: twice as much.",
)
def only_keys(config, length):
    return token_flops_reference(config, length) - scores(config, length) // 2


@flops.mutant(
    "the scores are counted with the few K/V heads",
    "every query head computes its own scores. Grouping saves cache, not these products.",
)
def few_heads(config, length):
    saved = config.num_attention_heads - config.num_key_value_heads
    return token_flops_reference(config, length) - scores(config, length) * saved // config.num_attention_heads


@flops.mutant(
    "the scores are counted with hidden_size",
    "a query is num_attention_heads * head_dim wide.",
    "in MiniMind-3 both are 768; in Qwen3-0.6B they are 1,024 and 2,048.",
)
def hidden_scores(config, length):
    wrong = config.hidden_size - widths(config)[1]
    return token_flops_reference(config, length) + 4 * config.num_hidden_layers * wrong * length


@flops.mutant(
    "the token does not look at itself",
    "of the `length` tokens it looks at it is one: `length` scores for each head, not length - 1.",
)
def not_itself(config, length):
    return token_flops_reference(config, length) - scores(config, 1)


@flops.mutant(
    "of the matrices, additions are not counted",
    "each number of a matrix takes part in one multiplication and one addition: 2 * out * in.",
)
def matrices_half(config, length):
    return (token_flops_reference(config, length) + scores(config, length)) // 2


@flops.mutant(
    "config.use_moe is not read",
    "a mixture of experts has a router, and each token visits num_experts_per_tok feed-forwards.",
)
def never_experts_flops(config, length):
    return token_flops_reference(config.replace(use_moe=False), length)


@flops.mutant(
    "the tokens before are counted too",
    "they are cached: only the new token goes through the matrices, once.",
)
def all_tokens(config, length):
    return token_flops_reference(config, length) * length


@flops.mutant("the scores are counted in one layer", "every layer has its own attention.")
def scores_once(config, length):
    layers = config.num_hidden_layers
    return token_flops_reference(config, length) - scores(config, length) * (layers - 1) // layers


@flops.mutant(
    "the scores are counted for all queries",
    "with a cache one new query looks at `length` keys; length squared is a whole text at once.",
)
def squared(config, length):
    return token_flops_reference(config, length) + scores(config, length) * (length - 1)


@flops.mutant(
    "every expert is counted",
    "a token goes through num_experts_per_tok of them, and through the shared ones.",
)
def all_experts(config, length):
    idle = config.num_experts - config.num_experts_per_tok if config.use_moe else 0
    return token_flops_reference(config, length) + 2 * config.num_hidden_layers * idle * one_feed_forward(config)


@flops.mutant(
    "the router is missing",
    "it multiplies the token with a row for each expert: 2 * num_experts * hidden in every layer.",
)
def router_missing(config, length):
    return token_flops_reference(config, length) - 2 * routers(config)


@flops.mutant(
    "the shared experts are missing",
    "every token goes through them, beside the routed ones.",
    "MiniMind-3 has none.",
)
def shared_missing(config, length):
    return token_flops_reference(config.replace(n_shared_experts=0), length)


@flops.mutant(
    "the feed-forward has two matrices",
    "SwiGLU has three: gate_proj, up_proj, down_proj.",
    "GPT-2 has two.",
)
def two_matrices(config, length):
    return token_flops_reference(config, length) - feed_forwards(config) // 3


@flops.mutant(
    "the way back is counted too: three times as much",
    "a gradient costs about two passes more. The question is about a token that is written.",
    "in training, 6 * parameters for each token is the usual estimate.",
)
def training_too(config, length):
    return 3 * token_flops_reference(config, length)


@flops.mutant(
    "it is 2 * active parameters",
    "that leaves out the scores, which have no parameters, and counts the norms, which are no matrices.",
    "the usual estimate, close for short texts.",
)
def two_for_a_parameter(config, length):
    return 2 * count_model_reference(config)[1]


@flops.mutant(
    "one expert is counted, whatever num_experts_per_tok says",
    "a token goes through k experts: one in MiniMind-3, two in MiniMind-2.",
)
def one_expert(config, length):
    idle = config.num_experts_per_tok - 1 if config.use_moe else 0
    return token_flops_reference(config, length) - 2 * config.num_hidden_layers * idle * one_feed_forward(config)


@flops.mutant(
    "the experts are taken to be intermediate_size wide",
    "their width is moe_intermediate_size. In MiniMind both are the same, in Qwen3-MoE they are not.",
)
def dense_width_flops(config, length):
    return token_flops_reference(config.replace(moe_intermediate_size=config.intermediate_size), length)


@flops.mutant(
    "o_proj is missing",
    "attention has four matrices: q_proj, k_proj, v_proj, and o_proj for the way back.",
)
def no_o_proj_flops(config, length):
    hidden, query, _, _ = widths(config)
    return token_flops_reference(config, length) - 2 * config.num_hidden_layers * hidden * query


@flops.mutant(
    "the number is a float",
    "a count is a whole number. In Python `/` gives a float, `//` a whole number; here nothing has to be divided.",
)
def float_flops(config, length):
    return float(token_flops_reference(config, length))


EXERCISES = [count, stack, language_model, flops]
