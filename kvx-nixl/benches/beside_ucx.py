"""NIXL's Python API over KVX and over its own UCX, in one run, rounds interleaved: `beside_ucx.py shm|tcp|idle|metadata PLUGINS`, where
PLUGINS is a folder with libplugin_KVX.so. Prints a JSON object a line.

There is a pair of processes for each backend, and only one pair runs at a time: the other is stopped, so that a spinning
UCX thread takes no CPU from KVX. Host memory in pages of 4 KiB, blocks at random positions."""

import ctypes
import json
import mmap
import os
import pickle
import select
import signal
import statistics
import struct
import subprocess
import sys
import time
import types

BACKENDS = ("KVX", "UCX")
POOL = 256 << 20
POINTS = {"shm": [(4, 1), (4, 64), (4, 1024), (4, 8192), (64, 1024), (1024, 64)], "tcp": [(4, 1024), (64, 1024)]}
ROUNDS = 7
ROUND = 0.12  # seconds, or three transfers
AGENTS, REGIONS = 16, 128
IDLE = 5  # seconds


def read(stream):
    size = stream.read(4)
    if len(size) < 4:
        os._exit(1)
    return pickle.loads(stream.read(struct.unpack("<I", size)[0]))


def write(stream, thing):
    data = pickle.dumps(thing)
    stream.write(struct.pack("<I", len(data)) + data)
    stream.flush()


def text(name):
    return name if isinstance(name, str) else name.decode()


class Side:
    """The agent in another process, which `Process` calls."""

    def __init__(self, role, backend, thread):
        self.role, self.backend, self.thread = role, backend, thread
        self.nixl = self.agent(role)
        self.others = []

    def agent(self, name):
        agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=self.thread, backends=[]))
        agent.create_backend(self.backend, {})
        return agent

    def allocate(self):
        self.memory = mmap.mmap(-1, POOL, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.memory.madvise(mmap.MADV_NOHUGEPAGE)
        self.words = np.frombuffer(self.memory, dtype=np.uint64)

    def touch(self, first, count):
        self.words[first:first + count] = np.arange(first, first + count, dtype=np.uint64) if self.role == "owner" else 0

    def register(self):
        self.base = self.words.ctypes.data
        self.nixl.register_memory([(self.base, POOL, 0, "")], mem_type="DRAM", backends=[self.backend])
        return self.nixl.get_agent_metadata(), self.base

    def load(self, metadata):
        self.peer = text(self.nixl.add_remote_agent(metadata))

    def prepare(self, theirs, block, count):
        """Prepares blocks at random positions; returns the seconds that NIXL needs for a request."""
        order = np.random.default_rng(7)
        self.block, self.ours = block, order.permutation(POOL // block)[:count].astype(np.uint64)
        self.theirs = order.permutation(POOL // block)[:count].astype(np.uint64)
        size, none = np.full(count, block, np.uint64), np.zeros(count, np.uint64)
        rows = lambda base, places: np.stack([np.uint64(base) + places * np.uint64(block), size, none], 1)
        self.vectors = [np.ascontiguousarray(rows(base, places)[:, :2]) for base, places in
                        ((self.base, self.ours), (theirs, self.theirs))]
        local = self.nixl.prep_xfer_dlist("NIXL_INIT_AGENT", rows(self.base, self.ours), "DRAM")
        remote = self.nixl.prep_xfer_dlist(self.peer, rows(theirs, self.theirs), "DRAM")
        which, times = np.arange(count, dtype=np.int32), []
        for _ in range(9):
            started = time.perf_counter()
            self.handle = self.nixl.make_prepped_xfer("READ", local, which, remote, which, b"")
            times.append(time.perf_counter() - started)
            if len(times) < 9:
                self.nixl.release_xfer_handle(self.handle)
        self.once()
        for ours, theirs in zip(self.ours, self.theirs):
            first, words = int(theirs) * block // 8, block // 8
            got = self.words[int(ours) * words:(int(ours) + 1) * words]
            assert got[0] == first and got[-1] == first + words - 1, "a block arrived with wrong bytes"
        return statistics.median(times)

    def once(self):
        started = time.perf_counter()
        state = self.nixl.transfer(self.handle)
        posted = time.perf_counter()
        while state == "PROC":
            state = self.nixl.check_xfer_state(self.handle)
        assert state == "DONE", state
        return time.perf_counter() - started, posted - started

    def round(self):
        """Returns the medians of a round: until it is done, and until the post returns."""
        self.once()
        times, end = [], time.perf_counter() + ROUND
        while time.perf_counter() < end or len(times) < 3:
            times.append(self.once())
        return statistics.median(whole for whole, _ in times), statistics.median(post for _, post in times)

    def bare(self, owner):
        """Returns the median of a round of only the kernel's copies, of the largest size that it accepts."""
        readv = ctypes.CDLL(None).process_vm_readv
        readv.restype = ctypes.c_ssize_t
        readv.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]
        (ours, theirs), times, end = self.vectors, [], time.perf_counter() + ROUND
        most = max(1, min(1024, (1 << 20) // self.block))
        while time.perf_counter() < end or len(times) < 3:
            started = time.perf_counter()
            for at in range(0, len(ours), most):
                count = min(most, len(ours) - at)
                got = readv(owner, ours[at:].ctypes.data, count, theirs[at:].ctypes.data, count, 0)
                assert got == count * self.block, got
            times.append(time.perf_counter() - started)
        return statistics.median(times)

    def end(self):
        self.nixl.release_xfer_handle(self.handle)

    def cpu(self, seconds):
        before = time.process_time()
        time.sleep(seconds)
        return time.process_time() - before

    def many(self):
        """Returns metadata of many agents with many regions each, and the seconds that it took."""
        self.others = [self.agent(f"owner-{number}") for number in range(AGENTS)]
        self.rooms = [mmap.mmap(-1, REGIONS << 16) for _ in self.others]
        for agent, room in zip(self.others, self.rooms):
            base = ctypes.addressof(ctypes.c_char.from_buffer(room))
            # Every other page, so that no two are merged.
            ranges = [(base + (number << 16), 4096, 0, "") for number in range(REGIONS)]
            agent.register_memory(ranges, mem_type="DRAM", backends=[self.backend])

    def tell(self):
        started = time.perf_counter()
        told = [agent.get_agent_metadata() for agent in self.others]
        return told, time.perf_counter() - started

    def learn(self, told):
        started = time.perf_counter()
        names = [text(self.nixl.add_remote_agent(metadata)) for metadata in told]
        taken = time.perf_counter() - started
        for name in names:
            self.nixl.remove_remote_agent(name)
        return taken


def serve(role, backend, thread):
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what NIXL logs is no answer
    commands = os.fdopen(os.dup(0), "rb")
    side = Side(role, backend, thread == "thread")
    write(answers, "ready")
    while True:
        while not select.select([commands], [], [], 0.002 if side.thread is False and role == "owner" else None)[0]:
            side.nixl.get_new_notifs()  # UCX answers nobody otherwise
        method, args = read(commands)
        write(answers, getattr(side, method)(*args))


class Process:
    """A `Side` in another process."""

    def __init__(self, role, backend, thread, environment):
        command = [sys.executable, os.path.abspath(__file__), role, backend, "thread" if thread else "no-thread"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        assert read(self.process.stdout) == "ready"

    def __getattr__(self, method):
        def call(*args):
            write(self.process.stdin, (method, args))
            return read(self.process.stdout)
        return call

    def signal(self, number):
        if self.process.poll() is None:
            self.process.send_signal(number)


class Pair:
    """A reader and an owner over one backend; they run only inside `with`."""

    def __init__(self, backend, route, thread, plugins):
        environment = dict(os.environ, NIXL_LOG_LEVEL="error", UCX_LOG_LEVEL="error", UCX_NET_DEVICES="lo")
        environment.pop("NIXL_PLUGIN_DIR", None)
        if backend == "KVX":
            environment.update(NIXL_PLUGIN_DIR=plugins, KVX_BACKENDS=route.upper())
        elif route == "tcp":
            environment["UCX_TLS"] = "tcp,self"
        self.backend = backend
        self.reader = Process("reader", backend, thread, environment)
        self.owner = Process("owner", backend, thread, environment)

    def connect(self):
        theirs, self.base = self.owner.register()
        ours, _ = self.reader.register()
        self.owner.load(ours)
        self.reader.load(theirs)
        return self

    def __enter__(self):
        for process in (self.owner, self.reader):
            process.signal(signal.SIGCONT)
        return self

    def __exit__(self, *_):
        for process in (self.owner, self.reader):
            process.signal(signal.SIGSTOP)

    def kill(self):
        for process in (self.owner, self.reader):
            process.process.kill()
            process.process.wait()


def say(**figures):
    print(json.dumps(figures), flush=True)


def pairs(route, thread, plugins):
    for backend in BACKENDS:
        with Pair(backend, route, thread, plugins) as pair:
            yield pair


def fill(found):
    """Fills all pools alternately, part by part: the placement of pages affects results by a fifth."""
    processes = [process for pair in found for process in (pair.owner, pair.reader)]
    [process.allocate() for process in processes]
    for first in range(0, POOL // 8, 1 << 19):
        [process.touch(first, 1 << 19) for process in processes]


def transfers(route, plugins):
    found = []
    try:
        found += pairs(route, route == "tcp", plugins)
        for pair in found:
            pair.__enter__()
        fill(found)
        for pair in found:
            pair.__exit__()
        for pair in found:
            with pair:
                pair.connect()
        slowest = 0
        for kib, count in POINTS[route]:
            prepared = {}
            for pair in found:
                with pair:
                    prepared[pair.backend] = pair.reader.prepare(pair.base, kib << 10, count)
            rounds = []
            for _ in range(ROUNDS):
                taken = {}
                for pair in found:
                    with pair:
                        taken[pair.backend] = pair.reader.round()
                        if route == "shm" and pair.backend == "KVX":
                            taken["readv"] = pair.reader.bare(pair.owner.process.pid)
                rounds.append(taken)
            for pair in found:
                with pair:
                    pair.reader.end()
            whole = {b: statistics.median(taken[b][0] for taken in rounds) for b in BACKENDS}
            post = {b: statistics.median(taken[b][1] for taken in rounds) for b in BACKENDS}
            slowest = max(slowest, post["KVX"])
            limit = {} if route == "tcp" else {
                "of_readv": statistics.median(taken["readv"] / taken["KVX"][0] for taken in rounds),
                "readv_of_ucx": statistics.median(taken["UCX"][0] / taken["readv"] for taken in rounds)}
            say(block=kib << 10, count=count,
                times=statistics.median(taken["UCX"][0] / taken["KVX"][0] for taken in rounds),
                with_prepare=(whole["UCX"] + prepared["UCX"]) / (whole["KVX"] + prepared["KVX"]),
                **limit, kvx_us=whole["KVX"] * 1e6, ucx_us=whole["UCX"] * 1e6, kvx_gbps=(kib << 10) * count / whole["KVX"] / 1e9,
                kvx_prepare_us=prepared["KVX"] * 1e6, ucx_prepare_us=prepared["UCX"] * 1e6,
                kvx_post_us=post["KVX"] * 1e6, ucx_post_us=post["UCX"] * 1e6)
        say(what="post", slowest_p50_us=slowest * 1e6)
    finally:
        [pair.kill() for pair in found]


def idle(plugins):
    """Measures idle CPU with NIXL's defaults, after a transfer."""
    percent = {}
    for pair in pairs("shm", True, plugins):
        try:
            fill([pair])
            pair.connect()
            pair.reader.prepare(pair.base, 4096, 1)
            time.sleep(0.5)
            percent[pair.backend] = pair.reader.cpu(IDLE) / IDLE * 100
        finally:
            pair.kill()
    say(kvx_percent=percent["KVX"], ucx_percent=percent["UCX"])


def metadata(plugins):
    found, rounds = [], []
    try:
        for pair in pairs("tcp", False, plugins):
            found.append(pair)
            with pair:
                pair.owner.many()
        for _ in range(ROUNDS):
            taken = {}
            for pair in found:
                with pair:
                    told, telling = pair.owner.tell()
                    taken[pair.backend] = telling + pair.reader.learn(told)
                    taken[pair.backend + " bytes"] = sum(map(len, told))
            rounds.append(taken)
        say(of_ucx=statistics.median(taken["KVX"] / taken["UCX"] for taken in rounds),
            kvx_ms=statistics.median(taken["KVX"] for taken in rounds) * 1e3,
            ucx_ms=statistics.median(taken["UCX"] for taken in rounds) * 1e3,
            kvx_bytes=rounds[0]["KVX bytes"], ucx_bytes=rounds[0]["UCX bytes"])
    finally:
        [pair.kill() for pair in found]


if sys.argv[1] in ("reader", "owner"):
    if "torch" not in sys.modules:  # older wheels import it, and need nothing of it
        torch = types.ModuleType("torch")
        torch.Tensor = type("Tensor", (), {})
        sys.modules["torch"] = torch
    import numpy as np
    from nixl_cu12 import _api as api
    serve(*sys.argv[1:4])
elif sys.argv[1] == "idle":
    idle(sys.argv[2])
elif sys.argv[1] == "metadata":
    metadata(sys.argv[2])
else:
    transfers(*sys.argv[1:3])
