"""Faults to plant in the core, one at a time: each a slip that somebody has made. `make mutants` runs them.

A fault replaces a snippet, which must occur exactly once in its file, and names what should notice: its part's tests
and notebooks. Add yours beside the others of its part.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One fault. file: in minimind_core/; tests: in tests/, without test_core_ and .py; notebooks: their numbers."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    notebooks: tuple[str, ...]


def part(file: str, tests: str, notebooks: str, *faults: tuple[str, str, str]) -> list[Mutant]:
    """The faults of one part: (name, old snippet, new snippet)."""
    return [Mutant(*fault[:1], file, *fault[1:], tuple(tests.split()), tuple(notebooks.split())) for fault in faults]


NORM = part(
    "normalization.py",
    "norm",
    "01",
    ("eps outside the root", "torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)",
     "(1 / (wide.square().mean(dim=-1, keepdim=True).sqrt() + eps))"),
    ("cast too late", "return (weight * unit).to(x.dtype)", "return weight * unit"),
    ("cast too early", "wide = x if x.dtype == torch.float64 else x.float()", "wide = x"),
    ("cast before the weight", "return (weight * unit).to(x.dtype)", "return (weight * unit.to(x.dtype)).to(x.dtype)"),
    ("mean subtracted", "unit = wide * ", "unit = (wide - wide.mean(dim=-1, keepdim=True)) * "),
    ("sum for mean", "wide.square().mean(", "wide.square().sum("),
    ("eps of the module ignored", "rms_norm(x, self.weight, self.eps, self.cast)",
     "rms_norm(x, self.weight, cast=self.cast)"),
)  # fmt: skip

ROPE = part(
    "rope.py",
    "rope parity",
    "02",
    ("sign of rotate_half", "torch.cat([-x2, x1], dim=-1)", "torch.cat([x2, -x1], dim=-1)"),
    ("interleaved table", "torch.cat([angles, angles], dim=-1)", "angles.repeat_interleave(2, dim=-1)"),
    ("positions from 1", "torch.outer(torch.arange(end, dtype=torch.float32),",
     "torch.outer(torch.arange(1, end + 1, dtype=torch.float32),"),
    ("exponent i for 2i", "torch.arange(0, dim, 2, dtype=torch.float32) / dim",
     "torch.arange(dim // 2, dtype=torch.float32) / dim"),
    ("angles in bfloat16", "angles = torch.cat([angles, angles], dim=-1)",
     "angles = torch.cat([angles, angles], dim=-1).bfloat16().float()"),
    ("cos and sin exchanged", "q * cos + rotate_half(q) * sin", "q * sin + rotate_half(q) * cos"),
    ("keys not turned", "k * cos + rotate_half(k) * sin", "k"),
    ("half precision promoted", "q_turned.to(q.dtype)", "q_turned"),
)  # fmt: skip

TABLES = part(
    "model.py",
    "rope cache parity model",
    "02 05",
    ("base 1e4", "config.max_position_embeddings, config.rope_theta, config.rope_scaling",
     "config.max_position_embeddings, 1e4, config.rope_scaling"),
    ("positions restart behind a cache",
     "return self.freqs_cos[start : start + seq], self.freqs_sin[start : start + seq]",
     "return self.freqs_cos[:seq], self.freqs_sin[:seq]"),
    ("tables follow .half()", "self._place_tables(tables, self.freqs_cos.device)", "pass"),
    ("tables of inference mode reach training", "@torch.inference_mode(False)", "@torch.no_grad()"),
)  # fmt: skip

YARN = part(
    "rope.py",
    "rope",
    "03",
    ("ramp reversed", '(1 - ramp + ramp / scaling["factor"])', '(ramp + (1 - ramp) / scaling["factor"])'),
    ("low and high exchanged", "return low, high", "return high, low"),
    ("floor and ceil exchanged", "max(math.floor(yarn_pair_index(beta_fast",
     "max(math.ceil(yarn_pair_index(beta_fast"),
    ("2 pi forgotten", "original_length / (turns * 2 * math.pi)", "original_length / turns"),
    ("ramp not clamped", "max(high - low, 0.001)).clamp(0, 1)", "max(high - low, 0.001)).clamp(0)"),
    ("clamped at half of the pairs", "original_length)), dim - 1)", "original_length)), dim // 2 - 1)"),
    ("attention factor forgotten", 'attention_factor = scaling["attention_factor"]', "attention_factor = 1.0"),
    ("attention factor squared", "return angles.cos() * attention_factor, angles.sin() * attention_factor",
     "return angles.cos() * attention_factor**2, angles.sin() * attention_factor**2"),
    ("attention factor on cos alone", "angles.sin() * attention_factor", "angles.sin()"),
    ("attention factor from log2", "return 0.1 * math.log(factor) + 1", "return 0.1 * math.log2(factor) + 1"),
    ("on at the original length already", 'if end > scaling["original_max_position_embeddings"]:',
     'if end >= scaling["original_max_position_embeddings"]:'),
)  # fmt: skip

ATTENTION = part(
    "attention.py",
    "attention cache parity",
    "04 05",
    ("tile for repeat", "batch seq (kv_heads n_rep) head_dim", "batch seq (n_rep kv_heads) head_dim"),
    ("causal mask forgets the cache", ".tril(diagonal=keys - queries)", ".tril()"),
    ("causal mask off by one", ".tril(diagonal=keys - queries)", ".tril(diagonal=keys - queries + 1)"),
    ("top-left causal mask with a cache", "attention_mask is None and queries == keys", "attention_mask is None"),
    ("no mask for a later chunk", "one = attention_mask is None and queries == 1",
     "one = attention_mask is None and queries < keys"),
    ("softmax over the queries", "scores.softmax(dim=-1,", "scores.softmax(dim=-2,"),
    ("scaled by sqrt(hidden)", "math.sqrt(q.shape[-1])", "math.sqrt(q.shape[-1] * q.shape[-2])"),
    ("QK-norm forgotten on k", "self.q_norm(q), self.k_norm(k)", "self.q_norm(q), k"),
    ("QK-norm after the rotation",
     """        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
""",
     """        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
"""),
    ("padding ignored, fast path", "allowed_keys(queries, keys, attention_mask, q.device)",
     "allowed_keys(queries, keys, None, q.device)"),
    ("padding ignored, explicit path", "allowed_keys(q.shape[1], k.shape[1], attention_mask, q.device)",
     "allowed_keys(q.shape[1], k.shape[1], None, q.device)"),
    ("a padded query sees nothing", "return allowed | (own & ~allowed.any(dim=-1, keepdim=True))", "return allowed"),
    ("heads merged in the wrong order", "-> batch seq (heads head_dim)", "-> batch seq (head_dim heads)"),
    ("scale forgotten", "q = q / math.sqrt(q.shape[-1])", "q = q.clone()"),
    ("values tiled", "v = repeat_kv(v, self.n_rep)", "v = v.repeat(1, 1, self.n_rep, 1)"),
    ("keys cached before the rotation",
     """        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        past = None
        if past_key_value is not None or use_cache:
            past = _as_cache(past_key_value).append(k, v)
            k, v = past
""",
     """        unturned = k
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        past = None
        if past_key_value is not None or use_cache:
            past = _as_cache(past_key_value).append(unturned, v)
            k, v = past
"""),
    ("weights keep all without dropout", "self.attn_dropout(attention_weights(q, repeat_kv(k, self.n_rep), allowed))",
     "attention_weights(q, repeat_kv(k, self.n_rep), allowed)"),
    ("residual keeps all without dropout", "self.resid_dropout(self.o_proj(output))", "self.o_proj(output)"),
    ("a mask per query read as one per key", '"batch query key -> batch 1 query key"',
     '"batch key query -> batch 1 query key"'),
    ("additive masks let through",
     "if not mask.is_meta and not torch.equal(mask.to(attention_mask.dtype), attention_mask):", "if False:"),
    ("dropout in evaluation", "dropout_p=self.attn_dropout.p if self.training else 0.0",
     "dropout_p=self.attn_dropout.p"),
)  # fmt: skip

DEVICE = part(
    "attention.py",
    "device",
    "",
    ("mask made on the default device", "torch.ones(queries, keys, dtype=torch.bool, device=device)",
     "torch.ones(queries, keys, dtype=torch.bool)"),
)  # fmt: skip

CACHE = part(
    "cache.py",
    "cache",
    "05",
    ("two continuations share one place", "return self.used == start and end <=", "return end <="),
    ("a copy for every token", "room=max(2 * end, self._capacity)", "room=end"),
    ("written in place while gradients are on", "if torch.is_grad_enabled():  # autograd", "if False:  # autograd"),
    ("new positions before the old ones", "torch.cat([self[0], k], dim=1)", "torch.cat([k, self[0]], dim=1)"),
    ("keys in the place of values", "self._storage.k, self._storage.v)[index]",
     "self._storage.k, self._storage.k)[index]"),
    ("past lost when the storage grows", "        if past.length:\n", "        if False:\n"),
    ("past shows the new positions", "return stored[:, : self.length]", "return stored[:, : self._storage.used]"),
)  # fmt: skip

LINEAR = part(
    "linear.py",
    "linear",
    "",
    ("tokens and features exchanged", ".t().reshape(*x.shape[:-1], self.out_features)",
     ".reshape(*x.shape[:-1], self.out_features)"),
    ("quick way with gradients too", "if torch.is_grad_enabled() or not x.is_cpu", "if not x.is_cpu"),
    ("quick way never taken", "FEW = 4", "FEW = 0"),
)  # fmt: skip

FEED_FORWARD = part(
    "feed_forward.py",
    "feed_forward",
    "06",
    ("gate and up exchanged", "self.act_fn(self.gate_proj(x)) * self.up_proj(x)",
     "self.gate_proj(x) * self.act_fn(self.up_proj(x))"),
    ("sum for product", "self.act_fn(self.gate_proj(x)) * self.up_proj(x)",
     "self.act_fn(self.gate_proj(x)) + self.up_proj(x)"),
    ("no activation", "self.act_fn(self.gate_proj(x))", "self.gate_proj(x)"),
    ("activation of the config ignored", "ACTIVATIONS[config.hidden_act]", 'ACTIVATIONS["silu"]'),
    ("given width ignored", "intermediate_size or config.intermediate_size", "config.intermediate_size"),
    ("activation of the product", "self.act_fn(self.gate_proj(x)) * self.up_proj(x)",
     "self.act_fn(self.gate_proj(x) * self.up_proj(x))"),
)  # fmt: skip

GATE = part(
    "moe.py",
    "moe",
    "08",
    ("top-k before softmax", "topk_weight, topk_idx = probs.topk(self.k, dim=-1)",
     "topk_weight, topk_idx = logits.topk(self.k, dim=-1)\n        topk_weight = topk_weight.softmax(dim=-1)"),
    ("k weights not renormalized", "topk_weight = topk_weight / topk_weight.sum(dim=-1, keepdim=True)", "pass"),
    ("straight-through the wrong way round", "topk_weight.detach() if self.straight_through else topk_weight)",
     "topk_weight if self.straight_through else topk_weight.detach())"),
    ("aux with k left in", "/ (k * total.clamp(min=1))", "/ total.clamp(min=1)"),
    ("f from the probabilities", "f = reduce(chosen * counts,", "f = reduce(k * probs * counts,"),
    ("P from the choices", "p = reduce(probs * counts,", "p = reduce(chosen / k * counts,"),
    ("aux without its coefficient", "self.aux_loss = self.coefficient * load_balancing_loss(",
     "self.aux_loss = load_balancing_loss("),
    ("aux over the batch for sequences", '"sequence" if config.seq_aux else "batch"', '"batch"'),
    ("softmax over the tokens", "logits.softmax(dim=-1, dtype", "logits.softmax(dim=1, dtype"),
    ("padding counts", "torch.ones_like(probs[..., :1]) if token_mask is None else",
     "torch.ones_like(probs[..., :1]) if True else"),
    ("mean over the experts for the sum", "per_sequence = experts * (f * p).sum(dim=-1)",
     "per_sequence = experts * (f * p).mean(dim=-1)"),
    ("product of the sums", "per_sequence = experts * (f * p).sum(dim=-1)",
     "per_sequence = f.sum(dim=-1) * p.sum(dim=-1)"),
    ("no warning to who trains a dead router", "if trained and not self.straight_through and not self._warned:",
     "if False:"),
    ("router of MiniMind-2 drawn narrower", "a=math.sqrt(5))", "a=5)"),
    ("empty sequences count in the mean", "/ (total > 0).sum().clamp(min=1)", "/ total.numel()"),
)  # fmt: skip

DISPATCH = part(
    "moe.py",
    "moe ddp",
    "09",
    ("dispatch overwrites", ".index_add(0, token, weighted)", ".index_copy(0, token, weighted)"),
    ("idle experts at the end not counted", "bincount(minlength=len(self.experts))", "bincount()"),
    ("weights forgotten",
     'torch.cat(outputs) * rearrange(weight[order], "assignment -> assignment 1").to(tokens.dtype)',
     "torch.cat(outputs)"),
    ("slices of tokens not sorted", "slices = tokens[token].split(sizes)",
     "slices = tokens.repeat_interleave(self.k, dim=0).split(sizes)"),
    ("weights misaligned after the sort", "rearrange(weight[order],", "rearrange(weight,"),
    ("assignments mistaken for tokens", "token = order // self.k", "token = order % len(tokens)"),
    ("idle experts without a gradient", "keep_idle = torch.is_grad_enabled() or not len(tokens)",
     "keep_idle = not len(tokens)"),
    ("idle experts run without gradients too", "keep_idle = torch.is_grad_enabled() or not len(tokens)",
     "keep_idle = True"),
    ("shared experts replace the routed ones", "output = output + shared(x)", "output = shared(x)"),
)  # fmt: skip

BLOCK = part(
    "model.py",
    "parity model moe",
    "07",
    ("norm after", "x = x + attended\n        normed = self.post_attention_layernorm(x)",
     "x = self.post_attention_layernorm(x + attended)\n        normed = x"),
    ("input norm forgotten", "self.input_layernorm(x), position_embeddings", "x, position_embeddings"),
    ("residual of attention forgotten", "x = x + attended", "x = attended"),
    ("norms exchanged", "self.input_layernorm(x), position_embeddings",
     "self.post_attention_layernorm(x), position_embeddings"),
    ("stream added in place", "x = x + attended", "x += attended"),
    ("stream normed", "x = x + attended", "x = self.input_layernorm(x) + attended"),
    ("feed-forward from the old stream", "normed = self.post_attention_layernorm(x)",
     "normed = self.post_attention_layernorm(x - attended)"),
    ("residual of the feed-forward forgotten", "return x + self.mlp_dropout(fed), past",
     "return self.mlp_dropout(fed), past"),
    ("final norm forgotten", "return self.norm(x), tuple(presents)", "return x, tuple(presents)"),
    ("padding of the cached part to the router", "attention_mask[:, -x.shape[1] :]", "attention_mask[:, : x.shape[1]]"),
    ("aux of the last layer alone", "aux_loss = aux_loss + layer.mlp.aux_loss", "aux_loss = layer.mlp.aux_loss"),
)  # fmt: skip

CAUSAL_LM = part(
    "model.py",
    "model loss config",
    "00 10",
    ("only one expert active", "(len(module.experts) - module.k) * one_expert",
     "(len(module.experts) - 1) * one_expert"),
    ("labels beside logits_to_keep", "if labels is not None and (isinstance", "if False and (isinstance"),
    ("tie broken", "self.lm_head.weight = self.model.embed_tokens.weight",
     "self.lm_head.weight = nn.Parameter(self.model.embed_tokens.weight.detach().clone())"),
    ("tie lost when loading", "self.tie_weights()\n        if assign:", "if assign:"),
    ("tables left on meta after assign", "        if assign:  # the tables", "        if False:  # the tables"),
    ("tie lost on the way from meta", "self.tie_weights()\n        for module in", "for module in"),
    ("weights drawn from N(0, 1)", "module.weight.normal_(0, self.config.initializer_range)",
     "module.weight.normal_()"),
    ("the first logits for the last", "hidden[:, -logits_to_keep:]", "hidden[:, :logits_to_keep]"),
    ("double shift", "shifted_cross_entropy(logits, labels)",
     "shifted_cross_entropy(logits[:, :-1], labels[:, 1:])"),
    ("aux added to the loss", "shifted_cross_entropy(logits, labels)",
     "shifted_cross_entropy(logits, labels) + aux_loss"),
    ("tied matrix counted twice", "total = sum(parameter.numel() for parameter in model.parameters())",
     "total = sum(value.numel() for value in model.state_dict().values())"),
    ("every expert counted as active", "(len(module.experts) - module.k) * one_expert", "0 * one_expert"),
)  # fmt: skip

CONFIG = part(
    "config.py",
    "config",
    "06",
    ("8/3 for pi", 'fill("intermediate_size", math.ceil(self.hidden_size * math.pi / 64) * 64)',
     'fill("intermediate_size", math.ceil(self.hidden_size * 8 / 3 / 64) * 64)'),
)  # fmt: skip

ACTIVATIONS = part(
    "config.py",
    "feed_forward",
    "06",
    ("another activation under the name", '"silu": F.silu', '"silu": F.gelu'),
)  # fmt: skip

LOSS = part(
    "loss.py",
    "loss",
    "00 11",
    ("no shift", "F.pad(labels[:, 1:].long(), (0, 1), value=ignore_index)", "labels.long()"),
    ("ignored labels count as token 0",
     'F.cross_entropy(flat, rearrange(targets, "batch seq -> (batch seq)"), ignore_index=ignore_index)',
     'F.cross_entropy(flat, rearrange(targets.clamp(min=0), "batch seq -> (batch seq)"))'),
    ("nothing to predict gives NaN", "if not counted.any():", "if False:"),
    ("nothing to predict has no graph", "return logits[..., :0].sum(", "return torch.zeros(0).sum("),
    ("half-precision logits", "flat = flat.to(torch.promote_types(flat.dtype, torch.float32))", "pass"),
    ("two shifts", "F.pad(labels[:, 1:].long(), (0, 1), value=ignore_index)",
     "F.pad(labels[:, 2:].long(), (0, 2), value=ignore_index)"),
    ("labels rolled", "F.pad(labels[:, 1:].long(), (0, 1), value=ignore_index)", "labels.long().roll(-1, dims=1)"),
    ("nothing to predict is silent",
     'warnings.warn("no label to predict in this batch: the loss is 0 and teaches nothing", stacklevel=2)', "pass"),
    ("the size of the vocabulary passes as a label", "targets >= logits.shape[-1]", "targets > logits.shape[-1]"),
    ("mean over masked positions too",
     'return F.cross_entropy(flat, rearrange(targets, "batch seq -> (batch seq)"), ignore_index=ignore_index)',
     'return F.cross_entropy(flat, rearrange(targets, "batch seq -> (batch seq)"), ignore_index=ignore_index) * '
     "counted.float().mean()"),
)  # fmt: skip

GENERATION = part(
    "generation.py",
    "generation",
    "15",
    ("top-k beyond the vocabulary fails", "if k <= 0 or k >= logits.shape[-1]:", "if k <= 0:"),
    ("temperature 0 divides", "if not do_sample or temperature == 0:", "if not do_sample:"),
    ("draws ignore the generator", 'torch.multinomial(probs.to("cpu"), 1, generator=generator)',
     'torch.multinomial(probs.to("cpu"), 1)'),
    ("right padding accepted", "if not as_bool_mask(attention_mask)[:, -1].all():", "if False:"),
    ("top-p drops the crossing token", "dropped = before >= p", "dropped = before + probs > p"),
    ("top-p in the order of the sort", "torch.zeros_like(dropped).scatter(-1, order, dropped)", "dropped"),
    ("top-k keeps one more", "logits.topk(k, dim=-1)", "logits.topk(k + 1, dim=-1)"),
    ("repetition raises negative logits", "torch.where(logits > 0, logits / penalty, logits * penalty)",
     "logits / penalty"),
    ("repetition counts padding", "penalize_repetition(logits, ids, repetition_penalty, mask)",
     "penalize_repetition(logits, ids, repetition_penalty)"),
    ("temperature ignored", "torch.float32)) / temperature", "torch.float32))"),
    ("temperature after top-p", "keep_top_p(keep_top_k(logits, top_k), top_p)",
     "(keep_top_p(keep_top_k(logits * temperature, top_k), top_p) / temperature)"),
    ("a finished row writes on", "new = new.masked_fill(finished[:, None], stops[0])", "pass"),
    ("new tokens masked", "torch.ones_like(mask[:, :1])", "torch.zeros_like(mask[:, :1])"),
    ("sequences not grouped by prompt", "ids = input_ids.long().repeat_interleave(num_return_sequences, dim=0)",
     "ids = input_ids.long().repeat(num_return_sequences, 1)"),
    ("dropout while generating", "with evaluating(model), ExitStack()", "with ExitStack()"),
    ("the prompt's length forgotten", "if prompt + max_new_tokens > longest:", "if max_new_tokens > longest:"),
)  # fmt: skip

MICROSCOPE = part(
    "microscope.py",
    "microscope",
    "04",
    ("NaN is no difference", "if not largest <= rtol * scale:", "if largest > rtol * scale:"),
    ("blind to a class of the reader's own", "for home in (attention, sys.modules[__package__]):",
     "for home in (attention,):"),
    ("modes left changed", "stack.enter_context(evaluating(model))", "model.eval()"),
)  # fmt: skip

PRETRAINED = part(
    "pretrained.py",
    "pretrained",
    "12",
    ("missing names not said", "for name, shape in wanted.items() if name not in found]",
     "for name, shape in wanted.items() if False]"),
    ("tied matrix written twice", "return {name: value for name, value in weights.items() if name != HEAD}",
     "return {**weights, HEAD: weights[HEAD].clone()}"),
    ("a broken tie loses the head", "if not shared and not torch.equal(weights[HEAD], weights[EMBEDDING]):",
     "if False:"),
    ("files written in place", "with tempfile.TemporaryDirectory(prefix=\".unfinished-\", dir=folder) as name:",
     "for name in (str(folder),):"),
    ("only the owner can read", "shutil.copymode(unfinished / CONFIG_FILE, unfinished / WEIGHTS_FILE)", "pass"),
    ("the first shard only", "            return shards", "            return shards[:1]"),
    ("gate and up exchanged in the file", "gate, up = rearrange(", "up, gate = rearrange("),
    ("experts in turns", "(two inside) hidden -> two", "(inside two) hidden -> two"),
    ("pickles run code", "weights_only=True", "weights_only=False"),
    ("extra names are dropped", "for name, shape in found.items() if name not in wanted]",
     "for name, shape in found.items() if False]"),
    ("overflow becomes inf", "not torch.equal(cast.isfinite(), value.isfinite())", "False"),
    ("dropout after loading", "return model.eval()", "return model.train()"),
    ("two Parameters share memory", "        weights[HEAD] = weights[HEAD].clone()", "        pass"),
    ("the file's type is kept", "dtype: torch.dtype | None = torch.float32\n", "dtype: torch.dtype | None = None\n"),
)  # fmt: skip

PRETRAINED_CONFIG = part(
    "pretrained_config.py",
    "pretrained",
    "",
    ("YaRN always written", "    if _yarn_in_force(config):", "    if config.rope_scaling:"),
    ("YaRN that is not in force accepted", "if config.rope_scaling and not _yarn_in_force(config):", "if False:"),
    ("YaRN written as plain positions", '{**scaling, "rope_type": "yarn"}', '{**scaling, "rope_type": "default"}'),
    ("new rope parameters ignored", 'settings.get("rope_parameters") or ', ""),
    ("a MiniMind-2 written as Qwen3", 'return "qwen3" if config.qk_norm else "llama"', 'return "qwen3"'),
    ("shared experts dropped", "    if config.n_shared_experts:", "    if False:"),
    ("a Llama casts as a MiniMind-3", '"before_weight" if kind == "llama" else "after_weight"', '"after_weight"'),
    ("weight type not written", 'str(dtype).removeprefix("torch.")', '"bfloat16"'),
    ("biases dropped", '    "attention_bias": False,\n', ""),
    ("one K/V head for each query head", "shape[k][0] // head_dim", "shape[q][0] // head_dim"),
    ("untied taken for tied", 'HEAD not in weights or torch.equal(weights[HEAD], weights[EMBEDDING])', "True"),
    ("MiniMind-2 renormalizes one weight", 'known["norm_topk_prob"] = False', "pass"),
)  # fmt: skip

TOKENIZER = part(
    "tokenizer.py",
    "tokenizer data",
    "13",
    ("a user's marker is special", "self._plain.encode_special_tokens = True",
     "self._plain.encode_special_tokens = False"),
    ("half a character is shown", "self._utf8.decode(self._tokenizer.token_bytes(token))",
     'self._tokenizer.token_bytes(token).decode(errors="replace")'),
    ("flush loses the half character", 'rest = self._utf8.decode(b"", final=True)', 'rest = ""'),
)  # fmt: skip

BPE = part(
    "bpe.py",
    "tokenizer",
    "13",
    ("pairs cut in twos", "Counter(pairwise(ids))", "Counter(zip(ids[::2], ids[1::2], strict=False))"),
    ("new id is the rank", "256 + ranks[pair]", "ranks[pair]"),
    ("merges overlap", "            i += 2", "            i += 1"),
    ("ties by byte value", "return _byte_places()[token] if token < 256 else token", "return token"),
    ("equal pieces counted once", "pairs[pair] += sign * n * times[word]", "pairs[pair] += sign * n"),
    ("leftmost merge first", "key=lambda pair: ranks.get(pair, len(ranks)))",
     "key=lambda pair: pair not in ranks)"),
)  # fmt: skip

TRAINER = part(
    "training/trainer.py",
    "training",
    "14",
    ("mean of the micro-batches' means", "share, batch = group.tokens[self.micro] / group.total,",
     "share, batch = bool(group.tokens[self.micro]) / len(group.batches),"),
    ("clipped before the scale is off", "self.scaler.unscale_(self.optimizer)  # before clipping", "pass  #"),
    ("auxiliary loss forgotten", "(output.loss + output.aux_loss)", "output.loss"),
    ("evaluated with dropout", "self.model.eval()\n        try:", "self.model.train()\n        try:"),
    ("not a number goes on", "if not math.isfinite(value):", "if False:"),
    ("same dropout everywhere", "number = self.micro * processes.count() + processes.rank()", "number = 0"),
    ("caller's generator moved", "with torch.random.fork_rng(devices):", "with nullcontext():"),
    ("gradients never cleared", "self.optimizer.zero_grad(set_to_none=True)", "pass"),
    ("half an update stays", "self._end_group()  # whatever is half done", "pass  # whatever is half done"),
    ("interrupted anywhere", "with postponed_interrupt():", "with nullcontext():"),
    ("evaluation weighs batches", "sums = [sums[0] + loss.item() * tokens, sums[1] + tokens]",
     "sums = [sums[0] + loss.item(), sums[1] + 1]"),
    ("padding is load", 'return {"attention_mask": before_last_label(labels)} if mixture else {}', "return {}"),
    ("bfloat16 scaled too", 'enabled=settings.dtype == "float16"', 'enabled=settings.dtype != "float32"'),
)  # fmt: skip

PROCESSES = part(
    "training/trainer.py",
    "training_ddp",
    "",
    ("DDP's mean stays", "            loss = processes.count() * loss", "            loss = loss"),
    ("flag always in step", "nullcontext() if ends or self.parallel is self.model else self.parallel.no_sync()",
     "nullcontext()"),
    ("who has nothing stays away", "if not share and not everybody:", "if not share:"),
    ("one process stops alone", "self.stop = processes.largest(self.stop)", "pass"),
    ("labels counted in one process", "self._group.total = int(processes.add(self._group.total)[0])", "pass"),
)  # fmt: skip

BATCHES = part(
    "training/batches.py",
    "training training_ddp",
    "",
    ("leftover dropped", "math.ceil(self.micro_batches / size)", "max(1, self.micro_batches // size)"),
    ("every process the same", "for each in indices[rank::processes]]", "for each in indices[::processes]]"),
    ("the first label of a row counts", "(labels[:, 1:] != IGNORED)", "(labels != IGNORED)"),
    ("every epoch in the same order", 'derived_seed(self.seed, "order", epoch)', 'derived_seed(self.seed, "order", 0)'),
)  # fmt: skip

SCHEDULE = part(
    "training/schedule.py",
    "training",
    "10 14",
    ("climbs again after the end", "min(step, steps) - warm_up", "step - warm_up"),
    ("ends at zero", "FLOOR = 0.1", "FLOOR = 0.0"),
    ("the first update does not move", "base * (step + 1) / (warm_up + 1)", "base * step / (warm_up + 1)"),
    ("norms decay", '"weight_decay": 0.0}', '"weight_decay": weight_decay}'),
    ("matrices do not", "if parameter.ndim > 1]", "if parameter.ndim > 2]"),
)  # fmt: skip

CHECKPOINT = part(
    "training/checkpoint.py",
    "training",
    "",
    ("half a group's gradients lost", "    if trainer.micro:  # in the middle", "    if False:  # in the middle"),
    ("scaler forgotten", 'trainer.scaler.load_state_dict(state["scaler"])', "pass"),
    ("runs the code in a file", "weights_only=True)", "weights_only=False)"),
    ("optimizer forgotten", '    trainer.optimizer.load_state_dict(state["optimizer"])\n', ""),
    ("another run's checkpoint", "    if lines:\n", "    if False:\n"),
)  # fmt: skip

FILES = part(
    "files.py",
    "training tokenizer",
    "",
    ("written in place", 'temporary = path.with_name(f".{path.name}.unfinished")', "temporary = path"),
    ("what is half written stays", "temporary.unlink(missing_ok=True)", "pass"),
)  # fmt: skip

COMMAND = part(
    "training/__main__.py",
    "training_cli",
    "",
    ("log twice", 'if line.endswith("}") and json.loads(line)["step"] <= trainer.step]', 'if line.endswith("}")]'),
    ("every stop an interrupt", "return 128 + trainer.stop", "return 130"),
    ("learned weights not loaded", "from_pretrained(start, config) if start else", ""),
    ("resuming needs the folder of --from", 'if options.resume and name != "bytes" and', "if False and"),
)  # fmt: skip

DATA = part(
    "data.py",
    "data",
    "14",
    ("first answer token dropped", "[False] * (1 + len(header)) + [answer] * (len(content) + 1)",
     "[False] * (2 + len(header)) + [answer] * len(content)"),
    ("end token not learned", "[answer] * (len(content) + 1) + [False] * len(newline)",
     "[answer] * len(content) + [False] * (1 + len(newline))"),
    ("a turn's markers are markers", 'assistant\\n"], special=False)', 'assistant\\n"])'),
    ("labels shifted in the data too", "return ids, labels\n", "return ids, labels.roll(-1)\n"),
    ("answers truncated away stay", "if not any(learned[:length]):", "if not any(learned):"),
)  # fmt: skip

MUTANTS = [
    *(NORM + ROPE + TABLES + YARN + ATTENTION + DEVICE + CACHE + LINEAR + FEED_FORWARD + GATE + DISPATCH),
    *(BLOCK + CAUSAL_LM + CONFIG + ACTIVATIONS + LOSS + GENERATION + MICROSCOPE),
    *(PRETRAINED + PRETRAINED_CONFIG + BPE + TOKENIZER + DATA),
    *(TRAINER + PROCESSES + BATCHES + SCHEDULE + CHECKPOINT + COMMAND + FILES),
]
