"""From the GGUF file of SmolLM2-135M-Instruct to a plain bf16 Hugging Face directory.

GGUF differs from the original in ways that are undone here: rows of the query and key projections are interleaved
for another form of rotary embedding, and the tokenizer lacks its rule that digits are split one by one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

from kvslim.models.progress import Steps

_OUTER_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SPECIAL_TOKEN = 3  # value of tokenizer.ggml.token_type


def convert(gguf_file: Path, directory: Path, steps: Steps) -> None:
    """Write config, generation config, weights and tokenizer to ``directory``, which exists.

    Weights are dequantized in float32 and rounded to bf16 once. The embedding is tied, so there is no output matrix.
    """
    reader = GGUFReader(gguf_file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = _config(fields)
    with steps.step("convert", total=len(reader.tensors)) as report:
        tensors = {}
        for done, packed in enumerate(reader.tensors, start=1):
            values = torch.tensor(dequantize(packed.data, packed.tensor_type))  # a copy: the file is mapped read-only
            tensors[_name(packed.name)] = _uninterleave(packed.name, values, config).to(torch.bfloat16).contiguous()
            report(done)
    with steps.step("save"):
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        config.save_pretrained(directory)
        GenerationConfig(
            bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
        ).save_pretrained(directory)
        _tokenizer(fields).save_pretrained(directory)


def _config(fields: dict[str, Any]) -> LlamaConfig:
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=fields["llama.vocab_size"],
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=fields["llama.attention.head_count"],
        num_key_value_heads=fields["llama.attention.head_count_kv"],
        head_dim=fields["llama.rope.dimension_count"],
        max_position_embeddings=fields["llama.context_length"],
        rms_norm_eps=fields["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        tie_word_embeddings=True,
        bos_token_id=fields["tokenizer.ggml.bos_token_id"],
        eos_token_id=fields["tokenizer.ggml.eos_token_id"],
        pad_token_id=fields["tokenizer.ggml.padding_token_id"],
        dtype="bfloat16",
    )


def _name(gguf_name: str) -> str:
    """The Hugging Face name of a tensor: ``blk.3.attn_q.weight`` is ``model.layers.3.self_attn.q_proj.weight``."""
    if gguf_name in _OUTER_NAMES:
        return _OUTER_NAMES[gguf_name]
    _, layer, part, kind = gguf_name.split(".")
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}"


def _uninterleave(gguf_name: str, values: Tensor, config: LlamaConfig) -> Tensor:
    """Bring the rows of each query or key head from (pair, half) order into (half, pair) order; leave the rest."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for part, count in heads.items():
        if f".{part}." in gguf_name:
            return values.view(count, -1, 2, values.shape[-1]).transpose(1, 2).reshape(values.shape)
    return values


def _tokenizer(fields: dict[str, Any]) -> PreTrainedTokenizerFast:
    """The tokenizer as published: byte-level BPE, digits one by one, turns end with ``<|im_end|>``."""
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    kinds: list[int] = fields["tokenizer.ggml.token_type"]

    def special(kind: str) -> str:
        index: int = fields[f"tokenizer.ggml.{kind}_token_id"]
        return tokens[index]

    core = Tokenizer(
        BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]],
        )
    )
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == _SPECIAL_TOKEN
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=special("bos"),
        eos_token=special("eos"),
        pad_token=special("padding"),
        unk_token=special("unknown"),
        chat_template=fields["tokenizer.chat_template"],
        model_max_length=fields["llama.context_length"],
        clean_up_tokenization_spaces=False,
    )
