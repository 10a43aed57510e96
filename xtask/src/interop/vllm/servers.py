"""Servers as child processes, for run.py, mixed.py and interop/mistralrs/check.py: vLLM, kvx serve, and proxies. Ends each by process id."""

import http.client
import json
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
import uuid

START = 900  # seconds for an instance to start answering
LENGTHS = (4, 60, 126, 127, 128, 129, 130, 200, 254, 255, 256, 257, 300, 383, 384, 385, 512, 513, 640, 700, 900)
ASK_FOR_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
                   "remote_block_ids": None, "remote_host": None, "remote_port": None}
ROWS, WRONG = [], []
# Ends all started servers when this process is asked to end.
signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))


def check(held, what):
    if not held:
        WRONG.append(what)
        print(f"WRONG: {what}", flush=True)
    return held


def row(*cells):
    ROWS.append("| " + " | ".join(map(str, cells)) + " |")
    print(ROWS[-1], flush=True)


def end(heads):
    """Prints the table and exits."""
    print(f"\n| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    print("\n".join(ROWS))
    print(f"\n{len(WRONG)} wrong" + "".join(f"\n- {what}" for what in WRONG))
    sys.exit(bool(WRONG))


def words_of(page, begin):
    """Returns the words of the page's command line that begins with `begin`."""
    with open(page) as text:
        line = next(line for line in text if line.startswith(begin))
    return shlex.split(line, comments=True)


def ports(count):
    """Returns free ports outside the system's ephemeral range, as they are bound minutes later."""
    found = []
    while len(found) < count:
        port = random.randrange(12000, 32000)
        with socket.socket() as held:
            try:
                held.bind(("127.0.0.1", port))
                found.append(port)
            except OSError:
                pass
    return found


def children(pid):
    """Returns a process and all its descendants."""
    found = [pid]
    for each in found:
        for task in os.listdir(f"/proc/{each}/task") if os.path.exists(f"/proc/{each}") else []:
            try:
                with open(f"/proc/{each}/task/{task}/children") as listed:
                    found += map(int, listed.read().split())
            except OSError:
                pass
    return found


def cpu(pids):
    """Returns the seconds of CPU that the processes have used."""
    ticks = 0
    for pid in pids:
        with open(f"/proc/{pid}/stat") as stat:
            ticks += sum(map(int, stat.read().rsplit(")", 1)[1].split()[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def prompts(seed, lengths=LENGTHS):
    """Returns prompts around the block boundaries, without common prefixes, so that none is cached."""
    order = random.Random(seed)
    return [[order.randrange(3, 1000) for _ in range(length)] for length in lengths]


class Server:
    """A process that serves HTTP."""

    def __init__(self, name, command, environment, log, folder, host="127.0.0.1", port=None):
        self.name, self.host, self.port, self.folder = name, host, port, folder
        self.command, self.environment, self.log = command, environment, log
        self.health, self.model, self.process = "/health", None, None
        self.bootstrap = None  # the bootstrap port of a prefill with MooncakeConnector
        os.makedirs(os.path.dirname(log), exist_ok=True)

    def start(self):
        with open(self.log, "a") as log:
            self.process = subprocess.Popen(self.command, cwd=self.folder, env=self.environment,
                                            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        return self

    def wait(self):
        end = time.time() + START
        while not self.healthy():
            if self.process.poll() is not None or time.time() > end:
                with open(self.log) as log:
                    print(log.read()[-4000:], file=sys.stderr)
                raise RuntimeError(f"{self.name} did not start: {self.log}")
            time.sleep(0.5)
        return self

    def healthy(self):
        try:
            return self.ask("GET", self.health, None, 20)[0] == 200
        except OSError:
            return False

    def ask(self, method, path, body, timeout=300):
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout)
        try:
            headers = {"Content-Type": "application/json", "X-Request-Id": str(uuid.uuid4())}
            connection.request(method, path, body and json.dumps(body), headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except http.client.HTTPException as error:
            raise OSError(repr(error)) from error
        finally:
            connection.close()

    def complete(self, prompt, tokens, timeout=300, **more):
        status, answer = self.ask("POST", "/v1/completions", dict(
            model=self.model, prompt=prompt, max_tokens=tokens, temperature=0, return_token_ids=True, ignore_eos=True, **more),
            timeout)
        return status, json.loads(answer) if status == 200 else answer

    def prefill(self, prompt, timeout=300, **more):
        """Prefills: returns the status, and the parameters for a decode or else the error."""
        transfer = f"xfer-{uuid.uuid4()}"
        ask = ASK_FOR_PREFILL if self.bootstrap is None else dict(do_remote_decode=True, do_remote_prefill=False, transfer_id=transfer)
        status, answer = self.complete(prompt, 1, timeout, kv_transfer_params=ask, **more)
        if status != 200:
            return status, answer
        if self.bootstrap is None:
            return status, answer["kv_transfer_params"]
        address = f"http://{self.host}:{self.bootstrap}"
        with urllib.request.urlopen(f"{address}/query", timeout=20) as told:
            engine = json.load(told)["0"]["engine_id"]
        return status, dict(do_remote_decode=False, do_remote_prefill=True, transfer_id=transfer, remote_engine_id=engine,
                            remote_bootstrap_addr=address)

    def plain(self, prompt, tokens=20):
        """Returns the tokens of this server alone, without leaving the prompt in its prefix cache."""
        return self.complete(prompt, tokens, cache_salt="by itself")[1]["choices"][0]["token_ids"]

    def figure(self, names, having=""):
        """Returns the sum over all labels of a counter, or of a histogram's counts, in lines that contain `having`; None if
        there is none."""
        text, found = self.ask("GET", "/metrics", None, 60)[1].decode(), None
        for line in text.splitlines():
            for name in names:
                if having in line and re.match(re.escape(name) + r"(\{|\s)", line):
                    found = (found or 0) + float(line.rsplit(" ", 1)[1])
        return found

    def series(self, begin):
        """Returns the series of the metrics that begin with `begin`: name, type, names of labels, and bound of the bucket. Omits
        the series `_created` of Python's client."""
        kinds, found = {}, set()
        for line in self.ask("GET", "/metrics", None, 60)[1].decode().splitlines():
            kind = re.match(r"# TYPE (\S+) (\w+)", line)
            shown = re.match(rf"({re.escape(begin)}\w+)(?:\{{(.*)\}})? ", line)
            if kind:
                kinds[kind[1]] = kind[2]
            elif shown and not shown[1].endswith("_created"):
                labels = dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', shown[2] or ""))
                bound = labels.pop("le", "")
                family = shown[1] if shown[1] in kinds else shown[1].rpartition("_")[0]
                found.add((shown[1], kinds.get(family), " ".join(sorted(labels)), bound and str(float(bound))))
        return found

    def signal(self, number):
        for pid in children(self.process.pid):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass

    def maps(self):
        found = set()
        for pid in children(self.process.pid):
            try:
                with open(f"/proc/{pid}/maps") as maps:
                    found |= set(re.findall(r"/\S*/(lib(?:plugin_\w+|ucp|uct|ucs)\S*?\.so)", maps.read()))
            except OSError:
                pass
        return found

    def said(self, words):
        with open(self.log) as log:
            return [line.strip() for line in log if words in line]

    def stop(self):
        if self.process is None:
            return
        below = children(self.process.pid)
        self.signal(signal.SIGCONT)
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            pass
        for pid in below:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.wait(10)
        self.process = None

    def kill(self):
        self.signal(signal.SIGKILL)
        self.process.wait(10)


class Fleet:
    """Servers that run together."""

    def __init__(self, *servers):
        self.servers = servers

    def __enter__(self):
        try:
            [each.start() for each in self.servers]
            [each.wait() for each in self.servers]
        except BaseException:
            self.__exit__()
            raise
        return self.servers

    def __exit__(self, *_):
        [each.stop() for each in self.servers]


def clean_environment():
    return {name: value for name, value in os.environ.items() if not name.startswith(("KVX_", "NIXL_", "UCX_"))}


class Vllm(Server):
    """A `vllm serve` with a page's command line, in a network namespace if one is given."""

    def __init__(self, work, words, name, model, environment, host="127.0.0.1", namespace=None, block=128, models=None, logs=""):
        port, side = ports(2)
        # Run in the models' folder, so that the model's name is a relative path.
        models = models or os.path.join(work, "models")
        with open(os.path.join(models, model, "config.json")) as told:
            dtype = json.load(told)
        words = [model if word == "MODEL" else word for word in words]
        # Run by the interpreter: the scripts of a moved environment name the old path.
        command = [sys.executable, os.path.join(work, "venv/bin", words[0]), *words[1:], "--host", host, "--port", str(port),
                   "--enforce-eager", "--dtype", dtype.get("dtype") or dtype["torch_dtype"], "--block-size", str(block),
                   "--num-gpu-blocks-override", "256", "--max-model-len", "1024", "--max-num-seqs", "8",
                   "--max-num-batched-tokens", "1024", "--seed", "0", "--enable-prompt-tokens-details"]
        if namespace:
            command = ["ip", "netns", "exec", namespace, *command]
        environment = dict(
            clean_environment(), VLLM_HOST_IP=host, VLLM_NIXL_SIDE_CHANNEL_HOST=host, VLLM_NIXL_SIDE_CHANNEL_PORT=str(side),
            GLOO_SOCKET_IFNAME="lo", HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", VLLM_NO_USAGE_STATS="1",
            DO_NOT_TRACK="1", VLLM_TARGET_DEVICE="cpu", VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind",
            OMP_NUM_THREADS="1", TORCHDYNAMO_DISABLE="1", PYTHONHASHSEED="0", **environment)
        super().__init__(name, command, environment, os.path.join(work, "logs", logs, f"{name}.log"), models, host, port)
        self.model = model
        open(self.log, "w").close()


class Load:
    """Clients that send requests until the end, and record their outcomes."""

    def __init__(self, prefill, decode, clients=6):
        self.prefill, self.decode, self.ended, self.slowest = prefill, decode, threading.Event(), 0
        self.outcomes, self.lock = {}, threading.Lock()
        self.clients = [threading.Thread(target=self.run, args=(seed,), daemon=True) for seed in range(clients)]
        [client.start() for client in self.clients]

    def run(self, seed):
        order = random.Random(seed)
        while not self.ended.is_set():
            prompt, started = [order.randrange(3, 1000) for _ in range(order.choice(LENGTHS))], time.time()
            try:
                status, params = self.prefill.prefill(prompt, 30)
                if status == 200:
                    started = time.time()
                    status, _ = self.decode.complete(prompt, 8, 60, kv_transfer_params=params)
                    with self.lock:
                        self.slowest = max(self.slowest, time.time() - started)
            except OSError:
                status = "no answer"
                time.sleep(0.2)
            with self.lock:
                self.outcomes[status] = self.outcomes.get(status, 0) + 1

    def end(self):
        self.ended.set()
        [client.join() for client in self.clients]
        return self.outcomes


def through(prefill, decode, prompt, tokens=20, **more):
    """Prefills and decodes a request, and returns the answer; without one, records a failure and returns None."""
    status, params = prefill.prefill(prompt, **more)
    if not check(status == 200, f"a prefill at {prefill.name} is {status}: {str(params)[:200]}"):
        return None
    status, answer = decode.complete(prompt, tokens, kv_transfer_params=params, **more)
    if not check(status == 200, f"a decode at {decode.name} is {status}: {str(answer)[:200]}"):
        return None
    return dict(tokens=answer["choices"][0]["token_ids"], usage=answer["usage"], params=params)


def abort(prefill, decode, count):
    """Sends `count` requests whose clients disconnect before the answer."""
    order, numbers, lock = random.Random(5), iter(range(count)), threading.Lock()

    def client():
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            prompt = [order.randrange(3, 1000) for _ in range(order.choice(LENGTHS))]
            try:
                if number % 4:
                    params = prefill.prefill(prompt, 60)[1]
                    decode.complete(prompt, 100, order.uniform(0.001, 0.1), kv_transfer_params=params)
                else:
                    prefill.prefill(prompt, order.uniform(0.001, 0.05))
            except OSError:
                pass

    clients = [threading.Thread(target=client, daemon=True) for _ in range(6)]
    [each.start() for each in clients]
    [each.join() for each in clients]


def still_in_use(servers, seconds=90):
    """Returns the largest fraction of a KV cache that stays in use."""
    until, used = time.time() + seconds, None
    while time.time() < until and used != 0:
        used = max(each.figure(["vllm:kv_cache_usage_perc"]) or 0 for each in servers)
        time.sleep(1)
    return used
