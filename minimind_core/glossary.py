"""The words of the series: `glossary()` and `config_table(...)`, shown as tables in a notebook."""

import dataclasses
import html
import inspect
import re
from dataclasses import dataclass
from typing import NamedTuple

from .config import MiniMindConfig

NOTEBOOKS = {
    "00": "start here",
    "01": "RMSNorm",
    "02": "RoPE",
    "03": "YaRN",
    "04": "attention",
    "05": "the K/V cache",
    "06": "SwiGLU",
    "07": "the residual block",
    "08": "the MoE gate",
    "09": "MoE dispatch",
    "10": "tied embeddings",
    "11": "shifted cross-entropy",
    "12": "the whole model",
    "13": "the tokenizer",
    "14": "training",
    "15": "generation",
}


class Term(NamedTuple):
    """One word of the series; symbol and axis may be empty."""

    term: str
    symbol: str
    axis: str
    notebook: str
    meaning: str


# term | symbol in formulas | axis in einops patterns and shapes | notebook that teaches it | meaning
LINES = """
accumulation | | | 14 | gradients of several micro-batches added for one update
activation | | | 06 | a function that bends a line, such as SiLU or GELU; hidden_act names it
active parameters | | | 08 | the parameters that one token uses; fewer than all in a mixture of experts
AdamW | | | 14 | an optimizer: running means of the gradient and its square, and a decay of its own
assignment | | | 09 | a pair of a token and one of its k experts
attention factor | a | | 03 | YaRN's factor on cos and sin, which sharpens attention in a longer window
attention weights | | heads query key | 04 | softmax of the scores: how much each query takes from each key
autocast | | | 14 | matrix products in half precision, weights and sums in float32
auxiliary loss | | | 08 | a small extra loss that spreads the tokens over the experts
base | B | | 02 | rope_theta, 1,000,000: the larger, the slower the slowest pair turns
batch | | batch | 00 | texts that are computed at the same time
batch level, sequence level | | | 08 | the auxiliary loss over all tokens, or for each text and then the mean
beam search | | | 15 | keeping several of the most probable texts at each step instead of one
bfloat16 | | | 11 | a number in 16 bits, eight of them for its digits
bias | | | 06 | a learned vector added after a matrix; MiniMind has none
bigram | | | 14 | a model that predicts from the one token before
block | | | 07 | attention and feed-forward, each behind its norm, each added to the stream
branch | | | 05 | two continuations that share one past
buffer | | | 00 | a tensor of a module that moves with it but is not trained
byte pair encoding | BPE | | 13 | merges the most frequent pair of neighbors into one token, again and again
capacity | | | 08 | the most tokens that one expert takes; later ones are dropped
causal mask | | query key | 04 | lets a query see its own position and those before it
chunk | | | 05 | several new tokens fed at once, behind a past
clipping | | | 14 | a gradient that is too long is shortened and keeps its direction
coefficient | | | 08 | the small factor of the auxiliary loss, router_aux_loss_coef
collapse | | | 08 | all tokens go to one or a few experts
contiguous | | | 00 | the numbers lie in memory in the order in which the axes count them
cosine | | | 10 | how far two vectors point the same way: 1 the same, 0 at right angles
cross-entropy | | | 11 | minus the logarithm of the probability of the right token, averaged
decoding | | | 05 | writing one token per pass, behind the cache
dense | | | 00 | without experts: every token uses every parameter
dispatch | | | 09 | tokens to their experts, and results back to their tokens
DistributedDataParallel | DDP | | 09 | one model trained in several processes, which average their gradients
dropout | | | 04 | sets random numbers to 0 in training and enlarges the others
dummy | | | 09 | 0 times the sum of an idle expert's weights, added so that it gets a gradient of zeros
embedding | E | vocab hidden | 10 | a table with one vector for each token
embedding end, head end | | | 10 | the two places where the tied matrix is used: looking tokens up, and scoring them
epsilon | ε | | 01 | rms_norm_eps: keeps a norm from dividing by zero
expert | | experts | 08 | one of several feed-forwards, of which a token visits k
explicit path | | | 04 | attention step by step, with the weights kept; the fast path is scaled_dot_product_attention
feed-forward | | intermediate | 06 | the part of a block that works on each token alone
FLOPs | | | 09 | multiplications and additions, a count of work
frequency | θᵢ | pairs | 02 | the angle by which pair i turns from one position to the next
gain | | | 07 | what a stack makes of a small nudge at its bottom: the product of all I + J
gate | | intermediate | 06 | the branch of SwiGLU that decides how much of each value passes
glitch token | | | 10 | a token that was never read in training, so only the head has moved its row
greedy | | | 15 | taking the token with the largest logit each time; temperature 0 means it
grouped-query attention | | | 04 | several query heads share one key head and one value head
head (attention) | | heads | 04 | one of several attentions side by side, each with its own features
head (of the model) | | vocab | 10 | lm_head: from hidden states to logits
head width | d | head_dim | 04 | features of one attention head, 96; called d in the formulas of RoPE and YaRN
held-out text | | | 14 | text that is never trained on, only measured
hidden size | d | hidden | 00 | width of the residual stream, 768
hook | | | 07 | a function that PyTorch calls after a module has run
idle expert | | experts | 08 | an expert that no token visits
ids | | batch seq | 00 | token numbers, the model's input
ignore_index | | | 11 | -100, a label that is not to be learned
in place | | | 07 | writing into an existing tensor instead of making a new one
intermediate size | | intermediate | 06 | width inside the feed-forward: π times hidden, up to a multiple of 64
K/V cache | | kv_heads | 05 | keys and values of the past, kept so that they are not computed again
K/V head | | kv_heads | 04 | a key head and a value head together; serves n_rep query heads
key | k | key | 04 | what a position offers to be found by
labels | | batch seq | 11 | the ids again; the loss compares position t with label t + 1
layer | | | 07 | another word for block
learning rate | lr | | 14 | how far one update moves the weights
load | f | experts | 08 | the share of all choices that went to an expert; it has no gradient
logits | z | batch seq vocab | 10 | one score per token of the vocabulary; softmax makes probabilities of them
logits_to_keep | | | 11 | for how many last positions logits are computed; 0 for all
logsumexp | | | 11 | logarithm of the sum of e to each logit, computed without overflow
marker | | | 11 | the last token of a prompt; its logits predict the answer's first token
mask | | | 04 | says which keys a query may see: 1 or True for seen
mean probability | P | experts | 08 | an expert's router probability, averaged over the tokens
merge | | | 13 | a pair of tokens that becomes one new token
meta device | | | 12 | where tensors have a shape but no numbers: enough to count a model
micro-batch | | | 11 | a part of a training step's batch that fits into memory
mixture of experts | | | 08 | MoE: a router sends each token to k of the experts
multi-head attention | MHA | | 04 | every query head has a K/V head of its own
multi-query attention | MQA | | 04 | one K/V head for all query heads
NaN | | | 09 | not a number, such as 0 · ∞
nat | | | 11 | unit of a loss whose logarithm has base e
one-hot | | vocab | 10 | a list of zeros with a single 1, at the token's place
original length | L | | 03 | the window in which a model was trained before YaRN
packing | | | 04 | several documents in one row; needs a mask with a row for each query
padding | | | 04 | filler tokens that bring short texts to the length of the longest
pair | i | pairs | 02 | two features of a head that turn together; head_dim / 2 of them
parameter | | | 00 | a number that training changes
past | P | | 05 | keys and values of all earlier positions, one pair of tensors per layer
perplexity | | | 11 | e to the loss: among how many equally likely tokens the model would be as unsure
position | m | seq | 02 | place of a token in its text, from 0
post-norm | | | 07 | the norm stands after each addition, on the stream; the Transformer of 2017
pre-norm | | | 07 | the norm stands before each part, and the stream is never normed; Llama, MiniMind
pre-tokenization | | | 13 | the text is cut into words first, and no merge crosses a cut
prefill | | | 05 | the pass over the whole prompt, which fills the cache
prompt injection | | | 13 | a user's text that forges a turn of the chat
QK-norm | | | 01 | RMSNorm on the query and the key of each head
query | q | query | 04 | what a position looks for
ramp | r | pairs | 03 | YaRN's passage from the pairs left alone (0) to the pairs slowed down (1)
rank | | | 13 | a merge's place in the list; the lowest goes first
repetition penalty | θ | | 15 | makes written tokens less likely: divides positive logits, multiplies negative ones
residual connection | | | 07 | the bare x in x + part(x): it carries the stream past each part
residual stream | x | batch seq hidden | 00 | one vector per token, to which every block adds
rms | | | 01 | root mean square: the typical size of the numbers of a vector
RoPE | | | 02 | rotary position embedding: pairs of q and k are turned by their position
router | | experts | 08 | the small layer that gives each token a probability per expert
safetensors | | | 12 | a file of named tensors that holds numbers only, no code
saturated | | | 04 | a softmax in which one weight is near 1: the gradient vanishes
scale factor | s | | 03 | YaRN's factor: how many times longer the window becomes
score | | query key | 04 | q times k, divided by the root of head_dim
sequence | | seq | 00 | the tokens of one text, in order
shared expert | | | 09 | an expert that every token visits, without a gate
sigmoid | | | 06 | 1 / (1 + e^-z): squeezes any number to between 0 and 1
SiLU | | | 06 | x times sigmoid(x), the activation of the gate
slice | | | 09 | an expert's piece [start:end] of the sorted assignments; the end is outside
softmax | | | 04 | turns scores into positive weights that sum to 1
special token | | | 13 | a reserved token that no merge makes, such as the end of a turn
stable sort | | | 09 | a sort that keeps the order of equal numbers
standard deviation | σ | | 00 | how far random numbers spread; initializer_range, 0.02, for the weights
state dict | | | 00 | names and tensors of a model, as they are saved
stop token | | | 15 | a token that ends the text when the model writes it
straight-through | | | 08 | one value forward, another gradient backward
streamer | | | 15 | what receives each token while the text is being written
stride | | | 00 | steps in memory from one number to the next along an axis
SwiGLU | | | 06 | down(silu(gate(x)) * up(x)), MiniMind's feed-forward
target | | batch seq | 11 | the token that a position is asked for: the one after it
temperature | T | | 15 | divides the logits before sampling: low is cautious, high is wild
tied | | | 10 | embedding and head are one Parameter
token | | tokens | 13 | a piece of text with a number; in these first notebooks, a byte
token choice, expert choice | | | 08 | tokens take their experts, or experts take their tokens
token-layer | | | 05 | one token going through one layer, a unit of work
top-k | k | | 15 | keeping only the k tokens with the largest logits
top-k (of the router) | k | k | 08 | the k most probable experts of a token
top-k, top-p (of sampling) | k, p | | 15 | sample only from the k likeliest tokens, or from those that make up p
top-p | p | | 15 | keeping the most probable tokens until their probabilities reach p, the one that crosses p included
transformers | | | 12 | Hugging Face's library of models; its Qwen3 gives MiniMind-3's logits
turns | β | | 03 | how often a pair goes around in the original window; beta_fast and beta_slow are such
unigram | | | 14 | a model that knows only how common each token is
up branch | | intermediate | 06 | the branch of SwiGLU that carries the value which the gate lets pass
value | v | | 04 | what a position hands over when it is found
visits | | visits | 09 | experts that one token passes through, shared ones included
vocabulary | V | vocab | 13 | all tokens that the model knows, 6,400
warm-up | | | 07 | the learning rate grows from 0 over the first steps
wavelength | λ | pairs | 02 | positions until a pair has turned once around
weight decay | | | 09 | the optimizer shrinks every weight a little at each step
YaRN | | | 03 | a way to stretch RoPE to longer texts: slow pairs are slowed down further
"""
TERMS = [Term(*(part.strip() for part in line.split("|"))) for line in LINES.strip().splitlines()]


@dataclass(frozen=True)
class Table:
    """Rows of text under column heads; a notebook shows it as a table."""

    heads: tuple[str, ...]
    rows: list[tuple[str, ...]]

    def __repr__(self) -> str:
        cells = [self.heads, *self.rows]
        widths = [max(len(row[i]) for row in cells) for i in range(len(self.heads))]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in cells)

    def _repr_html_(self) -> str:
        def line(cells: tuple[str, ...], tag: str, more: str = "") -> str:
            inside = "".join(f"<{tag}{more} style='text-align:left'>{html.escape(cell)}</{tag}>" for cell in cells)
            return f"<tr>{inside}</tr>"

        body = "".join(line(row, "td") for row in self.rows)
        return f"<table><thead>{line(self.heads, 'th', ' scope=col')}</thead><tbody>{body}</tbody></table>"


def glossary(*words: str) -> Table:
    """The series' words: all of them, or those in which one of `words` occurs.

    Raises ValueError for a word that occurs nowhere.
    """
    for word in words:
        if not any(word.lower() in " ".join(term).lower() for term in TERMS):
            raise ValueError(f"{word!r} is not in the glossary; glossary() shows all {len(TERMS)} words")
    found = [t for t in TERMS if not words or any(word.lower() in " ".join(t).lower() for word in words)]
    rows = [(t.term, t.symbol, t.axis, f"{t.notebook} {NOTEBOOKS[t.notebook]}", t.meaning) for t in found]
    return Table(("term", "symbol", "axis", "notebook", "meaning"), rows)


def config_table(**configs: MiniMindConfig) -> Table:
    """Every field of MiniMindConfig with its value in each of `configs` and the comment beside it in the source."""
    rows, group = [], ""
    for line in inspect.getsource(MiniMindConfig).splitlines():
        if heading := re.fullmatch(r"    # (.+)", line):
            group = heading[1]
        elif field := re.fullmatch(r"    (\w+): .+?  # (.+)", line):
            values = [str(getattr(config, field[1])) for config in configs.values()]
            rows.append((group, field[1], *values, field[2]))
            group = ""  # said once, in the group's first row
    missing = {field.name for field in dataclasses.fields(MiniMindConfig)} - {row[1] for row in rows}
    if missing:
        raise ValueError(f"no comment beside {', '.join(sorted(missing))} in MiniMindConfig: write one")
    return Table(("group", "field", *(name.replace("_", " ") for name in configs), "meaning"), rows)
