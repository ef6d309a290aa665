"""Saving and loading: transformers reads what is written, what others wrote is read, and nothing else is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from reference import largest_difference, perturb, random_ids, tiny_config, tiny_model, to_transformers
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from minimind_core import MiniMindConfig, MiniMindForCausalLM
from minimind_core.pretrained import from_pretrained, load_config, save_pretrained

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
FIRST_Q = "model.layers.0.self_attn.q_proj.weight"
MOE = {"use_moe": True, "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 40,
    "beta_fast": 8,
    "beta_slow": 1,
    "attention_factor": 1.3,
}
MINIMIND_2 = {"qk_norm": False, "rms_norm_cast": "before_weight", "rms_norm_eps": 1e-5}
VARIANTS = {
    "dense": {},
    "untied": {"tie_word_embeddings": False},
    "wide heads": {"head_dim": 22, "hidden_act": "gelu"},
    "yarn": {"rope_scaling": YARN, "rope_theta": 1e4},
    "other ids": {"bos_token_id": 5, "eos_token_id": 6, "pad_token_id": 7},
    "big eps": {"rms_norm_eps": 0.05, "dropout": 0.1, "flash_attn": False},
    "moe": MOE,
    "moe, untied, k 1": {**MOE, "num_experts_per_tok": 1, "tie_word_embeddings": False},
    "moe, weights as they are": {**MOE, "norm_topk_prob": False, "router_gradient": "straight_through"},
    "llama": {**MINIMIND_2, "n_shared_experts": 1, "ffn_dropout": True},
}
CLASSES = {"llama": "LlamaForCausalLM", "moe": "Qwen3MoeForCausalLM"}
LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

pytestmark = pytest.mark.filterwarnings("error:.*comes without a config")


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    return model(random_ids(seq=60)).logits


def assert_same(a: torch.nn.Module, b: torch.nn.Module, tolerance: float = 2e-5):
    assert largest_difference(logits(a), logits(b)) < tolerance


def edit(folder: Path, **changes) -> Path:
    """config.json with other values; None takes a field out."""
    file = folder / "config.json"
    settings = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({name: value for name, value in settings.items() if value is not None}))
    return folder


def saved(folder: Path, model: MiniMindForCausalLM | None = None, **changes) -> Path:
    save_pretrained(model or tiny_model(**changes), folder)
    return folder


@pytest.mark.parametrize("name", VARIANTS)
def test_transformers_reads_it_and_so_do_we(name, tmp_path):
    ours = tiny_model(**VARIANTS[name])
    save_pretrained(ours, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    theirs, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    assert type(theirs).__name__ == CLASSES.get(name.split(",")[0], "Qwen3ForCausalLM")
    assert theirs.config.architectures == [type(theirs).__name__] and theirs.dtype == torch.float32
    assert_same(theirs.eval(), ours)
    for field in "bos_token_id eos_token_id pad_token_id tie_word_embeddings head_dim hidden_act".split():
        assert getattr(theirs.config, field) == getattr(ours.config, field)
    assert theirs.generation_config.eos_token_id == ours.config.eos_token_id
    again = from_pretrained(tmp_path)
    assert again.config == ours.config and not again.training
    assert torch.equal(logits(again), logits(ours))
    theirs.save_pretrained(tmp_path / "theirs")  # in their own words, with rope_parameters
    assert_same(from_pretrained(tmp_path / "theirs"), ours)


def test_the_tie_and_the_rotary_tables_survive(tmp_path):
    ours = tiny_model(rope_scaling=YARN)
    save_pretrained(ours, tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert HEAD not in names and EMBEDDING in names and not any("freqs" in name for name in names)
    again = from_pretrained(tmp_path)
    assert again.lm_head.weight is again.model.embed_tokens.weight and again.lm_head.weight.requires_grad
    assert torch.equal(again.model.freqs_cos, ours.model.freqs_cos) and not again.model.freqs_sin.is_meta
    again.to(torch.float64)  # nothing is left on the meta device
    untied = from_pretrained(saved(tmp_path / "untied", tie_word_embeddings=False))
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight


def test_minimind_2_is_a_llama_with_its_own_cast(tmp_path):
    config = MiniMindConfig.minimind_2_small(
        hidden_size=64, num_hidden_layers=1, vocab_size=97, max_position_embeddings=64
    )
    ours = perturb(MiniMindForCausalLM(config)).eval()
    save_pretrained(ours, tmp_path, dtype=torch.bfloat16)
    assert load_config(tmp_path) == config and load_config(tmp_path).rms_norm_cast == "before_weight"
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert theirs.dtype == torch.bfloat16
    norm, x = from_pretrained(tmp_path, dtype=None).model.norm, torch.randn(8, 64).bfloat16()
    assert torch.equal(norm(x), theirs.model.norm(x))
    edit(tmp_path, rms_norm_cast=None)
    assert load_config(tmp_path).rms_norm_cast == "before_weight"  # of any Llama


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({**MOE, "n_shared_experts": 2}, "2 shared experts in each layer, Qwen3-MoE has none.*torch.save"),
        ({**MOE, **MINIMIND_2}, "no QK-norm, Qwen3-MoE's have"),
    ],
)
def test_what_no_class_holds_is_refused(changes, reason, tmp_path):
    model = tiny_model(**changes)
    with pytest.raises(ValueError, match=reason):
        save_pretrained(model, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    torch.save(model.state_dict(), tmp_path / "kept.pth")  # the way that the error names
    assert torch.equal(logits(from_pretrained(tmp_path / "kept.pth", model.config)), logits(model))


def test_yarn_that_is_not_in_force_is_not_written(tmp_path):
    ours = tiny_model(rope_scaling={**YARN, "original_max_position_embeddings": 128})
    save_pretrained(ours, tmp_path)
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path).eval(), ours)
    assert load_config(tmp_path).rope_scaling is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dtypes(dtype, tmp_path):
    ours = tiny_model()
    save_pretrained(ours, tmp_path, dtype=dtype)
    assert next(ours.parameters()).dtype == torch.float32
    assert {value.dtype for value in load_file(tmp_path / "model.safetensors").values()} == {dtype}
    assert AutoModelForCausalLM.from_pretrained(tmp_path).dtype == dtype
    for asked, expected in ((None, dtype), (torch.float32, torch.float32), (torch.float64, torch.float64)):
        again = from_pretrained(tmp_path, dtype=asked)
        assert {p.dtype for p in again.parameters()} == {expected} and again.model.freqs_cos.dtype == torch.float32
    assert {p.dtype for p in from_pretrained(tmp_path).parameters()} == {torch.float32}
    save_pretrained(ours.to(dtype), tmp_path / "same")
    assert {p.dtype for p in from_pretrained(tmp_path / "same", dtype=None).parameters()} == {dtype}
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path / "same").eval(), ours, 0.05)


def test_dtypes_that_cannot_be(tmp_path):
    model = tiny_model()
    with torch.no_grad():
        model.model.norm.weight[0] = 70000
    with pytest.raises(ValueError, match=r"model.norm.weight reaches 70000, but torch.float16 ends at 65504"):
        save_pretrained(model, tmp_path, dtype=torch.float16)
    with pytest.raises(TypeError, match=r"dtype is torch.int8; give a float type"):
        save_pretrained(model, tmp_path, dtype=torch.int8)
    model.model.norm.half()
    with pytest.raises(ValueError, match=r"the model mixes torch.float16, torch.float32; choose one"):
        save_pretrained(model, tmp_path)
    assert not list(tmp_path.iterdir())


# what others wrote


def test_shards_written_by_transformers(tmp_path):
    ours = tiny_model(**MOE)
    to_transformers(ours).save_pretrained(tmp_path, max_shard_size="60KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2 and not (tmp_path / "model.safetensors").exists()
    assert_same(from_pretrained(tmp_path), ours)
    new = tiny_model(seed=1, **MOE)
    save_pretrained(new, tmp_path)  # beside the older shards and their index: the whole file is the one that counts
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path).eval(), new)
    assert_same(from_pretrained(tmp_path), new)
    (tmp_path / "model.safetensors").unlink()
    shards[1].unlink()
    with pytest.raises(FileNotFoundError, match=f"names {len(shards)} files, 1 of them are missing: {shards[1].name}"):
        from_pretrained(tmp_path)


def minimind_settings(config: MiniMindConfig) -> dict:
    """config.json as MiniMind's own class leaves it: what equals its base class's default is left out."""
    left_out = ("qk_norm", "tie_word_embeddings", "pad_token_id", "rms_norm_cast", "gate_init", "router_gradient")
    settings = {name: value for name, value in config.to_dict().items() if name not in left_out}
    return {**settings, "architectures": ["MiniMindForCausalLM"], "model_type": "minimind", "rope_scaling": None}


@pytest.mark.parametrize("changes", [{}, MOE, {"inference_rope_scaling": True, "max_position_embeddings": 4096}])
def test_minimind_folder_with_a_half_precision_bin(changes, tmp_path):
    ours = tiny_model(**changes).half().float()
    torch.save({name: value.half() for name, value in ours.state_dict().items()}, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text(json.dumps(minimind_settings(ours.config)))
    again = from_pretrained(tmp_path)
    assert again.config == ours.config and again.lm_head.weight is again.model.embed_tokens.weight
    assert torch.equal(logits(again), logits(ours))


@pytest.mark.parametrize("k", [1, 2])
def test_minimind_2_folder(k, tmp_path):
    changes = {"num_experts_per_tok": k, "norm_topk_prob": k > 1, "router_aux_loss_coef": 0.02, "vocab_size": 97}
    config = MiniMindConfig.minimind_2_moe(
        hidden_size=64, num_hidden_layers=2, max_position_embeddings=64, n_shared_experts=2, **changes
    )
    ours = perturb(MiniMindForCausalLM(config)).eval()
    settings = {
        **{name: value for name, value in minimind_settings(config).items() if name not in ("head_dim", "ffn_dropout")},
        "n_routed_experts": config.num_experts,
        "aux_loss_alpha": config.router_aux_loss_coef,
        "norm_topk_prob": True,  # which MiniMind-2 follows for k > 1 only
    }
    for name in ("num_experts", "router_aux_loss_coef", "moe_intermediate_size"):
        del settings[name]
    (tmp_path / "config.json").write_text(json.dumps(settings))
    torch.save(ours.state_dict(), tmp_path / "pytorch_model.bin")
    again = from_pretrained(tmp_path)
    assert again.config == config and torch.equal(logits(again), logits(ours))


def test_qwen3_folder_of_miniminds_script(tmp_path):
    ours = tiny_model()
    theirs = to_transformers(ours)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(theirs.config, name, None)
    theirs.save_pretrained(tmp_path)
    edit(tmp_path, rope_parameters=None, rope_theta=1e6)
    assert_same(from_pretrained(tmp_path), ours)
    config = load_config(tmp_path)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 0)
    assert config.rms_norm_cast == "after_weight"


def test_experts_stacked_in_one_tensor(tmp_path):
    ours = tiny_model(**MOE)
    torch.save(to_transformers(ours).state_dict(), tmp_path / "stacked.pth")
    assert_same(from_pretrained(tmp_path / "stacked.pth", ours.config), ours)


INFERRED = {
    "MiniMind-3": {},
    "MiniMind-3, untied, wide heads": {"tie_word_embeddings": False, "head_dim": 20},
    "MiniMind-3, experts": {**MOE, "num_experts_per_tok": 1, "intermediate_size": 40},
    "MiniMind-2": {**MINIMIND_2, "num_attention_heads": 8, "ffn_dropout": True},
}


@pytest.mark.parametrize("name", INFERRED)
def test_state_dict_without_a_config(name, tmp_path):
    ours = tiny_model(**INFERRED[name], max_position_embeddings=32768)
    torch.save({key: value.half().float() for key, value in ours.state_dict().items()}, tmp_path / "full_sft_64.pth")
    with pytest.warns(UserWarning, match=r"comes without a config.*rope_theta 1000000.0, max_posit") as caught:
        again = from_pretrained(tmp_path / "full_sft_64.pth")
    told = str(caught[0].message)
    assert name.split(",")[0] in told and ("num_experts_per_tok 1" in told) == again.config.use_moe
    assert ("num_attention_heads 8" in told) == (name == "MiniMind-2")
    assert caught[0].filename == __file__
    assert_same(again, ours, 0.02)
    for field in "vocab_size hidden_size num_attention_heads num_key_value_heads head_dim tie_word_embeddings".split():
        assert getattr(again.config, field) == getattr(ours.config, field)


def test_checkpoint_with_the_optimizer_beside(tmp_path):
    ours = tiny_model()
    torch.save({"model": ours.state_dict(), "optimizer": {"state": {}}, "step": 3}, tmp_path / "x_resume.pth")
    assert torch.equal(logits(from_pretrained(tmp_path / "x_resume.pth", ours.config)), logits(ours))


def test_a_file_beside_its_config(tmp_path):
    ours = tiny_model(rms_norm_eps=0.05)
    assert torch.equal(logits(from_pretrained(saved(tmp_path, ours) / "model.safetensors")), logits(ours))
    longer = ours.config.replace(rope_scaling=YARN)
    assert from_pretrained(tmp_path, longer).config is longer


def test_shared_memory_in_a_file_becomes_two_parameters(tmp_path):
    torch.save(tiny_model().state_dict(), tmp_path / "tied.pth")
    model = from_pretrained(tmp_path / "tied.pth", tiny_config(tie_word_embeddings=False))
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert model.model.embed_tokens.weight.abs().max() > 0
    model.lm_head.weight = model.model.embed_tokens.weight  # tied by hand against the config
    again = from_pretrained(saved(tmp_path / "both", model))
    assert torch.equal(again.lm_head.weight, again.model.embed_tokens.weight)


# what does not fit


def test_missing_unexpected_and_wrong_shapes_are_named(tmp_path):
    weights = load_file(saved(tmp_path) / "model.safetensors")
    kept = weights.pop(FIRST_Q)
    weights |= {"model.extra.weight": kept, "model.norm.weight": torch.ones(63), EMBEDDING: weights[EMBEDDING].int()}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="do not fit the config; nothing was done") as caught:
        from_pretrained(tmp_path)
    told = str(caught.value)
    assert f"1 missing:\n  {FIRST_Q} [64, 64]" in told and "1 unexpected:\n  model.extra.weight [64, 64]" in told
    assert "1 of another shape:\n  model.norm.weight is [63], the config says [64]" in told
    assert f"{EMBEDDING} is torch.int32" in told
    for name in list(weights)[:12]:
        del weights[name]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"1\d missing:(\n  model.+){8}\n  and \d+ more"):
        from_pretrained(tmp_path)


def test_untied_config_needs_both_ends_and_a_tied_one_equal_ends(tmp_path):
    with pytest.raises(ValueError, match=r"1 missing:\n  lm_head.weight \[97, 64\]"):
        from_pretrained(edit(saved(tmp_path), tie_word_embeddings=False))
    with pytest.raises(ValueError, match="differ in this state_dict, but the config ties them"):
        from_pretrained(edit(saved(tmp_path, tie_word_embeddings=False), tie_word_embeddings=True))
    broken = tiny_model()
    broken.lm_head.weight = torch.nn.Parameter(broken.lm_head.weight + 1)
    with pytest.raises(ValueError, match=r"differ, but the config ties them; call model.tie_weights\(\)"):
        save_pretrained(broken, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_full_disk_leaves_the_old_files(tmp_path, monkeypatch):
    import safetensors.torch

    saved(tmp_path)
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}

    def full(weights, file, metadata):
        raise safetensors.SafetensorError("I/O error: no space left")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(OSError, match="cannot be written: I/O error"):
        save_pretrained(tiny_model(), tmp_path)
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("kept", [0, 100, 0.5, -1])
def test_truncated_files(name, kept, tmp_path):
    file = saved(tmp_path) / name
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    if name == "pytorch_model.bin":
        (tmp_path / "model.safetensors").unlink()
    whole = file.read_bytes()
    kept = int(kept * len(whole)) if isinstance(kept, float) else kept
    file.write_bytes(whole[:kept])
    size = len(whole) - 1 if kept == -1 else kept
    with pytest.raises(ValueError, match=rf"{name} \({size} bytes\) cannot be read: it is cut short or damaged"):
        from_pretrained(tmp_path)


class Harmful:
    def __reduce__(self):
        return os.mkdir, ("harm",)


def test_pickles_run_no_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"model.norm.weight": Harmful()}, "bad.pth")
    with pytest.raises(ValueError, match="holds more than tensors"):
        from_pretrained("bad.pth", tiny_config())
    assert not Path("harm").exists()
    torch.save([torch.ones(2)], "list.pth")
    with pytest.raises(ValueError, match="holds no state dict"):
        from_pretrained("list.pth", tiny_config())
    torch.save({"a": torch.ones(2)}, "other.pth")
    with pytest.raises(ValueError, match=r"no MiniMind weights .* no matrix model.embed_tokens.weight.* it has a"):
        from_pretrained("other.pth")


@pytest.mark.parametrize(
    "settings, reason",
    [
        (GPT2Config(), "of type 'gpt2'; read here are qwen3, qwen3_moe, llama and minimind"),
        (LlamaConfig(attention_bias=True), "attention_bias is True; MiniMind has only False"),
        (
            LlamaConfig(rope_parameters={**LLAMA_3_ROPE, "rope_theta": 1e4}),
            "of rope_type 'llama3'.* plain ones and yarn",
        ),
        (Qwen3Config(use_sliding_window=True), "use_sliding_window is True; MiniMind has only False"),
        (Qwen3MoeConfig(decoder_sparse_step=2), "decoder_sparse_step is 2; MiniMind has only 1"),
        (Qwen3MoeConfig(mlp_only_layers=[0]), r"mlp_only_layers is \[0\]; MiniMind has only \[\]"),
        (Qwen3Config(hidden_act="gelu_pytorch_tanh"), "hidden_act is 'gelu_pytorch_tanh'; choose one of silu"),
    ],
)
def test_foreign_architectures(settings, reason, tmp_path):
    settings.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"config.json.*{reason}"):
        from_pretrained(tmp_path)


def test_a_plain_llama_and_qwen3_of_transformers_are_read(tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 97}
    sizes |= {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e4},
    }
    experts = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    for theirs in (
        LlamaForCausalLM(LlamaConfig(**sizes)),
        Qwen3ForCausalLM(Qwen3Config(**sizes)),
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts)),
    ):
        folder = tmp_path / type(theirs).__name__
        perturb(theirs).eval().save_pretrained(folder)
        assert_same(from_pretrained(folder), theirs)


def test_broken_configs(tmp_path):
    saved(tmp_path)
    with pytest.raises(ValueError, match=r"lacks rope_theta; take the model's complete config.json"):
        from_pretrained(edit(tmp_path, rope_theta=None))
    edit(tmp_path, rope_theta=1e6, rope_scaling={**YARN, "original_max_position_embeddings": 128})
    with pytest.raises(ValueError, match=r"max_position_embeddings 128 is not above YaRN's .* 128: transformers"):
        from_pretrained(tmp_path)
    edit(tmp_path, rope_scaling=None, eos_token_id=[2, 4])
    with pytest.warns(UserWarning, match=r"any of eos_token_id \[2, 4\]; only 2 is kept"):
        assert from_pretrained(tmp_path).config.eos_token_id == 2
    with pytest.raises(ValueError, match="quantization_config is"):
        from_pretrained(edit(tmp_path, quantization_config={"bits": 4}))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"config.json holds a list"):
        from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json is no JSON"):
        from_pretrained(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no config.json; give config="):
        from_pretrained(tmp_path)


def test_missing_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="neither a folder nor a file; download the model first"):
        from_pretrained("jingyaogong/minimind-3")
    (saved(tmp_path) / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"neither model.safetensors nor pytorch_model.bin"):
        from_pretrained(tmp_path)


# the folder


def test_a_failed_save_leaves_the_old_model(tmp_path, monkeypatch):
    first, second = tiny_model(seed=0), tiny_model(seed=1, head_dim=20)
    saved(tmp_path, first)

    def full_disk(weights, file, metadata):
        Path(file).write_bytes(b"half")
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("safetensors.torch.save_file", full_disk)
        with pytest.raises(OSError, match="No space left"):
            save_pretrained(second, tmp_path)
    assert torch.equal(logits(from_pretrained(tmp_path)), logits(first))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    loaded = from_pretrained(tmp_path, dtype=None)
    save_pretrained(second, tmp_path)  # while `loaded` may still be read from the old file
    assert torch.equal(logits(loaded), logits(first))
    assert torch.equal(logits(from_pretrained(tmp_path)), logits(second))


@pytest.mark.skipif(os.name == "nt", reason="permissions of POSIX")
def test_others_can_read_the_files(tmp_path):
    modes = {path.stat().st_mode for path in saved(tmp_path).iterdir()}
    assert len(modes) == 1 and modes.pop() & 0o777 == 0o666 & ~current_umask()


def current_umask() -> int:
    os.umask(mask := os.umask(0))
    return mask


def test_a_planned_model_and_foreign_parts_are_not_written(tmp_path):
    with torch.device("meta"):
        planned = MiniMindForCausalLM(tiny_config())
    with pytest.raises(
        ValueError, match=f"{len(planned.state_dict())} without values:\n  model.embed_tokens.weight is on"
    ):
        save_pretrained(planned, tmp_path)
    with pytest.raises(
        ValueError, match=r"of another shape:\n  .*gate_proj.weight is \[96, 64\], the config says \[80, 64\]"
    ):
        model = tiny_model()
        model.config = model.config.replace(intermediate_size=80)
        save_pretrained(model, tmp_path)
    assert not list(tmp_path.iterdir())


def test_random_numbers_are_left_alone(tmp_path):
    saved(tmp_path)
    state = torch.get_rng_state()
    from_pretrained(tmp_path)
    assert torch.equal(torch.get_rng_state(), state)


def test_loaded_only_on_use():
    code = (
        "import sys, minimind_core.pretrained; assert not {'safetensors', 'transformers'} & set(sys.modules); "
        "sys.modules['safetensors'] = None; minimind_core.pretrained._safetensors()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert 'pip install "minimind-core[pretrained]"' in done.stderr and "AssertionError" not in done.stderr
