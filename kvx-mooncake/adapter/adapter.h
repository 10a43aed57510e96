/* The functions that only the adapter has, besides transfer_engine.h. The adapter owns the texts, which stay valid until
 * the thread's next call. */
#ifndef KVX_MOONCAKE_ADAPTER_H
#define KVX_MOONCAKE_ADAPTER_H

#include "transfer_engine.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Returns the version of the wheel whose engine it would load; "" if it is unknown. Loads nothing. */
const char *kvx_mooncake_version(void);
/* Loads the engine, once per process; returns null, or the reason why it failed. With `etcd`, also loads its etcd client,
 * which starts threads and installs signal handlers permanently. */
const char *kvx_mooncake_load(int etcd);
/* Sets the minimum severity that the engine logs, to standard error and for kvx_mooncake_log: 2 errors, 3 fatal errors.
 * Has no effect if the environment configures the log, or if the program had loaded the engine before. */
void kvx_mooncake_log_from(int severity);
/* Works like createTransferEngine, with these network devices only. */
void *kvx_mooncake_create(const char *metadata, const char *local_name, const char *ip, uint64_t rpc_port,
                          int auto_discover, const char *const *devices, size_t count);
/* Returns the state of a whole batch: completed when all pieces are, failed when one has failed, otherwise waiting. */
int kvx_mooncake_batch_status(void *engine, uint64_t batch, struct transfer_status *status);
/* Returns the error text of this thread's last call; "" if the engine gave none. */
const char *kvx_mooncake_error(void);
/* Returns the last errors that the engine logged, from all threads, newest last. */
const char *kvx_mooncake_log(void);

#ifdef __cplusplus
}
#endif

#endif
