// LayerNorm of bf16 rows, forward and backward, each row read once and written once; on request with the residual addition before
// it, and backward with the gradient that reaches the sum on its other way.
//
// A warp takes a row of 128 * K columns at a time. Rows come through asynchronous copies into shared memory: a warp's next rows are
// under way while it computes. Every lane reads only what it has copied itself, so rows need no barrier.
//
// Statistics are fp32, in two passes: mean, then the sum of squared deviations. The column sums of backward are fp32: per lane,
// then over the warps of a block, then over the blocks, in an order that never changes.

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_pipeline_primitives.h>
#include <cuda_runtime.h>
#include <type_traits>

namespace {

using bf16 = __nv_bfloat16;

constexpr int kLanes = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kColumns = 128;  // the width's unit: four columns per lane

// Forward: blocks of eight warps, as many per multiprocessor as registers allow (a lane holds 4 * K fp32 numbers).
constexpr int kForwardWarps = 8;
template <int K>
constexpr int kForwardBlocks = K <= 9 ? 4 : K <= 12 ? 3 : 2;
// Backward: one block per multiprocessor, so that few column sums are left (a lane holds 8 * K of them).
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
__device__ __forceinline__ int column_of(int i) {
    const int lane = threadIdx.x % kLanes;
    return i * 2 * kColumns + lane * (i < K / 2 ? 8 : 4);
}

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

// fp32 numbers of a lane, two per word, to the places of its columns.
template <int K>
__device__ __forceinline__ void store_sums(float* row, const float (&sums)[4 * K]) {
#pragma unroll
    for (int i = 0; i < K; i++) {
        float4* const target = reinterpret_cast<float4*>(row + column_of<K>(i / 2) + i % 2 * 4);
        *target = make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]);
    }
}

// Begin to copy this lane's columns of a row into shared memory.
template <int K>
__device__ __forceinline__ void fetch_row(bf16* shared, const bf16* row) {
#pragma unroll
    for (int i = 0; i < kPieces<K>; i++) {
        __pipeline_memcpy_async(shared + column_of<K>(i), row + column_of<K>(i), i < K / 2 ? 16 : 8);
    }
}

// A parameter, bf16 or fp32 in memory, as bf16 in shared memory: the threads of the block share the work.
template <int K>
__device__ __forceinline__ void stage_parameter(bf16* shared, const void* parameter, bool is_fp32) {
    for (int i = threadIdx.x; i < K * kColumns; i += blockDim.x) {
        shared[i] = is_fp32 ? __float2bfloat16_rn(static_cast<const float*>(parameter)[i]) : static_cast<const bf16*>(parameter)[i];
    }
}

// A bf16 number is the upper half of the fp32 number.
__device__ __forceinline__ float low(unsigned word) { return __uint_as_float(word << 16); }
__device__ __forceinline__ float high(unsigned word) { return __uint_as_float(word & 0xffff0000u); }

__device__ __forceinline__ unsigned rounded(float first, float second) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
    return *reinterpret_cast<const unsigned*>(&pair);
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

template <int K, bool kAdds>
__global__ void __launch_bounds__(kForwardWarps* kLanes, kForwardBlocks<K>)
    forward_kernel(const bf16* x, const bf16* residual, const void* weight, const void* bias, bool is_fp32, bf16* sum, bf16* y,
                   float* mean_out, float* rstd_out, int rows, float eps) {
    constexpr int kWidth = K * kColumns, kStageRows = kAdds ? 2 : 1, kStages = kForwardBuffers / kStageRows;
    extern __shared__ uint4 shared[];
    const int warp = threadIdx.x / kLanes;
    bf16* const parameters = reinterpret_cast<bf16*>(shared) + kForwardWarps * kForwardBuffers * kWidth;
    bf16* const ring = reinterpret_cast<bf16*>(shared) + warp * kForwardBuffers * kWidth;
    const int stride = gridDim.x * kForwardWarps;
    const auto fetch = [&](int row, int stage) {
        if (row < rows) {
            fetch_row<K>(ring + stage * kStageRows * kWidth, x + begin_of<K>(row));
            if constexpr (kAdds) fetch_row<K>(ring + (stage * kStageRows + 1) * kWidth, residual + begin_of<K>(row));
        }
        __pipeline_commit();
    };
    int row = blockIdx.x * kForwardWarps + warp;
    for (int stage = 0; stage < kStages; stage++) fetch(row + stage * stride, stage);
    stage_parameter<K>(parameters, weight, is_fp32);
    stage_parameter<K>(parameters + kWidth, bias, is_fp32);
    __syncthreads();
    for (int stage = 0; row < rows; row += stride, stage = stage + 1 == kStages ? 0 : stage + 1) {
        __pipeline_wait_prior(kStages - 1);
        const bf16* const source = ring + stage * kStageRows * kWidth;
        float values[4 * K], first = 0.0f, second = 0.0f;
#pragma unroll
        for (int i = 0; i < kPieces<K>; i++) {
            unsigned words[4], others[4];
            load_piece<K>(words, source, i);
            if constexpr (kAdds) {
                load_piece<K>(others, source + kWidth, i);
#pragma unroll
                for (int j = 0; j < words_of<K>(i); j++) {
                    words[j] = rounded(low(words[j]) + low(others[j]), high(words[j]) + high(others[j]));
                }
                store_piece<K>(sum + begin_of<K>(row), words, i);
            }
#pragma unroll
            for (int j = 0; j < words_of<K>(i); j++) {
                first += values[8 * i + 2 * j] = low(words[j]);
                second += values[8 * i + 2 * j + 1] = high(words[j]);
            }
        }
        fetch(row + kStages * stride, stage);
        // A true division: rows of equal numbers then have exactly that mean, and no variance.
        const float mean = warp_sum(first + second) / kWidth;
        first = second = 0.0f;
#pragma unroll
        for (int j = 0; j < 2 * K; j++) {
            values[2 * j] -= mean, values[2 * j + 1] -= mean;
            first += values[2 * j] * values[2 * j];
            second += values[2 * j + 1] * values[2 * j + 1];
        }
        // A barrier for the compiler: reading the parameters before here takes registers that are needed.
        __syncwarp();
        const float rstd = rsqrtf(warp_sum(first + second) * (1.0f / kWidth) + eps);
#pragma unroll
        for (int i = 0; i < kPieces<K>; i++) {
            unsigned words[4], scale[4], shift[4];
            load_piece<K>(scale, parameters, i);
            load_piece<K>(shift, parameters + kWidth, i);
#pragma unroll
            for (int j = 0; j < words_of<K>(i); j++) {
                words[j] = rounded(values[8 * i + 2 * j] * rstd * low(scale[j]) + low(shift[j]),
                                   values[8 * i + 2 * j + 1] * rstd * high(scale[j]) + high(shift[j]));
            }
            store_piece<K>(y + begin_of<K>(row), words, i);
        }
        if (threadIdx.x % kLanes == 0) {
            mean_out[row] = mean;
            rstd_out[row] = rstd;
        }
    }
}

// dx = rstd * (g - mean(g) - x_hat * mean(g * x_hat)) [+ extra], g = dy * weight; partial sums of dy * x_hat and of dy.
template <int K, bool kAdds>
__global__ void __launch_bounds__(kBackwardWarps<K> * kLanes, 1)
    backward_kernel(const bf16* dy, const bf16* extra, const bf16* x, const float* mean_in, const float* rstd_in,
                    const void* weight, bool is_fp32, bf16* dx, float* partial, int rows) {
    constexpr int kWidth = K * kColumns, kWarps = kBackwardWarps<K>;
    constexpr int kStageRows = kAdds ? 3 : 2, kStages = kBackwardBuffers / kStageRows;
    extern __shared__ uint4 shared[];
    const int warp = threadIdx.x / kLanes;
    bf16* const parameter = reinterpret_cast<bf16*>(shared) + kWarps * kBackwardBuffers * kWidth;
    bf16* const ring = reinterpret_cast<bf16*>(shared) + warp * kBackwardBuffers * kWidth;
    const int stride = gridDim.x * kWarps;
    const auto fetch = [&](int row, int stage) {
        if (row < rows) {
            bf16* const target = ring + stage * kStageRows * kWidth;
            fetch_row<K>(target, x + begin_of<K>(row));
            fetch_row<K>(target + kWidth, dy + begin_of<K>(row));
            if constexpr (kAdds) fetch_row<K>(target + 2 * kWidth, extra + begin_of<K>(row));
        }
        __pipeline_commit();
    };
    float weight_sums[4 * K] = {}, bias_sums[4 * K] = {};
    int row = blockIdx.x * kWarps + warp;
    for (int stage = 0; stage < kStages; stage++) fetch(row + stage * stride, stage);
    stage_parameter<K>(parameter, weight, is_fp32);
    __syncthreads();
    float next_mean = row < rows ? mean_in[row] : 0.0f, next_rstd = row < rows ? rstd_in[row] : 0.0f;
    for (int stage = 0; row < rows; row += stride, stage = stage + 1 == kStages ? 0 : stage + 1) {
        const float mean = next_mean, rstd = next_rstd;
        if (row + stride < rows) {
            next_mean = mean_in[row + stride];
            next_rstd = rstd_in[row + stride];
        }
        __pipeline_wait_prior(kStages - 1);
        const bf16* const source = ring + stage * kStageRows * kWidth;
        float sum = 0.0f, product = 0.0f;  // of g; of g * x_hat
#pragma unroll
        for (int i = 0; i < kPieces<K>; i++) {
            unsigned words[4], gradients[4], scale[4];
            load_piece<K>(words, source, i);
            load_piece<K>(gradients, source + kWidth, i);
            load_piece<K>(scale, parameter, i);
            float piece_product = 0.0f;
#pragma unroll
            for (int j = 0; j < words_of<K>(i); j++) {
                const int k = 8 * i + 2 * j;
                const float first = (low(words[j]) - mean) * rstd, second = (high(words[j]) - mean) * rstd;
                weight_sums[k] += low(gradients[j]) * first;
                weight_sums[k + 1] += high(gradients[j]) * second;
                bias_sums[k] += low(gradients[j]);
                bias_sums[k + 1] += high(gradients[j]);
                const float first_g = low(gradients[j]) * low(scale[j]), second_g = high(gradients[j]) * high(scale[j]);
                sum += first_g + second_g;
                piece_product += first_g * first;
                piece_product += second_g * second;
            }
            product += piece_product;
        }
        sum = warp_sum(sum) * (1.0f / kWidth);
        product = warp_sum(product) * (1.0f / kWidth);
        // A barrier for the compiler: all is read again below, as registers are scarcer than shared memory's bandwidth.
        __syncwarp();
        const float slope = -product * rstd * rstd, shift = -sum * rstd;
#pragma unroll
        for (int i = 0; i < kPieces<K>; i++) {
            unsigned words[4], gradients[4], others[4], scale[4];
            load_piece<K>(words, source, i);
            load_piece<K>(gradients, source + kWidth, i);
            load_piece<K>(scale, parameter, i);
            if constexpr (kAdds) load_piece<K>(others, source + 2 * kWidth, i);
#pragma unroll
            for (int j = 0; j < words_of<K>(i); j++) {
                const float first_g = low(gradients[j]) * low(scale[j]), second_g = high(gradients[j]) * high(scale[j]);
                float first = first_g * rstd + ((low(words[j]) - mean) * slope + shift);
                float second = second_g * rstd + ((high(words[j]) - mean) * slope + shift);
                if constexpr (kAdds) first += low(others[j]), second += high(others[j]);
                words[j] = rounded(first, second);
            }
            store_piece<K>(dx + begin_of<K>(row), words, i);
        }
        fetch(row + kStages * stride, stage);
    }
    __pipeline_wait_prior(0);
    __syncwarp();
    // The sums of a warp (2 * kWidth fp32 numbers) fit where its rows have been, which all lanes have read now.
    constexpr int kStep = kBackwardBuffers * kWidth / 2;
    float* const sums = reinterpret_cast<float*>(shared);
    store_sums<K>(sums + warp * kStep, weight_sums);
    store_sums<K>(sums + warp * kStep + kWidth, bias_sums);
    __syncthreads();
#pragma unroll 1  // all reads at once would take more registers than the rows did
    for (int column = threadIdx.x; column < 2 * kWidth; column += kWarps * kLanes) {
        float total = 0.0f;
#pragma unroll
        for (int i = 0; i < kWarps; i++) total += sums[i * kStep + column];
        partial[static_cast<int64_t>(blockIdx.x) * 2 * kWidth + column] = total;
    }
}

constexpr int kSlices = 16;

// partial [blocks, 2 * width] -> column sums, in fp32 or rounded once. A block takes 32 columns, a warp every kSlices-th row.
__global__ void __launch_bounds__(kSlices* kLanes)
    sum_kernel(const float* partial, void* dweight, void* dbias, bool is_fp32, int width, int blocks) {
    __shared__ float sums[kSlices][kLanes];
    const int lane = threadIdx.x % kLanes, slice = threadIdx.x / kLanes, column = blockIdx.x * kLanes + lane;
    float total = 0.0f;
#pragma unroll 4
    for (int i = slice; i < blocks; i += kSlices) total += partial[static_cast<int64_t>(i) * 2 * width + column];
    sums[slice][lane] = total;
    __syncthreads();
    if (slice > 0) return;
    for (int i = 1; i < kSlices; i++) total += sums[i][lane];
    void* const target = column < width ? dweight : dbias;
    const int place = column < width ? column : column - width;
    if (is_fp32) {
        static_cast<float*>(target)[place] = total;
    } else {
        static_cast<bf16*>(target)[place] = __float2bfloat16_rn(total);
    }
}

// `function` with K as a constant. cudaErrorInvalidValue for widths that have no kernel.
template <typename Function>
int with_width(int k, const Function& function) {
    switch (k) {
#define CASE(K) \
    case K:     \
        return function(std::integral_constant<int, K>{});
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
        CASE(9) CASE(10) CASE(11) CASE(12) CASE(13) CASE(14) CASE(15) CASE(16)
#undef CASE
    }
    return static_cast<int>(cudaErrorInvalidValue);
}

int blocks_for(int64_t rows, int warps, int processors, int per_processor) {
    const int64_t wanted = (rows + warps - 1) / warps, possible = static_cast<int64_t>(processors) * per_processor;
    return static_cast<int>(wanted < possible ? wanted : possible);
}

template <int K, bool kAdds>
int launch_forward(const void* x, const void* residual, const void* weight, const void* bias, bool is_fp32, void* sum, void* y,
                   void* mean, void* rstd, int64_t rows, float eps, int processors, cudaStream_t on) {
    constexpr int kShared = (kForwardWarps * kForwardBuffers + 2) * K * kColumns * static_cast<int>(sizeof(bf16));
    const auto kernel = forward_kernel<K, kAdds>;
    const cudaError_t code = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
    if (code != cudaSuccess) return static_cast<int>(code);
    const int grid = blocks_for(rows, kForwardWarps, processors, kForwardBlocks<K>);
    kernel<<<grid, kForwardWarps * kLanes, kShared, on>>>(
        static_cast<const bf16*>(x), static_cast<const bf16*>(residual), weight, bias, is_fp32, static_cast<bf16*>(sum),
        static_cast<bf16*>(y), static_cast<float*>(mean), static_cast<float*>(rstd), static_cast<int>(rows), eps);
    return static_cast<int>(cudaGetLastError());
}

template <int K, bool kAdds>
int launch_backward(const void* dy, const void* extra, const void* x, const void* mean, const void* rstd, const void* weight,
                    bool is_fp32, void* dx, void* partial, void* dweight, void* dbias, int64_t rows,
                    int processors, cudaStream_t on) {
    constexpr int kWidth = K * kColumns;
    constexpr int kShared = (kBackwardWarps<K> * kBackwardBuffers + 1) * kWidth * static_cast<int>(sizeof(bf16));
    const auto kernel = backward_kernel<K, kAdds>;
    cudaError_t code = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
    if (code != cudaSuccess) return static_cast<int>(code);
    const int grid = blocks_for(rows, kBackwardWarps<K>, processors, 1);
    kernel<<<grid, kBackwardWarps<K> * kLanes, kShared, on>>>(
        static_cast<const bf16*>(dy), static_cast<const bf16*>(extra), static_cast<const bf16*>(x),
        static_cast<const float*>(mean), static_cast<const float*>(rstd), weight, is_fp32, static_cast<bf16*>(dx),
        static_cast<float*>(partial), static_cast<int>(rows));
    code = cudaGetLastError();
    if (code != cudaSuccess) return static_cast<int>(code);
    sum_kernel<<<2 * kWidth / kLanes, kSlices * kLanes, 0, on>>>(
        static_cast<const float*>(partial), dweight, dbias, is_fp32, kWidth, grid);
    return static_cast<int>(cudaGetLastError());
}

}  // namespace

// Device addresses of contiguous matrices [rows, width], aligned to 16 bytes, and of parameters and their gradients, bf16 or
// (is_fp32) fp32. width: 128 times 1 to 16; rows: 1 to 2^30; processors: the device's multiprocessors. Both return a
// CUDA error code.

// residual and sum: null for a norm without an addition.
extern "C" int layer_norm_forward(const void* x, const void* residual, const void* weight, const void* bias, int is_fp32, void* sum,
                                  void* y, void* mean, void* rstd, int64_t rows, int width, float eps, int processors,
                                  void* stream) {
    return with_width(width / kColumns, [&](auto k) {
        const auto launch = residual == nullptr ? launch_forward<k.value, false> : launch_forward<k.value, true>;
        return launch(x, residual, weight, bias, is_fp32 != 0, sum, y, mean, rstd, rows, eps, processors,
                      static_cast<cudaStream_t>(stream));
    });
}

// extra: null, or what is added to dx. `partial` holds processors * 2 * width fp32 numbers.
extern "C" int layer_norm_backward(const void* dy, const void* extra, const void* x, const void* mean, const void* rstd,
                                   const void* weight, int is_fp32, void* dx, void* partial, void* dweight, void* dbias,
                                   int64_t rows, int width, int processors, void* stream) {
    return with_width(width / kColumns, [&](auto k) {
        const auto launch = extra == nullptr ? launch_backward<k.value, false> : launch_backward<k.value, true>;
        return launch(dy, extra, x, mean, rstd, weight, is_fp32 != 0, dx, partial, dweight, dbias, rows, processors,
                      static_cast<cudaStream_t>(stream));
    });
}
