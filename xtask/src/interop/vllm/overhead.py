"""Measures what a connector without transfers costs a step of vLLM: `overhead.py MODEL CONNECTOR [STEPS]`.

Runs vLLM's engine with its worker in this process, lets requests decode, and adds up the time of all
methods of the connector that vLLM calls in a step. Engines with workers of their own also pickle the
connector's metadata; that is measured apart. Prints a line of JSON, in microseconds per step."""

import json
import os
import pickle
import statistics
import sys
import time

MODEL, CONNECTOR = sys.argv[1:3]
STEPS = int(sys.argv[3]) if len(sys.argv) > 3 else 2000
CONFIGS = {
    "none": None,
    "KvxConnector": {"kv_connector": "KvxConnector", "kv_connector_module_path": "kvx.vllm", "kv_role": "kv_both"},
    "NixlConnector": {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"backends": ["UCX"]}},
}
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


class Hooks:
    """The methods of the connector's two objects, with the time that each has taken."""

    def __init__(self):
        self.taken, self.inside, self.metadata, self.results = {}, False, None, None

    def watch(self, connector):
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

        for name in sorted(set(dir(KVConnectorBase_V1)) | set(dir(SupportsHMA))):
            if not name.startswith("_") and not isinstance(getattr(type(connector), name, None), property):
                method = getattr(connector, name)
                if callable(method):
                    setattr(connector, name, self.timed(name, method))

    def timed(self, name, method):
        clock = time.perf_counter_ns

        def hook(*arguments, **options):
            if self.inside:  # one method of the connector calls another
                return method(*arguments, **options)
            self.inside = True
            begun = clock()
            try:
                result = method(*arguments, **options)
            finally:
                self.taken[name] = self.taken.get(name, 0) + clock() - begun
                self.inside = False
            if name == "build_connector_meta":
                self.metadata = result
            elif name == "get_transfer_results":
                self.results = result
            return result

        return hook

    def take(self):
        taken, self.taken = self.taken, {}
        return taken


def other_threads():
    """Returns the nanoseconds of CPU that this process has used outside its first thread."""
    used = 0
    for thread in os.listdir("/proc/self/task"):
        if int(thread) != os.getpid():
            try:
                with open(f"/proc/self/task/{thread}/schedstat") as stat:
                    used += int(stat.read().split()[0])
            except OSError:
                pass  # it has ended
    return used


def median_of(function, count=2000):
    taken = []
    for _ in range(count):
        begun = time.perf_counter_ns()
        function()
        taken.append(time.perf_counter_ns() - begun)
    return statistics.median(taken) / 1e3


def main():
    from vllm import EngineArgs, LLMEngine, SamplingParams
    from vllm.distributed import kv_transfer

    length = 1024
    arguments = dict(model=MODEL, skip_tokenizer_init=True, enforce_eager=True, block_size=128, num_gpu_blocks_override=256, max_model_len=length,
                     max_num_seqs=8, seed=0, distributed_executor_backend="uni")
    if CONFIGS[CONNECTOR]:
        arguments["kv_transfer_config"] = CONFIGS[CONNECTOR]
    engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
    hooks = Hooks()
    if CONFIGS[CONNECTOR]:
        hooks.watch(engine.engine_core.engine_core.scheduler.connector)
        hooks.watch(kv_transfer.get_kv_transfer_group())
    number, steps, names = 0, [], {}
    used, begun = None, None
    while len(steps) < STEPS:
        if not engine.has_unfinished_requests():
            number += 1
            options = SamplingParams(max_tokens=length - 64, temperature=0, ignore_eos=True, detokenize=False)
            engine.add_request(f"request-{number}", {"prompt_token_ids": [3 + (number * 31 + at) % 900 for at in range(16)]}, options)
            for _ in range(20):  # the prompt, and the first tokens
                engine.step()
            hooks.take()
        if used is None:
            used, begun = other_threads(), time.perf_counter()
        before = time.thread_time_ns()
        engine.step()
        cpu = time.thread_time_ns() - before
        taken = hooks.take()
        steps.append((sum(taken.values()), cpu))
        for name, nanoseconds in taken.items():
            names.setdefault(name, []).append(nanoseconds)
    used, seconds = other_threads() - used, time.perf_counter() - begun
    pickled = 0
    if CONFIGS[CONNECTOR]:
        pickled = sum(median_of(lambda: pickle.loads(pickle.dumps(each, 5))) for each in (hooks.metadata, hooks.results))
    print(json.dumps({
        "connector": CONNECTOR,
        "hooks": statistics.median(hook for hook, _ in steps) / 1e3,
        "pickled": pickled,
        "step": statistics.median(cpu for _, cpu in steps) / 1e3,
        "threads": used / 1e3 / len(steps),
        "seconds": seconds,
        "by_hook": {name: round(statistics.median(each) / 1e3, 2) for name, each in sorted(names.items())},
    }), flush=True)
    engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
