// gelu_tanh in fp32, in the order of torch's kernels: for every kernel that must round as gelu_tanh(gate) * up does.
#pragma once

#include <cuda_bf16.h>

constexpr float kBeta = 0.7978845608028654f;  // sqrt(2 / pi)
constexpr float kKappa = 0.044715f;

// Two at a time: one number alone is converted by the unit of exp and 1 / x, which has a quarter of the conversion pipe's rate.
__device__ __forceinline__ float2 rounded(float first, float second) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
    const unsigned bits = *reinterpret_cast<const unsigned*>(&pair);
    return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u));
}

__device__ __forceinline__ float exp2_approximate(float x) {
    asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(x));
    return x;
}

__device__ __forceinline__ float reciprocal_approximate(float x) {
    asm("rcp.approx.ftz.f32 %0, %0;" : "+f"(x));
    return x;
}

// tanh: what tanhf does for |x| >= 0.6, for every x: 6 instructions instead of 17, without which kernels that also quantise or sum
// wait for arithmetic and not for memory. Below 0.6 the error is that of a number near 1 then (3e-7): no loss where 1 is added.
__device__ __forceinline__ float tanh_of(float x) {
    constexpr float kTwiceLog2E = 2.885390043258667f;
    const float share = reciprocal_approximate(1.0f + exp2_approximate(kTwiceLog2E * fabsf(x)));
    return copysignf(fmaf(share, -2.0f, 1.0f), x);
}

__device__ __forceinline__ float gelu(float x) {
    const float inner = kBeta * (x + kKappa * (x * x * x));
    return 0.5f * x * (1.0f + tanh_of(inner));
}

// (gelu, gelu's derivative), as torch computes them.
__device__ __forceinline__ float2 gelu_and_slope(float x) {
    const float square = x * x;
    const float tanh_inner = tanh_of(kBeta * (x + kKappa * (square * x)));
    const float left = 0.5f * x, right = 1.0f + tanh_inner;
    const float slope = 0.5f * right + left * (1.0f - tanh_inner * tanh_inner) * (kBeta * (1.0f + 3.0f * kKappa * square));
    return make_float2(left * right, slope);
}
