// kvx's kernels. NVRTC compiles this text for CUDA and hipRTC for HIP; it includes no headers.
//
// Every parameter is a 64-bit integer, so that a launch is a list of numbers for both. Addresses
// may be on this device, on a peer, or opened from another process. Every loop strides by the
// launch's grid: any grid computes the same, and a small one leaves processors to the model.
// Arguments are trusted: the caller has checked the bounds.
//
// The grid's x covers blocks, y the pieces of a block, z the grids of a grid set.

typedef unsigned int u32;
typedef unsigned long long u64;

#define THREADS 256
// The number of units that a thread moves at once: its loads wait for memory together, not one
// after the other.
#define BATCH 4
#define PIECE (THREADS * BATCH)

struct alignas(16) Wide {
    u32 words[4];
};

// A grid of a grid set: its blocks are at base + index * stride, and contiguous from packed + at
// on.
struct Grid {
    u64 base, stride, length, at;
};

struct Hop {
    u64 from, to, length;
};

template <typename Unit>
__device__ __forceinline__ void copy_units(u64 to, u64 from, u64 length) {
    Unit *target = reinterpret_cast<Unit *>(to);
    const Unit *source = reinterpret_cast<const Unit *>(from);
    const u64 units = length / sizeof(Unit);
    const u64 step = static_cast<u64>(gridDim.y) * PIECE;
    for (u64 piece = static_cast<u64>(blockIdx.y) * PIECE; piece < units; piece += step) {
        u64 at = piece + threadIdx.x;
        if (units - piece >= PIECE) {
            Unit batch[BATCH];
#pragma unroll
            for (int turn = 0; turn < BATCH; ++turn) batch[turn] = source[at + turn * THREADS];
#pragma unroll
            for (int turn = 0; turn < BATCH; ++turn) target[at + turn * THREADS] = batch[turn];
        } else {
#pragma unroll 1
            for (; at < units; at += THREADS) target[at] = source[at];
        }
    }
    const u64 rest = units * sizeof(Unit) + threadIdx.x;
    if (blockIdx.y == 0 && rest < length) {
        reinterpret_cast<char *>(to)[rest] = reinterpret_cast<const char *>(from)[rest];
    }
}

// Copies with the widest unit to which both addresses are aligned.
__device__ __forceinline__ void copy(u64 to, u64 from, u64 length) {
    const u64 both = to | from;
    if (both % 16 == 0) {
        copy_units<Wide>(to, from, length);
    } else if (both % 8 == 0) {
        copy_units<u64>(to, from, length);
    } else if (both % 4 == 0) {
        copy_units<u32>(to, from, length);
    } else if (both % 2 == 0) {
        copy_units<unsigned short>(to, from, length);
    } else {
        copy_units<unsigned char>(to, from, length);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
kvx_gather(u64 packed, u64 grids, u64 grid_count, u64 indices, u64 count) {
    const u32 *index = reinterpret_cast<const u32 *>(indices);
    for (u64 at = blockIdx.z; at < grid_count; at += gridDim.z) {
        const Grid grid = reinterpret_cast<const Grid *>(grids)[at];
        for (u64 block = blockIdx.x; block < count; block += gridDim.x) {
            copy(packed + grid.at + block * grid.length, grid.base + index[block] * grid.stride, grid.length);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
kvx_scatter(u64 packed, u64 grids, u64 grid_count, u64 indices, u64 count) {
    const u32 *index = reinterpret_cast<const u32 *>(indices);
    for (u64 at = blockIdx.z; at < grid_count; at += gridDim.z) {
        const Grid grid = reinterpret_cast<const Grid *>(grids)[at];
        for (u64 block = blockIdx.x; block < count; block += gridDim.x) {
            copy(grid.base + index[block] * grid.stride, packed + grid.at + block * grid.length, grid.length);
        }
    }
}

// Copies unrelated ranges: any addresses, each with its own length.
extern "C" __global__ void __launch_bounds__(THREADS)
kvx_hops(u64 hops, u64 count) {
    for (u64 at = blockIdx.x; at < count; at += gridDim.x) {
        const Hop hop = reinterpret_cast<const Hop *>(hops)[at];
        copy(hop.to, hop.from, hop.length);
    }
}

// From [outer, rows, columns, run] to [outer, columns, rows, run], in the order of the output:
// stores are contiguous.
template <typename Unit>
__device__ __forceinline__ void swap_units(u64 to, u64 from, u32 outer, u32 rows, u32 columns, u32 run) {
    Unit *target = reinterpret_cast<Unit *>(to);
    const Unit *source = reinterpret_cast<const Unit *>(from);
    run /= sizeof(Unit);
    const u64 units = static_cast<u64>(outer) * rows * columns * run;
    const u64 step = static_cast<u64>(gridDim.y) * THREADS;
    for (u64 at = static_cast<u64>(blockIdx.y) * THREADS + threadIdx.x; at < units; at += step) {
        // A block is smaller than 4 GiB, so 32-bit arithmetic suffices, which is several times as
        // fast.
        u32 rest = static_cast<u32>(at);
        const u32 inside = rest % run;
        rest /= run;
        const u32 row = rest % rows;
        rest /= rows;
        const u32 column = rest % columns;
        const u32 plane = rest / columns;
        target[at] = source[((plane * rows + row) * columns + column) * run + inside];
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
kvx_permute(u64 to, u64 to_stride, u64 to_indices, u64 from, u64 from_stride, u64 from_indices, u64 count,
            u64 outer, u64 rows, u64 columns, u64 run) {
    const u32 *to_index = reinterpret_cast<const u32 *>(to_indices);
    const u32 *from_index = reinterpret_cast<const u32 *>(from_indices);
    for (u64 block = blockIdx.x; block < count; block += gridDim.x) {
        const u64 target = to + (to_index ? to_index[block] : block) * to_stride;
        const u64 source = from + (from_index ? from_index[block] : block) * from_stride;
        const u64 all = target | source | run;
        if (all % 16 == 0) {
            swap_units<Wide>(target, source, outer, rows, columns, run);
        } else if (all % 8 == 0) {
            swap_units<u64>(target, source, outer, rows, columns, run);
        } else if (all % 4 == 0) {
            swap_units<u32>(target, source, outer, rows, columns, run);
        } else if (all % 2 == 0) {
            swap_units<unsigned short>(target, source, outer, rows, columns, run);
        } else {
            swap_units<unsigned char>(target, source, outer, rows, columns, run);
        }
    }
}
