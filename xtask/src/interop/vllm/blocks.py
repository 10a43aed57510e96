"""Reads the blocks of a request at any server: `blocks.py PARAMS BACKEND INTO`.

PARAMS are the server's parameters for a decode. Completes the handshake like a decode, reads with
NIXL, and writes an array of bytes: layer, block, byte of the block. Sends the server no completion,
so that the blocks stay leased as if no decode had come."""

import json
import os
import sys
import time

import msgspec
import numpy
import zmq
from nixl._api import nixl_agent, nixl_agent_config

PARAMS, BACKEND, INTO = json.loads(sys.argv[1]), *sys.argv[2:]
LIMIT = 60  # seconds for each step

asked = zmq.Context.instance().socket(zmq.REQ)
asked.setsockopt(zmq.RCVTIMEO, LIMIT * 1000)
asked.connect(f"tcp://{PARAMS['remote_host']}:{PARAMS['remote_port']}")
asked.send(msgspec.msgpack.encode((b"get_meta_msg", 0, 0)))
peer = msgspec.msgpack.decode(msgspec.msgpack.decode(asked.recv_multipart()[0])["agent_metadata_bytes"])

blocks = PARAMS["remote_block_ids"][0]
layers, length = len(peer["block_lens"]), peer["block_lens"][0]
read = numpy.zeros((layers, len(blocks), length), numpy.uint8)
agent = nixl_agent(f"reader-{os.getpid()}", nixl_agent_config(backends=[BACKEND], num_threads=0))
agent.register_memory([(read.ctypes.data, read.nbytes, 0, "")], "DRAM")
remote = [(base + block * stride, length, peer["device_id"])
          for base, stride in zip(peer["kv_caches_base_addr"], peer["block_strides"]) for block in blocks]
local = [(read.ctypes.data + at * length, length, 0) for at in range(len(remote))]
transfer = agent.initialize_xfer("READ", agent.get_xfer_descs(local, "DRAM"), agent.get_xfer_descs(remote, "DRAM"),
                                 agent.add_remote_agent(peer["agent_metadata"]))
state, until = agent.transfer(transfer), time.time() + LIMIT
while state == "PROC" and time.time() < until:
    time.sleep(0.001)
    state = agent.check_xfer_state(transfer)
if state == "DONE":
    numpy.save(INTO, read)
# Skips the interpreter's shutdown: NIXL's agent crashes if its registered memory is freed before
# it.
sys.stderr.write("" if state == "DONE" else f"the read has state {state}\n")
sys.stderr.flush()
os._exit(state != "DONE")
