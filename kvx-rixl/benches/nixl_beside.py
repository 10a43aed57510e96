#!/usr/bin/env python3
"""NIXL's own Python agent beside `kvx bench --backend RIXL`: kvx-cli/BESIDE.md is the protocol.

    kvx bench --backend RIXL --beside "target/peers/nixl/venv/bin/python kvx-rixl/benches/nixl_beside.py"

Requests are prepared before the rounds, one for each list, and posted repeatedly: the fastest way to use
NIXL. Neither side has NIXL's progress thread, which occupies a core and makes each call slower.
NIXL_BESIDE_MAKE=1 prints the cost of preparing one request to standard error.
"""

import json
import mmap
import os
import select
import subprocess
import sys
import time

# The protocol uses standard output, so the output of NIXL and UCX goes to standard error.
sys.stdout = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

os.environ.setdefault("NIXL_LOG_LEVEL", "error")
os.environ.setdefault("UCX_LOG_LEVEL", "error")
import numpy as np  # noqa: E402
from nixl_cu12._api import nixl_agent, nixl_agent_config  # noqa: E402

HUGE = 2 << 20
MADV_HUGEPAGE = 14


def shuffled(count, seed):
    numbers, state, mask = list(range(count)), seed, 2**64 - 1
    for at in range(count - 1, 0, -1):
        state = (state + 0x9E3779B97F4A7C15) & mask
        word = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & mask
        other = (word ^ (word >> 31)) % (at + 1)
        numbers[at], numbers[other] = numbers[other], numbers[at]
    return numbers


class Side:
    def __init__(self, name, size, fill, foreign):
        self.agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=[]))
        self.agent.create_backend("UCX", {"engine_config": "NET_DEVICES=lo"})
        # Pages as in kvx: its pools are shared memory, foreign memory is private; huge pages if the
        # kernel has them.
        kind = mmap.MAP_PRIVATE if foreign else mmap.MAP_SHARED
        self.pages = mmap.mmap(-1, size + HUGE, flags=kind | mmap.MAP_ANONYMOUS)
        self.pages.madvise(MADV_HUGEPAGE)
        whole = np.frombuffer(self.pages, dtype=np.uint8)
        skip = -whole.ctypes.data % HUGE
        self.memory = whole[skip:skip + size]
        self.memory[:] = 7 if fill else 0
        self.at = self.memory.ctypes.data
        self.registered = self.agent.register_memory([(self.at, size, 0, "")], mem_type="DRAM")


def serve():
    side = None
    while True:
        # The first request waits until both ends have connected, and NIXL makes progress only in
        # calls.
        while not select.select([sys.stdin], [], [], 0.02)[0]:
            if side:
                side.agent.get_new_notifs()
        line = sys.stdin.readline()
        if not line:
            os._exit(0)
        order = json.loads(line)
        if "size" in order:
            side = Side("target", order["size"], order["fill"], order["foreign"])
            print(json.dumps({"metadata": side.agent.get_agent_metadata().hex(), "at": side.at}), flush=True)
        else:
            side.agent.add_remote_agent(bytes.fromhex(order["metadata"]))
            print("{}", flush=True)


class Point:
    def __init__(self, shape):
        block, count, lists, seed = (int(shape[key]) for key in ("block", "count", "lists", "seed"))
        size = block * count * lists
        reads, foreign = shape["op"] == "read", shape["memory"] == "foreign"
        command = [sys.executable, os.path.abspath(__file__), "serve"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        target = self.ask({"size": size, "fill": reads, "foreign": foreign})
        self.side = Side("initiator", size, not reads, foreign)
        agent = self.side.agent
        peer = agent.add_remote_agent(bytes.fromhex(target["metadata"]))
        peer = peer if isinstance(peer, str) else peer.decode()
        self.ask({"metadata": agent.get_agent_metadata().hex()})
        agent.make_connection(peer)
        order = shuffled if shape["pattern"] == "scattered" else lambda number, _: list(range(number))
        source, sink = (np.array(order(count * lists, seed + at), dtype=np.int32) for at in (0, 1))
        ours, theirs = (sink, source) if reads else (source, sink)

        def prepared(name, base):
            rows = np.zeros((count * lists, 3), dtype=np.uint64)
            rows[:, 0] = np.uint64(base) + np.arange(count * lists, dtype=np.uint64) * np.uint64(block)
            rows[:, 1] = block
            return agent.prep_xfer_dlist(name, rows, "DRAM")

        local, remote = prepared("NIXL_INIT_AGENT", self.side.at), prepared(peer, target["at"])
        self.handles, took = [], []
        for part in range(lists):
            at = slice(part * count, (part + 1) * count)
            start = time.perf_counter()
            handle = agent.make_prepped_xfer(shape["op"].upper(), local, ours[at], remote, theirs[at], b"")
            took.append(time.perf_counter() - start)
            self.handles.append(handle)
        if os.environ.get("NIXL_BESIDE_MAKE"):
            print(f"make_prepped_xfer of {count}: p50 {sorted(took)[len(took) // 2] * 1e6:.1f} us", file=sys.stderr)
        self.next = 0
        self.go(0)
        if reads:
            moved = [ours[at] for at in range(count)]
            assert all(self.side.memory[block * int(at)] == 7 for at in moved), "the bytes did not arrive"

    def ask(self, order):
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def go(self, seconds):
        agent, times, start = self.side.agent, 0, time.perf_counter()
        now = start
        while times == 0 or now - start < seconds:
            handle = self.handles[self.next]
            self.next = (self.next + 1) % len(self.handles)
            state = agent.transfer(handle)
            while state == "PROC":
                state = agent.check_xfer_state(handle)
            if state != "DONE":
                raise RuntimeError(state)
            times += 1
            now = time.perf_counter()
        return times, now - start

    def end(self):
        self.process.kill()
        self.process.wait()


def main():
    # Each point gets its own agents, so that its memory can have the requested properties.
    child = None
    for line in sys.stdin:
        word, *rest = line.split()
        if word == "point":
            if child:
                child.stdin.close()
                child.wait()
            command = [sys.executable, os.path.abspath(__file__), "point", *rest]
            child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        else:
            child.stdin.write(line)
            child.stdin.flush()
        print(child.stdout.readline().strip() or "skip the agents failed, see standard error", flush=True)
    if child:
        child.stdin.close()
        child.wait()


def measure(words):
    shape = dict(word.split("=", 1) for word in words)
    if shape["backend"] not in ("RIXL", "UCX"):
        print("skip this is NIXL, beside RIXL and UCX", flush=True)
        os._exit(0)
    point = Point(shape)
    print("ready nixl", flush=True)
    for line in sys.stdin:
        times, seconds = point.go(float(line.split()[1]))
        print("moved", times, seconds, flush=True)
    point.end()
    os._exit(0)  # NIXL's libraries do not survive a usual exit everywhere


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve()
    elif sys.argv[1:2] == ["point"]:
        measure(sys.argv[2:])
    else:
        main()
