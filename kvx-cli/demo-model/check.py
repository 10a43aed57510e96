"""Checks the answers of a server with the model of `kvx demo`: `kvx serve kvx-cli/demo-model`.

    python3 check.py Rdata.rdb http://127.0.0.1:8000

Prints how many of the words it writes are words of the novels, and the longest passages that it
repeats from them.
"""

import json
import pathlib
import re
import sys
import urllib.request

from train import clean, novels

ANSWERS, TOKENS, OPENING = 200, 48, 12


def words(text):
    return re.findall(r"[A-Za-z]+(?:'[a-z]+)?", text)


def longest_copy(written, text):
    """Returns the longest sequence of words of `written` that also occurs in `text`."""
    best = []
    for begin in range(len(written)):
        for end in range(begin + len(best) + 1, len(written) + 1):
            if f" {' '.join(written[begin:end])} " not in text:
                break
            best = written[begin:end]
    return best


def main():
    texts = [clean(text) for text in novels(pathlib.Path(sys.argv[1]))]
    spoken = words("\n".join(texts))
    known, all_words = set(spoken), f" {' '.join(spoken)} "
    # Openings from the text that was held back.
    held = texts[-1][-60_000:].split(" ")
    step = (len(held) - OPENING) // ANSWERS
    written, right, copies = 0, 0, []
    for at in range(ANSWERS):
        opening = " ".join(held[at * step : at * step + OPENING])
        body = {"prompt": opening, "max_tokens": TOKENS, "temperature": 0.5, "seed": 1, "ignore_eos": True}
        request = urllib.request.Request(
            sys.argv[2] + "/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            text = json.load(response)["choices"][0]["text"]
        # The first word may end the opening's last one, and the last one may be cut off.
        answer = words(text)[1:-1]
        written += len(answer)
        right += sum(word in known for word in answer)
        copies.append(longest_copy(answer, all_words))
    copies.sort(key=len)
    print(f"{right} of {written} words ({100 * right / written:.1f} %) are words of the novels")
    print(f"longest passages from the novels: median {len(copies[len(copies) // 2])} words, "
          f"longest {len(copies[-1])}: {' '.join(copies[-1])}")


if __name__ == "__main__":
    main()
