// What the kernels of both norms share: a warp takes a row of 128 * K bf16 columns at a time.
//
// Rows come through asynchronous copies into shared memory: a warp's next rows are under way while it computes. Every lane reads
// only what it has copied itself, so rows need no barrier. Column sums are fp32: per lane, then over the warps of a block, then over
// the blocks, in an order that never changes.

#pragma once

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_pipeline_primitives.h>
#include <cuda_runtime.h>
#include <type_traits>

namespace rows {

using bf16 = __nv_bfloat16;

constexpr int kLanes = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kColumns = 128;  // the width's unit: four columns per lane

// Forward: blocks of eight warps, as many per multiprocessor as registers allow (a lane holds 4 * K fp32 numbers).
constexpr int kForwardWarps = 8;
template <int K>
constexpr int kForwardBlocks = K <= 9 ? 4 : K <= 12 ? 3 : 2;
// Backward: one block per multiprocessor, so that few column sums are left (a lane holds up to 8 * K of them).
template <int K>
constexpr int kBackwardWarps = K <= 9 ? 16 : K <= 12 ? 12 : 8;

// Rows of shared memory per warp: one or two stages of forward, two or three of backward.
constexpr int kForwardBuffers = 2, kBackwardBuffers = 6;

// A lane has 2 * K words of two columns, in pieces of four words: eight neighbours of every 256 columns, as 16 bytes. An odd K ends
// with a piece of two words, of its last 128 columns.
template <int K>
constexpr int kPieces = (K + 1) / 2;

// Words of piece i that exist.
template <int K>
__device__ __forceinline__ int words_of(int i) { return i < K / 2 ? 4 : 2; }

template <int K>
__device__ __forceinline__ int column_of(int i, int lane) { return i * 2 * kColumns + lane * (i < K / 2 ? 8 : 4); }

template <int K>
__device__ __forceinline__ int column_of(int i) { return column_of<K>(i, threadIdx.x % kLanes); }

template <int K>
__device__ __forceinline__ void load_piece(unsigned (&words)[4], const bf16* row, int i) {
    if (i < K / 2) {
        const uint4 bits = *reinterpret_cast<const uint4*>(row + column_of<K>(i));
        words[0] = bits.x, words[1] = bits.y, words[2] = bits.z, words[3] = bits.w;
    } else {
        const uint2 bits = *reinterpret_cast<const uint2*>(row + column_of<K>(i));
        words[0] = bits.x, words[1] = bits.y;
    }
}

template <int K>
__device__ __forceinline__ void store_piece(bf16* row, const unsigned (&words)[4], int i) {
    if (i < K / 2) {
        *reinterpret_cast<uint4*>(row + column_of<K>(i)) = make_uint4(words[0], words[1], words[2], words[3]);
    } else {
        *reinterpret_cast<uint2*>(row + column_of<K>(i)) = make_uint2(words[0], words[1]);
    }
}

// A bf16 number is the upper half of the fp32 number.
__device__ __forceinline__ float low(unsigned word) { return __uint_as_float(word << 16); }
__device__ __forceinline__ float high(unsigned word) { return __uint_as_float(word & 0xffff0000u); }

__device__ __forceinline__ unsigned rounded(float first, float second) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
    return *reinterpret_cast<const unsigned*>(&pair);
}

// The sum of a residual addition, as two rounded numbers.
__device__ __forceinline__ unsigned added(unsigned one, unsigned other) {
    return rounded(low(one) + low(other), high(one) + high(other));
}

// Piece i of a row; if kAdds, of its sum with the row that lies behind it, which also goes to `sum`.
template <int K, bool kAdds>
__device__ __forceinline__ void load_summed(unsigned (&words)[4], const bf16* row, bf16* sum, int i) {
    load_piece<K>(words, row, i);
    if constexpr (kAdds) {
        unsigned others[4];
        load_piece<K>(others, row + K * kColumns, i);
#pragma unroll
        for (int j = 0; j < words_of<K>(i); j++) words[j] = added(words[j], others[j]);
        store_piece<K>(sum, words, i);
    }
}

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(kAllLanes, value, offset);
    return value;
}

template <int K>
__device__ __forceinline__ int64_t begin_of(int row) {
    return static_cast<int64_t>(row) * (K * kColumns);
}

// A warp's rows of up to three matrices, a stage for each row of all of them.
template <int K, int kBuffers, int kMatrices>
struct Ring {
    static constexpr int kWidth = K * kColumns, kStages = kBuffers / kMatrices;
    const bf16* matrices[3];
    bf16* memory;  // kBuffers rows
    int rows, stride;
    int stage = 0;

    // Begin to copy this lane's columns of a row.
    __device__ __forceinline__ void fetch(int row, int into) {
        if (row < rows) {
#pragma unroll
            for (int m = 0; m < kMatrices; m++) {
                bf16* const target = memory + (into * kMatrices + m) * kWidth;
                const bf16* const source = matrices[m] + begin_of<K>(row);
#pragma unroll
                for (int i = 0; i < kPieces<K>; i++) {
                    __pipeline_memcpy_async(target + column_of<K>(i), source + column_of<K>(i), i < K / 2 ? 16 : 8);
                }
            }
        }
        __pipeline_commit();
    }

    // The first rows, `row` and those after it.
    __device__ __forceinline__ void fill(int row) {
        for (int i = 0; i < kStages; i++) fetch(row + i * stride, i);
    }

    // Wait for the oldest row. That of matrix m is m * kWidth further on.
    __device__ __forceinline__ const bf16* oldest() const {
        __pipeline_wait_prior(kStages - 1);
        return memory + stage * kMatrices * kWidth;
    }

    // The oldest row was `row` and has been read: fetch another in its place.
    __device__ __forceinline__ void replace(int row) {
        fetch(row + kStages * stride, stage);
        stage = stage + 1 == kStages ? 0 : stage + 1;
    }
};

// fp32 numbers of a lane, two per word, to the places of its columns.
template <int K>
__device__ __forceinline__ void store_sums(float* row, const float (&sums)[4 * K]) {
#pragma unroll
    for (int i = 0; i < K; i++) {
        float4* const target = reinterpret_cast<float4*>(row + column_of<K>(i / 2) + i % 2 * 4);
        *target = make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]);
    }
}

// What the warps of a block have stored, `step` numbers apart, added up.
template <int kWarps>
__device__ __forceinline__ void add_over_warps(const float* sums, int step, float* totals, int columns) {
#pragma unroll 1  // all reads at once would take more registers than the rows did
    for (int column = threadIdx.x; column < columns; column += kWarps * kLanes) {
        float total = 0.0f;
#pragma unroll
        for (int i = 0; i < kWarps; i++) total += sums[i * step + column];
        totals[column] = total;
    }
}

// Blocks of `warps` warps with `shared` bytes each; a CUDA error code.
template <typename... Parameters, typename... Arguments>
int launch_kernel(void (*kernel)(Parameters...), int blocks, int warps, int shared, cudaStream_t on, Arguments... arguments) {
    const cudaError_t code = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
    if (code != cudaSuccess) return static_cast<int>(code);
    kernel<<<blocks, warps * kLanes, shared, on>>>(arguments...);
    return static_cast<int>(cudaGetLastError());
}

constexpr int kSlices = 16;

// partial [blocks, columns] -> column sums, in fp32 or rounded once: the first `width` of them to `first`, the others to `second`.
// A block takes 32 columns, a warp every kSlices-th row.
static __global__ void __launch_bounds__(kSlices* kLanes)
    sum_kernel(const float* partial, void* first, void* second, bool is_fp32, int width, int columns, int blocks) {
    __shared__ float sums[kSlices][kLanes];
    const int lane = threadIdx.x % kLanes, slice = threadIdx.x / kLanes, column = blockIdx.x * kLanes + lane;
    float total = 0.0f;
#pragma unroll 4
    for (int i = slice; i < blocks; i += kSlices) total += partial[static_cast<int64_t>(i) * columns + column];
    sums[slice][lane] = total;
    __syncthreads();
    if (slice > 0) return;
    for (int i = 1; i < kSlices; i++) total += sums[i][lane];
    void* const target = column < width ? first : second;
    const int place = column < width ? column : column - width;
    if (is_fp32) {
        static_cast<float*>(target)[place] = total;
    } else {
        static_cast<bf16*>(target)[place] = __float2bfloat16_rn(total);
    }
}

// The sums of `blocks` blocks of a backward kernel: one column vector per parameter, `second` null where there is but one.
inline int launch_sums(const void* partial, void* first, void* second, bool is_fp32, int width, int blocks, cudaStream_t on) {
    const int columns = second == nullptr ? width : 2 * width;
    sum_kernel<<<columns / kLanes, kSlices * kLanes, 0, on>>>(
        static_cast<const float*>(partial), first, second, is_fp32, width, columns, blocks);
    return static_cast<int>(cudaGetLastError());
}

// `function` with K as a constant. cudaErrorInvalidValue for widths that have no kernel.
template <typename Function>
int with_width(int width, const Function& function) {
    switch (width / kColumns) {
#define CASE(K) \
    case K:     \
        return function(std::integral_constant<int, K>{});
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
        CASE(9) CASE(10) CASE(11) CASE(12) CASE(13) CASE(14) CASE(15) CASE(16)
#undef CASE
    }
    return static_cast<int>(cudaErrorInvalidValue);
}

inline int blocks_for(int64_t rows, int warps, int processors, int per_processor) {
    const int64_t wanted = (rows + warps - 1) / warps, possible = static_cast<int64_t>(processors) * per_processor;
    return static_cast<int>(wanted < possible ? wanted : possible);
}

}  // namespace rows
