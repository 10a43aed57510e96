// The C functions of transfer_engine.h and adapter.h over the engine of Mooncake's Python wheel,
// which exports only its C++ class.
//
// The wheel is not linked but loaded, by its absolute path, and every function is resolved by its
// mangled name: this file compiles without the wheel, and reports functions that another wheel
// lacks. The layouts below are the engine's. kvx rejects versions that they were not tested with,
// and tests them at start-up.

#include "adapter.h"

#include <dirent.h>
#include <dlfcn.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <ctime>
#include <deque>
#include <exception>
#include <mutex>
#include <new>
#include <string>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using std::string;

// Layouts of the engine's types.

struct Request {
    int opcode;
    void *source;
    uint64_t target_id;
    uint64_t target_offset;
    size_t length;
    int advise_retry_count = 0;
    int transport_hint = 0;
    uint64_t task_group_id = 0;
};
static_assert(sizeof(Request) == 56, "the engine steps through requests by 56 bytes");

struct TaskStatus {
    int state;
    size_t transferred_bytes;
};
static_assert(sizeof(TaskStatus) == 16, "the engine's status has 16 bytes");

struct Notification {
    string name;
    string message;
};
static_assert(sizeof(Notification) == 64, "the engine steps through notifications by 64 bytes");

// Not trivial, so that it is returned through a hidden pointer, as the engine returns it.
struct Status {
    uint16_t code;
    const char *message;
    Status(const Status &) = delete;
    ~Status() { delete[] message; }
};
static_assert(sizeof(Status) == 16, "the engine's result has 16 bytes");

struct alignas(16) Engine {
    char storage[256]; // the engine's object has 56
};

// The engine's functions as free functions, whose first argument is the object.

struct Functions {
    void (*construct)(Engine *, bool);
    void (*construct_for)(Engine *, bool, const std::vector<string> &);
    void (*destruct)(Engine *);
    int (*init)(Engine *, const string &, const string &, const string &, unsigned long);
    void *(*install)(Engine *, const string &, void **);
    string (*local_name)(Engine *);
    int (*enroll)(Engine *, void *, unsigned long, const string &, bool, bool);
    int (*discharge)(Engine *, void *, bool);
    uint64_t (*open_segment)(Engine *, const string &);
    int (*sync_segment)(Engine *, const string &);
    uint64_t (*allocate_batch)(Engine *, unsigned long);
    Status (*submit)(Engine *, unsigned long, const std::vector<Request> &);
    Status (*task_status)(Engine *, unsigned long, unsigned long, TaskStatus &);
    Status (*batch_status)(Engine *, unsigned long, TaskStatus &);
    Status (*free_batch)(Engine *, unsigned long);
    int (*send)(Engine *, unsigned long, Notification);
    int (*receive)(Engine *, std::vector<Notification> &);
} engine_functions;

#define CLASS "_ZN8mooncake14TransferEngine"
#define STRING "NSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
#define OF_STRING "KNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"

struct Symbol {
    void *slot;
    const char *name;
};

const Symbol symbols[] = {
    {&engine_functions.construct, CLASS "C1Eb"},
    {&engine_functions.construct_for, CLASS "C1EbRKSt6vectorI" STRING "SaIS7_EE"},
    {&engine_functions.destruct, CLASS "D1Ev"},
    {&engine_functions.init, CLASS "4initER" OF_STRING "S8_S8_m"},
    {&engine_functions.install, CLASS "16installTransportER" OF_STRING "PPv"},
    {&engine_functions.local_name, CLASS "17getLocalIpAndPortB5cxx11Ev"},
    {&engine_functions.enroll, CLASS "19registerLocalMemoryEPvmR" OF_STRING "bb"},
    {&engine_functions.discharge, CLASS "21unregisterLocalMemoryEPvb"},
    {&engine_functions.open_segment, CLASS "11openSegmentER" OF_STRING},
    {&engine_functions.sync_segment, CLASS "16syncSegmentCacheER" OF_STRING},
    {&engine_functions.allocate_batch, CLASS "15allocateBatchIDEm"},
    {&engine_functions.submit, CLASS "14submitTransferEmRKSt6vectorINS_9Transport15TransferRequestESaIS3_EE"},
    {&engine_functions.task_status, CLASS "17getTransferStatusEmmRNS_9Transport14TransferStatusE"},
    {&engine_functions.batch_status, CLASS "22getBatchTransferStatusEmRNS_9Transport14TransferStatusE"},
    {&engine_functions.free_batch, CLASS "11freeBatchIDEm"},
    {&engine_functions.send, CLASS "14sendNotifyByIDEmNS_16TransferMetadata10NotifyDescE"},
    {&engine_functions.receive, CLASS "11getNotifiesERSt6vectorINS_16TransferMetadata10NotifyDescESaIS3_EE"},
};

thread_local string last_error;

// Runs a function that may throw; an exception becomes an error with its text.
template <typename T, typename F>
T guarded(T failed, F &&run) {
    last_error.clear();
    try {
        return run();
    } catch (const std::exception &error) {
        last_error = string("the engine threw an exception: ") + error.what();
    } catch (...) {
        last_error = "the engine threw something other than an exception";
    }
    return failed;
}

int told(const Status &status) {
    if (status.message) last_error = status.message;
    return status.code;
}

// The engine logs with glog. A listener keeps its error lines, because its results do not contain
// them.

constexpr int ERROR = 2;
constexpr size_t KEPT = 8;
std::mutex log_lock;
auto &log_lines = *new std::deque<string>; // never freed: the engine's threads log until the process ends

// The beginning of the virtual table of glog's LogSink.
class Listener {
public:
    virtual ~Listener() = default;
    virtual void send(int severity, const char *, const char *file, int line, const std::tm *, const char *text,
                      size_t length) {
        if (severity < ERROR) return;
        std::lock_guard<std::mutex> guard(log_lock);
        if (log_lines.size() == KEPT) log_lines.pop_front();
        log_lines.push_back(string(text, length) + " (" + file + ":" + std::to_string(line) + ")");
    }
    virtual void wait_till_sent() {}
};

void listen_to_log(void *engine) {
    // Resolved through the engine, because the wheel includes its own glog.
    auto add = reinterpret_cast<void (*)(Listener *)>(dlsym(engine, "_ZN6google10AddLogSinkEPNS_7LogSinkE"));
    if (add) add(new Listener); // for the life of the process, like the engine
}

// The location of glog's minimum severity, which the engine sets when it is loaded. Null if the
// adapter must not change it.
int *log_level = nullptr;

// Returns whether the environment configures the engine's log, by its own variables or by glog's.
bool chosen_by_environment() {
    for (char **variable = environ; *variable; ++variable) {
        for (const char *begin : {"MC_LOG_LEVEL=", "MC_LOG_DIR=", "GLOG_"}) {
            if (!std::strncmp(*variable, begin, std::strlen(begin))) return true;
        }
    }
    return false;
}

string engine_file() {
    const char *chosen = std::getenv("KVX_MOONCAKE_ENGINE");
    if (chosen && *chosen) return chosen;
#ifdef KVX_MOONCAKE_ENGINE_FILE
    return KVX_MOONCAKE_ENGINE_FILE;
#else
    return "";
#endif
}

string folder_of(const string &path) {
    size_t slash = path.rfind('/');
    return slash == string::npos ? "." : path.substr(0, slash);
}

// pip records an installed wheel as a folder `<name>-<version>.dist-info` beside the package's.
string wheel_version(const string &engine) {
    DIR *folder = opendir((folder_of(engine) + "/..").c_str());
    if (!folder) return "";
    const string begin = "mooncake_transfer_engine", end = ".dist-info";
    string version;
    while (const dirent *entry = readdir(folder)) {
        const string name = entry->d_name;
        size_t dash = name.find('-');
        if (dash == string::npos || name.compare(0, begin.size(), begin) || name.size() < dash + 1 + end.size() ||
            name.compare(name.size() - end.size(), end.size(), end))
            continue;
        version = name.substr(dash + 1, name.size() - end.size() - dash - 1);
        break;
    }
    closedir(folder);
    return version;
}

string own_folder() {
    Dl_info info;
    if (!dladdr(reinterpret_cast<void *>(&own_folder), &info) || !info.dli_fname) return ".";
    return folder_of(info.dli_fname);
}

string linker_says() {
    const char *why = dlerror();
    return why ? why : "the dynamic linker gave no reason";
}

string load(bool etcd) {
    const string file = engine_file();
    if (file.empty()) return "KVX_MOONCAKE_ENGINE is not set: it names the wheel's mooncake/engine.so";
    // The engine is a Python module. It needs Python's symbols, globally, but no running
    // interpreter.
    if (!dlsym(RTLD_DEFAULT, "PyInstanceMethod_Type") &&
        !dlopen("libpython3.11.so.1.0", RTLD_NOW | RTLD_GLOBAL | RTLD_NODELETE))
        return linker_says();
    // Its etcd client is written in Go, whose runtime would start threads and take signals
    // permanently. The stand-in has the same name for the dynamic linker, which therefore loads no
    // other.
    const string stand_in = own_folder() + "/libetcd_wrapper.so";
    if (!etcd && !dlopen(stand_in.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE)) return linker_says();
    const bool is_theirs = dlopen(file.c_str(), RTLD_NOW | RTLD_NOLOAD) != nullptr;
    void *engine = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (!engine) return linker_says();
    for (const Symbol &symbol : symbols) {
        void *found = dlsym(engine, symbol.name);
        if (!found) return file + " has no symbol " + symbol.name;
        std::memcpy(symbol.slot, &found, sizeof found);
    }
    listen_to_log(engine);
    if (!is_theirs && !chosen_by_environment()) {
        log_level = static_cast<int *>(dlsym(engine, "_ZN3fLI17FLAGS_minloglevelE"));
    }
    return "";
}

Engine *create(const char *metadata, const char *local_name, const char *ip, uint64_t rpc_port, bool auto_discover,
               const char *const *devices, size_t count) {
    return guarded<Engine *>(nullptr, [&]() -> Engine * {
        auto *engine = new Engine;
        if (count == 0) {
            engine_functions.construct(engine, auto_discover);
        } else {
            engine_functions.construct_for(engine, auto_discover, std::vector<string>(devices, devices + count));
        }
        const int code = engine_functions.init(engine, metadata, local_name, ip, rpc_port);
        if (code == 0) return engine;
        last_error = "the engine's init returned " + std::to_string(code);
        engine_functions.destruct(engine);
        delete engine;
        return nullptr;
    });
}

Engine *of(void *engine) { return static_cast<Engine *>(engine); }

// Handles count up from 0; an error is a small negative number in an unsigned type.
int32_t segment(uint64_t handle) { return static_cast<int32_t>(static_cast<int64_t>(handle)); }

char *copied(const string &text) {
    char *copy = static_cast<char *>(std::malloc(text.size() + 1));
    if (copy) std::memcpy(copy, text.c_str(), text.size() + 1);
    return copy;
}

const char *kept_text(string text) {
    thread_local string kept;
    kept = std::move(text);
    return kept.c_str();
}

} // namespace

EXPORT const char *kvx_mooncake_version(void) { return kept_text(wheel_version(engine_file())); }

EXPORT const char *kvx_mooncake_load(int etcd) {
    static std::mutex lock;
    static bool loaded = false;
    std::lock_guard<std::mutex> guard(lock);
    if (loaded) return nullptr;
    const string why = guarded<string>("", [&] { return load(etcd != 0); });
    if (!why.empty()) return kept_text(why);
    if (!last_error.empty()) return last_error.c_str();
    loaded = true;
    return nullptr;
}

EXPORT void kvx_mooncake_log_from(int severity) {
    if (log_level) *log_level = severity;
}

EXPORT void *kvx_mooncake_create(const char *metadata, const char *local_name, const char *ip, uint64_t rpc_port,
                                 int auto_discover, const char *const *devices, size_t count) {
    return create(metadata, local_name, ip, rpc_port, auto_discover != 0, devices, count);
}

EXPORT const char *kvx_mooncake_error(void) { return last_error.c_str(); }

EXPORT const char *kvx_mooncake_log(void) {
    std::lock_guard<std::mutex> guard(log_lock);
    string all;
    for (const string &line : log_lines) all += (all.empty() ? "" : "; ") + line;
    return kept_text(std::move(all));
}

EXPORT void *createTransferEngine(const char *metadata, const char *local_name, const char *ip, uint64_t rpc_port,
                                  int auto_discover) {
    return create(metadata, local_name, ip, rpc_port, auto_discover != 0, nullptr, 0);
}

EXPORT void destroyTransferEngine(void *engine) {
    guarded<int>(0, [&] {
        engine_functions.destruct(of(engine));
        delete of(engine);
        return 0;
    });
}

EXPORT void *installTransport(void *engine, const char *protocol, void **arguments) {
    return guarded<void *>(nullptr, [&] { return engine_functions.install(of(engine), protocol, arguments); });
}

EXPORT int getLocalIpAndPort(void *engine, char *buffer, size_t size) {
    return guarded<int>(-1, [&] {
        const string name = engine_functions.local_name(of(engine));
        if (name.size() >= size) return -1;
        std::memcpy(buffer, name.c_str(), name.size() + 1);
        return 0;
    });
}

EXPORT int registerLocalMemory(void *engine, void *address, size_t length, const char *location,
                               int remote_accessible) {
    return guarded<int>(-1, [&] {
        return engine_functions.enroll(of(engine), address, length, location, remote_accessible != 0, true);
    });
}

EXPORT int unregisterLocalMemory(void *engine, void *address) {
    return guarded<int>(-1, [&] { return engine_functions.discharge(of(engine), address, true); });
}

EXPORT int32_t openSegmentNoCache(void *engine, const char *name) {
    return guarded<int32_t>(-1, [&]() -> int32_t {
        const int code = engine_functions.sync_segment(of(engine), name);
        return code != 0 ? code : segment(engine_functions.open_segment(of(engine), name));
    });
}

EXPORT uint64_t allocateBatchID(void *engine, size_t size) {
    return guarded<uint64_t>(UINT64_MAX, [&] { return engine_functions.allocate_batch(of(engine), size); });
}

EXPORT int submitTransfer(void *engine, uint64_t batch, transfer_request *requests, size_t count) {
    return guarded<int>(-1, [&] {
        std::vector<Request> all;
        all.reserve(count);
        for (size_t at = 0; at < count; ++at) {
            const transfer_request &request = requests[at];
            all.push_back(Request{request.opcode, request.source, static_cast<uint64_t>(request.target_id),
                                  request.target_offset, request.length});
        }
        return told(engine_functions.submit(of(engine), batch, all));
    });
}

EXPORT int getTransferStatus(void *engine, uint64_t batch, size_t task, transfer_status *status) {
    return guarded<int>(-1, [&] {
        TaskStatus found{};
        const int code = told(engine_functions.task_status(of(engine), batch, task, found));
        *status = {found.state, found.transferred_bytes};
        return code;
    });
}

EXPORT int kvx_mooncake_batch_status(void *engine, uint64_t batch, transfer_status *status) {
    return guarded<int>(-1, [&] {
        TaskStatus found{};
        const int code = told(engine_functions.batch_status(of(engine), batch, found));
        *status = {found.state, found.transferred_bytes};
        return code;
    });
}

EXPORT int freeBatchID(void *engine, uint64_t batch) {
    return guarded<int>(-1, [&] { return told(engine_functions.free_batch(of(engine), batch)); });
}

EXPORT int genNotifyInEngine(void *engine, uint64_t segment, notify_msg message) {
    return guarded<int>(-1, [&] {
        return engine_functions.send(of(engine), segment, Notification{message.name, message.msg});
    });
}

EXPORT notify_msg *getNotifsFromEngine(void *engine, int *count) {
    *count = 0;
    return guarded<notify_msg *>(nullptr, [&]() -> notify_msg * {
        std::vector<Notification> all;
        const int code = engine_functions.receive(of(engine), all);
        if (code != 0) *count = code < 0 ? code : -code;
        if (code != 0 || all.empty()) return nullptr;
        auto *messages = static_cast<notify_msg *>(std::calloc(all.size(), sizeof(notify_msg)));
        if (!messages) throw std::bad_alloc();
        for (size_t at = 0; at < all.size(); ++at) {
            messages[at] = {copied(all[at].name), copied(all[at].message)};
        }
        *count = static_cast<int>(all.size());
        return messages;
    });
}

EXPORT void freeNotifsMsgBuf(notify_msg *messages, int count) {
    for (int at = 0; at < count; ++at) {
        std::free(messages[at].name);
        std::free(messages[at].msg);
    }
    std::free(messages);
}
