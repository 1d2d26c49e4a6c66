"""One tiny model of each family that an engine takes, with weights large enough to tell tokens apart."""

from __future__ import annotations

from typing import Any

import torch
import transformers

WORDS = 96
_SIZES: dict[str, Any] = {"vocab_size": WORDS, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
_LLAMA: dict[str, Any] = {
    **_SIZES,
    **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "max_position_embeddings": 128},
}
CONFIGS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**_LLAMA),
    "qwen3": lambda: transformers.Qwen3Config(**_LLAMA, head_dim=8),
    "mixtral": lambda: transformers.MixtralConfig(**_LLAMA, num_local_experts=4, num_experts_per_tok=2),
    "gpt2": lambda: transformers.GPT2Config(**_SIZES, n_embd=32, n_layer=2, n_head=4, n_positions=128),
    "opt": lambda: transformers.OPTConfig(
        **_SIZES,
        **{"hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"max_position_embeddings": 128, "word_embed_proj_dim": 32},
    ),
}

_PLAIN = {name: size for name, size in _LLAMA.items() if name != "num_key_value_heads"}
_GPT: dict[str, Any] = {**_SIZES, **{"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "rotary_dim": 4}}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
# Also supported; the first ones have sliding-window attention over 8 tokens.
OTHERS: dict[str, Any] = {
    "mixtral of windows": lambda: transformers.MixtralConfig(
        **_LLAMA, sliding_window=8, num_local_experts=4, num_experts_per_tok=2
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **_LLAMA, head_dim=8, sliding_window=8, layer_types=["sliding_attention", "full_attention"]
    ),
    "mistral": lambda: transformers.MistralConfig(**_LLAMA, sliding_window=8),
    "phi": lambda: transformers.PhiConfig(**_LLAMA),
    "phi3": lambda: transformers.Phi3Config(**_LLAMA),
    "gemma": lambda: transformers.GemmaConfig(**_LLAMA, head_dim=8),
    "gemma2": lambda: transformers.Gemma2Config(**_LLAMA, head_dim=8, sliding_window=8),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**_PLAIN),
    "gptj": lambda: transformers.GPTJConfig(**_GPT),
    "codegen": lambda: transformers.CodeGenConfig(**_GPT),
    "stablelm": lambda: transformers.StableLmConfig(**_LLAMA),
    "olmo2": lambda: transformers.Olmo2Config(**_LLAMA),
    "olmoe": lambda: transformers.OlmoeConfig(**_LLAMA, num_experts=4, num_experts_per_tok=2),
    "qwen2": lambda: transformers.Qwen2Config(**_LLAMA),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(**_LLAMA, **_EXPERTS, shared_expert_intermediate_size=32),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**_LLAMA, **_EXPERTS, head_dim=8),
    "cohere": lambda: transformers.CohereConfig(**_LLAMA),
    "starcoder2": lambda: transformers.Starcoder2Config(**_LLAMA, sliding_window=8),
    "granite": lambda: transformers.GraniteConfig(**_LLAMA),
    "smollm3": lambda: transformers.SmolLM3Config(**_LLAMA),
    "glm4": lambda: transformers.Glm4Config(**_LLAMA, head_dim=8),
    "llama of yarn": lambda: transformers.LlamaConfig(**_LLAMA, rope_parameters=_YARN),
}
# Not supported by any engine.
REFUSED: dict[str, Any] = {
    "llama of dynamic positions": lambda: transformers.LlamaConfig(
        **_LLAMA, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    ),
    "mamba": lambda: transformers.MambaConfig(**_SIZES, hidden_size=32, num_hidden_layers=2, state_size=4),
    "lfm2": lambda: transformers.Lfm2Config(**_LLAMA, layer_types=["conv", "full_attention"]),
    "bloom": lambda: transformers.BloomConfig(**_SIZES, hidden_size=32, n_layer=2, n_head=4),
    "gpt_neo": lambda: transformers.GPTNeoConfig(
        **_SIZES,
        **{"hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 128, "window_size": 40},
        attention_types=[[["global", "local"], 1]],
    ),
}


def model(family: str, *, seed: int = 0, heads: int = 2, words: int = WORDS) -> Any:
    """`heads` are those of keys and values, where a family has them apart."""
    torch.manual_seed(seed)
    config = (CONFIGS | OTHERS | REFUSED)[family]()
    config.vocab_size = words
    if getattr(config, "num_key_value_heads", None) is not None:
        config.num_key_value_heads = heads
    made = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for param in made.parameters():
            if param.ndim == 2:
                param.mul_(5)
    return made


def encoder(head: str, *, seed: int = 0) -> Any:
    """BERT with the head of one of transformers' classes."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    labels = 2 if head == "BertForQuestionAnswering" else 3  # ends of an answer
    config = transformers.BertConfig(vocab_size=WORDS, max_position_embeddings=128, num_labels=labels, **sizes)
    return getattr(transformers, head)(config).eval()


def encoder_decoder(*, seed: int = 0) -> Any:
    """T5 with three layers that encode and two that decode; where more decode, transformers makes too small a cache."""
    torch.manual_seed(seed)
    config = transformers.T5Config(
        **{"vocab_size": WORDS, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 3, "num_decoder_layers": 2},
        **{"num_heads": 4, "decoder_start_token_id": 0, "eos_token_id": None, "pad_token_id": 0},
    )
    made = transformers.T5ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, param in made.named_parameters():
            if param.ndim == 2 and "shared" not in name:
                param.mul_(5)
    return made


def prompt(rows: int, length: int, *, padded: int = 0) -> dict[str, torch.Tensor]:
    """Tokens and their mask; the first row begins with `padded` tokens of padding."""
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(1, WORDS, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    ids[0, :padded] = mask[0, :padded] = 0
    return {"input_ids": ids, "attention_mask": mask}
