"""Runs unpatched vLLMs with KvxConnector, beside stock connectors and `kvx serve`.

`connector.py WORK BUILT PAGE SITE [PART]...`: WORK contains vLLM's environment and the models, BUILT
the programs of cargo, and SITE the Python package `kvx`. PAGE is docs/operations/vllm.md, with the
command line to run. Prints a table; exits with 1 if a check failed."""

import hashlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time

import versions
from servers import (Fleet, Server, Vllm, abort, check, children, clean_environment, end, ports, prompts, row, still_in_use,
                     through, words_of)

WORK, BUILT, PAGE, SITE = sys.argv[1:5]
MODELS = os.path.join(WORK, "models")


def vllm(name, role, model="tiny-float32", side=None, arguments=(), variables=(), **extra):
    """A vLLM with KvxConnector and the page's command line."""
    words = words_of(PAGE, "vllm serve MODEL ")
    at = words.index("--kv-transfer-config") + 1
    transfer = json.loads(words[at]) | {"kv_role": role}
    transfer |= {key: extra.pop(key) for key in ("engine_id", "kv_load_failure_policy") if key in extra}
    transfer["kv_connector_extra_config"] = transfer.get("kv_connector_extra_config", {}) | extra
    words[at] = json.dumps(transfer)
    server = Vllm(WORK, [*words, *arguments], f"kvx-{name}", model, {"PYTHONPATH": SITE, **dict(variables)})
    if side:
        server.environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(side)
    return server


def stock(name, role, model="tiny-float32", backend="UCX", side=None, arguments=(), **transfer):
    """A vLLM with its own NixlConnector."""
    variables = {"NIXL_PLUGIN_DIR": BUILT} if backend == "KVX" else {"UCX_NET_DEVICES": "lo"}
    extra = transfer.pop("kv_connector_extra_config", {}) | {"backends": [backend]}
    transfer |= {"kv_connector": "NixlConnector", "kv_role": role, "kv_connector_extra_config": extra}
    words = ["vllm", "serve", "MODEL", "--kv-transfer-config", json.dumps(transfer), *arguments]
    server = Vllm(WORK, words, f"stock-{name}", model, variables)
    if side:
        server.environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(side)
    return server


def serve(name, role, model="tiny-float32", backends=("SHM", "TCP")):
    """A `kvx serve` in a fleet with vLLMs."""
    port, side = ports(2)
    transfer = {"kv_connector": "NixlConnector", "kv_role": role,
                "kv_connector_extra_config": {"backends": list(backends), "kv_compat": "0.32"}}
    words = [os.path.join(BUILT, "kvx"), "serve", model, "--kv-transfer-config", json.dumps(transfer), "--host", "127.0.0.1",
             "--port", str(port), "--block-size", "128", "--attention-backend", "CPU_ATTN", "--num-gpu-blocks-override", "256",
             "--max-model-len", "1024", "--enable-prompt-tokens-details"]
    environment = dict(clean_environment(), VLLM_NIXL_SIDE_CHANNEL_PORT=str(side), VLLM_NIXL_SIDE_CHANNEL_HOST="127.0.0.1")
    server = Server(name, words, environment, os.path.join(WORK, "logs", f"{name}.log"), MODELS, port=port)
    server.model = model
    open(server.log, "w").close()
    return server


def equal(prefill, decode, reference, seed, what, lengths=None):
    """Sends prompts through a pair. Returns how many have the tokens of one server alone."""
    got = []
    for prompt in prompts(seed, *([lengths] if lengths else [])):
        answer = through(prefill, decode, prompt)
        got.append((answer and answer["tokens"], reference.plain(prompt)))
    right = sum(ours == plain for ours, plain in got)
    check(right == len(got), f"{what}: {right} of {len(got)} prompts are equal")
    check(len({tuple(plain) for _, plain in got}) > len(got) // 2, f"{what}: the answers must differ from each other")
    return f"{right} of {len(got)}"


def carried(decode, route):
    """Checks that vLLM counts transfers, and that they took this route."""
    until = time.time() + 15
    while not (transfers := decode.figure(["vllm:nixl_xfer_time_seconds_count"])) and time.time() < until:
        time.sleep(0.5)
    moved = decode.figure(["vllm:nixl_bytes_transferred_sum"])
    check(transfers and moved, f"{decode.name}: vLLM counts {transfers} transfers of {moved} bytes")
    check(not decode.figure(["vllm:nixl_num_failed_transfers_total"]), f"{decode.name}: vLLM counts failed transfers")
    if route:
        met = decode.said("connected to a worker of a peer")
        check(met and f"route={route}: chosen" in met[0], f"{decode.name}: {met}")
    return f"{transfers or 0:.0f}, {moved or 0:.0f} bytes"


def pairs(route):
    """A pair with KvxConnector: all prompts, with parts in the prefix cache, in chunks, and at once."""
    for model in ("tiny-float32", "tiny-bfloat16"):
        chunks = ["--max-num-batched-tokens", "256"]
        with Fleet(vllm("prefill", "kv_producer", model, backends=[route], arguments=chunks),
                   vllm("decode", "kv_consumer", model, backends=[route])) as (prefill, decode):
            what = f"{route} {model}"
            result = equal(prefill, decode, prefill, 1, what)
            # A prompt that continues one whose blocks both engines have.
            begin = prompts(2, (300,))[0]
            cached = through(prefill, decode, begin)
            longer = begin + prompts(3, (300,))[0]
            answer = through(prefill, decode, longer)
            check(answer and answer["tokens"] == prefill.plain(longer), f"{what}: a prompt with a cached beginning")
            check(cached is not None, f"{what}: the beginning")
            results = {}

            def client(number):
                prompt = prompts(100 + number, (500,))[0]
                answer = through(prefill, decode, prompt)
                results[number] = answer and answer["tokens"] == prefill.plain(prompt)

            clients = [threading.Thread(target=client, args=(number,)) for number in range(4)]
            [each.start() for each in clients]
            [each.join() for each in clients]
            check(all(results.values()), f"{what}: four requests at once: {results}")
            mapped = [line for line in open(f"/proc/{worker(decode)}/maps") if "memfd" in line and " rw-s " in line]
            check(mapped, f"{what}: the KV cache must lie in shareable memory")
            row(f"KvxConnector, {route}", model, result, carried(decode, route))


def worker(server):
    """Returns the process id of a vLLM's only worker."""
    for pid in children(server.process.pid):
        with open(f"/proc/{pid}/comm") as name:
            if "Worker" in name.read():
                return pid
    raise RuntimeError(f"{server.name} has no worker")


def beside_serve():
    """KvxConnector and `kvx serve`, both ways."""
    for route in ("SHM", "TCP"):
        with Fleet(vllm("vllm", "kv_both", backends=[route]), serve("serve", "kv_both", backends=[route])) as (one, other):
            row(f"KvxConnector to kvx serve, {route}", "tiny-float32", equal(one, other, one, 1, f"to serve {route}"), "")
            row(f"kvx serve to KvxConnector, {route}", "tiny-float32", equal(other, one, one, 2, f"from serve {route}"), carried(one, route))


def beside_stock():
    """KvxConnector and a stock NixlConnector whose NIXL has the backend KVX, both ways."""
    with Fleet(vllm("vllm", "kv_both", backends=["KVX"]), stock("stock", "kv_both", backend="KVX")) as (one, other):
        row("KvxConnector to stock with KVX", "tiny-float32", equal(one, other, one, 1, "to stock"), "")
        row("stock with KVX to KvxConnector", "tiny-float32", equal(other, one, one, 2, "from stock"), carried(one, None))


def times(count=20):
    """The time of the decode leg of a prompt of 900 tokens, beside stock over UCX, in turns."""
    with Fleet(vllm("prefill", "kv_producer", backends=["SHM"]), vllm("decode", "kv_consumer", backends=["SHM"]),
               stock("prefill", "kv_producer"), stock("decode", "kv_consumer")) as servers:
        taken = {"KvxConnector": [], "NixlConnector": []}
        for number in range(count + 2):
            turns = list(zip(taken, (servers[:2], servers[2:])))
            for name, (prefill, decode) in turns[:: -1 if number % 2 else 1]:  # none always comes after the other
                prompt = prompts(1000 + number, (900,))[0]
                started = time.time()
                status, params = prefill.prefill(prompt)
                check(status == 200, f"times: {status}")
                status, _ = decode.complete(prompt, 1, kv_transfer_params=params)
                check(status == 200, f"times: {status}")
                if number >= 2:
                    taken[name].append(1e3 * (time.time() - started))
        ours, theirs = (statistics.median(each) for each in taken.values())
        check(ours <= theirs, f"times: {ours:.1f} ms beside {theirs:.1f} ms")
        row("time to first token, 900 tokens", f"{ours:.1f} ms", f"NixlConnector over UCX: {theirs:.1f} ms", "")


def through_router():
    """What clients ask for, through `kvx proxy`, beside one server alone; and clients that leave. The fleet has a secret."""
    secret = os.path.join(WORK, "fleet.secret")
    if not os.path.exists(secret):
        subprocess.run([os.path.join(BUILT, "kvx"), "secret", secret], check=True, timeout=60)
    fleet = {"variables": {"KVX_SECRET_FILE": secret}}
    with Fleet(vllm("prefill", "kv_producer", **fleet), vllm("decode", "kv_consumer", **fleet)) as (prefill, decode):
        port = ports(1)[0]
        words = [os.path.join(BUILT, "kvx"), "proxy", "--prefill", f"http://127.0.0.1:{prefill.port}", "--decode",
                 f"http://127.0.0.1:{decode.port}", "--host", "127.0.0.1", "--port", str(port)]
        router = Server("router", words, clean_environment(), os.path.join(WORK, "logs", "router.log"), MODELS, port=port)
        router.model = prefill.model
        open(router.log, "w").close()
        with Fleet(router):
            texts = 0
            for number, more in enumerate([{}, {"logprobs": 3}, {"stop": ["w1", "w7"], "ignore_eos": False}, {"n": 2, "temperature": 0.5, "seed": 7}]):
                body = dict(model=router.model, prompt=prompts(50 + number, (300,))[0], max_tokens=20, **{"temperature": 0, **more})
                status, answer = router.ask("POST", "/v1/completions", body)
                plain, alone = prefill.ask("POST", "/v1/completions", body | {"cache_salt": "alone"})
                if not check(plain == 200, f"router: {more} at one server is {plain}: {alone[:300]}"):
                    continue
                ours = [choice["text"] for choice in json.loads(answer)["choices"]] if status == 200 else status
                theirs = [choice["text"] for choice in json.loads(alone)["choices"]]
                # Both requests of `n: 2` have one set of parameters: the second may find the blocks gone.
                check(ours == theirs or "n" in more and status >= 500, f"router: {more}: {ours} beside {theirs}")
                texts += ours == theirs
                if "logprobs" in more and status == 200:
                    near = [[choice["logprobs"]["token_logprobs"] for choice in json.loads(each)["choices"]][0] for each in (answer, alone)]
                    check(max(abs(a - b) for a, b in zip(*near)) < 1e-3, f"router: log probabilities {near}")
            body = dict(model=router.model, prompt=prompts(60, (300,))[0], max_tokens=20, temperature=0)
            _, streamed = router.ask("POST", "/v1/completions", body | {"stream": True})
            parts = [json.loads(line[6:]) for line in streamed.decode().splitlines() if line.startswith("data: {")]
            text = "".join(choice["text"] for part in parts for choice in part["choices"])
            alone = json.loads(prefill.ask("POST", "/v1/completions", body | {"cache_salt": "alone"})[1])["choices"][0]["text"]
            check(text == alone, f"router: streamed {text!r} beside {alone!r}")
            abort(prefill, decode, 200)
            result = equal(prefill, decode, prefill, 9, "after aborts")
            moved = decode.figure(["vllm:nixl_bytes_transferred_sum"])
            check(moved, f"router: {moved} bytes moved: the decode has computed the prompts itself")
            refused = decode.figure(["vllm:kvx_num_refused_params_total"])
            check(refused == 0, f"router: the decode has refused the parameters of {refused} requests")
            used = still_in_use((prefill, decode))
            check(used == 0, f"router: {used} of a KV cache is still held")
            row("kvx proxy: logprobs, stop, n, stream; 200 aborts", "tiny-float32", result, f"{texts + (text == alone)} of 5 texts equal")


def script(name):
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), name)


def unit(version=versions.INSTALLED):
    """vLLM's own unit tests."""
    done = subprocess.run([sys.executable, script("unit.py"), WORK, SITE, version], stdout=subprocess.PIPE, text=True, timeout=1200)
    print(done.stdout, flush=True)
    check(done.returncode == 0, f"the unit tests of vLLM {version}")
    row(f"unit tests of vLLM {version}", "", done.stdout.strip().splitlines()[-1].strip("= "), "")


def of_version(version):
    """A pair of another version: all prompts, and a decode that comes after the blocks were reused."""
    folder = versions.fetch(WORK, version)
    variables = {"PYTHONPATH": f"{SITE}:{folder}"} if folder else {}
    options = dict(variables=variables, kv_lease_duration=LEASE, backends=["SHM"])
    with Fleet(vllm("prefill", "kv_producer", **options),
               vllm("decode", "kv_consumer", **options, kv_load_failure_policy="recompute")) as (prefill, decode):
        for server in (prefill, decode):
            runs = json.loads(server.ask("GET", "/version", None)[1])["version"]
            check(runs == version, f"{server.name} is {runs}, not {version}")
        result = equal(prefill, decode, prefill, 1, version)
        moved = carried(decode, "SHM")
        memory = decode.said("KvxConnector: the KV cache lies in")[0].rpartition(" lies in ")[2].split(",")[0]
        check((memory == "shared memory") == (version != "0.30.0"), f"{version}: the KV cache lies in {memory}")
        pair = Troubles(f"{version}", prefill, decode)
        made = pair.prefilled(3)
        time.sleep(LEASE + 2)
        pair.reuse()
        late = [through_decode(decode, *each) for each in made]
        check(all(late), f"{version}: decodes that come late: {late}")
        stale = decode.figure(["vllm:kvx_num_stale_loads_total"])
        check(stale == len(made), f"{version}: vLLM counts {stale} stale loads of {len(made)}")
        check(prefill.healthy() and decode.healthy(), f"{version}: an engine has ended")
        row(f"a pair of vLLM {version}, in {memory}", "tiny-float32", f"{result}; {sum(late)} of {len(late)} late", moved)


def through_decode(decode, prompt, params, plain):
    """Returns whether a decode with these parameters has the tokens of one server alone."""
    status, answer = decode.complete(prompt, 12, 120, kv_transfer_params=params)
    return status == 200 and answer["choices"][0]["token_ids"] == plain[:12]


# Imports kvx.vllm in a vLLM of an untested version, and in one without a module that it needs.
UNTESTED = """
import sys, types, vllm

vllm.__version__ = "0.99.1"
sys.modules["vllm.v1.metrics.utils"] = None
try:
    import kvx.vllm
except ImportError as error:
    print("refused:", error)
del sys.modules["vllm.v1.metrics.utils"]
import kvx.vllm

parallel = types.SimpleNamespace(distributed_executor_backend=None, prefill_context_parallel_size=1)
transfer = types.SimpleNamespace(kv_connector_extra_config={})
kvx.vllm._check(types.SimpleNamespace(model_config=None, parallel_config=parallel, kv_transfer_config=transfer))
"""


def untested():
    """What KvxConnector says in versions that were not tested."""
    environment = dict(clean_environment(), PYTHONPATH=SITE, VLLM_TARGET_DEVICE="cpu", VLLM_NO_USAGE_STATS="1")
    done = subprocess.run([sys.executable, "-c", UNTESTED], env=environment, capture_output=True, text=True, timeout=900)
    said, ours = done.stdout + done.stderr, ", ".join(version.rpartition(".")[0] for version in versions.VERSIONS)
    check(done.returncode == 0, said[-2000:])
    for words in ("refused: KvxConnector was", "KvxConnector was"):
        check(f"{words} tested with vLLM {ours}, and this is 0.99.1" in said, f"a vLLM that was not tested: {said[-2000:]}")
    row("an untested vLLM", "", "a warning, and an error where it lacks something", "")


def all_versions():
    """Each version of vLLM: its own unit tests, and a pair."""
    untested()
    for version in versions.VERSIONS:
        unit(version)
        of_version(version)


ROUNDS = 3  # of the part `overhead`
MOST = 50  # microseconds of a step


def overhead():
    """The CPU of a step with an idle connector, beside none and beside NixlConnector, in turns."""
    found = {}
    for _ in range(ROUNDS):
        for connector in ("none", "KvxConnector", "NixlConnector"):
            environment = Vllm(WORK, ["vllm"], f"overhead-{connector}", "tiny-float32", {"PYTHONPATH": SITE, "UCX_NET_DEVICES": "lo"}).environment
            done = subprocess.run([sys.executable, script("overhead.py"), "tiny-float32", connector], cwd=MODELS, env=environment,
                                  stdout=subprocess.PIPE, text=True, timeout=600)
            lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
            if check(lines, f"overhead: {connector} ended with {done.returncode}"):
                print(lines[-1], flush=True)
                found.setdefault(connector, []).append(json.loads(lines[-1]))
    for connector, runs in found.items():
        median = {name: statistics.median(run[name] for run in runs) for name in ("hooks", "pickled", "threads", "step")}
        ours = median["hooks"] + median["pickled"]
        check(connector != "KvxConnector" or ours <= MOST, f"overhead: {ours:.1f} us a step")
        row(f"an idle step, {connector}", "tiny-float32", f"{median['hooks']:.1f} us in its methods, {median['pickled']:.1f} us to pickle",
            f"step {median['step']:.0f} us, other threads {median['threads']:.0f} us")


LEASE = 3  # seconds, in the part `wrong`
TRIALS = 20
RESTARTS = 5
STOCK_DECODE = "KvxConnector; the decode NixlConnector with KVX"
# One line per trial, so that an interrupted run can be resumed with the same build.
RECORD = os.path.join(WORK, "wrong.jsonl")


def build(engine):
    """Returns a digest of the connector that an engine has."""
    if engine == "NixlConnector":
        return "vLLM's own"
    digest = hashlib.sha256()
    files = [os.path.join(SITE, "kvx", name) for name in ("_kvx.abi3.so", "vllm.py")]
    for name in [*files, os.path.join(BUILT, "libplugin_KVX.so")] if engine == STOCK_DECODE else files:
        with open(name, "rb") as file:
            digest.update(file.read())
    return digest.hexdigest()[:16]


def recorded():
    """Returns the outcomes of each engine of this build in each trouble."""
    counts = {}
    if os.path.exists(RECORD):
        with open(RECORD) as lines:
            for engine, of, trouble, outcome in map(json.loads, lines):
                if of == build(engine):
                    counts.setdefault((engine, trouble), []).append(outcome)
    return counts


class Troubles:
    """A pair whose prefill reuses blocks before, while and after a decode reads them."""

    def __init__(self, engine, prefill, decode):
        self.engine, self.prefill, self.decode, self.number = engine, prefill, decode, 0

    def prompt(self):
        self.number += 1
        return [random.randrange(3, 1000) for _ in range(380)]

    def prefilled(self, count):
        """Returns prompts with the parameters for a decode and the tokens of one server alone."""
        made = []
        for _ in range(count):
            prompt = self.prompt()
            plain = self.prefill.plain(prompt)
            status, params = self.prefill.prefill(prompt, cache_salt=f"p{self.number}")
            check(status == 200, f"{self.engine}: a prefill is {status}")
            made.append((prompt, params, plain))
        return made

    def reuse(self):
        """Lets the prefill give all its blocks to other prompts."""
        for _ in range(45):
            self.prefill.plain([random.randrange(3, 1000) for _ in range(900)], 1)

    def judge(self, trouble, prompt, params, plain):
        """Decodes, and records whether the answer was right, wrong or an error."""
        self.number += 1
        status, answer = self.decode.complete(prompt, 12, 120, kv_transfer_params=params, cache_salt=f"d{self.number}-{random.random()}")
        right = status == 200 and answer["choices"][0]["token_ids"] == plain[:12]
        with open(RECORD, "a") as record:
            print(json.dumps([self.engine, build(self.engine), trouble, "right" if right else "wrong" if status == 200 else "error"]), file=record)

    def late(self, trouble):
        """The decode comes after the lease, and the blocks have been reused."""
        made = self.prefilled(TRIALS)
        time.sleep(LEASE + 2)
        self.reuse()
        [self.judge(trouble, *each) for each in made]

    def replayed(self, trouble):
        """The parameters are used again after the blocks have been reused."""
        made = self.prefilled(TRIALS)
        for prompt, params, _ in made:
            self.decode.complete(prompt, 1, kv_transfer_params=params, cache_salt=f"first {random.random()}")
        self.reuse()
        [self.judge(trouble, *each) for each in made]

    def shared(self, trouble):
        """Two decodes have the same parameters at once, while the prefill is busy."""
        for each in self.prefilled(TRIALS // 2):
            both = [threading.Thread(target=self.judge, args=(trouble, *each)) for _ in range(2)]
            [one.start() for one in both]
            [one.join() for one in both]

    def aborted(self, trouble):
        """A client leaves while its request loads, and another uses its parameters later."""
        made = self.prefilled(TRIALS)
        for prompt, params, _ in made:
            try:
                self.decode.complete(prompt, 50, random.uniform(0.002, 0.05), kv_transfer_params=params, cache_salt=f"{random.random()}")
            except OSError:
                pass
        self.reuse()
        [self.judge(trouble, *each) for each in made]

    def pressed(self, trouble):
        """More prompts than the prefill has blocks for, so that requests wait and are preempted."""
        done = []

        def client():
            while len(done) < TRIALS:
                done.append(None)
                [self.judge(trouble, *each) for each in self.prefilled(1)]

        clients = [threading.Thread(target=client) for _ in range(8)]
        [each.start() for each in clients]
        [each.join() for each in clients]

    def stopped(self, trouble):
        """The decode stands still past the lease with the request in its queue."""
        for each in self.prefilled(RESTARTS):
            self.decode.signal(signal.SIGSTOP)
            waiting = threading.Thread(target=self.judge, args=(trouble, *each))
            waiting.start()
            time.sleep(LEASE + 2)
            self.reuse()
            self.decode.signal(signal.SIGCONT)
            waiting.join()

    def restarted(self, trouble):
        """The prefill is restarted under its name and at its address, and has other prompts."""
        for _ in range(RESTARTS):
            made = self.prefilled(1)[0]
            self.prefill.stop()
            self.prefill.start().wait()
            self.reuse()
            self.judge(trouble, *made)


def wrong():
    """The troubles of vllm#52234, at a pair of stock connectors, at one of kvx's, and at a mixed one."""
    troubles = {name: getattr(Troubles, name) for name in ("late", "replayed", "shared", "aborted", "pressed", "stopped", "restarted")}
    engines = {
        "NixlConnector": lambda: [stock(name, role, side=ports(1)[0], engine_id=f"wrong-{name}", kv_connector_extra_config={"kv_lease_duration": LEASE})
                                  for name, role in (("prefill", "kv_producer"), ("decode", "kv_consumer"))],
        "KvxConnector": lambda: [vllm(name, role, side=ports(1)[0], engine_id=f"wrong-{name}", kv_lease_duration=LEASE)
                                 for name, role in (("prefill", "kv_producer"), ("decode", "kv_consumer"))],
        "KvxConnector, recompute": lambda: [vllm(f"{name}-recompute", role, side=ports(1)[0], engine_id=f"wrong-r-{name}", kv_lease_duration=LEASE,
                                                 kv_load_failure_policy="recompute")
                                            for name, role in (("prefill", "kv_producer"), ("decode", "kv_consumer"))],
        STOCK_DECODE: lambda: [vllm("mixed-prefill", "kv_producer", side=ports(1)[0], engine_id="wrong-m-prefill", backends=["KVX"],
                                    kv_lease_duration=LEASE),
                               stock("mixed-decode", "kv_consumer", backend="KVX", side=ports(1)[0], engine_id="wrong-m-decode",
                                     kv_connector_extra_config={"kv_lease_duration": LEASE})],
    }
    for engine, start in engines.items():
        done = {name: len(recorded().get((engine, each.__doc__), [])) for name, each in troubles.items()}
        left = [name for name, count in done.items() if count < (RESTARTS if name in ("stopped", "restarted") else TRIALS)]
        if not left:
            continue
        with Fleet(*start()) as (prefill, decode):
            pair = Troubles(engine, prefill, decode)
            for name in left:
                troubles[name](pair, troubles[name].__doc__)
                print(engine, name, (recorded().get((engine, troubles[name].__doc__)) or [])[-TRIALS:], flush=True)
    for (engine, trouble), outcomes in recorded().items():
        bad = outcomes.count("wrong")
        check(not bad or engine == "NixlConnector", f"{engine}: {bad} wrong answers: {trouble}")
        row(trouble, engine, f"{bad} wrong, {outcomes.count('error')} errors, {outcomes.count('right')} right", "")


PARTS = {
    "SHM": lambda: pairs("SHM"),
    "TCP": lambda: pairs("TCP"),
    "serve": beside_serve,
    "stock": beside_stock,
    "proxy": through_router,
    "unit": unit,
    "versions": all_versions,
    "overhead": overhead,
    "times": times,
    "wrong": wrong,
}

if __name__ == "__main__":
    for part in sys.argv[5:] or PARTS:
        print(f"== {part}", flush=True)
        PARTS[part]()
    end(["what", "model", "prompts equal to a plain instance", "vLLM's transfers"])
