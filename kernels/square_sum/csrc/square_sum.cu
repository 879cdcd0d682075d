// Sums of squares of many tensors in one launch, in fp64: one partial sum per block, added up by the caller. Each element is read
// once: 2 or 4 bytes. The order of additions is fixed, so equal gradients give equal bits.

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

namespace {

constexpr int kThreads = 512;

// One row of the tensor table, as op.py packs it.
struct Row {
    const void* data;
    int64_t numel;
    int64_t is_bf16;
    int64_t is_aligned;  // to 16 bytes
};

__device__ __forceinline__ double square(float value) { return static_cast<double>(value) * static_cast<double>(value); }

__device__ __forceinline__ double squares_of_pair(unsigned int bits) {
    // A bf16 number is the upper half of the fp32 number.
    return square(__uint_as_float(bits << 16)) + square(__uint_as_float(bits & 0xffff0000u));
}

__global__ void __launch_bounds__(kThreads) square_sum_kernel(const Row* __restrict__ rows, const int32_t* __restrict__ row_of_block,
                                                              const int32_t* __restrict__ chunk_of_block, int64_t chunk,
                                                              double* __restrict__ partial) {
    const Row row = rows[row_of_block[blockIdx.x]];
    const int64_t begin = chunk_of_block[blockIdx.x] * chunk;
    const int64_t end = min(begin + chunk, row.numel);
    double sum = 0.0;
    int64_t done = begin;
    if (row.is_aligned && row.is_bf16) {
        const auto* data = static_cast<const __nv_bfloat16*>(row.data);
        done = begin + (end - begin) / 8 * 8;
        for (int64_t i = begin + threadIdx.x * 8; i < done; i += kThreads * 8) {
            const uint4 bits = __ldg(reinterpret_cast<const uint4*>(data + i));
            sum += squares_of_pair(bits.x) + squares_of_pair(bits.y) + squares_of_pair(bits.z) + squares_of_pair(bits.w);
        }
    } else if (row.is_aligned) {
        const auto* data = static_cast<const float*>(row.data);
        done = begin + (end - begin) / 4 * 4;
        for (int64_t i = begin + threadIdx.x * 4; i < done; i += kThreads * 4) {
            const float4 values = __ldg(reinterpret_cast<const float4*>(data + i));
            sum += square(values.x) + square(values.y) + square(values.z) + square(values.w);
        }
    }
    for (int64_t i = done + threadIdx.x; i < end; i += kThreads) {
        sum += square(row.is_bf16 ? __bfloat162float(static_cast<const __nv_bfloat16*>(row.data)[i])
                                  : static_cast<const float*>(row.data)[i]);
    }
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_down_sync(0xffffffffu, sum, offset);
    __shared__ double of_warp[kThreads / 32];
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        double total = 0.0;
        for (const double value : of_warp) total += value;
        partial[blockIdx.x] = total;
    }
}

}  // namespace

// `chunk` is a multiple of eight; `partial` holds num_blocks doubles. Returns cudaGetLastError().
extern "C" int square_sum_launch(const void* rows, const void* row_of_block, const void* chunk_of_block, int num_blocks,
                                 int64_t chunk, void* partial, void* stream) {
    square_sum_kernel<<<num_blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
        static_cast<const Row*>(rows), static_cast<const int32_t*>(row_of_block), static_cast<const int32_t*>(chunk_of_block),
        chunk, static_cast<double*>(partial));
    return static_cast<int>(cudaGetLastError());
}
