"""KvxConnector: kvx's connector for an unmodified vLLM.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KvxConnector",
        "kv_connector_module_path": "kvx.vllm", "kv_role": "kv_both"}'

This class passes vLLM's values on to `kvx._kvx` and decides nothing. Nothing starts at import.
"""

import ctypes
import hashlib
import json
import os

import torch
from torch.overrides import TorchFunctionMode
from vllm import __version__ as VLLM_VERSION

# The versions of vLLM that were tested, as docs/operations/vllm-connector.md says.
TESTED = ("0.30", "0.31", "0.32", "0.33")

try:
    from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank
    from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backend
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorHandshakeMetadata,
        KVConnectorMetadata,
        KVConnectorRole,
        KVConnectorTransferResults,
        SupportsHMA,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats, NixlPromMetrics
    from vllm.logger import init_logger
    from vllm.v1.kv_cache_interface import get_kv_cache_spec_sliding_window
    from vllm.v1.metrics.utils import create_metric_per_engine
except ImportError as error:
    raise ImportError(
        f"KvxConnector was tested with vLLM {', '.join(TESTED)}, and this is {VLLM_VERSION}, without what it needs: "
        f"{error}; install a tested version"
    ) from error

# These versions differ:
# - vLLM 0.30 has no `get_mem_pool_context`: its KV cache is adopted, not allocated in shared memory.
# - vLLM 0.32 and newer count cached tokens by their source.
try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    CACHE_HIT_SOURCE = CacheHitSource.P2P
except ImportError:
    CACHE_HIT_SOURCE = None
# - vLLM 0.30 and 0.31 do not count notifications after expiry: `get_kv_connector_stats` leaves out
#   lists that vLLM's class does not have, because it fails on them.
# - vLLM 0.33 and newer ask `supports_sleep_mode`; `_check` refuses sleep mode in the others.

# Below vLLM's own logger, which has the handler: vLLM sets up no others.
logger = init_logger(f"vllm.{__name__}")


class KvxMetadata(KVConnectorMetadata):
    """The scheduler's report of a step, in the form of kvx."""

    def __init__(self, payload):
        self.payload = payload


class KvxHandshake(KVConnectorHandshakeMetadata):
    """A worker's data for the start of the scheduler's half."""

    def __init__(self, factors, digest):
        self.factors, self.digest = factors, digest


class KvxStats(NixlKVConnectorStats):
    """vLLM's statistics of transfers, and what only kvx counts."""

    OWN = {
        "num_stale_loads": "Num stale loads",
        "num_corrupt_loads": "Num corrupt loads",
        "num_refused_params": "Num refused params",
    }

    def reset(self):
        super().reset()
        self.data |= {name: [] for name in self.OWN}

    def is_empty(self):
        return super().is_empty() and not any(self.data[name] for name in self.OWN)

    def reduce(self):
        return super().reduce() | {title: len(self.data[name]) for name, title in self.OWN.items()}


class KvxPromMetrics(NixlPromMetrics):
    """The statistics as metrics of Prometheus, under vLLM's names."""

    OWN = {
        "num_stale_loads": "Number of loads that failed because the peer had reused their blocks.",
        "num_corrupt_loads": "Number of loads whose blocks did not match their digests.",
        "num_refused_params": "Number of requests computed here because their parameters were refused.",
    }

    def __init__(self, vllm_config, metric_types, labelnames, per_engine_labelvalues):
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._own = {}
        for name, text in self.OWN.items():
            counter = self._counter_cls(name=f"vllm:kvx_{name}", documentation=text, labelnames=labelnames)
            self._own[name] = create_metric_per_engine(counter, self.per_engine_labelvalues)

    def observe(self, transfer_stats_data, engine_idx=0):
        super().observe(transfer_stats_data, engine_idx)
        for name, counter in self._own.items():
            counter[engine_idx].inc(len(transfer_stats_data[name]))


class KvxConnector(KVConnectorBase_V1, SupportsHMA):
    """Loads and publishes KV cache through kvx."""

    _cache_hit_source = CACHE_HIT_SOURCE

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        _check(vllm_config)
        from kvx import _kvx

        self._config, self._cache = vllm_config, kv_cache_config
        self._half, self._worker, self._pool = None, None, None
        if role == KVConnectorRole.WORKER:
            tp, pp = get_tensor_model_parallel_rank(), get_pp_group().rank_in_group
            self._worker = _kvx.Worker(_socket(vllm_config), tp, pp)
            self._factors, self._digest = None, None

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config):
        if vllm_config.model_config is None or vllm_config.model_config.use_mla:
            return None
        # The heads of a block can then be divided among ranks.
        return "LBHNC"

    @classmethod
    def supports_sleep_mode(cls, vllm_config):
        return False  # its memory would be unmapped while peers may read it

    # In the scheduler's process.

    @property
    def _scheduler(self):
        if self._half is None:
            raise RuntimeError("KvxConnector has no data of the workers: it does not work inside MultiConnector")
        return self._half

    def set_xfer_handshake_metadata_pp_aware(self, metadata):
        from kvx import _kvx

        handshakes = list(metadata.values())
        if len({handshake.digest for handshake in handshakes}) != 1:
            raise ValueError(f"the workers of this engine have different models: {[h.factors for h in handshakes]}")
        self._half = _kvx.Scheduler(_engine(self._config, self._cache, handshakes[0]))
        host, port = self._scheduler.address()
        logger.info("KvxConnector: peers reach this engine at %s:%d", host, port)

    def get_loaded_kv_cache_group_ids(self, request):
        return self._cache.transfer_group_ids

    def on_new_request(self, request):
        params = request.kv_transfer_params
        self._scheduler.on_new_request(request.request_id, request.num_prompt_tokens, params and _text(params))

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return self._scheduler.get_num_new_matched_tokens(request.request_id, num_computed_tokens)

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        fill = ()
        if num_external_tokens > 0:
            fill = self._cache.select_transfer_block_ids(blocks.get_unhashed_block_ids_all_groups())
        self._scheduler.update_state_after_alloc(request.request_id, fill, num_external_tokens)

    def build_connector_meta(self, scheduler_output):
        return KvxMetadata(self._scheduler.build_connector_meta())

    def request_finished(self, request, block_ids):
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(self, request, block_ids):
        delay_free, params = self._scheduler.request_finished(
            request.request_id,
            request.status.name,
            self._cache.select_transfer_block_ids(block_ids),
            request.num_computed_tokens,
        )
        return delay_free, params and json.loads(params)

    def get_kv_connector_stats(self):
        taken = self._half and self._half.get_kv_connector_stats()
        if not taken:
            return None
        stats = KvxStats()
        stats.data |= {name: values for name, values in taken.items() if name in stats.data}
        return stats

    @classmethod
    def build_kv_connector_stats(cls, data=None):
        return KvxStats(data=data) if data is not None else KvxStats()

    @classmethod
    def build_prom_metrics(cls, vllm_config, metric_types, labelnames, per_engine_labelvalues):
        return KvxPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # In the process of a worker.

    def get_mem_pool_context(self):
        if self._config.device_config.device_type != "cpu":
            return None
        return _SharedAllocation(self)

    def register_kv_caches(self, kv_caches):
        caches = _Caches(self._config, self._cache, kv_caches)
        self._factors = _factors(self._config, caches.backend)
        self._digest = _digest(self._config, caches)
        described = caches.described()
        if self._pool and self._pool.address() != described["address"]:
            self._pool = None  # vLLM keeps its cache elsewhere
        logger.info(
            "KvxConnector: the KV cache lies in %s",
            "shared memory, which other engines of this host map" if self._pool else "memory that vLLM has allocated",
        )
        self._worker.register_kv_caches(pool=self._pool, **described)

    def get_handshake_metadata(self):
        return KvxHandshake(self._factors, self._digest)

    def bind_connector_metadata(self, connector_metadata):
        super().bind_connector_metadata(connector_metadata)
        if connector_metadata.payload:
            self._worker.bind_connector_metadata(connector_metadata.payload)

    def start_load_kv(self, forward_context, **kwargs):
        pass

    def wait_for_layer_load(self, layer_name):
        pass

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        pass

    def wait_for_save(self):
        pass

    def get_transfer_results(self, finished_req_ids):
        sent, received, failed = (set(names) for names in self._worker.get_transfer_results())
        return KVConnectorTransferResults(sent, received, failed)

    def shutdown(self):
        for half in [self._worker, self._half]:
            if half is not None:
                half.shutdown()


class _SharedAllocation(TorchFunctionMode):
    """Answers the allocation of the KV cache with memory that other processes can map."""

    def __init__(self, connector):
        super().__init__()
        self._connector = connector

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        size = args[0] if len(args) == 1 else None
        size = size[0] if isinstance(size, (tuple, list)) and len(size) == 1 else size
        is_cache = func is torch.zeros and isinstance(size, int) and kwargs.get("dtype") is torch.int8
        if not is_cache or self._connector._pool:
            return func(*args, **kwargs)
        from kvx import _kvx

        self._connector._pool = pool = _kvx.Pool(size)
        buffer = (ctypes.c_int8 * size).from_address(pool.address())
        return torch.frombuffer(buffer, dtype=torch.int8)


class _Caches:
    """The KV caches of a worker, as `_kvx` describes them."""

    def __init__(self, vllm_config, kv_cache_config, kv_caches):
        groups = kv_cache_config.transfer_group_index_by_layer
        self.tensors = {name: cache for name, cache in kv_caches.items() if name in groups}
        unusual = [name for name, cache in self.tensors.items() if not isinstance(cache, torch.Tensor) or cache.dim() != 4]
        if unusual:
            raise ValueError(f"KvxConnector moves attention caches only, and these layers have others: {unusual}")
        self.groups = groups
        model, self.block_size = vllm_config.model_config, vllm_config.cache_config.block_size
        self.heads = 0 if model.use_mla else model.get_total_num_kv_heads()
        self.layout = vllm_config.cache_config.kv_cache_layout
        self.backend = get_current_attn_backend(vllm_config).get_name()
        layers = vllm_config.compilation_config.static_forward_context
        # Blocks of equal shape hold their values in another order on other processors.
        self.orders = sorted({isa for name in self.tensors if (isa := getattr(layers.get(name), "isa", None))})

    def described(self):
        first = next(iter(self.tensors.values()))
        storage, device = first.untyped_storage(), first.device
        if len({cache.shape[2] for cache in self.tensors.values()}) > 1:
            raise ValueError("KvxConnector needs blocks of equally many tokens in all layers")
        if any(cache.untyped_storage().data_ptr() != storage.data_ptr() for cache in self.tensors.values()):
            raise ValueError("KvxConnector needs the KV cache in one allocation")
        tokens = first.shape[2]
        layers = []
        for name, cache in self.tensors.items():
            blocks, *inner = cache.shape
            size = cache.element_size()
            length = size
            for extent in inner:
                length *= extent
            layers.append((name, cache.data_ptr(), blocks, length, cache.stride(0) * size, self.groups[name], self.heads))
        kind = "rocm" if torch.version.hip else device.type
        return {
            "layers": layers,
            "layout": str(getattr(self.layout, "value", self.layout) or "LBHNC"),
            "block_tokens": tokens,
            "kernel_per_logical": self.block_size // tokens,
            "transposed_keys": self.backend == "CPU_ATTN",
            "address": storage.data_ptr(),
            "len": storage.nbytes(),
            "owner": storage,
            "device": None if device.type == "cpu" else (kind, device.index or 0),
        }


def _check(vllm_config):
    """Refuses what KvxConnector does not support, and warns of versions that were not tested."""
    if ".".join(VLLM_VERSION.split(".")[:2]) not in TESTED:
        logger.warning(
            "KvxConnector was tested with vLLM %s, and this is %s: compare its answers with those of one instance "
            "alone before you use it",
            ", ".join(TESTED),
            VLLM_VERSION,
        )
    if getattr(vllm_config.model_config, "enable_sleep_mode", False):
        raise ValueError("KvxConnector does not support sleep mode: start vLLM without --enable-sleep-mode")
    parallel = vllm_config.parallel_config
    if getattr(parallel, "nnodes", 1) > 1 or parallel.distributed_executor_backend == "ray":
        raise ValueError("KvxConnector needs all workers of an engine on one host, without Ray")
    if parallel.prefill_context_parallel_size > 1:
        raise ValueError("KvxConnector does not support prefill_context_parallel_size")
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config or {}
    if extra.get("bidirectional_kv_xfer") and vllm_config.kv_transfer_config.kv_role != "kv_both":
        raise ValueError('KvxConnector needs "kv_role": "kv_both" for bidirectional_kv_xfer')


def _text(params):
    """Writes the parameters of a client as JSON, or as text that is not JSON."""
    try:
        return json.dumps(params)
    except (RecursionError, TypeError, ValueError):
        return "they cannot be written as JSON"


def _factors(vllm_config, backend):
    """What vLLM hashes to find out whether two engines fit together."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    return {
        "vllm_version": VLLM_VERSION,
        "dtype": str(model.dtype),
        "num_kv_heads": model.get_total_num_kv_heads(),
        "head_size": model.get_head_size(),
        "num_hidden_layers": model.get_total_num_hidden_layers(),
        "attn_backend_name": backend,
        "cache_dtype": str(cache.cache_dtype),
        "is_hma_enabled": not vllm_config.scheduler_config.disable_hybrid_kv_cache_manager,
    }


def _digest(vllm_config, caches):
    """vLLM's own compatibility hash, and what it does not see."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import compute_nixl_compatibility_hash

    digest = compute_nixl_compatibility_hash(vllm_config, caches.backend, "pull")
    orders = [order for order in caches.orders if order != "vec"]
    if orders:
        digest = hashlib.sha256(f"{digest} {orders}".encode()).hexdigest()
    return digest


def _socket(vllm_config):
    """The name under which the halves of this engine find each other."""
    transfer = vllm_config.kv_transfer_config
    parts = [transfer.engine_id, vllm_config.instance_id, str(vllm_config.parallel_config.data_parallel_index)]
    return hashlib.sha256("/".join(parts).encode()).hexdigest()[:24]


def _engine(vllm_config, kv_cache_config, handshake):
    """Describes an engine for the scheduler's half."""
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    rank = parallel.data_parallel_index
    extra = {"kv_compat": ".".join(VLLM_VERSION.split(".")[:2]), **(transfer.kv_connector_extra_config or {})}
    windows = [get_kv_cache_spec_sliding_window(group.kv_cache_spec) for group in kv_cache_config.transfer_groups]
    return json.dumps({
        "config": {
            "kv_connector": "NixlConnector",
            "kv_role": transfer.kv_role,
            "engine_id": transfer.engine_id.removesuffix(f"_dp{rank}"),
            "kv_buffer_device": transfer.kv_buffer_device,
            "kv_load_failure_policy": transfer.kv_load_failure_policy,
            "kv_connector_extra_config": extra,
        },
        "model": vllm_config.model_config.model,
        "factors": handshake.factors,
        "hash": handshake.digest,
        "groups": windows,
        "tp": parallel.tensor_parallel_size,
        "pp": parallel.pipeline_parallel_size,
        "dcp": parallel.decode_context_parallel_size,
        "data_parallel": rank,
        "block_size": vllm_config.cache_config.block_size,
        "socket": _socket(vllm_config),
    })
