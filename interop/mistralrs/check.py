"""Checks engines on mistral.rs that prefill for each other and for `kvx serve`: `check.py SERVER KVX WORK [PART]...`.

Prints a table; exits with 1 if a check failed. Ends the processes that it has started, by process id."""

import json
import os
import subprocess
import sys
import tempfile
import threading

from servers import Fleet, Server, check, clean_environment, end, ports, prompts, row, through

SERVER, KVX, WORK = map(os.path.abspath, sys.argv[1:4])
HELD = tempfile.TemporaryDirectory(prefix="kvx-mistralrs-")
MODELS = HELD.name
BLOCKS = 1024
ENDS = (256, 258)  # tokens that end an answer of these models
SHAPE = ("--layers 3 --hidden 128 --heads 4 --kv-heads 2 --head-dim 32 --vocab 1024 --max-positions 2048 --dtype float32 "
         "--seed 1234").split()


def server(name, words, environment=None, port=None):
    port = port or ports(1)[0]
    made = Server(name, words, clean_environment() | (environment or {}), os.path.join(WORK, f"{name}.log"), MODELS, port=port)
    open(made.log, "w").close()
    return made


def config(backend):
    transfer = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"backends": [backend]}}
    side = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(ports(1)[0])}
    return ["--kv-transfer-config", json.dumps(transfer)], side


def mistral(name, model, backend=None):
    port = ports(1)[0]
    words, side = config(backend) if backend else ([], {})
    made = server(name, [SERVER, model, str(port), str(BLOCKS), *words], side, port)
    made.model = model
    return made


def kvx(name, model, backend):
    port, (words, side) = ports(1)[0], config(backend)
    flags = ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "1024", "--enable-prompt-tokens-details"]
    made = server(name, [KVX, "serve", model, *flags, *words], side, port)
    made.model = model
    return made


def same(one, other):
    """Returns whether the tokens are equal, up to an end token: `kvx serve` continues after it, as requested."""
    shorter, longer = sorted((one, other), key=len)
    return len(shorter) > 0 and longer[:len(shorter)] == shorter and (len(shorter) == len(longer) or shorter[-1] in ENDS)


def plain(reference, prompt):
    return reference.complete(prompt, 20)[1]["choices"][0]["token_ids"]


def computed(answer):
    """Returns how many tokens of the prompt a decode computed. `kvx serve` counts the last one, which it recomputes, as cached."""
    usage = answer["usage"]
    return usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]


def judged(what, asked, answers, reference):
    expected = [plain(reference, prompt) for prompt in asked]
    equal = sum(bool(answer) and same(answer["tokens"], tokens) for answer, tokens in zip(answers, expected))
    most = max((computed(answer) for answer in answers if answer), default=None)
    check(equal == len(asked), f"{what}: {equal} of {len(asked)} prompts are equal")
    check(len(set(map(tuple, expected))) > len(asked) // 2, f"{what}: the answers must differ from each other")
    check(most is not None and most <= 1, f"{what}: a decode computed {most} tokens of a prompt")
    return f"{equal} of {len(asked)}", most


def edges(what, prefill, decode, reference, seed):
    """Sends prompts around the block boundaries, one after the other."""
    asked = prompts(seed)
    return judged(what, asked, [through(prefill, decode, prompt) for prompt in asked], reference)


def batch(what, prefill, decode, reference, seed, lengths):
    """Sends four prompts at a time, of one length, which mistral.rs batches, or of four, which take turns."""
    asked, answers = prompts(seed, lengths), [None] * 4

    def ask(at):
        answers[at] = through(prefill, decode, asked[at])

    clients = [threading.Thread(target=ask, args=(at,), daemon=True) for at in range(4)]
    [each.start() for each in clients]
    [each.join(120) for each in clients]
    return judged(f"{what}, four at a time of {lengths}", asked, answers, reference)[0]


def batches(what, prefill, decode, reference, seed):
    return ", ".join(batch(what, prefill, decode, reference, seed + at, lengths)
                     for at, lengths in enumerate(([300] * 4, [40, 129, 300, 513])))


def spoilt(what, prefill, decode, reference, seed):
    """Checks that the caches of another prompt give other tokens, so the caches determine the answer."""
    one, other = prompts(seed, [300, 300])
    answer = prefill.complete(other, 1, kv_transfer_params={"do_remote_decode": True})[1]
    status, answer = decode.complete(one, 20, kv_transfer_params=answer["kv_transfer_params"])
    tokens = status == 200 and answer["choices"][0]["token_ids"]
    check(tokens and not same(tokens, plain(reference, one)), f"{what}: wrong caches must change the answer: {status} {tokens}")


def proxied(what, prefill, decode, reference, seed):
    """Sends requests through kvx's proxy, with and without streaming."""
    port = ports(1)[0]
    words = [KVX, "proxy", "--host", "127.0.0.1", "--port", str(port), "--prefill", f"http://127.0.0.1:{prefill.port}",
             "--decode", f"http://127.0.0.1:{decode.port}"]
    with Fleet(server("proxy", words, port=port)) as (proxy,):
        proxy.model = prefill.model
        for prompt in prompts(seed, [100, 300]):
            status, answer = proxy.complete(prompt, 20)
            expected = reference.complete(prompt, 20)[1]["choices"][0]
            check(status == 200 and answer["choices"][0]["token_ids"] == expected["token_ids"], f"{what}, proxy: {status} {answer}")
            cached = status == 200 and answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            check(cached == len(prompt) - 1, f"{what}, proxy: {cached} tokens came from the prefill")
            body = dict(model=proxy.model, prompt=prompt, max_tokens=20, temperature=0, stream=True)
            status, answer = proxy.ask("POST", "/v1/completions", body)
            told = [json.loads(line[6:]) for line in answer.decode().splitlines() if line.startswith("data: {")]
            text = "".join(choice["text"] for chunk in told for choice in chunk.get("choices", []))
            # An unfinished character is never streamed.
            right = expected["text"].rstrip("\ufffd").lstrip()
            check(status == 200 and text.lstrip() == right, f"{what}, proxy, streamed: {status} {text!r}, not {right!r}")
            check(answer.decode().rstrip().endswith("data: [DONE]"), f"{what}, proxy, streamed: the end of the stream is missing")


def left(what, prefill, decode, reference, seed):
    """Checks that a client that disconnects does not affect others."""
    one, other = prompts(seed, [200, 300])
    for each in (prefill, decode):
        try:
            each.complete(one, 1000, 0.05)
            check(False, f"{what}: 1,000 tokens arrived before the client disconnected from {each.name}")
        except OSError:
            pass
    answer = through(prefill, decode, other)
    check(answer and same(answer["tokens"], plain(reference, other)), f"{what}: after a client has disconnected: {answer}")


def refused(what, prefill, seed):
    """Checks that a streamed prefill is rejected."""
    body = {"prompt": prompts(seed, [300])[0], "stream": True, "kv_transfer_params": {"do_remote_decode": True}}
    status, answer = prefill.ask("POST", "/v1/completions", body)
    check(status == 400, f"{what}: a streamed prefill is {status}: {answer[:200]}")


def run(wanted):
    """Runs all parts, or the named ones: models, backends, and kvx."""
    seed, chosen = 0, lambda all_of_them: [one for one in all_of_them if one in wanted] or all_of_them
    for model in chosen(["llama", "qwen2"]):
        subprocess.run([KVX, "make-model", os.path.join(MODELS, model), "--arch", model, *SHAPE], check=True,
                       stdout=subprocess.DEVNULL)
        for backend in chosen(["SHM", "TCP"]):
            seed += 10
            with Fleet(mistral(f"{model}-alone", model), mistral(f"{model}-{backend}-prefill", model, backend),
                       mistral(f"{model}-{backend}-decode", model, backend)) as (alone, prefill, decode):
                what = f"{model}, {backend}"
                equal, most = edges(what, prefill, decode, alone, seed)
                together = batches(what, prefill, decode, alone, seed + 1)
                spoilt(what, prefill, decode, alone, seed + 3)
                proxied(what, prefill, decode, alone, seed + 4)
                left(what, prefill, decode, alone, seed + 5)
                refused(what, prefill, seed + 5)
                row(model, backend, "mistral.rs to mistral.rs", equal, together, most)
                if wanted and "kvx" not in wanted:
                    continue
                with Fleet(kvx(f"{model}-{backend}-kvx", model, backend)) as (ours,):
                    for way, one, other in (("mistral.rs to kvx serve", prefill, ours), ("kvx serve to mistral.rs", ours, decode)):
                        equal, most = edges(f"{what}, {way}", one, other, alone, seed + 6)
                        together = batches(f"{what}, {way}", one, other, alone, seed + 7)
                        spoilt(f"{what}, {way}", one, other, alone, seed + 9)
                        row(model, backend, way, equal, together, most)


run(sys.argv[4:])
end(["model", "backend", "from prefill to decode", "prompts equal to one mistral.rs", "four at a time, of one length and of four", "tokens of a prompt that a decode reports as computed"])
