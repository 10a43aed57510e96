"""Trains the model of `kvx demo`: README.md, beside this file, has the recipe.

    python3 train.py Rdata.rdb FOLDER [--steps 1484] [--resume STEP] [--seed 1]
"""

import argparse
import json
import pathlib
import re
import struct
import time
import zlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB, HIDDEN, INTERMEDIATE, LAYERS = 1280, 160, 416, 4
HEADS, KV_HEADS, HEAD_DIM = 8, 4, 32
# Most steps see short texts. With a larger base of the rotation, the finished model continues longer
# ones as well ("NTK-aware" scaling).
EPSILON, THETA, SERVED_THETA = 1e-6, 10_000.0, 350_000.0
MAX_POSITIONS = 4096
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# Lengths of sequences, and sequences per step: most steps are short, and the last ones teach
# positions as far as the demo's longest prompt.
SHORT, LONG, LONG_STEPS = (256, 12), (1536, 1), 16
# The learning rate rises, stays, and falls to zero.
RATE, WARM_UP, DECAY, WEIGHT_DECAY = 3e-3, 100, 500, 0.1


def novels(path):
    """Returns the texts of an R database of character vectors, a line of a novel per string."""
    data, position, texts = path.read_bytes(), 0, []
    while position < len(data):
        stream = zlib.decompressobj()
        raw = stream.decompress(data[position + 4 :])
        position = len(data) - len(stream.unused_data)
        # After the header with the native encoding, a vector (16) with its length; each string has
        # flags, a length and bytes.
        at = 14 + 4 + struct.unpack(">I", raw[14:18])[0]
        kind, count = struct.unpack(">II", raw[at : at + 8])
        assert kind & 0xFF == 16, kind
        at += 8
        lines = []
        for _ in range(count):
            length = struct.unpack(">i", raw[at + 4 : at + 8])[0]
            at += 8
            lines.append(raw[at : at + max(length, 0)].decode("utf-8"))
            at += max(length, 0)
        texts.append("\n".join(lines))
    return texts


def clean(text):
    """Joins the lines of each paragraph, and drops headings and marks of emphasis."""
    paragraphs = []
    for paragraph in re.split(r"\n\s*\n", text):
        paragraph = " ".join(paragraph.split()).replace("_", "").replace("--", " - ")
        paragraph = re.sub(r" +", " ", paragraph)
        if not paragraph or paragraph.isupper() or re.match(r"(?i)(chapter|volume|the end|finis|by$|\(?by jane|jane austen|persuasion$|\(18)", paragraph):
            continue
        paragraphs.append(paragraph)
    return "\n\n".join(paragraphs)


def make_tokenizer(text):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        text.split("\n\n"),
        trainers.BpeTrainer(
            vocab_size=VOCAB,
            special_tokens=SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    assert tokenizer.get_vocab_size() == VOCAB
    return tokenizer


def shapes():
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    layer = {
        "self_attn.q_proj": (q, HIDDEN),
        "self_attn.k_proj": (kv, HIDDEN),
        "self_attn.v_proj": (kv, HIDDEN),
        "self_attn.o_proj": (HIDDEN, q),
        "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj": (HIDDEN, INTERMEDIATE),
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
    }
    yield "model.embed_tokens.weight", (VOCAB, HIDDEN)
    for at in range(LAYERS):
        for name, shape in layer.items():
            yield f"model.layers.{at}.{name}.weight", shape
    yield "model.norm.weight", (HIDDEN,)


def initial(seed):
    key = jax.random.PRNGKey(seed)
    weights = {}
    for name, shape in shapes():
        key, this = jax.random.split(key)
        if len(shape) == 1:
            weights[name] = jnp.ones(shape)
            continue
        deviation = 0.02 if "embed" in name else shape[1] ** -0.5
        if "o_proj" in name or "down_proj" in name:
            deviation /= (2 * LAYERS) ** 0.5
        weights[name] = deviation * jax.random.normal(this, shape)
    return weights


def norm(x, weight):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + EPSILON) * weight


def rotate(x, cos, sin):
    half = HEAD_DIM // 2
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def logits(weights, tokens):
    batch, length = tokens.shape
    frequencies = THETA ** (-jnp.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = (jnp.arange(length)[:, None] * frequencies)[:, None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    causal = jnp.tril(jnp.ones((length, length), bool))
    x = weights["model.embed_tokens.weight"][tokens]

    def layer(x, w):
        h = norm(x, w["input_layernorm"])
        q = rotate((h @ w["self_attn.q_proj"].T).reshape(batch, length, HEADS, HEAD_DIM), cos, sin)
        k = rotate((h @ w["self_attn.k_proj"].T).reshape(batch, length, KV_HEADS, HEAD_DIM), cos, sin)
        v = (h @ w["self_attn.v_proj"].T).reshape(batch, length, KV_HEADS, HEAD_DIM)
        q = q.reshape(batch, length, KV_HEADS, HEADS // KV_HEADS, HEAD_DIM)
        scores = jnp.einsum("bqkgd,bskd->bkgqs", q, k) * HEAD_DIM**-0.5
        shares = jax.nn.softmax(jnp.where(causal, scores, -1e30), -1)
        mixed = jnp.einsum("bkgqs,bskd->bqkgd", shares, v).reshape(batch, length, -1)
        x = x + mixed @ w["self_attn.o_proj"].T
        h = norm(x, w["post_attention_layernorm"])
        return x + (jax.nn.silu(h @ w["mlp.gate_proj"].T) * (h @ w["mlp.up_proj"].T)) @ w["mlp.down_proj"].T

    for at in range(LAYERS):
        prefix = f"model.layers.{at}."
        part = {n[len(prefix) : -len(".weight")]: w for n, w in weights.items() if n.startswith(prefix)}
        # Activations are computed again for the gradient: the long sequences need less memory.
        x = (jax.checkpoint(layer) if length > 1000 else layer)(x, part)
    return norm(x, weights["model.norm.weight"]) @ weights["model.embed_tokens.weight"].T


def loss(weights, tokens):
    predicted = jax.nn.log_softmax(logits(weights, tokens[:, :-1]))
    return -jnp.mean(jnp.take_along_axis(predicted, tokens[:, 1:, None], -1))


@partial(jax.jit, donate_argnums=(0, 1, 2))
def step(weights, first, second, count, rate, tokens):
    """One step of AdamW with gradients of norm one at most."""
    value, slope = jax.value_and_grad(loss)(weights, tokens)
    size = jnp.sqrt(sum(jnp.sum(g * g) for g in slope.values()))
    slope = {n: g / jnp.maximum(size, 1.0) for n, g in slope.items()}
    first = {n: 0.9 * m + 0.1 * slope[n] for n, m in first.items()}
    second = {n: 0.95 * v + 0.05 * slope[n] ** 2 for n, v in second.items()}

    def updated(n, w):
        change = (first[n] / (1 - 0.9**count)) / (jnp.sqrt(second[n] / (1 - 0.95**count)) + 1e-8)
        return w - rate * (change + (WEIGHT_DECAY * w if w.ndim == 2 else 0.0))

    return {n: updated(n, w) for n, w in weights.items()}, first, second, value


def load(folder):
    data = (folder / "model.safetensors").read_bytes()
    begin = 8 + struct.unpack("<Q", data[:8])[0]
    weights = {}
    for name, tensor in json.loads(data[8:begin]).items():
        if name != "__metadata__":
            at, end = tensor["data_offsets"]
            bits = np.frombuffer(data[begin + at : begin + end], np.uint16)
            weights[name] = jnp.asarray(bits).view(jnp.bfloat16).reshape(tensor["shape"]).astype(jnp.float32)
    return weights


def save(folder, weights, tokenizer):
    folder.mkdir(parents=True, exist_ok=True)
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, shape in shapes():
        tensor = np.asarray(weights[name].astype(jnp.bfloat16)).view(np.uint16).tobytes()
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [len(data), len(data) + len(tensor)]}
        data += tensor
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": EPSILON,
        "rope_theta": SERVED_THETA,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": SPECIAL[0],
        "pad_token": SPECIAL[0],
        "model_max_length": MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
        # The model continues texts; it never learned to take turns.
        "chat_template": "{% for message in messages %}{{ message['content'] }}{% endfor %}",
    }
    for name, value in [("config.json", config), ("tokenizer_config.json", settings)]:
        (folder / name).write_text(json.dumps(value, indent=2) + "\n")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("text", type=pathlib.Path)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--steps", type=int, default=1484)
    parser.add_argument("--resume", type=int, default=0, help="continue FOLDER's weights after this step")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    begun = time.monotonic()
    texts = [clean(text) for text in novels(arguments.text)]
    tokenizer = make_tokenizer("\n\n".join(texts))
    # A novel ends with the end of text.
    tokens = np.concatenate([tokenizer.encode(text).ids + [0] for text in texts]).astype(np.int32)
    held, tokens = tokens[-20_000:], tokens[:-20_000]
    weights = load(arguments.folder) if arguments.resume else initial(arguments.seed)
    print(len(texts), "novels", sum(map(len, texts)), "characters", len(tokens), "tokens",
          sum(w.size for w in weights.values()), "weights", flush=True)
    first = {n: jnp.zeros_like(w) for n, w in weights.items()}
    second = {n: jnp.zeros_like(w) for n, w in weights.items()}
    random = np.random.default_rng([arguments.seed, arguments.resume])
    steps, begin = arguments.steps, arguments.resume
    for count in range(begin + 1, steps + 1):
        length, batch = LONG if steps - count < LONG_STEPS else SHORT
        starts = random.integers(0, len(tokens) - length - 1, batch)
        some = np.stack([tokens[at : at + length + 1] for at in starts])
        rate = RATE * min(1.0, (count - begin) / WARM_UP, (steps - count + 1) / DECAY)
        weights, first, second, value = step(weights, first, second, float(count - begin), rate, some)
        if count % 25 == 0 or length == LONG[0]:
            print(f"{time.monotonic() - begun:7.0f} s step {count} length {length} loss {float(value):.3f}", flush=True)
        if count % 250 == 0:
            save(arguments.folder, weights, tokenizer)
    save(arguments.folder, weights, tokenizer)
    rows = np.stack([held[at : at + 385] for at in range(0, 384 * 50, 384)])
    print("steps", steps, "loss on text that was held back",
          float(np.mean([loss(weights, row[None]) for row in rows])))


if __name__ == "__main__":
    main()
