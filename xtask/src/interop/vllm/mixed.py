"""Runs real vLLMs and `kvx serve` in one fleet.

`mixed.py WORK BUILT PAGE CASES [PART]...`: WORK contains vLLM's environment, and BUILT the programs
of cargo. PAGE is docs/operations/mixed-fleet.md, with the command lines to run. CASES is a JSON file with
models and block sizes. Prints a table; exits with 1 if a check failed. Ends the processes that it
has started, by process id."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time

import numpy

import mooncake
from servers import (LENGTHS, Fleet, Load, Server, Vllm, abort, check, clean_environment, end, ports, prompts, row, still_in_use,
                     through, words_of)

WORK, BUILT, PAGE, CASES = sys.argv[1:5]
READER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "blocks.py")
HELD = tempfile.TemporaryDirectory(prefix="kvx-mixed-")
MODELS = HELD.name
BLOCKS = 256
LOAD = 10  # seconds after which kvx gives a load up; 120 by default
STOPPED = 15  # seconds for which a prefill is stopped
STEPS = ("not met", "prefilled", "idle")  # states of the requests when an engine is stopped or killed
LEASE = 40  # seconds after which a prefill holds no blocks any more
# In bfloat16 two tokens with logits this close may swap: four steps of the logits from 4 to 8.
CLOSE = 0.125
APART = {"float32": 1e-4, "bfloat16": 0.1}  # allowed difference of two engines, relative to the largest number
POSITIONS = 8  # compared positions of each answer in bfloat16, each after the reference's tokens
MARKS = {"KVX": '"KVX"', "MOONCAKE": '"MooncakeConnector"'}  # the page's lines for a backend contain this; other lines contain none
DEFAULTS = dict(arch="llama", layers=3, hidden=128, heads=4, kv_heads=2, head_dim=32, vocab=1024, max_positions=2048,
                dtype="float32", seed=1234, block_size=128, backend="UCX")
SHAPE = ("arch", "layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim", "vocab", "max_positions", "dtype", "seed", "init")


def cases():
    """Yields the cases of the file, with defaults, after making their models."""
    with open(CASES) as told:
        listed = json.load(told)
    for case in listed if isinstance(listed, list) else [listed]:
        case = DEFAULTS | {name.replace("-", "_"): value for name, value in case.items()}
        unknown = set(case) - set(SHAPE) - {"name", "block_size", "backend"}
        if unknown:
            sys.exit(f"{CASES}: {sorted(unknown)} are unknown; known: name, block_size, backend, {', '.join(SHAPE)}")
        case.setdefault("name", f"{case['arch']}-{case['heads']}-{case['kv_heads']}-{case['dtype']}")
        flags = [word for field in SHAPE if field in case for word in ("--" + field.replace("_", "-"), str(case[field]))]
        folder = os.path.join(MODELS, case["name"])
        subprocess.run([os.path.join(BUILT, "kvx"), "make-model", folder, *flags], check=True, stdout=subprocess.DEVNULL)
        yield case


class Kvx(Server):
    """A program of kvx: a server with the page's command line, or the proxy."""

    def __init__(self, case, name, words, environment):
        port, side = ports(2)
        words = [os.path.join(BUILT, words[0]), *words[1:], "--host", "127.0.0.1", "--port", str(port)]
        environment = dict(clean_environment(), VLLM_NIXL_SIDE_CHANNEL_PORT=str(side), VLLM_NIXL_SIDE_CHANNEL_HOST="127.0.0.1",
                           **environment)
        super().__init__(name, words, environment, os.path.join(WORK, "logs", case["name"], f"{name}.log"), MODELS, port=port)
        open(self.log, "w").close()


def nixl():
    """Returns the library of vLLM's own NIXL."""
    packages = os.path.join(WORK, "venv/lib", f"python3.{sys.version_info.minor}", "site-packages")
    found = [os.path.join(packages, folder, "libnixl_capi.so") for folder in sorted(os.listdir(packages)) if ".libs" in folder]
    return next(path for path in found if os.path.exists(path))


def of_backend(begin, backend):
    """Returns the words of the page's line that begins with `begin` and names this backend."""
    with open(PAGE) as page:
        lines = [line for line in page if line.startswith(begin)]
    return words_of(PAGE, next(line for line in lines if all((mark in line) == (name == backend) for name, mark in MARKS.items())))


def of_nixl(case):
    """Returns the environment in which NIXL finds its backend, in any process."""
    return {"NIXL_PLUGIN_DIR": BUILT} if case["backend"] == "KVX" else {"UCX_NET_DEVICES": "lo"}


def vllm(case, role, number=1, shim=True):
    words = of_backend("vllm serve MODEL", case["backend"])
    at = words.index("--kv-transfer-config") + 1
    words[at] = json.dumps(json.loads(words[at]) | {"kv_role": role})
    bootstrap = ports(1)[0] if case["backend"] == "MOONCAKE" else None
    variables = mooncake.of_vllm(bootstrap, shim) if bootstrap else of_nixl(case)
    server = Vllm(WORK, words, f"vllm-{number}", case["name"], variables, block=case["block_size"], models=MODELS, logs=case["name"])
    server.bootstrap = bootstrap
    return server


def kvx(case, role, number=1):
    words = [case["name"] if word == "MODEL" else word for word in of_backend("kvx serve MODEL", case["backend"])]
    at = words.index("--kv-transfer-config") + 1
    transfer = json.loads(words[at]) | {"kv_role": role}
    transfer["kv_connector_extra_config"]["load_timeout"] = LOAD
    words[at] = json.dumps(transfer)
    words += ["--block-size", str(case["block_size"]), "--num-gpu-blocks-override", str(BLOCKS), "--max-model-len", "1024",
              "--enable-prompt-tokens-details"]
    bootstrap = ports(1)[0] if case["backend"] == "MOONCAKE" else None
    variables = {} if case["backend"] == "KVX" else {"UCX_NET_DEVICES": "lo", "KVX_RIXL_LIB": nixl()}
    server = Kvx(case, f"kvx-{number}", words, mooncake.of_kvx(bootstrap, BUILT, MODELS) if bootstrap else variables)
    server.model, server.bootstrap = case["name"], bootstrap
    return server


def counts(prefill, decode):
    """Returns the server that counts moved bytes: with NixlConnector the decode, which reads; with MooncakeConnector the prefill, which writes."""
    return decode if prefill.bootstrap is None else prefill


def moved(case, server):
    """Returns the bytes that the server has counted."""
    if case["backend"] == "MOONCAKE" and isinstance(server, Vllm):
        return mooncake.written(server, block_bytes(case))
    return server.figure(["vllm:nixl_bytes_transferred_sum", "vllm:mooncake_bytes_transferred_sum"]) or 0


def block_bytes(case):
    size = {"float32": 4, "bfloat16": 2}[case["dtype"]]
    return case["layers"] * 2 * case["kv_heads"] * case["head_dim"] * case["block_size"] * size


def blocks(case, tokens):
    return -(-tokens // case["block_size"])


def bytes_become(case, server, before, wanted, what):
    """Checks that the server has moved exactly `wanted` bytes since `before`. vLLM counts them with a delay."""
    until = time.time() + 20
    while (got := moved(case, server) - before) != wanted and time.time() < until:
        time.sleep(0.2)
    return check(got == wanted, f"{what}: {got:.0f} bytes were moved, not {wanted}")


def computed(server):
    """Returns how many prompt tokens a vLLM computed; its answers do not report tokens from a prefill."""
    return server.figure(["vllm:prompt_tokens_by_source_total"], '"local_compute"') or 0


def margins(reference, prompt, tokens):
    """Returns the tokens of a vLLM alone, and the margin of each token over the second likeliest."""
    # Two tokens may have the same text, so they are identified by number.
    answer = reference.complete(prompt, tokens, logprobs=2, return_tokens_as_token_ids=True, cache_salt="by itself")[1]
    choice = answer["choices"][0]
    told = (sorted(each.values(), reverse=True) for each in choice["logprobs"]["top_logprobs"])
    return choice["token_ids"], [first - second for first, second, *_ in told]


def agree(case, tokens, plain, ahead):
    """Returns whether an answer equals the reference: in float32 all tokens, in bfloat16 up to the first close choice."""
    if case["dtype"] == "float32" or tokens == plain:
        return tokens == plain
    at = next(at for at, (one, other) in enumerate(zip(tokens, plain)) if one != other)
    print(f"{case['name']}: token {at} differs from vLLM's, whose margin was {ahead[at]:.3f}", flush=True)
    return ahead[at] <= CLOSE


def edges(case, prefill, decode, reference, what, seed):
    """Checks prompts around the block boundaries: tokens, bytes, and tokens that the decode computed."""
    equal, before, wanted, most, different = 0, moved(case, counts(prefill, decode)), 0, 0, set()
    asked, counted = prompts(seed), computed(decode)
    for prompt in asked:
        answer, (plain, ahead) = through(prefill, decode, prompt), margins(reference, prompt, 20)
        different.add(tuple(plain))
        wanted += blocks(case, len(prompt)) * block_bytes(case)
        if answer:
            equal += agree(case, answer["tokens"], plain, ahead)
            if decode is not reference:
                usage = answer["usage"]
                most = max(most, usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"])
    check(equal == len(asked), f"{what}: {equal} of {len(asked)} prompts are equal")
    check(len(different) > len(asked) // 2, f"{what}: the answers must differ from each other")
    bytes_become(case, counts(prefill, decode), before, wanted, what)
    if decode is reference:
        # Alone, the reference has computed all tokens of each prompt.
        most = (computed(decode) - counted - sum(map(len, asked))) / len(asked)
    check(most <= 1, f"{what}: a decode computed {most} tokens of a prompt")
    failed = [f"vllm:{name}_total" for name in ("nixl_num_failed_transfers", "mooncake_num_failed_transfers", "mooncake_num_failed_recvs")]
    check(not any(each.figure(failed) for each in (prefill, decode)), f"{what}: failed transfers")
    return f"{equal} of {len(asked)}", f"{wanted} bytes in {len(asked)} transfers", f"{most:g}"


def hits(case, way, prefill, decode, reference, what, seed):
    """Checks that blocks which both engines hold are neither computed nor moved again."""
    size, order = case["block_size"], prompts(seed, [900])[0]
    begin, whole = order[:3 * size + 5 if size < 128 else 2 * size + 5], order[:4 * size + 9 if size < 128 else 3 * size + 9]
    held = len(begin) // size
    before, _ = moved(case, counts(prefill, decode)), through(prefill, decode, begin)
    bytes_become(case, counts(prefill, decode), before, blocks(case, len(begin)) * block_bytes(case), f"{what}, the begin of a prompt")
    before, answer = moved(case, counts(prefill, decode)), through(prefill, decode, whole)
    plain, ahead = margins(reference, whole, 20)
    first = bool(answer) and agree(case, answer["tokens"], plain, ahead)
    check(first, f"{what}: after a prefix hit the tokens differ")
    read = blocks(case, len(whole)) - held
    bytes_become(case, counts(prefill, decode), before, read * block_bytes(case), f"{what}, with {held} blocks held")
    if answer and decode is not reference:
        missing = len(whole) - answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        check(missing <= 1, f"{what}, with {held} blocks held: the decode computed {missing} tokens")
    # MooncakeConnector does not report this to a decode.
    cached = held * size if prefill.bootstrap else answer and answer["params"].get("remote_prefill_cached_tokens")
    check(cached == held * size, f"{what}: the prefill found {cached} tokens of {held * size}")
    # With the same prompt again, the decode lacks at most the last, partial block.
    before, again = moved(case, counts(prefill, decode)), through(prefill, decode, whole)
    second = bool(again) and agree(case, again["tokens"], plain, ahead)
    check(second, f"{what}: the same prompt again has other tokens")
    bytes_become(case, counts(prefill, decode), before, block_bytes(case), f"{what}, the same prompt again")
    row(case["name"], case["backend"], size, f"{way}, {held} blocks held by both, then all", f"{first + second} of 2",
        f"{read} blocks of {blocks(case, len(whole))}, then 1", "")


def spoilt(case, prefill, decode, reference, what, seed):
    """Checks that the blocks of another prompt of this length give other tokens, so the blocks determine the answers. In bfloat16 a
    close first token may change anyway, so one of four prompts must differ at a token with a clear margin."""
    asked, noticed = prompts(seed, [300] * 8), []
    for one, other in zip(asked[:4], asked[4:]):
        params = prefill.prefill(other)[1]
        before = moved(case, counts(prefill, decode))
        status, answer = decode.complete(one, 20, kv_transfer_params=params)
        bytes_become(case, counts(prefill, decode), before, blocks(case, 300) * block_bytes(case), f"{what}, blocks of another prompt")
        check(status == 200, f"{what}, blocks of another prompt: {status} {str(answer)[:200]}")
        noticed.append(status == 200 and not agree(case, answer["choices"][0]["token_ids"], *margins(reference, one, 20)))
    check(all(noticed) if case["dtype"] == "float32" else any(noticed), f"{what}: spoilt KV is not noticed: {noticed}")


def positions(case, way, prefill, decode, reference, what, seed):
    """Compares bfloat16 answers position by position, each after the reference's tokens."""
    equal, count, apart = 0, 0, []
    for prompt in prompts(seed):
        plain, ahead = margins(reference, prompt, POSITIONS)
        for at in range(POSITIONS):
            answer = through(prefill, decode, prompt + plain[:at], 1)
            same = bool(answer) and answer["tokens"] == plain[at:at + 1]
            equal, count = equal + same, count + 1
            if not same:
                apart.append(ahead[at])
    check(max(apart, default=0) <= CLOSE, f"{what}: a different token despite a margin of {max(apart, default=0):.3f}")
    check(equal >= 0.9 * count, f"{what}: {equal} of {count} positions are equal")
    row(case["name"], case["backend"], case["block_size"], f"{way}, each position separately", f"{equal} of {count} positions",
        f"largest margin where they differ: {max(apart, default=0):.3f}", "")


def kv_of(case, server, prompt):
    """Returns the bytes of a prompt's blocks at a server, by layer and block, and the parameters for a decode."""
    params = server.prefill(prompt)[1]
    into = os.path.join(MODELS, "blocks.npy")
    read = subprocess.run([sys.executable, READER, json.dumps(params), case["backend"], into], timeout=200, capture_output=True,
                          text=True, env=clean_environment() | of_nixl(case))
    if read.returncode:
        raise RuntimeError(f"cannot read the blocks of {server.name}: {read.stderr[-2000:]}")
    return numpy.load(into), params


def numbers(case, blocks):
    """Returns the numbers that the bytes encode."""
    return blocks.view("<f4") if case["dtype"] == "float32" else (blocks.view("<u2").astype("<u4") << 16).view("<f4")


def laid(case, way, prefill, decode, what, seed):
    """Checks that blocks have the same bytes at the decode as at the prefill, and that both compute the same layout."""
    size = case["block_size"]
    carried, computed_twice = prompts(seed, [2 * size + 1] * 2)
    there, params = kv_of(case, prefill, carried)
    status, answer = decode.complete(carried, 1, kv_transfer_params=params)
    check(status == 200, f"{what}: {status} {str(answer)[:200]}")
    here, _ = kv_of(case, decode, carried)
    # Each engine computes the last token of a prompt itself.
    equal = check((there[:, :2] == here[:, :2]).all(), f"{what}: the blocks differ from those at the prefill")
    one, other = (numbers(case, kv_of(case, server, computed_twice)[0][:, :2]) for server in (prefill, decode))
    apart = abs(one - other).max() / abs(one).max()
    check(apart <= APART[case["dtype"]], f"{what}: keys and values differ by {apart:.2g} of the largest")
    row(case["name"], case["backend"], size, f"{way}, bytes of the blocks", "each byte" if equal else "no",
        f"{there[:, :2].size} bytes compared; if both compute them, they differ by {apart:.1g} of the largest", "")


def streamed(server, path, body):
    """Returns the tokens of a stream."""
    status, answer = server.ask("POST", path, body | {"stream": True})
    tokens = []
    for line in answer.decode().splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line[6:]).get("choices", []):
                tokens += choice.get("token_ids") or []
    return tokens if status == 200 else f"{status}: {answer[:300]}"


def address(server):
    """Returns a proxy's arguments for a prefill."""
    return [f"http://127.0.0.1:{server.port}", *([str(server.bootstrap)] if server.bootstrap else [])]


def their_proxy(prefill, decode, ends):
    """Returns the command line of vLLM's own proxy for this connector."""
    if prefill.bootstrap:
        return [os.path.join(WORK, "proxy/mooncake_connector_proxy.py"), *ends]
    return [os.path.join(WORK, "proxy/toy_proxy_server.py"), "--prefiller-host", "127.0.0.1", "--prefiller-port", str(prefill.port),
            "--decoder-host", "127.0.0.1", "--decoder-port", str(decode.port)]


def proxied(case, prefill, decode, reference, what, seed):
    """Sends chats and completions through kvx's and vLLM's proxies, with and without streaming."""
    ends = ["--prefill", *address(prefill), "--decode", *address(decode)[:1]]
    port = ports(1)[0]
    theirs = Server("their-proxy", [sys.executable, *their_proxy(prefill, decode, ends), "--host", "127.0.0.1", "--port", str(port)],
                    clean_environment(), os.path.join(WORK, "logs", case["name"], "their-proxy.log"), MODELS, port=port)
    theirs.health = "/openapi.json"
    ours = Kvx(case, "kvx-proxy", ["kvx", "proxy", *ends], {})
    base = dict(model=case["name"], max_tokens=20, temperature=0, return_token_ids=True, ignore_eos=True)
    words = "the quick brown fox jumps over the lazy dog and reads a block of keys and values".split()
    with Fleet(ours, theirs) as proxies:
        for number, proxy in enumerate(proxies):
            for chat in (False, True):
                text = " ".join(words[(seed + number * 5 + chat * 3 + at) % len(words)] for at in range(60))
                path = "/v1/chat/completions" if chat else "/v1/completions"
                body = base | ({"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text})
                before = moved(case, counts(prefill, decode))
                plain = json.loads(reference.ask("POST", path, body | {"cache_salt": "by itself"})[1])["choices"][0]["token_ids"]
                came = streamed(proxy, path, body)
                check(came == plain, f"{what}, {proxy.name}, {path} streamed: {came}, not {plain}")
                until = time.time() + 20
                while moved(case, counts(prefill, decode)) == before and time.time() < until:
                    time.sleep(0.2)
                check(moved(case, counts(prefill, decode)) > before, f"{what}, {proxy.name}, {path}: nothing was moved")
                status, answer = proxy.ask("POST", path, body)
                came = json.loads(answer)["choices"][0]["token_ids"] if status == 200 else answer[:300]
                check(came == plain, f"{what}, {proxy.name}, {path}: {came}, not {plain}")


def ways(servers):
    """Yields both directions, with their names."""
    for prefill, decode in (servers, servers[::-1]):
        yield f"{prefill.name[:-2]} to {decode.name[:-2]}", prefill, decode


def metrics(servers, what):
    """Checks that both export the same transfer metrics, with equal labels and buckets."""
    theirs, ours = (server.series("vllm:nixl_") for server in servers)
    check(len(theirs) > 8, f"{what}: vLLM exports no metrics of NIXL: {theirs}")
    check(ours == theirs, f"{what}: metrics of vLLM only: {sorted(theirs - ours)}, of kvx only: {sorted(ours - theirs)}")


def pairs(case, servers):
    """Runs all checks of a model, in both directions."""
    theirs, ours = servers
    for seed, (way, prefill, decode) in enumerate(ways(servers)):
        what = f"{case['name']}, {case['backend']}, {way}"
        equal, read, most = edges(case, prefill, decode, theirs, what, 10 + seed)
        row(case["name"], case["backend"], case["block_size"], way, equal, read, most)
        hits(case, way, prefill, decode, theirs, what, 20 + seed)
        spoilt(case, prefill, decode, theirs, what, 30 + seed)
        if case["backend"] != "MOONCAKE":
            # NIXL can read the blocks only if it registered them.
            laid(case, way, prefill, decode, what, 35 + seed)
        if case["dtype"] == "float32":
            proxied(case, prefill, decode, theirs, what, seed)
        else:
            positions(case, way, prefill, decode, theirs, what, 37 + seed)
    if case["backend"] == "MOONCAKE":
        check(not theirs.series("vllm:mooncake_"), f"{case['name']}: vLLM exports metrics of MooncakeConnector; compare them")
    else:
        metrics(servers, f"{case['name']}, {case['backend']}")
    if case["backend"] == "KVX":
        check("libplugin_KVX.so" in theirs.maps(), f"{case['name']}: KVX is not mapped in vLLM")
        check("libplugin_UCX.so" not in theirs.maps(), f"{case['name']}: NIXL's UCX is mapped in vLLM")
        check(not any("plugin" in each for each in ours.maps()), f"{case['name']}: NIXL is mapped in kvx: {ours.maps()}")


def equal_now(prefill, decode, reference, what, seed):
    """Checks that all prompts are right again."""
    answers = [(through(prefill, decode, prompt), reference.plain(prompt)) for prompt in prompts(seed)]
    equal = sum(bool(answer) and answer["tokens"] == plain for answer, plain in answers)
    check(equal == len(answers), f"{what}: then {equal} of {len(answers)} prompts are equal")
    return f"then {equal} of {len(answers)}"


def faults(case, servers):
    """Stops and kills vLLM at each step, and kvx as a prefill that a vLLM reads."""
    for way, prefill, decode in ways(servers):
        for fault in (signal.SIGSTOP, signal.SIGKILL):
            for victim in (prefill, decode):
                for step in STEPS if victim is servers[0] else ("prefilled", ) if victim is prefill else ():
                    hurt(case, way, servers, prefill, decode, victim, fault, step)


def hurt(case, way, servers, prefill, decode, victim, fault, step):
    """Stops or kills an engine at a step of four requests, under load; then continues or restarts it."""
    theirs, ours = servers
    what = f"{way}, {'prefill' if victim is prefill else 'decode'} {'stopped' if fault == signal.SIGSTOP else 'killed'}, {step}"
    seed = sum(map(ord, what))
    if step == "not met":
        # After its restart, the two engines have not completed a handshake.
        ours.stop()
        ours.start().wait()
    load = Load(prefill, decode, 3) if step == "prefilled" else None
    time.sleep(3 if load else 0)
    asked = [] if step == "idle" else prompts(seed, LENGTHS[4:8])
    waiting = [prefill.prefill(prompt)[1] for prompt in asked]
    answers, times = [None] * len(asked), [0] * len(asked)

    def ask(at):
        started = time.time()
        try:
            answers[at] = decode.complete(asked[at], 8, 200, kv_transfer_params=waiting[at])
        except OSError as error:
            answers[at] = "no answer", error
        times[at] = time.time() - started

    # At once, and within a lease: a vLLM reads blocks whose lease has ended, even if another
    # request uses them by then.
    asking = [threading.Thread(target=ask, args=(at,), daemon=True) for at in range(len(asked))]
    if victim is decode:
        [each.start() for each in asking]
        time.sleep(0.05)
    victim.signal(fault)
    if victim is prefill:
        [each.start() for each in asking]
    time.sleep(STOPPED)
    if fault == signal.SIGSTOP:
        victim.signal(signal.SIGCONT)
    else:
        victim.process.wait(10)
        victim.start().wait()
    [each.join() for each in asking]
    if load:
        time.sleep(3)
    outcomes = load.end() if load else ""
    check(decode.healthy() and prefill.healthy(), f"{what}: both engines must live")
    for prompt, (status, answer) in zip(asked, answers):
        right = status == 200 and answer["choices"][0]["token_ids"] == theirs.plain(prompt, 8)
        may_go = victim is decode and fault == signal.SIGKILL and status == "no answer"
        check(right or may_go or status in (500, 503), f"{what}: a wrong answer: {status} {str(answer)[:200]}")
    slowest, longest = max(times, default=0), mooncake.PATIENCE if prefill.bootstrap and decode is theirs else 60
    check(slowest < longest, f"{what}: an answer after {slowest:.0f} s")
    then = equal_now(prefill, decode, theirs, what, 50 + seed)
    used = still_in_use(servers, LEASE + 60)
    check(used == 0, f"{what}: {used} of a KV cache is still held")
    row(case["name"], case["backend"], case["block_size"], what, then,
        f"{[status for status, _ in answers]}, {slowest:.1f} s; load {outcomes}", "")


def aborts(case, servers, count=1000):
    """Runs clients that disconnect during requests, in both directions."""
    theirs = servers[0]
    for seed, (way, prefill, decode) in enumerate(ways(servers)):
        abort(prefill, decode, count)
        check(prefill.healthy() and decode.healthy(), f"aborts, {way}: both engines must live")
        then = equal_now(prefill, decode, theirs, f"aborts, {way}", 60 + seed)
        used = still_in_use(servers, LEASE + 60)
        check(used == 0, f"aborts, {way}: {used} of a KV cache is still held")
        row(case["name"], case["backend"], case["block_size"], f"{count} aborts, {way}", then,
            f"KV cache in use then: {used}", "")


def fleet(case):
    """Runs a vLLM and a kvx on each side, behind kvx's proxy."""
    members = (vllm(case, "kv_producer", 1), kvx(case, "kv_producer", 1), vllm(case, "kv_consumer", 2), kvx(case, "kv_consumer", 2))
    with Fleet(*members) as servers:
        words = ["kvx", "proxy", "--choice", "round-robin"]
        words += [word for each in servers[:2] for word in ("--prefill", *address(each))]
        words += [word for each in servers[2:] for word in ("--decode", *address(each)[:1])]
        counting = servers[:2] if servers[0].bootstrap else servers[2:]
        with Fleet(Kvx(case, "kvx-proxy", words, {})) as (proxy,):
            proxy.model, equal, asked = case["name"], 0, prompts(70) + prompts(71)[:15]
            wanted = sum(blocks(case, len(prompt)) for prompt in asked) * block_bytes(case)
            for number, prompt in enumerate(asked):
                if number == len(asked) // 2:
                    # Served by a decode alone, which rejects two greedy answers. It shifts the
                    # round robin, so that other pairs meet from here on.
                    proxy.complete(prompt[:4], 4, n=2)
                status, answer = proxy.complete(prompt, 20)
                plain = servers[0].plain(prompt)
                equal += check(status == 200, f"fleet: {status} {str(answer)[:200]}") and answer["choices"][0]["token_ids"] == plain
            check(equal == len(asked), f"fleet: {equal} of {len(asked)} prompts are equal")
            until = time.time() + 20
            while sum(bytes := [moved(case, each) for each in counting]) != wanted and time.time() < until:
                time.sleep(0.2)
            check(all(bytes) and sum(bytes) == wanted, f"fleet: {bytes} bytes were moved, not {wanted} together")
            if not servers[0].bootstrap:
                met = [len(each.said("connected to a worker of a peer")) for each in servers[3:]]
                check(met == [2], f"fleet: the decode of kvx has connected to {met} prefills, not 2")
            row(case["name"], case["backend"], case["block_size"], "a vLLM and a kvx on each side, kvx proxy",
                f"{equal} of {len(asked)}", f"counted by the {'prefills' if servers[0].bootstrap else 'decodes'}: {bytes} bytes", "")


def run(wanted):
    """Runs all parts, or the named ones: models by name, and for the first one also faults, aborts, fleet."""
    for number, case in enumerate(cases()):
        # With MooncakeConnector each engine has both roles.
        roles = ("kv_both", "kv_both") if case["backend"] == "MOONCAKE" else ("kv_producer", "kv_consumer")
        if number == 0 and case["backend"] == "MOONCAKE" and (not wanted or "bare" in wanted):
            mooncake.needs_a_card(case, vllm(case, "kv_both", shim=False))
        listed = [((case["name"], "pairs"), pairs)] + [(("faults",), faults), (("aborts",), aborts)] * (number == 0)
        parts = [part for names, part in listed if not wanted or set(names) & set(wanted)]
        if parts:
            with Fleet(vllm(case, roles[0]), kvx(case, roles[1])) as servers:
                for part in parts:
                    print(f"== {case['name']}: {part.__name__}", flush=True)
                    part(case, servers)
        if number == 0 and (not wanted or "fleet" in wanted):
            print(f"== {case['name']}: fleet", flush=True)
            fleet(case)


run(sys.argv[5:])
end(["model", "backend", "block", "from prefill to decode", "prompts equal to vLLM alone", "moved data",
     "tokens of a prompt that a decode computed"])
