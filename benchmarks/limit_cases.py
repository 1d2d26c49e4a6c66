"""Models for `benchmarks.limits_kept`: small models of 20 transformers families, and two convolutional networks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

WIDTH, LAYERS, HEADS, VOCAB, LENGTH, BATCH = 64, 2, 4, 512, 64, 8
IMAGE, CLASSES = 32, 10


@dataclass(frozen=True)
class Case:
    """A model to train.

    Attributes:
        build: Makes it.
        batch: Makes the arguments of one step from a generator and a number of rows.
        rows: Rows of a batch.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator, int], dict[str, Tensor]]
    rows: int = BATCH


class Pooled(nn.Module):
    """A BERT of which only the last hidden states are used: the parameters of its pooler get no gradient."""

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the loss and the hidden states."""
        hidden = self.bert(input_ids).last_hidden_state
        return {"loss": hidden.sum(-1).sub(labels).square().mean(), "logits": hidden}


class UNet(nn.Module):
    """A U-Net with group normalisation, two levels down and up, and a concatenation at each level.

    Args:
        width: Channels of the first level.
    """

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.down = nn.ModuleList([_block(3, width), _block(width, 2 * width)])
        self.middle = _block(2 * width, 4 * width)
        self.up = nn.ModuleList([_block(6 * width, 2 * width), _block(3 * width, width)])
        self.head = nn.Conv2d(width, 3, 1)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the mean square error of an image that is repainted, and the image."""
        x = pixel_values
        kept: list[Tensor] = []
        for block in self.down:
            x = block(x)
            kept.append(x)
            x = nn.functional.max_pool2d(x, 2)
        x = self.middle(x)
        for block in self.up:
            x = nn.functional.interpolate(x, scale_factor=2.0)
            x = block(torch.cat([x, kept.pop()], 1))
        image = self.head(x)
        return {"loss": nn.functional.mse_loss(image, pixel_values), "logits": image}


def _block(inward: int, outward: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inward, outward, 3, padding=1),
        nn.GroupNorm(4, outward),
        nn.SiLU(),
        nn.Conv2d(outward, outward, 3, padding=1),
        nn.GroupNorm(4, outward),
        nn.SiLU(),
    )


def _tokens(generator: torch.Generator, rows: int) -> dict[str, Tensor]:
    tokens = torch.randint(3, VOCAB, (rows, LENGTH), generator=generator)
    return {"input_ids": tokens, "labels": tokens.clone()}


def _images(generator: torch.Generator, rows: int) -> dict[str, Tensor]:
    labels = torch.randint(0, CLASSES, (rows,), generator=generator)
    return {"pixel_values": torch.randn(rows, 3, IMAGE, IMAGE, generator=generator), "labels": labels}


# By family: its class, and the fields of its configuration that have unusual names.
_NAMES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
_SIZES = (VOCAB, WIDTH, LAYERS, HEADS, 4 * WIDTH)
_USUAL = dict(zip(_NAMES, _SIZES, strict=True))
# With `loss_type`, GPT-2 does not log a warning, at which Dynamo would break the graph.
_GPT = {"vocab_size": VOCAB, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "loss_type": "ForCausalLM"}
_KEY_VALUE = {**_USUAL, "num_key_value_heads": 2}
_SEQUENCE = {
    "vocab_size": VOCAB,
    "d_model": WIDTH,
    **{f"{part}_layers": 1 for part in ("encoder", "decoder")},
    **{f"{part}_attention_heads": HEADS for part in ("encoder", "decoder")},
    **{f"{part}_ffn_dim": 4 * WIDTH for part in ("encoder", "decoder")},
}
_FAMILIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", _GPT),
    "gpt_neo": (
        "GPTNeoForCausalLM",
        {
            **{"vocab_size": VOCAB, "hidden_size": WIDTH, "num_layers": LAYERS, "num_heads": HEADS},
            "attention_types": [[["global", "local"], 1]],
        },
    ),
    "gpt_neox": ("GPTNeoXForCausalLM", _USUAL),
    "gptj": ("GPTJForCausalLM", {**_GPT, "rotary_dim": 8}),
    "opt": ("OPTForCausalLM", {**_USUAL, "ffn_dim": 4 * WIDTH, "word_embed_proj_dim": WIDTH}),
    "bloom": ("BloomForCausalLM", {"vocab_size": VOCAB, "hidden_size": WIDTH, "n_layer": LAYERS, "n_head": HEADS}),
    "llama": ("LlamaForCausalLM", _KEY_VALUE),
    "mistral": ("MistralForCausalLM", _KEY_VALUE),
    "qwen2": ("Qwen2ForCausalLM", _KEY_VALUE),
    "qwen3": ("Qwen3ForCausalLM", {**_KEY_VALUE, "head_dim": 16}),
    "gemma": ("GemmaForCausalLM", {**_KEY_VALUE, "head_dim": 16}),
    "phi": ("PhiForCausalLM", _USUAL),
    "stablelm": ("StableLmForCausalLM", {**_USUAL, "num_key_value_heads": HEADS}),
    "bert": ("BertModel", _USUAL),
    "roberta": ("RobertaForMaskedLM", _USUAL),
    "distilbert": (
        "DistilBertForMaskedLM",
        {"vocab_size": VOCAB, "dim": WIDTH, "n_layers": LAYERS, "n_heads": HEADS, "hidden_dim": 4 * WIDTH},
    ),
    "albert": ("AlbertForMaskedLM", {**_USUAL, "embedding_size": 32}),
    "t5": (
        "T5ForConditionalGeneration",
        {**_USUAL, "d_model": WIDTH, "d_kv": 16, "d_ff": 4 * WIDTH, "num_layers": 1, "decoder_start_token_id": 0},
    ),
    "bart": ("BartForConditionalGeneration", _SEQUENCE),
    "vit": ("ViTForImageClassification", {**_USUAL, "image_size": IMAGE, "patch_size": 4, "num_labels": CLASSES}),
    "resnet": (
        "ResNetForImageClassification",
        {
            **{"embedding_size": 16, "hidden_sizes": [16, 32, 64, 128], "depths": [1, 1, 1, 1]},
            **{"layer_type": "basic", "num_labels": CLASSES},
        },
    ),
}


def _transformer(family: str) -> nn.Module:
    import transformers

    name, sizes = _FAMILIES[family]
    kind = getattr(transformers, name)
    transformers.logging.set_verbosity_error()  # special tokens are outside such a small vocabulary
    fields = {key: value for key, value in sizes.items() if key != "vocab_size" or family not in ("vit", "resnet")}
    model: nn.Module = kind(kind.config_class(**fields))
    return Pooled(model) if family == "bert" else model


CASES = {
    **{
        family: Case(partial(_transformer, family), _images if family in ("vit", "resnet") else _tokens)
        for family in _FAMILIES
    },
    "unet": Case(UNet, _images),
}
CONVOLUTIONS = ("resnet", "unet")
