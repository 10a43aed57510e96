"""An independent engine on Mooncake's wheel, pyzmq and msgspec. Answers each line of JSON with one."""

import ctypes
import http.server
import json
import mmap
import os
import struct
import sys
import threading
import urllib.request

# The parent reads answers from standard output, so the engine's other output goes to standard
# error.
sys.stdout = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

import msgspec
import zmq
from mooncake.engine import TransferEngine

LAYERS, HEADS, TOKENS, BLOCKS = 3, 4, 16, 24
CONTENT = 32
FINISH, CONTINUE, ERROR, LAYOUT_MISS = range(4)
MASK = (1 << 64) - 1


class Question(msgspec.Struct, omit_defaults=True):
    """A decode's request, as vLLM encodes it."""

    remote_hostname: str
    remote_port: int
    remote_tp_size: int
    remote_tp_rank: int
    req_blocks: dict[str, tuple[str, list[list[int]]]]
    kv_caches_base_addr: list[int]
    block_lens: list[int]
    kv_block_lens: list[int]
    registered_layer_names: list[str] = []
    registered_layer_indices: list[int] = []
    registered_group_indices: list[int] = []
    registered_shared_group_ids: list[list[int]] = []
    registered_row_offsets: list[int] = []
    remote_pp_size: int = 1
    layout_id: int = 0


class Answer(msgspec.Struct, omit_defaults=True):
    """A prefill's answer, as vLLM encodes it."""

    status: int
    ok_reqs: list[str] | None = None
    err_reqs: list[str] | None = None
    err_msg: str | None = None
    layout_id: int = 0


class OlderQuestion(msgspec.Struct, omit_defaults=True):
    """A decode's request before vLLM 0.16. The answer is DONE or FAILED."""

    remote_hostname: str
    remote_port: int
    request_ids: list[str]
    kv_caches_base_addr: list[int]
    block_ids: list[list[int]]


DONE, FAILED = b"trans_done", b"trans_error"

encode = msgspec.msgpack.encode
question_of = msgspec.msgpack.Decoder(Question).decode
older_question_of = msgspec.msgpack.Decoder(OlderQuestion).decode
answer_of = msgspec.msgpack.Decoder(Answer).decode


def content(prompt, layer, head, token):
    """Returns the content of a head and token of a prompt, as model.rs computes it."""
    state = prompt ^ layer << 48 ^ head << 32 ^ token
    words = []
    for _ in range(4):
        state = (state + 0x9E3779B97F4A7C15) & MASK
        mixed = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & MASK
        words.append((mixed ^ mixed >> 27) * 0x94D049BB133111EB & MASK)
    return struct.pack("<4Q", *words)


class Engine:
    """One worker, in both roles, with the heads of its rank."""

    def start(self, engine, rank=0, ranks=1):
        self.engine_id, self.rank = engine, rank
        self.heads = range(rank * HEADS // ranks, (rank + 1) * HEADS // ranks)
        self.block = len(self.heads) * TOKENS * CONTENT
        self.engine = TransferEngine()
        assert self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
        self.pool = mmap.mmap(-1, LAYERS * BLOCKS * self.block)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.pool))
        assert self.engine.register_memory(self.address, len(self.pool)) == 0
        self.layout_id, self.known = 0x1234567, set()
        self.lock, self.ready, self.waiting = threading.Lock(), {}, []
        self.layouts, self.asked = {}, []
        self.context = zmq.Context()
        return {}

    def place(self, layer, block):
        return (layer * BLOCKS + block) * self.block

    def parts(self, prompt, blocks, tokens):
        """Yields the offset and content of each head and token in these last blocks of a prompt."""
        first = (-(-tokens // TOKENS) - len(blocks)) * TOKENS
        for layer in range(LAYERS):
            for place, head in enumerate(self.heads):
                for token in range(first, tokens):
                    block = blocks[(token - first) // TOKENS]
                    at = self.place(layer, block) + (place * TOKENS + token % TOKENS) * CONTENT
                    yield at, content(prompt, layer, head, token)

    # Methods of a decode.

    def load(self, params, local, prompt, tokens, patience=10.0):
        """Requests a transfer, and counts the wrong parts afterwards."""
        with urllib.request.urlopen(params["remote_bootstrap_addr"] + "/query", timeout=patience) as answer:
            listed = json.load(answer)
        workers = next(each for each in listed.values() if each["engine_id"] == params["remote_engine_id"])
        address = workers["worker_addr"]["0"]["0"]
        socket = self.context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, int(patience * 1000))
        socket.connect(address)
        said = {"ok": [], "err": [], "why": None, "brought": 0, "statuses": []}
        brings = address not in self.known
        try:
            while True:
                said["brought"] += brings
                socket.send(encode(self.question(params["transfer_id"], local, brings)))
                again = False
                while True:
                    answer = answer_of(socket.recv())
                    said["statuses"].append(answer.status)
                    said["ok"] += answer.ok_reqs or []
                    said["err"] += answer.err_reqs or []
                    said["why"] = answer.err_msg or said["why"]
                    if answer.layout_id == self.layout_id:
                        self.known.add(address)
                    if answer.status == LAYOUT_MISS:
                        self.known.discard(address)
                        brings = again = True
                    if answer.status != CONTINUE:
                        break
                if not again:
                    break
        finally:
            socket.close()
        parts = self.parts(prompt, local, tokens) if local else ()
        said["wrong"] = sum(self.pool[at:at + CONTENT] != part for at, part in parts)
        return said

    def load_older(self, params, wanted, tokens, patience=10.0):
        """Requests several prompts (name, blocks, prompt) at once, as before vLLM 0.16, and counts the wrong parts."""
        socket = self.context.socket(zmq.REQ)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, int(patience * 1000))
        socket.connect(f"tcp://{params['remote_host']}:{params['remote_port'] + self.rank}")
        question = OlderQuestion(
            remote_hostname="127.0.0.1",
            remote_port=self.engine.get_rpc_port(),
            request_ids=[name for name, _, _ in wanted],
            kv_caches_base_addr=[self.address + self.place(layer, 0) for layer in range(LAYERS)],
            block_ids=[blocks for _, blocks, _ in wanted],
        )
        try:
            socket.send(encode(question))
            said = socket.recv()
        finally:
            socket.close()
        parts = [part for _, blocks, prompt in wanted if blocks for part in self.parts(prompt, blocks, tokens)]
        wrong = sum(self.pool[at:at + CONTENT] != part for at, part in parts)
        return {"said": said.decode(), "wrong": wrong, "parts": len(parts)}

    def question(self, transfer, local, brings):
        """Returns a request with the layout (brings), or with only its id."""
        layers = range(LAYERS) if brings else ()
        return Question(
            remote_hostname="127.0.0.1",
            remote_port=self.engine.get_rpc_port(),
            remote_tp_size=1,
            remote_tp_rank=0,
            req_blocks={"d-1": (transfer, [local] if local else [])},
            kv_caches_base_addr=[self.address + self.place(layer, 0) for layer in layers],
            block_lens=[self.block for _ in layers],
            kv_block_lens=[self.block for _ in layers],
            registered_layer_names=[f"model.layers.{layer}.attn" for layer in layers],
            registered_layer_indices=list(layers),
            registered_group_indices=[0 for _ in layers],
            registered_shared_group_ids=[[0] for _ in layers],
            registered_row_offsets=[-1 for _ in layers],
            layout_id=self.layout_id,
        )

    def forget(self):
        """Changes the layout's id: the next request refers to a layout that the prefill does not have."""
        self.layout_id += 2
        return {}

    # Methods of a prefill.

    def serve(self, port=0):
        router = self.context.socket(zmq.ROUTER)
        listens = router.bind_to_random_port("tcp://127.0.0.1")
        threading.Thread(target=self.answer_all, args=(router,), daemon=True).start()
        listed = {"0": {"engine_id": self.engine_id, "worker_addr": {"0": {"0": f"tcp://127.0.0.1:{listens}"}}}}

        class Bootstrap(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                body = json.dumps(listed).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        http.server.ThreadingHTTPServer.allow_reuse_address = True
        server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Bootstrap)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return {"port": server.server_address[1]}

    def serve_older(self):
        """Serves like a prefill before vLLM 0.16, without a bootstrap server."""
        router = self.context.socket(zmq.ROUTER)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        threading.Thread(target=self.answer_all_older, args=(router,), daemon=True).start()
        return {"port": port}

    def answer_all_older(self, router):
        """Answers each message once, in a REQ's envelope, when all of its requests are computed."""
        waiting = []
        while True:
            if router.poll(10):
                identity, empty, frame = router.recv_multipart()
                question = older_question_of(frame)
                self.asked.append({"requests": question.request_ids, "blocks": question.block_ids})
                waiting.append((identity, empty, question))
            with self.lock:
                due = [each for each in waiting if self.is_due(each[2])]
            waiting = [each for each in waiting if each not in due]
            for identity, empty, question in due:
                router.send_multipart([identity, empty, DONE if self.write_older(question) else FAILED])

    def is_due(self, question):
        return all(not there or request in self.ready
                   for request, there in zip(question.request_ids, question.block_ids))

    def write_older(self, question):
        """Writes the blocks; both sides have the same layout and block length."""
        peer = f"{question.remote_hostname}:{question.remote_port}"
        for request, there in zip(question.request_ids, question.block_ids):
            here = self.ready[request] if there else []
            if here is None:
                return False
            pairs = [(layer, base, *pair) for layer, base in enumerate(question.kv_caches_base_addr)
                     for pair in zip(here[-len(there):], there)]
            sources = [self.address + self.place(layer, ours) for layer, _, ours, _ in pairs]
            targets = [base + theirs * self.block for _, base, _, theirs in pairs]
            lengths = [self.block] * len(pairs)
            if pairs and self.engine.batch_transfer_sync_write(peer, sources, targets, lengths) != 0:
                return False
        return True

    def publish(self, transfer, prompt, blocks, tokens, fails=False):
        """Computes a prompt and serves it to decodes, or marks it as failed."""
        if not fails:
            for at, part in self.parts(prompt, blocks, tokens):
                self.pool[at:at + CONTENT] = part
        with self.lock:
            self.ready[transfer] = None if fails else blocks
        return {}

    def answer_all(self, router):
        while True:
            if router.poll(10):
                identity, frame = router.recv_multipart()
                self.hear(router, identity, question_of(frame))
            with self.lock:
                due = [each for each in self.waiting if each[3] in self.ready]
                self.waiting = [each for each in self.waiting if each[3] not in self.ready]
            for identity, question, request, transfer, there in due:
                self.write(router, identity, question, request, transfer, there)

    def hear(self, router, identity, question):
        key = (question.remote_hostname, question.remote_port, question.layout_id)
        self.asked.append({"blocks": [there for _, there in question.req_blocks.values()],
                           "brings": bool(question.kv_caches_base_addr)})
        if question.kv_caches_base_addr:
            self.layouts[key] = question
        elif key not in self.layouts and any(there for _, there in question.req_blocks.values()):
            return router.send_multipart([identity, encode(Answer(status=LAYOUT_MISS))])
        for request, (transfer, there) in question.req_blocks.items():
            if there:
                self.waiting.append((identity, self.layouts[key], request, transfer, there[0]))
            else:
                router.send_multipart([identity, encode(Answer(status=FINISH, ok_reqs=[request]))])

    def write(self, router, identity, question, request, transfer, there):
        here = self.ready[transfer]
        failed = Answer(status=FINISH, err_reqs=[request], err_msg="failed on purpose")
        if question.registered_layer_indices != [int(name.split(".")[2]) for name in question.registered_layer_names]:
            # Like vLLM, which pairs layers by their names.
            failed.err_msg, here = f"layers are numbered {question.registered_layer_indices}", None
        if here is None:
            return router.send_multipart([identity, encode(failed)])
        sources, targets, lengths = [], [], []
        for layer, base in enumerate(question.kv_caches_base_addr):
            for ours, theirs in zip(here[-len(there):], there):
                sources.append(self.address + self.place(layer, ours))
                targets.append(base + theirs * question.block_lens[layer])
                lengths.append(question.kv_block_lens[layer])
        peer = f"{question.remote_hostname}:{question.remote_port}"
        done = self.engine.batch_transfer_sync_write(peer, sources, targets, lengths) == 0
        good = Answer(status=FINISH, ok_reqs=[request], layout_id=question.layout_id)
        router.send_multipart([identity, encode(good if done else failed)])

    def questions(self):
        """Returns the requests since the last call."""
        asked, self.asked = self.asked, []
        return {"asked": asked}


engine = Engine()
for line in sys.stdin:
    order = json.loads(line)
    try:
        answer = getattr(engine, order.pop("do"))(**order)
    except Exception as error:  # the test judges it
        answer = {"error": repr(error)}
    print(json.dumps(answer), flush=True)
