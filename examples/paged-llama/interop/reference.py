"""Prints what transformers computes for a model: logits, tokens, and the tokenizer's output. tests/it/reference.rs runs it.

Reads one JSON object per line, {"folder", "prompt", "count", "text", "messages"}; answers with one per line.
"""
import json
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

torch.set_num_threads(2)
for line in sys.stdin:
    asked = json.loads(line)
    folder, tokens = asked["folder"], list(asked["prompt"])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
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
