"""Moves shuffled blocks between two NIXL agents in two processes, and prints the times as JSON. Exits after a minute at most."""
import os, signal, struct, sys, time, types

signal.alarm(60)
if "torch" not in sys.modules:  # older wheels import it without using it
    torch = types.ModuleType("torch")
    torch.Tensor = type("Tensor", (), {})
    sys.modules["torch"] = torch
out = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # keeps NIXL's log lines out of the results
import ctypes, json, mmap, random
from importlib import import_module, metadata

backend, named, size = sys.argv[1], sys.argv[2], 64 << 20
for module in [named] if named else ["nixl_cu12", "nixl_cu13", "nixl_rocm", "nixl"]:
    try:
        api = import_module(module + "._api")
        break
    except ImportError as error:
        why = error
else:
    sys.exit(f"Python cannot import NIXL: {why}")

(at_child, to_child), (at_parent, to_parent) = os.pipe(), os.pipe()
child = os.fork()
signal.alarm(60)  # a child does not inherit it
here, there = (at_child, to_parent) if child == 0 else (at_parent, to_child)


def send(data):
    os.write(there, struct.pack("<I", len(data)) + data)


def receive():
    length, got = struct.unpack("<I", os.read(here, 4))[0], b""
    while len(got) < length:
        more = os.read(here, length - len(got))
        if not more:
            os._exit(1)
        got += more
    return got


memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory[:] = (bytes(range(256)) * (size // 256)) if child == 0 else bytes(size)
at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
agent = api.nixl_agent("owner" if child == 0 else "reader", api.nixl_agent_config(enable_prog_thread=child == 0, backends=[]))
agent.create_backend(backend, {})
agent.register_memory([(at, size, 0, "")], mem_type="DRAM", backends=[backend])
if child == 0:
    send(struct.pack("<Q", at) + agent.get_agent_metadata())
    agent.add_remote_agent(receive())
    send(b"ready")
    receive()
    os._exit(0)
got = receive()
theirs, name = struct.unpack("<Q", got[:8])[0], agent.add_remote_agent(got[8:])
name = name if isinstance(name, str) else name.decode()
send(agent.get_agent_metadata())
receive()
reads = []
for length, count in ((4096, 1024), (65536, 512)):
    blocks = size // length
    ours, remote = random.sample(range(blocks), count), random.sample(range(blocks), count)
    local = agent.get_xfer_descs([(at + b * length, length, 0) for b in ours], "DRAM")
    far = agent.get_xfer_descs([(theirs + b * length, length, 0) for b in remote], "DRAM")
    handle = agent.initialize_xfer("READ", local, far, name, b"")
    times = []
    for turn in range(15):
        started = time.perf_counter()
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        times.append(time.perf_counter() - started)
        if state != "DONE":
            sys.exit(f"a read ended with {state}")
    for b in ours:
        if memory[b * length:(b + 1) * length] != bytes(range(256)) * (length // 256):
            sys.exit("a block arrived with wrong bytes")
    agent.release_xfer_handle(handle)
    reads.append({"count": count, "length": length, "seconds": sorted(times)[len(times) // 2]})
wheel = module.replace("_", "-")
try:
    wheel = f"{wheel} {metadata.version(wheel)}"
except metadata.PackageNotFoundError:
    pass
maps = [line.split(maxsplit=5)[5:] for line in open("/proc/self/maps")]
libraries = {path[0].strip() for path in maps if path and path[0].strip().endswith("/libnixl.so")}
print(json.dumps({"wheel": wheel, "libraries": sorted(libraries), "reads": reads}), file=out, flush=True)
send(b"end")
os._exit(0)
