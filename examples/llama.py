"""An unmodified Llama of transformers, built from a config, that is called as `examples.gpt.GPT` is."""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from examples.gpt import GPTConfig


class Llama(nn.Module):
    def __init__(self, config: GPTConfig, longest: int) -> None:
        super().__init__()
        self.model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=config.vocab,
                hidden_size=config.width,
                intermediate_size=config.width * 8 // 3,  # three matrices here do the work of the GPT's two
                num_hidden_layers=config.layers,
                num_attention_heads=config.heads,
                max_position_embeddings=longest,
                bos_token_id=None,  # bytes have no special tokens
                eos_token_id=None,
            )
        )

    def logits(self, tokens: Tensor) -> Tensor:  # [batch, time] int64 -> [batch, time, vocab]
        return self.model(tokens, use_cache=False).logits

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:  # both [batch, time] int64 -> mean loss in nats
        return F.cross_entropy(self.logits(tokens).float().flatten(0, 1), targets.flatten())
