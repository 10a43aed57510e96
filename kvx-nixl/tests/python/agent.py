"""A NIXL agent with the backend KVX, and one in its own process, for the tests in this folder."""

import ctypes
import glob
import os
import pickle
import signal
import struct
import subprocess
import sys
import time
import types

# Answers go to standard output, so NIXL's log goes to standard error.
ANSWERS = os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)

WITH_TORCH = "KVX_NIXL_TEST_TORCH" in os.environ  # memory of GPUs is PyTorch's, not the driver's
if WITH_TORCH:
    import torch
elif "torch" not in sys.modules:  # older wheels import it, and need nothing of it
    torch = types.ModuleType("torch")
    torch.Tensor = type("Tensor", (), {})
    sys.modules["torch"] = torch

import numpy as np
from nixl_cu12 import _api as api

ROUTE = os.environ["KVX_BACKENDS"]
CUT_OFF = 10.0
MIB = 1 << 20

PERIOD = 1_048_573  # no multiple of a block: a block in a wrong place is seen
TABLE = np.random.default_rng(1).integers(0, 256, PERIOD, np.uint8)
TABLE = np.concatenate([TABLE, TABLE])


def content(seed, offset, count):
    """Returns bytes of a region that was filled with this seed."""
    start = offset % PERIOD
    if count <= PERIOD:
        return TABLE[start:start + count] + np.uint8(seed)
    return np.resize(TABLE[start:start + PERIOD], count) + np.uint8(seed)


def kind_of(gpu):
    """Returns NIXL's name for memory of this GPU, or of the host."""
    return "DRAM" if gpu is None else "VRAM"


class Gpu:
    """GPU memory with the interface of an array of bytes. It calls the driver that KVX_CUDA_LIB or
    KVX_HIP_LIB names, without kvx."""

    CUDA = {"allocate": "cuMemAlloc_v2", "wait": "cuStreamSynchronize"}
    HIP = {"allocate": "hipMalloc", "wait": "hipStreamSynchronize"}

    def __init__(self, size, device):
        self.is_cuda = os.path.exists(os.environ["KVX_CUDA_LIB"])
        self.driver = ctypes.CDLL(os.environ["KVX_CUDA_LIB" if self.is_cuda else "KVX_HIP_LIB"])
        self.names, self.size, self.device = self.CUDA if self.is_cuda else self.HIP, size, device
        if self.is_cuda:
            self.call("cuInit", 0)
        self.enter()
        at = ctypes.c_uint64()
        self.call(self.names["allocate"], ctypes.byref(at), ctypes.c_size_t(size))
        self.at = at.value
        self[:] = 0

    def call(self, name, *arguments):
        status = getattr(self.driver, name)(*arguments)
        check(status == 0, f"{name} returned {status}")

    def enter(self):
        if not self.is_cuda:
            return self.call("hipSetDevice", self.device)
        number, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(number), self.device)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)
        self.call("cuCtxSetCurrent", context)

    def copy(self, name, kind, to, source, size):
        self.enter()
        to, source, size = ctypes.c_uint64(to), ctypes.c_uint64(source), ctypes.c_size_t(size)
        if self.is_cuda:
            self.call(name, to, source, size, None)
        else:
            self.call("hipMemcpyAsync", to, source, size, kind, None)
        self.call(self.names["wait"], None)

    def __len__(self):
        return self.size

    def __getitem__(self, part):
        start, end, _ = part.indices(self.size)
        got = np.empty(end - start, np.uint8)
        if len(got):
            self.copy("cuMemcpyDtoHAsync_v2", 2, got.ctypes.data, self.at + start, len(got))
        return got

    def __setitem__(self, part, value):
        start, end, _ = part.indices(self.size)
        put = np.empty(end - start, np.uint8)
        put[:] = value
        self.copy("cuMemcpyHtoDAsync_v2", 1, self.at + start, put.ctypes.data, len(put))


class Tensor:
    """GPU memory of PyTorch with the interface of an array of bytes."""

    def __init__(self, size, device):
        self.tensor = torch.zeros(size, dtype=torch.uint8, device=f"cuda:{device}")
        self.at = self.tensor.data_ptr()
        torch.cuda.synchronize(self.tensor.device)

    def __len__(self):
        return len(self.tensor)

    def __getitem__(self, part):
        return self.tensor[part].cpu().numpy()

    def __setitem__(self, part, value):
        if isinstance(value, np.ndarray):
            value = torch.from_numpy(value.copy()).to(self.tensor.device)
        self.tensor[part] = value
        torch.cuda.synchronize(self.tensor.device)


def gpus():
    """Returns how many GPUs have memory for tests. The stand-in has two."""
    if WITH_TORCH:
        return torch.cuda.device_count()
    return 2 if any(os.path.exists(os.environ.get(name, "")) for name in ("KVX_CUDA_LIB", "KVX_HIP_LIB")) else 0


class Agent:
    """A NIXL agent with the backend KVX, or with others, and its own regions."""

    def __init__(self, name, sizes=(), seed=0, params=None, backends=("KVX",), gpu=None, **config):
        config = api.nixl_agent_config(enable_prog_thread=False, backends=[], **config)
        self.name, self.memory, self.registered, self.backends = name, [], [], list(backends)
        self.nixl = api.nixl_agent(name, config)
        for backend in backends:
            self.nixl.create_backend(backend, (params or {}) if backend == "KVX" else {})
        for size in sizes:
            self.more(size, seed, gpu)

    def more(self, size, seed=0, gpu=None):
        """Registers another region, of the host or of the GPU with this number."""
        on_gpu = Tensor if WITH_TORCH else Gpu
        self.memory.append(np.zeros(size, np.uint8) if gpu is None else on_gpu(size, gpu))
        if seed:
            self.fill(seed, len(self.memory) - 1)
        memory, at = self.memory[-1], self.at(-1)
        if isinstance(memory, Tensor):
            self.registered.append(self.nixl.register_memory(memory.tensor, backends=self.backends))
        else:
            self.registered.append(self.register(at, size, gpu))
        return self.metadata(), at

    def register(self, at, size, gpu=None):
        return self.nixl.register_memory([(at, size, gpu or 0, "")], mem_type=kind_of(gpu), backends=self.backends)

    def metadata(self):
        return self.nixl.get_agent_metadata()

    def partial(self, region):
        return self.nixl.get_partial_agent_metadata(self.registered[region], True, ["KVX"])

    def at(self, region=0):
        memory = self.memory[region]
        return memory.ctypes.data if isinstance(memory, np.ndarray) else memory.at

    def fill(self, seed, region=0):
        self.memory[region][:] = content(seed, 0, len(self.memory[region]))

    def holds(self, seed, offset, count, place=0, region=0):
        return bool((self.memory[region][place:place + count] == content(seed, offset, count)).all())

    def load(self, metadata):
        name = self.nixl.add_remote_agent(metadata)
        return name if isinstance(name, str) else name.decode()

    def drop(self, region=0):
        self.nixl.deregister_memory(self.registered[region], backends=self.backends)
        self.memory[region][:] = 0xEE

    def notify(self, to, note):
        self.nixl.send_notif(to, note)

    def hear(self, count, seconds=CUT_OFF):
        """Returns the next `count` notifications, or those that arrive in time."""
        end, got = time.time() + seconds, []
        while len(got) < count and time.time() < end:
            for name, notes in self.nixl.get_new_notifs().items():
                name = name if isinstance(name, str) else name.decode()
                got += [(name, bytes(note)) for note in notes]
        return got

    def direct(self, op, peer, theirs, pairs, note=b"", ours=None, gpu=None, peer_gpu=None, region=0):
        """Prepares a request from lists of (local offset, remote offset, length), for GPUs by their numbers."""
        ours = self.at(region) if ours is None else ours
        local = self.nixl.get_xfer_descs([(ours + l, n, gpu or 0) for l, _, n in pairs], kind_of(gpu))
        remote = self.nixl.get_xfer_descs([(theirs + r, n, peer_gpu or 0) for _, r, n in pairs], kind_of(peer_gpu))
        return self.nixl.initialize_xfer(op, local, remote, peer, note)

    def prepped(self, op, peer, theirs, pairs, note=b"", gpu=None, peer_gpu=None, region=0):
        local = [(self.at(region) + l, n, gpu or 0) for l, _, n in pairs]
        local = self.nixl.prep_xfer_dlist("NIXL_INIT_AGENT", local, kind_of(gpu))
        remote = [(theirs + r, n, peer_gpu or 0) for _, r, n in pairs]
        remote = self.nixl.prep_xfer_dlist(peer, remote, kind_of(peer_gpu))
        which = list(range(len(pairs)))
        return self.nixl.make_prepped_xfer(op, local, which, remote, which, note)

    def state(self, handle):
        try:
            return self.nixl.check_xfer_state(handle)
        except Exception as error:
            return f"ERR {type(error).__name__}"

    def end(self, handle, seconds=CUT_OFF):
        """Returns the state in which a posted request ends, and the time that it took."""
        started, state = time.time(), "PROC"
        while state == "PROC" and time.time() < started + seconds:
            state = self.state(handle)
        return state, time.time() - started

    def post(self, handle, note=b""):
        try:
            return self.nixl.transfer(handle, note)
        except Exception as error:
            return f"ERR {type(error).__name__}"

    def run(self, handle, note=b"", seconds=CUT_OFF):
        state = self.post(handle, note)
        return self.end(handle, seconds)[0] if state == "PROC" else state

    def once(self, peer, theirs, note):
        return self.run(self.direct("READ", peer, theirs, [(0, 0, 4096)]), note)

    def begin(self, op, peer, moves, note, gpu=None):
        """Posts (region, local offset, remote address, length), of this GPU on both sides; returns a number for `finish`."""
        local = self.nixl.get_xfer_descs([(self.at(r) + o, n, gpu or 0) for r, o, _, n in moves], kind_of(gpu))
        remote = self.nixl.get_xfer_descs([(t, n, gpu or 0) for _, _, t, n in moves], kind_of(gpu))
        handle = self.nixl.initialize_xfer(op, local, remote, peer, note)
        state = self.post(handle)
        self.begun = getattr(self, "begun", []) + [(handle, state)]
        return len(self.begun) - 1

    def begin_and_stop(self, peer, moves):
        """Posts a read, and stops the process before it has ended."""
        number = self.begin("READ", peer, moves, b"")
        os.kill(os.getpid(), signal.SIGSTOP)
        return number

    def finish(self, number):
        handle, state = self.begun[number]
        state = self.end(handle)[0] if state == "PROC" else state
        self.nixl.release_xfer_handle(handle)
        return state

    def cpu(self, seconds):
        """Returns the CPU seconds that this process uses while it sleeps."""
        before = time.process_time()
        time.sleep(seconds)
        return time.process_time() - before


def write(stream, thing):
    data = pickle.dumps(thing)
    stream.write(struct.pack("<I", len(data)) + data)
    stream.flush()


def read(stream):
    size = stream.read(4)
    if len(size) < 4:
        raise EOFError("the other process has gone")
    return pickle.loads(stream.read(struct.unpack("<I", size)[0]))


def state_of(path):
    """Returns the letter of a thread's state in its `stat`; None if the thread has ended."""
    try:
        with open(path) as stat:
            return stat.read().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return None


class Peer:
    """An Agent in another process: `peer.method(...)`."""

    def __init__(self, *args, **kwargs):
        command = [sys.executable, os.path.abspath(__file__), "peer"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        write(self.process.stdin, (args, kwargs))
        assert read(self.process.stdout) == "ready"

    def __getattr__(self, method):
        def call(*args, **kwargs):
            self.ask(method, *args, **kwargs)
            return self.answer()
        return call

    def ask(self, method, *args, **kwargs):
        write(self.process.stdin, (method, args, kwargs))

    def answer(self):
        return read(self.process.stdout)

    def until_stopped(self):
        """Waits until all its threads have stopped: they stop one after the other."""
        end = time.time() + CUT_OFF
        while any(state_of(path) not in ("T", None) for path in glob.glob(f"/proc/{self.process.pid}/task/*/stat")):
            check(time.time() < end, "the peer stops")
            time.sleep(0.001)

    def signal(self, number):
        os.kill(self.process.pid, number)

    def kill(self):
        self.process.kill()
        self.process.wait()


def serve():
    commands = os.fdopen(os.dup(0), "rb")
    args, kwargs = read(commands)
    agent = Agent(*args, **kwargs)
    write(ANSWERS, "ready")
    while True:
        try:
            method, args, kwargs = read(commands)
        except EOFError:
            os._exit(0)
        write(ANSWERS, getattr(agent, method)(*args, **kwargs))


def pair(size=4 * MIB, seed=7, params=None):
    """Returns a reader here, an owner there with a filled region, and the owner's name and address."""
    owner = Peer("owner", (size,), seed, params)
    reader = Agent("reader", (size,), 0, params)
    owner.load(reader.metadata())
    return reader, owner, reader.load(owner.metadata()), owner.at()


def shuffled(count, length, seed=1, room=None):
    """Returns blocks of one length at random positions on both sides."""
    order = np.random.default_rng(seed)
    room = room or count
    local, remote = order.permutation(room)[:count], order.permutation(room)[:count]
    return [(int(l) * length, int(r) * length, length) for l, r in zip(local, remote)]


def check(value, what):
    if not value:
        raise AssertionError(what)


def arrived(reader, pairs, seed, region=0):
    return all(reader.holds(seed, r, n, place=l, region=region) for l, r, n in pairs)


if __name__ == "__main__":
    serve()
