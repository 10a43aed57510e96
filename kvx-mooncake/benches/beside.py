"""Mooncake's Python engine beside `kvx bench` (see kvx-cli/BESIDE.md): two processes, P2PHANDSHAKE over TCP.

    kvx bench --backend MOONCAKE --beside "target/peers/mooncake/venv/bin/python kvx-mooncake/benches/beside.py"

The engine fails batches longer than its queue. A point that it cannot move as one batch is a `skip`
with that reason; with MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER=32768 in its environment it can. (At 131072
the engine keeps its default.)"""
import ctypes
import mmap
import multiprocessing
import os
import signal
import sys
import time


def engine():
    from mooncake.engine import TransferEngine
    engine = TransferEngine()
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
        raise SystemExit("the engine did not start")
    return engine


HUGE = 2 << 20


def registered(engine, size, value, foreign):
    # Pages as in kvx: its pools are shared memory, foreign memory is private; huge pages if the
    # kernel has them.
    kind = mmap.MAP_PRIVATE if foreign else mmap.MAP_SHARED
    memory = mmap.mmap(-1, size + HUGE, flags=kind | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    address = -(-ctypes.addressof(ctypes.c_char.from_buffer(memory)) // HUGE) * HUGE
    ctypes.memset(address, value, size)
    if engine.register_memory(address, size) != 0:
        raise SystemExit("the engine could not register memory")
    return memory, address


def target(pipe, size, foreign):
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    there = engine()
    memory, address = registered(there, size, 2, foreign)
    pipe.send((f"127.0.0.1:{there.get_rpc_port()}", address))
    pipe.recv()
    os._exit(0)


def shuffled(count, seed):
    numbers, state, mask = list(range(count)), seed, 2**64 - 1
    for at in range(count - 1, 0, -1):
        state = (state + 0x9e3779b97f4a7c15) & mask
        word = ((state ^ (state >> 30)) * 0xbf58476d1ce4e5b9) & mask
        word = ((word ^ (word >> 27)) * 0x94d049bb133111eb) & mask
        other = (word ^ (word >> 31)) % (at + 1)
        numbers[at], numbers[other] = numbers[other], numbers[at]
    return numbers


class Point:
    """Both ends of one point, and the lists of all its transfers."""

    def __init__(self, shape):
        block, count, lists, seed = (int(shape[key]) for key in ("block", "count", "lists", "seed"))
        size, foreign = block * count * lists, shape["memory"] == "foreign"
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=target, args=(theirs, size, foreign), daemon=True)
        self.process.start()
        self.engine = engine()
        self.memory, our_memory = registered(self.engine, size, 1, foreign)
        self.peer, their_memory = self.pipe.recv()
        order = shuffled if shape["pattern"] == "scattered" else lambda count, seed: range(count)
        source, destination = order(count * lists, seed), order(count * lists, seed + 1)
        local, remote = (destination, source) if shape["op"] == "read" else (source, destination)
        self.move = getattr(self.engine, f"batch_transfer_sync_{shape['op']}")
        cut = [slice(at * count, (at + 1) * count) for at in range(lists)]
        self.local = [[our_memory + n * block for n in local[part]] for part in cut]
        self.remote = [[their_memory + n * block for n in remote[part]] for part in cut]
        self.lengths, self.transfer, self.lists = [block] * count, 0, lists

    def once(self):
        at = self.transfer
        self.transfer = (at + 1) % self.lists
        return self.move(self.peer, self.local[at], self.remote[at], self.lengths)

    def end(self):
        self.pipe.send("end")
        self.process.join(3)
        self.engine = self.memory = None


point = None
if __name__ == "__main__":
    # The protocol uses standard output, so the engine's output goes to standard error.
    sys.stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        word, *rest = line.split()
        if word == "point":
            if point:
                point.end()
            point = Point(dict(pair.split("=", 1) for pair in rest))
            code = point.once()
            if code == 0:
                print("ready mooncake-python", flush=True)
            else:
                print(f"skip the engine fails a batch of {len(point.lengths)} with {code}", flush=True)
        elif word == "go":
            start, times, seconds = time.perf_counter(), 0, float(rest[0])
            while times == 0 or time.perf_counter() - start < seconds:
                if point.once() != 0:
                    raise SystemExit("the engine failed a transfer")
                times += 1
            print("moved", times, time.perf_counter() - start, flush=True)
    os._exit(0)
