// gelu_tanh in fp32, in the order of torch's kernels: for every kernel that must round as gelu_tanh(gate) * up does.
#pragma once

#include <cuda_bf16.h>

constexpr float kBeta = 0.7978845608028654f;  // sqrt(2 / pi)
constexpr float kKappa = 0.044715f;

__device__ __forceinline__ float rounded(float value) { return __bfloat162float(__float2bfloat16_rn(value)); }

__device__ __forceinline__ float gelu(float x) {
    const float inner = kBeta * (x + kKappa * (x * x * x));
    return 0.5f * x * (1.0f + tanhf(inner));
}

// (gelu, gelu's derivative), as torch computes them.
__device__ __forceinline__ float2 gelu_and_slope(float x) {
    const float square = x * x;
    const float tanh_inner = tanhf(kBeta * (x + kKappa * (square * x)));
    const float left = 0.5f * x, right = 1.0f + tanh_inner;
    const float slope = 0.5f * right + left * (1.0f - tanh_inner * tanh_inner) * (kBeta * (1.0f + 3.0f * kKappa * square));
    return make_float2(left * right, slope);
}
