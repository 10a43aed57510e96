"""Prints what transformers computes for a model: logits, tokens, and the tokenizer's output. tests/it/reference.rs runs it.

Reads one JSON object per line, {"folder", "gguf", "prompt", "count", "text", "messages"}; answers with one per line.
The weights come from the file gguf if it is not null, the tokenizer always from the folder.
"""
import json
import os
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

torch.set_num_threads(2)
for line in sys.stdin:
    asked = json.loads(line)
    folder, tokens = asked["folder"], list(asked["prompt"])
    weights, more = folder, {}
    if asked["gguf"]:
        weights, file = os.path.split(asked["gguf"])
        more = {"gguf_file": file}
    model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32, attn_implementation="eager", **more).eval()
    logits, greedy = None, []
    with torch.no_grad():
        for _ in range(asked["count"]):
            last = model(torch.tensor([tokens])).logits[0, -1]
            logits = last.tolist() if logits is None else logits
            greedy.append(int(last.argmax()))
            tokens.append(greedy[-1])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.encode(asked["text"])
    chat = tokenizer.apply_chat_template(asked["messages"], tokenize=False, add_generation_prompt=True)
    answer = {"logits": logits, "greedy": greedy, "ids": ids, "back": tokenizer.decode(ids), "chat": chat}
    print(json.dumps(answer), flush=True)
