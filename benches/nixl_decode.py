"""NIXL's Python agent as a decode, which loads.rs compares a connector with: `nixl_decode.py LAYERS BLOCK BLOCKS`, with
bytes of a block and blocks of the pool. A prefill's parameters in a line of JSON, the seconds until the blocks were
there in a line. The first load begins with the handshake."""

import ctypes
import json
import mmap
import os
import sys
import time

# What NIXL and UCX log on standard output would be taken for an answer: it goes to standard error.
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

import msgspec
import numpy as np
import zmq
from nixl_cu12._api import nixl_agent, nixl_agent_config

PATIENCE = 30  # seconds
LAYERS, BLOCK, BLOCKS = map(int, sys.argv[1:4])
encode, decode = msgspec.msgpack.encode, msgspec.msgpack.decode


def say(what):
    print(what, file=answers, flush=True)


def handshake(host, port):
    """What the prefill tells of itself."""
    socket = zmq.Context.instance().socket(zmq.REQ)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVTIMEO, PATIENCE * 1000)
    socket.connect(f"tcp://{host}:{port}")
    socket.send(encode((b"get_meta_msg", 0, 0)))
    payload = decode(socket.recv_multipart()[0])
    socket.close()
    return decode(payload["agent_metadata_bytes"])


def rows(bases, strides, blocks):
    """Address, length and device of each block of each layer."""
    bases, strides, blocks = (np.array(numbers, np.uint64) for numbers in (bases, strides, blocks))
    addresses = bases[:, None] + np.outer(strides, blocks)
    table = np.zeros((addresses.size, 3), np.uint64)
    table[:, 0], table[:, 1] = addresses.ravel(), BLOCK
    return table


def main():
    ctypes.CDLL(None).prctl(1, 9)  # it ends with whoever started it
    agent = nixl_agent(f"python-{os.getpid()}", nixl_agent_config(enable_prog_thread=False, backends=[]))
    agent.create_backend("UCX", {})
    # Pages of shared memory, as those of kvx's pools are, and touched like them.
    pool = mmap.mmap(-1, LAYERS * BLOCKS * BLOCK)
    memory = np.frombuffer(pool, np.uint8)
    memory[::mmap.PAGESIZE] = 1
    base = memory.ctypes.data
    agent.register_memory([(base, memory.nbytes, 0, "")], "DRAM")
    ours = [base + layer * BLOCKS * BLOCK for layer in range(LAYERS)]
    zmq.Context.instance()  # its threads start here, and not within the first load
    say("ready")
    peer = None
    for line in sys.stdin:
        params = json.loads(line)
        begun = time.perf_counter()
        if peer is None:
            theirs = handshake(params["remote_host"], params["remote_port"])
            peer = agent.add_remote_agent(theirs["agent_metadata"])
            peer = peer if isinstance(peer, str) else peer.decode()
        blocks = params["remote_block_ids"][0]
        here = rows(ours, [BLOCK] * LAYERS, blocks)
        there = rows(theirs["kv_caches_base_addr"], theirs["block_strides"], blocks)
        lists = [agent.get_xfer_descs(table, "DRAM") for table in (here, there)]
        handle = agent.initialize_xfer("READ", *lists, peer, f"{params['remote_request_id']}:1".encode())
        state = agent.transfer(handle)
        while state == "PROC" and time.perf_counter() < begun + PATIENCE:
            state = agent.check_xfer_state(handle)
        took = time.perf_counter() - begun
        if state != "DONE":
            sys.exit(f"the read is {state} after {took} s")
        agent.release_xfer_handle(handle)
        # Loads fill the pool, with what the prefill's holds: zeroes.
        if memory[::mmap.PAGESIZE].any():
            sys.exit("the read has not brought all blocks")
        memory[::mmap.PAGESIZE] = 1
        say(took)
    os._exit(0)


main()
