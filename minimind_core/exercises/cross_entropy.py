"""Exercises of notebook 11: the shifted loss, labels with a mask, the mean over micro-batches, perplexity."""

import math

import torch

from ..loss import IGNORED
from .framework import Exercise, case, draw


def ids(*rows) -> torch.Tensor:
    return torch.tensor(rows)


def choices(*shape: int, below: int, seed: int) -> torch.Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(seed))


# 1. shifted_cross_entropy --------------------------------------------------------------------------------------------


def loss_reference(logits, labels):
    """Mean of logsumexp(z) - z[next label] over the next labels that are not -100; 0 if there are none. In float32.

    logits: [batch, seq, vocab]; labels: [batch, seq], unshifted.
    """
    return mean_of(*next_losses(logits, labels))


def next_losses(logits, labels, shift: int = 1):
    """The loss of each label that is `shift` further on, and whether it counts: both [batch, seq - shift]."""
    wide = logits[:, : logits.shape[1] - shift].float()
    targets = labels[:, shift:]
    own = wide.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return wide.logsumexp(dim=-1) - own, targets != IGNORED


def mean_of(losses, counted):
    return losses[counted].sum() / counted.sum().clamp(min=1)


def loss_and_gradient(candidate, logits, labels):
    """The loss, and the gradient that it sends back to the logits. None where there is none, or nothing to predict,
    or where its digits are too few to be compared."""
    start = logits.clone().requires_grad_()
    handed = start * 1  # not a leaf, as in a model
    loss = candidate(handed, labels)
    logits.copy_(handed.detach())  # so that a change in place is seen
    if loss is None or loss is ...:
        return loss
    grad = None
    compared = logits.dtype == torch.float32 and (labels[:, 1:] != IGNORED).any()
    if compared and torch.is_tensor(loss) and loss.numel() == 1 and loss.requires_grad:
        (grad,) = torch.autograd.grad(loss, start, allow_unused=True)
    return loss, grad


COPY = torch.zeros(1, 4, 3)  # knows the next token of 0 1 2 0
COPY[0, torch.arange(3), torch.tensor([1, 2, 0])] = 3.0

loss = Exercise(
    name="11_shifted_cross_entropy.shifted_cross_entropy",
    title="The loss: one shift, logsumexp minus the label's logit, the mean over what is labeled",
    signature="shifted_cross_entropy(logits, labels)",
    reference=loss_reference,
    call=loss_and_gradient,
    returns=("loss", "gradient of the logits"),
    cases=[
        case("two tokens, one prediction", torch.tensor([[[2.0, 0.0], [0.0, 0.0]]]), ids([0, 1])),
        case("three tokens", torch.tensor([[[1.0, 0.0, 2.0], [0.0, 3.0, 1.0], [4.0, 0.0, 0.0]]]), ids([0, 2, 1])),
        case("a model that knows the next token", COPY, ids([0, 1, 2, 0])),
        case(
            "three texts, one with its last label masked",
            torch.tensor([[[0.0, 1.0], [3.0, 0.0]], [[2.0, 0.0], [1.0, 1.0]], [[0.5, 0.0], [0.0, 2.0]]]),
            ids([0, 1], [1, 1], [1, IGNORED]),
        ),
        case("a prompt and padding are masked", draw(1, 6, 5, seed=1101), ids([IGNORED, IGNORED, 3, 1, 2, IGNORED])),
        case(
            "two texts, five labels in one and one in the other",
            draw(2, 6, 5, seed=1102, scale=3.0),
            ids([1, 4, 0, 2, 3, 1], [IGNORED, IGNORED, 2, IGNORED, IGNORED, IGNORED]),
        ),
        case("as many tokens as words in the vocabulary", draw(2, 5, 5, seed=1103), choices(2, 5, below=5, seed=1104)),
        case("a text of one token: nothing to predict", torch.tensor([[[1.0, 2.0, -1.0, 0.0, 3.0]]]), ids([1])),
        case("no label but the first", draw(1, 4, 3, seed=1100), ids([2, IGNORED, IGNORED, IGNORED])),
        case("logits of hundreds", draw(1, 4, 3, seed=1105, scale=300.0), ids([0, 1, 2, 0])),
        case(
            "bfloat16 logits",
            draw(1, 8, 40, seed=1106, scale=4.0, dtype=torch.bfloat16),
            choices(1, 8, below=40, seed=1107),
        ),
    ],
)


@loss.mutant(
    "nothing is shifted: each position is asked for the token that it reads",
    "the answer stands in the input. A model that repeats its input gets a loss near 0 and can write nothing.",
    "BERT, which is asked for tokens that were hidden from it, does not shift.",
)
def no_shift(logits, labels):
    return mean_of(*next_losses(logits, labels, shift=0))


@loss.mutant(
    "the labels are shifted twice",
    "each position then learns the token after the next. The loss still falls, but not to where it could, and the text "
    "that such a model writes leaves out every other token.",
)
def two_shifts(logits, labels):
    return mean_of(*next_losses(logits[:, :-1], labels[:, 1:])) if labels.shape[1] > 1 else logits.sum() * 0


@loss.mutant(
    "the shift goes the other way: each position is asked for the token before it",
    "that token stands in the input too. Logits 0 to n - 2 belong to labels 1 to n - 1.",
)
def backward_shift(logits, labels):
    wide, targets = logits[:, 1:].float(), labels[:, :-1]
    own = wide.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return mean_of(wide.logsumexp(dim=-1) - own, targets != IGNORED)


@loss.mutant(
    "the labels are rolled: the last position is asked for the first token of the text",
    "torch.roll moves in a circle. The last position has nothing to predict: leave it out.",
)
def rolled(logits, labels):
    wide, targets = logits.float(), labels.roll(-1, dims=1)
    own = wide.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return mean_of(wide.logsumexp(dim=-1) - own, targets != IGNORED)


@loss.mutant(
    "masked labels count as token 0",
    "-100 means: not to be learned. Here the model is taught to write token 0 there, the padding token of MiniMind.",
)
def masked_as_zero(logits, labels):
    losses, counted = next_losses(logits, labels)
    return mean_of(losses, torch.ones_like(counted))


@loss.mutant(
    "masked labels count as the last token of the vocabulary",
    "an index of -1, or a remainder, picks the last column. -100 means: leave this position out.",
)
def masked_as_last(logits, labels):
    size = logits.shape[-1]
    return mean_of(*next_losses(logits, torch.where(labels == IGNORED, size - 1, labels)))


@loss.mutant(
    "the sum is divided by all positions, also by those that are masked",
    "the loss of a text then depends on how much padding stands beside it. Divide by the number of labels that count.",
)
def divided_by_all(logits, labels):
    losses, counted = next_losses(logits, labels)
    return losses[counted].sum() / max(counted.numel(), 1)


@loss.mutant(
    "the sum is divided by seq, not by seq - 1",
    "n tokens give n - 1 predictions: the last position predicts nothing.",
)
def divided_by_seq(logits, labels):
    losses, counted = next_losses(logits, labels)
    return losses[counted].sum() / (counted.sum() + labels.shape[0])


@loss.mutant(
    "it is a mean of each text's mean",
    "a token of a short text then weighs more than one of a long text. All labels of the batch count alike: one sum, "
    "one count.",
    "GRPO, a method of reinforcement learning, takes the mean of each answer first.",
)
def mean_of_texts(logits, labels):
    losses, counted = next_losses(logits, labels)
    return ((losses * counted).sum(dim=-1) / counted.sum(dim=-1).clamp(min=1)).mean()


@loss.mutant(
    "the losses are added up, not averaged",
    "the step of the optimizer would grow with the length of the text.",
)
def added_up(logits, labels):
    losses, counted = next_losses(logits, labels)
    return losses[counted].sum()


@loss.mutant(
    "with nothing to predict it is NaN: 0 / 0",
    "every mean that the NaN enters is NaN, and so is the gradient if the losses are multiplied by a mask. Divide by "
    "at least 1: .clamp(min=1).",
)
def nothing_is_nan(logits, labels):
    losses, counted = next_losses(logits, labels)
    return losses[counted].sum() / counted.sum()


@loss.mutant(
    "exp overflows: log(exp(z).sum()) without taking out the largest",
    "exp(89) is infinite in float32. logsumexp takes the largest logit out first and adds it back.",
)
def overflows(logits, labels):
    wide, targets = logits[:, :-1].float(), labels[:, 1:]
    own = wide.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return mean_of(wide.exp().sum(dim=-1).log() - own, targets != IGNORED)


@loss.mutant(
    "log(softmax(z)) is infinite where softmax rounds to 0",
    "a probability of e^-200 is 0 in float32, and its logarithm minus infinity. Take logsumexp, or log_softmax, which "
    "never form the probability.",
)
def log_of_softmax(logits, labels):
    probs, targets = logits[:, :-1].float().softmax(dim=-1), labels[:, 1:]
    own = probs.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return mean_of(-own.log(), targets != IGNORED)


@loss.mutant(
    "the sign is turned: it is the mean of the logarithms",
    "a loss is to be made small. With this sign training makes the right tokens improbable.",
)
def sign_turned(logits, labels):
    return -loss_reference(logits, labels)


@loss.mutant(
    "softmax came first, and its result was taken for logits",
    "softmax twice: no probability can come near 1 any more, so even a perfect model keeps a large loss.",
)
def softmax_twice(logits, labels):
    return mean_of(*next_losses(logits.float().softmax(dim=-1), labels))


@loss.mutant(
    "the probability is averaged before the logarithm",
    "the logarithm belongs to each token: -log of the mean hides the tokens that were missed.",
)
def log_of_mean(logits, labels):
    losses, counted = next_losses(logits, labels)
    return -mean_of((-losses).exp(), counted).clamp(min=1e-30).log() * counted.any()


@loss.mutant(
    "only the label's logit is there, without logsumexp",
    "all logits could grow together and nothing would become more probable. logsumexp is what the others take.",
)
def logit_alone(logits, labels):
    losses, counted = next_losses(logits, labels)
    return mean_of(losses - logits[:, : losses.shape[1]].float().logsumexp(dim=-1), counted)


@loss.mutant(
    "logsumexp runs over the positions, not over the vocabulary",
    "the tokens of the vocabulary compete for one position: dim=-1.",
)
def sum_over_positions(logits, labels):
    if labels.shape[1] < 2:
        return logits.float().sum() * 0
    losses, counted = next_losses(logits, labels)
    wide = logits[:, :-1].float()
    own = wide.logsumexp(dim=-1) - losses
    targets = labels[:, 1:].clamp(min=0)
    totals = wide.logsumexp(dim=1)[:, None].expand_as(wide).gather(-1, targets[..., None])[..., 0]
    return mean_of(totals - own, counted)


@loss.mutant(
    "the loss is in bits: the logarithm is to base 2",
    "PyTorch and MiniMind count in nats, base e. ln 6400 = 8.76 is the loss of a blind guess.",
    "compression is measured in bits: nats / ln 2.",
)
def in_bits(logits, labels):
    return loss_reference(logits, labels) / math.log(2)


def half_loss(logits, labels):
    rows, targets = logits[:, :-1], labels[:, 1:]
    own = rows.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return mean_of(rows.logsumexp(dim=-1) - own, targets != IGNORED)


@loss.mutant(
    "the loss is in the type of the logits",
    "bfloat16 has eight binary digits: near 8 it knows only steps of 1/16. `.float()` comes before everything else.",
)
def half_precision(logits, labels):
    return half_loss(logits, labels)


@loss.mutant(
    "the arithmetic is in the type of the logits, and `.float()` comes too late",
    "what bfloat16 has rounded, to steps of 1/16 near 8, stays rounded. `.float()` comes before logsumexp.",
)
def float_too_late(logits, labels):
    return half_loss(logits, labels).float()


@loss.mutant(
    "the losses are not averaged: one number for each position",
    "a single number is wanted: the mean over all labels that count.",
)
def not_reduced(logits, labels):
    losses, counted = next_losses(logits, labels)
    return losses * counted


@loss.mutant(
    "[..., 0] after gather is missing: the logits keep an axis of length 1",
    "logsumexp [batch, seq - 1] minus logits [batch, seq - 1, 1] pairs every position with every other, or stops with "
    "an error.",
)
def axis_kept(logits, labels):
    wide, targets = logits[:, :-1].float(), labels[:, 1:]
    own = wide.gather(-1, targets.clamp(min=0)[..., None])
    return mean_of(wide.logsumexp(dim=-1) - own, targets != IGNORED)


@loss.mutant(
    "gather is given -100 as an index",
    "no column has that number. Put any token in its place, as in targets.clamp(min=0): its loss is left out anyhow.",
)
def masked_index(logits, labels):
    wide, targets = logits[:, :-1].float(), labels[:, 1:]
    own = wide.gather(-1, targets[..., None])[..., 0]
    return mean_of(wide.logsumexp(dim=-1) - own, targets != IGNORED)


@loss.mutant(
    "the logarithm is missing: it is the mean probability, with a minus",
    "a token that was nearly impossible then costs hardly more than an improbable one. The loss is -log p.",
)
def no_logarithm(logits, labels):
    losses, counted = next_losses(logits, labels)
    return mean_of(-(-losses).exp(), counted)


@loss.mutant(
    "token 0 is left out as well: only labels above 0 count",
    "0 is a token like any other. Masked is -100 alone: targets != -100.",
)
def zero_left_out(logits, labels):
    losses, _ = next_losses(logits, labels)
    return mean_of(losses, labels[:, 1:] > 0)


@loss.mutant(
    "the loss sends no gradient back to the logits",
    "the number is right, but nothing can be trained with it. .detach(), .item(), torch.tensor(...) and "
    "torch.no_grad() cut the way back.",
    "right for a loss that is only shown or logged.",
)
def gradient_lost(logits, labels):
    return loss_reference(logits, labels).detach()


@loss.mutant(
    "the batch was flattened before the shift",
    "the last position of each text is then asked for the first token of the next text. Shift along seq first.",
)
def flattened_first(logits, labels):
    return loss_reference(logits.flatten(0, 1)[None], labels.flatten()[None])


@loss.mutant(
    "F.cross_entropy was given [batch, seq, vocab]",
    "it takes the second axis for the vocabulary. Flatten logits to [tokens, vocab] and labels to [tokens].",
)
def not_flattened(logits, labels):
    return torch.nan_to_num(torch.nn.functional.cross_entropy(logits[:, :-1].float(), labels[:, 1:]))


# 2. answer_labels ----------------------------------------------------------------------------------------------------


def labels_reference(ids, prompt_length, pad_id):
    """The ids, with -100 on each row's prompt and on the padding. ids: [batch, seq]; prompt_length: [batch]."""
    prompt = torch.arange(ids.shape[1]) < prompt_length[:, None]
    return torch.where(prompt | (ids == pad_id), IGNORED, ids)


def lengths(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers)


answer = Exercise(
    name="11_shifted_cross_entropy.answer_labels",
    title="Labels of an answer: the prompt and the padding are masked",
    signature="answer_labels(ids, prompt_length, pad_id)",
    reference=labels_reference,
    cases=[
        case("a prompt of two, an answer of two", ids([5, 6, 7, 2]), lengths(2), 0),
        case("padding at the end", ids([5, 6, 7, 2, 0, 0]), lengths(2), 0),
        case("no prompt: pretraining", ids([1, 8, 9, 2, 0]), lengths(0), 0),
        case("a prompt without an answer", ids([5, 6, 7, 0]), lengths(3), 0),
        case("two prompts of different length", ids([5, 6, 7, 8, 2, 0], [9, 5, 2, 0, 0, 0]), lengths(3, 1), 0),
        case("another padding id", ids([0, 4, 0, 6, 3, 3], [7, 7, 7, 5, 0, 2]), lengths(2, 3), 3),
        case("as many texts as tokens", ids([1, 4, 2], [1, 2, 0], [5, 4, 2]), lengths(2, 1, 0), 0),
        case("a repeated token in prompt and answer", ids([8, 8, 8, 8, 2], [8, 2, 8, 2, 0]), lengths(2, 2), 0),
    ],
)


def masked(ids, prompt_length, pad_id, value=IGNORED, before: int = 0):
    """The reference, with the border moved by `before` and another value in the masked places."""
    prompt = torch.arange(ids.shape[1]) < prompt_length[:, None] - before
    return torch.where(prompt | (ids == pad_id), value, ids)


@answer.mutant(
    "the labels are shifted by one already",
    "the loss shifts as well, so the model would learn the token after the next. A label stands where its token "
    "stands.",
)
def shifted_already(ids, prompt_length, pad_id):
    labels = labels_reference(ids, prompt_length, pad_id)
    return torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], IGNORED)], dim=1)


@answer.mutant(
    "the first token of the answer is masked too",
    "then nobody teaches the model how to begin. The prompt ends before place prompt_length: use <, not <=.",
)
def first_answer_token_lost(ids, prompt_length, pad_id):
    return masked(ids, prompt_length, pad_id, before=-1)


@answer.mutant(
    "the last token of the prompt is left in",
    "the marker would be learned as if the model had to write it. The logit on it predicts the first answer token "
    "through the shift of the loss: its own label is not needed.",
)
def marker_left_in(ids, prompt_length, pad_id):
    return masked(ids, prompt_length, pad_id, before=1)


@answer.mutant(
    "the padding is not masked",
    "the model would be taught to write padding, most of the time in a batch of short texts.",
)
def padding_left_in(ids, prompt_length, pad_id):
    prompt = torch.arange(ids.shape[1]) < prompt_length[:, None]
    return torch.where(prompt, IGNORED, ids)


@answer.mutant(
    "the prompt is not masked",
    "the model would also be taught to write questions.",
    "pretraining: there every token is learned.",
)
def prompt_left_in(ids, prompt_length, pad_id):
    return torch.where(ids == pad_id, IGNORED, ids)


@answer.mutant(
    "the answer is masked, and the prompt is left in",
    "-100 marks what is not to be learned.",
)
def answer_masked(ids, prompt_length, pad_id):
    prompt = torch.arange(ids.shape[1]) < prompt_length[:, None]
    return torch.where(prompt & (ids != pad_id), ids, IGNORED)


@answer.mutant(
    "the masked places hold 0, not -100",
    "0 is a token, and the loss would teach it. Only -100 is left out.",
)
def masked_by_zero(ids, prompt_length, pad_id):
    return masked(ids, prompt_length, pad_id, value=0)


@answer.mutant(
    "the masked places hold pad_id, not -100",
    "cross-entropy knows nothing of padding: for it pad_id is a token like any other.",
)
def masked_by_padding(ids, prompt_length, pad_id):
    return masked(ids, prompt_length, pad_id, value=pad_id)


@answer.mutant(
    "the masked places hold -1, not -100",
    "PyTorch's ignore_index is -100. A label of -1 is an error, or the last token of the vocabulary.",
    "where ignore_index=-1 is passed on, as in nanoGPT.",
)
def masked_by_minus_one(ids, prompt_length, pad_id):
    return masked(ids, prompt_length, pad_id, value=-1)


@answer.mutant(
    "every row has the prompt length of the first row",
    "in other rows a part of the prompt is learned, or a part of the answer lost. prompt_length[:, None] gives each "
    "row its own.",
)
def first_rows_length(ids, prompt_length, pad_id):
    return labels_reference(ids, prompt_length[:1], pad_id)


@answer.mutant(
    "every row has the longest prompt length",
    "a shorter prompt's answer loses its beginning. prompt_length[:, None] gives each row its own.",
)
def longest_length(ids, prompt_length, pad_id):
    return labels_reference(ids, prompt_length.max()[None], pad_id)


@answer.mutant(
    "[:, None] is missing: the lengths run along seq, not along batch",
    "that stops with an error, or, where there are as many texts as tokens, each column gets a length instead of each "
    "row.",
)
def lengths_along_seq(ids, prompt_length, pad_id):
    prompt = torch.arange(ids.shape[1]) < prompt_length
    return torch.where(prompt | (ids == pad_id), IGNORED, ids)


@answer.mutant(
    "the padding id is taken to be 0",
    "it is an argument. In another tokenizer 0 may be a word.",
)
def padding_is_zero(ids, prompt_length, pad_id):
    return labels_reference(ids, prompt_length, 0)


@answer.mutant(
    "the last token of the answer is masked too",
    "it is the end token: a model that never learns it does not stop.",
)
def end_lost(ids, prompt_length, pad_id):
    labels = labels_reference(ids, prompt_length, pad_id)
    last = (ids != pad_id).sum(dim=1, keepdim=True) - 1
    return torch.where(torch.arange(ids.shape[1]) == last, IGNORED, labels)


@answer.mutant(
    "the masked tokens are cut out, so the labels are shorter than the ids",
    "each label must stand where its token stands: [batch, seq], with -100 in the gaps.",
)
def cut_out(ids, prompt_length, pad_id):
    labels = labels_reference(ids, prompt_length, pad_id)
    return labels[labels != IGNORED][None]


@answer.mutant(
    "prompt and padding are joined by `or`, or by | without parentheses",
    "`or` wants a single True or False. For tensors: (one comparison) | (other comparison).",
)
def joined_by_or(ids, prompt_length, pad_id):
    prompt = torch.arange(ids.shape[1]) < prompt_length[:, None]
    return torch.where(prompt or (ids == pad_id), IGNORED, ids)


@answer.mutant(
    "prompt_length stands in a slice, as if it were one number",
    "it holds one length for each row. Compare the places 0, 1, 2, ... with prompt_length[:, None], or go row by row.",
)
def length_in_a_slice(ids, prompt_length, pad_id):
    labels = torch.where(ids == pad_id, IGNORED, ids)
    labels[:, :prompt_length] = IGNORED
    return labels


@answer.mutant(
    "only places that are prompt and padding at once are masked",
    "either is enough: join the two by |, not by &.",
)
def joined_by_and(ids, prompt_length, pad_id):
    prompt = torch.arange(ids.shape[1]) < prompt_length[:, None]
    return torch.where(prompt & (ids == pad_id), IGNORED, ids)


# 3. batch_loss -------------------------------------------------------------------------------------------------------


def weighted_reference(losses, counts):
    """The mean over all labels: sum of loss * count, divided by the sum of the counts (0 if that is 0)."""
    return (losses * counts).sum() / counts.sum().clamp(min=1)


weighted = Exercise(
    name="11_shifted_cross_entropy.batch_loss",
    title="From the losses of micro-batches to the loss of all their labels",
    signature="batch_loss(losses, counts)",
    reference=weighted_reference,
    cases=[
        case("one micro-batch", torch.tensor([3.0]), torch.tensor([5])),
        case("two labels and eight", torch.tensor([1.0, 6.0]), torch.tensor([2, 8])),
        case("equal counts", torch.tensor([2.0, 5.0]), torch.tensor([4, 4])),
        case("one without labels", torch.tensor([2.0, 0.0, 4.0]), torch.tensor([3, 0, 9])),
        case("no label at all", torch.tensor([0.0, 0.0]), torch.tensor([0, 0])),
        case("four", torch.tensor([8.5, 2.25, 4.0, 1.0]), torch.tensor([100, 340, 7, 1])),
    ],
)


@weighted.mutant(
    "it is the mean of the losses, without the counts",
    "a label in a micro-batch of two then weighs four times what it weighs in one of eight.",
    "right where all micro-batches have the same number of labels, as in pretraining on full rows.",
)
def mean_of_means(losses, counts):
    return losses.mean()


@weighted.mutant(
    "the sum of the losses is divided by the sum of the counts",
    "a loss of a micro-batch is a mean already. Times its count it becomes the sum over its labels.",
)
def not_multiplied(losses, counts):
    return losses.sum() / counts.sum().clamp(min=1)


@weighted.mutant(
    "it is divided by the number of micro-batches, not of labels",
    "loss * count is a sum over labels: divide by all the labels.",
)
def divided_by_batches(losses, counts):
    return (losses * counts).sum() / len(losses)


@weighted.mutant(
    "the sum is not divided",
    "that is the sum over all labels. Its gradient grows with the batch.",
)
def not_divided(losses, counts):
    return (losses * counts).sum()


@weighted.mutant(
    "micro-batches with few labels weigh more, not less",
    "multiply each loss by its count; do not divide.",
)
def weights_turned(losses, counts):
    shares = 1 / counts.clamp(min=1)
    return (losses * shares * (counts > 0)).sum() / (shares * (counts > 0)).sum().clamp(min=1e-9)


@weighted.mutant(
    "it is the mean of the losses of those micro-batches that have labels",
    "leaving the empty ones out is right, but the others still have unequal counts.",
)
def mean_of_filled(losses, counts):
    return losses[counts > 0].sum() / (counts > 0).sum().clamp(min=1)


@weighted.mutant(
    "with no label at all it is NaN: 0 / 0",
    "divide by at least 1, so that it is 0.",
)
def nothing_is_zero_by_zero(losses, counts):
    return (losses * counts).sum() / counts.sum()


@weighted.mutant(
    "the losses are weighted by softmax of the counts",
    "the largest micro-batch then takes nearly all. The share of each is its count over the sum of the counts.",
)
def by_softmax(losses, counts):
    return (losses * counts.float().softmax(dim=0)).sum()


@weighted.mutant(
    "it is divided by the largest count",
    "the weights must sum to 1: divide by the sum of the counts.",
)
def divided_by_largest(losses, counts):
    return (losses * counts).sum() / counts.max().clamp(min=1)


@weighted.mutant(
    "it is one number for each micro-batch: the sum is missing",
    "those are the parts of the loss. Their sum is wanted, a single number.",
)
def parts_only(losses, counts):
    return losses * counts / counts.sum().clamp(min=1)


@weighted.mutant(
    "the last micro-batch stands for all",
    "each has its share. The variable of a loop keeps only the last value.",
)
def last_one(losses, counts):
    return losses[-1]


@weighted.mutant(
    "a micro-batch without labels counts as one label",
    "the 1 is for the sum of all counts, where that is 0, not for each count.",
)
def each_at_least_one(losses, counts):
    counts = counts.clamp(min=1)
    return (losses * counts).sum() / counts.sum()


@weighted.mutant(
    "the division is a whole one",
    "// cuts off what stands behind the point. A loss is no whole number: divide by /.",
)
def whole_division(losses, counts):
    return (losses * counts).sum() // counts.sum().clamp(min=1)


@weighted.mutant(
    "the shares are averaged, not added up",
    "the shares of the micro-batches sum to 1 already: their parts of the loss are added.",
)
def mean_of_parts(losses, counts):
    return (losses * counts / counts.sum().clamp(min=1)).mean()


# 4. perplexity -------------------------------------------------------------------------------------------------------


def perplexity_reference(logits, ids):
    """exp of the mean loss of the n - 1 next tokens. logits: [seq, vocab]; ids: [seq], seq at least 2."""
    return own_losses(logits, ids).mean().exp()


def own_losses(logits, ids, shift: int = 1):
    rows = logits[: len(ids) - shift].float()
    return rows.logsumexp(dim=-1) - rows.gather(-1, ids[shift:, None])[:, 0]


def certain(*wanted: int, vocab: int, logit: float) -> torch.Tensor:
    """One row for each: `logit` at the wanted token, 0 elsewhere."""
    rows = torch.zeros(len(wanted), vocab)
    rows[torch.arange(len(wanted)), torch.tensor(wanted)] = logit
    return rows


perplexity = Exercise(
    name="11_shifted_cross_entropy.perplexity",
    title="Perplexity: among how many equal choices would the model be as unsure",
    signature="perplexity(logits, ids)",
    reference=perplexity_reference,
    cases=[
        case("equal logits, a vocabulary of 4", torch.zeros(3, 4), torch.tensor([0, 3, 1])),
        case("sure of the right token", certain(2, 1, 0, vocab=4, logit=10.0), torch.tensor([0, 2, 1])),
        case("sure of a wrong token", certain(1, 0, 0, vocab=4, logit=10.0), torch.tensor([0, 2, 1])),
        case("five tokens", draw(5, 6, seed=1110, scale=2.0), torch.tensor([3, 0, 5, 5, 2])),
        case("as many tokens as words in the vocabulary", draw(6, 6, seed=1111), torch.tensor([1, 4, 0, 2, 2, 5])),
        case("two hundred tokens", draw(200, 6, seed=1112, scale=2.0), choices(200, below=6, seed=1113)),
    ],
)


@perplexity.mutant(
    "exp came before the mean",
    "one token that was nearly impossible then rules the result. First the mean of the losses, then exp.",
)
def mean_of_exp(logits, ids):
    return own_losses(logits, ids).exp().mean()


@perplexity.mutant(
    "that is the loss: exp is missing",
    "the loss of four equal choices is ln 4; their perplexity is 4.",
)
def loss_alone(logits, ids):
    return own_losses(logits, ids).mean()


@perplexity.mutant(
    "the minus is lost: it is exp of the mean logarithm",
    "that is the typical probability, below 1. Perplexity is one divided by it.",
)
def typical_probability(logits, ids):
    return (-own_losses(logits, ids)).mean().exp()


@perplexity.mutant(
    "it is 2 to the power of a loss in nats",
    "base and logarithm belong together: exp with ln, or 2 with the logarithm to base 2.",
)
def two_to_the_nats(logits, ids):
    return 2 ** own_losses(logits, ids).mean()


@perplexity.mutant(
    "the losses are added up, not averaged",
    "that is 1 over the probability of the whole text. It grows with every token, beyond all floats.",
)
def of_the_whole_text(logits, ids):
    return own_losses(logits, ids).sum().exp()


@perplexity.mutant(
    "the sum of the losses is divided by seq, not by seq - 1",
    "n tokens give n - 1 predictions.",
)
def one_too_many(logits, ids):
    return (own_losses(logits, ids).sum() / len(ids)).exp()


@perplexity.mutant(
    "nothing is shifted: each position is asked for the token that it reads",
    "logits 0 to n - 2 belong to ids 1 to n - 1.",
)
def read_token(logits, ids):
    return own_losses(logits, ids, shift=0).mean().exp()


@perplexity.mutant(
    "it is shifted twice",
    "logits 0 to n - 2 belong to ids 1 to n - 1.",
)
def after_the_next(logits, ids):
    return own_losses(logits, ids, shift=2).mean().exp()


@perplexity.mutant(
    "it is one divided by the mean probability",
    "the typical probability is a geometric mean: exp of the mean logarithm.",
)
def by_mean_probability(logits, ids):
    return 1 / (-own_losses(logits, ids)).exp().mean()


@perplexity.mutant(
    "it is the root of the product of the probabilities, and the product has become 0",
    "200 probabilities multiplied are less than the smallest float. Add logarithms instead.",
)
def product_underflows(logits, ids):
    probs = (-own_losses(logits, ids)).exp()
    return probs.prod() ** (-1 / len(probs))


@perplexity.mutant(
    "it is the perplexity of the model's own distribution: its entropy, without the ids",
    "a model may be very sure and wrong. What counts is the probability of the token that came.",
)
def of_its_entropy(logits, ids):
    logs = logits[:-1].log_softmax(dim=-1)
    return (-(logs.exp() * logs).sum(dim=-1)).mean().exp()


@perplexity.mutant(
    "the shift goes the other way: each position is asked for the token before it",
    "logits 0 to n - 2 belong to ids 1 to n - 1.",
)
def token_before(logits, ids):
    rows = logits[1:]
    return (rows.logsumexp(dim=-1) - rows.gather(-1, ids[:-1, None])[:, 0]).mean().exp()


@perplexity.mutant(
    "softmax came first, and its result was taken for logits",
    "F.cross_entropy has its own softmax. Give it the logits as they are.",
)
def softmax_first(logits, ids):
    return own_losses(logits.softmax(dim=-1), ids).mean().exp()


@perplexity.mutant(
    "it is e to the power of a loss in bits",
    "base and logarithm belong together: exp with ln, or 2 with the logarithm to base 2.",
)
def exp_of_bits(logits, ids):
    return (own_losses(logits, ids) / math.log(2)).mean().exp()


@perplexity.mutant(
    "there is one number for each token: the mean is missing",
    "perplexity is one number for the whole text: first the mean of the losses, then exp.",
)
def one_for_each(logits, ids):
    return own_losses(logits, ids).exp()


EXERCISES = [loss, answer, weighted, perplexity]
