"""A decode with NIXL's Python agent, with which loads.rs compares a connector.

`nixl_decode.py LAYERS BLOCK BLOCKS`, with the bytes per block and the blocks of the pool, reads a
prefill's parameters as one line of JSON per load. For each it prints the seconds until the blocks
have arrived. The first load includes the handshake."""

import ctypes
import json
import mmap
import os
import sys
import time

# NIXL and UCX log to standard output, where loads.rs would read a log line as an answer. Redirect
# it to standard error.
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
    """Returns the metadata of the prefill."""
    socket = zmq.Context.instance().socket(zmq.REQ)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVTIMEO, PATIENCE * 1000)
    socket.connect(f"tcp://{host}:{port}")
    socket.send(encode((b"get_meta_msg", 0, 0)))
    payload = decode(socket.recv_multipart()[0])
    socket.close()
    return decode(payload["agent_metadata_bytes"])


def rows(bases, strides, blocks):
    """Returns the address, length and device of each block of each layer."""
    bases, strides, blocks = (np.array(numbers, np.uint64) for numbers in (bases, strides, blocks))
    addresses = bases[:, None] + np.outer(strides, blocks)
    table = np.zeros((addresses.size, 3), np.uint64)
    table[:, 0], table[:, 1] = addresses.ravel(), BLOCK
    return table


def main():
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL: end with the parent
    agent = nixl_agent(f"python-{os.getpid()}", nixl_agent_config(enable_prog_thread=False, backends=[]))
    agent.create_backend("UCX", {})
    # Use shared memory and touch its pages, as kvx's pools do.
    pool = mmap.mmap(-1, LAYERS * BLOCKS * BLOCK)
    memory = np.frombuffer(pool, np.uint8)
    memory[::mmap.PAGESIZE] = 1
    base = memory.ctypes.data
    agent.register_memory([(base, memory.nbytes, 0, "")], "DRAM")
    ours = [base + layer * BLOCKS * BLOCK for layer in range(LAYERS)]
    zmq.Context.instance()  # start its threads here, not within the first load
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
            sys.exit(f"the read has state {state} after {took} s, not DONE")
        agent.release_xfer_handle(handle)
        # A load overwrites the pool's ones with the prefill's zeroes.
        if memory[::mmap.PAGESIZE].any():
            sys.exit("the read did not write all blocks")
        memory[::mmap.PAGESIZE] = 1
        say(took)
    os._exit(0)


main()
