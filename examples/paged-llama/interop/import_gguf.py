"""Converts a GGUF file of a Llama model into a Hugging Face folder, for `kvx serve` and vLLM.

python import_gguf.py MODEL.gguf FOLDER [--dtype float32]

Needs the package gguf. Quantized weights become bfloat16, or float32 without any rounding. It
converts models of the architecture `llama` with a byte-level BPE tokenizer, such as SmolLM2, and
stops with a message at anything that it would get wrong.
"""
import argparse
import json
import pathlib
import sys

import numpy
from gguf import GGUFReader, dequantize

BYTE_LEVEL = {
    "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True,
}
DIGITS = {"type": "Digits", "individual_digits": True}
# The divisions of a text before BPE, by `tokenizer.ggml.pre`.
PRE_TOKENIZERS = {
    "gpt-2": BYTE_LEVEL,
    "smollm": {"type": "Sequence", "pretokenizers": [DIGITS, BYTE_LEVEL]},
}
NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}
# `tokenizer.ggml.token_type`: special tokens, and others that are found before BPE.
CONTROL, USER_DEFINED = 3, 4


class File:
    """A GGUF file, whose keys exist or have a default."""

    def __init__(self, path):
        self.reader = GGUFReader(path)

    def get(self, key, default=None):
        field = self.reader.get_field(key)
        if field is None and default is None:
            sys.exit(f"the file has no {key}; it needs the metadata of a llama model")
        return default if field is None else field.contents()

    def number(self, key, default=None):
        # GGUF stores float32: 9.999999747378752e-06 is 1e-05.
        value = self.get(key, default)
        return float(str(numpy.float32(value))) if isinstance(value, float) else value


def refuse_what_is_not_converted(file):
    wanted = {"general.architecture": "llama", "tokenizer.ggml.model": "gpt2"}
    for key, value in wanted.items():
        if file.get(key) != value:
            sys.exit(f"{key} is {file.get(key)!r}; this script converts only {value!r}")
    pre = file.get("tokenizer.ggml.pre")
    if pre not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        sys.exit(f"tokenizer.ggml.pre is {pre!r}; this script converts only {known}")
    for key in ["add_bos_token", "add_eos_token", "add_space_prefix"]:
        if file.get(f"tokenizer.ggml.{key}", False):
            sys.exit(f"tokenizer.ggml.{key} is set, which this script does not convert")
    size = head_size(file)
    for key in ["llama.attention.value_length", "llama.rope.dimension_count"]:
        if file.number(key, size) != size:
            sys.exit(f"{key} is not the head's size {size}, which this script does not convert")
    scaling = [key for key in file.reader.fields if key.startswith("llama.rope.scaling")]
    if scaling:
        keys = ", ".join(scaling)
        sys.exit(f"the file scales positions ({keys}), which this script does not convert")
    for tensor in file.reader.tensors:
        hugging_face_name(tensor.name)


def head_size(file):
    heads = file.number("llama.attention.head_count")
    return file.number("llama.attention.key_length", file.number("llama.embedding_length") // heads)


def config(file, dtype):
    heads = file.number("llama.attention.head_count")
    tensors = {tensor.name for tensor in file.reader.tensors}
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "vocab_size": len(file.get("tokenizer.ggml.tokens")),
        "hidden_size": file.number("llama.embedding_length"),
        "intermediate_size": file.number("llama.feed_forward_length"),
        "num_hidden_layers": file.number("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.number("llama.attention.head_count_kv", heads),
        "head_dim": head_size(file),
        "max_position_embeddings": file.number("llama.context_length"),
        "rms_norm_eps": file.number("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": file.number("llama.rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": False, "mlp_bias": False, "torch_dtype": dtype,
        "bos_token_id": file.number("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.number("tokenizer.ggml.eos_token_id"),
    }


def tokenizer(file):
    tokens, types = file.get("tokenizer.ggml.tokens"), file.get("tokenizer.ggml.token_type")
    added = [
        {"id": at, "content": tokens[at], "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": types[at] == CONTROL}
        for at in range(len(tokens)) if types[at] in (CONTROL, USER_DEFINED)
    ]
    model = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {token: at for at, token in enumerate(tokens)},
        "merges": [merge.split(" ", 1) for merge in file.get("tokenizer.ggml.merges")],
    }
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": None, "pre_tokenizer": PRE_TOKENIZERS[file.get("tokenizer.ggml.pre")],
        "post_processor": None, "decoder": BYTE_LEVEL, "model": model,
    }


def tokenizer_config(file):
    tokens = file.get("tokenizer.ggml.tokens")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False,
        "model_max_length": file.number("llama.context_length"),
    }
    for kind in ["bos", "eos"]:
        config[f"{kind}_token"] = tokens[file.get(f"tokenizer.ggml.{kind}_token_id")]
    template = file.get("tokenizer.chat_template", "")
    return {**config, "chat_template": template} if template else config


def hugging_face_name(name):
    if name in NAMES:
        return NAMES[name]
    part = name.split(".")
    if len(part) == 4 and part[0] == "blk" and part[2] in LAYER_NAMES and part[3] == "weight":
        return f"model.layers.{part[1]}.{LAYER_NAMES[part[2]]}.weight"
    sys.exit(f"the file has a tensor {name}, which this script does not convert")


def values(tensor, settings):
    """Returns a tensor's numbers. GGUF interleaves the halves that the rotation combines."""
    numbers = dequantize(tensor.data, tensor.tensor_type).astype(numpy.float32)
    kind = tensor.name.split(".")[-2]
    if kind in ("attn_q", "attn_k"):
        heads = settings["num_attention_heads" if kind == "attn_q" else "num_key_value_heads"]
        halves = numbers.reshape(heads, -1, 2, numbers.shape[1]).swapaxes(1, 2)
        return numpy.ascontiguousarray(halves.reshape(numbers.shape))
    return numbers


def encoded(numbers, dtype):
    if dtype == "float32":
        return numbers.astype("<f4").tobytes()
    bits = numbers.view(numpy.uint32)
    # To the nearest, and between two to the even one.
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()


def write_weights(file, path, settings):
    dtype = settings["torch_dtype"]
    size = 4 if dtype == "float32" else 2
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for tensor in file.reader.tensors:
        begin, end = end, end + size * int(tensor.n_elements)
        header[hugging_face_name(tensor.name)] = {
            "dtype": "F32" if dtype == "float32" else "BF16",
            "shape": [int(side) for side in reversed(tensor.shape)], "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for tensor in file.reader.tensors:
            out.write(encoded(values(tensor, settings), dtype))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gguf", type=pathlib.Path)
    parser.add_argument("folder", type=pathlib.Path, help="a folder that does not exist yet")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    options = parser.parse_args()
    file = File(options.gguf)
    refuse_what_is_not_converted(file)
    settings = config(file, options.dtype)
    generation = {name: settings[name] for name in ["bos_token_id", "eos_token_id"]}
    files = {
        "config.json": settings, "generation_config.json": generation,
        "tokenizer.json": tokenizer(file), "tokenizer_config.json": tokenizer_config(file),
    }
    if options.folder.exists():
        sys.exit(f"{options.folder} exists; name a new folder")
    options.folder.mkdir(parents=True)
    for name, content in files.items():
        text = json.dumps(content, ensure_ascii=False, indent=1) + "\n"
        (options.folder / name).write_text(text, encoding="utf-8")
    write_weights(file, options.folder / "model.safetensors", settings)
    print(f"{options.folder}: {len(file.reader.tensors)} tensors as {options.dtype}")


if __name__ == "__main__":
    main()
