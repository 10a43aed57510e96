"""A NIXL agent that follows commands: a line of JSON in, a line of JSON out. Used by interop.rs."""

import ctypes
import json
import os
import select
import sys
import time

# Answers go to standard output, so the output of NIXL and UCX goes to standard error.
sys.stdout = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

import numpy as np
from nixl_cu12._api import nixl_agent, nixl_agent_config

STEP = 0x9E3779B97F4A7C15


def words(seed, count):
    """Returns the initial content of a region, which interop.rs computes as well."""
    return np.arange(count, dtype=np.uint64) * np.uint64(STEP) + np.uint64(seed)


class Agent:
    def start(self, name, regions):
        self.agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=[]))
        self.agent.create_backend("UCX", {"engine_config": "NET_DEVICES=lo"})
        self.memory = [np.zeros(size // 8, dtype=np.uint64) for size in regions]
        ranges = [(memory.ctypes.data, memory.nbytes, 0, "") for memory in self.memory]
        self.registered = self.agent.register_memory(ranges, mem_type="DRAM")
        self.heard = []
        return {"metadata": self.agent.get_agent_metadata().hex(), "at": [memory.ctypes.data for memory in self.memory]}

    def more(self, size):
        """Registers another region, so that the agent has newer metadata."""
        memory = np.zeros(size // 8, dtype=np.uint64)
        self.memory.append(memory)
        self.also = self.agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], mem_type="DRAM")
        return {"metadata": self.agent.get_agent_metadata().hex(), "at": memory.ctypes.data}

    def stall(self):
        """Stops making progress: without its own thread, NIXL makes progress only in calls."""
        print(json.dumps({"stalled": True}), flush=True)
        time.sleep(60)

    def load(self, metadata):
        name = self.agent.add_remote_agent(bytes.fromhex(metadata))
        return {"name": name if isinstance(name, str) else name.decode()}

    def fill(self, region, seed):
        self.memory[region][:] = words(seed, len(self.memory[region]))
        return {}

    def check(self, region, seed, blocks):
        """Returns whether block `to` has the content of block `from` of a region filled with `seed`."""
        memory = self.memory[region]
        for to, origin, length in blocks:
            want = words(0, length // 8) + np.uint64((origin // 8 * STEP + seed) % 2**64)
            if not np.array_equal(memory[to // 8:(to + length) // 8], want):
                return {"right": False, "at": to}
        return {"right": True}

    def transfer(self, op, peer, local, remote, length, notify=None, patience=10.0, posted=lambda state: None):
        def rows(addresses):
            return np.array([[address, length, 0] for address in addresses], dtype=np.uint64)
        lists = [self.agent.get_xfer_descs(rows(side), "DRAM") for side in (local, remote)]
        try:
            handle = self.agent.initialize_xfer(op, lists[0], lists[1], peer, bytes.fromhex(notify or ""))
            state, until = self.agent.transfer(handle), time.monotonic() + patience
            posted(state)
            while state == "PROC" and time.monotonic() < until:
                state = self.agent.check_xfer_state(handle)
        except Exception as error:
            return {"state": "ERR", "why": repr(error)}
        if state == "DONE":
            self.agent.release_xfer_handle(handle)
        return {"state": state}

    def strided(self, op, peer, local, remote, length, blocks, patience=10.0):
        """Moves blocks of two strided lists (address, stride, count)."""
        def prepared(name, side):
            address, stride, count = side
            return self.agent.prep_xfer_dlist(name, np.array([[address, length, 0, stride, count]], dtype=np.uint64), "DRAM")
        sides = prepared("NIXL_INIT_AGENT", local), prepared(peer, remote)
        ours, theirs = (np.array(side, dtype=np.int32) for side in zip(*blocks))
        handle = self.agent.make_prepped_xfer(op, sides[0], ours, sides[1], theirs, b"")
        state, until = self.agent.transfer(handle), time.monotonic() + patience
        while state == "PROC" and time.monotonic() < until:
            state = self.agent.check_xfer_state(handle)
        return {"state": state}

    def fly(self, op, peer, local, remote, length):
        """Reports when a transfer is posted, and how it ends."""
        return self.transfer(op, peer, local, remote, length, posted=lambda state: print(json.dumps({"posted": state}), flush=True))

    def pour(self, op, peer, local, remote, length, depth, seconds):
        """Keeps `depth` transfers in flight, each posted again when it has ended."""
        lists = [self.agent.get_xfer_descs([(address, length, 0)], "DRAM") for address in (local, remote)]
        handles = [self.agent.initialize_xfer(op, *lists, peer, b"") for _ in range(depth)]
        states, until, times = [self.agent.transfer(handle) for handle in handles], time.monotonic() + seconds, 0
        print(json.dumps({"begun": True}), flush=True)
        while "PROC" in states:
            for at, handle in enumerate(handles):
                if states[at] == "PROC":
                    states[at] = self.agent.check_xfer_state(handle)
                if states[at] == "DONE" and time.monotonic() < until:
                    states[at], times = self.agent.transfer(handle), times + 1
        return {"times": times, "states": states}

    def notify(self, peer, message):
        self.agent.send_notif(peer, bytes.fromhex(message))
        return {}

    def listen(self):
        for sender, messages in self.agent.get_new_notifs().items():
            self.heard += [(sender if isinstance(sender, str) else sender.decode(), message.hex()) for message in messages]

    def hear(self, count, patience=10.0):
        until = time.monotonic() + patience
        while len(self.heard) < count and time.monotonic() < until:
            self.listen()
        heard, self.heard = self.heard, []
        return {"heard": heard}


def main():
    # Ends together with the process that started it.
    ctypes.CDLL(None).prctl(1, 9)
    agent = Agent()
    while True:
        # Without its own thread, NIXL makes progress only in calls.
        while not select.select([sys.stdin], [], [], 0.0005)[0]:
            if hasattr(agent, "agent"):
                agent.listen()
        line = sys.stdin.readline()
        if not line:
            os._exit(0)
        order = json.loads(line)
        print(json.dumps(getattr(agent, order.pop("do"))(**order)), flush=True)


main()
