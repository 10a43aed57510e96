"""Makes two tiny models with random weights and a tokenizer, offline: `models.py FOLDER`.

One is of float32, the other of bfloat16 with more layers and fewer heads."""

import json
import os
import sys

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 1024
MODELS = {
    "tiny-float32": dict(dtype=torch.float32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2),
    "tiny-bfloat16": dict(dtype=torch.bfloat16, num_hidden_layers=5, num_attention_heads=2, num_key_value_heads=1),
}


def tokenizer():
    """Returns a tokenizer with one word per number below the vocabulary's size; prompts are token ids."""
    words = {f"w{number}": number for number in range(VOCABULARY)}
    made = Tokenizer(models.WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="w0", bos_token="w1", eos_token="w2")


def make(folder, seed, dtype, **shape):
    torch.manual_seed(seed)
    config = LlamaConfig(vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, head_dim=32,
                         max_position_embeddings=2048, bos_token_id=1, eos_token_id=2, pad_token_id=0,
                         tie_word_embeddings=False, initializer_range=0.12, rms_norm_eps=1e-5, **shape)
    model = LlamaForCausalLM(config).to(dtype)
    model.config.dtype = dtype
    tokenizer().save_pretrained(folder)
    model.save_pretrained(folder, safe_serialization=True)


for seed, (name, shape) in enumerate(MODELS.items()):
    made = os.path.join(sys.argv[1], name)
    if not os.path.exists(os.path.join(made, "config.json")):
        make(made, 1234 + seed, **shape)
    print(json.dumps(made))
