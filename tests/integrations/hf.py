"""Small models of Hugging Face with weights drawn here, and batches for them; nothing is downloaded."""

from typing import Any

import torch
from torch import nn
from transformers import (
    BatchEncoding,
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    ViTConfig,
    ViTForImageClassification,
)

WORDS = ("[PAD]", "[CLS]", *"abcdefghijklmnopqrstuvwxyz")
_DEEP = {"hidden_size": 12, "intermediate_size": 16, "num_hidden_layers": 2}


def gpt2(**settings: Any) -> GPT2LMHeadModel:
    """Conv1D layers, a tied head, dropout."""
    sizes = {"vocab_size": len(WORDS), "n_positions": 16, "n_embd": 12, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, **settings))


def llama(**settings: Any) -> LlamaForCausalLM:
    """Rotary positions, gated MLPs, fewer keys than queries, a head of its own."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), **_DEEP, **heads, **settings))


def bert(**settings: Any) -> BertForSequenceClassification:
    """Norms after the layers, padding, a class for a whole sequence."""
    sizes = {"vocab_size": len(WORDS), "max_position_embeddings": 16, "num_attention_heads": 2, "num_labels": 3}
    return BertForSequenceClassification(BertConfig(**_DEEP, **sizes, **settings))


def vit(**settings: Any) -> ViTForImageClassification:
    sizes = {"image_size": 8, "patch_size": 4, "num_attention_heads": 2, "num_labels": 3}
    return ViTForImageClassification(ViTConfig(**_DEEP, **sizes, **settings))


def made(make: Any, **settings: Any) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make(**settings).train()  # a model is made in eval mode


def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[PAD]"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", cls_token="[CLS]")


def sequences(count: int, size: int = 4, seed: int = 1) -> list[BatchEncoding]:
    """Batches of tokens whose labels are themselves."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(count):
        start, step = torch.randint(2, 9, (2, size, 1), generator=generator)
        tokens = 2 + (start + step * torch.arange(9)) % (len(WORDS) - 2)
        batches.append(BatchEncoding({"input_ids": tokens, "attention_mask": tokens.ne(0).long(), "labels": tokens}))
    return batches


def padded(count: int, size: int = 4) -> list[BatchEncoding]:
    """Sequences of several lengths from a collator, each with a class."""
    generator = torch.Generator().manual_seed(1)
    collate = DataCollatorWithPadding(tokenizer())
    batches = []
    for _ in range(count):
        lengths = torch.randint(3, 9, (size,), generator=generator).tolist()
        rows = [torch.randint(2, len(WORDS), (n,), generator=generator).tolist() for n in lengths]
        batches.append(collate([{"input_ids": row, "label": row[0] % 3} for row in rows]))
    return batches


def pictures(count: int, size: int = 4) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "pixel_values": torch.randn(size, 3, 8, 8, generator=generator),
            "labels": torch.randint(3, (size,), generator=generator),
        }
        for _ in range(count)
    ]


KINDS = {"gpt2": (gpt2, sequences), "llama": (llama, sequences), "bert": (bert, padded), "vit": (vit, pictures)}
