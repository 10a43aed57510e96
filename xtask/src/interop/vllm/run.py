"""Runs an unpatched vLLM pair whose NIXL has the backend KVX.

`run.py WORK BUILT PAGE [PART]...`: WORK contains the environment and the models, and BUILT the
library. PAGE is docs/operations/vllm.md, with the command line to run. Prints a table; exits with 1 if a check
failed."""

import json
import os
import signal
import subprocess
import sys
import time

from servers import Load, Vllm, abort, check, children, cpu, end, prompts, row, still_in_use, through, words_of

WORK, BUILT, PAGE = sys.argv[1:4]
DEADLINE = 5  # KVX_DEADLINE in the fault parts
IDLE = 10


class Pair:
    """A prefill and a decode instance."""

    def __init__(self, backend, route=None, model="tiny-float32", deadline=None, places=(None, None)):
        self.backend, self.route = backend, route
        variables = {"NIXL_PLUGIN_DIR": BUILT} if backend == "KVX" else {"UCX_NET_DEVICES": "lo"}
        if route:
            variables["KVX_BACKENDS"] = route
        if deadline:
            variables["KVX_DEADLINE"] = str(deadline)

        def instance(name, role, place):
            words = words_of(PAGE, "vllm serve MODEL")
            at = words.index("--kv-transfer-config") + 1
            transfer = json.loads(words[at]) | {"kv_role": role}
            if backend != "KVX":
                transfer.pop("kv_connector_extra_config")
            words[at] = json.dumps(transfer)
            return Vllm(WORK, words, f"{backend}-{name}", model, variables, *(place or ()))

        self.prefill = instance("prefill", "kv_producer", places[0])
        self.decode = instance("decode", "kv_consumer", places[1])

    def __enter__(self):
        self.prefill.start()
        self.decode.start()
        try:
            self.prefill.wait()
            self.decode.wait()
        except RuntimeError:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        self.prefill.stop()
        self.decode.stop()

    def equal(self, seed):
        """Counts the prompts with the same tokens as on a single instance."""
        got = []
        for prompt in prompts(seed):
            answer = through(self.prefill, self.decode, prompt)
            got.append((answer and answer["tokens"], self.prefill.plain(prompt)))
        check(len({tuple(plain) for _, plain in got}) > len(got) // 2, "the answers must differ from each other")
        return sum(ours == plain for ours, plain in got), len(got)

    def carried(self, what):
        """Checks that vLLM counted transfers, and that the processes have mapped KVX and not UCX."""
        transfers = self.decode.figure(["vllm:nixl_xfer_time_seconds_count"])
        moved = self.decode.figure(["vllm:nixl_bytes_transferred_sum"])
        check(transfers and moved, f"{what}: vLLM counts {transfers} transfers of {moved} bytes")
        check(not self.decode.figure(["vllm:nixl_num_failed_transfers_total"]), f"{what}: vLLM counts failed transfers")
        maps = self.prefill.maps() | self.decode.maps()
        if self.backend == "KVX":
            check("libplugin_KVX.so" in maps, f"{what}: KVX is not mapped: {maps}")
            # Without a route, kvx checks whether the system's UCX has an RDMA device.
            ucx = [name for name in maps if "UCX" in name or self.route and "libuc" in name]
            check(not ucx, f"{what}: UCX is mapped: {maps}")
            reached = self.decode.said(" reaches ")
            check(reached and (not self.route or f" by {self.route}: chosen" in reached[0]), f"{what}: {reached}")
        return f"{transfers:.0f}, {moved or 0:.0f} bytes"


def usual(backend, route):
    what = f"{backend} {route or ''}".strip()
    for model in ("tiny-float32", "tiny-bfloat16"):
        with Pair(backend, route, model) as pair:
            equal, count = pair.equal(1)
            check(equal == count, f"{what}: {equal} of {count} prompts are equal")
            carried = pair.carried(what)
            time.sleep(35)  # until all leases of the prefill have ended
            workers = children(pair.prefill.process.pid) + children(pair.decode.process.pid)
            before = cpu(workers)
            time.sleep(IDLE)
            idle = (cpu(workers) - before) / IDLE / 2 * 100
            row(what, model, f"{equal} of {count}", carried, f"{idle:.1f} %")
        if backend == "UCX":
            break


def faults(route):
    what = f"faults {route}"
    with Pair("KVX", route, deadline=DEADLINE) as pair:
        for seed, fault in enumerate(("stopped", "killed"), 2):
            load = Load(pair.prefill, pair.decode)
            time.sleep(5)
            waiting = []
            for prompt in prompts(100 + seed)[4:8]:
                status, params = pair.prefill.prefill(prompt)
                if check(status == 200, f"{what}: a prefill is {status}"):
                    waiting.append((prompt, params))
            if fault == "stopped":
                pair.prefill.signal(signal.SIGSTOP)
            else:
                pair.prefill.kill()
            slowest, statuses = 0, []
            for prompt, params in waiting:
                started = time.time()
                statuses.append(pair.decode.complete(prompt, 8, 60, kv_transfer_params=params)[0])
                slowest = max(slowest, time.time() - started)
            if fault == "stopped":
                time.sleep(DEADLINE)
                pair.prefill.signal(signal.SIGCONT)
            else:
                pair.prefill.start().wait()
            time.sleep(5)
            outcomes = load.end()
            check(slowest < 4 * DEADLINE + 15, f"{what}: {fault}, an answer after {slowest:.1f} s")
            check(pair.decode.healthy(), f"{what}: {fault}, the decode's engine must live")
            equal, count = pair.equal(seed)
            check(equal == count, f"{what}: after it was {fault}, {equal} of {count} prompts are equal")
            row(f"{what}: prefill {fault}", f"answers {statuses}, the slowest after {slowest:.1f} s; load {outcomes}",
                f"then {equal} of {count}", "", "")


def aborts(count=1000):
    """Runs clients that disconnect during requests."""
    with Pair("KVX", deadline=DEADLINE) as pair:
        abort(pair.prefill, pair.decode, count)
        check(pair.decode.healthy() and pair.prefill.healthy(), "aborts: both engines must live")
        equal, total = pair.equal(8)
        check(equal == total, f"aborts: then {equal} of {total} prompts are equal")
        used = still_in_use((pair.prefill, pair.decode))
        check(used == 0, f"aborts: {used} of a KV cache is still held")
        row(f"{count} aborts", f"KV cache in use then: {used}", f"then {equal} of {total}", "", "")


def hosts():
    """Runs a pair in two network namespaces, like two hosts, with only the settings from the page."""
    names, bridge, place = ["kvx-a", "kvx-b"], "kvxbr0", "10.91.7."

    def ip(*words, must=True):
        subprocess.run(["ip", *words], check=must, stderr=None if must else subprocess.DEVNULL)

    try:
        ip("link", "add", bridge, "type", "bridge")
        ip("addr", "add", place + "1/24", "dev", bridge)
        ip("link", "set", bridge, "up")
        for number, name in enumerate(names, 2):
            ip("netns", "add", name)
            ip("link", "add", f"kvxv{number}", "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", f"kvxv{number}", "master", bridge, "up")
            ip("-n", name, "addr", "add", f"{place}{number}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        places = [(f"{place}{number}", name) for number, name in enumerate(names, 2)]
        with Pair("KVX", places=places) as pair:
            equal, count = pair.equal(4)
            check(equal == count, f"hosts: {equal} of {count} prompts are equal")
            carried = pair.carried("hosts")
            bound, reached = pair.decode.said("tcp.bind 10.91.7.3 (VLLM_NIXL"), pair.decode.said(" reaches ")
            check(bound, "hosts: TCP must listen at the side channel's address")
            check(reached and "TCP: chosen" in reached[0], f"hosts: {reached}")
            row("two network namespaces", "tiny-float32", f"{equal} of {count}", carried, "")
    finally:
        for number, name in enumerate(names, 2):
            ip("link", "del", f"kvxv{number}", must=False)
            ip("netns", "del", name, must=False)
        ip("link", "del", bridge, must=False)


PARTS = {
    "SHM": lambda: usual("KVX", "SHM"),
    "TCP": lambda: usual("KVX", "TCP"),
    "UCX": lambda: usual("UCX", None),
    "faults SHM": lambda: faults("SHM"),
    "faults TCP": lambda: faults("TCP"),
    "aborts": aborts,
    "hosts": hosts,
}

for part in sys.argv[4:] or PARTS:
    print(f"== {part}", flush=True)
    PARTS[part]()
end(["what", "model, or result", "prompts equal to a plain instance", "vLLM's transfers", "idle workers, of a core"])
