// RMSNorm of bf16 rows, forward and backward, each row read once and written once; on request with the residual addition before it,
// and backward with the gradient that reaches the input, or the sum, on its other way. How rows are read and columns summed: rows.cuh.

#include "../../layer_norm/csrc/rows.cuh"

namespace {

using namespace rows;

// offset + weight in fp32, as all warps of a block read it from shared memory: a lane's columns in fours, the same four of all lanes
// side by side, so that reads meet no bank twice.
template <int K>
__device__ __forceinline__ void stage_scale(float4* shared, const void* weight, bool is_fp32, float offset) {
    for (int i = threadIdx.x; i < K * kLanes; i += blockDim.x) {
        const int four = i / kLanes, column = column_of<K>(four / 2, i % kLanes) + four % 2 * 4;
        float scale[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            scale[j] = offset + (is_fp32 ? static_cast<const float*>(weight)[column + j]
                                         : __bfloat162float(static_cast<const bf16*>(weight)[column + j]));
        }
        shared[i] = make_float4(scale[0], scale[1], scale[2], scale[3]);
    }
}

// The scale of piece i's columns.
template <int K>
__device__ __forceinline__ void load_scale(float (&scale)[8], const float4* shared, int i) {
#pragma unroll
    for (int j = 0; j < words_of<K>(i) / 2; j++) {
        const float4 four = shared[(2 * i + j) * kLanes + threadIdx.x % kLanes];
        scale[4 * j] = four.x, scale[4 * j + 1] = four.y, scale[4 * j + 2] = four.z, scale[4 * j + 3] = four.w;
    }
}

template <int K, bool kAdds>
__global__ void __launch_bounds__(kForwardWarps* kLanes, kForwardBlocks<K>)
    forward_kernel(const bf16* x, const bf16* residual, const void* weight, bool is_fp32, float offset, bf16* sum, bf16* y,
                   float* rstd_out, int rows, float eps) {
    constexpr int kWidth = K * kColumns;
    extern __shared__ uint4 shared[];
    const int warp = threadIdx.x / kLanes;
    bf16* const memory = reinterpret_cast<bf16*>(shared);
    float4* const scales = reinterpret_cast<float4*>(memory + kForwardWarps * kForwardBuffers * kWidth);
    int row = blockIdx.x * kForwardWarps + warp;
    Ring<K, kForwardBuffers, kAdds ? 2 : 1> ring{
        {x, residual, nullptr}, memory + warp * kForwardBuffers * kWidth, rows, static_cast<int>(gridDim.x) * kForwardWarps};
    ring.fill(row);
    stage_scale<K>(scales, weight, is_fp32, offset);
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
                const int k = 8 * i + 2 * j;
                values[k] = low(words[j]), values[k + 1] = high(words[j]);
                first += values[k] * values[k];
                second += values[k + 1] * values[k + 1];
            }
        }
        ring.replace(row);
        const float rstd = rsqrtf(warp_sum(first + second) * (1.0f / kWidth) + eps);
        // A barrier for the compiler: reading the scale before here takes registers that are needed.
        __syncwarp();
#pragma unroll
        for (int i = 0; i < kPieces<K>; i++) {
            unsigned words[4];
            float scale[8];
            load_scale<K>(scale, scales, i);
#pragma unroll
            for (int j = 0; j < words_of<K>(i); j++) {
                const int k = 8 * i + 2 * j;
                words[j] = rounded(values[k] * rstd * scale[2 * j], values[k + 1] * rstd * scale[2 * j + 1]);
            }
            store_piece<K>(y + begin_of<K>(row), words, i);
        }
        if (threadIdx.x % kLanes == 0) rstd_out[row] = rstd;
    }
}

// dx = rstd * (g - x_hat * mean(g * x_hat)) [+ extra], g = dy * scale, x_hat = x * rstd; partial sums of dy * x_hat.
template <int K, bool kAdds>
__global__ void __launch_bounds__(kBackwardWarps<K> * kLanes, 1)
    backward_kernel(const bf16* dy, const bf16* extra, const bf16* x, const float* rstd_in, const void* weight, bool is_fp32,
                    float offset, bf16* dx, float* partial, int rows) {
    constexpr int kWidth = K * kColumns, kWarps = kBackwardWarps<K>;
    extern __shared__ uint4 shared[];
    const int warp = threadIdx.x / kLanes;
    bf16* const memory = reinterpret_cast<bf16*>(shared);
    float4* const scales = reinterpret_cast<float4*>(memory + kWarps * kBackwardBuffers * kWidth);
    int row = blockIdx.x * kWarps + warp;
    Ring<K, kBackwardBuffers, kAdds ? 3 : 2> ring{
        {x, dy, extra}, memory + warp * kBackwardBuffers * kWidth, rows, static_cast<int>(gridDim.x) * kWarps};
    ring.fill(row);
    stage_scale<K>(scales, weight, is_fp32, offset);
    __syncthreads();
    float weight_sums[4 * K] = {};
    float next_rstd = row < rows ? rstd_in[row] : 0.0f;
    for (; row < rows; row += ring.stride) {
        const float rstd = next_rstd;
        if (row + ring.stride < rows) next_rstd = rstd_in[row + ring.stride];
        const bf16* const source = ring.oldest();
        float scaled[4 * K], first_product = 0.0f, second_product = 0.0f;  // g; of g and x_hat
#pragma unroll
        for (int i = 0; i < kPieces<K>; i++) {
            unsigned words[4], gradients[4];
            float scale[8];
            load_piece<K>(words, source, i);
            load_piece<K>(gradients, source + kWidth, i);
            load_scale<K>(scale, scales, i);
#pragma unroll
            for (int j = 0; j < words_of<K>(i); j++) {
                const int k = 8 * i + 2 * j;
                const float first = low(words[j]) * rstd, second = high(words[j]) * rstd;
                weight_sums[k] += low(gradients[j]) * first;
                weight_sums[k + 1] += high(gradients[j]) * second;
                scaled[k] = low(gradients[j]) * scale[2 * j];
                scaled[k + 1] = high(gradients[j]) * scale[2 * j + 1];
                first_product += scaled[k] * first;
                second_product += scaled[k + 1] * second;
            }
        }
        const float slope = -warp_sum(first_product + second_product) * (1.0f / kWidth) * rstd * rstd;
        // A barrier for the compiler: x is read again below, as registers are scarcer than shared memory's bandwidth.
        __syncwarp();
#pragma unroll
        for (int i = 0; i < kPieces<K>; i++) {
            unsigned words[4], others[4];
            load_piece<K>(words, source, i);
            if constexpr (kAdds) load_piece<K>(others, source + 2 * kWidth, i);
#pragma unroll
            for (int j = 0; j < words_of<K>(i); j++) {
                const int k = 8 * i + 2 * j;
                float first = scaled[k] * rstd + low(words[j]) * slope;
                float second = scaled[k + 1] * rstd + high(words[j]) * slope;
                if constexpr (kAdds) first += low(others[j]), second += high(others[j]);
                words[j] = rounded(first, second);
            }
            store_piece<K>(dx + begin_of<K>(row), words, i);
        }
        ring.replace(row);
    }
    __pipeline_wait_prior(0);
    __syncwarp();
    // The sums of a warp fit where its rows have been, which all lanes have read now.
    constexpr int kStep = kBackwardBuffers * kWidth / 2;
    float* const sums = reinterpret_cast<float*>(shared);
    store_sums<K>(sums + warp * kStep, weight_sums);
    __syncthreads();
    add_over_warps<kWarps>(sums, kStep, partial + static_cast<int64_t>(blockIdx.x) * kWidth, kWidth);
}

// Rows of a block's warps and the scale.
template <int K>
constexpr int shared_bytes(int rows) {
    return K * kColumns * (rows * static_cast<int>(sizeof(bf16)) + static_cast<int>(sizeof(float)));
}

template <int K, bool kAdds>
int launch_forward(const void* x, const void* residual, const void* weight, bool is_fp32, float offset, void* sum, void* y,
                   void* rstd, int64_t rows, float eps, int processors, cudaStream_t on) {
    constexpr int kShared = shared_bytes<K>(kForwardWarps * kForwardBuffers);
    const int grid = blocks_for(rows, kForwardWarps, processors, kForwardBlocks<K>);
    return launch_kernel(
        forward_kernel<K, kAdds>, grid, kForwardWarps, kShared, on,
        static_cast<const bf16*>(x), static_cast<const bf16*>(residual), weight, is_fp32, offset, static_cast<bf16*>(sum),
        static_cast<bf16*>(y), static_cast<float*>(rstd), static_cast<int>(rows), eps);
}

template <int K, bool kAdds>
int launch_backward(const void* dy, const void* extra, const void* x, const void* rstd, const void* weight, bool is_fp32,
                    float offset, void* dx, void* partial, void* dweight, int64_t rows, int processors, cudaStream_t on) {
    constexpr int kShared = shared_bytes<K>(kBackwardWarps<K> * kBackwardBuffers);
    const int grid = blocks_for(rows, kBackwardWarps<K>, processors, 1);
    const int code = launch_kernel(
        backward_kernel<K, kAdds>, grid, kBackwardWarps<K>, kShared, on,
        static_cast<const bf16*>(dy), static_cast<const bf16*>(extra), static_cast<const bf16*>(x),
        static_cast<const float*>(rstd), weight, is_fp32, offset, static_cast<bf16*>(dx), static_cast<float*>(partial),
        static_cast<int>(rows));
    return code != 0 ? code : launch_sums(partial, dweight, nullptr, is_fp32, K * kColumns, grid, on);
}

}  // namespace

// Device addresses of contiguous matrices [rows, width], aligned to 16 bytes, and of the weight and its gradient, bf16 or (is_fp32)
// fp32. width: 128 times 1 to 16; rows: 1 to 2^30; processors: the device's multiprocessors. Both return a CUDA error code.

// residual and sum: null for a norm without an addition.
extern "C" int rms_norm_forward(const void* x, const void* residual, const void* weight, int is_fp32, float offset, void* sum,
                                void* y, void* rstd, int64_t rows, int width, float eps, int processors, void* stream) {
    return with_width(width, [&](auto k) {
        const auto launch = residual == nullptr ? launch_forward<k.value, false> : launch_forward<k.value, true>;
        return launch(x, residual, weight, is_fp32 != 0, offset, sum, y, rstd, rows, eps, processors,
                      static_cast<cudaStream_t>(stream));
    });
}

// extra: null, or what is added to dx. `partial` holds processors * width fp32 numbers.
extern "C" int rms_norm_backward(const void* dy, const void* extra, const void* x, const void* rstd, const void* weight, int is_fp32,
                                 float offset, void* dx, void* partial, void* dweight, int64_t rows, int width, int processors,
                                 void* stream) {
    return with_width(width, [&](auto k) {
        const auto launch = extra == nullptr ? launch_backward<k.value, false> : launch_backward<k.value, true>;
        return launch(dy, extra, x, rstd, weight, is_fp32 != 0, offset, dx, partial, dweight, rows, processors,
                      static_cast<cudaStream_t>(stream));
    });
}
