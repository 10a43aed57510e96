/* The part of Mooncake's C API that kvx calls.
 *
 * The `libtransfer_engine.so` of a Mooncake that was installed from source exports these functions, and so does the
 * adapter over the engine of a Python wheel. The bindings are generated from this file. */
#ifndef KVX_MOONCAKE_TRANSFER_ENGINE_H
#define KVX_MOONCAKE_TRANSFER_ENGINE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct transfer_request {
    int opcode; /* 0 reads, 1 writes */
    void *source;
    int32_t target_id;
    uint64_t target_offset; /* an address in the target's process */
    uint64_t length;
};

struct transfer_status {
    int status; /* 0 waiting, 1 pending, 2 invalid, 3 cancelled, 4 completed, 5 timed out, 6 failed */
    uint64_t transferred_bytes;
};

struct notify_msg {
    char *name;
    char *msg;
};

/* Results: 0 or an error code of the engine, positive or negative. Engines are pointers, batches are numbers. */
void *createTransferEngine(const char *metadata, const char *local_name, const char *ip, uint64_t rpc_port,
                           int auto_discover);
void destroyTransferEngine(void *engine);
void *installTransport(void *engine, const char *protocol, void **arguments);
int getLocalIpAndPort(void *engine, char *buffer, size_t size);
int registerLocalMemory(void *engine, void *address, size_t length, const char *location, int remote_accessible);
int unregisterLocalMemory(void *engine, void *address);
int32_t openSegmentNoCache(void *engine, const char *name);
uint64_t allocateBatchID(void *engine, size_t size);
int submitTransfer(void *engine, uint64_t batch, struct transfer_request *requests, size_t count);
int getTransferStatus(void *engine, uint64_t batch, size_t task, struct transfer_status *status);
int freeBatchID(void *engine, uint64_t batch);
int genNotifyInEngine(void *engine, uint64_t segment, struct notify_msg message);
struct notify_msg *getNotifsFromEngine(void *engine, int *count);
void freeNotifsMsgBuf(struct notify_msg *messages, int count);

#ifdef __cplusplus
}
#endif

#endif
