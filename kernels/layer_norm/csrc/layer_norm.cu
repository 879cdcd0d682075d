// LayerNorm of bf16 rows, forward and backward, each row read once and written once; on request with the residual addition before
// it, and backward with the gradient that reaches the input, or the sum, on its other way. How rows are read and columns summed:
// rows.cuh. Statistics are fp32, in two passes: mean, then the sum of squared deviations.

#include "rows.cuh"

namespace {

using namespace rows;

// A parameter, bf16 or fp32 in memory, as bf16 in shared memory: the threads of the block share the work.
template <int K>
__device__ __forceinline__ void stage_parameter(bf16* shared, const void* parameter, bool is_fp32) {
    for (int i = threadIdx.x; i < K * kColumns; i += blockDim.x) {
        shared[i] = is_fp32 ? __float2bfloat16_rn(static_cast<const float*>(parameter)[i]) : static_cast<const bf16*>(parameter)[i];
    }
}

template <int K, bool kAdds>
__global__ void __launch_bounds__(kForwardWarps* kLanes, kForwardBlocks<K>)
    forward_kernel(const bf16* x, const bf16* residual, const void* weight, const void* bias, bool is_fp32, bf16* sum, bf16* y,
                   float* mean_out, float* rstd_out, int rows, float eps) {
    constexpr int kWidth = K * kColumns;
    extern __shared__ uint4 shared[];
    const int warp = threadIdx.x / kLanes;
    bf16* const memory = reinterpret_cast<bf16*>(shared);
    bf16* const parameters = memory + kForwardWarps * kForwardBuffers * kWidth;
    int row = blockIdx.x * kForwardWarps + warp;
    Ring<K, kForwardBuffers, kAdds ? 2 : 1> ring{
        {x, residual, nullptr}, memory + warp * kForwardBuffers * kWidth, rows, static_cast<int>(gridDim.x) * kForwardWarps};
    ring.fill(row);
    stage_parameter<K>(parameters, weight, is_fp32);
    stage_parameter<K>(parameters + kWidth, bias, is_fp32);
    __syncthreads();
    for (; row < rows; row += ring.stride) {
        const bf16* const source = ring.oldest();
        float values[4 * K], first = 0.0f, second = 0.0f;
#pragma unroll
        for (int i = 0; i < kPieces<K>; i++) {
            unsigned words[4];
            load_summed<K, kAdds>(words, source, sum + begin_of<K>(row), i);
#pragma unroll
            for (int j = 0; j < words_of<K>(i); j++) {
                first += values[8 * i + 2 * j] = low(words[j]);
                second += values[8 * i + 2 * j + 1] = high(words[j]);
            }
        }
        ring.replace(row);
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
    extern __shared__ uint4 shared[];
    const int warp = threadIdx.x / kLanes;
    bf16* const memory = reinterpret_cast<bf16*>(shared);
    bf16* const parameter = memory + kWarps * kBackwardBuffers * kWidth;
    int row = blockIdx.x * kWarps + warp;
    Ring<K, kBackwardBuffers, kAdds ? 3 : 2> ring{
        {x, dy, extra}, memory + warp * kBackwardBuffers * kWidth, rows, static_cast<int>(gridDim.x) * kWarps};
    ring.fill(row);
    float weight_sums[4 * K] = {}, bias_sums[4 * K] = {};
    stage_parameter<K>(parameter, weight, is_fp32);
    __syncthreads();
    float next_mean = row < rows ? mean_in[row] : 0.0f, next_rstd = row < rows ? rstd_in[row] : 0.0f;
    for (; row < rows; row += ring.stride) {
        const float mean = next_mean, rstd = next_rstd;
        if (row + ring.stride < rows) {
            next_mean = mean_in[row + ring.stride];
            next_rstd = rstd_in[row + ring.stride];
        }
        const bf16* const source = ring.oldest();
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
        ring.replace(row);
    }
    __pipeline_wait_prior(0);
    __syncwarp();
    // The sums of a warp (2 * kWidth fp32 numbers) fit where its rows have been, which all lanes have read now.
    constexpr int kStep = kBackwardBuffers * kWidth / 2;
    float* const sums = reinterpret_cast<float*>(shared);
    store_sums<K>(sums + warp * kStep, weight_sums);
    store_sums<K>(sums + warp * kStep + kWidth, bias_sums);
    __syncthreads();
    add_over_warps<kWarps>(sums, kStep, partial + static_cast<int64_t>(blockIdx.x) * 2 * kWidth, 2 * kWidth);
}

template <int K, bool kAdds>
int launch_forward(const void* x, const void* residual, const void* weight, const void* bias, bool is_fp32, void* sum, void* y,
                   void* mean, void* rstd, int64_t rows, float eps, int processors, cudaStream_t on) {
    constexpr int kShared = (kForwardWarps * kForwardBuffers + 2) * K * kColumns * static_cast<int>(sizeof(bf16));
    const int grid = blocks_for(rows, kForwardWarps, processors, kForwardBlocks<K>);
    return launch_kernel(
        forward_kernel<K, kAdds>, grid, kForwardWarps, kShared, on,
        static_cast<const bf16*>(x), static_cast<const bf16*>(residual), weight, bias, is_fp32, static_cast<bf16*>(sum),
        static_cast<bf16*>(y), static_cast<float*>(mean), static_cast<float*>(rstd), static_cast<int>(rows), eps);
}

template <int K, bool kAdds>
int launch_backward(const void* dy, const void* extra, const void* x, const void* mean, const void* rstd, const void* weight,
                    bool is_fp32, void* dx, void* partial, void* dweight, void* dbias, int64_t rows,
                    int processors, cudaStream_t on) {
    constexpr int kWidth = K * kColumns;
    constexpr int kShared = (kBackwardWarps<K> * kBackwardBuffers + 1) * kWidth * static_cast<int>(sizeof(bf16));
    const int grid = blocks_for(rows, kBackwardWarps<K>, processors, 1);
    const int code = launch_kernel(
        backward_kernel<K, kAdds>, grid, kBackwardWarps<K>, kShared, on,
        static_cast<const bf16*>(dy), static_cast<const bf16*>(extra), static_cast<const bf16*>(x),
        static_cast<const float*>(mean), static_cast<const float*>(rstd), weight, is_fp32, static_cast<bf16*>(dx),
        static_cast<float*>(partial), static_cast<int>(rows));
    return code != 0 ? code : launch_sums(partial, dweight, dbias, is_fp32, kWidth, grid, on);
}

}  // namespace

// Device addresses of contiguous matrices [rows, width], aligned to 16 bytes, and of parameters and their gradients, bf16 or
// (is_fp32) fp32. width: 128 times 1 to 16; rows: 1 to 2^30; processors: the device's multiprocessors. Both return a
// CUDA error code.

// residual and sum: null for a norm without an addition.
extern "C" int layer_norm_forward(const void* x, const void* residual, const void* weight, const void* bias, int is_fp32, void* sum,
                                  void* y, void* mean, void* rstd, int64_t rows, int width, float eps, int processors,
                                  void* stream) {
    return with_width(width, [&](auto k) {
        const auto launch = residual == nullptr ? launch_forward<k.value, false> : launch_forward<k.value, true>;
        return launch(x, residual, weight, bias, is_fp32 != 0, sum, y, mean, rstd, rows, eps, processors,
                      static_cast<cudaStream_t>(stream));
    });
}

// extra: null, or what is added to dx. `partial` holds processors * 2 * width fp32 numbers.
extern "C" int layer_norm_backward(const void* dy, const void* extra, const void* x, const void* mean, const void* rstd,
                                   const void* weight, int is_fp32, void* dx, void* partial, void* dweight, void* dbias,
                                   int64_t rows, int width, int processors, void* stream) {
    return with_width(width, [&](auto k) {
        const auto launch = extra == nullptr ? launch_backward<k.value, false> : launch_backward<k.value, true>;
        return launch(dy, extra, x, mean, rstd, weight, is_fp32 != 0, dx, partial, dweight, dbias, rows, processors,
                      static_cast<cudaStream_t>(stream));
    });
}
