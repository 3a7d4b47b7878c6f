"""A tiny, purely local model directory for ``vllm-rs serve``.

The Rust frontend never loads weights: it reads ``config.json``, the tokenizer and its chat template.  So a directory
without a single tensor is enough, and nothing is fetched from anywhere.

The tokenizer is byte-level BPE without merges (one token per byte): every text can be encoded, and the token count of a
prompt is its UTF-8 length, which makes assertions easy.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

BOS, EOS, PAD = "<s>", "</s>", "<pad>"
# Ids 259.. in a multimodal model directory.
VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")

CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}

MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}

PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 14,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "min_pixels": 3136,
    "max_pixels": 12845056,
    "image_mean": [0.48, 0.46, 0.41],
    "image_std": [0.27, 0.26, 0.28],
}


def build_tokenizer(*extra: str) -> Tokenizer:
    """Byte-level tokenizer: ids 0..2 are special, 3..258 are the 256 bytes, then ``extra``."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {PAD: 0, BOS: 1, EOS: 2}
    vocab.update({symbol: index + 3 for index, symbol in enumerate(alphabet)})
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (PAD, BOS, EOS, *extra)])
    return tokenizer


def _qwen2_vl(tokenizer: Tokenizer) -> dict[str, Any]:
    start, end, image, video = (tokenizer.token_to_id(token) for token in VISION)
    return {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        "vision_start_token_id": start,
        "vision_end_token_id": end,
        "image_token_id": image,
        "video_token_id": video,
        "vision_config": {"spatial_merge_size": 2, "patch_size": 14, "temporal_patch_size": 2},
    }


def make_model(path: Path, *, max_position_embeddings: int = 8192, moe: bool = False, multimodal: bool = False) -> Path:
    """Write the model directory and return its path.

    ``moe`` writes a Mixtral-like config: with more than one data-parallel rank the frontend then starts its in-process
    wave coordinator.  ``multimodal`` writes a Qwen2-VL-like one: GetModelInfo then reports ``supports_multimodal``.
    """
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer(*(VISION if multimodal else ()))
    tokenizer.save(str(path / "tokenizer.json"))
    config: dict[str, Any] = {
        **LLAMA,
        "vocab_size": tokenizer.get_vocab_size(),
        "max_position_embeddings": max_position_embeddings,
        **(MIXTRAL if moe else {}),
        **(_qwen2_vl(tokenizer) if multimodal else {}),
    }
    special = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD}
    files = {
        "config.json": config,
        "generation_config.json": {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **special,
            "model_max_length": max_position_embeddings,
            "chat_template": CHAT_TEMPLATE,
        },
        "special_tokens_map.json": special,
        **({"preprocessor_config.json": PREPROCESSOR} if multimodal else {}),
    }
    for name, value in files.items():
        (path / name).write_text(json.dumps(value, indent=2))
    return path
