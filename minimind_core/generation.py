"""Writing text: the next token's logits, filtered, sampled, appended, again and again."""

from contextlib import ExitStack, contextmanager
from typing import Protocol

import torch
from torch import nn

from .attention import as_bool_mask
from .cache import new_cache


class Streamer(Protocol):
    """What `generate` hands its tokens to: transformers' streamers fit."""

    def put(self, value: torch.Tensor): ...

    def end(self): ...


@contextmanager
def evaluating(model: nn.Module):
    """Within this block every module is in evaluation mode; afterwards each is in its own mode again."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def penalize_repetition(
    logits: torch.Tensor, token_ids: torch.Tensor, penalty: float, token_mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Make tokens that already occurred less likely: positive logits / penalty, negative ones * penalty.

    logits: [batch, vocab]; token_ids: [batch, seq]; token_mask: [batch, seq], 0 for padding, which does not count.
    Source: Keskar et al. 2019, "CTRL", section 4.1.
    """
    batch, vocab = logits.shape
    if token_mask is not None:
        token_ids = torch.where(token_mask.bool(), token_ids, vocab)  # padding goes to a column of its own
    seen = logits.new_zeros(batch, vocab + 1, dtype=torch.bool).scatter(-1, token_ids, True)[:, :vocab]
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def keep_top_k(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Keep the k largest logits of each row, the others become -inf. k = 0 or k >= vocab keeps all."""
    if k <= 0 or k >= logits.shape[-1]:
        return logits
    smallest_kept = logits.topk(k, dim=-1).values[..., -1:]
    return logits.masked_fill(logits < smallest_kept, float("-inf"))


def keep_top_p(logits: torch.Tensor, p: float) -> torch.Tensor:
    """Keep the most probable tokens until their probabilities reach p, the one that crosses p included.

    At least one token stays. Source: Holtzman et al. 2019, "The Curious Case of Neural Text Degeneration", equation 2.
    """
    if p >= 1:
        return logits
    ordered, order = logits.sort(dim=-1, descending=True)
    probs = ordered.softmax(dim=-1)
    before = probs.cumsum(dim=-1) - probs  # the mass in front of each token
    dropped = before >= p
    dropped[..., 0] = False
    return logits.masked_fill(torch.zeros_like(dropped).scatter(-1, order, dropped), float("-inf"))


def next_token_probs(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    """[batch, vocab] logits -> probabilities in float32: temperature (above 0), then top-k, then top-p."""
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}; it must be above 0: greedy decoding takes the argmax instead")
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    return keep_top_p(keep_top_k(logits, top_k), top_p).softmax(dim=-1)


@torch.no_grad()
def generate(
    model,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    max_new_tokens: int = 128,
    temperature: float = 0.85,
    top_k: int = 50,
    top_p: float = 0.85,
    repetition_penalty: float = 1.0,
    do_sample: bool = True,
    eos_token_id: int | list[int] | None = -1,
    num_return_sequences: int = 1,
    use_cache: bool = True,
    streamer: Streamer | None = None,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Prompt and new tokens: [batch * num_return_sequences, seq + new], rows of one prompt side by side.

    attention_mask: [batch, seq]; prompts of unequal length are padded on the left. temperature 0 is greedy, as is
    do_sample=False. eos_token_id: the config's unless given; None never stops; a finished row is filled with it.
    generator: a CPU generator, for the same draws on every device. streamer: gets the prompt, then each new token.
    Raises ValueError for settings out of range, for a prompt that ends in padding, and if prompt and new tokens
    together do not fit into the rotary table.
    Source: MiniMind, MiniMindForCausalLM.generate.
    """
    stops = [model.config.eos_token_id] if eos_token_id == -1 else eos_token_id
    stops = [] if stops is None else [stops] if isinstance(stops, int) else list(stops)
    _check_prompt(model, input_ids, attention_mask, max_new_tokens)
    vocab = model.config.vocab_size
    for name, value, right, rule in (
        ("max_new_tokens", max_new_tokens, max_new_tokens >= 1, "at least 1"),
        ("temperature", temperature, temperature >= 0, "0 (greedy) or more"),
        ("top_k", top_k, top_k >= 0, "0 (keeps all) or more"),
        ("top_p", top_p, 0 < top_p <= 1, "above 0 and at most 1 (keeps all)"),
        ("repetition_penalty", repetition_penalty, repetition_penalty > 0, "above 0"),
        ("eos_token_id", stops, all(0 <= stop < vocab for stop in stops), f"within the vocabulary of {vocab} tokens"),
        ("num_return_sequences", num_return_sequences, num_return_sequences >= 1, "at least 1"),
    ):
        if not right:
            raise ValueError(f"{name} is {value}; it must be {rule}")
    ids = input_ids.long().repeat_interleave(num_return_sequences, dim=0)
    mask = None
    if attention_mask is not None:
        mask = as_bool_mask(attention_mask).repeat_interleave(num_return_sequences, dim=0)
    finished = torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)
    past = new_cache(len(model.model.layers), ids.shape[1] + max_new_tokens) if use_cache else None
    with evaluating(model), ExitStack() as at_the_end:
        if streamer is not None:
            at_the_end.callback(streamer.end)
            streamer.put(input_ids)
        new = ids
        for _ in range(max_new_tokens):
            output = model(new if use_cache else ids, mask, past, use_cache, logits_to_keep=1)
            past, logits = output.past_key_values, output.logits[:, -1]
            if repetition_penalty != 1:
                logits = penalize_repetition(logits, ids, repetition_penalty, mask)
            if not do_sample or temperature == 0:
                new = logits.argmax(dim=-1, keepdim=True)
            else:
                probs = next_token_probs(logits, temperature, top_k, top_p)
                new = torch.multinomial(probs.to("cpu"), 1, generator=generator).to(ids.device)  # device: CPU draws
            if stops:
                new = new.masked_fill(finished[:, None], stops[0])
                finished = finished | torch.isin(new[:, 0], torch.tensor(stops, device=ids.device))
            ids = torch.cat([ids, new], dim=1)
            if mask is not None:
                mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
            if streamer is not None:
                streamer.put(new[:, 0])
            if stops and finished.all():
                break
    return ids


def _check_prompt(model, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, max_new_tokens: int):
    model.model.check_ids(input_ids)
    prompt, longest = input_ids.shape[1], model.config.max_position_embeddings
    if prompt + max_new_tokens > longest:
        raise ValueError(
            f"a prompt of {prompt} tokens and max_new_tokens {max_new_tokens} do not fit into the {longest} positions "
            f"of the rotary table; give at most {longest - prompt} new tokens or raise max_position_embeddings"
        )
    if attention_mask is None:
        return
    if attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask has shape {list(attention_mask.shape)}, input_ids {list(input_ids.shape)}; "
            f"generate needs one entry per prompt token"
        )
    if not as_bool_mask(attention_mask)[:, -1].all():
        raise ValueError("a prompt ends in padding; pad on the left, so that the last token of every row is real")
