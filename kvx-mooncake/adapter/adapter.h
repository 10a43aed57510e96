/* What only the adapter has, beside transfer_engine.h. Texts belong to it and stay until the thread's next call. */
#ifndef KVX_MOONCAKE_ADAPTER_H
#define KVX_MOONCAKE_ADAPTER_H

#include "transfer_engine.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The version of the wheel whose engine it would load; "" if it cannot be told. Loads nothing. */
const char *kvx_mooncake_version(void);
/* Loads the engine, once in a process; null, or why not. With `etcd`, also its client for etcd, which starts threads and
 * signal handlers that stay. */
const char *kvx_mooncake_load(int etcd);
/* As createTransferEngine, for these network devices only. */
void *kvx_mooncake_create(const char *metadata, const char *local_name, const char *ip, uint64_t rpc_port,
                          int auto_discover, const char *const *devices, size_t count);
/* The state of a whole batch in one call: completed when all are, failed when one has, else waiting. */
int kvx_mooncake_batch_status(void *engine, uint64_t batch, struct transfer_status *status);
/* What went wrong in this thread's last call; "" when the engine said nothing. */
const char *kvx_mooncake_error(void);
/* What the engine last logged as an error, from all threads, newest last. */
const char *kvx_mooncake_log(void);

#ifdef __cplusplus
}
#endif

#endif
