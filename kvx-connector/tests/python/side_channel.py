"""The side channel as vLLM speaks it, by pyzmq and msgspec: a line of JSON in, a line of JSON out."""

import json
import os
import sys
import threading
import time

sys.stdout = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

import msgspec
import zmq

CONTEXT = zmq.Context()
# The part of an answer that a decode of vLLM reads. It ignores unknown keys.
Payload = msgspec.defstruct("Payload", [("compatibility_hash", str), ("agent_metadata_bytes", bytes)])


class Peer:
    def __init__(self):
        self.requests = []

    def ask(self, port, requests, kind="REQ", host="127.0.0.1", limit_ms=5000, identity=None):
        """Sends these requests, one after the other, over one socket; what came back for each, or null."""
        socket = CONTEXT.socket(zmq.REQ if kind == "REQ" else zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.RCVTIMEO, limit_ms)
        # The loop answers pings, or the other end would give up.
        socket.setsockopt(zmq.HEARTBEAT_IVL, 50)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 2000)
        if identity:
            socket.setsockopt(zmq.IDENTITY, identity.encode())
        socket.connect(f"tcp://{'[' + host + ']' if ':' in host else host}:{port}")
        answers = []
        for request in requests:
            request = bytes.fromhex(request)
            socket.send_multipart([request] if kind == "REQ" else [b"", request])
            try:
                frames = socket.recv_multipart()
            except zmq.Again:
                answers.append(None)
                break
            answers.append(self.read(frames if kind == "REQ" else frames[1:]))
            time.sleep(0.15)  # some pings
        socket.close()
        return {"answers": answers}

    def read(self, frames):
        payload = msgspec.msgpack.decode(frames[0], type=Payload)
        inner = payload.agent_metadata_bytes
        metadata = msgspec.msgpack.decode(inner) if inner else None
        return {
            "frames": [frame.hex() for frame in frames],
            "hash": payload.compatibility_hash,
            "engine_id": metadata and metadata["engine_id"],
            "kvx_metadata": bool(metadata and metadata.get("kvx_metadata")),
            "clock": msgspec.msgpack.decode(frames[1]) if len(frames) > 1 else None,
        }

    def serve(self, payload, ranks, old_form=False, mute=False, port=0):
        """A prefill's listener. Like vLLM's it ends with a request that it cannot read or a rank that it does not have."""
        router = CONTEXT.socket(zmq.ROUTER)
        router.setsockopt(zmq.LINGER, 0)
        router.bind(f"tcp://127.0.0.1:{port or '*'}")
        payload, ranks = bytes.fromhex(payload), [tuple(rank) for rank in ranks]
        self.router, self.ended = router, None

        def listen():
            try:
                while True:
                    identity, empty, request = router.recv_multipart()
                    self.requests.append(request.hex())
                    if mute:
                        continue
                    if old_form:
                        tag, tp = msgspec.msgpack.decode(request)
                        pp = 0
                    else:
                        tag, pp, tp = msgspec.msgpack.decode(request)
                    if (pp, tp) not in ranks:
                        raise KeyError((pp, tp))
                    clock = [] if old_form else [msgspec.msgpack.encode(time.perf_counter())]
                    router.send_multipart([identity, empty, payload, *clock])
            except Exception as error:  # vLLM's thread is gone then
                self.ended = repr(error)

        threading.Thread(target=listen, daemon=True).start()
        return {"port": int(router.getsockopt(zmq.LAST_ENDPOINT).decode().rsplit(":", 1)[1])}

    def asked(self):
        return {"requests": self.requests, "ended": self.ended}


def main():
    peer = Peer()
    for line in sys.stdin:
        order = json.loads(line)
        answer = getattr(peer, order.pop("do"))(**order)
        print(json.dumps(answer), flush=True)
    os._exit(0)


main()
