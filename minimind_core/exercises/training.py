"""Exercises of notebook 14: packing, the learning rate, AdamW, accumulation, one update in the right order."""

import math
from functools import partial
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from ..loss import IGNORED
from .framework import Exercise, case, draw

# 1. windows ----------------------------------------------------------------------------------------------------------


def windows_reference(stream, length):
    """The stream cut into windows, one after the other; the tail that fills none is left out. [windows, length]."""
    count = len(stream) // length
    return stream[: count * length].view(count, length)


def tokens(*values: int) -> torch.Tensor:
    return torch.tensor(values)


windows = Exercise(
    name="14_training.windows",
    title="Packing: one stream of tokens, cut into windows",
    signature="windows(stream, length)",
    reference=windows_reference,
    cases=[
        case("five tokens, windows of two", tokens(5, 6, 7, 8, 9), 2),
        case("six tokens, windows of three: no tail", tokens(4, 1, 3, 0, 2, 5), 3),
        case("eight tokens, windows of three", tokens(3, 1, 4, 1, 5, 9, 2, 6), 3),
        case("eleven tokens, windows of four", torch.arange(11) + 20, 4),
        case("twelve tokens, windows of two", torch.arange(12) * 7 % 13, 2),
    ],
)


@windows.mutant(
    "the tail is kept and padded",
    "packing is there to spend nothing on padding, and token 0 would be learned as if it were text.",
    "Samples without packed=True pads, and then the labels of the padding are -100.",
)
def tail_padded(stream, length):
    return F.pad(stream, (0, -len(stream) % length)).view(-1, length)


@windows.mutant(
    "the windows run across the text: neighbors in the stream land in different rows",
    "row 0 then holds every n-th token. First the window, then the place in it: (windows length).",
)
def strided(stream, length):
    return windows_reference(stream, length).reshape(length, -1).T.contiguous()


@windows.mutant(
    "the result is transposed",
    "each row should be one window of the text: [windows, length].",
)
def transposed(stream, length):
    return windows_reference(stream, length).T


@windows.mutant(
    "the windows overlap: a new one begins at every token",
    "each token would be trained on `length` times in one epoch.",
    "a small text is sometimes used in this way.",
)
def sliding(stream, length):
    if len(stream) < length:
        return stream.new_zeros(0, length)
    return stream.unfold(0, length, 1)


@windows.mutant(
    "each window begins with the last token of the one before",
    "then no prediction is lost at the cuts, but here each token stands in one window only.",
    "some trainers cut windows of length + 1, and shift outside the model.",
)
def overlap_of_one(stream, length):
    count = max((len(stream) - 1) // (length - 1), 0) if len(stream) >= length else 0
    starts = [i * (length - 1) for i in range(count)]
    return torch.stack([stream[i : i + length] for i in starts]) if starts else stream.new_zeros(0, length)


@windows.mutant(
    "a token is lost between two windows",
    "the window ends before index start + length, and the next one begins at just that index.",
)
def token_lost(stream, length):
    starts = range(0, len(stream) - length + 1, length + 1)
    return torch.stack([stream[i : i + length] for i in starts]) if len(starts) else stream.new_zeros(0, length)


@windows.mutant(
    "the tail is cut off at the beginning of the stream",
    "the first window begins with the first token; what is left over at the end is left out.",
)
def cut_at_the_front(stream, length):
    return stream[len(stream) % length :].view(-1, length)


@windows.mutant(
    "the last full window is missing",
    "from n tokens come n // length windows. A range that ends at n - length leaves out the window that begins there.",
)
def last_window_lost(stream, length):
    starts = range(0, len(stream) - length, length)
    return torch.stack([stream[i : i + length] for i in starts]) if len(starts) else stream.new_zeros(0, length)


@windows.mutant(
    "the tail is filled with the beginning of the text",
    "the last window would jump from the end of the text to its start.",
)
def wrapped(stream, length):
    return torch.cat([stream, stream.repeat(length)[: -len(stream) % length]]).view(-1, length)


@windows.mutant(
    "the tail is filled by moving the last window back",
    "then the tokens before the tail stand in two windows, and count twice.",
)
def moved_back(stream, length):
    rows = windows_reference(stream, length)
    if len(stream) % length and len(stream) > length:
        rows = torch.cat([rows, stream[None, -length:]])
    return rows


@windows.mutant(
    "the tail was not cut off, so the stream does not fit into rows",
    "rows must all be full, for view as for a stack of pieces. Take the first (n // length) * length tokens.",
)
def tail_left_in(stream, length):
    return stream.view(-1, length)


@windows.mutant(
    "the number of windows is a float",
    "len(stream) / length is a float, and no slice takes one. Whole windows are counted by //.",
)
def float_count(stream, length):
    count = len(stream) / length
    return stream[: count * length].view(count, length)


# 2. learning_rate ----------------------------------------------------------------------------------------------------


def learning_rate_reference(step, steps, base, warm_up):
    """Straight up for warm_up updates, then half a cosine from base to a tenth of it, where it stays. A float."""
    if step < warm_up:
        return base * (step + 1) / (warm_up + 1)
    return base * decayed((min(step, steps) - warm_up) / (steps - warm_up))


def decayed(done):
    """The share of the base when a share `done` of the decay lies behind."""
    return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


learning_rate = Exercise(
    name="14_training.learning_rate",
    title="The learning rate: warm-up, cosine, and a floor that it does not leave",
    signature="learning_rate(step, steps, base, warm_up)",
    reference=learning_rate_reference,
    cases=[
        case("the first update", 0, 100, 1.0, 0),
        case("half of the run", 50, 100, 1.0, 0),
        case("the planned end", 100, 100, 1.0, 0),
        case("a quarter of the run, another base", 25, 100, 0.002, 0),
        case("after the end", 150, 100, 1.0, 0),
        case("twice the run", 200, 100, 0.002, 0),
        case("the first update of a warm-up of 9", 0, 100, 1.0, 9),
        case("in the warm-up", 4, 100, 0.5, 9),
        case("the last update of the warm-up", 8, 100, 1.0, 9),
        case("the first update after it", 9, 100, 1.0, 9),
        case("half of the cosine, with warm-up", 60, 100, 1.0, 20),
        case("after the end, with warm-up", 130, 100, 1.0, 20),
    ],
)


def with_warm_up(step, steps, base, warm_up, share):
    """A mistake in the cosine alone: `share` takes the place of it."""
    if step < warm_up:
        return learning_rate_reference(step, steps, base, warm_up)
    return base * share((min(step, steps) - warm_up) / (steps - warm_up))


@learning_rate.mutant(
    "after the end the rate climbs again",
    "the cosine is a wave: at twice the run it is back at the base. Stop the clock: min(step, steps).",
    "MiniMind's own formula has no such line; its runs end at T.",
)
def no_clamp(step, steps, base, warm_up):
    if step < warm_up:
        return learning_rate_reference(step, steps, base, warm_up)
    return base * decayed((step - warm_up) / (steps - warm_up))


@learning_rate.mutant(
    "the updates after the warm-up are stopped at steps, not at steps - warm_up",
    "with a warm-up the cosine then runs past its end. Stop the clock first: min(step, steps) - warm_up.",
)
def clamped_too_late(step, steps, base, warm_up):
    if step < warm_up:
        return learning_rate_reference(step, steps, base, warm_up)
    return base * decayed(min(step - warm_up, steps) / (steps - warm_up))


@learning_rate.mutant(
    "the rate falls to 0, not to a tenth of the base",
    "the last updates would change nothing. A tenth is left: 0.1 + 0.45 (1 + cos).",
    "many recipes end at 0.",
)
def ends_at_zero(step, steps, base, warm_up):
    return with_warm_up(step, steps, base, warm_up, lambda done: 0.5 * (1 + math.cos(math.pi * done)))


@learning_rate.mutant(
    "a cosine to 0 is cut off at the floor",
    "max(...) makes the last fifth of the run flat, and all before it lower. Interpolate between base and floor.",
)
def cut_at_the_floor(step, steps, base, warm_up):
    return with_warm_up(step, steps, base, warm_up, lambda done: max(0.1, 0.5 * (1 + math.cos(math.pi * done))))


@learning_rate.mutant(
    "a quarter of a wave leads to the floor, not half of one",
    "cos from 0 to pi / 2 falls slowly at first and fastest at its end. Half a wave, from 0 to pi, is flat at both.",
)
def quarter_wave(step, steps, base, warm_up):
    return with_warm_up(step, steps, base, warm_up, lambda done: 0.1 + 0.9 * math.cos(math.pi / 2 * done))


@learning_rate.mutant(
    "the floor of 0.1 is not multiplied by the base",
    "with a base of 0.002 the rate would never be below 0.1. A tenth *of the base* is meant.",
)
def floor_not_scaled(step, steps, base, warm_up):
    if step < warm_up:
        return learning_rate_reference(step, steps, base, warm_up)
    done = (min(step, steps) - warm_up) / (steps - warm_up)
    return 0.1 + base * 0.45 * (1 + math.cos(math.pi * done))


@learning_rate.mutant(
    "the first update of the warm-up has rate 0",
    "it would change nothing. The first update takes one step of warm_up + 1, not none.",
    "nanoGPT did so once.",
)
def begins_at_zero(step, steps, base, warm_up):
    return base * step / warm_up if step < warm_up else learning_rate_reference(step, steps, base, warm_up)


@learning_rate.mutant(
    "the warm-up reaches the base one update early",
    "update number warm_up is the first at the base: (step + 1) / (warm_up + 1).",
    "(step + 1) / warm_up is as common.",
)
def one_early(step, steps, base, warm_up):
    return base * (step + 1) / warm_up if step < warm_up else learning_rate_reference(step, steps, base, warm_up)


@learning_rate.mutant(
    "the cosine begins at update 0, under the warm-up",
    "at the end of the warm-up the rate jumps down. The cosine's clock starts when the warm-up ends.",
    "MiniMind-like scripts that add a warm-up afterwards often do this.",
)
def cosine_from_zero(step, steps, base, warm_up):
    if step < warm_up:
        return learning_rate_reference(step, steps, base, warm_up)
    return base * decayed(min(step, steps) / steps)


@learning_rate.mutant(
    "the cosine is as long as the whole run, so it ends too late",
    "it begins after the warm-up and ends at `steps`: its length is steps - warm_up.",
)
def ends_too_late(step, steps, base, warm_up):
    if step < warm_up:
        return learning_rate_reference(step, steps, base, warm_up)
    return base * decayed((min(step, steps) - warm_up) / steps)


@learning_rate.mutant(
    "the warm-up is missing",
    "the first updates run at the full base, decided by a few samples.",
    "MiniMind has none.",
)
def no_warm_up(step, steps, base, warm_up):
    return base * decayed(min(max(step - warm_up, 0), steps - warm_up) / (steps - warm_up))


@learning_rate.mutant(
    "updates are counted from 1",
    "here the first update is number 0, and trains at the full base.",
    "MiniMind counts its micro-batches from 1.",
)
def counted_from_one(step, steps, base, warm_up):
    return learning_rate_reference(step + 1, steps, base, warm_up)


@learning_rate.mutant(
    "a whole wave of the cosine, down and up again",
    "cos(2 pi t / T) is back at 1 at the end. Half a wave leads from the base to the floor: cos(pi t / T).",
)
def whole_wave(step, steps, base, warm_up):
    return with_warm_up(step, steps, base, warm_up, lambda done: decayed(2 * done))


@learning_rate.mutant(
    "a straight line takes the place of the cosine",
    "both lead from the base to the floor, but the cosine stays high longer, and near the floor longer.",
    "linear decay is common too.",
)
def straight(step, steps, base, warm_up):
    return with_warm_up(step, steps, base, warm_up, lambda done: 1 - 0.9 * done)


@learning_rate.mutant(
    "the cosine is taken of degrees",
    "math.cos wants radians: half a wave is pi, not 180.",
)
def degrees(step, steps, base, warm_up):
    return with_warm_up(step, steps, base, warm_up, lambda done: 0.1 + 0.45 * (1 + math.cos(180 * done)))


@learning_rate.mutant(
    "after the end the rate is 0",
    "it stays at a tenth of the base.",
)
def zero_after_the_end(step, steps, base, warm_up):
    return 0.0 if step > steps else learning_rate_reference(step, steps, base, warm_up)


@learning_rate.mutant(
    "the share of the run is a whole number: // where / belongs",
    "// cuts off what stands behind the point, so the rate stays at the base until the end, and jumps then.",
)
def whole_share(step, steps, base, warm_up):
    if step < warm_up:
        return learning_rate_reference(step, steps, base, warm_up)
    return base * decayed((min(step, steps) - warm_up) // (steps - warm_up))


@learning_rate.mutant(
    "the share of the warm-up is a whole number: // where / belongs",
    "// cuts off what stands behind the point, so the rate is 0 until the warm-up ends.",
)
def whole_warm_up(step, steps, base, warm_up):
    if step < warm_up:
        return base * ((step + 1) // (warm_up + 1))
    return learning_rate_reference(step, steps, base, warm_up)


@learning_rate.mutant(
    "the warm-up is not multiplied by the base",
    "it leads from near 0 to the base, not to 1. At its end the rate would jump.",
)
def warm_up_to_one(step, steps, base, warm_up):
    return learning_rate_reference(step, steps, 1.0 if step < warm_up else base, warm_up)


@learning_rate.mutant(
    "pi is missing in the cosine",
    "cos has half a wave from 0 to pi. From 0 to 1 it comes down to 0.54 only, and the rate stays far above the floor.",
)
def without_pi(step, steps, base, warm_up):
    return with_warm_up(step, steps, base, warm_up, lambda done: decayed(done / math.pi))


# 3. adamw ------------------------------------------------------------------------------------------------------------

BETA_1, BETA_2, EPS = 0.9, 0.95, 1e-8


def moments(grad, mean, square, beta_1=BETA_1, beta_2=BETA_2):
    return beta_1 * mean + (1 - beta_1) * grad, beta_2 * square + (1 - beta_2) * grad**2


def direction(mean, square, step, beta_1=BETA_1, beta_2=BETA_2):
    return mean / (1 - beta_1**step) / ((square / (1 - beta_2**step)).sqrt() + EPS)


def adamw_reference(weight, grad, mean, square, step, rate, decay):
    """One step of AdamW, counted from 1, with betas 0.9 and 0.95 and eps 1e-8. Returns weight, mean, square."""
    return stepped(weight, grad, mean, square, step, rate, decay)


def stepped(weight, grad, mean, square, step, rate, decay, move=direction, beta_1=BETA_1, beta_2=BETA_2):
    """The reference, and with another `move` or another beta in the running means many of the mistakes."""
    mean, square = moments(grad, mean, square, beta_1, beta_2)
    return weight - rate * decay * weight - rate * move(mean, square, step), mean, square


def row(*values: float) -> torch.Tensor:
    return torch.tensor(values)


ZERO = row(0.0, 0.0)
adamw = Exercise(
    name="14_training.adamw",
    title="AdamW: two running means, their correction, and a decay of its own",
    signature="adamw(weight, grad, mean, square, step, rate, decay)",
    reference=adamw_reference,
    returns=("weight", "mean", "square"),
    cases=[
        case("the first step, no decay", row(1.0, -1.0), row(0.5, 2.0), ZERO, ZERO, 1, 0.1, 0.0),
        case("the second step", row(0.9, -1.1), row(-0.5, 1.0), row(0.05, 0.2), row(0.0125, 0.2), 2, 0.1, 0.0),
        case("the first step, with decay", row(1.0, -2.0), row(0.5, 2.0), ZERO, ZERO, 1, 0.1, 0.5),
        case("a large rate and a large decay", row(2.0, -3.0), row(1.0, 1.0), ZERO, ZERO, 1, 0.5, 0.8),
        case("tiny gradients", row(1.0, 1.0), row(1e-8, -3e-8), ZERO, ZERO, 1, 0.1, 0.1),
        case("gradient 0: only momentum and decay", row(1.0, 2.0), ZERO, row(0.3, -0.2), row(0.5, 0.1), 7, 0.2, 0.3),
        case(
            "a matrix at step 20",
            draw(3, 4, seed=1400),
            draw(3, 4, seed=1401),
            draw(3, 4, seed=1402, scale=0.3),
            draw(3, 4, seed=1403).square(),
            20,
            0.05,
            0.1,
        ),
    ],
)


@adamw.mutant(
    "the means are not corrected for their start at 0",
    "after the first step they hold a tenth and a twentieth of the gradient, so the step has the wrong length. Divide "
    "each by 1 - beta**step.",
)
def uncorrected(*given):
    return stepped(*given, move=lambda mean, square, step: mean / (square.sqrt() + EPS))


@adamw.mutant(
    "the decay is added to the gradient",
    "it is then divided by the root of the squares as the gradient is, and hardly depends on the weight any more. "
    "AdamW shrinks the weight beside the step.",
    "plain Adam with weight_decay does so.",
)
def decay_in_gradient(weight, grad, mean, square, step, rate, decay):
    return adamw_reference(weight, grad + decay * weight, mean, square, step, rate, 0.0)


@adamw.mutant(
    "the decay is not multiplied by the rate",
    "a decay of 0.1 would take a tenth of every weight in every step, whatever the schedule says.",
    "the paper's algorithm 2 does so, with a schedule of its own; PyTorch multiplies.",
)
def decay_without_rate(weight, grad, mean, square, step, rate, decay):
    mean, square = moments(grad, mean, square)
    return weight - decay * weight - rate * direction(mean, square, step), mean, square


@adamw.mutant(
    "there is no decay",
    "the W of AdamW is the decay: rate * decay * weight is taken off.",
)
def no_decay(weight, grad, mean, square, step, rate, decay):
    return adamw_reference(weight, grad, mean, square, step, rate, 0.0)


@adamw.mutant(
    "the decay is taken of the weight after the step",
    "both are taken off the old weight.",
)
def decay_afterwards(weight, grad, mean, square, step, rate, decay):
    mean, square = moments(grad, mean, square)
    return (weight - rate * direction(mean, square, step)) * (1 - rate * decay), mean, square


@adamw.mutant(
    "eps stands inside the root",
    "its root is 1e-4: gradients below that would hardly move their weight.",
)
def eps_inside(*given):
    return stepped(
        *given, move=lambda mean, square, step: mean / (1 - BETA_1**step) / (square / (1 - BETA_2**step) + EPS).sqrt()
    )


@adamw.mutant(
    "the root is missing",
    "divided by the mean square, a small gradient makes a huge step.",
)
def no_root(*given):
    return stepped(
        *given, move=lambda mean, square, step: mean / (1 - BETA_1**step) / (square / (1 - BETA_2**step) + EPS)
    )


@adamw.mutant(
    "the root is corrected, not the square under it",
    "divide the square by 1 - 0.95**step first, then take the root.",
)
def root_then_correction(*given):
    return stepped(
        *given, move=lambda mean, square, step: mean / (1 - BETA_1**step) / (square.sqrt() / (1 - BETA_2**step) + EPS)
    )


@adamw.mutant(
    "the two betas are exchanged",
    "0.9 belongs to the mean of the gradient, 0.95 to that of its square.",
)
def betas_exchanged(*given):
    return stepped(*given, partial(direction, beta_1=BETA_2, beta_2=BETA_1), BETA_2, BETA_1)


@adamw.mutant(
    "the new gradient gets 0.9, and the mean so far 0.1",
    "a running mean keeps most of what it was: 0.9 * mean + 0.1 * grad.",
)
def shares_exchanged(*given):
    return stepped(*given, beta_1=1 - BETA_1, beta_2=1 - BETA_2)


@adamw.mutant(
    "steps are counted from 0 in the correction",
    "at step 1 it must be 1 - beta, since the mean holds 1 - beta of the first gradient. `step` counts from 1 already.",
)
def counted_from_two(*given):
    return stepped(*given, move=lambda mean, square, step: direction(mean, square, step + 1))


@adamw.mutant(
    "the step goes uphill",
    "the gradient points to where the loss grows: take the step off.",
)
def uphill(*given):
    return stepped(*given, move=lambda mean, square, step: -direction(mean, square, step))


@adamw.mutant(
    "the corrected means are handed back",
    "the correction is for this step alone. Kept, it would be corrected again in the next one.",
)
def corrected_kept(weight, grad, mean, square, step, rate, decay):
    new, mean, square = adamw_reference(weight, grad, mean, square, step, rate, decay)
    return new, mean / (1 - BETA_1**step), square / (1 - BETA_2**step)


@adamw.mutant(
    "the square of the mean takes the place of the mean of the squares",
    "the second mean is of grad**2.",
)
def square_of_mean(weight, grad, mean, square, step, rate, decay):
    mean = BETA_1 * mean + (1 - BETA_1) * grad
    square = BETA_2 * square + (1 - BETA_2) * mean**2
    return weight - rate * decay * weight - rate * direction(mean, square, step), mean, square


@adamw.mutant(
    "beta 2 is 0.999",
    "the exercise takes 0.95, as many language models do: the squares are averaged over some 20 steps, not 1,000.",
    "0.999 is what PyTorch's AdamW takes if it is told nothing.",
)
def beta_of_pytorch(*given):
    return stepped(*given, partial(direction, beta_2=0.999), beta_2=0.999)


@adamw.mutant(
    "in the mean the new gradient gets 0.9, and the mean so far 0.1",
    "the square is right. The mean, too, keeps most of what it was: 0.9 * mean + 0.1 * grad.",
)
def mean_shares_exchanged(*given):
    return stepped(*given, beta_1=1 - BETA_1)


@adamw.mutant(
    "in the square the new one gets 0.95, and the square so far 0.05",
    "the mean is right. The square, too, keeps most of what it was: 0.95 * square + 0.05 * grad**2.",
)
def square_shares_exchanged(*given):
    return stepped(*given, beta_2=1 - BETA_2)


@adamw.mutant(
    "the square is not corrected for its start at 0",
    "after the first step it holds a twentieth of the gradient's square, so the step is too long. Divide it by "
    "1 - 0.95**step, as the mean by 1 - 0.9**step.",
)
def square_uncorrected(*given):
    return stepped(*given, move=lambda mean, square, step: mean / (1 - BETA_1**step) / (square.sqrt() + EPS))


@adamw.mutant(
    "the mean is not corrected for its start at 0",
    "after the first step it holds a tenth of the gradient, so the step is too short. Divide it by 1 - 0.9**step, as "
    "the square by 1 - 0.95**step.",
)
def mean_uncorrected(*given):
    return stepped(*given, move=lambda mean, square, step: mean / ((square / (1 - BETA_2**step)).sqrt() + EPS))


@adamw.mutant(
    "the old mean and square are handed back",
    "the next step goes on from the new ones; with the old ones there is no momentum.",
)
def old_moments(weight, grad, mean, square, step, rate, decay):
    return adamw_reference(weight, grad, mean, square, step, rate, decay)[0], mean, square


@adamw.mutant(
    "eps is missing",
    "where a gradient was always 0 the step is 0 / 0, NaN, and a tiny gradient moves as far as a large one.",
)
def no_eps(*given):
    return stepped(
        *given, move=lambda mean, square, step: mean / (1 - BETA_1**step) / (square / (1 - BETA_2**step)).sqrt()
    )


# a language model of one table: which token follows which ------------------------------------------------------------


class Table(nn.Module):
    """The smallest language model: logits of the next token are a row of `weight` [vocab, vocab]."""

    def __init__(self, weight: torch.Tensor, aux: float = 0.0):
        super().__init__()
        self.weight = nn.Parameter(weight.clone())
        self.aux = aux

    def forward(self, ids, labels):
        logits, targets = self.weight[ids[:, :-1]], labels[:, 1:]
        total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
        loss = total / (targets != IGNORED).sum().clamp(min=1)
        return SimpleNamespace(loss=loss, aux_loss=self.aux * self.weight.square().mean(), logits=logits)


def rows(*some) -> torch.Tensor:
    return torch.tensor(some)


def masked(ids: torch.Tensor, *learned: int) -> torch.Tensor:
    """Labels of which the first `learned[i]` of row i count."""
    places = torch.arange(ids.shape[1])
    return torch.where(places < torch.tensor(learned)[:, None], ids, IGNORED)


# 4. accumulate -------------------------------------------------------------------------------------------------------


def accumulate_reference(model, batches):
    """Add to .grad the gradient of the mean loss over all labels of all micro-batches. Returns that mean, a float."""
    counts = [predicted(labels) for _, labels in batches]
    loss = 0.0
    for (ids, labels), count in zip(batches, counts, strict=True):
        part = count / sum(counts) * model(ids, labels=labels).loss
        part.backward()
        loss += part.item()
    return loss


def predicted(labels) -> int:
    return int((labels[:, 1:] != IGNORED).sum())


def run_accumulate(candidate, weight, batches):
    """Hand it a fresh model; returns the loss and the gradient."""
    model = Table(weight)
    loss = candidate(model, [(ids.clone(), labels.clone()) for ids, labels in batches])
    if loss is None or loss is ...:
        return loss  # the report knows what that means
    grad = model.weight.grad
    return number(loss), torch.zeros_like(weight) if grad is None else grad


def number(value):
    """A float of what may be a tensor; anything else as it is, for the report to name."""
    return value.item() if torch.is_tensor(value) and value.numel() == 1 else value


FLAT, STEEP = torch.zeros(2, 2), torch.tensor([[1.0, -1.0], [0.5, 2.0]])
FIRST, SECOND = rows([0, 1, 1, 0, 1]), rows([1, 0, 1, 1, 1])
PAIR, LONG = rows([0, 1, 0], [1, 1, 0]), rows([0, 0, 1, 0, 1, 1])

accumulate = Exercise(
    name="14_training.accumulate",
    title="Many micro-batches, one gradient: each weighs as much as its labels",
    signature="accumulate(model, batches)",
    reference=accumulate_reference,
    call=run_accumulate,
    arguments=("weight of the model", "batches"),
    returns=("loss", "gradient"),
    cases=[
        case("one micro-batch", STEEP, [(FIRST, FIRST)]),
        case("two, with as many labels", STEEP, [(FIRST, FIRST), (SECOND, SECOND)]),
        case("two, with 4 and 1 labels", STEEP, [(FIRST, FIRST), (SECOND, masked(SECOND, 2))]),
        case("an even model; 1 and 4 labels", FLAT, [(SECOND, masked(SECOND, 2)), (FIRST, FIRST)]),
        case("one row, and two rows with 3 labels in all", STEEP, [(FIRST, FIRST), (PAIR, masked(PAIR, 3, 2))]),
        case("three, of which one is all padding", STEEP, [(FIRST, FIRST), (SECOND, masked(SECOND, 0)), (LONG, LONG)]),
        case(
            "three of 3, 5 and 2 labels, without the first label",
            draw(2, 2, seed=1410),
            [(PAIR, masked(PAIR, 3, 2)), (LONG, LONG), (SECOND, masked(SECOND.flip(1), 3))],
        ),
    ],
)


def added_up(model, batches, weights):
    """The weighted losses, each backward."""
    loss = 0.0
    for (ids, labels), weight in zip(batches, weights, strict=True):
        part = weight * model(ids, labels=labels).loss
        part.backward()
        loss += part.item()
    return loss


@accumulate.mutant(
    "every micro-batch weighs the same: a mean of means",
    "a label in a micro-batch with few labels then counts more than one in a full one.",
    "MiniMind divides by accumulation_steps, which is this.",
)
def mean_of_means(model, batches):
    return added_up(model, batches, [1 / len(batches)] * len(batches))


@accumulate.mutant(
    "the losses are added and never divided",
    "with n micro-batches the gradient is n times as long as it should be.",
)
def never_divided(model, batches):
    return added_up(model, batches, [1.0] * len(batches))


@accumulate.mutant(
    "masked labels count in the weights",
    "a micro-batch of padding would weigh as much as one of text. Count the labels that are not -100.",
)
def counts_all(model, batches):
    sizes = [labels[:, 1:].numel() for _, labels in batches]
    return added_up(model, batches, [size / sum(sizes) for size in sizes])


@accumulate.mutant(
    "the labels are shifted twice",
    "you shift, and the model's loss shifts again: each position is asked for the token after the next.",
)
def shifted_twice(model, batches):
    return accumulate_reference(model, [(ids[:, :-1], labels[:, 1:]) for ids, labels in batches])


@accumulate.mutant(
    "the first label of each row is counted",
    "nothing predicts it: the loss is of labels[:, 1:].",
)
def counts_the_first(model, batches):
    sizes = [int((labels != IGNORED).sum()) for _, labels in batches]
    return added_up(model, batches, [size / sum(sizes) for size in sizes])


@accumulate.mutant(
    "each micro-batch weighs as much as its rows",
    "rows hold different numbers of labels. It is the labels that the mean is over.",
)
def counts_rows(model, batches):
    sizes = [len(labels) for _, labels in batches]
    return added_up(model, batches, [size / sum(sizes) for size in sizes])


@accumulate.mutant(
    "only the last micro-batch leaves a gradient",
    "gradients add up by themselves: call backward for each micro-batch, and don't clear in between.",
)
def only_the_last(model, batches):
    counts = [predicted(labels) for _, labels in batches]
    loss = 0.0
    for (ids, labels), count in zip(batches, counts, strict=True):
        model.zero_grad()
        part = count / sum(counts) * model(ids, labels=labels).loss
        part.backward()
        loss += part.item()
    return loss


@accumulate.mutant(
    "backward never runs",
    "the loss alone leaves no gradient.",
)
def no_backward(model, batches):
    with torch.no_grad():
        counts = [predicted(labels) for _, labels in batches]
        parts = [count * model(ids, labels=labels).loss for (ids, labels), count in zip(batches, counts, strict=True)]
        return (sum(parts) / sum(counts)).item()


@accumulate.mutant(
    "the loss of the last micro-batch is returned",
    "the curve of losses then shows a few samples of each update, and jumps about.",
    "MiniMind logs the last micro-batch.",
)
def last_loss(model, batches):
    accumulate_reference(model, batches)
    with torch.no_grad():
        return model(batches[-1][0], labels=batches[-1][1]).loss.item()


@accumulate.mutant(
    "the returned loss is the mean of the micro-batches' means",
    "the gradient is right. The loss should be over the same labels: weigh it in the same way.",
)
def loss_is_mean_of_means(model, batches):
    accumulate_reference(model, batches)
    with torch.no_grad():
        return sum(model(ids, labels=labels).loss.item() for ids, labels in batches) / len(batches)


@accumulate.mutant(
    "the sum over the labels is not divided by their number",
    "the gradient then grows with the size of the batch. The mean over all labels is wanted.",
)
def sum_over_labels(model, batches):
    return added_up(model, batches, [predicted(labels) for _, labels in batches])


@accumulate.mutant(
    "the weights are upside down: few labels weigh more",
    "multiply each mean by its own number of labels, and divide by the number of all.",
)
def upside_down(model, batches):
    counts = [predicted(labels) for _, labels in batches]
    return added_up(model, batches, [sum(counts) / max(count, 1) / len(batches) ** 2 for count in counts])


@accumulate.mutant(
    "each micro-batch weighs as much as the numbers in its labels: labels.numel()",
    "that counts masked places, and the first of each row. Count those of labels[:, 1:] that are not -100.",
)
def counts_numel(model, batches):
    sizes = [labels.numel() for _, labels in batches]
    return added_up(model, batches, [size / sum(sizes) for size in sizes])


@accumulate.mutant(
    "the last label of each row is left out of the count, not the first",
    "nothing predicts the first one: the loss is of labels[:, 1:].",
)
def counts_without_the_last(model, batches):
    sizes = [int((labels[:, :-1] != IGNORED).sum()) for _, labels in batches]
    return added_up(model, batches, [size / sum(sizes) for size in sizes])


def weighs_only_the_loss(model, batches, share):
    """The right loss; backward of `share` of each micro-batch's mean."""
    counts = [predicted(labels) for _, labels in batches]
    loss = 0.0
    for (ids, labels), count in zip(batches, counts, strict=True):
        mean = model(ids, labels=labels).loss
        (share * mean).backward()
        loss += count / sum(counts) * mean.item()
    return loss


@accumulate.mutant(
    "the loss is weighed, but backward runs on the unweighed one",
    "the returned number is right and the gradient is not. Multiply by the share of the labels first, then backward.",
)
def gradient_unweighed(model, batches):
    return weighs_only_the_loss(model, batches, 1.0)


@accumulate.mutant(
    "the returned loss is weighed by labels, but the gradient is a mean of means",
    "both belong to the same mean: weigh first, then backward.",
)
def gradient_is_mean_of_means(model, batches):
    return weighs_only_the_loss(model, batches, 1 / len(batches))


@accumulate.mutant(
    "backward runs on the running total, so early micro-batches count again and again",
    "gradients add up by themselves. Call backward on each part alone, or once on the whole sum after the loop.",
)
def backward_of_the_total(model, batches):
    counts = [predicted(labels) for _, labels in batches]
    total = 0.0
    for (ids, labels), count in zip(batches, counts, strict=True):
        total = total + count / sum(counts) * model(ids, labels=labels).loss
        total.backward(retain_graph=True)
    return total.item()


@accumulate.mutant(
    "the number of labels so far takes the place of the number of all",
    "the first micro-batches then weigh too much. Count the labels of all before the first backward.",
)
def counts_so_far(model, batches):
    counts = [predicted(labels) for _, labels in batches]
    so_far = [max(sum(counts[: i + 1]), 1) for i in range(len(counts))]
    return added_up(model, batches, [count / total for count, total in zip(counts, so_far, strict=True)])


@accumulate.mutant(
    "backward was called on a number",
    ".item() gives a plain float, which knows no way back. Call backward on the tensor; .item() is for the returned "
    "loss.",
)
def backward_of_a_number(model, batches):
    total = accumulate_reference(model, batches)
    total.backward()
    return total


# 5. train_step -------------------------------------------------------------------------------------------------------


def train_step_reference(model, ids, labels, optimizer, scaler, clip):
    """Clear, forward, backward of the scaled loss, unscale, clip, step. Returns the loss without the auxiliary one."""
    optimizer.zero_grad()
    output = model(ids, labels=labels)
    scaler.scale(output.loss + output.aux_loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), clip)
    scaler.step(optimizer)
    scaler.update()
    return output.loss.item()


class TwoTables(Table):
    """Two Parameters, so that it matters whether the gradient is clipped as one vector."""

    def __init__(self, weight: torch.Tensor, aux: float = 0.0):
        super().__init__(weight, aux)
        self.bias = nn.Parameter(torch.zeros(len(weight)))

    def forward(self, ids, labels):
        output = super().forward(ids, labels)
        targets = labels[:, 1:]
        logits = output.logits + 8 * self.bias
        total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
        output.loss = total / (targets != IGNORED).sum().clamp(min=1)
        return output


def run_steps(candidate, weight, aux, scale, clip, updates):
    """So many updates by plain gradient descent, rate 0.1. Returns the losses, and all weights in one row."""
    model = TwoTables(weight, aux)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    device = torch.Generator().device  # checks run there, whatever the notebook uses
    scaler = torch.amp.GradScaler(device.type, init_scale=scale, enabled=scale > 1)
    batches = [(FIRST, FIRST), (SECOND, SECOND), (PAIR, PAIR)][:updates]
    losses = [number(candidate(model, ids.clone(), ids.clone(), optimizer, scaler, clip)) for ids, _ in batches]
    if losses[0] is None or losses[0] is ...:
        return losses[0]
    wrong = [loss for loss in losses if not isinstance(loss, float)]
    loss = wrong[0] if wrong else torch.tensor(losses) if updates > 1 else losses[0]
    return loss, torch.cat([p.detach().flatten() for p in model.parameters()])


SCALE, HUGE = 65536.0, 2.0**127

train_step = Exercise(
    name="14_training.train_step",
    title="One update: clear, forward, backward, unscale, clip, step",
    signature="train_step(model, ids, labels, optimizer, scaler, clip)",
    reference=train_step_reference,
    call=run_steps,
    arguments=("weight of the model", "coefficient of its auxiliary loss", "scale of the loss", "clip", "updates"),
    returns=("loss", "weights"),
    cases=[
        case("one update", STEEP, 0.0, 1.0, 100.0, 1),
        case("one update, the gradient is clipped", STEEP, 0.0, 1.0, 0.1, 1),
        case("one update, the loss is scaled", STEEP, 0.0, SCALE, 100.0, 1),
        case("scaled, and the gradient is clipped", STEEP, 0.0, SCALE, 0.1, 1),
        case("an auxiliary loss", STEEP, 0.5, 1.0, 100.0, 1),
        case("two updates", STEEP, 0.0, 1.0, 100.0, 2),
        case("three updates with everything", draw(2, 2, seed=1420), 0.2, SCALE, 0.3, 3),
        case("the scale is too large: the gradient overflows", STEEP, 0.0, HUGE, 1.0, 1),
    ],
)


def steps_of(model, ids, labels, scaler):
    """Forward and backward of the scaled loss; returns the output."""
    output = model(ids, labels=labels)
    scaler.scale(output.loss + output.aux_loss).backward()
    return output


def finish(model, optimizer, scaler, clip, shorten=nn.utils.clip_grad_norm_):
    """Unscale, clip by `shorten`(parameters, clip), step, update."""
    scaler.unscale_(optimizer)
    shorten(list(model.parameters()), clip)
    scaler.step(optimizer)
    scaler.update()


@train_step.mutant(
    "the gradient is clipped before it is unscaled, or scaler.unscale_ is missing and scaler.step does it, too late",
    "65,536 times too long, it is cut to `clip`, then divided by 65,536: the update is nearly nothing, and training "
    "only looks slow.",
)
def clipped_before_unscale(model, ids, labels, optimizer, scaler, clip):
    optimizer.zero_grad()
    output = steps_of(model, ids, labels, scaler)
    nn.utils.clip_grad_norm_(model.parameters(), clip)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return output.loss.item()


@train_step.mutant(
    "old gradients are never cleared",
    "each update then also repeats all updates before it.",
)
def never_cleared(model, ids, labels, optimizer, scaler, clip):
    output = steps_of(model, ids, labels, scaler)
    finish(model, optimizer, scaler, clip)
    return output.loss.item()


@train_step.mutant(
    "no weight is changed",
    "either the optimizer never steps, or the gradient is cleared between backward and step: clear before backward.",
)
def cleared_too_late(model, ids, labels, optimizer, scaler, clip):
    output = steps_of(model, ids, labels, scaler)
    for parameter in model.parameters():
        parameter.grad.zero_()
    finish(model, optimizer, scaler, clip)
    return output.loss.item()


@train_step.mutant(
    "the gradient is not clipped",
    "one strange batch can throw the weights far away.",
)
def not_clipped(model, ids, labels, optimizer, scaler, clip):
    optimizer.zero_grad()
    output = steps_of(model, ids, labels, scaler)
    finish(model, optimizer, scaler, math.inf)
    return output.loss.item()


@train_step.mutant(
    "the gradient is cut to length 1, whatever `clip` says",
    "the limit is a setting of the run: use the argument.",
)
def clipped_to_one(model, ids, labels, optimizer, scaler, clip):
    optimizer.zero_grad()
    output = steps_of(model, ids, labels, scaler)
    finish(model, optimizer, scaler, 1.0)
    return output.loss.item()


@train_step.mutant(
    "each number of the gradient is clipped, not its length",
    "clip_grad_value_ turns the gradient into another direction. clip_grad_norm_ shortens it.",
)
def clipped_by_value(model, ids, labels, optimizer, scaler, clip):
    optimizer.zero_grad()
    output = steps_of(model, ids, labels, scaler)
    finish(model, optimizer, scaler, clip, nn.utils.clip_grad_value_)
    return output.loss.item()


@train_step.mutant(
    "each Parameter is clipped on its own",
    "the limit is for all of them as one vector: pass model.parameters() at once.",
)
def clipped_one_by_one(model, ids, labels, optimizer, scaler, clip):
    optimizer.zero_grad()

    def one_by_one(parameters, clip):
        for parameter in parameters:
            nn.utils.clip_grad_norm_([parameter], clip)

    output = steps_of(model, ids, labels, scaler)
    finish(model, optimizer, scaler, clip, one_by_one)
    return output.loss.item()


@train_step.mutant(
    "the loss is not scaled, but the gradient is unscaled",
    "the update is then 65,536 times too small: scaler.scale(loss).backward().",
)
def not_scaled(model, ids, labels, optimizer, scaler, clip):
    optimizer.zero_grad()
    output = model(ids, labels=labels)
    scaler.scale(output.loss)  # lets the scaler begin, its result is not used
    (output.loss + output.aux_loss).backward()
    finish(model, optimizer, scaler, clip)
    return output.loss.item()


@train_step.mutant(
    "aux_loss is not scaled, but unscaled",
    "its gradient is then 65,536 times too small: scale the sum of both losses.",
)
def aux_not_scaled(model, ids, labels, optimizer, scaler, clip):
    optimizer.zero_grad()
    output = model(ids, labels=labels)
    (scaler.scale(output.loss) + output.aux_loss).backward()
    finish(model, optimizer, scaler, clip)
    return output.loss.item()


@train_step.mutant(
    "a short gradient is made longer",
    "clipping only shortens: one that is below `clip` stays as it is.",
)
def always_of_length_clip(model, ids, labels, optimizer, scaler, clip):
    optimizer.zero_grad()

    def to_length(parameters, clip):
        length = nn.utils.get_total_norm([parameter.grad for parameter in parameters])
        for parameter in parameters:
            parameter.grad *= clip / length

    output = steps_of(model, ids, labels, scaler)
    finish(model, optimizer, scaler, clip, to_length)
    return output.loss.item()


@train_step.mutant(
    "the gradient is never unscaled",
    "optimizer.step() knows no scaler: the update is 65,536 times too large. Use scaler.unscale_ and scaler.step.",
)
def never_unscaled(model, ids, labels, optimizer, scaler, clip):
    optimizer.zero_grad()
    output = steps_of(model, ids, labels, scaler)
    optimizer.step()
    return output.loss.item()


@train_step.mutant(
    "optimizer.step() takes the place of scaler.step(optimizer)",
    "where float16 overflows, the gradient is infinite, and one such update turns all weights into NaN. scaler.step "
    "leaves it out.",
)
def overflow_not_skipped(model, ids, labels, optimizer, scaler, clip):
    optimizer.zero_grad()
    output = steps_of(model, ids, labels, scaler)
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    scaler.update()
    return output.loss.item()


@train_step.mutant(
    "the auxiliary loss is left out",
    "the model's loss does not hold it, so nothing spreads the tokens over the experts.",
)
def without_aux(model, ids, labels, optimizer, scaler, clip):
    optimizer.zero_grad()
    output = model(ids, labels=labels)
    scaler.scale(output.loss).backward()
    finish(model, optimizer, scaler, clip)
    return output.loss.item()


@train_step.mutant(
    "the returned loss holds the auxiliary loss",
    "then it can't be compared with a dense model's, or with ln of the vocabulary. Return output.loss alone.",
)
def aux_in_the_loss(model, ids, labels, optimizer, scaler, clip):
    optimizer.zero_grad()
    output = steps_of(model, ids, labels, scaler)
    finish(model, optimizer, scaler, clip)
    return (output.loss + output.aux_loss).item()


@train_step.mutant(
    "the loss of a second forward, after the update, is returned",
    "the loss of the batch before the update comes for free; after it, it is lower than on any new text.",
)
def loss_after_the_update(model, ids, labels, optimizer, scaler, clip):
    train_step_reference(model, ids, labels, optimizer, scaler, clip)
    with torch.no_grad():
        return model(ids, labels=labels).loss.item()


@train_step.mutant(
    "scaler.update() is missing",
    "it ends the update for the scaler, which else refuses the next one, and never adapts its scale.",
)
def no_update(model, ids, labels, optimizer, scaler, clip):
    optimizer.zero_grad()
    output = steps_of(model, ids, labels, scaler)
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), clip)
    scaler.step(optimizer)
    return output.loss.item()


@train_step.mutant(
    "the scaled loss is returned",
    "65,536 times the loss can't be read. Scale for backward only, and return output.loss as it is.",
)
def scaled_returned(model, ids, labels, optimizer, scaler, clip):
    loss = train_step_reference(model, ids, labels, optimizer, scaler, clip)
    return loss * scaler.get_scale()


@train_step.mutant(
    "the scaler is not used",
    "in float16 small gradients become 0 and large ones infinite; the scaler is there for both. Four calls: scale, "
    "unscale_, step, update.",
    "in float32 and bfloat16 nothing needs it.",
)
def without_scaler(model, ids, labels, optimizer, scaler, clip):
    optimizer.zero_grad()
    output = model(ids, labels=labels)
    (output.loss + output.aux_loss).backward()
    nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    return output.loss.item()


@train_step.mutant(
    "the weights are moved twice: by optimizer.step() and by scaler.step(optimizer)",
    "scaler.step calls optimizer.step itself, if the gradient is finite.",
)
def two_steps(model, ids, labels, optimizer, scaler, clip):
    optimizer.zero_grad()
    output = steps_of(model, ids, labels, scaler)
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    scaler.step(optimizer)
    scaler.update()
    return output.loss.item()


EXERCISES = [windows, learning_rate, adamw, accumulate, train_step]
