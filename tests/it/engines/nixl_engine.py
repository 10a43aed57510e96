"""An independent engine on NIXL's wheel, pyzmq and msgspec. Answers each line of JSON with one."""

import ctypes
import json
import os
import select
import sys
import threading
import time

# NIXL and UCX log to standard output, where the parent reads answers. Redirect it to standard
# error.
sys.stdout = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

import msgspec
import numpy as np
import zmq
from nixl_cu12._api import nixl_agent, nixl_agent_config

LAYERS, HEADS, TOKENS, BLOCKS = 3, 4, 16, 24
encode, decode = msgspec.msgpack.encode, msgspec.msgpack.decode


def content(prompt, layer, tokens):
    """Returns the content of a prompt in a layer, as model.rs computes it: [head][token][4]."""
    head = np.arange(HEADS, dtype=np.uint64)[:, None]
    token = np.arange(tokens, dtype=np.uint64)[None, :]
    state = np.uint64(prompt) ^ (np.uint64(layer) << np.uint64(48)) ^ (head << np.uint64(32)) ^ token
    words = []
    for _ in range(4):
        state = state + np.uint64(0x9E3779B97F4A7C15)
        mixed = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        words.append((mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB))
    return np.stack(words, axis=-1)


class Rank:
    """A worker: its NIXL agent, and its heads of every block."""

    def __init__(self, name, heads):
        self.heads = heads
        self.agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=[]))
        self.agent.create_backend("UCX", {"engine_config": "NET_DEVICES=lo"})
        self.pool = np.zeros((LAYERS, BLOCKS, len(heads), TOKENS, 4), np.uint64)
        self.registered = self.agent.register_memory([(self.pool.ctypes.data, self.pool.nbytes, 0, "")], "DRAM")

    def parts(self, prompt, blocks, tokens):
        """Yields the place and the content of each block of a prompt."""
        for layer in range(LAYERS):
            words = content(prompt, layer, tokens)[self.heads]
            for index, block in enumerate(blocks):
                part = words[:, index * TOKENS:(index + 1) * TOKENS]
                yield self.pool[layer, block, :, :part.shape[1]], part


class Engine:
    ranks = ()

    def start(self, engine, tp=1):
        self.engine = engine
        each = HEADS // tp
        self.ranks = [Rank(f"{engine}-{rank}", range(rank * each, (rank + 1) * each)) for rank in range(tp)]
        self.heard, self.requests = [], []
        return {}

    def listen(self):
        for rank in self.ranks:
            for messages in rank.agent.get_new_notifs().values():
                self.heard += [message.decode() for message in messages]

    def hear(self, patience=0.0):
        """Returns the notifications since the last call; waits for the first one."""
        until = time.monotonic() + patience
        while not self.heard and time.monotonic() < until:
            self.listen()
        heard, self.heard = self.heard, []
        return {"heard": heard}

    def fill(self, prompt, blocks, tokens):
        for rank in self.ranks:
            for place, part in rank.parts(prompt, blocks, tokens):
                place[:] = part
        return {}

    def wrong(self, prompt, blocks, tokens):
        parts = [pair for rank in self.ranks for pair in rank.parts(prompt, blocks, tokens)]
        return sum(int((place != part).any(axis=-1).sum()) for place, part in parts)

    # Methods of a decode of vLLM.

    def handshake(self, port, tp=0):
        socket = zmq.Context.instance().socket(zmq.REQ)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, 5000)
        socket.connect(f"tcp://127.0.0.1:{port}")
        socket.send(encode((b"get_meta_msg", 0, tp)))
        payload = decode(socket.recv_multipart()[0])
        socket.close()
        return payload["compatibility_hash"], decode(payload["agent_metadata_bytes"])

    def connect(self, port, tp=1):
        """Connects the single rank of this engine to all workers of another."""
        [self.own] = self.ranks
        self.theirs = [self.handshake(port, rank)[1] for rank in range(tp)]
        names = [self.own.agent.add_remote_agent(theirs["agent_metadata"]) for theirs in self.theirs]
        self.peers = [name if isinstance(name, str) else name.decode() for name in names]
        return {"engine": self.theirs[0]["engine_id"]}

    def load(self, params, local, prompt, tokens, readers=1):
        """Reads the blocks of a request into local ones, notifies the prefill, and counts the wrong parts."""
        agent, pool = self.own.agent, self.own.pool
        notice = f"{params['remote_request_id']}:{readers}".encode()
        blocks = list(zip(local, params["remote_block_ids"][0]))
        pairs = [(layer, ours, block) for layer in range(LAYERS) for ours, block in blocks]
        handles = []
        for rank, (theirs, peer) in enumerate(zip(self.theirs, self.peers)):
            # Heads come first in a block, so the heads of a rank are contiguous.
            length, bases, strides = theirs["block_lens"][0], theirs["kv_caches_base_addr"], theirs["block_strides"]
            here = [(pool[layer, ours].ctypes.data + rank * length, length, 0) for layer, ours, _ in pairs]
            there = [(bases[layer] + block * strides[layer], length, 0) for layer, _, block in pairs]
            lists = [agent.get_xfer_descs(np.array(rows, np.uint64), "DRAM") for rows in (here, there)]
            handles.append(agent.initialize_xfer("READ", *lists, peer, notice))
        states, until = [agent.transfer(handle) for handle in handles], time.monotonic() + 10
        while "PROC" in states and time.monotonic() < until:
            states = [state if state != "PROC" else agent.check_xfer_state(handle)
                      for handle, state in zip(handles, states)]
        for handle, state in zip(handles, states):
            if state == "DONE":
                agent.release_xfer_handle(handle)
        return {"state": " ".join(sorted(set(states))), "wrong": self.wrong(prompt, local, tokens)}

    def heartbeat(self, names):
        return self.notify("HB:" + ",".join(names))

    def notify(self, message):
        for peer in self.peers:
            self.own.agent.send_notif(peer, message.encode())
        return {}

    # Methods of a prefill of vLLM.

    def serve(self, like, port=0):
        """Listens, and describes its memory in the way of the engine at the port `like`."""
        compatibility_hash, theirs = self.handshake(like)

        def payload(rank):
            layer, block = rank.pool[0].nbytes, rank.pool[0, 0].nbytes
            mine = dict(theirs, engine_id=self.engine, agent_metadata=rank.agent.get_agent_metadata(),
                        kv_caches_base_addr=[rank.pool.ctypes.data + at * layer for at in range(LAYERS)],
                        block_lens=[block] * LAYERS, block_strides=[block] * LAYERS,
                        num_blocks=BLOCKS, region_num_blocks=[BLOCKS] * LAYERS)
            mine.pop("kvx_metadata", None)
            return encode({"compatibility_hash": compatibility_hash, "agent_metadata_bytes": encode(mine)})

        payloads = [payload(rank) for rank in self.ranks]
        router = zmq.Context.instance().socket(zmq.ROUTER)
        router.bind(f"tcp://127.0.0.1:{port or '*'}")

        def answer():
            # Like vLLM's thread, this one ends at a malformed request or one for another worker.
            while True:
                identity, empty, request = router.recv_multipart()
                self.requests.append(request.hex())
                tag, pp, tp = decode(request)
                assert pp == 0
                router.send_multipart([identity, empty, payloads[tp], encode(time.perf_counter())])

        threading.Thread(target=answer, daemon=True).start()
        return {"port": int(router.getsockopt(zmq.LAST_ENDPOINT).decode().rsplit(":", 1)[1])}

    def asked(self):
        return {"requests": self.requests}


def main():
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL: end with the parent
    engine = Engine()
    while True:
        # Without a progress thread, NIXL makes progress only in calls.
        while not select.select([sys.stdin], [], [], 0.0005)[0]:
            engine.listen()
        line = sys.stdin.readline()
        if not line:
            os._exit(0)
        order = json.loads(line)
        try:
            answer = getattr(engine, order.pop("do"))(**order)
        except Exception as error:
            answer = {"error": repr(error)}
        print(json.dumps(answer), flush=True)


main()
