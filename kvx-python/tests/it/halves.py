"""Drives both halves of two engines, as kvx/vllm.py does: `halves.py TEST`. Prints one line if all is as expected."""

import ctypes
import json
import os
import socket
import sys
import time
import uuid

from kvx import _kvx

BLOCK, BLOCKS, LAYERS, TOKENS = 4096, 64, 2, 16
LIMIT = 20
ASK = json.dumps({"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
                  "remote_block_ids": None, "remote_host": None, "remote_port": None})


def free_port():
    """Returns a free port that the system assigns to nobody."""
    for port in range(20000 + os.getpid() % 10000, 32000):
        with socket.socket() as held:
            try:
                held.bind(("127.0.0.1", port))
                return port
            except OSError:
                pass
    raise RuntimeError("no port is free")


class Engine:
    """The halves of an engine, and a step loop."""

    def __init__(self, name, port=None, shared=True, role="kv_both", **extra):
        self.port = port or free_port()
        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(self.port)
        os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] = "127.0.0.1"
        size = LAYERS * BLOCKS * BLOCK
        self.pool = _kvx.Pool(size) if shared else None
        owner = ctypes.create_string_buffer(size)
        address = self.pool.address() if shared else ctypes.addressof(owner)
        self.memory = (ctypes.c_char * size).from_address(address)
        channel = uuid.uuid4().hex
        self.worker = _kvx.Worker(channel, 0, 0)
        layers = [(f"layers.{at}", address + at * BLOCKS * BLOCK, BLOCKS, BLOCK, BLOCK, 0, 2) for at in range(LAYERS)]
        self.worker.register_kv_caches(layers=layers, layout="LBHNC", block_tokens=TOKENS, kernel_per_logical=1,
                                       transposed_keys=False, address=address, len=size, owner=owner, pool=self.pool,
                                       device=None)
        extra = {"kv_compat": "0.32", "backends": ["SHM", "TCP"], **extra}
        self.scheduler = _kvx.Scheduler(json.dumps({
            "config": {"kv_connector": "NixlConnector", "kv_role": role, "engine_id": name,
                       "kv_connector_extra_config": extra},
            "model": "a test", "factors": {}, "hash": "equal", "groups": [None], "tp": 1, "pp": 1, "dcp": 1,
            "data_parallel": 0, "block_size": TOKENS, "socket": channel}))
        self.sent, self.received, self.failed = [], [], []

    def step(self):
        self.worker.bind_connector_metadata(self.scheduler.build_connector_meta())
        sent, received, failed = self.worker.get_transfer_results()
        self.sent += sent
        self.received += received
        self.failed += failed

    def until(self, ended, limit=LIMIT):
        end = time.monotonic() + limit
        while not ended():
            assert time.monotonic() < end, (self.sent, self.received, self.failed)
            self.step()
            time.sleep(0.001)

    def bytes(self, block):
        return b"".join(self.memory[(at * BLOCKS + block) * BLOCK:(at * BLOCKS + block + 1) * BLOCK] for at in range(LAYERS))

    def compute(self, block, seed):
        for at in range(LAYERS):
            start = (at * BLOCKS + block) * BLOCK
            self.memory[start:start + BLOCK] = bytes([(seed + at) % 256]) * BLOCK

    def prefill(self, request, blocks, tokens):
        """Computes a prompt, and returns the parameters for a decode."""
        self.scheduler.on_new_request(request, tokens, ASK)
        assert self.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
        self.scheduler.update_state_after_alloc(request, [], 0)
        self.step()
        for at, block in enumerate(blocks):
            self.compute(block, 7 * at + len(request))
        keeps, params = self.scheduler.request_finished(request, "FINISHED_LENGTH_CAPPED", [blocks], tokens)
        assert keeps and params, params
        return params

    def load(self, request, params, blocks, tokens, computed=0):
        self.scheduler.on_new_request(request, tokens, params)
        count, asynchronous = self.scheduler.get_num_new_matched_tokens(request, computed)
        assert (count, asynchronous) == (tokens - computed, True), (count, asynchronous)
        self.scheduler.update_state_after_alloc(request, [blocks], count)

    def end(self):
        self.worker.shutdown()
        self.scheduler.shutdown()


def a_prompt_moves_between_two_engines(shared=True):
    prefill, decode = Engine("prefill", shared=shared), Engine("decode", shared=shared)
    params = prefill.prefill("p", [7, 3, 5], 40)
    decode.load("d", params, [9, 8], 40, computed=16)
    decode.until(lambda: decode.received)
    assert (decode.received, decode.failed) == (["d"], [])
    assert decode.bytes(9) == prefill.bytes(3) and decode.bytes(8) == prefill.bytes(5)
    # The second call for an admitted request, and its end.
    decode.scheduler.update_state_after_alloc("d", [], 0)
    assert decode.scheduler.request_finished("d", "FINISHED_STOPPED", [[1, 9, 8]], 44)[0] is False
    prefill.until(lambda: prefill.sent)
    assert prefill.sent == ["p"]
    decode.step()
    assert decode.received == ["d"], "each load is reported once"
    prefill.end()
    decode.end()


def adopted_memory_works_as_a_pool_does():
    a_prompt_moves_between_two_engines(shared=False)


def parameters_that_were_used_fail_the_second_load():
    prefill, decode = Engine("prefill"), Engine("decode")
    params = prefill.prefill("p", [7], 16)
    decode.load("first", params, [1], 16)
    decode.until(lambda: decode.received)
    prefill.until(lambda: prefill.sent)
    prefill.compute(7, 99)  # the block has other contents by now
    decode.load("second", params, [2], 16)
    decode.until(lambda: len(decode.received) == 2)
    assert decode.received == ["first", "second"] and decode.failed == ["second"], decode.failed
    prefill.end()
    decode.end()


def an_expired_lease_fails_the_load_and_never_fills_blocks():
    prefill, decode = Engine("prefill", kv_lease_duration=2), Engine("decode")
    # The engines meet, so that the load needs no handshake.
    decode.load("meets", prefill.prefill("m", [1], 16), [1], 16)
    decode.until(lambda: decode.received)
    params = prefill.prefill("p", [7, 8], 32)
    prefill.until(lambda: "p" in prefill.sent)  # no decode has come
    prefill.compute(7, 99)
    prefill.compute(8, 98)
    decode.load("late", params, [4, 5], 32)
    decode.until(lambda: len(decode.received) == 2)
    assert decode.failed == ["late"], decode.failed
    prefill.end()
    decode.end()


def a_request_that_is_aborted_while_it_loads_is_reported_once():
    prefill, decode = Engine("prefill"), Engine("decode")
    for turn in range(30):
        request, blocks = f"r{turn}", [turn % 8, 8 + turn % 8]
        params = prefill.prefill(f"p{turn}", blocks, 32)
        decode.load(request, params, [20, 21], 32)
        for _ in range(turn % 4):
            decode.step()
        keeps, none = decode.scheduler.request_finished(request, "FINISHED_ABORTED", [[20, 21]], 0)
        assert (keeps, none) == (False, None)
        decode.until(lambda: request in decode.received)
        prefill.until(lambda: f"p{turn}" in prefill.sent)
    decode.step()
    assert len(decode.received) == 30 == len(set(decode.received)), decode.received
    # One that is aborted before it was admitted frees the blocks at the prefill.
    params = prefill.prefill("unwanted", [1], 16)
    decode.scheduler.on_new_request("gone", 16, params)
    assert decode.scheduler.request_finished("gone", "FINISHED_ABORTED", [[]], 0) == (False, None)
    decode.step()
    prefill.until(lambda: "unwanted" in prefill.sent, 10)
    prefill.end()
    decode.end()


def parameters_of_the_wrong_form_are_not_used():
    decode = Engine("decode")
    wrong = ['{"do_remote_prefill": 1}', '{"do_remote_prefill": true}', '[]', '{}', '"text"',
             '{"do_remote_prefill": true, "remote_block_ids": [["a"]]}', '{', '{"x": NaN}', '{"x": "\\ud800"}',
             json.dumps({"do_remote_prefill": True, "x": 5_000_000 * "y"}),
             json.dumps({"do_remote_prefill": True, "remote_block_ids": [[1]], "remote_engine_id": "e", "remote_host": "127.0.0.1",
                         "remote_port": 1, "tp_size": 1, "remote_num_tokens": 16, "remote_request_id": 2000 * "y"}),
             '{"x": ' + 10_000 * '[' + 10_000 * ']' + '}', '{"remote_port": 1' + 400 * '0' + '}']
    for number, params in enumerate(wrong):
        request = f"r{number}"
        decode.scheduler.on_new_request(request, 16, params)
        assert decode.scheduler.get_num_new_matched_tokens(request, 0) == (0, False), params
        decode.scheduler.update_state_after_alloc(request, [], 0)
        decode.step()
        decode.scheduler.request_finished(request, "FINISHED_STOPPED", [[1]], 16)
    decode.step()
    assert not (decode.received or decode.sent or decode.failed)
    used = 1  # `{}` asks for nothing
    refused = len(decode.scheduler.get_kv_connector_stats()["num_refused_params"])
    assert refused == len(wrong) - used, refused
    assert "num_refused_params" not in decode.scheduler.get_kv_connector_stats(), "they are counted once"
    decode.end()


def a_restarted_prefill_with_the_same_name_is_not_taken_for_the_old_one():
    prefill, decode = Engine("prefill"), Engine("decode")
    decode.load("meets", prefill.prefill("m", [1], 16), [1], 16)
    decode.until(lambda: decode.received)
    params, port = prefill.prefill("p", [7], 16), prefill.port
    prefill.end()
    prefill = Engine("prefill", port)
    prefill.compute(7, 99)
    decode.load("late", params, [4], 16)
    decode.until(lambda: len(decode.received) == 2)
    assert decode.failed == ["late"], decode.failed
    # Blocks of the new one are loaded.
    decode.load("next", prefill.prefill("n", [2], 16), [5], 16)
    decode.until(lambda: len(decode.received) == 3)
    assert decode.failed == ["late"] and decode.bytes(5) == prefill.bytes(2)
    prefill.end()
    decode.end()


def a_forked_child_and_reports_of_another_version_are_refused():
    engine = Engine("engine")
    child = os.fork()
    if child == 0:
        refused = 0
        for call in [engine.scheduler.build_connector_meta, engine.worker.get_transfer_results]:
            try:
                call()
            except RuntimeError as error:
                refused += "spawn" in str(error)
        os._exit(0 if refused == 2 else 1)
    assert os.waitpid(child, 0)[1] == 0, "a forked child must be refused"
    for report in [b"x", b'{"format": 99}']:
        try:
            engine.worker.bind_connector_metadata(report)
            raise AssertionError("a report of another version must be an error")
        except RuntimeError as error:
            assert "one version of kvx" in str(error), error
    engine.end()


def a_lost_worker_fails_its_engine():
    engine = Engine("engine", kv_lease_duration=1)
    engine.prefill("p", [1], 16)
    engine.worker.shutdown()
    end = time.monotonic() + LIMIT
    while True:
        assert time.monotonic() < end
        try:
            engine.scheduler.build_connector_meta()
        except RuntimeError as error:
            assert "lost a worker" in str(error) and "restart this vLLM" in str(error), error
            break
        time.sleep(0.01)
    engine.scheduler.shutdown()
    # A worker whose scheduler ends without it.
    engine = Engine("engine")
    engine.scheduler.shutdown()
    end = time.monotonic() + LIMIT
    while True:
        assert time.monotonic() < end
        try:
            engine.worker.get_transfer_results()
        except RuntimeError as error:
            assert "lost its scheduler" in str(error), error
            break
        time.sleep(0.01)
    engine.worker.shutdown()


def a_producer_loads_nothing():
    prefill, producer = Engine("prefill"), Engine("producer", role="kv_producer")
    params = prefill.prefill("p", [7], 16)
    producer.scheduler.on_new_request("d", 16, params)
    assert producer.scheduler.get_num_new_matched_tokens("d", 0) == (0, False)
    assert producer.prefill("q", [1], 16), "it publishes"
    prefill.end()
    producer.end()


def switches():
    """Returns how often all threads but the first have begun to wait."""
    count = 0
    for thread in os.listdir("/proc/self/task"):
        if int(thread) != os.getpid():
            try:
                with open(f"/proc/self/task/{thread}/status") as status:
                    count += int(next(line for line in status if line.startswith("voluntary")).split()[1])
            except OSError:
                pass
    return count


def an_idle_step_wakes_no_thread():
    engine, steps = Engine("engine"), 20000
    before = switches()
    for _ in range(steps):
        engine.step()
    woken = switches() - before
    assert woken < steps / 10, f"{steps} idle steps woke threads {woken} times"
    # A step with work still does.
    prefill = Engine("prefill")
    engine.load("d", prefill.prefill("p", [7], 16), [1], 16)
    engine.until(lambda: engine.received)
    assert engine.failed == []
    prefill.end()
    engine.end()


globals()[sys.argv[1]]()
print(f"{sys.argv[1]}: as expected", flush=True)
