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
/* From here on the engine logs what is at least so grave, to standard error and for kvx_mooncake_log: 2 errors, 3 what ends the
 * process. Without effect where the environment says how it logs, or where the program had loaded it before. */
void kvx_mooncake_log_from(int severity);
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
