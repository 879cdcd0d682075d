// softmax(scale * logits + mask) of fp32 rows, rounded once to bf16: 4 bytes read and 2 written per element, in one pass.
//
// A warp takes a row and keeps it in registers. While it computes one row, the next one is on its way: with 32 warps on an SM at
// 576 columns, 74 KB. The mask of a sample lies in shared memory as fp32, -inf in all columns that do not count.
// Blocks run from the last row to the first: the product before has just written the last logits, and the product after will begin
// with the first probabilities, so that both find what the L2 cache still holds.
//
// Roundings, all fp32: scale * logit + mask (one, fma), its distance to the row's maximum, that times log2(e), ex2.approx (2^-22; 0
// below 2^-126), the sum, its reciprocal, their product; then bf16. The first two are torch's, so that large logits cost no more than
// there; the others are a relative 1e-6 together. A row without a finite maximum is NaN, as in torch.

#include <cmath>
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

namespace {

constexpr int kLanes = 32;
constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kLanes;
constexpr int kRows = 4 * kWarps;  // of a block
constexpr int kVector = 4;         // fp32 numbers in 16 bytes
constexpr int kMaxVectors = 8;     // of a lane
constexpr float kLog2E = 1.4426950408889634f;

struct Mask {
    const void* data;  // nullptr: nothing is added
    int64_t stride;    // between samples; 0: one row for all
    bool is_bf16;
    int columns;  // all further ones are hidden
};

__device__ __forceinline__ float exp2_flushed(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float largest_of_warp(float value) {
#pragma unroll
    for (int distance = kLanes / 2; distance > 0; distance /= 2) value = fmaxf(value, __shfl_xor_sync(~0u, value, distance));
    return value;
}

__device__ __forceinline__ float sum_of_warp(float value) {
#pragma unroll
    for (int distance = kLanes / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(~0u, value, distance);
    return value;
}

__device__ __forceinline__ float mask_at(const Mask& mask, int64_t sample, int column) {
    if (column >= mask.columns) return -INFINITY;
    if (mask.data == nullptr) return 0.0f;
    const int64_t place = sample * mask.stride + column;
    if (mask.is_bf16) return __bfloat162float(static_cast<const __nv_bfloat16*>(mask.data)[place]);
    return static_cast<const float*>(mask.data)[place];
}

// A lane's share of a row of `width` vectors; only the last of its vectors can lie beyond the end.
template <int kCount>
__device__ __forceinline__ void load(float4 (&row)[kCount], const float4* source, int width, int lane) {
#pragma unroll
    for (int i = 0; i < kCount; i++) {
        const int place = i * kLanes + lane;
        row[i] = i + 1 < kCount || place < width ? __ldcs(source + place) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
}

__device__ __forceinline__ uint2 rounded(const float4& values, float factor) {
    const __nv_bfloat162 low = __floats2bfloat162_rn(values.x * factor, values.y * factor);
    const __nv_bfloat162 high = __floats2bfloat162_rn(values.z * factor, values.w * factor);
    return make_uint2(*reinterpret_cast<const unsigned*>(&low), *reinterpret_cast<const unsigned*>(&high));
}

// Blocks on an SM: as many as registers allow for this row, the next one, and some more.
constexpr int blocks_for(int count) { return count <= 5 ? 4 : count <= 7 ? 3 : 2; }

template <int kCount>
__global__ void __launch_bounds__(kThreads, blocks_for(kCount))
    softmax_kernel(const float4* __restrict__ logits, Mask mask, uint2* __restrict__ output, int64_t rows_of_sample,
                   int blocks_of_sample, int width, float scale) {
    __shared__ float4 added[kCount * kLanes];
    const int lane = threadIdx.x % kLanes;
    const int block = static_cast<int>(gridDim.x - 1 - blockIdx.x);
    const int64_t sample = block / blocks_of_sample;
    const int64_t begin = static_cast<int64_t>(block % blocks_of_sample) * kRows;
    const int64_t end = min(begin + kRows, rows_of_sample);
    int64_t row = begin + threadIdx.x / kLanes;
    const float4* source = logits + (sample * rows_of_sample + row) * width;
    uint2* target = output + (sample * rows_of_sample + row) * width;

    float4 next[kCount];
    if (row < end) load(next, source, width, lane);
    float* added_numbers = reinterpret_cast<float*>(added);
    for (int column = threadIdx.x; column < kCount * kLanes * kVector; column += kThreads)
        added_numbers[column] = mask_at(mask, sample, column);
    __syncthreads();

    for (; row < end; row += kWarps, target += kWarps * width) {
        float4 values[kCount];
        float largest = -INFINITY;
#pragma unroll
        for (int i = 0; i < kCount; i++) {
            const float4 addend = added[i * kLanes + lane];
            values[i].x = fmaf(next[i].x, scale, addend.x);
            values[i].y = fmaf(next[i].y, scale, addend.y);
            values[i].z = fmaf(next[i].z, scale, addend.z);
            values[i].w = fmaf(next[i].w, scale, addend.w);
            largest = fmaxf(largest, fmaxf(fmaxf(values[i].x, values[i].y), fmaxf(values[i].z, values[i].w)));
        }
        source += kWarps * width;
        if (row + kWarps < end) load(next, source, width, lane);
        largest = largest_of_warp(largest);
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < kCount; i++) {
            values[i].x = exp2_flushed((values[i].x - largest) * kLog2E);
            values[i].y = exp2_flushed((values[i].y - largest) * kLog2E);
            values[i].z = exp2_flushed((values[i].z - largest) * kLog2E);
            values[i].w = exp2_flushed((values[i].w - largest) * kLog2E);
            sum += (values[i].x + values[i].y) + (values[i].z + values[i].w);
        }
        const float factor = 1.0f / sum_of_warp(sum);
#pragma unroll
        for (int i = 0; i < kCount; i++) {
            const int place = i * kLanes + lane;
            if (i + 1 < kCount || place < width) target[place] = rounded(values[i], factor);
        }
    }
}

template <int kCount>
void launch(int count, const void* logits, const Mask& mask, void* output, int64_t samples, int64_t rows, int width, float scale,
            cudaStream_t queue) {
    if constexpr (kCount < kMaxVectors) {
        if (count > kCount) return launch<kCount + 1>(count, logits, mask, output, samples, rows, width, scale, queue);
    }
    const int64_t blocks = (rows + kRows - 1) / kRows;
    const dim3 grid(static_cast<unsigned>(samples * blocks));
    softmax_kernel<kCount><<<grid, kThreads, 0, queue>>>(static_cast<const float4*>(logits), mask, static_cast<uint2*>(output), rows,
                                                         static_cast<int>(blocks), width, scale);
}

}  // namespace

// `logits` [samples, rows, columns] fp32, aligned to 16 bytes; `output` alike in bf16. columns: a multiple of eight, at most 1024.
// `mask` [samples or 1, mask_columns] bf16 or fp32, or nullptr; columns from mask_columns on are hidden. Returns cudaGetLastError().
extern "C" int masked_softmax_launch(const void* logits, const void* mask, int mask_is_bf16, int64_t mask_stride, int mask_columns,
                                     void* output, int64_t samples, int64_t rows, int columns, float scale, void* stream) {
    const Mask table{mask, mask_stride, mask_is_bf16 != 0, mask_columns};
    const int width = columns / kVector;
    launch<1>((width + kLanes - 1) / kLanes, logits, table, output, samples, rows, width, scale, static_cast<cudaStream_t>(stream));
    return static_cast<int>(cudaGetLastError());
}
