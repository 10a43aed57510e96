"""Runs an agent of agent.py for a program in another language: each line of standard input is a JSON list of a method and
its arguments, each line of standard output is the answer. Bytes are {"hex": ...}. The first line has the agent's arguments."""

import json
import os
import sys

from agent import ANSWERS, Agent


class Served(Agent):
    def peek(self, offset, count, region=0):
        return bytes(self.memory[region][offset:offset + count])

    def poke(self, offset, data, region=0):
        self.memory[region][offset:offset + len(data)] = list(data)

    def move(self, op, peer, theirs, pairs, note=b"", make="direct", gpu=None, peer_gpu=None, region=0):
        pairs = [tuple(pair) for pair in pairs]
        handle = getattr(self, make)(op, peer, theirs, pairs, gpu=gpu, peer_gpu=peer_gpu, region=region)
        state = self.run(handle, note)
        self.nixl.release_xfer_handle(handle)
        return state


def decoded(thing):
    if isinstance(thing, dict):
        return bytes.fromhex(thing["hex"]) if "hex" in thing else thing
    return [decoded(each) for each in thing] if isinstance(thing, list) else thing


def encoded(thing):
    if isinstance(thing, bytes):
        return {"hex": thing.hex()}
    return [encoded(each) for each in thing] if isinstance(thing, (list, tuple)) else thing


agent = None
for line in sys.stdin:
    method, *args = decoded(json.loads(line))
    answer = None
    if method == "new":
        agent = Served(*args)
    else:
        answer = getattr(agent, method)(*args)
    ANSWERS.write(json.dumps(encoded(answer)).encode() + b"\n")
    ANSWERS.flush()
os._exit(0)
