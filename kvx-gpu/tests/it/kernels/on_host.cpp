// Runs the kernels on the host, for tests: one thread after the other, because none waits for
// another.

struct Dimensions {
    unsigned x, y, z;
};

static thread_local Dimensions threadIdx, blockIdx, gridDim;

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(threads)

#include "kernels.cu"

template <typename Kernel>
static void launch(const unsigned *grid, Kernel kernel) {
    gridDim = {grid[0], grid[1], grid[2]};
    for (blockIdx.z = 0; blockIdx.z < gridDim.z; ++blockIdx.z) {
        for (blockIdx.y = 0; blockIdx.y < gridDim.y; ++blockIdx.y) {
            for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
                for (threadIdx.x = 0; threadIdx.x < THREADS; ++threadIdx.x) kernel();
            }
        }
    }
}

// `kernel` is an index in the list of entries.
extern "C" void kvx_launch_on_host(unsigned kernel, const unsigned *grid, const u64 *p) {
    switch (kernel) {
    case 0:
        return launch(grid, [=] { kvx_gather(p[0], p[1], p[2], p[3], p[4]); });
    case 1:
        return launch(grid, [=] { kvx_scatter(p[0], p[1], p[2], p[3], p[4]); });
    case 2:
        return launch(grid, [=] { kvx_hops(p[0], p[1]); });
    case 3:
        return launch(grid, [=] {
            kvx_permute(p[0], p[1], p[2], p[3], p[4], p[5], p[6], p[7], p[8], p[9], p[10]);
        });
    default:
        __builtin_trap();
    }
}
