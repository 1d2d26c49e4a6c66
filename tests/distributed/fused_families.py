"""Tiny models of families whose attention has fused or latent heads."""

from __future__ import annotations

from typing import Any

from torch import nn

VOCAB, WIDTH = 64, 32
DECODER: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}

FAMILIES = {
    "falcon-new": {"num_kv_heads": 2, "new_decoder_architecture": True},
    "falcon-alibi": {"multi_query": False, "alibi": True, "new_decoder_architecture": False},
    "falcon-mqa": {"multi_query": True, "new_decoder_architecture": False},
    "bloom": {},
    "phi3": {"num_key_value_heads": 2, "pad_token_id": 0},
    "deepseek": {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
                 "head_dim": 8, "num_key_value_heads": 4, "n_routed_experts": 4, "moe_intermediate_size": 16,
                 "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
}  # fmt: skip


def build_family(name: str) -> nn.Module:
    """Build the model of a name in `FAMILIES`."""
    import transformers as tf

    options = {key: value for key, value in DECODER.items() if key != "intermediate_size"} | FAMILIES[name]
    if name == "bloom":
        return tf.BloomForCausalLM(tf.BloomConfig(**options, hidden_dropout=0.0))
    if name == "phi3":
        return tf.Phi3ForCausalLM(tf.Phi3Config(**options, intermediate_size=64))
    if name == "deepseek":
        return tf.DeepseekV3ForCausalLM(tf.DeepseekV3Config(**options, intermediate_size=64))
    return tf.FalconForCausalLM(tf.FalconConfig(**options))
