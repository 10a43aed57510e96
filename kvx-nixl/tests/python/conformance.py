"""Conformance of the backend KVX through NIXL's Python API: `conformance.py NAME` runs one test, against a peer in a process of its
own. conformance.rs runs them all, over each wheel and each route."""

import os
import pickle
import resource
import signal
import struct
import subprocess
import sys
import threading
import time
import types

# What NIXL logs on standard output would be taken for an answer: it goes to standard error.
ANSWERS = os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)

if "torch" not in sys.modules:  # older wheels import it, and need nothing of it
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
    """Bytes of a region filled with this seed."""
    start = offset % PERIOD
    if count <= PERIOD:
        return TABLE[start:start + count] + np.uint8(seed)
    return np.resize(TABLE[start:start + PERIOD], count) + np.uint8(seed)


class Agent:
    """A NIXL agent with the backend KVX, and regions of its own."""

    def __init__(self, name, sizes=(), seed=0, params=None, **config):
        config = api.nixl_agent_config(enable_prog_thread=False, backends=[], **config)
        self.name, self.memory, self.registered, self.heard = name, [], [], {}
        self.nixl = api.nixl_agent(name, config)
        self.nixl.create_backend("KVX", params or {})
        for size in sizes:
            self.more(size, seed)

    def more(self, size, seed=0):
        self.memory.append(content(seed, 0, size) if seed else np.zeros(size, np.uint8))
        at = self.memory[-1].ctypes.data
        self.registered.append(self.nixl.register_memory([(at, size, 0, "")], mem_type="DRAM", backends=["KVX"]))
        return self.metadata(), at

    def metadata(self):
        return self.nixl.get_agent_metadata()

    def partial(self, region):
        return self.nixl.get_partial_agent_metadata(self.registered[region], True, ["KVX"])

    def at(self, region=0):
        return self.memory[region].ctypes.data

    def fill(self, seed, region=0):
        self.memory[region][:] = content(seed, 0, len(self.memory[region]))

    def holds(self, seed, offset, count, place=0, region=0):
        return bool((self.memory[region][place:place + count] == content(seed, offset, count)).all())

    def load(self, metadata):
        name = self.nixl.add_remote_agent(metadata)
        return name if isinstance(name, str) else name.decode()

    def drop(self, region=0):
        self.nixl.deregister_memory(self.registered[region], backends=["KVX"])
        self.memory[region][:] = 0xEE

    def notify(self, to, note):
        self.nixl.send_notif(to, note)

    def hear(self, count, seconds=CUT_OFF):
        """The notifications that come until there are so many."""
        end, got = time.time() + seconds, []
        while len(got) < count and time.time() < end:
            for name, notes in self.nixl.get_new_notifs().items():
                name = name if isinstance(name, str) else name.decode()
                got += [(name, bytes(note)) for note in notes]
        return got

    def direct(self, op, peer, theirs, pairs, note=b"", ours=None):
        """A request from lists of (local offset, remote offset, length)."""
        ours = self.at() if ours is None else ours
        local = self.nixl.get_xfer_descs([(ours + l, n, 0) for l, _, n in pairs], "DRAM")
        remote = self.nixl.get_xfer_descs([(theirs + r, n, 0) for _, r, n in pairs], "DRAM")
        return self.nixl.initialize_xfer(op, local, remote, peer, note)

    def prepped(self, op, peer, theirs, pairs, note=b""):
        local = self.nixl.prep_xfer_dlist("NIXL_INIT_AGENT", [(self.at() + l, n, 0) for l, _, n in pairs], "DRAM")
        remote = self.nixl.prep_xfer_dlist(peer, [(theirs + r, n, 0) for _, r, n in pairs], "DRAM")
        which = list(range(len(pairs)))
        return self.nixl.make_prepped_xfer(op, local, which, remote, which, note)

    def state(self, handle):
        try:
            return self.nixl.check_xfer_state(handle)
        except Exception as error:
            return f"ERR {type(error).__name__}"

    def end(self, handle, seconds=CUT_OFF):
        """The state in which a posted request ends, and after how long."""
        started, state = time.time(), "PROC"
        while state == "PROC" and time.time() < started + seconds:
            state = self.state(handle)
        return state, time.time() - started

    def run(self, handle, note=b"", seconds=CUT_OFF):
        try:
            state = self.nixl.transfer(handle, note)
        except Exception as error:
            return f"ERR {type(error).__name__}"
        return self.end(handle, seconds)[0] if state == "PROC" else state

    def cpu(self, seconds):
        """CPU seconds that this process takes while it sleeps."""
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


class Peer:
    """An Agent in another process: `peer.method(...)`."""

    def __init__(self, *args, **kwargs):
        command = [sys.executable, os.path.abspath(__file__), "--peer"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        write(self.process.stdin, (args, kwargs))
        assert read(self.process.stdout) == "ready"

    def __getattr__(self, method):
        def call(*args, **kwargs):
            write(self.process.stdin, (method, args, kwargs))
            return read(self.process.stdout)
        return call

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
    """A reader here, an owner there whose region is filled, and the owner's name and address."""
    owner = Peer("owner", (size,), seed, params)
    reader = Agent("reader", (size,), 0, params)
    owner.load(reader.metadata())
    return reader, owner, reader.load(owner.metadata()), owner.at()


def shuffled(count, length, seed=1, room=None):
    """Blocks of one length in random places on both sides."""
    order = np.random.default_rng(seed)
    room = room or count
    local, remote = order.permutation(room)[:count], order.permutation(room)[:count]
    return [(int(l) * length, int(r) * length, length) for l, r in zip(local, remote)]


def check(value, what):
    if not value:
        raise AssertionError(what)


def arrived(reader, pairs, seed):
    return all(reader.holds(seed, r, n, place=l) for l, r, n in pairs)


# The tests.

def prepped_and_direct_reads_and_writes():
    reader, owner, name, theirs = pair()
    pairs = shuffled(512, 4096, room=1024)
    for make in (reader.prepped, reader.direct):
        reader.memory[0][:] = 0
        handle = make("READ", name, theirs, pairs)
        check(reader.run(handle) == "DONE", "a read")
        check(arrived(reader, pairs, 7), "the bytes of a read")
        touched = set(l // 4096 for l, _, _ in pairs)
        free = next(block for block in range(1024) if block not in touched)
        check(not reader.memory[0][free * 4096:(free + 1) * 4096].any(), "what lies between is left alone")
        reader.nixl.release_xfer_handle(handle)
    reader.fill(9)
    for make in (reader.prepped, reader.direct):
        owner.fill(7)
        handle = make("WRITE", name, theirs, pairs)
        check(reader.run(handle) == "DONE", "a write")
        check(all(owner.holds(9, l, n, place=r) for l, r, n in pairs[:50]), "the bytes of a write")
        reader.nixl.release_xfer_handle(handle)


def reposts():
    reader, owner, name, theirs = pair()
    pairs = shuffled(64, 16384, room=256)
    handle = reader.prepped("READ", name, theirs, pairs)
    for seed in range(1, 60):
        owner.fill(seed)
        check(reader.run(handle, b"round %d" % seed) == "DONE", f"post {seed}")
        check(arrived(reader, pairs, seed), f"the bytes of post {seed}")
    got = owner.hear(59)
    check(sorted(got) == sorted(("reader", b"round %d" % seed) for seed in range(1, 60)), f"a notification for each: {got}")


def unequal_lists():
    reader, _, name, theirs = pair()
    order = np.random.default_rng(3)
    pairs, local, remote = [], 0, 2 * MIB
    for length in order.integers(1, 5000, 600):
        pairs.append((local, remote, int(length)))
        local += int(length) + int(order.integers(0, 3)) % 2
        remote += int(length) + int(order.integers(0, 3)) % 2
    pairs = [pair for pair in pairs if pair[1] + pair[2] <= 4 * MIB]
    order.shuffle(pairs)
    for make in (reader.prepped, reader.direct):
        reader.memory[0][:] = 0
        handle = make("READ", name, theirs, [tuple(map(int, pair)) for pair in pairs])
        check(reader.run(handle) == "DONE", "a read of unequal pieces")
        check(arrived(reader, pairs, 7), "their bytes")


def a_hundred_thousand_descriptors():
    reader, _, name, theirs = pair(100_000 * 512)
    pairs = shuffled(100_000, 512)
    handle = reader.prepped("READ", name, theirs, pairs)
    started = time.time()
    state = reader.nixl.transfer(handle)
    posted = time.time() - started
    check((state if state != "PROC" else reader.end(handle)[0]) == "DONE", "one transfer")
    check(arrived(reader, pairs[::97], 7), "its bytes")
    check(posted < 0.1, f"the post took {posted} s")


def notifications_of_all_lengths():
    reader, owner, name, theirs = pair()
    lengths = [0, 1, 15, 16, 1000, 65535, 65536, 200_000, 3 * MIB]
    notes = [bytes(content(5, length, length)) for length in lengths]
    for note in notes:
        reader.notify(name, note)
    # Both ends poll nothing meanwhile: they leave and arrive by themselves.
    time.sleep(0.5)
    got = owner.hear(len(notes))
    check(sorted(note for _, note in got) == sorted(notes), f"{[len(note) for _, note in got]}")
    check({sender for sender, _ in got} == {"reader"}, "the sender's name")
    handle = reader.prepped("READ", name, theirs, [(0, 0, 4096)])
    for note in notes[1:]:
        check(reader.run(handle, note) == "DONE", f"a transfer with a note of {len(note)}")
    got = owner.hear(len(notes) - 1)
    check(sorted(note for _, note in got) == sorted(notes[1:]), "after transfers")
    check(owner.hear(1, 0.2) == [], "once each")


def transfers_to_itself():
    agent = Agent("alone", (MIB, MIB), 0)
    agent.fill(7, region=1)
    handle = agent.direct("READ", "alone", agent.at(1), [(0, 4096, 100_000), (200_000, 0, 50)], b"to myself")
    check(agent.run(handle) == "DONE", "a read from itself")
    check(agent.holds(7, 4096, 100_000) and agent.holds(7, 0, 50, place=200_000), "its bytes")
    check(agent.hear(1) == [("alone", b"to myself")], "its notification")


def regions_added_later():
    reader, owner, name, _ = pair()
    whole, second = owner.more(MIB, 11)
    check(reader.load(whole) == name, "newer metadata of a known agent")
    check(reader.run(reader.direct("READ", name, second, [(0, 100, 5000)])) == "DONE", "from the second region")
    check(reader.holds(11, 100, 5000), "its bytes")
    _, third = owner.more(MIB, 13)
    check(reader.load(owner.partial(2)) == name, "metadata of one region")
    handle = reader.direct("READ", name, third, [(0, 7, 5000)])
    check(reader.run(handle) == "DONE" and reader.holds(13, 7, 5000), "from the third region")
    for _ in range(200):  # and back, many times: nothing is left over
        reader.more(4096)
        reader.drop(len(reader.memory) - 1)


def a_killed_peer():
    reader, owner, name, theirs = pair(64 * MIB)
    other = Peer("other", (MIB,), 3)
    pairs = shuffled(1024, 65536)
    handle = reader.prepped("READ", name, theirs, pairs)
    check(reader.run(handle) == "DONE", "before")
    reader.memory[0][:] = 0
    state = reader.nixl.transfer(handle)
    owner.kill()
    state, seconds = reader.end(handle) if state == "PROC" else (state, 0)
    check(state == "DONE" and arrived(reader, pairs[::37], 7) or "RemoteDisconnect" in state, f"while it dies: {state}")
    check(seconds < 5, f"after {seconds} s")
    state = reader.run(handle)
    # Some releases forget an agent that was lost, so that it is not found.
    check("RemoteDisconnect" in state or "NotFound" in state, f"after its death: {state}")
    reader.nixl.release_xfer_handle(handle)
    third = reader.load(other.metadata())
    check(reader.run(reader.direct("READ", third, other.at(), [(0, 0, MIB)])) == "DONE", "the agent works on")
    check(reader.holds(3, 0, MIB), "with right bytes")


def a_stopped_peer():
    reader, owner, name, theirs = pair(16 * MIB, params={"deadline": "2"})
    pairs = shuffled(256, 65536)
    handle = reader.prepped("READ", name, theirs, pairs)
    check(reader.run(handle) == "DONE", "before")
    owner.signal(signal.SIGSTOP)
    started = time.time()
    state = reader.run(handle, b"", 6)
    seconds = time.time() - started
    owner.signal(signal.SIGCONT)
    if ROUTE == "TCP":
        check(state.startswith("ERR"), f"by the deadline: {state}")
        check(1.0 < seconds < 3.0, f"after {seconds} s")
    else:
        check(state == "DONE", f"where the peer's CPU is not needed: {state}")
    end, state = time.time() + CUT_OFF, ""
    while state != "DONE" and time.time() < end:
        again = reader.prepped("READ", name, theirs, pairs)
        state = reader.run(again)
        time.sleep(0.05)
    check(state == "DONE", f"when it goes on: {state}")


def a_restarted_peer():
    reader, owner, name, theirs = pair()
    handle = reader.prepped("READ", name, theirs, [(0, 0, 4096)])
    check(reader.run(handle) == "DONE", "before")
    owner.kill()
    owner = Peer("owner", (4 * MIB,), 5)
    state = reader.run(handle)
    check("RemoteDisconnect" in state or "NotFound" in state, f"the old handle: {state}")
    reader.nixl.release_xfer_handle(handle)
    reader.nixl.remove_remote_agent(name)
    check(reader.load(owner.metadata()) == name, "its new metadata")
    check(reader.run(reader.direct("READ", name, owner.at(), [(0, 0, 4096)])) == "DONE", "from its new life")
    check(reader.holds(5, 0, 4096), "with its bytes")


def release_in_mid_transfer():
    reader, owner, name, theirs = pair(64 * MIB, params={"deadline": "5"})
    pairs = shuffled(1024, 65536)
    for _ in range(20):
        handle = reader.prepped("READ", name, theirs, pairs)
        reader.nixl.transfer(handle)
        reader.nixl.release_xfer_handle(handle)
        reader.memory[0][:] = 0
        check(not reader.memory[0].any(), "nothing is written after a release")
        time.sleep(0.01)
        check(not reader.memory[0].any(), "nor later")
    if ROUTE != "TCP":
        return
    owner.signal(signal.SIGSTOP)
    handle = reader.prepped("READ", name, theirs, pairs)
    reader.nixl.transfer(handle)
    try:
        reader.nixl.release_xfer_handle(handle)
        released = True
    except Exception:
        released = False  # active: it cannot end while its peer is silent
    owner.signal(signal.SIGCONT)
    if not released:
        reader.nixl.release_xfer_handle(handle)
    reader.memory[0][:] = 0
    time.sleep(0.2)
    check(not reader.memory[0].any(), "nothing is written after the last release")
    check(reader.run(reader.prepped("READ", name, theirs, pairs)) == "DONE", "the agent works on")


def deregister_under_a_reading_peer():
    reader, owner, name, theirs = pair(16 * MIB)
    pairs = shuffled(256, 65536)
    handle = reader.prepped("READ", name, theirs, pairs)
    done = threading.Thread(target=owner.drop)
    states = []
    for turn in range(200):
        if turn == 5:
            done.start()
        reader.memory[0][:] = 0
        states.append(reader.run(handle))
        check(states[-1] != "DONE" or arrived(reader, pairs[::13], 7), f"what is read is right: {states}")
        if states[-1] != "DONE":
            break
    done.join()
    check(states[-1].startswith("ERR"), f"after it has gone: {states[-1]}")
    check(len(states) > 5, "before it has gone")


def two_agents_in_one_process():
    a, b = Agent("a", (MIB,), 3), Agent("b", (MIB,), 5)
    to_b, to_a = a.load(b.metadata()), b.load(a.metadata())
    check(a.run(a.direct("READ", to_b, b.at(), [(0, 0, 1000)], b"x")) == "DONE" and a.holds(5, 0, 1000), "a from b")
    check(b.run(b.direct("WRITE", to_a, a.at(), [(5000, 5000, 1000)], b"y")) == "DONE", "b to a")
    check(a.holds(5, 5000, 1000, place=5000), "its bytes")
    check((a.hear(1), b.hear(1)) == ([("b", b"y")], [("a", b"x")]), "their notifications")


def sixteen_threads():
    owner = Peer("owner", (64 * MIB,), 7)
    config = {}
    if hasattr(api, "nixl_thread_sync_t"):
        config["sync_mode"] = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
    reader = Agent("reader", (64 * MIB,), 0, **config)
    name, theirs, wrong = reader.load(owner.metadata()), owner.at(), []
    owner.load(reader.metadata())

    def work(number):
        try:
            base = number * 4 * MIB
            pairs = [(base + l, base + r, n) for l, r, n in shuffled(128, 8192, seed=number, room=512)]
            for turn in range(20):
                handle = reader.direct("READ", name, theirs, pairs)
                check(reader.run(handle, b"%d.%d" % (number, turn)) == "DONE", "a read")
                check(arrived(reader, pairs, 7), "its bytes")
                reader.nixl.release_xfer_handle(handle)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    check(not wrong, wrong)
    check(len(owner.hear(320)) == 320, "a notification for each")


def idle_agents_sleep():
    reader, owner, name, theirs = pair()
    check(reader.run(reader.prepped("READ", name, theirs, [(0, 0, 4096)])) == "DONE", "before")
    time.sleep(0.3)
    ours, theirs = reader.cpu(2), owner.cpu(2)
    check(ours < 0.02 and theirs < 0.02, f"{ours} s and {theirs} s of CPU in 2 s")


def what_makes_no_sense_is_refused():
    for params in ({"backend": "SHM"}, {"backends": "SMH"}, {"deadline": "soon"}, {"secret_file": "/nonexistent"}):
        try:
            Agent("odd", (), 0, params)
        except Exception:
            continue
        raise AssertionError(f"{params} made an agent")
    reader, owner, name, theirs = pair(MIB)
    for pairs in ([(0, 0, 100), (50, 200, 100)],):  # two destinations on top of each other
        try:
            reader.direct("READ", name, theirs, pairs)
        except Exception:
            continue
        raise AssertionError(f"{pairs} made a request")
    try:
        reader.load(reader.metadata()[:-40])
    except Exception:
        pass
    check(reader.run(reader.direct("READ", name, theirs, [(0, 0, MIB)])) == "DONE", "the agent works on")


def a_forked_child_is_told():
    reader, owner, name, theirs = pair(MIB)
    handle = reader.prepped("READ", name, theirs, [(0, 0, 4096)])
    child = os.fork()
    if child == 0:
        state = reader.run(handle)
        os._exit(0 if state.startswith("ERR") else 1)
    _, status = os.waitpid(child, 0)
    check(status == 0, f"the child's transfer is an error: {status}")
    check(reader.run(handle) == "DONE" and reader.holds(7, 0, 4096), "the parent works on")


def many_rounds_do_not_grow():
    reader, owner, name, theirs = pair(MIB)
    prepped = reader.prepped("READ", name, theirs, [(0, 0, 4096)])

    def rounds(count):
        for _ in range(count):
            check(reader.run(prepped, b"x") == "DONE", "a read")
            handle = reader.direct("READ", name, theirs, [(0, 0, 64), (4096, 100, 7)])
            check(reader.run(handle) == "DONE", "a read")
            reader.nixl.release_xfer_handle(handle)
        owner.hear(count)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    count = int(os.environ.get("KVX_NIXL_TEST_ROUNDS", "1000"))
    before = rounds(count // 2)
    after = rounds(count)
    check(after - before < 4096, f"{after - before} KiB more after {count} rounds")


def main():
    if sys.argv[1] == "--peer":
        return serve()
    globals()[sys.argv[1]]()
    ANSWERS.write(b"passed\n")
    ANSWERS.flush()
    os._exit(0)  # the peers end with our ends of their pipes


if __name__ == "__main__":
    main()
