// Replaces the wheel's etcd client, whose Go runtime would start threads and take signals for the
// life of the process. Nobody calls it: kvx loads the real one before it lets the engine use etcd.

#define REFUSES(name) \
    extern "C" __attribute__((visibility("default"))) int name(...) { return -1; }

REFUSES(NewEtcdClient)
REFUSES(EtcdGetWrapper)
REFUSES(EtcdPutWrapper)
REFUSES(EtcdDeleteWrapper)
REFUSES(EtcdCloseWrapper)
