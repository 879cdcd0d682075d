// gelu_tanh of a biased product, and its backward, which also sums the columns of the gradient for the bias.
//
// Bytes per element: forward 4, backward 6 (the sums cost none). All arithmetic in fp32, rounded once to bf16; tanh in its short
// form, because 36 instructions an element would take as long as the bytes. Sums are fp32 sums of the rounded gradients, first
// within a slab of rows, then over the slabs, in an order that never changes: the same bits every time.

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "../../gated_gelu/csrc/gelu.cuh"

namespace {

constexpr int kVector = 8;  // bf16 numbers in 16 bytes
constexpr int kForwardThreads = 256;
constexpr int kForwardUnroll = 4;  // vectors that a thread loads at once
constexpr int kBackwardThreads = 64;
constexpr int kBackwardUnroll = 4;  // rows that a thread loads at once, of both inputs
constexpr int kSumColumns = 32;
constexpr int kSumGroups = 16;  // threads that share a column's slabs

// A bf16 number is the upper half of the fp32 number.
__device__ __forceinline__ float lower(unsigned pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float upper(unsigned pair) { return __uint_as_float(pair & 0xffff0000u); }

__device__ __forceinline__ unsigned packed(float first, float second) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
    return *reinterpret_cast<const unsigned*>(&pair);
}

__device__ __forceinline__ unsigned gelu_of(unsigned pair) { return packed(gelu<true>(lower(pair)), gelu<true>(upper(pair))); }

__global__ void __launch_bounds__(kForwardThreads)
    forward_kernel(const uint4* __restrict__ input, uint4* __restrict__ output, int64_t vectors) {
    const int64_t first = static_cast<int64_t>(blockIdx.x) * (kForwardThreads * kForwardUnroll) + threadIdx.x;
    uint4 batch[kForwardUnroll];
#pragma unroll
    for (int i = 0; i < kForwardUnroll; i++) {
        // Beyond the end, the last vector is read again: no branch between the loads.
        batch[i] = __ldcs(input + min(first + i * kForwardThreads, vectors - 1));
    }
#pragma unroll
    for (int i = 0; i < kForwardUnroll; i++) {
        const uint4 v = batch[i];
        const int64_t place = first + i * kForwardThreads;
        if (place < vectors) output[place] = make_uint4(gelu_of(v.x), gelu_of(v.y), gelu_of(v.z), gelu_of(v.w));
    }
}

// Two columns: the gradient of the pre-activation, added to their sums as rounded.
__device__ __forceinline__ unsigned backward_of(unsigned outer, unsigned input, float& first_sum, float& second_sum) {
    const float first = lower(outer) * gelu_and_slope<true>(lower(input)).y;
    const float second = upper(outer) * gelu_and_slope<true>(upper(input)).y;
    const unsigned pair = packed(first, second);
    first_sum += lower(pair);
    second_sum += upper(pair);
    return pair;
}

__device__ __forceinline__ uint4 backward_of(const uint4& outer, const uint4& input, float (&sums)[kVector]) {
    return make_uint4(backward_of(outer.x, input.x, sums[0], sums[1]), backward_of(outer.y, input.y, sums[2], sums[3]),
                      backward_of(outer.z, input.z, sums[4], sums[5]), backward_of(outer.w, input.w, sums[6], sums[7]));
}

// A thread takes one vector of columns of a slab of rows. `width` in vectors.
__global__ void __launch_bounds__(kBackwardThreads)
    backward_kernel(const uint4* __restrict__ outer, const uint4* __restrict__ input, uint4* __restrict__ gradient,
                    float* __restrict__ partial, int64_t rows, int64_t rows_per_slab, int width) {
    const int column = blockIdx.x * kBackwardThreads + threadIdx.x;
    if (column >= width) return;
    const int64_t begin = blockIdx.y * rows_per_slab;
    const int64_t end = min(begin + rows_per_slab, rows);
    float sums[kVector] = {};
    int64_t row = begin;
    for (; row + kBackwardUnroll <= end; row += kBackwardUnroll) {
        uint4 outers[kBackwardUnroll], inputs[kBackwardUnroll];
#pragma unroll
        for (int i = 0; i < kBackwardUnroll; i++) {
            const int64_t place = (row + i) * width + column;
            outers[i] = __ldcs(outer + place);
            inputs[i] = __ldcs(input + place);
        }
#pragma unroll
        for (int i = 0; i < kBackwardUnroll; i++) gradient[(row + i) * width + column] = backward_of(outers[i], inputs[i], sums);
    }
    for (; row < end; row++) {
        const int64_t place = row * width + column;
        gradient[place] = backward_of(__ldcs(outer + place), __ldcs(input + place), sums);
    }
    float4* target = reinterpret_cast<float4*>(partial + (static_cast<int64_t>(blockIdx.y) * width + column) * kVector);
    target[0] = make_float4(sums[0], sums[1], sums[2], sums[3]);
    target[1] = make_float4(sums[4], sums[5], sums[6], sums[7]);
}

__global__ void __launch_bounds__(kSumColumns* kSumGroups)
    sum_kernel(const float* __restrict__ partial, __nv_bfloat16* __restrict__ sums, int columns, int slabs) {
    __shared__ float shared[kSumGroups][kSumColumns];
    const int lane = threadIdx.x % kSumColumns, group = threadIdx.x / kSumColumns;
    const int column = blockIdx.x * kSumColumns + lane;
    float total = 0.0f;
    if (column < columns) {
#pragma unroll 8
        for (int slab = group; slab < slabs; slab += kSumGroups) total += partial[static_cast<int64_t>(slab) * columns + column];
    }
    shared[group][lane] = total;
    __syncthreads();
    if (group != 0 || column >= columns) return;
    for (int i = 1; i < kSumGroups; i++) total += shared[i][lane];
    sums[column] = __float2bfloat16_rn(total);
}

unsigned blocks(int64_t count, int64_t per_block) { return static_cast<unsigned>((count + per_block - 1) / per_block); }

}  // namespace

// All matrices: contiguous bf16, aligned to 16 bytes, not empty. Both return cudaGetLastError().
// `count` elements, a multiple of eight.
extern "C" int biased_gelu_forward(const void* input, void* output, int64_t count, void* stream) {
    const int64_t vectors = count / kVector;
    const unsigned grid = blocks(vectors, kForwardThreads * kForwardUnroll);
    forward_kernel<<<grid, kForwardThreads, 0, static_cast<cudaStream_t>(stream)>>>(static_cast<const uint4*>(input),
                                                                                  static_cast<uint4*>(output), vectors);
    return static_cast<int>(cudaGetLastError());
}

// `columns`: a multiple of eight; `partial` holds slabs * columns fp32 numbers, `sums` columns bf16 numbers.
extern "C" int biased_gelu_backward(const void* outer, const void* input, void* gradient, void* partial, void* sums, int64_t rows,
                                    int columns, int slabs, void* stream) {
    const cudaStream_t on = static_cast<cudaStream_t>(stream);
    const int width = columns / kVector;
    const dim3 grid(blocks(width, kBackwardThreads), slabs);
    backward_kernel<<<grid, kBackwardThreads, 0, on>>>(static_cast<const uint4*>(outer), static_cast<const uint4*>(input),
                                                       static_cast<uint4*>(gradient), static_cast<float*>(partial), rows,
                                                       (rows + slabs - 1) / slabs, width);
    const int code = static_cast<int>(cudaGetLastError());
    if (code != 0) return code;
    sum_kernel<<<blocks(columns, kSumColumns), kSumColumns * kSumGroups, 0, on>>>(
        static_cast<const float*>(partial), static_cast<__nv_bfloat16*>(sums), columns, slabs);
    return static_cast<int>(cudaGetLastError());
}
