// bf16 -> FP8 with a given scale, written twice: row by row, and transposed, because Hopper's FP8 tensor cores want both operands
// of a product contiguous along the summed axis, and backward sums along the other one. The largest magnitude is found on the way.
//
// Three sources: a matrix; gelu_tanh(gate) * up of a merged product [rows, 2 * width]; and the backward of the latter. The last
// two never write their bf16 result. Bytes per element of the quantised matrix, with both layouts: 2 + 2, 4 + 2, and 3 + 2 where
// quantising after the fact costs 2 + 2 (amax, cast) + 1 + 1 (transposition) and the source's own bf16 result 2 more.
//
// A block takes a tile of 128 x 128 elements; a thread takes pieces of 4 rows x 8 columns. Transposed bytes go through shared
// memory as words of four rows. Word w of column c lies at w ^ 2 * (c / 8): when a warp writes (16 column chunks, 2 adjacent
// words) and when it reads (2 columns, 16 pairs of words) all banks differ.

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include "../../gated_gelu/csrc/gelu.cuh"

namespace {

constexpr int kTile = 128;
constexpr int kThreads = 256;
constexpr int kColumns = 8;                     // of a piece: one 16-byte load
constexpr int kRows = 4;                        // of a piece: one transposed word
constexpr int kChunks = kTile / kColumns;       // 16
constexpr int kWords = kTile / kRows;           // 32 words in a column of the tile
constexpr int kPasses = kChunks * kWords / kThreads;

__device__ __forceinline__ void load8(const __nv_bfloat16* address, float (&values)[kColumns]) {
    const uint4 bits = __ldcs(reinterpret_cast<const uint4*>(address));
    const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        // A bf16 number is the upper half of the fp32 number.
        values[2 * i] = __uint_as_float(words[i] << 16);
        values[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
}

__device__ __forceinline__ void store(const float2& pair, float* values) {
    values[0] = pair.x;
    values[1] = pair.y;
}

// Sources: `read` gives eight columns of one row of each of kParts matrices of `width` columns that lie side by side in the result.
struct Matrix {
    static constexpr int kParts = 1;
    const __nv_bfloat16* values;
    int64_t width;

    __device__ __forceinline__ void read(int64_t row, int64_t column, float (&result)[kParts][kColumns]) const {
        load8(values + row * width + column, result[0]);
    }
};

struct GatedGelu {
    static constexpr int kParts = 1;
    const __nv_bfloat16* gate_up;
    int64_t width;

    __device__ __forceinline__ void read(int64_t row, int64_t column, float (&result)[kParts][kColumns]) const {
        float gate[kColumns], up[kColumns];
        load8(gate_up + row * 2 * width + column, gate);
        load8(gate_up + row * 2 * width + width + column, up);
#pragma unroll
        for (int i = 0; i < kColumns; i += 2) {
            const float2 activated = rounded(gelu(gate[i]), gelu(gate[i + 1]));
            store(rounded(activated.x * up[i], activated.y * up[i + 1]), result[0] + i);
        }
    }
};

struct GatedGeluBackward {
    static constexpr int kParts = 2;
    const __nv_bfloat16* gradient;
    const __nv_bfloat16* gate_up;
    int64_t width;

    __device__ __forceinline__ void read(int64_t row, int64_t column, float (&result)[kParts][kColumns]) const {
        float gate[kColumns], up[kColumns], outer[kColumns];
        load8(gradient + row * width + column, outer);
        load8(gate_up + row * 2 * width + column, gate);
        load8(gate_up + row * 2 * width + width + column, up);
#pragma unroll
        for (int i = 0; i < kColumns; i += 2) {
            const float2 first = gelu_and_slope(gate[i]), second = gelu_and_slope(gate[i + 1]);
            const float2 inner = rounded(outer[i] * up[i], outer[i + 1] * up[i + 1]);
            const float2 activated = rounded(first.x, second.x);
            store(rounded(inner.x * first.y, inner.y * second.y), result[0] + i);
            store(rounded(outer[i] * activated.x, outer[i + 1] * activated.y), result[1] + i);
        }
    }
};

struct Output {
    uint8_t* rows;         // [num_rows, kParts * width]
    uint8_t* transposed;   // [kParts * width, transposed_stride], or null
    int64_t num_rows;
    int64_t transposed_stride;
};

template <__nv_fp8_interpretation_t kFormat>
__device__ __forceinline__ uint2 quantized(const float (&values)[kColumns], float scale) {
    uint16_t pairs[kColumns / 2];
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) {
        // The conversion saturates. Infinity must not become a large number: infinity times zero makes it NaN.
        const float low = __fmaf_rn(values[2 * i], scale, __fmul_rn(values[2 * i], 0.0f));
        const float high = __fmaf_rn(values[2 * i + 1], scale, __fmul_rn(values[2 * i + 1], 0.0f));
        pairs[i] = __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, kFormat);
    }
    return make_uint2(pairs[0] | static_cast<uint32_t>(pairs[1]) << 16, pairs[2] | static_cast<uint32_t>(pairs[3]) << 16);
}

// Byte j of each of four rows -> one word per column j.
__device__ __forceinline__ void transpose4(const uint32_t (&rows)[4], uint32_t (&columns)[4]) {
    const uint32_t low01 = __byte_perm(rows[0], rows[1], 0x5140), high01 = __byte_perm(rows[0], rows[1], 0x7362);
    const uint32_t low23 = __byte_perm(rows[2], rows[3], 0x5140), high23 = __byte_perm(rows[2], rows[3], 0x7362);
    columns[0] = __byte_perm(low01, low23, 0x5410);
    columns[1] = __byte_perm(low01, low23, 0x7632);
    columns[2] = __byte_perm(high01, high23, 0x5410);
    columns[3] = __byte_perm(high01, high23, 0x7632);
}

// slot: the scale's reciprocal, the scale, the largest magnitude so far.
template <typename Source, __nv_fp8_interpretation_t kFormat>
__global__ void __launch_bounds__(kThreads) quantize_kernel(Source source, Output output, float* slot) {
    constexpr int kParts = Source::kParts;
    __shared__ __align__(8) uint32_t tile[kParts][kTile * kWords];  // read in pairs of words
    __shared__ uint32_t warp_largest[kThreads / 32];
    const float scale = slot[1];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int chunk = lane % kChunks;
    const int64_t first_row = static_cast<int64_t>(blockIdx.y) * kTile, first_column = static_cast<int64_t>(blockIdx.x) * kTile;
    const int64_t column = first_column + chunk * kColumns;
    uint32_t largest = 0;  // of the bits without sign: the order of magnitudes, NaN above all
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
        const int word = (pass * (kThreads / 32) + warp) * 2 + lane / kChunks;
        const int64_t row = first_row + word * kRows;
        if (row >= output.num_rows || column >= source.width) continue;
        uint2 bytes[kParts][kRows];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            float values[kParts][kColumns];
            source.read(row + r, column, values);
#pragma unroll
            for (int part = 0; part < kParts; ++part) {
#pragma unroll
                for (int i = 0; i < kColumns; ++i) largest = max(largest, __float_as_uint(values[part][i]) & 0x7fffffffu);
                bytes[part][r] = quantized<kFormat>(values[part], scale);
                *reinterpret_cast<uint2*>(output.rows + ((row + r) * kParts + part) * source.width + column) = bytes[part][r];
            }
        }
        if (output.transposed == nullptr) continue;
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            uint32_t columns[2][4];
            const uint32_t left[4] = {bytes[part][0].x, bytes[part][1].x, bytes[part][2].x, bytes[part][3].x};
            const uint32_t right[4] = {bytes[part][0].y, bytes[part][1].y, bytes[part][2].y, bytes[part][3].y};
            transpose4(left, columns[0]);
            transpose4(right, columns[1]);
#pragma unroll
            for (int i = 0; i < kColumns; ++i) {
                tile[part][(chunk * kColumns + i) * kWords + (word ^ (2 * chunk))] = columns[i / 4][i % 4];
            }
        }
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
    if (lane == 0) warp_largest[warp] = largest;
    __syncthreads();
    if (threadIdx.x == 0) {
#pragma unroll
        for (int w = 1; w < kThreads / 32; ++w) largest = max(largest, warp_largest[w]);
        // Most blocks find a larger one there already.
        uint32_t* const address = reinterpret_cast<uint32_t*>(slot + 2);
        if (largest > *reinterpret_cast<volatile uint32_t*>(address)) atomicMax(address, largest);
    }
    if (output.transposed == nullptr) return;
    constexpr int kPairs = kWords / 2;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
        for (int i = threadIdx.x; i < kTile * kPairs; i += kThreads) {
            const int local = i / kPairs, pair = i % kPairs;
            const int64_t row = first_row + pair * 2 * kRows;
            if (first_column + local >= source.width || row >= output.num_rows) continue;
            const int word = (2 * pair) ^ (2 * (local / kColumns));
            const uint2 bits = *reinterpret_cast<const uint2*>(&tile[part][local * kWords + word]);
            const int64_t line = part * source.width + first_column + local;
            *reinterpret_cast<uint2*>(output.transposed + line * output.transposed_stride + row) = bits;
        }
    }
}

template <typename Source>
int launch(const Source& source, const Output& output, void* slot, int is_e5m2, void* stream) {
    const dim3 grid(static_cast<unsigned>((source.width + kTile - 1) / kTile),
                    static_cast<unsigned>((output.num_rows + kTile - 1) / kTile));
    const auto queue = static_cast<cudaStream_t>(stream);
    if (is_e5m2) {
        quantize_kernel<Source, __NV_E5M2><<<grid, kThreads, 0, queue>>>(source, output, static_cast<float*>(slot));
    } else {
        quantize_kernel<Source, __NV_E4M3><<<grid, kThreads, 0, queue>>>(source, output, static_cast<float*>(slot));
    }
    return static_cast<int>(cudaGetLastError());
}

const __nv_bfloat16* bf16(const void* address) { return static_cast<const __nv_bfloat16*>(address); }

Output output_of(void* rows, void* transposed, int64_t num_rows, int64_t transposed_stride) {
    return {static_cast<uint8_t*>(rows), static_cast<uint8_t*>(transposed), num_rows, transposed_stride};
}

}  // namespace

// num_rows a multiple of 16 and at most 128 * 65535, width and transposed_stride multiples of 16; bf16 addresses aligned to 16
// bytes, others to 8. `transposed` may be null. All return cudaGetLastError().
extern "C" int fp8_quantize(const void* values, void* rows, void* transposed, int64_t num_rows, int64_t width,
                            int64_t transposed_stride, void* slot, int is_e5m2, void* stream) {
    return launch(Matrix{bf16(values), width}, output_of(rows, transposed, num_rows, transposed_stride), slot, is_e5m2, stream);
}

extern "C" int fp8_gated_gelu(const void* gate_up, void* rows, void* transposed, int64_t num_rows, int64_t width, void* slot,
                              void* stream) {
    return launch(GatedGelu{bf16(gate_up), width}, output_of(rows, transposed, num_rows, num_rows), slot, 0, stream);
}

extern "C" int fp8_gated_gelu_backward(const void* gradient, const void* gate_up, void* rows, void* transposed, int64_t num_rows,
                                       int64_t width, void* slot, void* stream) {
    return launch(GatedGeluBackward{bf16(gradient), bf16(gate_up), width}, output_of(rows, transposed, num_rows, num_rows), slot,
                  1, stream);
}
