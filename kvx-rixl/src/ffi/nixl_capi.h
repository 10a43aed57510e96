/* The part of NIXL's C API that kvx calls. Bindings are generated from this file.
 *
 * The `libnixl_capi.so` of NIXL 1.x has it, for CUDA and for ROCm, and so has RIXL's, whose sources of this interface are those of
 * NIXL 1.0 and 1.1. Later additions (memory views, lists with an agent for each entry, custom parameters) are not included. */
#ifndef KVX_NIXL_CAPI_H
#define KVX_NIXL_CAPI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Every function returns one of these. The codes of the C++ API are mapped to them: a lost peer is BACKEND. Before 1.5
 * all of them are BACKEND. */
enum {
    NIXL_CAPI_SUCCESS = 0,
    NIXL_CAPI_IN_PROG = 1,
    NIXL_CAPI_ERROR_INVALID_PARAM = -1,
    NIXL_CAPI_ERROR_BACKEND = -2,
    NIXL_CAPI_ERROR_INVALID_STATE = -3,
    NIXL_CAPI_ERROR_EXCEPTION = -4,
    NIXL_CAPI_ERROR_NO_TELEMETRY = -5,
    NIXL_CAPI_ERROR_NOT_FOUND = -6 /* since 1.5; before, and in RIXL, it is BACKEND */
};
typedef int nixl_status;

enum { NIXL_CAPI_MEM_DRAM = 0, NIXL_CAPI_MEM_VRAM = 1 };
enum { NIXL_CAPI_XFER_OP_READ = 0, NIXL_CAPI_XFER_OP_WRITE = 1 };
enum { NIXL_CAPI_THREAD_SYNC_NONE = 0, NIXL_CAPI_THREAD_SYNC_STRICT = 1, NIXL_CAPI_THREAD_SYNC_RW = 2 };

typedef struct nixl_agent_s *nixl_agent;
typedef struct nixl_params_s *nixl_params;
typedef struct nixl_backend_s *nixl_backend;
typedef struct nixl_opt_args_s *nixl_opt_args;
typedef struct nixl_xfer_dlist_s *nixl_xfer_dlist;
typedef struct nixl_reg_dlist_s *nixl_reg_dlist;
typedef struct nixl_xfer_req_s *nixl_xfer_req;
typedef struct nixl_notif_map_s *nixl_notif_map;

struct nixl_agent_config {
    bool enable_prog_thread;
    bool enable_listen_thread;
    int listen_port;
    int thread_sync;
    unsigned num_workers;
    uint64_t pthr_delay_us;
    uint64_t lthr_delay_us;
    bool capture_telemetry;
};

/* Agents and backends. */
nixl_status nixl_capi_create_configured_agent(const char *name, const struct nixl_agent_config *config, nixl_agent *agent);
nixl_status nixl_capi_destroy_agent(nixl_agent agent);
nixl_status nixl_capi_create_params(nixl_params *params);
nixl_status nixl_capi_params_add(nixl_params params, const char *key, const char *value);
nixl_status nixl_capi_destroy_params(nixl_params params);
nixl_status nixl_capi_create_backend(nixl_agent agent, const char *plugin, nixl_params params, nixl_backend *backend);
nixl_status nixl_capi_destroy_backend(nixl_backend backend);
nixl_status nixl_capi_create_opt_args(nixl_opt_args *args);
nixl_status nixl_capi_opt_args_add_backend(nixl_opt_args args, nixl_backend backend);
nixl_status nixl_capi_destroy_opt_args(nixl_opt_args args);

/* Metadata; the caller frees the returned bytes. */
nixl_status nixl_capi_get_local_md(nixl_agent agent, void **data, size_t *len);
nixl_status nixl_capi_get_local_partial_md(nixl_agent agent, nixl_reg_dlist descs, void **data, size_t *len, nixl_opt_args args);
nixl_status nixl_capi_load_remote_md(nixl_agent agent, const void *data, size_t len, char **agent_name);
nixl_status nixl_capi_invalidate_remote_md(nixl_agent agent, const char *remote_agent);
nixl_status nixl_capi_check_remote_md(nixl_agent agent, const char *remote_agent, nixl_xfer_dlist descs);
nixl_status nixl_capi_agent_make_connection(nixl_agent agent, const char *remote_agent, nixl_opt_args args);

/* Memory. */
nixl_status nixl_capi_create_reg_dlist(int memory, nixl_reg_dlist *list);
nixl_status nixl_capi_reg_dlist_add_desc(nixl_reg_dlist list, uintptr_t address, size_t len, uint64_t device, const void *metadata, size_t metadata_len);
nixl_status nixl_capi_destroy_reg_dlist(nixl_reg_dlist list);
nixl_status nixl_capi_register_mem(nixl_agent agent, nixl_reg_dlist list, nixl_opt_args args);
nixl_status nixl_capi_deregister_mem(nixl_agent agent, nixl_reg_dlist list, nixl_opt_args args);

/* Transfers. */
nixl_status nixl_capi_create_xfer_dlist(int memory, nixl_xfer_dlist *list);
nixl_status nixl_capi_xfer_dlist_add_desc(nixl_xfer_dlist list, uintptr_t address, size_t len, uint64_t device);
nixl_status nixl_capi_xfer_dlist_clear(nixl_xfer_dlist list);
nixl_status nixl_capi_destroy_xfer_dlist(nixl_xfer_dlist list);
nixl_status nixl_capi_create_xfer_req(nixl_agent agent, int operation, nixl_xfer_dlist local, nixl_xfer_dlist remote, const char *remote_agent, nixl_xfer_req *request, nixl_opt_args args);
nixl_status nixl_capi_post_xfer_req(nixl_agent agent, nixl_xfer_req request, nixl_opt_args args);
nixl_status nixl_capi_get_xfer_status(nixl_agent agent, nixl_xfer_req request);
nixl_status nixl_capi_release_xfer_req(nixl_agent agent, nixl_xfer_req request);
nixl_status nixl_capi_destroy_xfer_req(nixl_xfer_req request);

/* Notifications. */
nixl_status nixl_capi_gen_notif(nixl_agent agent, const char *remote_agent, const void *data, size_t len, nixl_opt_args args);
nixl_status nixl_capi_create_notif_map(nixl_notif_map *map);
nixl_status nixl_capi_destroy_notif_map(nixl_notif_map map);
nixl_status nixl_capi_get_notifs(nixl_agent agent, nixl_notif_map map, nixl_opt_args args);
nixl_status nixl_capi_notif_map_size(nixl_notif_map map, size_t *size);
nixl_status nixl_capi_notif_map_get_agent_at(nixl_notif_map map, size_t index, const char **agent);
nixl_status nixl_capi_notif_map_get_notifs_size(nixl_notif_map map, const char *agent, size_t *size);
nixl_status nixl_capi_notif_map_get_notif(nixl_notif_map map, const char *agent, size_t index, const void **data, size_t *len);
nixl_status nixl_capi_notif_map_clear(nixl_notif_map map);

#endif
