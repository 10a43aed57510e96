"""A plain Mooncake agent for tests: the wheel's own engine, with commands and answers a line each.

Started as `agent.py BYTES`, or `agent.py BYTES NAME METADATA` with a metadata server. Prints
`ready HOST:PORT ADDRESS` for its registered memory, whose byte `i` is content(i)."""
import ctypes
import mmap
import os
import signal
import sys

# Answers go to standard output, so the engine's output goes to standard error.
sys.stdout = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

from mooncake.engine import TransferEngine, TransferNotify, TransferOpcode

ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it does not outlive its test
size = int(sys.argv[1])
name, metadata = sys.argv[2:] or ("127.0.0.1", "P2PHANDSHAKE")
engine = TransferEngine()
assert engine.initialize(name, metadata, "tcp", "") == 0
memory = mmap.mmap(-1, size)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
memory[:] = bytes((i * 31 >> 3 ^ i) & 255 for i in range(1 << 16)) * (size >> 16)
assert engine.register_memory(address, size) == 0


def say(*words):
    print(*words, flush=True)


say("ready", name if ":" in name else f"{name}:{engine.get_rpc_port()}", address)
for line in sys.stdin:
    word, *rest = line.rstrip("\n").split(" ")
    if word == "get":  # OFFSET LENGTH
        offset, length = map(int, rest)
        say(memory[offset:offset + length].hex())
    elif word == "find":  # HEX: where such bytes begin, or -1
        say(memory.find(bytes.fromhex(rest[0])))
    elif word in ("read", "write"):  # PEER ADDRESS OFFSET LENGTH
        peer, remote, offset, length = rest[0], *map(int, rest[1:])
        move = engine.transfer_sync_read if word == "read" else engine.transfer_sync_write
        say(move(peer, address + offset, remote, length))
    elif word == "tell":  # PEER ADDRESS NAME TEXT: a write of one byte with a notification
        peer, remote, name, text = rest[0], int(rest[1]), rest[2], " ".join(rest[3:])
        notify = TransferNotify(name, text)
        say(engine.batch_transfer_sync(peer, [address], [remote], [1], TransferOpcode.Write, notify))
    elif word == "heard":
        say(*(f"{n.name}={n.msg}" for n in engine.get_notifies()))
