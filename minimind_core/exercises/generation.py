"""Exercises of notebook 15: top-p, the repetition penalty, a draw, writing, and bytes that are whole characters."""

import codecs
import math

import torch

from .framework import Exercise, case, draw
from .kv_cache import TINY

NEVER = -math.inf


def logs(*rows: list[float]) -> torch.Tensor:
    """Logits whose softmax is these rows."""
    return torch.tensor(rows).log()


# 1. top_p ------------------------------------------------------------------------------------------------------------


def top_p_reference(logits, p):
    """Keep the most probable tokens up to the one with which their mass reaches p. logits: [batch, vocab]."""
    ordered, order = logits.sort(dim=-1, descending=True)
    probs = ordered.softmax(dim=-1)
    dropped = probs.cumsum(dim=-1) - probs >= p
    dropped[:, 0] = False
    if p >= 1:
        dropped[:] = False
    return logits.masked_fill(torch.zeros_like(dropped).scatter(-1, order, dropped), NEVER)


top_p = Exercise(
    name="15_generation.top_p",
    title="top-p: the most probable tokens, until their mass reaches p",
    signature="top_p(logits, p)",
    reference=top_p_reference,
    cases=[
        case("probabilities 0.5, 0.41 and 0.09", logs([0.5, 0.41, 0.09]), 0.9),
        case("the same in another order", logs([0.09, 0.5, 0.41]), 0.9),
        case("less than the first token's probability", logs([0.09, 0.5, 0.41]), 0.2),
        case("p = 1", logs([0.1, 0.5, 0.4]), 1.0),
        case("two rows in different order", logs([0.5, 0.41, 0.09], [0.1, 0.3, 0.6]), 0.8),
        case("two rows of four", logs([0.05, 0.6, 0.25, 0.1], [0.4, 0.3, 0.1, 0.2]), 0.75),
        case("one probability far above the others", logs([0.01, 0.02, 0.95, 0.02]), 0.5),
        case("logits of 40 tokens", draw(3, 40, seed=1500, scale=2.0), 0.85),
        case("large logits", draw(2, 12, seed=1501, scale=8.0) + 100, 0.95),
    ],
)


def by_sorted(logits, p, rule, value=NEVER, descending=True):
    """Drop where rule(probs, mass up to and with each token) is true, in sorted order; then back."""
    ordered, order = logits.sort(dim=-1, descending=descending)
    probs = ordered.softmax(dim=-1)
    dropped = rule(probs, probs.cumsum(dim=-1))
    if p >= 1:
        dropped = torch.zeros_like(dropped)
    return logits.masked_fill(torch.zeros_like(dropped).scatter(-1, order, dropped), value)


def shifted(dropped):
    """Each token's fate one place later; the first stays."""
    return torch.cat([torch.zeros_like(dropped[:, :1]), dropped[:, :-1]], dim=-1)


@top_p.mutant(
    "the token that crosses p is dropped",
    "0.5 alone is less than 0.9; only with 0.41 is p reached. If the first token alone is above p, none would be left.",
)
def crossing_dropped(logits, p):
    return by_sorted(logits, p, lambda probs, mass: mass > p)


@top_p.mutant(
    "the token that crosses p is dropped, except where it is the first",
    "the mass of what stays must reach p: of 0.5, 0.41 and 0.09, p = 0.9 keeps two.",
)
def crossing_dropped_but_the_first(logits, p):
    return by_sorted(logits, p, lambda probs, mass: (mass > p) & (torch.arange(mass.shape[-1]) > 0))


@top_p.mutant(
    "one token too many stays, the one behind the crossing token",
    "with the crossing token the mass has reached p; the next one is the tail that top-p should cut.",
)
def one_too_many(logits, p):
    return by_sorted(logits, p, lambda probs, mass: shifted(mass - probs >= p))


@top_p.mutant(
    "the dropped places were not brought back from the sorted order",
    "place 0 after sorting is the most probable token, wherever it stood: scatter the mask by the sort's indices.",
)
def not_brought_back(logits, p):
    probs = logits.sort(dim=-1, descending=True).values.softmax(dim=-1)
    dropped = probs.cumsum(dim=-1) - probs >= p
    return logits.masked_fill(dropped & (p < 1), NEVER)


@top_p.mutant(
    "the dropped places were brought back the wrong way round: gather where scatter belongs",
    "order says where each sorted place came from. scatter writes to that token; gather reads from it, the inverse.",
)
def gathered(logits, p):
    ordered, order = logits.sort(dim=-1, descending=True)
    probs = ordered.softmax(dim=-1)
    dropped = (probs.cumsum(dim=-1) - probs >= p) & (p < 1)
    return logits.masked_fill(dropped.gather(-1, order), NEVER)


@top_p.mutant(
    "the logits are returned in sorted order",
    "a place in the vocabulary is a token: sorted, every number belongs to another token.",
)
def sorted_returned(logits, p):
    ordered = logits.sort(dim=-1, descending=True).values
    probs = ordered.softmax(dim=-1)
    return ordered.masked_fill((probs.cumsum(dim=-1) - probs >= p) & (p < 1), NEVER)


@top_p.mutant(
    "the order is rising: the least probable tokens stay",
    "the mass must be summed from the largest probability down: descending=True.",
)
def rising(logits, p):
    return by_sorted(logits, p, lambda probs, mass: mass - probs >= p, descending=False)


@top_p.mutant(
    "the logits themselves are summed, without a softmax",
    "p is a share of probability. Logits can be of any size and sign, and don't add up to 1.",
)
def without_softmax(logits, p):
    ordered, order = logits.sort(dim=-1, descending=True)
    dropped = ordered.cumsum(dim=-1) - ordered >= p
    dropped[:, 0] = False
    return logits.masked_fill(torch.zeros_like(dropped).scatter(-1, order, dropped), NEVER)


@top_p.mutant(
    "the mass was summed over the vocabulary without sorting",
    "which tokens stay would depend on their numbers, not on their probabilities.",
)
def unsorted(logits, p):
    probs = logits.softmax(dim=-1)
    return logits.masked_fill((probs.cumsum(dim=-1) - probs >= p) & (p < 1), NEVER)


@top_p.mutant(
    "dropped logits are set to 0",
    "the softmax makes e to the 0 = 1 of a 0, often more than of the others. Only minus infinity gives probability 0.",
)
def set_to_zero(logits, p):
    return by_sorted(logits, p, lambda probs, mass: mass - probs >= p, value=0.0)


@top_p.mutant(
    "dropped logits are set to a large negative number, not to minus infinity",
    "the softmax gives 0 all the same, but a later filter can't see that they are gone. -math.inf says it plainly.",
    "many programs write -1e9 or the type's lowest number, where minus infinity causes NaN elsewhere.",
)
def very_negative(logits, p):
    return by_sorted(logits, p, lambda probs, mass: mass - probs >= p, value=-1e9)


@top_p.mutant(
    "probabilities are returned, not logits",
    "the next step is a softmax, and the softmax of probabilities is nearly flat.",
)
def probabilities_returned(logits, p):
    return top_p_reference(logits, p).softmax(dim=-1)


@top_p.mutant(
    "each probability was compared with p on its own",
    "p bounds the sum of what stays. Where no single token has p, none is left.",
)
def compared_alone(logits, p):
    return logits.masked_fill((logits.softmax(dim=-1) < p) & (p < 1), NEVER)


@top_p.mutant(
    "a token stays if it has p times the largest probability",
    "p is the mass of all that stay, not a share of the first.",
    "this filter exists and is called min-p.",
)
def min_p(logits, p):
    probs = logits.softmax(dim=-1)
    return logits.masked_fill((probs < p * probs.amax(dim=-1, keepdim=True)) & (p < 1), NEVER)


@top_p.mutant(
    "a share p of the vocabulary stays",
    "p is a share of the probability: where one token has nearly all of it, one token stays.",
)
def share_of_the_vocabulary(logits, p):
    count = max(1, math.ceil(p * logits.shape[-1]))
    return logits.masked_fill(logits < logits.topk(count, dim=-1).values[:, -1:], NEVER)


@top_p.mutant(
    "all rows are cut as the first row",
    "each row is the distribution of another text: sort, sum and cut each on its own.",
)
def first_row_for_all(logits, p):
    first = top_p_reference(logits[:1], p).isinf()
    return logits.masked_fill(first, NEVER)


@top_p.mutant(
    "the softmax runs over the batch",
    "the probabilities of one text are a row: dim=-1.",
)
def over_the_batch(logits, p):
    ordered, order = logits.sort(dim=-1, descending=True)
    probs = ordered.softmax(dim=0)
    dropped = (probs.cumsum(dim=-1) - probs >= p) & (p < 1)
    return logits.masked_fill(torch.zeros_like(dropped).scatter(-1, order, dropped), NEVER)


@top_p.mutant(
    "it is the likely tokens that were dropped",
    "the mask is upside down: what is behind the token that crosses p becomes minus infinity, and the others stay.",
)
def likely_dropped(logits, p):
    return logits.masked_fill(~top_p_reference(logits, p).isinf(), NEVER)


@top_p.mutant(
    "logarithms of new probabilities are returned, not the logits that were given",
    "what stays keeps its number. The softmax of the next step shares out the mass by itself.",
)
def log_softmax_returned(logits, p):
    return top_p_reference(logits, p).log_softmax(dim=-1)


# 2. penalize ---------------------------------------------------------------------------------------------------------


def penalize_reference(logits, ids, penalty):
    """logits: [batch, vocab]; ids: [batch, seq], what has been written. Positive / penalty, negative * penalty."""
    seen = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, ids, True)
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


penalize = Exercise(
    name="15_generation.penalize",
    title="The repetition penalty: what was written becomes less likely",
    signature="penalize(logits, ids, penalty)",
    reference=penalize_reference,
    cases=[
        case(
            "logits 2, -2 and 1; tokens 0 and 1 were written",
            torch.tensor([[2.0, -2.0, 1.0]]),
            torch.tensor([[0, 1]]),
            2.0,
        ),
        case("token 0 was written three times", torch.tensor([[2.0, -2.0, 1.0]]), torch.tensor([[0, 0, 0]]), 2.0),
        case("penalty 1", torch.tensor([[2.0, -2.0, 1.0]]), torch.tensor([[0, 1]]), 1.0),
        case("a penalty below 1 is a reward", torch.tensor([[2.0, -2.0, 1.0]]), torch.tensor([[1, 2]]), 0.5),
        case(
            "two texts",
            torch.tensor([[2.0, -2.0, 1.0], [1.0, 3.0, -1.0]]),
            torch.tensor([[0, 0], [2, 1]]),
            1.5,
        ),
        case(
            "three texts of five tokens",
            draw(3, 8, seed=1510, scale=3.0),
            torch.tensor([[0, 3, 3, 7, 1], [5, 5, 5, 5, 2], [6, 4, 0, 1, 1]]),
            1.3,
        ),
    ],
)


def seen_in(logits, ids):
    return torch.zeros_like(logits, dtype=torch.bool).scatter(-1, ids, True)


@penalize.mutant(
    "negative logits are divided too",
    "-2 / 2 is -1, which is more than -2: the token became more likely. Below 0, multiply.",
    "the paper (CTRL, 2019) divides all; transformers did so too until it was reported as a bug.",
)
def all_divided(logits, ids, penalty):
    return torch.where(seen_in(logits, ids), logits / penalty, logits)


@penalize.mutant(
    "positive logits are multiplied too",
    "2 * 2 is 4: what was written becomes more likely. Above 0, divide.",
)
def all_multiplied(logits, ids, penalty):
    return torch.where(seen_in(logits, ids), logits * penalty, logits)


@penalize.mutant(
    "it rewards: positive logits are multiplied and negative ones divided",
    "then the model repeats all the more. Both must fall: positive / penalty, negative * penalty.",
)
def rewarded(logits, ids, penalty):
    moved = torch.where(logits > 0, logits * penalty, logits / penalty)
    return torch.where(seen_in(logits, ids), moved, logits)


@penalize.mutant(
    "the penalty is subtracted",
    "here it is a factor, so that 1 means none. Subtracted, 1 would already lower what was written.",
    "OpenAI's presence_penalty is subtracted once for a token that occurred.",
)
def subtracted(logits, ids, penalty):
    return torch.where(seen_in(logits, ids), logits - penalty, logits)


@penalize.mutant(
    "the penalty is subtracted once for each occurrence",
    "here it is a factor, and a token that occurred ten times is treated as one that occurred once.",
    "OpenAI's frequency_penalty works so.",
)
def subtracted_by_count(logits, ids, penalty):
    return logits - penalty * torch.zeros_like(logits).scatter_add(-1, ids, torch.ones_like(ids, dtype=logits.dtype))


@penalize.mutant(
    "the penalty is applied once for each occurrence",
    "a token counts once, however often it was written. Else an ordinary space or comma would soon be impossible.",
)
def by_count(logits, ids, penalty):
    count = torch.zeros_like(logits).scatter_add(-1, ids, torch.ones_like(ids, dtype=logits.dtype))
    return torch.where(logits > 0, logits / penalty**count, logits * penalty**count)


@penalize.mutant(
    "the tokens that were not written are penalized",
    "then the model can only repeat itself. `seen` and its opposite are exchanged.",
)
def unseen(logits, ids, penalty):
    moved = torch.where(logits > 0, logits / penalty, logits * penalty)
    return torch.where(seen_in(logits, ids), logits, moved)


@penalize.mutant(
    "all tokens are penalized",
    "that only flattens the distribution a little: nothing is said against repeating.",
)
def everything(logits, ids, penalty):
    return torch.where(logits > 0, logits / penalty, logits * penalty)


@penalize.mutant(
    "only the newest token is penalized",
    "a loop of two words would not be seen. All of ids counts, the prompt too.",
)
def newest_only(logits, ids, penalty):
    return penalize_reference(logits, ids[:, -1:], penalty)


@penalize.mutant(
    "the oldest token is left out",
    "all of ids counts, from its first column on.",
)
def first_left_out(logits, ids, penalty):
    return penalize_reference(logits, ids[:, 1:], penalty)


@penalize.mutant(
    "all texts are penalized for what the first one has written",
    "each row of ids belongs to its own row of logits.",
)
def first_text_for_all(logits, ids, penalty):
    return penalize_reference(logits, ids[:1].expand(len(logits), -1), penalty)


@penalize.mutant(
    "each text is penalized for what any text of the batch has written",
    "logits[:, ids] takes those columns in every row. Each row of ids belongs to its own row: gather and scatter.",
)
def any_text(logits, ids, penalty):
    return penalize_reference(logits, ids.reshape(1, -1).expand(len(logits), -1), penalty)


@penalize.mutant(
    "penalized logits were set to minus infinity",
    "then nothing can ever be written twice, not even a space. The penalty only lowers.",
)
def forbidden(logits, ids, penalty):
    return logits.masked_fill(seen_in(logits, ids) & (penalty != 1), NEVER)


@penalize.mutant(
    "only positive logits are penalized",
    "a token with a negative logit was written as well. Below 0, multiply: it becomes more negative.",
)
def only_positive(logits, ids, penalty):
    return torch.where(seen_in(logits, ids) & (logits > 0), logits / penalty, logits)


@penalize.mutant(
    "only negative logits are penalized",
    "a token with a positive logit was written as well. Above 0, divide.",
)
def only_negative(logits, ids, penalty):
    return torch.where(seen_in(logits, ids) & (logits < 0), logits * penalty, logits)


@penalize.mutant(
    "the newest token is left out",
    "all of ids counts, to its last column; a word said twice in a row is the plainest repetition.",
)
def newest_left_out(logits, ids, penalty):
    return penalize_reference(logits, ids[:, :-1], penalty)


@penalize.mutant(
    "only the logits of the written tokens are returned",
    "gather takes them out: [batch, seq]. Put them back to their places, [batch, vocab]: scatter.",
)
def written_alone(logits, ids, penalty):
    return penalize_reference(logits, ids, penalty).gather(-1, ids)


@penalize.mutant(
    "nothing is penalized",
    "logits.scatter(...) changes nothing, it returns a new tensor: return that one.",
)
def thrown_away(logits, ids, penalty):
    return logits.clone()


# 3. pick -------------------------------------------------------------------------------------------------------------


def pick_reference(probs, u):
    """The first token whose running sum is above u; the last one, if rounding leaves the sum below u."""
    above = probs.cumsum(dim=-1) > u[:, None]
    above[:, -1] = True
    return above.int().argmax(dim=-1)


def probs_case(label: str, rows: list[list[float]], u: list[float]):
    return case(label, torch.tensor(rows), torch.tensor(u))


pick = Exercise(
    name="15_generation.pick",
    title="A draw: from one uniform number to a token",
    signature="pick(probs, u)",
    reference=pick_reference,
    cases=[
        probs_case("probabilities 0.5, 0.25, 0.25; u = 0.6", [[0.5, 0.25, 0.25]], [0.6]),
        probs_case("u = 0.9", [[0.5, 0.25, 0.25]], [0.9]),
        probs_case("u = 0.1", [[0.5, 0.25, 0.25]], [0.1]),
        probs_case("u = 0.5, the edge between two tokens", [[0.5, 0.25, 0.25]], [0.5]),
        probs_case("u = 0, and token 0 has probability 0", [[0.0, 0.25, 0.75]], [0.0]),
        probs_case("probabilities that rounding has left below 1", [[0.5, 0.25, 0.24]], [0.995]),
        probs_case("the same probabilities in another order", [[0.125, 0.125, 0.25, 0.5]], [0.3]),
        probs_case(
            "three rows",
            [[0.5, 0.25, 0.25], [0.125, 0.75, 0.125], [0.25, 0.25, 0.5]],
            [0.8, 0.2, 0.4],
        ),
        case("forty tokens", draw(8, 40, seed=1520, scale=2.0).softmax(-1), torch.arange(8) / 8 + 0.03),
    ],
)


@pick.mutant(
    "the most probable token is taken, whatever u is",
    "that is greedy. Each token must come as often as its probability says.",
)
def greedy(probs, u):
    return probs.argmax(dim=-1)


@pick.mutant(
    "at the edge the token before is taken: >= where > belongs",
    "with u = 0 a first token of probability 0 would be drawn, and top-p had forbidden it.",
)
def edge(probs, u):
    above = probs.cumsum(dim=-1) >= u[:, None]
    above[:, -1] = True
    return above.int().argmax(dim=-1)


@pick.mutant(
    "where rounding leaves the whole sum below u, no token is above it, and argmax says 0",
    "once in a million draws a token would come that has no business there. Take the last one then.",
)
def nothing_above(probs, u):
    return (probs.cumsum(dim=-1) > u[:, None]).int().argmax(dim=-1)


@pick.mutant(
    "where rounding leaves the whole sum below u, the result is a token that does not exist",
    "counting the sums up to u can give vocab itself. Take the last token then, for example by clamp(max=...).",
)
def beyond_the_end(probs, u):
    return (probs.cumsum(dim=-1) <= u[:, None]).sum(dim=-1)


@pick.mutant(
    "each probability was compared with u on its own, not their running sum",
    "the tokens share the line from 0 to 1: each begins where the one before it ends. cumsum gives the ends.",
)
def without_sum(probs, u):
    return (probs > u[:, None]).int().argmax(dim=-1)


@pick.mutant(
    "all tokens are equally likely: u times the number of tokens",
    "the pieces of the line from 0 to 1 are as long as the probabilities, not all alike.",
)
def uniform(probs, u):
    return (u * probs.shape[-1]).long().clamp(max=probs.shape[-1] - 1)


@pick.mutant(
    "the token nearest to u is taken, not the one whose piece of the line holds u",
    "the running sum is where a token ends: u belongs to the first token whose end is above u.",
)
def nearest(probs, u):
    return (probs.cumsum(dim=-1) - u[:, None]).abs().argmin(dim=-1)


@pick.mutant(
    "the result is one token too far",
    "u belongs to the first token whose running sum is above u, not to the one behind it.",
)
def one_too_far(probs, u):
    return (pick_reference(probs, u) + 1).clamp(max=probs.shape[-1] - 1)


@pick.mutant(
    "the result is one token too early",
    "u belongs to the first token whose running sum is above u, not to the last whose sum is below.",
)
def one_too_early(probs, u):
    return (pick_reference(probs, u) - 1).clamp(min=0)


@pick.mutant(
    "the tokens were counted in sorted order, and their place in it was returned",
    "a place after sorting is not a token. Sorting is not needed here; who sorts must gather the token at that place.",
)
def place_in_sorted_order(probs, u):
    return pick_reference(probs.sort(dim=-1, descending=True).values, u)


@pick.mutant(
    "the line was walked from the last token to the first",
    "a fair draw, but another one. The exercise counts from token 0 on, so that the results can be compared.",
)
def from_the_end(probs, u):
    return probs.shape[-1] - 1 - pick_reference(probs.flip(-1), u)


@pick.mutant(
    "all rows use the first row's u",
    "the texts of a batch would be drawn in step. Each row has its own number: u[:, None].",
)
def one_u(probs, u):
    return pick_reference(probs, u[:1].expand(len(u)))


@pick.mutant(
    "the running sum goes down the batch",
    "the probabilities of one text are a row: dim=-1.",
)
def down_the_batch(probs, u):
    above = probs.cumsum(dim=0) > u[:, None]
    above[:, -1] = True
    return above.int().argmax(dim=-1)


@pick.mutant(
    "the result has kept an axis: [batch, 1]",
    "wanted is one token for each row, [batch].",
)
def axis_kept(probs, u):
    return pick_reference(probs, u)[:, None]


@pick.mutant(
    "the probability of the drawn token is returned",
    "wanted is the token itself, a whole number.",
)
def probability(probs, u):
    return probs.gather(-1, pick_reference(probs, u)[:, None])[:, 0]


@pick.mutant(
    "u is not used: the function draws by itself",
    "a draw that takes its chance from outside can be repeated and tested.",
)
def own_chance(probs, u):
    return torch.multinomial(probs, 1, generator=torch.Generator().manual_seed(7))[:, 0]


@pick.mutant(
    "argmax was given True and False",
    "PyTorch's argmax takes numbers only: .int() first. Of several ones it finds the first.",
)
def argmax_of_bool(probs, u):
    return (probs.cumsum(dim=-1) > u[:, None]).argmax(dim=-1)


@pick.mutant(
    "the sums above u were counted, not those up to u",
    "the tokens that lie wholly before u are the ones to be passed over: their number is the token.",
)
def counted_above(probs, u):
    return (probs.cumsum(dim=-1) > u[:, None]).sum(dim=-1).clamp(max=probs.shape[-1] - 1)


@pick.mutant(
    "u has no axis of vocab",
    "u is [batch] and the sums are [batch, vocab]: u[:, None] compares each row with its own number.",
)
def u_without_axis(probs, u):
    above = probs.cumsum(dim=-1) > u
    above[:, -1] = True
    return above.int().argmax(dim=-1)


# 4. draw_text --------------------------------------------------------------------------------------------------------


def draw_text_reference(model, ids, draws, temperature, stop):
    """ids: [1, seq]; draws: [n], one uniform number for each token. Returns (longer ids, positions fed)."""
    return writing(model, ids, draws, temperature, stop)


def writing(
    model,
    ids,
    draws,
    temperature,
    stop,
    *,
    probs_of=lambda logits, temperature: (logits / temperature).softmax(dim=-1),
    greedy_at_0=True,
    keep_stop=True,
    position=-1,
    past_on=True,
    feed_all=False,
    same_draw=False,
    stop_in_prompt=False,
    feed_stop=False,
    stop_anywhere=False,
):
    """The reference, and with one option changed each of the mistakes."""
    past, new, fed = None, ids, 0
    for i in range(len(draws)):
        if stop_in_prompt and (ids == stop).any():
            break
        output = model(new, past_key_values=past, use_cache=True)
        past, fed = output.past_key_values if past_on else None, fed + new.shape[1]
        logits = output.logits[:, position]
        if temperature == 0 and greedy_at_0:
            token = logits.argmax(dim=-1)
        else:
            token = pick_reference(probs_of(logits, temperature), draws[:1] if same_draw else draws[i : i + 1])
        if token.item() == stop and not keep_stop:
            break
        new = token[:, None]
        ids = torch.cat([ids, new], dim=1)
        if feed_all:
            new = ids
        if token.item() == stop or (stop_anywhere and (ids == stop).any()):
            fed += feed_stop
            break
    return ids, fed


def uniform_numbers(n: int, seed: int) -> torch.Tensor:
    return torch.rand(n, generator=torch.Generator().manual_seed(seed))


def third_new(prompt: list[int], draws: torch.Tensor, temperature: float) -> int:
    """A token to stop at that ends the text early."""
    ids = torch.tensor([prompt])
    return int(draw_text_reference(TINY, ids, draws, temperature, -1)[0][0, len(prompt) + 2])


def write_case(label: str, prompt: list[int], n: int, temperature: float, seed: int, stop: int | None = None):
    """stop: given, or the third new token."""
    draws = uniform_numbers(n, seed)
    stop = third_new(prompt, draws, temperature) if stop is None else stop
    return case(label, TINY, torch.tensor([prompt]), draws, temperature, stop)


draw_text = Exercise(
    name="15_generation.draw_text",
    title="Write: draw a token, append it, feed only that, end at the stop token",
    signature="draw_text(model, ids, draws, temperature, stop)",
    reference=draw_text_reference,
    returns=("ids", "fed"),
    provides={"pick": pick_reference},
    cases=[
        write_case("a prompt of two tokens, three draws, no stop token comes", [5, 7], 3, 1.0, seed=1530, stop=31),
        write_case("the stop token is the third of six", [5, 7], 6, 1.0, seed=1531),
        write_case("the stop token stands in the prompt", [4, 9, 4], 4, 1.0, seed=1532, stop=9),
        write_case("temperature 0: greedy", [7, 1, 30, 4], 5, 0.0, seed=1533, stop=31),
        write_case("temperature 0.5", [3, 1, 4, 1, 5], 5, 0.5, seed=1534, stop=31),
        write_case("temperature 2, the stop token is the third of eight", [11, 2, 29, 17, 3, 23], 8, 2.0, seed=1535),
        write_case("a prompt of nine tokens, ten draws", [11, 2, 29, 17, 3, 23, 5, 31, 13], 10, 1.0, seed=1536, stop=0),
    ],
)


@draw_text.mutant(
    "the stop token does not end the text",
    "the model would write on until the draws are used up. Leave the loop when it comes.",
)
def never_stops(model, ids, draws, temperature, stop):
    return writing(model, ids, draws, temperature, -1)


@draw_text.mutant(
    "the stop token is missing at the end",
    "it belongs to the text, as in core's generate: append it, then leave the loop.",
    "some programs cut it off, since a reader need not see it.",
)
def stop_cut_off(model, ids, draws, temperature, stop):
    return writing(model, ids, draws, temperature, stop, keep_stop=False)


@draw_text.mutant(
    "a stop token in the prompt ends the text",
    "only a new token may end it: every chat prompt holds ends of earlier turns.",
)
def stopped_by_the_prompt(model, ids, draws, temperature, stop):
    return writing(model, ids, draws, temperature, stop, stop_in_prompt=True)


@draw_text.mutant(
    "the whole text is searched for the stop token, the prompt too",
    "a stop token in the prompt then ends the text after one new token. Compare only the newest token with stop.",
)
def searched_everywhere(model, ids, draws, temperature, stop):
    return writing(model, ids, draws, temperature, stop, stop_anywhere=True)


@draw_text.mutant(
    "the stop token is fed as well",
    "nobody needs what follows it. Leave the loop before the next pass, and count only what was fed.",
)
def stop_fed(model, ids, draws, temperature, stop):
    return writing(model, ids, draws, temperature, stop, feed_stop=True)


@draw_text.mutant(
    "temperature 0 divides by zero",
    "the logits become infinite and the softmax NaN. Temperature 0 means greedy: take the argmax.",
)
def divided_by_zero(model, ids, draws, temperature, stop):
    return writing(model, ids, draws, temperature, stop, greedy_at_0=False)


@draw_text.mutant(
    "the logits are multiplied by the temperature",
    "then a high temperature makes the text tamer, and 0 makes all tokens equal. Divide.",
)
def multiplied(model, ids, draws, temperature, stop):
    return writing(model, ids, draws, temperature, stop, probs_of=lambda x, t: (x * t).softmax(dim=-1))


@draw_text.mutant(
    "the temperature is not used",
    "divide the logits by it before the softmax.",
)
def temperature_forgotten(model, ids, draws, temperature, stop):
    return writing(model, ids, draws, temperature, stop, probs_of=lambda x, t: x.softmax(dim=-1))


@draw_text.mutant(
    "the probabilities are divided by the temperature, not the logits",
    "they then add up to 1 / temperature, and the draw no longer follows them.",
)
def probabilities_divided(model, ids, draws, temperature, stop):
    return writing(model, ids, draws, temperature, stop, probs_of=lambda x, t: x.softmax(dim=-1) / t)


@draw_text.mutant(
    "every token is greedy",
    "only temperature 0 takes the argmax; else the next number of draws decides.",
)
def always_greedy(model, ids, draws, temperature, stop):
    return writing(model, ids, draws, 0, stop)


@draw_text.mutant(
    "every token is drawn with the first number",
    "the draws must be independent: the i-th token takes draws[i].",
)
def one_number(model, ids, draws, temperature, stop):
    return writing(model, ids, draws, temperature, stop, same_draw=True)


@draw_text.mutant(
    "the cache is never handed back: past stays None",
    "each pass then sees one token and nothing before it. Set past = output.past_key_values.",
)
def past_lost(model, ids, draws, temperature, stop):
    return writing(model, ids, draws, temperature, stop, past_on=False)


@draw_text.mutant(
    "the whole text is fed in each pass, although the past holds it already",
    "the old tokens then stand in the cache twice, at positions they never had. Behind a past, feed only the new one.",
)
def all_again(model, ids, draws, temperature, stop):
    return writing(model, ids, draws, temperature, stop, feed_all=True)


@draw_text.mutant(
    "there is no cache: the whole text goes through the model for each token",
    "the tokens are right, but the work grows with the square of the length. Keep the past, feed one token.",
)
def without_cache(model, ids, draws, temperature, stop):
    return writing(model, ids, draws, temperature, stop, past_on=False, feed_all=True)


@draw_text.mutant(
    "the first position's logits are read",
    "they say what follows the first token of the prompt. What follows the text stands in logits[:, -1].",
)
def first_position(model, ids, draws, temperature, stop):
    return writing(model, ids, draws, temperature, stop, position=0)


@draw_text.mutant(
    "the prompt is missing in the result",
    "return prompt and new tokens together, as core's generate does.",
)
def new_only(model, ids, draws, temperature, stop):
    longer, fed = draw_text_reference(model, ids, draws, temperature, stop)
    return longer[:, ids.shape[1] :], fed


@draw_text.mutant(
    "fed counts passes, not positions",
    "the pass over the prompt takes all its positions through the model at once: add new.shape[1].",
)
def passes_counted(model, ids, draws, temperature, stop):
    longer, fed = draw_text_reference(model, ids, draws, temperature, stop)
    return longer, fed - ids.shape[1] + 1


@draw_text.mutant(
    "fed counts the whole text",
    "the last token is never fed: nobody needs what follows it.",
)
def last_counted(model, ids, draws, temperature, stop):
    longer, _ = draw_text_reference(model, ids, draws, temperature, stop)
    return longer, longer.shape[1]


@draw_text.mutant(
    "the last new token is fed as well, when the draws are used up",
    "nobody needs what follows it: n tokens take the prompt and n - 1 tokens through the model.",
)
def last_fed(model, ids, draws, temperature, stop):
    longer, fed = draw_text_reference(model, ids, draws, temperature, stop)
    return longer, fed + (longer[0, -1].item() != stop)


@draw_text.mutant(
    "pick was given one number without an axis",
    "draws[i] is a tensor without axes, and pick wants one number for each row, [batch]: draws[i : i + 1].",
)
def number_without_axis(model, ids, draws, temperature, stop):
    logits = model(ids).logits[:, -1]
    if temperature == 0:
        return draw_text_reference(model, ids, draws, temperature, stop)
    return pick_reference((logits / temperature).softmax(dim=-1), draws[0]), 0


@draw_text.mutant(
    "the new token was put behind ids without its axis of seq",
    "the token is [batch], ids is [batch, seq]: token[:, None] is one more column.",
)
def token_without_axis(model, ids, draws, temperature, stop):
    return torch.cat([ids, model(ids).logits[:, -1].argmax(dim=-1)], dim=1), 0


# 5. whole ------------------------------------------------------------------------------------------------------------


def whole_reference(data):
    """How many bytes from the beginning can be shown: all but a character at the end that still lacks bytes."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    decoder.decode(data)
    return len(data) - len(decoder.getstate()[0])


whole = Exercise(
    name="15_generation.whole",
    title="Streaming: how many bytes are whole characters",
    signature="whole(data)",
    reference=whole_reference,
    cases=[
        case("two letters", b"ab"),
        case("a letter and one byte of a Chinese character", b"a" + "漢".encode()[:1]),
        case("a letter and two bytes of it", b"a" + "漢".encode()[:2]),
        case("a letter and the whole character", "a漢".encode()),
        case("three bytes of an emoji", "🙂".encode()[:3]),
        case("the whole emoji", "🙂".encode()),
        case("one byte of é", "é".encode()[:1]),
        case("é", "é".encode()),
        case("nothing", b""),
        case("a character and the first byte of the next", "漢字".encode()[:4]),
        case("a byte that only continues, with nothing before it", b"\x82"),
        case("a byte that no character has", b"ab\xff"),
        case("a letter where a character should have gone on", "漢".encode()[:1] + b"ab"),
        case("and that letter is the last byte", b"\xe4A"),
        case("two bytes of an emoji, and a letter in place of the third", b"\xf0\x9fA"),
        case("two first bytes, one behind the other", b"\xc2\xc2"),
        case("an emoji with a byte too many", "🙂".encode() + b"\x82"),
        case("a long text", ("The byte 漢 is not a character, 🙂. " * 3).encode()[:-4]),
        case("a long text that ends within a character", ("Zu viele Wörter, 漢字と🙂" * 2).encode()[:-2]),
    ],
)


def lead_length(byte: int) -> int:
    """Bytes of the character that begins with this byte; 1 for a byte that begins none."""
    return 4 if 0xF0 <= byte < 0xF5 else 3 if 0xE0 <= byte < 0xF0 else 2 if 0xC2 <= byte < 0xE0 else 1


@whole.mutant(
    "everything is shown at once, half characters too",
    "a half character appears as U+FFFD, the replacement sign, and its other bytes as more of them.",
)
def all_at_once(data):
    return len(data)


@whole.mutant(
    "characters are counted, not bytes",
    "the rest of the stream begins behind that many bytes: 漢 is one character of three bytes.",
)
def characters(data):
    return len(data.decode(errors="ignore"))


@whole.mutant(
    "only ASCII is shown, up to the first other byte",
    "a whole Chinese character must be shown too, and all that stands behind it.",
)
def ascii_only(data):
    return next((i for i, byte in enumerate(data) if byte > 127), len(data))


@whole.mutant(
    "a text that ends in a byte above 127 is held back to its last ASCII byte",
    "whole characters that stand before the unfinished one can be shown; in a Chinese text nothing else ever comes.",
)
def to_the_last_ascii(data):
    return max((i + 1 for i, byte in enumerate(data) if byte < 128), default=0)


@whole.mutant(
    "the last character is always held back, even if it is whole",
    "the stream would lag by one character, and its end would never be shown.",
)
def one_behind(data):
    text = data[: whole_reference(data)].decode(errors="replace")
    return len(text[:-1].encode()) if text else 0


@whole.mutant(
    "every character is taken for three bytes long",
    "é has two bytes, 🙂 has four. The first byte says how many: 0xC2 and above two, 0xE0 three, 0xF0 four.",
)
def always_three(data):
    for back in range(1, min(3, len(data)) + 1):
        if data[-back] >= 0xC2:
            return len(data) if back >= 3 else len(data) - back
    return len(data)


@whole.mutant(
    "four bytes are taken for three: an emoji counts as whole too early",
    "a first byte of 0xF0 or above says four.",
)
def no_four(data):
    for back in range(1, min(3, len(data)) + 1):
        if data[-back] >= 0xC2:
            return len(data) if min(lead_length(data[-back]), 3) <= back else len(data) - back
    return len(data)


@whole.mutant(
    "only a first byte at the very end is held back",
    "after 漢's second byte the character is still half: look back up to three bytes.",
)
def only_the_last_byte(data):
    return len(data) - (bool(data) and lead_length(data[-1]) > 1)


@whole.mutant(
    "a byte of 0x80 to 0xBF is taken for a first byte",
    "it only goes on with a character. Where none has begun, it is no character, and is not waited for.",
)
def going_on_taken_for_first(data):
    place = 0
    while place < len(data):
        length = 2 if 0x80 <= data[place] < 0xE0 else lead_length(data[place])
        if place + length > len(data):
            return place
        place += length
    return place


@whole.mutant(
    "the number of bytes held back is returned",
    "wanted is how many can be shown; the rest is len(data) minus that.",
)
def held_back(data):
    return len(data) - whole_reference(data)


@whole.mutant(
    "a byte that can't be part of any character is waited for, without end",
    "a model can write any byte. What can never become a character must not stop the stream: it is shown as U+FFFD.",
)
def waits_forever(data):
    for length in range(len(data), -1, -1):
        try:
            data[:length].decode()
            return length
        except UnicodeDecodeError:
            continue
    return 0


@whole.mutant(
    "nothing is shown unless all of it is whole characters",
    "one unfinished character at the end must not hold back the text before it.",
)
def all_or_nothing(data):
    return len(data) if whole_reference(data) == len(data) else 0


@whole.mutant(
    "bytes that are no character are left out of the count",
    "they stand in the data all the same: the rest of the stream would begin too early, with bytes already shown.",
)
def without_the_broken(data):
    return len(data.decode(errors="ignore").encode())


@whole.mutant(
    "the shown text was encoded again to count it, and each U+FFFD counts as three bytes",
    "it stands for one byte that is no character. Count the bytes of data, not of the text.",
)
def counted_after_replacing(data):
    return len(codecs.getincrementaldecoder("utf-8")(errors="replace").decode(data).encode())


@whole.mutant(
    "the bytes were decoded, and half a character stops that with an error",
    'half a character is no text yet, and .decode() refuses it. errors="ignore" or "replace" go on, and so does an '
    "incremental decoder of codecs, which keeps what is incomplete.",
)
def strict(data):
    return len(data.decode().encode())


EXERCISES = [top_p, penalize, pick, draw_text, whole]
