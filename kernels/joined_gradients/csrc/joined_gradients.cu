// Matrices side by side, and the sums of all columns, in one pass: reads every element once and writes it once.
//
// A thread takes one vector of columns of a slab of rows. Sums are fp32, first within a slab, then over the slabs in their order:
// the same bits every time.

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

namespace {

constexpr int kThreads = 128;
constexpr int kVector = 8;  // bf16 numbers in 16 bytes
constexpr int kUnroll = 8;  // rows that a thread loads at once
constexpr int kMaxParts = 4;

struct Parts {
    const __nv_bfloat16* data[kMaxParts];
    int start[kMaxParts + 1];  // in vectors; start[count] is the width of all together
    int count;
};

__device__ __forceinline__ void add(float (&sums)[kVector], const uint4& bits) {
    const unsigned words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        // A bf16 number is the upper half of the fp32 number.
        sums[2 * i] += __uint_as_float(words[i] << 16);
        sums[2 * i + 1] += __uint_as_float(words[i] & 0xffff0000u);
    }
}

__global__ void __launch_bounds__(kThreads)
    join_kernel(Parts parts, uint4* __restrict__ joined, float* __restrict__ partial, int64_t rows, int64_t rows_per_slab) {
    const int column = blockIdx.x * kThreads + threadIdx.x;
    const int width = parts.start[parts.count];
    if (column >= width) return;
    int part = 0;
    while (column >= parts.start[part + 1]) part++;
    const int own_width = parts.start[part + 1] - parts.start[part];
    const uint4* source = reinterpret_cast<const uint4*>(parts.data[part]) + (column - parts.start[part]);
    const int64_t begin = blockIdx.y * rows_per_slab;
    const int64_t end = min(begin + rows_per_slab, rows);
    float sums[kVector] = {};
    int64_t row = begin;
    for (; row + kUnroll <= end; row += kUnroll) {
        uint4 batch[kUnroll];
#pragma unroll
        for (int i = 0; i < kUnroll; i++) batch[i] = __ldcs(source + (row + i) * own_width);
#pragma unroll
        for (int i = 0; i < kUnroll; i++) {
            joined[(row + i) * width + column] = batch[i];
            add(sums, batch[i]);
        }
    }
    for (; row < end; row++) {
        const uint4 bits = __ldcs(source + row * own_width);
        joined[row * width + column] = bits;
        add(sums, bits);
    }
    float4* target = reinterpret_cast<float4*>(partial + (static_cast<int64_t>(blockIdx.y) * width + column) * kVector);
    target[0] = make_float4(sums[0], sums[1], sums[2], sums[3]);
    target[1] = make_float4(sums[4], sums[5], sums[6], sums[7]);
}

__global__ void __launch_bounds__(kThreads)
    sum_kernel(const float* __restrict__ partial, __nv_bfloat16* __restrict__ sums, int columns, int slabs) {
    const int column = blockIdx.x * kThreads + threadIdx.x;
    if (column >= columns) return;
    float total = 0.0f;
#pragma unroll 16
    for (int slab = 0; slab < slabs; slab++) total += partial[static_cast<int64_t>(slab) * columns + column];
    sums[column] = __float2bfloat16_rn(total);
}

}  // namespace

// Device addresses of `count` (1 to 4) contiguous bf16 matrices with `rows` rows and `widths[i]` columns (multiples of eight),
// aligned to 16 bytes; `partial` holds slabs * (all columns) fp32 numbers. Returns cudaGetLastError().
extern "C" int joined_gradients_launch(const void* const* parts, const int* widths, int count, void* joined, void* partial, void* sums,
                                       int64_t rows, int slabs, void* stream) {
    Parts table{};
    table.count = count;
    for (int i = 0; i < count; i++) {
        table.data[i] = static_cast<const __nv_bfloat16*>(parts[i]);
        table.start[i + 1] = table.start[i] + widths[i] / kVector;
    }
    const int width = table.start[count];
    const int64_t rows_per_slab = (rows + slabs - 1) / slabs;
    const cudaStream_t on = static_cast<cudaStream_t>(stream);
    const dim3 grid((width + kThreads - 1) / kThreads, slabs);
    join_kernel<<<grid, kThreads, 0, on>>>(table, static_cast<uint4*>(joined), static_cast<float*>(partial), rows, rows_per_slab);
    const int code = static_cast<int>(cudaGetLastError());
    if (code != 0) return code;
    const int columns = width * kVector;
    sum_kernel<<<(columns + kThreads - 1) / kThreads, kThreads, 0, on>>>(
        static_cast<const float*>(partial), static_cast<__nv_bfloat16*>(sums), columns, slabs);
    return static_cast<int>(cudaGetLastError());
}
