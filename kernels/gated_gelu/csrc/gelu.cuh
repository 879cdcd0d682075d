// gelu_tanh in fp32, in the order of torch's kernels: for every kernel that must round as gelu_tanh(gate) * up does.
#pragma once

#include <cuda_bf16.h>

constexpr float kBeta = 0.7978845608028654f;  // sqrt(2 / pi)
constexpr float kKappa = 0.044715f;

__device__ __forceinline__ float rounded(float value) { return __bfloat162float(__float2bfloat16_rn(value)); }

__device__ __forceinline__ float exp2_approximate(float x) {
    asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(x));
    return x;
}

__device__ __forceinline__ float reciprocal_approximate(float x) {
    asm("rcp.approx.ftz.f32 %0, %0;" : "+f"(x));
    return x;
}

// tanh. `kIsShort`: what tanhf does for |x| >= 0.6 for every x, 6 instructions instead of 17. Below 0.6 the error is that of a
// number near 1 then (3e-7), which is no loss where 1 is added.
template <bool kIsShort>
__device__ __forceinline__ float tanh_of(float x) {
    if constexpr (!kIsShort) return tanhf(x);
    constexpr float kTwiceLog2E = 2.885390043258667f;
    const float share = reciprocal_approximate(1.0f + exp2_approximate(kTwiceLog2E * fabsf(x)));
    return copysignf(fmaf(share, -2.0f, 1.0f), x);
}

template <bool kIsShort = false>
__device__ __forceinline__ float gelu(float x) {
    const float inner = kBeta * (x + kKappa * (x * x * x));
    return 0.5f * x * (1.0f + tanh_of<kIsShort>(inner));
}

// (gelu, gelu's derivative), as torch computes them.
template <bool kIsShort = false>
__device__ __forceinline__ float2 gelu_and_slope(float x) {
    const float square = x * x;
    const float tanh_inner = tanh_of<kIsShort>(kBeta * (x + kKappa * (square * x)));
    const float left = 0.5f * x, right = 1.0f + tanh_inner;
    const float slope = 0.5f * right + left * (1.0f - tanh_inner * tanh_inner) * (kBeta * (1.0f + 3.0f * kKappa * square));
    return make_float2(left * right, slope);
}
